"""`Collector`: from prompts to a `RolloutBuffer` that is ready for the optimizer. One `generate` call each time.

Of each of its P prompts a rank samples G completions, or the part of a group that fits into its share of the batch:
then consecutive ranks have the same prompt, and each samples its part. Rewards are gathered, so advantages are always
those of whole groups, before anything is cut.

For ReMax, a second `generate` call gives a greedy completion of each prompt, to the rank with the first part of its
group: the `greedy` of the samples.

With `generate_ahead` each round takes the oldest batch of a `BatchQueue`, and requests others. Ranks may share a
server, and their threads meet in `load_weights`, in the same order; so a rank whose batch failed loads weights for the
others, and nothing more is sampled on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import chain, compress, islice, pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fused_grpo.errors import RewardError, UnavailableError
from fused_grpo.trainer.batching.micro_batches import balanced, skip_zero_advantages
from fused_grpo.trainer.batching.rollout_buffer import GREEDY, RolloutBuffer, as_tensors, from_tensors, without_prefix
from fused_grpo.trainer.collect.advantages import (
    Scores,
    multi_objective_advantages,
    scaled_in_batch,
    spread,
    token_advantages,
)
from fused_grpo.trainer.collect.batch_queue import BatchQueue, Complete, Drawn, Pace, Prefetched
from fused_grpo.trainer.collect.rank_checks import described
from fused_grpo.trainer.collect.scoring import (
    Evaluation,
    RolloutFacts,
    Scored,
    facts_of,
    greedy_of,
    rollout_metrics,
    score_greedy,
    score_rollouts,
    without_rewards,
)
from fused_grpo.trainer.collect.start_checks import Start
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.process_state import drawing_from, place_kept, process_kept
from fused_grpo.trainer.data.datasets import Row, all_rows
from fused_grpo.trainer.data.prompt_sampler import CurriculumSampler, PromptSampler, checksum
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, any_rank, compare_ranks, gather_objects
from fused_grpo.trainer.engines import RolloutEngine, SamplingEngine
from fused_grpo.trainer.engines.checked_engine import checked_generate, checked_load_weights
from fused_grpo.trainer.episodes.play import EpisodeEngine
from fused_grpo.trainer.learner import Learner
from fused_grpo.trainer.logging.callbacks import Events
from fused_grpo.trainer.logging.console import Phases
from fused_grpo.trainer.models.weight_stream import copied, weights_stay
from fused_grpo.trainer.types import EQUAL_REWARDS, Sample, SamplingParams, with_fields

T = TypeVar("T")
U = TypeVar("U")
Sync = Callable[[], object]  # sends the current weights to the engine, if it has older ones


class Collector:
    """Draws prompts, has an engine complete them, scores the completions and makes batches for a learner of them."""

    def __init__(self, start: Start, sampler: PromptSampler, learner: Learner, events: Events) -> None:
        self.args, self.accelerator, self.sampler, self.learner = start.args, learner.accelerator, sampler, learner
        self.rewards, self.tokenizer, self.prompt_limit = start.rewards, start.tokenizer, start.limit
        self.events = events  # whose state reward functions may ask for
        self.group_part = self.args.group_part(self.accelerator.num_processes)
        self.steps = self.args.optimizer_steps_per_generation(self.accelerator.num_processes)  # in each iteration
        self.steps_per_batch = self.steps * self.args.num_iterations
        self.has_greedy = self.args.advantage_estimator == "remax"
        self.has_token_advantages = self.args.advantage_estimator.endswith("optimal_token_baseline")
        self.sampling = self.args.sampling(seed=self.args.seed, n=self.group_part)
        self.generate_calls = self.num_tokens = 0  # tokens over all ranks; a prompt counts with each completion
        self.queue = BatchQueue()
        self.pace = self._pace()
        self.sync_metrics: Mapping[str, float] = {}  # of the sync whose weights sampled what was drawn last
        self.described = cache(partial(described, start))  # a tokenizer's digest takes a while
        self.rules, self.longest_prompt = start.rules, start.longest_prompt  # of episodes; None: no tools

    def collect(self, engine: RolloutEngine, phases: Phases, *, sync: Sync = lambda: None) -> Scored:
        """The samples of a batch, with rewards, advantages and the metrics of all ranks.

        They are of one generation, or with `dynamic_sampling` of as many as fill the batch. `sync` is called on all
        ranks, before an engine that has nothing to do samples.

        RewardError or UnavailableError where a reward function or the engine failed and its option of failures is not
        "drop", or no group is left.
        """
        first = scored = self._round(engine, phases, sync)
        round_metrics = dict[str, float]()
        if self.args.dynamic_sampling:
            wanted, rounds, scored = len(scored.samples), 1, self._with_unequal_rewards(scored)
            # All ranks go on alike: they draw from one sequence of prompts.
            while rounds <= self.args.dynamic_sampling:
                if not any_rank(self.accelerator, len(scored.samples) < wanted, "filling the batch"):
                    break
                more = self._with_unequal_rewards(self._round(engine, phases, sync))
                scored, rounds = Scored.joined([scored, more]), rounds + 1
            scored = replace(scored, samples=scored.samples[:wanted])
            round_metrics["dynamic_sampling/rounds"] = float(rounds)
        has_group = not all(dropped for *_, dropped in scored.sampled)  # of all rounds, whatever its rewards are
        if not any_rank(self.accelerator, has_group, "looking for a group"):
            engine_failure = next((sample.failure for sample in first.samples if sample.failure), None)
            failures = gather_objects("dropping the batch", (engine_failure, str(first.failure or "")))
            # A rank may have parts of groups that another one has dropped.
            engine_failure, reward_failure = next(filter(any, failures), (None, ""))
            kind = RewardError if engine_failure is None else UnavailableError
            raise kind(f"every group of the batch was dropped; the first failure: {engine_failure or reward_failure}")
        with phases("reward"):
            facts = gather_objects("comparing the rewards", RolloutFacts.of(scored))
            samples = self._with_advantages(scored, facts, self.args.num_generations)
        self.num_tokens += int(sum(one.sampled[:, 0].sum() for one in facts))
        metrics = rollout_metrics(facts, self.args, self.rewards.weights) | round_metrics
        metrics |= {"num_tokens": float(self.num_tokens), **self.sync_metrics, **self.sampler.metrics()}
        return replace(scored, samples=samples, metrics=metrics)

    def buffer(self, scored: Scored, phases: Phases) -> RolloutBuffer:
        """The batches of all optimizer steps, balanced across ranks and with the old log-probs that they need."""
        # Parts of groups, where an optimizer step has fewer sequences than a group.
        sequences_per_step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        ranks = self.accelerator.num_processes
        together = math.gcd(sequences_per_step * ranks, self.args.num_generations)
        with phases("train"):
            samples = self._learned_from(scored)
            if self.has_token_advantages:
                samples = self._with_token_advantages(samples)
            if ranks > 1:  # a step has what it has in one process
                every = map(from_tensors, gather_objects("joining the batch", as_tensors(samples)))
                samples = list(chain.from_iterable(every))
            # As equal as they can be, with the parts of a group that belong to one step in one.
            cuts = [len(samples) // together * step // self.steps * together for step in range(self.steps + 1)]
            batches = [samples[first:end] for first, end in pairwise(cuts)]
            if self.learner.can_skip:
                batches = [skip_zero_advantages(batch) for batch in batches]
            if ranks > 1:
                rank, packing = self.accelerator.process_index, self.learner.packing
                batches = [balanced(batch, ranks, packing)[rank] for batch in batches]
            # The policy will have moved when the optimizer comes to these.
            batches[1:] = [self.learner.with_old_logprobs(batch) for batch in batches[1:]]
        return RolloutBuffer(
            batches=batches,
            iterations=self.args.num_iterations,
            weight_version=scored.weight_version,
            has_support=all(sample.kept_sizes is not None for sample in samples),
            metrics=scored.metrics,
        )

    def evaluate(self, engine: RolloutEngine, dataset: Any) -> Evaluation:
        """Rewards over a dataset: of one greedy completion each, or of `num_generations_eval` sampled ones.

        A collective: each rank completes and scores its part of the rows, and all of them return the figures of all.
        A rank without rows does not call its engine. DataError for a row of a stream that cannot be used.
        """
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        count, name = self.args.num_generations_eval, "eval_dataset"
        sampling = self.args.sampling(seed=self.args.seed, n=count or 1, temperature=0.0 if count is None else None)
        sampling = replace(sampling, sampling_support="off", score_centering="off")  # nothing is learnt from these
        with all_ranks_succeed(self.accelerator, "reading the eval set"), process_kept(), self._in_place():
            started, rows = time.time(), list(self.prompt_limit.applied(all_rows(dataset, name=name), name=name))
        if processes > 1:
            compare_ranks("comparing the eval rows", {name: f"{len(rows)} rows with checksum {checksum(rows):08x}"})
        with all_ranks_succeed(self.accelerator, "evaluating"), process_kept(), self._in_place():
            # One after the other, so that the ranks' parts are in the order of the dataset.
            first, end = (len(rows) * part // processes for part in (rank, rank + 1))
            scored = Scored(samples=[], weight_version=0, reward_names=self.rewards.names)
            if own := rows[first:end]:
                placed = replace(sampling, first_prompt=first)
                samples = self._completing(engine, own, placed, range(first, end), batch="eval")()
                scored = score_rollouts(samples, own, self.rewards, self.tokenizer, trainer_state=self.events.state)
        facts = gather_objects("joining an evaluation", RolloutFacts.of(scored))
        metrics = rollout_metrics(facts, self.args, self.rewards.weights, evaluated=True)
        metrics["num_tokens"] = float(self.num_tokens)
        scored = replace(scored, samples=self._with_advantages(scored, facts, sampling.n))
        batch = self._learned_from(scored)
        skipped = [self.learner.can_skip and sample.in_loss and not sample.has_advantage for sample in batch]
        # The sampler's log-probs may be of another temperature.
        batch = with_fields(batch, {"skipped": skipped, "sampling_logprobs": [None] * len(batch)})
        return Evaluation(metrics, len(rows), started, batch)

    def prefetch(self, engine: RolloutEngine, phases: Phases, *, is_free: bool) -> None:
        """Have a batch sampled in the background, from the current weights.

        An engine that `is_free` has them. Another one loads a copy of them before the batch, if none behind which it
        comes does.
        """
        step, load = self.learner.step, None
        if not is_free and not (self.queue and self.queue[-1].weight_version == step):
            kept = self.accelerator.is_main_process or not getattr(engine, "first_rank_sends", False)
            with phases("sync"):
                weights = copied(self.learner.served_weights(engine), kept=kept)
            load = partial(checked_load_weights, engine, weights, version=step)
        before, synced = self._position(), dict[str, float]()
        rows, complete = self._next_batch(engine)

        def sample() -> list[Sample]:  # in the thread in which the engine loads weights
            synced.update(getattr(engine, "sync_metrics", {}))
            return complete()

        self.queue.append(Prefetched(rows, self.queue.in_turn(sample, load), before, step, synced))

    def state(self, *, wait: bool = True) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        """The position in the data and the prefetched samples: JSON, the same on every rank, and a table of each batch.

        Batches that are still being sampled are waited for, or without `wait` left out, as are those that failed and
        all behind them. The position is the one before the rows of the first batch were drawn: a resumed run draws
        those of all batches that have a table, and then samples the others, with the same seeds.
        """
        place, tables = self._place(), list[dict[str, Tensor]]()
        for batch in self.queue:
            # What happened in episodes is in no checkpoint, nor are an engine's columns for the reward functions.
            is_known = self.rules is None and (wait or batch.samples.done()) and batch.samples.exception() is None
            samples = batch.samples.result() if is_known else []
            # All ranks keep theirs, or none: they draw from one sequence.
            has_columns = any(sample.extra for sample in samples)
            if any_rank(self.accelerator, not is_known or has_columns, "saving prefetched batches"):
                break
            greedy = as_tensors(list(greedy_of(samples).values())) if self.has_greedy else {}
            tables.append(as_tensors(samples) | {GREEDY + name: tensor for name, tensor in greedy.items()})
        return place, tables

    def load_state(self, position: dict[str, Any], tables: Sequence[dict[str, Tensor]] = (), *, step: int = 0) -> None:
        """The inverse of `state`; `step` is the one after which the next batch is collected.

        A batch that `generate_ahead`, which may be another one now, does not allow any more is sampled again, as are
        all behind it.
        """
        self.sampler.load_state_dict(position["sampler"])
        self.generate_calls = position["generate_calls"]
        self.num_tokens = position["num_tokens"]
        self.pace = self._pace(*position.get("pace", ()))
        self.queue.wait()  # a batch of a run that was interrupted is still sampled
        self.queue = BatchQueue()
        for number, table in enumerate(tables):
            (own, greedy), version = without_prefix(table), int(table["weight_version"].min())
            is_old = step - version > (self.args.generate_ahead - number) * self.steps_per_batch
            if is_old or (self.has_greedy and not greedy):  # of another estimator, without greedy completions
                break
            samples = from_tensors(own)
            before, rows = self._position(), self.sampler.next_batch()
            self.generate_calls += 1
            sampled = Future[list[Sample]]()
            sampled.set_result(self._with_greedy(samples, from_tensors(greedy)) if self.has_greedy else samples)
            self.queue.append(Prefetched(rows, sampled, before, version, {}))

    def next_pass(self, passes: int) -> None:
        """Leave out the rest of a pass over the data, so that so many are over, and what is in flight of it."""
        if self.queue:
            self.load_state(self._place())
        self.sampler.next_pass(passes)

    def _place(self) -> dict[str, Any]:
        """The position behind the batches that were learned from, before those in flight."""
        position = next((batch.before for batch in self.queue), self._position())
        position = {**position, "sampler": self.sampler.state_dict(position["sampler"])}
        return {**position, "num_tokens": self.num_tokens, "pace": self.pace.state()}

    def _pace(self, *state: Any) -> Pace:
        limit = self.args.generate_ahead_max_kl
        return Pace(self.args.generate_ahead, limit, self.steps_per_batch, *(() if limit is None else state))

    def _position(self) -> dict[str, Any]:
        return {"sampler": self.sampler.position(), "generate_calls": self.generate_calls}

    def _round(self, engine: RolloutEngine, phases: Phases, sync: Sync) -> Scored:
        if not self.queue:
            sync()
        drawn = self._draw_and_request(engine, phases, sync) if self.args.generate_ahead else None
        score = partial(score_rollouts, rewards=self.rewards, tokenizer=self.tokenizer, trainer_state=self.events.state)
        spans_ranks = self.group_part != (size := self.args.num_generations)
        if spans_ranks and self.args.rollout_failure == "drop":
            drawn = self._failed_as_groups(*(drawn or self._draw_on_all(engine, phases)))
        with all_ranks_succeed(self.accelerator, "scoring" if drawn else "sampling and scoring"):
            rows, samples = drawn or self._draw(engine, phases)
            with phases("reward"), self._in_place():
                scored = score(samples, rows)
                if self.has_greedy:
                    scored = score_greedy(scored, score)
        if self.sampler.read is not None and self.accelerator.num_processes > 1:
            read = {"rows of train_dataset": f"{self.sampler.used} with checksum {self.sampler.read:08x}"}
            compare_ranks("comparing what the stream gave", read)
        if spans_ranks and self.args.reward_failure == "drop":
            # A group that any rank drops its part of is dropped by all ranks that have a part of it.
            own = [sample.dropped for sample in scored.samples]
            dropped = self._by_group("dropping groups", own, lambda group: [any(group)] * len(group))
            pairs = zip(scored.samples, dropped, strict=True)
            scored = replace(scored, samples=[without_rewards(one) if is_out else one for one, is_out in pairs])
        if isinstance(self.sampler, CurriculumSampler):
            rank_rewards = gather_objects("updating the curriculum", [sample.reward for sample in scored.samples])
            rewards = list(chain.from_iterable(rank_rewards))
            groups = [rewards[first : first + size] for first in range(0, len(rewards), size)]  # as in the batch
            self.sampler.update(self.sampler.batch, groups)
        counted = scored.counted() if scored.calls else scored
        return replace(counted, sampled=list(map(facts_of, scored.samples)))

    def _failed_as_groups(self, rows: list[Row], samples: list[Sample]) -> Drawn:
        """With a failure in all parts of a group that has one on any rank: no reward function is given a part of it."""

        def shared(group: list[str | None]) -> list[str | None]:
            return [one or next(filter(None, group), None) for one in group]

        failures = self._by_group("looking for failures", [sample.failure for sample in samples], shared)
        return rows, with_fields(samples, {"failure": failures})

    def _by_group(self, doing: str, values: list[T], function: Callable[[list[T]], Iterable[U]]) -> list[U]:
        """For each completion of this rank what `function` makes of its group, whichever ranks have it: collective."""
        size, is_whole = self.args.num_generations, self.group_part == self.args.num_generations
        parts = [values] if is_whole else gather_objects(doing, values)
        every = list(chain.from_iterable(parts))
        results = chain.from_iterable(function(every[first : first + size]) for first in range(0, len(every), size))
        before = 0 if is_whole else sum(map(len, parts[: self.accelerator.process_index]))
        return list(islice(results, before, before + len(values)))

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """What a tool or a reward draws, and where it goes, is nothing to the run. `Rewards` put back the rest.

        An engine or a reward that uses the policy has it without dropout, as before the first step and once resumed.
        """
        self.learner.policy.eval()  # until the learner trains it
        at_once = bool(self.queue) and self.rules is not None  # tools of a batch in flight may be elsewhere for a while
        with drawing_from(self._seed()), nullcontext() if at_once else place_kept():
            yield

    def _draw(self, engine: RolloutEngine, phases: Phases) -> Drawn:
        """Rows of the dataset and their completions: the oldest of the queue, or new ones."""
        is_given = getattr(engine, "has_own_weights", True)
        stay = weights_stay(self.learner.policy, engine) if is_given else nullcontext()
        with phases("generate"), process_kept(), self._in_place(), stay:
            if self.queue:
                self.sync_metrics = self.queue[0].sync_metrics
                return self.queue.take()
            rows, complete = self._next_batch(engine)
            self.sync_metrics = dict(getattr(engine, "sync_metrics", {}))
            return rows, complete()

    def _draw_on_all(self, engine: RolloutEngine, phases: Phases) -> Drawn:
        with all_ranks_succeed(self.accelerator, "sampling"):
            return self._draw(engine, phases)

    def _draw_and_request(self, engine: RolloutEngine, phases: Phases, sync: Sync) -> Drawn:
        """With `generate_ahead` the oldest batch of the queue, or a first one, and requests in its place."""
        drawn = self._draw_on_all(engine, phases)
        # Each generation to come needs one batch at least: none is left at the end.
        later = -(-(self.learner.max_steps - self.learner.step) // self.steps_per_batch) - 1
        for _ in range(min(self.pace.batches, later) - len(self.queue)):
            is_sampling = not all(batch.samples.done() for batch in self.queue)
            is_free = not any_rank(self.accelerator, is_sampling, "looking at the queue")
            if is_free:
                sync()
            with all_ranks_succeed(self.accelerator, "requesting a batch"):
                self.prefetch(engine, phases, is_free=is_free)
        return drawn

    def _with_unequal_rewards(self, scored: Scored) -> Scored:
        """The groups whose rewards differ, as advantages add them up; those of a dropped group are NaN: no spread."""
        columns = [[getattr(sample, name) for sample in scored.samples] for name in ("reward", "baseline")]
        rewards, baselines = torch.tensor(columns, dtype=torch.float32).view(2, -1, self.group_part)
        if self.args.multi_objective_aggregation == "normalize_then_sum":  # of equal sums some may have advantages
            per_function = torch.tensor([sample.rewards for sample in scored.samples], dtype=torch.float32)
            normalised = scaled_in_batch(per_function, self.rewards.weights, self.args, size=self.group_part)
            rewards = cast(Tensor, normalised).view(rewards.shape)
        apart = spread(rewards, baselines[:, :1] if self.has_greedy else None)
        is_unequal = (apart >= EQUAL_REWARDS).repeat_interleave(self.group_part).tolist()
        return replace(scored, samples=list(compress(scored.samples, is_unequal)))

    def _next_batch(self, engine: RolloutEngine) -> tuple[list[Row], Complete]:
        """The next rows of the dataset, and what completes their prompts; the seed is another one on each rank."""
        rows, sampling = self.sampler.next_batch(), replace(self.sampling, seed=self._seed())
        self.generate_calls += 1
        batch = str(self.generate_calls)
        numbers = self.sampler.row_numbers
        complete = self._completing(engine, rows, sampling, numbers, batch=batch)
        places = [place for place in range(len(rows)) if self.has_greedy and self._part(place)[1] == 0]
        if not places:
            return rows, complete
        # Before `complete` is called: it frees all environments, those of the batch as well.
        greedy_inputs = [rows[place] for place in places], replace(sampling, n=1, temperature=0.0)
        complete_greedy = self._completing(engine, *greedy_inputs, [numbers[place] for place in places], batch=batch)
        return rows, lambda: self._with_greedy(complete(), complete_greedy())

    def _seed(self) -> int:
        call, ranks = self.args.seed * 1_000_003 + self.generate_calls, int(self.accelerator.num_processes)
        return call * ranks + int(self.accelerator.process_index)

    def _part(self, place: int) -> tuple[int, int]:
        """Of a row of this rank's batch: the number of its group among those of all ranks, and that of the part."""
        before = self.accelerator.process_index * len(self.sampler.row_numbers)
        group, part = divmod(before + place, self.args.num_generations // self.group_part)
        return group, part

    def _with_greedy(self, samples: list[Sample], greedy: Sequence[Sample]) -> list[Sample]:
        """Each sample with the greedy completion of its prompt, where this rank has it, and the failure of that."""
        groups = [self._part(place // self.group_part) for place in range(len(samples))]
        by_group = dict(zip(dict.fromkeys(group for group, part in groups if part == 0), greedy, strict=True))
        per_sample = [by_group.get(group) for group, _ in groups]
        failures = [one.failure or (other and other.failure) for one, other in zip(samples, per_sample, strict=True)]
        return with_fields(samples, {"greedy": per_sample, "failure": failures})

    def _completing(
        self, engine: RolloutEngine, rows: list[Row], sampling: SamplingParams, numbers: Sequence[int], *, batch: str
    ) -> Complete:
        """What completes the prompts of these rows: with tools or environments, in episodes."""
        prompt_ids = self.prompt_limit.encode(rows, numbers)
        playing: SamplingEngine = engine
        if self.rules is not None:
            batch = f"{self.args.seed}/{batch}"
            playing = EpisodeEngine(engine, self.rules, most=self.longest_prompt, batch=batch)
        return partial(
            checked_generate,
            playing,
            prompt_ids,
            sampling,
            vocab_size=self.learner.vocab_size,
            rows=list(zip(numbers, rows, strict=True)),
            failure=self.args.rollout_failure,
            routers=self.learner.routers,
        )

    def _with_advantages(self, scored: Scored, facts: Sequence[RolloutFacts], size: int) -> list[Sample]:
        """Those of this rank, with advantages by the rewards of all: one after the other, they are whole groups."""
        parts = [one.per_function for one in facts]
        lengths, baselines = (torch.cat([getattr(one, name) for one in facts]) for name in ("lengths", "baselines"))
        advantages = multi_objective_advantages(
            torch.cat(parts), self.rewards.weights, self.args, size=size, lengths=lengths, baselines=baselines
        )
        own = advantages.split(list(map(len, parts)))[self.accelerator.process_index]
        return with_fields(scored.samples, {"advantage": own.tolist()})

    def _with_token_advantages(self, samples: list[Sample]) -> list[Sample]:
        """The samples, groups one after the other, with advantages for each token."""
        is_tir = self.args.advantage_estimator.startswith("tir")
        # A group whose rewards are equal has none, whatever the norms are; of a part of a group that is not known here.
        size = self.group_part
        is_whole = size == self.args.num_generations
        groups = [samples[first : first + size] for first in range(0, len(samples), size)]
        idle = [is_whole and not any(one.has_advantage for one in group) for group in groups for _ in group]
        norms = self.learner.score_norms(with_fields(samples, {"skipped": idle}))
        scores = []
        for sample, values in zip(samples, norms, strict=True):
            places = range(sample.num_own) if is_tir else sample.own(range(len(sample.completion_ids)))
            scores.append(Scores(sample.reward, values, torch.tensor(places)))
        advantages = self._by_group("joining groups", scores, partial(token_advantages, zero_tail=is_tir))
        return with_fields(samples, {"token_advantages": advantages})

    def _learned_from(self, scored: Scored) -> list[Sample]:
        """Its samples without dropped groups; with `mask_truncated_completions` those that were cut are not in loss."""
        masks = self.args.mask_truncated_completions
        samples = (one for one in scored.samples if not one.dropped)
        return [replace(one, in_loss=one.finish_reason == "stop" or not masks) for one in samples]
