"""Mathematical answers compared by math-verify, in the worker process of `accuracy_reward`.

Both sides are parsed as TRL's `accuracy_reward` parses them: an answer has to be correct LaTeX, and a boxed answer
comes first. The package's own timeouts, which are signals, are off: the worker process has a time limit.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

# An optional dependency without type stubs: `import_module` gives mypy the same result with and without it.
math_verify: Any = importlib.import_module("math_verify")
latex2sympy: Any = importlib.import_module("latex2sympy2_extended")
for module in ("parser", "grader"):  # each warns that its timeouts are off
    logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)


def grade(
    completions: Sequence[str], solution: Sequence[str], log_extra: Callable[[str, list[Any]], None]
) -> list[float | None]:
    """1.0 if the completion's answer equals the solution, else 0.0; None if the solution has no answer."""
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
        answer = math_verify.parse(
            completion, extraction_config=[extraction], extraction_mode="first_match", parsing_timeout=None
        )
        log_extra("answer_parsed", [str(answer) if answer else "[unparseable]"])
        rewards.append(float(math_verify.verify(gold, answer, timeout_seconds=None)))
    return rewards
