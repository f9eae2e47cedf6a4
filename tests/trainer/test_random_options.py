"""Options drawn together at random: they are refused before the first step, or the run is one that a restart and
the cut into micro-batches leave as it is. `--full` draws four times as many."""

import dataclasses
import math
import random
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_runs
from clocked import read_log
from datasets import Dataset
from peft import LoraConfig

from fused_grpo.errors import DataError, InputError, UnsupportedError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints

Weights = dict[str, torch.Tensor]
Records = list[dict[str, Any]]  # the metrics of each step
STEPS = 4
# What is drawn beside every choice that a type names; the default is drawn most often.
VALUES: dict[str, list[Any]] = {
    **{"num_generations": [2], "num_iterations": [2, 3], "steps_per_generation": [2, 4]},
    **{"gradient_accumulation_steps": [2, 3], "max_tokens_per_micro_batch": [40], "max_completion_length": [1, 16]},
    **{"share_prompts": [True, False], "skip_zero_advantages": [False], "chunk_bytes": [4096], "seed": [7]},
    **{"gradient_checkpointing": [False], "activation_checkpointing": [True], "batch_invariant": [True]},
    **{"beta": [0.04], "sync_ref_model": [True], "ref_model_sync_steps": [1, 2], "distillation_coef": [0.1]},
    **{"epsilon_high": [0.28], "delta": [1.5], "top_entropy_quantile": [0.3, 0.8], "entropy_coef": [0.01]},
    **{"use_adaptive_entropy": [True], "mask_truncated_completions": [True], "off_policy_mask_threshold": [0.05]},
    **{"use_bias_correction_kl": [True], "clip_cov_ratio": [0.01], "kl_cov_ratio": [0.01], "log_ratio_penalty": [0.01]},
    **{"reward_weights": [[0.3, 1.7]], "variance_report": [True], "dynamic_sampling": [1, 2]},
    **{"scale_rewards": ["batch", "none"], "importance_sampling_level": ["sequence"]},
    **{"temperature": [0.7, 1.3], "top_p": [0.9], "top_k": [5], "min_p": [0.05], "repetition_penalty": [1.1]},
    **{"optim": ["adamw_torch", "sgd", "adafactor", "adagrad"], "max_grad_norm": [None, 0.1], "weight_decay": [0.1]},
    **{"lr_scheduler_type": ["cosine", "polynomial"], "warmup_steps": [2], "eval_steps": [1, 0.3]},
    **{"num_train_epochs": [0.7, 1.0], "logging_steps": [3], "save_total_limit": [1], "rollouts_kept_steps": [1, 2]},
}
APART = ("vllm", "log_level", "long_prompts", "rollout_failure", "logprob_mismatch", "eval_strategy", "save_strategy")
# What depends on the cut, and a name.
NOT_COMPARED = {"recomputed_fraction", "sampling/bit_equal_fraction", "rollout_engine"}


def choices(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) for choice in choices(part)]


def drawn(draw: random.Random) -> dict[str, Any]:
    types = typing.get_type_hints(GRPOConfig)
    named = {one.name: choices(types[one.name]) for one in dataclasses.fields(GRPOConfig)}
    named = {name: values for name, values in named.items() if values and not name.startswith(APART)} | VALUES
    often = draw.choice([0.05, 0.1, 0.2])
    return {name: draw.choice(values) for name, values in named.items() if draw.random() < often}


async def coarse(completion_ids, **columns) -> list[float | None]:
    return [None if sum(ids) % 5 == 0 else len(ids) / 4 for ids in completion_ids]


def completed(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func: what it returns depends on prompt and step, and on no other sample."""
    given, longest = trl_runs.completions(prompts, trainer), trainer.args.max_completion_length
    return given | {"completion_ids": [ids[:longest] for ids in given["completion_ids"]]}


def trainer(output: Path, options: dict[str, Any], kind: int, *, parts: int = 1) -> GRPOTrainer:
    """`parts` is the number of micro-batches in the place of one."""
    steps = options.get("steps_per_generation")
    args = GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        use_vllm=False,
        model_init_kwargs={"dtype": "float32"},
        save_steps=1,
        **{"max_steps": STEPS, "num_generations": 4, "max_completion_length": 8, "lr_scheduler_type": "constant"}
        | {"learning_rate": 3e-3, "adam_epsilon": 1e-3}  # gradients that are rounding are not to be steps
        | options
        | {"per_device_train_batch_size": 4 // parts, "steps_per_generation": steps and steps * parts}
        | {"gradient_accumulation_steps": options.get("gradient_accumulation_steps", 1) * parts},
    )
    rows = Dataset.from_list([{"prompt": x, "difficulty": k % 3} for k, x in enumerate(trl_runs.PROMPTS)])
    return GRPOTrainer(
        trl_runs.saved_model(),
        [trl_runs.reward, coarse] if args.reward_weights else [trl_runs.reward],
        args,
        rows.to_iterable_dataset() if kind % 4 == 1 and args.curriculum == "off" else rows,
        eval_dataset={1: rows.select(range(3)), 4: {"a": rows.select([0]), "b": rows.select([4])}}.get(kind % 6),
        rollout_func=completed if kind % 4 == 3 else None,
        processing_class=trl_runs.tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "down_proj"]) if kind % 5 == 1 else None,
        teacher_model="self" if args.distillation_coef else None,
    )


def outcome(trained: GRPOTrainer) -> tuple[Weights, Records]:
    records = read_log(trained.output_dir / "metrics.jsonl")
    return {name: weight.detach().clone() for name, weight in trained.model.state_dict().items()}, records


def check_resumed(weights: Weights, records: Records, again: GRPOTrainer) -> None:
    again.train(resume_from_checkpoint=checkpoints(again.output_dir)[0])
    resumed, rewritten = outcome(again)
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)
    assert rewritten[: len(records)] == records  # behind the last step it evaluates again


def check_cut(weights: Weights, records: Records, in_parts: GRPOTrainer) -> None:
    in_parts.train()
    others, cut_records = outcome(in_parts)
    for name in weights:
        torch.testing.assert_close(others[name], weights[name], rtol=0, atol=3e-4)
    for expected, record in zip(records, cut_records, strict=True):
        assert record.keys() == expected.keys()
        for name in record.keys() - NOT_COMPARED:
            want, got = (math.nan if one[name] is None else one[name] for one in (expected, record))
            assert got == pytest.approx(want, rel=2e-3, abs=2e-3, nan_ok=True), name


@pytest.mark.filterwarnings("ignore")
def test_any_options_are_refused_or_resumed_and_cut_alike(tmp_path, portion):
    trained = 0
    for seed in range(portion(32)):
        options = drawn(random.Random(seed))
        print("seed", seed, options)  # of a failure
        try:
            first = trainer(tmp_path / f"{seed}", options, seed)
        except (DataError, InputError, UnsupportedError):
            continue
        first.train()
        whole = outcome(first)
        check_resumed(*whole, trainer(tmp_path / f"{seed}", options, seed))
        check_cut(*whole, trainer(tmp_path / f"{seed}-cut", options, seed, parts=2))
        trained += 1
    assert trained >= portion(32) // 2
