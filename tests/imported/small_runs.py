"""A trainer that is made and run in a fifth of a second, as a user's script makes it: tests/hostile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

SHAPE = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 1, "pad_token_id": 0}
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
ARGUMENTS = ("eval_dataset", "callbacks", "optimizers", "peft_config", "processing_class")


def model_of(kind: Any = Qwen2ForCausalLM, **options: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = kind(Qwen2Config(**{**SHAPE, "tie_word_embeddings": False, **options}))
    return model


def places(completions: list[Any], **columns: Any) -> list[float]:
    """Rewards that differ."""
    return [float(index) for index in range(len(completions))]


def trainer_in(
    folder: Path,
    model: Any = None,
    *,
    reward: Any = places,
    rows: Any = ROWS,
    kind: Callable[..., GRPOTrainer] = GRPOTrainer,
    **options: Any,
) -> GRPOTrainer:
    """`options` of the run, and arguments of the trainer."""
    arguments = {"processing_class": build_tokenizer()}
    arguments |= {name: options.pop(name) for name in ARGUMENTS if name in options}
    defaults = {"output_dir": str(folder / "run"), "per_device_train_batch_size": 2, "num_generations": 2}
    defaults |= {"max_steps": 2, "max_completion_length": 2, "use_vllm": False, "save_strategy": "no"}
    args = GRPOConfig(**{**defaults, "learning_rate": 0.1, "logging_steps": 1, **options})
    return kind(model_of() if model is None else model, reward, args, rows, **arguments)


def at(event: str, function: Callable[..., Any]) -> TrainerCallback:
    """A callback that calls `function(model, state)` at that event."""

    def call(args: Any, state: Any, control: Any, **given: Any) -> None:
        function(given["model"], state)

    callback = TrainerCallback()
    setattr(callback, event, call)
    return callback
