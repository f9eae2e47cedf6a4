"""Mathematical answers compared by math-verify. It runs isolated: what it parses was written by a model.

Both sides are parsed as TRL's `accuracy_reward` parses them: an answer has to be correct LaTeX, and a boxed one is
looked for first. The package's own timeouts are off; they are signals, and the process around this is killed anyway.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

# Without stubs, and no dependency of this package: imported by name, so that its types are unknown everywhere alike.
math_verify: Any = importlib.import_module("math_verify")
latex2sympy: Any = importlib.import_module("latex2sympy2_extended")
for module in ("parser", "grader"):  # each says once that its timeouts are off
    logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)


def grade(
    completions: Sequence[str], solution: Sequence[str], log_extra: Callable[[str, list[Any]], None]
) -> list[float | None]:
    """1.0 where the completion's answer equals the solution, 0.0 where not; None where the solution has none."""
    extraction = math_verify.LatexExtractionConfig(
        normalization_config=latex2sympy.NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    rewards: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        gold = math_verify.parse(expected, parsing_timeout=None)
        log_extra("gold_parsed", [str(gold) if gold else "[unparseable]"])
        if not gold:
            log_extra("answer_parsed", ["[skipped]"])
            rewards.append(None)
            continue
        found = math_verify.parse(
            completion, extraction_config=[extraction], extraction_mode="first_match", parsing_timeout=None
        )
        log_extra("answer_parsed", [str(found) if found else "[unparseable]"])
        rewards.append(float(math_verify.verify(gold, found, timeout_seconds=None)))
    return rewards
