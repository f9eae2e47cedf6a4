"""`Collector`: from prompts to a scored batch that the optimizer can go through. One `generate` call each time.

Advantages are taken over whole groups, before anything is cut. Groups that a failed reward function dropped, and with
`dynamic_sampling` those whose rewards are all equal, are no part of the batch. Truncated completions, with
`mask_truncated_completions`, stay in it and are counted, but have no token to learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from fused_grpo.errors import RewardError
from fused_grpo.trainer.batching.rollout_buffer import RolloutBuffer, split_groups
from fused_grpo.trainer.collect.advantages import multi_objective_advantages, nanstd
from fused_grpo.trainer.collect.groups import choose_groups, join, num_groups
from fused_grpo.trainer.collect.prefetch import Ahead, finished, rollouts_as_tensors, rollouts_from_tensors
from fused_grpo.trainer.collect.rollout_metrics import EQUAL_REWARDS, RolloutFacts, rollout_metrics
from fused_grpo.trainer.collect.scoring import ScoredRollouts, score_rollouts
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import Row
from fused_grpo.trainer.data.prompt_sampler import PromptSampler
from fused_grpo.trainer.data.prompts import encode_prompts
from fused_grpo.trainer.distributed.failures import anywhere, together
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.response_checks import complete
from fused_grpo.trainer.logging.run_output import Phases
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.rewards.calling import in_thread
from fused_grpo.trainer.types import EffectiveBatch, Rollouts, SamplingParams


class Collector:
    """Draws prompts, has them completed, and scores the completions."""

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        sampler: PromptSampler,
        rewards: Rewards,
        tokenizer: Any,
        *,
        vocab_size: int,
    ) -> None:
        self.args, self.accelerator, self.sampler = args, accelerator, sampler
        self.rewards, self.tokenizer, self.vocab_size = rewards, tokenizer, vocab_size
        self.generate_calls = 0
        self.ahead: Ahead | None = None

    def collect(
        self,
        engine: RolloutEngine,
        phases: Phases,
        *,
        trainer_state: Any = None,
        then: Callable[[], None] | None = None,
    ) -> tuple[RolloutBuffer, ScoredRollouts, Tensor]:
        """The next batch of this process, what it was made from, and the advantages [B] of that.

        `then` is called as soon as the engine has nothing more to do for it.

        Raises:
            RewardError: a reward function failed, and `reward_failure` does not say to drop its groups.
        """
        scored, rounds = self._round(engine, phases, trainer_state, then), 1
        if self.args.dynamic_sampling:
            wanted, scored = num_groups(scored), self._with_something_to_learn(scored)
            # All processes go on together: they draw from one sequence of prompts.
            while rounds <= self.args.dynamic_sampling and anywhere(self.accelerator, num_groups(scored) < wanted):
                more = self._with_something_to_learn(self._round(engine, phases, trainer_state))
                scored, rounds = join([scored, more]), rounds + 1
            scored = choose_groups(scored, range(min(wanted, num_groups(scored))))
        elif not anywhere(self.accelerator, not bool(scored.dropped.all())):
            raise RewardError(f"every group of the batch was dropped; the first failure: {scored.failure}")
        with phases("reward"):
            advantages = self._advantages(scored)
        metrics = rollout_metrics(gather_object([RolloutFacts.of(scored)]), self.rewards.names)
        metrics |= {"dynamic_sampling/rounds": float(rounds)} if self.args.dynamic_sampling else {}
        kept = self._effective_batch(scored, advantages)
        steps = self.args.steps_per_rollout(self.accelerator.num_processes)
        buffer = RolloutBuffer(
            batches=split_groups(kept, steps, self.args.num_generations),
            iterations=self.args.num_iterations,
            weight_version=scored.rollouts.weight_version,
            metrics=metrics,
        )
        return buffer, scored, advantages

    def evaluate(self, engine: RolloutEngine, dataset: Any) -> dict[str, float]:
        """Mean rewards over a dataset: of one greedy completion each, or of `num_generations_eval` sampled ones."""
        rows = [dict(row) for row in dataset]
        count, seed = self.args.num_generations_eval, self.args.seed
        greedy = self.sampling(seed=seed, n=1, temperature=0.0)
        sampling = greedy if count is None else self.sampling(seed=seed, n=count)
        rollouts = self._complete(engine, rows, sampling, range(len(rows)))
        scored = score_rollouts(rollouts, rows, self.rewards, self.tokenizer)
        means = {
            f"rewards/{name}/mean": column
            for name, column in zip(scored.reward_names, scored.per_function.T, strict=True)
        }
        return {name: values.nanmean().item() for name, values in ({"reward": scored.rewards} | means).items()}

    def encode(self, rows: list[Row], row_numbers: Sequence[int]) -> list[list[int]]:
        """Token ids of the rows' prompts.

        Raises:
            DataError: a prompt that cannot be encoded, or leaves no room for a completion; named by the row's number.
        """
        longest = self.args.vllm_max_model_length
        return encode_prompts(
            rows,
            self.tokenizer,
            chat_template_kwargs=self.args.chat_template_kwargs,
            row_numbers=row_numbers,
            max_tokens=None if longest is None else longest - self.args.max_completion_length,
        )

    def sampling(self, *, seed: int, **changes: Any) -> SamplingParams:
        """How completions are drawn."""
        return self.args.sampling(seed=seed, **changes)

    def begin(self, engine: RolloutEngine) -> None:
        """Have the engine sample the next batch in the background, from the weights that it has now."""
        before = self._place()
        rows = self.sampler.next_batch()
        prompts = self.encode(rows, self.sampler.row_numbers)
        sampling = self.sampling(seed=self._next_seed())
        rollouts = in_thread(
            lambda: complete(engine, prompts, sampling, vocab_size=self.vocab_size), name="generate-ahead"
        )
        self.ahead = Ahead(rows=rows, rollouts=rollouts, before=before)

    def settle(self) -> None:
        """Wait for what is being sampled; whether it went well is said when it is used."""
        if self.ahead is not None:
            wait([self.ahead.rollouts])

    def state(self, *, wait: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Where the data stands, and what has been sampled ahead: JSON, the same on every process, and tensors.

        What is being sampled is waited for, or without `wait` left out; so is what the engine has failed at. The place
        is then the one before it was asked for: a resumed run draws the same rows with the same seed.
        """
        if self.ahead is None:
            return self._saved(self._place()), {}
        rollouts = self.ahead.rollouts
        is_lost = not (wait or rollouts.done()) or rollouts.exception() is not None
        if anywhere(self.accelerator, is_lost):  # all processes take theirs along, or none: they draw together
            return self._saved(self.ahead.before), {}
        return self._saved(self.ahead.before), rollouts_as_tensors(rollouts.result())

    def load_state(self, place: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        self.sampler.load_state_dict(place["sampler"])
        self.generate_calls = place["generate_calls"]
        if tensors:
            before, rows = self._place(), self.sampler.next_batch()
            self.generate_calls += 1
            self.ahead = Ahead(rows=rows, rollouts=finished(rollouts_from_tensors(tensors)), before=before)

    def _place(self) -> dict[str, Any]:
        return {"sampler": self.sampler.place(), "generate_calls": self.generate_calls}

    def _saved(self, place: dict[str, Any]) -> dict[str, Any]:
        return {**place, "sampler": self.sampler.state_dict(place["sampler"])}

    def _round(
        self, engine: RolloutEngine, phases: Phases, trainer_state: Any, then: Callable[[], None] | None = None
    ) -> ScoredRollouts:
        """One generation, scored."""
        drawn = None
        if then is not None:
            with together(self.accelerator, "sampling"):
                drawn = self._draw(engine, phases)
            then()
        with together(self.accelerator, "scoring" if drawn else "sampling and scoring"):
            rows, rollouts = drawn or self._draw(engine, phases)
            with phases("reward"):
                return score_rollouts(rollouts, rows, self.rewards, self.tokenizer, trainer_state=trainer_state)

    def _draw(self, engine: RolloutEngine, phases: Phases) -> tuple[list[Row], Rollouts]:
        """Rows of the dataset and their completions: those sampled ahead, or new ones."""
        with phases("generate"):
            if self.ahead is not None:
                rows, rollouts, self.ahead = self.ahead.rows, self.ahead.rollouts.result(), None
                return rows, rollouts
            rows = self.sampler.next_batch()
            sampling = self.sampling(seed=self._next_seed())
            return rows, self._complete(engine, rows, sampling, self.sampler.row_numbers)

    def _with_something_to_learn(self, scored: ScoredRollouts) -> ScoredRollouts:
        """Those groups whose rewards differ, and on which no reward function failed."""
        spread = nanstd(scored.rewards.view(-1, scored.rollouts.num_generations))[:, 0]
        failed = scored.dropped.view(-1, scored.rollouts.num_generations).any(1)
        return choose_groups(scored, ((spread >= EQUAL_REWARDS) & ~failed).nonzero()[:, 0].tolist())

    def _next_seed(self) -> int:
        """One for each `generate` call of each process."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        seed: int = (self.args.seed * 1_000_003 + self.generate_calls) * world_size + rank
        self.generate_calls += 1
        return seed

    def _complete(
        self, engine: RolloutEngine, rows: list[Row], sampling: SamplingParams, row_numbers: Sequence[int]
    ) -> Rollouts:
        prompts = [row["prompt"] for row in rows]
        return complete(engine, self.encode(rows, row_numbers), sampling, vocab_size=self.vocab_size, prompts=prompts)

    def _advantages(self, scored: ScoredRollouts) -> Tensor:
        """This process' advantages [B]: groups never span processes, the scale of "batch" spans them all."""
        parts = gather_object([scored.per_function])
        first = sum(len(part) for part in parts[: self.accelerator.process_index])
        advantages = multi_objective_advantages(
            torch.cat(parts),
            self.rewards.weights,
            self.args.num_generations,
            scale=self.args.scale_rewards,  # type: ignore[arg-type]
            aggregation=self.args.multi_objective_aggregation,
        )
        return advantages[first : first + len(scored.per_function)]

    def _effective_batch(self, scored: ScoredRollouts, advantages: Tensor) -> EffectiveBatch:
        batch = scored.effective_batch(advantages)
        if not self.args.mask_truncated_completions:
            return batch
        kept = (~scored.dropped).nonzero()[:, 0].tolist()
        ended = [scored.rollouts.finish_reasons[index] == "stop" for index in kept]
        return replace(batch, learns=torch.tensor(ended, dtype=torch.bool))


def make_rewards(functions: Any, args: GRPOConfig, *, processing_classes: Any, device: torch.device) -> Rewards:
    """The reward functions, called as `args` says."""
    return Rewards(
        functions,
        weights=args.reward_weights,
        processing_classes=processing_classes,
        failure=args.reward_failure,
        retries=args.reward_retries,
        timeout=args.reward_timeout,
        device=device,
        chat_template_kwargs=args.chat_template_kwargs,
        trust_remote_code=args.trust_remote_code,
    )
