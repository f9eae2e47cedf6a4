"""What a step's rollouts say about the run, under the names that TRL's users plot."""

from __future__ import annotations

from statistics import fmean

import torch

from fused_grpo.trainer.advantages import nanstd
from fused_grpo.trainer.scoring import ScoredRollouts

# From the loss op's names to TRL's.
LOSS_METRICS = {
    "clip_ratio_low": "clip_ratio/low_mean",
    "clip_ratio_high": "clip_ratio/high_mean",
    "clip_ratio_region": "clip_ratio/region_mean",
    "sampling_difference_mean": "sampling/sampling_logp_difference/mean",
    "sampling_difference_max": "sampling/sampling_logp_difference/max",
}


def rollout_metrics(scored: ScoredRollouts) -> dict[str, float]:
    """Reward and length metrics of one effective batch."""
    rollouts = scored.rollouts
    spread = nanstd(scored.rewards.view(-1, rollouts.num_generations))
    lengths = torch.tensor([len(ids) for ids in rollouts.completion_ids], dtype=torch.float32)
    clipped = torch.tensor([reason == "length" for reason in rollouts.finish_reasons])
    metrics = {
        "reward": scored.rewards.nanmean(),
        "reward_std": spread.mean(),
        "frac_reward_zero_std": (spread < 1e-6).float().mean(),  # equal up to rounding: nothing to learn from
    }
    for name, values in zip(scored.reward_names, scored.per_function.unbind(1), strict=True):
        known = values[~values.isnan()]
        metrics[f"rewards/{name}/mean"] = known.mean()
        metrics[f"rewards/{name}/std"] = known.std() if len(known) > 1 else torch.zeros(())
    metrics |= {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": clipped.float().mean(),
    }
    return {name: value.item() for name, value in metrics.items()}


def mean_over_processes(parts: list[dict[str, float]]) -> dict[str, float]:
    """Every process has as many completions; the least and greatest lengths are of all of them."""
    merge = {"completions/min_length": min, "completions/max_length": max}
    return {name: merge.get(name, fmean)([part[name] for part in parts]) for name in parts[0]}


def rename_loss_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The loss op's metrics under TRL's names."""
    return {LOSS_METRICS.get(name, name): value for name, value in metrics.items()}
