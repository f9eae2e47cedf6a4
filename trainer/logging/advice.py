"""Warnings with a fix: what makes a run learn little or nothing although nothing fails.

`at_start` reads the options, `Advice` the metrics of each step. Each warning is given once. All thresholds are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.formatting import short_number
from fused_grpo.trainer.logging.run_log import metric

TRUNCATED_STEPS, TRUNCATED_SHARE = 3, 0.5
EQUAL_STEPS = 10
GROWTH_STEPS, GROWTH, LEAST_DIFFERENCE = 10, 3.0, 0.01  # steps of each mean, factor between them, nats
THINKING_TOKENS = 2048  # fewer are seldom enough
SUGGESTED_PROMPTS = 32  # prompts of an optimizer step, as in the recipes


def at_start(args: GRPOConfig, *, processes: int, corrected: bool, thinks: bool = False) -> list[str]:
    """What the options alone say.

    Args:
        args: the options of the run.
        processes: number of processes.
        corrected: whether the loss corrects for the difference between sampler and trainer.
        thinks: whether the model's chat template is that of a model that thinks before it answers.
    """
    found = []
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    if sequences <= args.num_generations:
        steps = -(-SUGGESTED_PROMPTS * args.num_generations // (args.per_device_train_batch_size * processes))
        found.append(
            f"each optimizer step learns from {sequences / args.num_generations:.3g} prompt, so updates are noisy; "
            f"fix: gradient_accumulation_steps={steps} for {SUGGESTED_PROMPTS} prompts"
        )
    no_thinking = (args.chat_template_kwargs or {}).get("enable_thinking") is False
    if thinks and not no_thinking and args.max_completion_length < THINKING_TOKENS:
        found.append(
            f"this model thinks before it answers, and max_completion_length={args.max_completion_length} cuts most of "
            f"its completions; fix: max_completion_length={THINKING_TOKENS} or more, or "
            'chat_template_kwargs={"enable_thinking": false} where the template has it'
        )
    cuts = {"top_p": (args.top_p or 1.0) < 1.0, "top_k": bool(args.top_k), "min_p": bool(args.min_p)}
    if corrected and any(cuts.values()) and args.sampling_support == "off":
        names = " and ".join(f"{name}={getattr(args, name)}" for name, is_set in cuts.items() if is_set)
        found.append(
            f"with {names} the sampler's log-probs are normalised over the tokens that it keeps, the trainer's over "
            "all: the sampling correction is biased, and the check of the weight sync is off; fix: "
            "sampling_support='auto', which trains on the tokens that are kept"
        )
    return found


class Advice:
    """Reads the metrics of each optimizer step."""

    def __init__(self, args: GRPOConfig) -> None:
        self.args, self.given = args, set[str]()
        self.truncated = deque[float](maxlen=TRUNCATED_STEPS)
        self.equal_steps = 0
        self.first_differences = list[float]()
        self.differences = deque[float](maxlen=GROWTH_STEPS)

    def __call__(self, metrics: Mapping[str, object]) -> list[str]:
        """The warnings that this step is the first to justify."""
        found = {
            "truncated": self._truncated(metric(metrics, "completions/clipped_ratio")),
            "equal": self._equal(metric(metrics, "groups_with_equal_rewards")),
            "difference": self._difference(metric(metrics, "sampling/sampling_logp_difference/mean")),
        }
        new = {name: text for name, text in found.items() if text is not None and name not in self.given}
        self.given |= new.keys()
        return list(new.values())

    def _truncated(self, share: float | None) -> str | None:
        self.truncated.extend([] if share is None else [share])
        mean = sum(self.truncated) / len(self.truncated) if self.truncated else 0.0
        if len(self.truncated) < TRUNCATED_STEPS or mean <= TRUNCATED_SHARE:
            return None
        limit = self.args.max_completion_length
        return (
            f"{mean:.0%} of the completions of {TRUNCATED_STEPS} steps were cut at max_completion_length={limit}, "
            f"before they could give an answer; fix: max_completion_length={4 * limit} (thinking models need "
            "thousands of tokens), or a prompt that asks for short answers"
        )

    def _equal(self, share: float | None) -> str | None:
        self.equal_steps = self.equal_steps + 1 if share == 1.0 else 0
        if self.equal_steps < EQUAL_STEPS or self.args.distillation_coef > 0:
            return None
        return (
            f"in {EQUAL_STEPS} steps all completions of each prompt got the same reward, so nothing was learnt; fix: "
            "look at rollouts.jsonl: is the reward what it should be, are prompts too easy or too hard? Then "
            "dynamic_sampling=2 draws others in their place"
        )

    def _difference(self, mean: float | None) -> str | None:
        if mean is None:
            return None
        self.differences.append(mean)
        if len(self.first_differences) < GROWTH_STEPS:
            self.first_differences.append(mean)
        before, now = (sum(values) / GROWTH_STEPS for values in (self.first_differences, self.differences))
        if now < LEAST_DIFFERENCE or now < GROWTH * before:
            return None
        return (
            f"the log-probs of sampler and trainer differ by {short_number(now)} nats on average, {now / before:.1f} "
            "times as much as in the first steps: what is trained and what is sampled grow apart; fix: a lower "
            "learning_rate, fewer num_iterations or steps_per_generation, or the engine in fp32"
        )
