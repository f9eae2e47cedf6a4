"""The generators of reasoning-gym as tasks: rows from seeds, and the verifier that comes with them as the reward.

Both run in the processes of isolated functions (`generator_process`; docs/tasks.md). Some generators go through sets of
strings, whose order is the same in processes with one hash seed alone. Some verifiers run what a model wrote: `eval`,
or sympy's parser.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fused_grpo.errors import DataError, InputError, shown
from fused_grpo.trainer.common.packages import installed
from fused_grpo.trainer.rewards.builtin_rewards import text_of
from fused_grpo.trainer.rewards.isolation import IsolatedFunction, IsolatedReward, WorkerError, checked_text
from fused_grpo.trainer.tasks.entries import difficulties, from_text, last_answer
from fused_grpo.trainer.tasks.task import Row, Task

# Entry i of a generator with seed s is made from the seed s + i, for nearly all: no train entry has one of these.
HELD_OUT_SEEDS = 2**31
_PROCESS = f"{__package__}.generator_process"
# With limits for one answer, in seconds and bytes.
SCORER = IsolatedReward(f"{_PROCESS}:score", timeout=10.0, memory=8 << 30, on_failure=0.0)
MOST_SECONDS = 600.0  # to make an entry
OWN = ("seed", "size")  # options of every generator that are arguments of `reasoning_gym_task`
ReadAnswer = Callable[[str, str], str | None]


def reasoning_gym_task(
    generator: str,
    /,
    *,
    size: int = 1000,
    heldout_size: int = 200,
    seed: int = 0,
    read_answer: ReadAnswer = last_answer,
    **options: Any,
) -> Task:
    """The task of a generator of reasoning-gym.

    Rows have the columns "prompt" (the question), "answer", "entry" (the whole entry as text, for the verifier) and,
    where the generator says what makes an entry difficult and that varies, "difficulty" from 0 to 1.

    Args:
        generator: its name, such as "chain_sum".
        size: train entries that are made. `train` has fewer where questions repeat.
        heldout_size: held-out entries that are made.
        seed: of the entries, and not of the run: runs of other seeds have the same rows.
        read_answer: f(text of a completion, correct answer) -> the answer in it, or None. `entries.tagged_answer` is
            reasoning-gym's own, which wants <answer> tags.
        options: those of the generator.

    Raises:
        UnavailableError: reasoning-gym is not installed.
        InputError: an unknown generator, or an option that it does not take.
        DataError: an entry that cannot be made, or no question that is not held out.
    """
    check_options(generator, options)
    for name, value, least in (("size", size, 1), ("heldout_size", heldout_size, 0), ("seed", seed, 0)):
        if not isinstance(value, int) or not least <= value < HELD_OUT_SEEDS // 2:
            raise InputError(f"got {name}={value!r}, want a whole number of at least {least}, below 2^30")
    described, seen = json.dumps([generator, options]), set[str]()
    maker = IsolatedFunction(f"{_PROCESS}:entry_of", timeout=MOST_SECONDS, memory=None, role="tool")
    heldout = list(_new_rows(maker, described, seed + HELD_OUT_SEEDS, heldout_size, seen))
    train = list(_new_rows(maker, described, seed, size, seen))
    if not train:
        raise DataError(
            f"got no question of {generator} to train on: all of {size} are among {len(heldout)} held-out ones; fix: "
            "fewer held-out rows, or options with more questions"
        )
    rows = [*train, *heldout]
    for row, difficulty in zip(rows, difficulties([from_text(row["entry"]) for row in rows]) or (), strict=False):
        row["difficulty"] = difficulty
    return Task(
        name=f"reasoning_gym:{generator}",
        train=train,
        heldout=heldout,
        reward=_reward(generator, described, read_answer),
    )


def generators() -> dict[str, type[Any]]:
    """The class of options of each generator, by name; UnavailableError without reasoning-gym."""
    datasets = installed("reasoning_gym", extra="tasks").factory.DATASETS
    return {name: config for name, (_, config) in sorted(datasets.items())}


def option_fields(generator: str) -> list[dataclasses.Field[Any]]:
    """The options of a generator but `OWN`; InputError for an unknown one."""
    registered = generators()
    if generator not in registered:
        close = difflib.get_close_matches(generator, registered, n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise InputError(
            f"got {generator!r}, want one of the {len(registered)} generators of reasoning-gym; fix: {hint}`fused-grpo "
            "tasks` lists them"
        )
    return [entry for entry in dataclasses.fields(registered[generator]) if entry.name not in OWN]


def check_options(generator: str, options: Mapping[str, Any]) -> None:
    """InputError for options with which the generator cannot be made."""
    names = [entry.name for entry in option_fields(generator)]
    for name in options.keys() - set(names):
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"got the option {name!r} for {generator}, want one of {', '.join(names)}{hint}")
    try:
        json.dumps(options)
        installed("reasoning_gym", extra="tasks").create_dataset(generator, seed=0, size=1, **options)
    except Exception as error:  # of the generator's own checks
        given = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options"
        raise InputError(
            f"got {given} for {generator}, which it refuses ({type(error).__name__}: {shown(error)}); fix: "
            f"`fused-grpo tasks reasoning_gym:{generator}` has its defaults"
        ) from error


def _new_rows(maker: IsolatedFunction, generator: str, seed: int, size: int, seen: set[str]) -> Iterator[Row]:
    """Rows of the entries whose question has not been seen; adds them to `seen`. DataError for one that is not made."""
    for index in range(size):
        try:
            reply = maker.reply(json.dumps([[generator, seed, size, index], {}]), checked_text)
        except WorkerError as error:
            reply = {"error": f"its process {error}"}
        if "error" in reply:
            got = f"got no entry {index} of seed {seed} from {generator}"
            raise DataError(f"{got}: {reply['error']}; fix: other options")
        entry = from_text(text := reply["value"])
        if entry["question"] not in seen:
            seen.add(entry["question"])
            # Some puzzles have many solutions, and no answer.
            yield {"prompt": entry["question"], "answer": str(entry["answer"] or ""), "entry": text}


def _reward(name: str, generator: str, read_answer: ReadAnswer) -> Callable[..., list[float]]:
    def reward(completions: Sequence[Any], answer: Sequence[str], entry: Sequence[str], **columns: Any) -> list[float]:
        answers = [read_answer(text_of(text), right) for text, right in zip(completions, answer, strict=True)]
        scores = SCORER(answers=answers, entries=entry, generators=[generator] * len(answers))
        return [0.0 if score is None else score for score in scores]

    reward.__name__ = name
    return reward
