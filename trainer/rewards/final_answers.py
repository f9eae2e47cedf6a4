"""The reward `accuracy`: the final answer of a completion against the correct one, by a small rule.

The answer of a text is the content of its last `\\boxed{...}`; without one, what follows its last `####` (the form of
GSM8K); without both, the whole text.

- Where the correct answer is a number, a completion is right if the last number in its answer has the same value.
  "1,030", "$1030", "1030.0" and "#### 1030" are the same number.
- Any other correct answer has to be the answer's text, without regard to case, outer spaces and a final period.

The correct answer is read in the same way, so that a column of whole solutions will do if they end in one of the two
forms. For formulas there is `accuracy_reward`, which uses math-verify.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"(?:(?<![\d)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)", re.ASCII)
BOXED = "\\boxed{"


def is_right(text: str, correct: Any) -> float | None:
    """1.0 or 0.0; None where there is no correct answer (None, or a text without one)."""
    wanted = "" if correct is None else final_answer(str(correct))
    if not wanted:
        return None
    found, number = final_answer(text), _sole_number(wanted)
    if number is None:
        return float(_plain(found) == _plain(wanted))
    numbers = NUMBER.findall(found.replace("−", "-"))
    return float(bool(numbers) and _value(numbers[-1]) == number)


def final_answer(text: str) -> str:
    """The content of the last `\\boxed{}`, what follows the last `####`, or the whole text."""
    _, is_boxed, after = text.rpartition(BOXED)
    depth = 1
    for place, character in enumerate(after if is_boxed else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return after[:place].strip()
    return text.rpartition("####")[2].strip()


def _sole_number(answer: str) -> Decimal | None:
    """The value of an answer that is one number, apart from symbols such as $ and %."""
    answer = answer.replace("−", "-")
    numbers = NUMBER.findall(answer)
    if len(numbers) != 1 or re.search(r"[\w\\{}/^*=<>]", answer.replace(numbers[0], "", 1)):
        return None
    return _value(numbers[0])


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _plain(answer: str) -> str:
    return answer.strip().removesuffix(".").strip().casefold()
