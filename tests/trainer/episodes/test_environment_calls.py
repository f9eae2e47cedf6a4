"""Calls of an environment's own code: what it cannot be called with is found early, and whatever it raises is named."""

import asyncio
import builtins
import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from talkers import call

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.episodes.environments import NO_PROMPT, Environments, is_done

RAISED = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]


SAID = [{"role": "user", "content": "Count."}]


class Counter:
    def reset(self, **row) -> str:
        return "Count."

    def count(self, number: int) -> str:
        """Count.

        Args:
            number: To where.
        """
        return str(number)

    def get_reward(self) -> float:
        return 1.0


class Scores(Counter):
    def get_reward(self, answer) -> float:
        return 1.0


class Narrow(Counter):
    def reset(self, question):
        return question


class OfTask(Counter):
    def reset(self, task: int, seed: int):
        return f"{task} {seed}"


class Later(Counter):
    async def reset(self, **row) -> str:
        return "Count."


class InParts(Counter):
    def reset(self, **row):
        yield "Count."


SHARED = Counter()


async def make_later():
    return Counter()


def say(read: str, member: int) -> str:
    return "over" if "<answer>" in read else call("count", number=member)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"environment_factory": {}}, "an empty dict as environment_factory"),
        ({"environment_factory": make_later}, "got a coroutine from environment_factory"),
        ({"environment_factory": lambda: SHARED}, "got one Counter twice from environment_factory"),
        ({"environment_factory": Later}, "got a Later .* no coroutine"),
        ({"environment_factory": InParts}, "got a InParts .* no generator"),
        (
            {"environment_factory": dict.fromkeys("ab", lambda: SHARED), "rows": [{"environment": "a"}]},
            "got one Counter twice from environment_factory",
        ),
        ({"environment_factory": Scores}, r"get_reward\(\) of Scores with the signature \(answer\)"),
        ({"environment_factory": Narrow}, r"reset\(\) of Narrow for train_dataset .*one that takes 'prompt', 'answer'"),
        (
            {"environment_factory": {"a": Counter, "b": Narrow}, "rows": [{"environment": one} for one in "aaab"]},
            r"reset\(\) of Narrow for train_dataset with the signature \(question\)",
        ),
        (  # which would be found at the first evaluation
            {"environment_factory": OfTask, "rows": [{"task": 1}] * 4, "eval_dataset": {"new": [{"tasks": 1}]}},
            r"reset\(\) of OfTask for eval_dataset\['new'\] with the signature \(task: int, seed: int\)",
        ),
    ],
)
def test_what_an_environment_cannot_be_called_with_is_found_before_a_step(make_trainer, options, text):
    with pytest.raises(InputError, match=text):
        make_trainer(lambda *_: pytest.fail("a turn was sampled"), reward=None, **options).train()


@pytest.mark.parametrize("other", [OfTask, type(None), object, type("Counter", (OfTask,), {})])
def test_objects_of_another_class_than_the_first_are_refused(make_trainer, other):
    """They would have no reward, and tools that were not checked."""
    kinds = itertools.chain([Counter], itertools.repeat(other))
    with pytest.raises(InputError, match=f"got a {other.__name__} from environment_factory, which made a Counter befo"):
        make_trainer(say, environment_factory=lambda: next(kinds)(), reward=None, rows=None)


def test_a_class_that_the_factory_defines_anew_is_one(make_trainer):
    def make():
        class Own(Counter):
            def get_reward(self):
                return 5.0

        return Own()

    trainer = make_trainer(say, environment_factory=make, reward=None, rows=None, max_steps=1)
    result = trainer.train()
    assert len({type(one) for one in trainer.environments}) == 4
    assert result.metrics["reward"] == 5.0


def test_an_environment_may_take_the_columns_of_its_own_rows_and_the_seed(make_trainer):
    trainer = make_trainer(say, reward=None, environment_factory=OfTask, rows=[{"task": 7}] * 4, max_steps=1)
    trainer.train()
    assert trainer.scored.samples[0].episode.prompt[0]["content"].startswith("7 ")


class Given(Counter):
    def reset(self, prompt=None, **row):
        return f" {prompt}"


@pytest.mark.parametrize("rows", [None, [{"prompt": NO_PROMPT}] * 4, [{"level": 1}] * 4])
def test_an_empty_prompt_is_given_where_reset_names_it(make_trainer, rows):
    trainer = make_trainer(say, reward=None, environment_factory=Given, rows=rows, max_steps=1)
    trainer.train()
    assert all(one.episode.prompt[0]["content"].startswith(f" {NO_PROMPT}") for one in trainer.scored.samples)


class Untold:
    """A task and a reward, without a tool."""

    def reset(self, **row) -> str:
        return "Say it."

    def get_reward(self) -> float:
        return 1.0


def test_where_there_are_no_tools_a_turn_is_its_text(make_trainer):
    text = f"<think>hm</think>\n\n{call('count', number=1)}"
    trainer = make_trainer(lambda *_: text, reward=None, environment_factory=Untold, rows=None, max_steps=1)
    trainer.train()
    assert [one.episode.messages for one in trainer.scored.samples] == [[{"role": "assistant", "content": text}]] * 4


def made_of(kind: Any) -> Environments:
    return Environments(kind, [])


def reset(**members: Any) -> str | None:
    made = made_of(type("Changed", (Counter,), members))
    return made.reset(made.pool[None][0], {"prompt": "1"}, seed=0)


@pytest.mark.parametrize(
    "call_of",
    [
        lambda fails: reset(reset=fails),
        lambda fails: is_done(type("Fails", (), {"done": property(fails)})()),
        made_of,
    ],
    ids=["reset", "done", "factory"],
)
def test_whatever_an_environment_raises_is_an_error_of_ours(call_of):
    for kind in [*RAISED, SystemExit, asyncio.CancelledError]:
        with suppress(TypeError):  # of one whose arguments are more than a text
            error = kind("gone")

        def fails(*_: Any, error: Any = error, **__: Any) -> Any:
            raise error

        with pytest.raises(UnavailableError, match=f"got {type(error).__name__} from"):
            call_of(fails)


TRUTHS = [True, 1, 1.0, np.True_, np.int64(1), np.array([True]), torch.tensor(1)]
NONE = [False, 0, None, np.False_, np.zeros(1), torch.tensor(False), lambda: True]


@pytest.mark.parametrize(("value", "is_true"), [(one, True) for one in TRUTHS] + [(one, False) for one in NONE])
def test_a_truth_of_any_kind_ends_an_episode(value, is_true, caplog):
    assert is_done(type("Made", (), {"done": value})) is is_true
    assert not caplog.text


@pytest.mark.parametrize("value", ["no", ["a task"], {}])
def test_what_is_no_truth_ends_no_episode_and_is_said(value, caplog):
    warn_once.cache_clear()
    assert not is_done(type("Made", (), {"done": value})())
    assert f"got a {type(value).__name__} as `done` of Made, which ends no episode" in caplog.text


def test_what_no_tokenizer_takes_is_replaced_in_what_reset_returns():
    assert reset(reset=lambda self, **row: "a\ud800") == "a?"


def test_a_builtin_reset_which_has_no_signature_is_called_with_the_row():
    environments, row = made_of(type("Native", (Counter, dict), {"reset": dict.update})), {"prompt": SAID}
    environments.check_rows([row], name="train_dataset")
    environment = environments.take(row)
    assert environments.reset(environment, row, seed=0) is None
    assert environment == row
