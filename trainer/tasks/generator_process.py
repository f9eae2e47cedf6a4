"""What isolated processes call of reasoning-gym. They import it as they start, which is part of no answer's time.

A generator is a JSON list of its name and options.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fused_grpo.trainer.common.packages import installed
from fused_grpo.trainer.tasks.entries import as_text, from_text

reasoning_gym = installed("reasoning_gym", extra="tasks")


def entry_of(generator: str, seed: int, size: int, index: int) -> str:
    """An entry of a generator, as text."""
    return as_text(_dataset(generator, seed=seed, size=size)[index])


def score(answers: Sequence[str | None], entries: Sequence[str], generators: Sequence[str]) -> list[float]:
    """Rewards of answers (None: there was none); 0 where the verifier raises, or returns what is no number."""
    rewards = [0.0] * len(answers)
    for place, (answer, entry, generator) in enumerate(zip(answers, entries, generators, strict=True)):
        with suppress(Exception, SystemExit):  # of an answer that it cannot read, or that calls exit()
            value = float(_dataset(generator).score_answer(answer=answer, entry=from_text(entry)))
            rewards[place] = value if math.isfinite(value) else 0.0
    return rewards


@functools.lru_cache(maxsize=8)
def _dataset(generator: str, **own: int) -> Any:
    name, options = json.loads(generator)
    return reasoning_gym.create_dataset(name, **options, **own)
