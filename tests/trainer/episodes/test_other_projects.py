"""Environments of other projects: the code of docs/environments.md with the real packages, where they are installed."""

import asyncio
import importlib.util
import json
import random
import re
import sys
import threading
import time
import tomllib
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from talkers import call
from transformers.utils import get_json_schema

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError
from fused_grpo.trainer.environments import openenv, openenv_environment, textarena_environment, verifiers_task
from fused_grpo.trainer.episodes.environments import methods_of

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)
WORD_LIST, SERVER, TASKSET = 1, 2, 4
WORDS = ("crane", "house", "light", "plant", "water")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages


def needs(package):
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed (fused-grpo[{package}])")


def block(place):
    """What a block of the page defines."""
    names = {"__name__": "page"}
    exec(compile(BLOCKS[place], f"environments.md, block {place}", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("textarena", lambda: textarena_environment("Wordle-v0")),
        ("openenv.core", lambda: openenv_environment("http://localhost:8000", object)),
        ("verifiers.v1", lambda: verifiers_task("gsm8k")),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    extra = module.partition(".")[0]
    with pytest.raises(UnavailableError, match=rf"got no {module} .* pip install 'fused-grpo\[{extra}\]'"):
        make()
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


# TextArena.


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The word list that the page writes, and no network."""
    import nltk

    folder = tmp_path_factory.mktemp("words")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        block(WORD_LIST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(folder / "nltk_data")])
        patch.setattr(nltk, "download", lambda *_, **__: False)
        yield


def guess_words(read: str, member: int) -> str:
    """The words in their order, each member from another one on; the fourth does not play."""
    guessed = re.findall(r'"action": "(\w+)"', read)
    if member == 3 and not guessed:
        return "no"
    place = WORDS.index(guessed[-1]) + 1 if guessed else member
    return call("act", action=WORDS[place % len(WORDS)])


@needs("textarena")
def test_members_of_a_group_play_for_the_same_word(words, make_trainer):
    options = {"reward": None, "rows": None, "max_steps": 1, "max_completion_length": 2000}
    trainer = make_trainer(guess_words, environment_factory=textarena_environment("Wordle-v0"), **options)
    assert trainer.reward_func_names == ["Wordle-v0"]
    trainer.train()
    samples = trainer.scored.samples
    assert [one.rewards[0] for one in samples] == [1.0, 1.0, 1.0, 0.0]
    assert [one.episode.ended for one in samples] == ["done", "done", "done", "stop"]
    games = [environment._game.state.game_state for environment in trainer.environments]
    secret = WORDS.index(games[0]["secret_word"])
    assert {game["secret_word"] for game in games} == {WORDS[secret]}
    # From its own word on, round the list; nothing is said twice.
    assert [len(game["guess_history"]) for game in games] == [(secret - m) % 5 + 1 for m in range(3)] + [0]
    for one in samples[:3]:
        answers = [message["content"] for message in one.episode.messages if message["role"] == "tool"]
        assert all(text.count("Feedback:") == 1 for text in answers[:-1])
        assert answers[-1] == "Congratulations! You guessed the word correctly!"
    assert samples[0].episode.prompt[-1]["content"].startswith("You are Playing Wordle.")


@needs("textarena")
def test_a_game_is_that_of_its_seed_and_its_options():
    kind = textarena_environment("GuessTheNumber-v0", max_number=9)
    environment, other, numbers = kind(), kind(), []
    for seed in (1, 1, 2, 3, 4, 5):
        assert "between 1 and 9" in environment.reset(seed=seed, level="hard")
        numbers.append(environment._game.game_number)
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) > 1
    other.reset(seed=1)
    assert (other._game.game_number, environment._game.game_number) == (numbers[0], numbers[-1])
    (act,) = methods_of(environment)
    assert act(action="0").startswith("You attempted an invalid move.")
    assert (environment.done, environment.get_reward()) == (False, 0.0)
    assert act(action=str(numbers[-1])) == "Congratulations! You guessed the correct number."
    assert (environment.done, environment.get_reward(), other.done) == (True, 1.0, False)
    with pytest.raises(ValueError, match="the game is over"):
        act(action="1")
    environment.reset(seed=1)
    assert (environment.done, environment.get_reward()) == (False, 0.0)


@needs("textarena")
@pytest.mark.parametrize(
    ("game", "options", "error", "text"),
    [
        ("Wordel-v0", {}, InputError, "Wordel-v0 not found"),
        ("GuessTheNumber-v0", {"colour": 1}, InputError, "unexpected keyword argument 'colour'"),
        ("TicTacToe-v0", {}, UnsupportedError, "'TicTacToe-v0', a game for several players"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_at_once(game, options, error, text):
    with pytest.raises(error, match=text):
        textarena_environment(game, **options)


@needs("textarena")
def test_a_game_that_swaps_the_fields_of_an_observation_is_played():
    environment = textarena_environment("Countdown-v0")()
    assert "target" in environment.reset(seed=1).lower()
    assert isinstance(environment.act(action="1 + 1"), str)


@needs("textarena")
def test_a_game_that_swaps_reward_and_reason_of_an_invalid_move_is_scored():
    environment = textarena_environment("ThreeCardMonte-v0")()
    environment.reset(seed=1)
    while not environment.done:
        said = environment.act(action="no")
    assert said.endswith("Invalid Move: Bad action. Use `[k]`.")
    assert environment.get_reward() == 0.0


# OpenEnv.


@contextmanager
def serving(app):
    """The URL of a server."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def server():
    """The URL of the page's server, and its action."""
    names = block(SERVER)
    with serving(names["app"]) as url:
        yield url, names["Guess"]


def search(read: str, member: int) -> str:
    """From the member's own number on, one by one; the fourth does not play."""
    guessed, answers = re.findall(r'"number": (\d+)', read), re.findall("<answer>(higher|lower)", read)
    if guessed:
        return call("step", number=int(guessed[-1]) + (1 if answers[-1] == "higher" else -1))
    return "no" if member == 3 else call("step", number=member)


@needs("openenv")
def test_episodes_are_sessions_of_a_server(server, make_trainer):
    factory = openenv_environment(*server, show=lambda observation: observation["text"])
    options = {"reward": None, "rows": None, "max_steps": 2, "max_completion_length": 2000}
    trainer = make_trainer(search, environment_factory=factory, **options)
    assert trainer.reward_func_names == ["OpenEnv"]
    trainer.train()
    samples = trainer.scored.samples
    number = samples[0].episode.calls[-1].arguments["number"]
    rewards = [1 / (abs(number - start) + 1) for start in range(3)]  # one number for all
    assert [one.rewards[0] for one in samples] == pytest.approx([*rewards, 0.0])
    assert [one.episode.ended for one in samples] == ["done", "done", "done", "stop"]
    assert samples[0].episode.messages[-1]["content"] == "right"


@needs("openenv")
def test_rewards_and_observations_are_those_of_the_session(server):
    environment = openenv_environment(*server, reward=lambda rewards: 10.0 * len(rewards))()
    first = environment.reset(seed=3, prompt=[{"role": "user", "content": "Play."}], level=1)
    assert json.loads(first) == {"text": "Guess my number, from 0 to 9."}
    (step,), number = methods_of(environment), random.Random(3).randrange(10)
    assert json.loads(step(number=number + 1)) == {"text": "lower"}
    assert (environment.done, environment.get_reward()) == (False, 10.0)
    assert json.loads(step(number=number)) == {"text": "right"}
    assert (environment.done, environment.get_reward()) == (True, 20.0)
    with pytest.raises(ValueError, match="the episode has ended"):
        step(number=number)
    assert environment.reset(seed=3) == first
    assert (environment.done, environment.get_reward()) == (False, 0.0)


@needs("openenv")
def test_an_answer_that_comes_too_late_is_not_that_of_the_next_message(server, monkeypatch):
    environment = openenv_environment(*server)()
    first = environment.reset(seed=3)
    monkeypatch.setattr(environment._session, "step", mock.Mock(side_effect=TimeoutError))
    with pytest.raises(TimeoutError):
        environment.step(number=1)
    assert environment.done
    monkeypatch.undo()
    assert environment.reset(seed=3) == first


@needs("openenv")
@pytest.mark.parametrize("fields", [{"number": "many"}, {"number": 1, "colour": "red"}, {}])
def test_an_action_that_is_not_valid_is_no_step(server, fields):
    environment = openenv_environment(*server)()
    environment.reset(seed=3)
    (step,) = methods_of(environment)
    described = {"number": {"type": "integer", "description": "Your guess, from 0 to 9."}}
    parameters = {"type": "object", "properties": described, "required": ["number"]}
    description = {"name": "step", "description": "Guess the number.", "parameters": parameters}
    assert get_json_schema(step)["function"] == description
    with pytest.raises(ValueError, match=r"number|colour"):
        step(**fields)
    step(number=random.Random(3).randrange(10))
    assert environment.get_reward() == 1.0  # at the first guess


@needs("openenv")
def test_a_server_with_fewer_sessions_than_episodes_says_so(server, make_trainer):
    from openenv.core.env_server import create_fastapi_app

    names = block(SERVER)
    app = create_fastapi_app(*(names[name] for name in ("Numbers", "Guess", "Answer")), max_concurrent_envs=1)
    with serving(app) as url:
        factory = openenv_environment(url, server[1], show=lambda observation: observation["text"])
        with pytest.raises(UnavailableError, match=r"allows fewer at the same time \(max_concurrent_envs\)"):
            make_trainer(search, environment_factory=factory, reward=None, rows=None, max_steps=1).train()


@needs("openenv")
@pytest.mark.parametrize("action", [dict, None, "Guess"])
def test_an_action_that_is_none_is_refused(server, action):
    with pytest.raises(InputError, match="as the action, want a class of Action"):
        openenv_environment(server[0], action)


@needs("openenv")
def test_a_server_that_is_not_there_ends_the_start(server, make_trainer):
    factory = openenv_environment("http://127.0.0.1:1", server[1])
    with pytest.raises(UnavailableError, match="ConnectionError from environment_factory"):
        make_trainer(search, environment_factory=factory, reward=None, rows=None)


def test_the_fields_of_an_action_are_the_arguments_of_its_tool():
    pydantic = pytest.importorskip("pydantic")

    class Move(pydantic.BaseModel):
        to: str = pydantic.Field(description="Where,\n such as e4.")
        piece: Literal["king", "pawn"] | None = None
        metadata: dict[str, Any] = {}  # noqa: RUF012

    def step(self, **fields):
        return fields

    openenv._describe(step, Move)
    schema = get_json_schema(types.MethodType(step, object()))["function"]
    assert (schema["name"], schema["description"]) == ("step", "Take a step.")
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "to": {"type": "string", "description": "Where, such as e4."},
            "piece": {"type": "string", "enum": ["king", "pawn"], "nullable": True, "description": "piece"},
        },
        "required": ["to"],
    }


# verifiers.


@pytest.fixture
def page():
    """The page's taskset; its classes are made for each test."""
    return types.SimpleNamespace(**block(TASKSET))


@needs("verifiers")
def test_rows_and_rewards_are_those_of_the_taskset(page):
    task = verifiers_task(page.Sums(page.vf.TasksetConfig()), heldout_size=20)
    assert (task.name, len(task.train), len(task.heldout)) == ("Sums", 80, 20)
    row = task.heldout[12]
    assert row == {"prompt": [{"role": "user", "content": "1 + 2?"}], "task_number": 12}
    said = [[{"role": "assistant", "content": text}] for text in ("3", "12", "")]
    columns = {name: [value] * 3 for name, value in row.items() if name != "prompt"}
    rewards = asyncio.run(task.reward(prompts=[row["prompt"]] * 3, completions=said, **columns))
    assert rewards == [1 + 0.5, 0.5 / 2, 0.5]


@needs("verifiers")
def test_a_taskset_is_trained(page, make_trainer):
    task = verifiers_task(page.Sums(page.vf.TasksetConfig()))

    def say(read: str, member: int) -> str:
        a, b = map(int, re.search(r"(\d) \+ (\d)\?", read).groups())
        return str(a + b + 100 * (member % 2))

    trainer = make_trainer(say, reward=task.reward, rows=task.train, max_steps=1)
    assert trainer.reward_func_names == ["Sums"]
    trainer.train()
    assert [one.rewards[0] > 1 for one in trainer.scored.samples] == [True, False, True, False]


def hook():
    async def hook(self, trace, runtime):
        return 0.0

    return hook


BEYOND = {
    "setup()": lambda vf: {"setup": hook()},
    "the stop condition hook": lambda vf: {"hook": vf.stop(hook())},
    "a runtime for the reward hook": lambda vf: {"hook": vf.reward(hook())},
    "the tools Toolset": lambda vf: {"toolsets": staticmethod(lambda config: [vf.Toolset(vf.ToolsetConfig())])},
    "a container": lambda vf: {"NEEDS_CONTAINER": True},
    "finalize()": lambda vf: {"finalize": hook()},
    "stage_verifier()": lambda vf: {"stage_verifier": hook()},
    "rewards of their own": lambda vf: dict.fromkeys(("right", "brief")),
}


@needs("verifiers")
@pytest.mark.parametrize("what", BEYOND)
def test_a_task_that_needs_more_than_its_rewards_is_refused(page, what):
    for name, value in BEYOND[what](page.vf).items():
        setattr(page.Sum, name, value)
    with pytest.raises(UnsupportedError, match=re.escape(f"got tasks of Sums that need {what}")):
        verifiers_task(page.Sums(page.vf.TasksetConfig()))


@needs("verifiers")
def test_each_class_of_tasks_of_a_taskset_is_looked_at(page):
    class Other(page.Sum):
        setup = hook()

    last = Other(page.SumData(prompt="1 + 1?", answer="2"))
    page.Sums.load = lambda self, load=page.Sums.load: [*load(self), last]
    with pytest.raises(UnsupportedError, match=r"that need setup\(\)"):
        verifiers_task(page.Sums(page.vf.TasksetConfig()))


@needs("verifiers")
def test_a_reward_with_a_default_runtime_is_called_without_one(page):
    async def right(self, trace, runtime=None):
        return float(runtime is None)

    page.Sum.right = page.vf.reward(right)
    row = {
        "prompts": [[{"role": "user", "content": "0 + 0?"}]],
        "completions": [[{"role": "assistant", "content": ""}]],
        "task_number": [0],
    }
    task = verifiers_task(page.Sums(page.vf.TasksetConfig()))
    assert asyncio.run(task.reward(**row)) == [1.0 + 0.5]


@needs("verifiers")
@pytest.mark.parametrize("sizes", [{"size": -1}, {"size": 1.5}, {"heldout_size": -1}])
def test_what_is_no_taskset_or_number_of_rows_is_refused(page, sizes):
    with pytest.raises(InputError, match="want numbers of rows"):
        verifiers_task(page.Sums(page.vf.TasksetConfig()), **sizes)
    for wrong in (page.Sums, None, "no_such_taskset", ""):
        with pytest.raises(InputError, match=r"^got .*askset"):
            verifiers_task(wrong)


@needs("verifiers")
def test_a_taskset_without_an_end_needs_a_size(page):
    page.Sums.INFINITE = True
    sums = page.Sums(page.vf.TasksetConfig())
    with pytest.raises(InputError, match="got Sums, which has no end"):
        verifiers_task(sums)
    task = verifiers_task(sums, size=3, heldout_size=2)
    assert [[row["task_number"] for row in rows] for rows in (task.train, task.heldout)] == [[2, 3, 4], [0, 1]]
    with pytest.raises(InputError, match="got 100 tasks of Sums, want more than heldout_size=100"):
        verifiers_task(sums, size=3, heldout_size=100)
