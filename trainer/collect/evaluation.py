"""The result of an evaluation, and the names that its numbers have in different places.

`GRPOTrainer.evaluate` returns all of them as transformers does, `<prefix>_<metric>`, and `<prefix>_<set>_<metric>`
where eval sets have names. `metrics.jsonl` and `TrainResult` have the mean rewards, as `eval/<metric>` and `<metric>`.

`eval_loss` is there as in TRL: the loss of a step with these completions, on policy, without the correction for the
sampler. That is about 0 plus the KL term less the entropy bonus, whatever the policy is: the metric to choose a model
by is `eval_reward`. Where it is 0 for certain (one completion per prompt, no such term), none goes through the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from transformers.trainer_utils import speed_metrics

from fused_grpo.errors import InputError
from fused_grpo.trainer.types import EffectiveBatch


class Evaluation(NamedTuple):
    """The evaluation of one set."""

    metrics: dict[str, float]  # names of `rollout_metrics`
    num_prompts: int
    started: float  # by time.time
    batch: EffectiveBatch  # of this rank

    def named(self, prefix: str) -> dict[str, float]:
        """All numbers as `<prefix>_<metric>`, with `<prefix>_runtime` (s), `_samples_per_second` (prompts) and
        `_steps_per_second` (generate calls)."""
        speed: dict[str, float] = speed_metrics(prefix, self.started, num_samples=self.num_prompts, num_steps=1)
        kept = {name: value for name, value in self.metrics.items() if not name.startswith("time/")}
        return {f"{prefix}_{name}": value for name, value in kept.items()} | speed

    def rewards(self, names: Sequence[str], *, of_set: str) -> dict[str, float]:
        """The mean reward, and that of each of the functions `names`, under their `reward_keys`."""
        return dict(zip(reward_keys(names, of_set), map(self.metrics.__getitem__, reward_keys(names)), strict=True))


def reward_keys(names: Sequence[str], of_set: str = "") -> list[str]:
    """ "reward" and "rewards/<function>/mean", after "<set>_" where the set has a name."""
    keys = ["reward", *(f"rewards/{name}/mean" for name in names)]
    return [f"{of_set}_{key}" if of_set else key for key in keys]


def mean_rewards(metrics: Mapping[str, float], sets: Iterable[str], names: Sequence[str]) -> dict[str, float]:
    """The mean rewards among `metrics`, which begin with "eval_": what `TrainResult` has."""
    return {key: metrics[f"eval_{key}"] for of_set in sets for key in reward_keys(names, of_set)}


def check_best_metric(name: str | None, metrics: Mapping[str, float]) -> None:
    """Check that an evaluation has the metric that `metric_for_best_model` names, with or without "eval_".

    Raises:
        InputError: it does not.
    """
    if name is not None and not {name, f"eval_{name}"} & metrics.keys():
        raise InputError(
            f"got metric_for_best_model={name!r}, want a metric of an evaluation: {_some(metrics)}; "
            "fix: metric_for_best_model='eval_reward', greater_is_better=True"
        )


def _some(metrics: Iterable[str]) -> str:
    return ", ".join(name for name in metrics if "reward" in name or "length" in name)
