"""Ready-made reward functions. Completions are strings or lists of messages.

`NAMED` has those that `reward_funcs` and the command line take by a short name: "accuracy", "length=200".
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.rewards.isolation import IsolatedReward

# With limits of math-verify for one answer, in seconds and bytes.
GRADER = IsolatedReward(f"{__package__}.math_answers:grade", timeout=10.0, memory=8 << 30, on_failure=0.0)
NUMBER = re.compile(r"(?:(?<![\d)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)", re.ASCII)


def accuracy(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1.0 if the final answer equals the "answer" column, as a number or as text, else 0.0; None if there is none.

    The answer of a text is the content of its last `\\boxed{...}`; without one, what follows its last `####` (the form
    of GSM8K); without both, the whole text. The column is read in the same way, so whole solutions will do. Where the
    correct answer is a number, a completion is right if the last number in its answer has the same value: "1,030",
    "$1030", "1030.0" and "#### 1030" are the same number. Any other correct answer has to be the answer's text, without
    regard to case, outer spaces and a final period. For formulas there is `accuracy_reward`, which uses math-verify.
    """
    return [is_right(text_of(completion), correct) for completion, correct in zip(completions, answer, strict=True)]


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: Callable[..., None] | None = None, **columns: Any
) -> list[float | None]:
    """1.0 if the answer equals the "solution" column mathematically, else 0.0; None if that column has no answer.

    Equals TRL's reward of that name, but math-verify runs in a process of its own: an answer that exceeds its limits
    of time (10 s) or memory gets 0.0. UnavailableError where math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise UnavailableError("got no math-verify, want it for accuracy_reward; fix: pip install 'fused-grpo[math]'")
    if log_extra is not None:
        log_extra("solution", list(solution))
    return GRADER(completions=list(map(text_of, completions)), solution=solution, log_extra=log_extra)


def no_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """0.0: the reward of a run that learns from a teacher alone."""
    return [0.0] * len(completions)


def format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 for one <think>, at the start, and a </think>, else 0.0. Equals TRL's `think_format_reward`."""
    texts = map(text_of, completions)
    return [float(t.startswith("<think>") and t.count("<think>") == 1 and "</think>" in t) for t in texts]


def length_reward(target_length: int) -> Callable[..., list[float]]:
    """A reward function: minus the distance of a completion's length from `target_length`, in target lengths.

    InputError where `target_length` is not positive.
    """
    if target_length <= 0:
        raise InputError(f"got target_length={target_length}, want tokens > 0")

    def length_reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [-abs(len(ids) - target_length) / target_length for ids in completion_ids]

    return length_reward


def soft_overlong_punishment(max_completion_length: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A reward function: DAPO's length penalty, 0 up to `max - cache` tokens, then linear down to -1 at `max` tokens.

    Source: DAPO (arXiv 2503.14476), equation 13. Equals TRL's `get_soft_overlong_punishment`. InputError unless
    0 <= soft_punish_cache <= max_completion_length.
    """
    if not 0 <= soft_punish_cache <= max_completion_length:
        raise InputError(
            f"got soft_punish_cache={soft_punish_cache} and max_completion_length={max_completion_length}, "
            "want 0 <= soft_punish_cache <= max_completion_length"
        )
    return _with_options(soft_overlong_punishment_reward, max_completion_length, soft_punish_cache)


# TRL's rewards that are missing above, under its names.


def think_format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """`format_reward`, under TRL's name, which is in the names of the metrics."""
    return format_reward(completions)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[..., None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning; 0.0 where the reasoning has no end. UnavailableError as there.

    A reasoning ends with the first of `reasoning_delimiters` that occurs, at its last place. None: "</think>".
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    answers = dict[int, str]()  # by place, where the reasoning has an end
    for place, text in enumerate(map(text_of, completions)):
        if (end := next((end for end in delimiters if end in text), None)) is not None:
            answers[place] = text.rpartition(end)[2]

    def placed(values: Sequence[Any], otherwise: Any) -> list[Any]:
        by_place = dict(zip(answers, values, strict=True))
        return [by_place.get(place, otherwise) for place in range(len(completions))]

    logged: dict[str, list[Any]] = {}
    solutions = [solution[place] for place in answers]
    scores = accuracy_reward(list(answers.values()), solutions, log_extra=logged.__setitem__)
    if log_extra is not None:
        log_extra("solution", list(solution))
        for name in ("gold_parsed", "answer_parsed"):
            log_extra(name, placed(logged.get(name, [None] * len(answers)), "[incomplete reasoning]"))
    return placed(scores, 0.0)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """`soft_overlong_punishment`, under TRL's name."""
    return soft_overlong_punishment(max_completion_len, soft_punish_cache)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """A reward function: `max_penalty` times the share of a completion's n-grams of tokens that repeat another one.

    Source: Demystifying Long Chain-of-Thought Reasoning (arXiv 2502.03373), appendix C.2. InputError for an
    `ngram_size` below 1, or a penalty above 0.
    """
    if ngram_size < 1 or max_penalty > 0:
        raise InputError(f"got ngram_size={ngram_size} and max_penalty={max_penalty}, want >= 1 token and <= 0")
    return _with_options(repetition_penalty_reward, ngram_size, max_penalty)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """A reward function: `accuracy_reward` scaled by length, along half a cosine from 0 to `max_len` tokens and more.

    A right answer falls from `max_value_correct` to `min_value_correct`, a wrong one rises from `min_value_wrong` to
    `max_value_wrong`. Source: arXiv 2502.03373, appendix C.1. InputError where `max_len` is not positive.
    """
    if max_len <= 0:
        raise InputError(f"got max_len={max_len}, want tokens > 0")
    bounds = (min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
    return _with_options(cosine_scaled_reward, max_len, *bounds)


def soft_overlong_punishment_reward(
    longest: int, cache: int, /, completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float]:
    over = (len(ids) - (longest - cache) for ids in completion_ids)
    # With an empty cache the penalty is a step.
    return [0.0 if n <= 0 else -min(1.0, n / cache) if cache else -1.0 for n in over]


def repetition_penalty_reward(
    ngram_size: int, max_penalty: float, /, completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float]:
    def repeated(ids: Sequence[int]) -> float:
        count = len(ids) - ngram_size + 1
        return 0.0 if count < 1 else 1 - len({tuple(ids[i : i + ngram_size]) for i in range(count)}) / count

    return [max_penalty * share if share else 0.0 for share in map(repeated, completion_ids)]


def cosine_scaled_reward(
    max_len: int,
    min_wrong: float,
    max_wrong: float,
    min_correct: float,
    max_correct: float,
    /,
    completions: Sequence[Any],
    solution: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    **columns: Any,
) -> list[float | None]:
    def scaled(score: float | None, length: int) -> float | None:
        if score is None:
            return None
        short, long = (max_correct, min_correct) if score else (min_wrong, max_wrong)
        return long + (short - long) * (1 + math.cos(math.pi * min(1.0, length / max_len))) / 2

    right = accuracy_reward(completions, solution)
    return [scaled(score, len(ids)) for score, ids in zip(right, completion_ids, strict=True)]


def _with_options(function: Callable[..., Any], *options: float) -> Callable[..., Any]:
    """The function with its first arguments, under its name, as TRL's have one; it can be pickled."""
    reward = partial(function, *options)
    vars(reward)["__name__"] = function.__name__
    return reward


class Named(NamedTuple):
    function: Callable[..., Any]  # with `numbers`: makes the function
    scores: str
    column: str = ""  # of the dataset, which it reads
    numbers: tuple[str, ...] = ()  # names of the whole numbers after "="


NAMED = {
    "accuracy": Named(accuracy, "1 for the right final answer (number or text), else 0", "answer"),
    "accuracy_reward": Named(accuracy_reward, "1 for the right answer as mathematics (math-verify)", "solution"),
    "reasoning_accuracy_reward": Named(reasoning_accuracy_reward, "the same of what follows </think>", "solution"),
    "cosine": Named(get_cosine_scaled_reward, "accuracy_reward, more for short right answers", "solution", ("MAX",)),
    "format": Named(format_reward, "1 for one <think>, at the start, and a </think>"),
    "think_format_reward": Named(think_format_reward, "the same, under TRL's name"),
    "length": Named(length_reward, "0 at so many tokens, -1 at none and at twice that", numbers=("TOKENS",)),
    "overlong": Named(
        soft_overlong_punishment, "0 up to MAX - CACHE tokens, -1 at MAX (DAPO)", numbers=("MAX", "CACHE")
    ),
    "repetition": Named(get_repetition_penalty_reward, "minus the share of repeated N-grams", numbers=("N",)),
}


def usage_of(name: str) -> str:
    """A name of `NAMED` as it is written: "length=TOKENS"."""
    return "=".join(filter(None, (name, ",".join(NAMED[name].numbers))))


def builtin_reward(given: str) -> Callable[..., Any] | None:
    """The function of a short name, or an InputError; None for a path, a hub id or the name of a function."""
    name, equals, text = given.partition("=")
    if Path(given).exists() or not re.fullmatch(r"[\w-]+", name):
        return None
    names = ", ".join(map(usage_of, NAMED))
    if name not in NAMED:
        close = difflib.get_close_matches(name, NAMED, n=1)
        hint = f"did you mean {usage_of(close[0])}? " if close else ""
        raise InputError(
            f"got reward function {given!r}, want one of {names}, a function as module:name or path.py:name, or a "
            f"reward model as a path or owner/name; fix: {hint}`fused-grpo rewards` says what each scores"
        )
    named = NAMED[name]
    if not re.fullmatch(",".join([r"\d+"] * len(named.numbers)), text) or bool(equals) != bool(named.numbers):
        raise InputError(f"got reward function {given!r}, want {usage_of(name)} with whole numbers")
    return named.function(*map(int, text.split(","))) if named.numbers else named.function


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of its last message, but for what a tool has said."""
    if isinstance(completion, str):
        return completion
    return next((str(one["content"]) for one in reversed(completion) if one.get("role") != "tool"), "")


def is_right(text: str, correct: Any) -> float | None:
    """1.0 or 0.0; None where there is no correct answer (None, or a text without one)."""
    wanted = "" if correct is None else final_answer(str(correct))
    if not wanted:
        return None
    answer, number = final_answer(text), sole_number(wanted)
    if number is None:
        return float(_plain(answer) == _plain(wanted))
    return float(number in _numbers(answer)[-1:])


def final_answer(text: str) -> str:
    """The content of the last `\\boxed{}`, what follows the last `####`, or the whole text."""
    _, is_boxed, after = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(after if is_boxed else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return after[:place].strip()
    return text.rpartition("####")[2].strip()


def sole_number(answer: str) -> Decimal | None:
    """The value of an answer that is one number, apart from symbols such as $ and %."""
    numbers = _numbers(answer)
    is_sole = len(numbers) == 1 and not re.search(r"[\w\\{}/^*=<>]", NUMBER.sub("", answer))
    return numbers[0] if is_sole else None


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in NUMBER.findall(text.replace("−", "-"))]


def _plain(answer: str) -> str:
    return answer.strip().removesuffix(".").strip().casefold()
