"""What of a task of reasoning-gym runs in the processes of isolated functions: generators and verifiers.

Some generators go through sets of strings, whose order is the same in processes with one hash seed alone. Some
verifiers run what a model wrote: `eval`, or sympy's parser, which evaluates. docs/tasks.md says what comes of both.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from fused_grpo.trainer.tasks.entries import as_text, from_text


def entry(generator: str, seed: int, size: int, index: int) -> str:
    """An entry of a generator, which is a JSON list of its name and options."""
    return as_text(_dataset(generator, seed=seed, size=size)[index])


def score(answers: Sequence[str | None], entries: Sequence[str], generators: Sequence[str]) -> list[float]:
    """Rewards of answers (None: there was none), by the generators of the entries."""
    return [_score(*row) for row in zip(answers, entries, generators, strict=True)]


def _score(answer: str | None, entry: str, generator: str) -> float:
    """One reward: 0 where the verifier raises, or returns something that is no number."""
    try:
        value = float(_dataset(generator).score_answer(answer=answer, entry=from_text(entry)))
    except (Exception, SystemExit):  # of an answer that it cannot read, or that calls exit()
        return 0.0
    return value if math.isfinite(value) else 0.0


@functools.lru_cache(maxsize=8)
def _dataset(generator: str, **own: int) -> Any:
    import reasoning_gym

    name, options = json.loads(generator)
    return reasoning_gym.create_dataset(name, **options, **own)
