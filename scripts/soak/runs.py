"""The run that is tried: the real trainer on the built-in task, with a model made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rewards import Digits
from transformers import PreTrainedModel, Qwen2ForCausalLM

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints
from fused_grpo.trainer.recipes.arithmetic import build_model_config, build_splits, build_tokenizer
from fused_grpo.trainer.rewards import isolated

FRAGILE = f"{Path(__file__).with_name('rewards.py')}:fragile"


def make_model() -> PreTrainedModel:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(build_model_config(build_tokenizer()))


def make_trainer(output_dir: Path, rewards: list[Any], **options: Any) -> GRPOTrainer:
    """A run with reward faults, which goes on from the newest whole checkpoint where there is any."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "save_total_limit": 3,
        "reward_failure": "drop",
        "logging_steps": 1000,
    }
    # A trainer that ended before its first checkpoint has left its logs.
    goes_on = {"resume_from_checkpoint": True} if checkpoints(output_dir) else {"overwrite_output_dir": True}
    args = GRPOConfig(str(output_dir), **{**defaults, **goes_on, **options})
    rows = build_splits().train[::37]
    return GRPOTrainer(make_model(), rewards, args, rows, processing_class=build_tokenizer())


def make_rewards(*, rate: float, kinds: tuple[str, ...]) -> list[Any]:
    """One in this process, one in a process of its own."""
    worker = isolated(FRAGILE, timeout=10.0, on_failure=None)
    return [Digits(rate=rate, kinds=kinds, worker=worker), worker]


def damage_newest(output_dir: Path) -> bool:
    """Cut a byte off the newest checkpoint's weights, where there is another one to fall back to."""
    found = checkpoints(output_dir)
    if len(found) < 2:
        return False
    weights = found[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    return True
