"""Environments: what they are given, whose methods are tools of which episode, and what they say of it."""

import asyncio
import math
import operator
import random
import re
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from talkers import call, talking_model
from transformers import TrainerCallback

from fused_grpo.errors import DataError, FusedGRPOError, InputError, RewardError, UnavailableError
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.episodes.environments import NO_PROMPT


class OnStep(TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_end(self, args, state, control, **_):
        self.call()


class Guess:
    """Guess a number that `reset` draws."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.done = False

    def reset(self, **row):
        self.done, self.tries, self.row = False, 0, row
        self.number = random.randrange(10**6)
        return f" Guess {self.number % 10}."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        self.tries += 1
        self.done = number == self.number % 10
        return "right" if self.done else "wrong"

    def get_reward(self) -> float:
        return self.done / max(1, self.tries)


class Echo:
    def reset(self, seed: int, **row):
        self.seed, self.row = seed, row

    def shout(self, text: str) -> str:
        """Shout.

        Args:
            text: What.
        """
        return text.upper()


def play(read: str, member: int) -> str:
    """Guesses right at once, at the second try, at the third, or never tries."""
    wanted, tries = re.search(r"Guess (\d)", read), re.findall(r'"number": 9(\d)', read)
    if wanted is None or (member % 4 == 3 and not tries):
        return "no"
    wrong = int(tries[0]) if tries else member % 4
    return call("guess", number=int(wanted[1]) if len(tries) == wrong else 90 + wrong)


def test_an_environment_writes_the_task_and_scores_it(make_trainer):
    Guess.made = 0
    trainer = make_trainer(play, reward=None, environment_factory=Guess, rows=None, max_steps=2)
    assert trainer.reward_func_names == ["Guess"]
    assert trainer.reward_weights.tolist() == [1.0]
    assert [tool.__name__ for tool in trainer.tools] == ["guess"]
    assert trainer.environments is None
    trainer.train()
    samples = trainer.scored.samples
    assert [one.episode.ended for one in samples] == ["done", "done", "done", "stop"]
    assert [round(one.rewards[0], 3) for one in samples] == [1.0, 0.5, 0.333, 0.0]
    assert [environment.tries for environment in trainer.environments] == [1, 2, 3, 0]
    # What ends the episode is in its messages, and in no token.
    assert samples[0].episode.messages[-1]["content"] == "right"
    assert all(samples[0].completion_mask)
    assert Guess.made == 4  # one for each member, reset for the second step
    assert trainer.environments[0].row == {}
    # One task for all that are compared.
    assert len({environment.number for environment in trainer.environments}) == 1
    assert len({tuple(one.prompt_ids) for one in samples}) == 1


def test_a_greedy_episode_has_its_groups_task_and_its_own_environment(make_trainer):
    """Its object is not one of those that are scored beside it, or later; with tools alone there is none."""
    Guess.made, tasks = 0, []

    class Seen(Guess):
        def reset(self, **row):
            text = super().reset(**row)
            tasks.append(self.number)
            return text

    options = {"reward": None, "environment_factory": Seen, "rows": None, "advantage_estimator": "remax"}
    trainer = make_trainer(play, per_device_train_batch_size=8, **options)
    metrics = trainer.train().metrics
    samples = trainer.scored.samples
    assert [round(one.rewards[0], 3) for one in samples] == [1.0, 0.5, 0.333, 0.0] * 2
    # Members are counted within a call: of two greedy episodes the first is right at once, the other then.
    assert [round(one.advantage, 3) for one in samples] == [0.0, -0.5, -0.667, -1.0, 0.5, 0.0, -0.167, -0.5]
    assert metrics["remax/greedy_reward"] == 0.75
    assert Seen.made == 8 + 2
    assert [tasks[place] for place in (8, 9)] == [tasks[0], tasks[4]]
    assert metrics["tools/turns"] == pytest.approx(sum(one.episode.turns for one in samples) / 8)


def test_tasks_differ_from_step_to_step_and_are_those_of_the_seed(make_trainer):
    def numbers(seed: int) -> list[int]:
        seen = []

        class Seen(Guess):
            def reset(self, **row):
                text = super().reset(**row)
                seen.append(self.number)
                return text

        trainer = make_trainer(play, reward=None, environment_factory=Seen, rows=None, seed=seed)
        trainer.train()
        return seen

    first = numbers(1)
    assert len(set(first)) == 2
    assert first == numbers(1)
    assert first != numbers(2)


def test_every_generator_of_the_process_draws_one_task_for_a_group(make_trainer):
    class Drawn(Guess):
        def reset(self, **row):
            return f"{random.random()} {np.random.rand()} {torch.rand(1).item()}"

    environments = make_trainer(play, reward=None, environment_factory=Drawn, rows=None).collector.rules.environments
    states = random.getstate(), torch.get_rng_state()
    one, other = (environments.reset(environments.take({}), {"prompt": NO_PROMPT}, seed=3) for _ in range(2))
    assert one == other
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_one_object_for_all_episodes_is_refused(make_trainer):
    only = Guess()
    with pytest.raises(InputError, match="got one Guess twice from environment_factory, want a new object"):
        make_trainer(play, reward=None, environment_factory=lambda: only, rows=None, max_steps=1)


def test_members_may_have_prompts_of_their_own(make_trainer):
    counter = iter(range(100))

    class Own(Guess):
        def reset(self, **row):
            super().reset(**row)
            return f" Guess {next(counter)}."

    trainer = make_trainer(play, reward=None, environment_factory=Own, rows=None, max_steps=1)
    trainer.train()
    assert len({tuple(one.prompt_ids) for one in trainer.scored.samples}) == 4


def test_rows_choose_among_several(make_trainer):
    rows = Dataset.from_list([{"environment": name, "level": 3} for name in ("guess", "echo") * 4])

    def talk(read: str, member: int) -> str:
        assert ("shout" in read) is ("Guess" not in read)
        return "no" if "shout" in read else play(read, member)

    factories = {"guess": Guess, "echo": Echo, "again": Guess}
    options = {"rows": rows, "shuffle_dataset": False, "per_device_train_batch_size": 8, "max_steps": 1}
    trainer = make_trainer(talk, environment_factory=factories, reward=lambda completions, **_: [0.0] * 8, **options)
    assert trainer.reward_func_names == ["<lambda>", "Guess"]
    trainer.train()
    assert [type(one).__name__ for one in trainer.environments] == ["Guess"] * 4 + ["Echo"] * 4
    assert trainer.environments[0].row == {"level": 3}
    assert trainer.environments[4].row == {"level": 3}
    assert len({one.seed for one in trainer.environments[4:]}) == 1
    rewards = [one.rewards for one in trainer.scored.samples]
    assert [reward[1] for reward in rewards[:4]] == [1.0, 0.5, pytest.approx(1 / 3), 0.0]
    assert all(reward[1] != reward[1] for reward in rewards[4:])  # not of its class


def test_the_schemas_of_several_environments_have_room_in_the_engine(make_trainer):
    class Wordy(Echo):
        def look(self, text: str) -> str:
            return text

        look.__doc__ = f"Look. {'At everything. ' * 200}\n\nArgs:\n    text: What for."

    rows = [{"environment": name} for name in ("echo", "wordy") * 4]
    options = {"rows": rows, "reward": lambda completions, **_: [0.0] * 8, "max_steps": 1}
    trainer = make_trainer(play, environment_factory={"echo": Echo, "wordy": Wordy}, **options)
    start, more = trainer.start, len("At everything. ") * 200  # a token for each byte
    echo, wordy = start.rules.environments.tools_of.values()
    assert start.rules.own_tokens == len(start.rules.template.encode(NO_PROMPT, wordy)) - start.limit.longest
    assert more < start.longest_sequence - 1024 - start.limit.longest - trainer.args.max_completion_length < more + 1000
    single = make_trainer(play, environment_factory=Echo, **options)
    assert single.start.rules.own_tokens == 0
    assert len(start.rules.template.encode(NO_PROMPT, echo)) == single.start.limit.longest


def test_a_row_of_no_environment_is_found_before_the_first_step(make_trainer):
    rows = [{"environment": "guess"}] * 7 + [{"environment": "chess"}]
    trainer = make_trainer(play, environment_factory={"guess": Guess}, rows=rows)
    with pytest.raises(DataError, match="environment='chess' in row 7 of train_dataset, which is not among the env"):
        trainer.train()
    assert trainer.step == 0


def stream(rows: list[dict]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def test_rows_of_a_stream_choose_among_several_too(make_trainer):
    rows = [{"environment": name, "level": level} for level, name in enumerate(("guess", "guess", "echo"))]
    factories = {"guess": Guess, "echo": Echo}
    options = {"environment_factory": factories, "reward": lambda completions, **_: [0.0] * 4, "max_steps": 3}
    trainer = make_trainer(play, rows=stream(rows), shuffle_dataset=False, **options)
    seen = []
    trainer.add_callback(OnStep(lambda: seen.append([(type(one).__name__, one.row) for one in trainer.environments])))
    trainer.train()
    assert [step[0] for step in seen] == [("Guess", {"level": 0}), ("Guess", {"level": 1}), ("Echo", {"level": 2})]
    assert all(len(set(map(repr, step))) == 1 for step in seen)


def test_a_row_of_no_environment_in_a_stream_ends_the_run_when_it_comes(make_trainer):
    rows = stream([{"environment": "guess"}, {"environment": "chess"}])
    factories = {"guess": Guess}
    trainer = make_trainer(play, reward=None, environment_factory=factories, rows=rows, shuffle_dataset=False)
    with pytest.raises(DataError, match="environment='chess'"):
        trainer.train()
    assert trainer.step == 1


def test_rewards_see_environments_and_the_prompt_with_the_task(make_trainer):
    seen = []

    def tries(prompts, completions, environments, level, **columns):
        seen.extend(prompts)
        return [float(one.tries) for one in environments]

    rows = [{"prompt": [{"role": "user", "content": "Play."}], "level": 1}] * 4
    trainer = make_trainer(play, reward=tries, environment_factory=Guess, rows=rows, max_steps=1, reward_weights=[0.5])
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    trainer.train()
    assert [one.rewards[0] for one in trainer.scored.samples] == [1.0, 2.0, 3.0, 0.0]
    assert seen[0][0]["content"].startswith("Play. Guess")
    assert trainer.environments[0].row == {"prompt": [{"role": "user", "content": "Play."}], "level": 1}


def test_an_environment_is_evaluated(make_trainer):
    rows = [{"prompt": [{"role": "user", "content": "Play."}]}] * 3
    trainer = make_trainer(play, reward=None, environment_factory=Guess, rows=rows, eval_dataset=[{"level": 1}] * 3)
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/Guess/mean"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    tasks = [environment.number for pool in trainer._environment_pool.values() for environment in pool]
    assert trainer.evaluate([{"level": 2}] * 3)["eval_reward"] == metrics["eval_reward"]
    # The same tasks at every evaluation.
    assert tasks == [environment.number for pool in trainer._environment_pool.values() for environment in pool]
    with pytest.raises(DataError, match="a string as the prompt of an episode"):
        trainer.evaluate([{"prompt": "Play."}])


class Later(Guess):
    """The same in coroutines, and it begins with parts of text."""

    def reset(self, **row):
        return [{"type": "text", "text": text} for text in super().reset(**row).partition("Guess")]

    async def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        await asyncio.sleep(0.01)
        return super().guess(number)

    async def get_reward(self) -> float:
        await asyncio.sleep(0.01)
        return super().get_reward()


def test_coroutines_and_parts_of_text_do_what_functions_and_text_do(make_trainer):
    rows = [{"prompt": [{"role": "user", "content": "Play."}], "environment": name} for name in ("later", "guess") * 4]
    factories = {"later": Later, "guess": Guess}
    options = {"rows": rows, "shuffle_dataset": False, "per_device_train_batch_size": 8, "max_steps": 1}
    trainer = make_trainer(play, reward=None, environment_factory=factories, **options)
    assert trainer.reward_func_names == ["Later", "Guess"]
    trainer.train()
    for kind, first in ((Later, 0), (Guess, 4)):
        samples, environments = trainer.scored.samples[first : first + 4], trainer.environments[first : first + 4]
        assert {type(environment) for environment in environments} == {kind}
        (number,) = {environment.number % 10 for environment in environments}
        assert samples[0].episode.prompt == [{"role": "user", "content": f"Play. Guess {number}."}]
        results = [[call.result for call in one.episode.calls] for one in samples]
        assert results == [["right"], ["wrong", "right"], ["wrong", "wrong", "right"], []]
        own, other = zip(*(one.rewards if kind is Later else one.rewards[::-1] for one in samples), strict=True)
        assert own == (1.0, 0.5, pytest.approx(1 / 3), 0.0)
        assert all(map(math.isnan, other))  # not of its class


class NoReset:
    pass


class NoSchema(Guess):
    def act(self, x) -> int:
        return x


class Breaks(Guess):
    def reset(self, **row):
        raise OSError("no connection")


class Image(Guess):
    def reset(self, **row):
        return [{"type": "image", "image": object()}]


class Long(Guess):
    def reset(self, **row):
        return "x" * 5000


class Gone(Guess):
    @property
    def done(self):
        raise OSError("gone")

    @done.setter
    def done(self, value):
        pass


class NoScore(Guess):
    def get_reward(self) -> float:
        raise OSError("no score")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"environment_factory": NoReset}, InputError, "must define a callable `reset`"),
        ({"environment_factory": NoSchema}, InputError, "'act', of which no schema"),
        ({"environment_factory": {"a": 3}, "rows": [{"environment": "a"}]}, InputError, "got 3 as environment_factory"),
        ({"environment_factory": {"a": Guess}, "rows": None}, DataError, "requires a `train_dataset`"),
        (
            {"environment_factory": Guess, "rows": None, "max_steps": -1},
            InputError,
            "max_steps=-1 and no train_dataset",
        ),
        ({"environment_factory": Guess, "rows": [{"prompt": "7"}] * 4}, DataError, "strings as prompts"),
        ({"environment_factory": Echo, "reward": None}, InputError, "No reward source"),
        ({"rows": None}, DataError, "`train_dataset` is required"),
        ({"environment_factory": Breaks}, UnavailableError, r"OSError from reset\(\) of Breaks: no connection"),
        ({"environment_factory": Image}, UnavailableError, r"a list from reset\(\) of Image"),
        (
            {"environment_factory": Long, "vllm_max_model_length": 2000},
            DataError,
            r"tokens for a prompt with what reset\(\) returned",
        ),
        ({"environment_factory": Gone}, UnavailableError, "OSError from `done` of Gone: gone"),
        ({"environment_factory": Guess, "rows": [{"environments": [1]}] * 4}, DataError, "a column 'environments'"),
        ({"environment_factory": NoScore}, RewardError, "'NoScore' raised OSError: no score"),
    ],
)
def test_an_environment_that_cannot_work_is_named(make_trainer, options, error, text):
    with pytest.raises(error, match=text) as raised:
        make_trainer(play, **options).train()
    assert isinstance(raised.value, FusedGRPOError)


class Numpy(Guess):
    """`done` of NumPy, and a property."""

    def reset(self, **row):
        self.right = np.array([False])
        return super().reset(**row)

    @property
    def done(self):
        return self.right[0]

    @done.setter
    def done(self, value):
        self.right = np.array([value])


def test_done_may_be_a_truth_of_numpy_and_a_property(make_trainer):
    trainer = make_trainer(play, reward=None, environment_factory=Numpy, rows=None, max_steps=1)
    trainer.train()
    assert [one.episode.ended for one in trainer.scored.samples] == ["done"] * 3 + ["stop"]


def test_a_prompt_of_parts_stays_one_and_what_reset_returns_is_another(make_trainer):
    parts = [{"type": "text", "text": text} for text in ("Pl", "ay.")]
    rows = [{"prompt": [{"role": "user", "content": parts}]}] * 4
    trainer = make_trainer(play, reward=None, environment_factory=Guess, rows=rows, max_steps=1)
    trainer.train()
    for sample, environment in zip(trainer.scored.samples, trainer.environments, strict=True):
        added = {"type": "text", "text": f" Guess {environment.number % 10}."}
        assert environment.row["prompt"] == rows[0]["prompt"]
        assert sample.episode.prompt == [{"role": "user", "content": [*parts, added]}]
        assert f"Play. Guess {environment.number % 10}." in trainer.processing_class.decode(sample.prompt_ids)


@dataclass
class Board:
    """A dataclass, which reward functions would be given a copy of."""

    moves: int = 0
    scored: int = 0

    def reset(self, **row):
        self.moves = 0

    def move(self, x: int) -> int:
        """Move.

        Args:
            x: Where.
        """
        self.moves += 1
        return x

    def get_reward(self) -> float:
        self.scored += 1
        return float(self.moves)


def test_reward_functions_get_the_environments_themselves(make_trainer):
    seen = []

    def look(completions, environments, **columns):
        seen.extend(environments)
        return [0.0] * len(completions)

    def talk(read: str, member: int) -> str:
        return "no" if "<answer>" in read or member % 2 else call("move", x=1)

    trainer = make_trainer(talk, reward=look, environment_factory=Board, rows=None, max_steps=1)
    trainer.train()
    assert all(map(operator.is_, seen, trainer.environments))
    assert [environment.scored for environment in trainer.environments] == [1] * 4
    assert [one.rewards[1] for one in trainer.scored.samples] == [1.0, 0.0, 1.0, 0.0]


def test_an_environment_whose_call_took_too_long_is_not_reset_again(make_trainer):
    class Slow(Guess):
        def guess(self, number: int) -> str:
            """Guess.

            Args:
                number: The guess.
            """
            time.sleep(0.0 if number < 90 else 600)
            return super().guess(number)

    trainer = make_trainer(play, reward=None, environment_factory=Slow, rows=None, max_steps=1, tool_timeout=2.0)
    trainer.train()
    pooled = trainer._environment_pool[None]
    assert [any(environment is one for one in pooled) for environment in trainer.environments] == [
        True,
        False,
        False,
        True,
    ]


def test_a_dry_run_refuses_an_environment_without_a_reward(tokenizer, tmp_path):
    talking_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    code = "class {}:\n    def reset(self, **row): return 'Say.'\n{}    def say(self) -> str:\n        'Say it.'\n"
    scores = "    def get_reward(self) -> float: return 1.0\n"
    (tmp_path / "mine.py").write_text(code.format("Silent", "") + code.format("Scored", scores))
    command = ["train", "--dry-run", "--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "run")]
    command += ["--max-steps", "1", "--environment-factory", f"{tmp_path / 'mine.py'}"]
    main([*command[:-1], f"{command[-1]}:Scored"])
    with pytest.raises(SystemExit, match=r"got reward_funcs=\[\], want .*get_reward"):
        main([*command[:-1], f"{command[-1]}:Silent"])
