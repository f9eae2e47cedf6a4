"""Runs of TRL's trainer and of ours with the same options, and everything in which they differ."""

import types
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import trl_runs

from fused_grpo.trainer import GRPOConfig, GRPOTrainer

PARAMETERS, METRICS = 5e-6, 1e-4
# Ours are compared by name alone: what the clock says, and an estimate that ours does not make.
NOT_COMPARED = (*trl_runs.CLOCKED, "total_flos")


def with_tools(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same completions, of which every third token from the second on is of an environment."""
    rollouts = trl_runs.completions(prompts, trainer)
    masks = [[int(place % 3 != 1) for place in range(len(ids))] for ids in rollouts["completion_ids"]]
    return {**rollouts, "env_mask": masks}


def compare(
    trl: types.ModuleType, changes: Mapping[str, Any] = MappingProxyType({}), but: Sequence[str] = (), **options: Any
) -> None:
    """Compare everything, with `changes` of our options alone, `but` some metrics."""
    shared = {"max_steps": 10, "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 2}
    options = {**shared, "use_vllm": False, "model": trl_runs.saved_model(), **options}
    trl_parameters, trl_log = trl_runs.run(trl.GRPOTrainer, **options)
    parameters, log = trl_runs.run(
        GRPOTrainer, config_class=GRPOConfig, **{"skip_zero_advantages": False, **options, **changes}
    )
    far = {name: (parameters[name] - value).abs().max().item() for name, value in trl_parameters.items()}
    print(f"parameters: {max(far.values()):.1e} ({max(far, key=far.get)})")
    metrics = [entry for entry in log if "loss" in entry or "train_loss" in entry]
    apart: dict[str, float] = {}
    for given, wanted in zip(metrics, trl_log, strict=True):
        for name in wanted:
            assert name in given, f"{name} of step {wanted['step']} is not logged; there are {sorted(given)}"
            if not any(excluded in name for excluded in (*NOT_COMPARED, *but)):
                apart[name] = max(apart.get(name, 0.0), difference(given[name], wanted[name]))
    worst = sorted(apart, key=apart.get, reverse=True)[:3]
    print("metrics:", ", ".join(f"{name} {apart[name]:.1e}" for name in worst))
    assert {name: value for name, value in far.items() if value > PARAMETERS} == {}
    assert {name: value for name, value in apart.items() if value > METRICS} == {}


def difference(one: float | None, other: float | None) -> float:
    """Relative, absolute below 1; infinite where only one is a number."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / max(1.0, abs(other))
