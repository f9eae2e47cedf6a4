"""The part of reasoning-gym's rewards that runs in a process of its own, which can be killed.

Some verifiers run what a model wrote: `eval`, or sympy's parser, which evaluates. An answer that ends its process, or
takes more than its time or memory, costs that process alone.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from fused_grpo.trainer.tasks.entries import from_text


def score(answers: Sequence[str | None], entries: Sequence[str], generators: Sequence[str]) -> list[float]:
    """Rewards of answers, by the generators that made the entries.

    Args:
        answers: as they were read from completions; None: there was none.
        entries: as `entries.as_text` writes them.
        generators: each a JSON list of name and options.
    """
    return [_score(*row) for row in zip(answers, entries, generators, strict=True)]


def _score(answer: str | None, entry: str, generator: str) -> float:
    """One reward: 0 where the verifier raises, or returns something that is no number."""
    try:
        value = float(_generator(generator).score_answer(answer=answer, entry=from_text(entry)))
    except (Exception, SystemExit):  # of an answer that it cannot read, or that calls exit()
        return 0.0
    return value if math.isfinite(value) else 0.0


@functools.lru_cache(maxsize=8)
def _generator(generator: str) -> Any:
    import reasoning_gym

    name, options = json.loads(generator)
    return reasoning_gym.create_dataset(name, **options)
