"""How an engine samples turns that come one after the other: a session of a batch of episodes.

vLLM in process    a turn that is added is decoded with those that are under way
vLLM servers       a request of its own for each turn
any other engine   all turns that are there in one call of `generate`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.checked_engine import generated
from fused_grpo.trainer.engines.sampling import SEED_BITS, Completion, turn_sampling
from fused_grpo.trainer.types import Rollouts, Sample, SamplingParams, Turn


class TurnSession(Protocol):
    """Samples turns that are added while others are under way."""

    is_together: bool  # True: `step` samples all that are there at once, so that more are worth waiting for

    @property
    def has_work(self) -> bool: ...  # whether `step` has something to do

    @property
    def pending(self) -> Sequence[Future[Any]]: ...  # turns that are sampled elsewhere

    def add(self, turn: Turn) -> None: ...

    def step(self) -> Sequence[tuple[int, Completion]]: ...  # some work; episodes whose turns are complete


def turn_session(
    engine: RolloutEngine, sampling: SamplingParams, *, most: int | None
) -> AbstractContextManager[TurnSession]:
    """A session of the engine, whose prompts and completions have `most` tokens together; None: no limit."""
    own: Callable[[SamplingParams], AbstractContextManager[TurnSession]] | None
    own = getattr(engine, "turn_session", None)
    return nullcontext(BatchSession(engine, sampling, most=most)) if own is None else own(sampling)


class BatchSession:
    """All turns that are there in one call of `generate`, but those that have no room for the longest one."""

    is_together, pending = True, ()

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams, *, most: int | None) -> None:
        self._engine, self._sampling, self._most, self._waiting = engine, sampling, most, list[Turn]()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, turn: Turn) -> None:
        self._waiting.append(turn)

    def step(self) -> list[tuple[int, Completion]]:
        longest = max(turn.max_tokens for turn in self._waiting)
        beside = [turn for turn in self._waiting if not self._most or len(turn.prompt_ids) + longest <= self._most]
        batch = beside or self._waiting[:1]
        asked = {turn.episode for turn in batch}  # of which each has one turn at a time
        self._waiting = [turn for turn in self._waiting if turn.episode not in asked]
        seed = random.Random(str([turn.seed for turn in batch])).getrandbits(SEED_BITS)
        options = turn_sampling(self._sampling, max(turn.max_tokens for turn in batch), seed=seed)
        samples = generated(self._engine, [turn.prompt_ids for turn in batch], options)
        return [(turn.episode, _cut(sample, turn)) for turn, sample in zip(batch, samples, strict=True)]


class ConcurrentSession:
    """A call of `generate` in a thread for each turn, of an engine that samples concurrent calls together."""

    is_together, has_work = False, False

    def __init__(
        self, generate: Callable[[Sequence[list[int]], SamplingParams], Rollouts], sampling: SamplingParams
    ) -> None:
        self._generate, self._sampling, self._calls = generate, sampling, dict[Future[Rollouts], Turn]()

    @property
    def pending(self) -> list[Future[Rollouts]]:
        return list(self._calls)

    def add(self, turn: Turn) -> None:
        options = turn_sampling(self._sampling, turn.max_tokens, seed=turn.seed)
        self._calls[in_thread(partial(self._generate, [turn.prompt_ids], options), name="turn")] = turn

    def step(self) -> list[tuple[int, Completion]]:
        complete = [(call, self._calls.pop(call)) for call in self.pending if call.done()]
        return [(turn.episode, _cut(call.result().samples()[0], turn)) for call, turn in complete]


def _cut(sample: Sample, turn: Turn) -> Completion:
    """A completion of a turn, at its own limit: a shorter turn has the same beginning."""
    if sample.completion_mask is not None:
        raise UnsupportedError("got a completion_mask of an engine and tools, want one of them; fix: leave one out")
    ids, logprobs = sample.completion_ids, sample.sampling_logprobs
    listed, experts = sample.listed_tokens, sample.routed_experts
    return Completion(
        ids[: turn.max_tokens],
        None if logprobs is None else logprobs[: turn.max_tokens],
        "length" if len(ids) > turn.max_tokens else sample.finish_reason,
        None if listed is None else listed.first(turn.max_tokens),
        None if experts is None else experts[: len(sample.prompt_ids) + turn.max_tokens - 1],
    )
