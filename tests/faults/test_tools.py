"""Tools and environments that fail: the model reads it in that episode alone, or the run ends with the cause."""

import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from faulty_tools import (
    ACTS,
    LET_GO,
    SOUND,
    WRITTEN,
    Desk,
    everything,
    fail,
    lines,
    make,
    play,
    points,
    text,
    told,
    weights,
)
from talkers import END, Talker, call

from fused_grpo.errors import (
    CheckpointError,
    DataError,
    FusedGRPOError,
    InputError,
    RewardError,
    UnavailableError,
    WeightSyncError,
)
from fused_grpo.trainer.logging import run_output
from fused_grpo.trainer.types import Rollouts, Sample

by = partial(call, "odd")


@pytest.fixture(autouse=True)
def _nothing_hangs_on(monkeypatch):
    monkeypatch.setattr(run_output, "write_report", lambda folder: folder / "report.html")  # longer than the run
    LET_GO.clear()
    yield
    LET_GO.set()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The samples of two steps in which nothing fails, with tools (None) and with environments."""
    runs = {kind: play(tmp_path_factory.mktemp("sound"), factory=kind, max_steps=2) for kind in (None, Desk)}
    return {kind: [list(map(told, batch.samples)) for batch in trainer.batches] for kind, trainer in runs.items()}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A run in which a tool does nothing."""
    folder = tmp_path_factory.mktemp("quiet")
    return everything(folder, play(folder, by(act="acts"), max_steps=2))


class Fault(NamedTuple):
    """What the first member says in the first step, and what comes of its calls."""

    said: str
    reads: str = ""  # an expression, of all that its tools answer
    failed: tuple[bool, ...] = (True,)
    ended: str = "stop"
    options: Any = None


HANGS = {"tool_timeout": 0.5, "max_steps": 2}
DESK = {"factory": Desk}
EXITS = call("later", act="exits") + call("later", act="answers")
STOPS = call("later", act="stops the loop") + call("later", act="answers")
FAULTS = {
    "raises": Fault(by(act="raises"), r"bad\\\\x1b\[31m input"),
    "raises what has no text": Fault(by(act="has no text"), "Mute"),
    "raises what exits when it is written": Fault(by(act="has a text that exits"), "Leaves"),
    "raises 10 MB": Fault(by(act="says 10 MB"), "yyy.*characters.*yyy", ended="no room"),
    "exits": Fault(by(act="exits"), r"\{'error': '3'\}"),
    "is interrupted": Fault(by(act="is interrupted"), "'KeyboardInterrupt'"),
    "stops iterating": Fault(by(act="stops iterating"), "'StopIteration'"),
    "recurses": Fault(by(act="recurses"), "maximum recursion depth"),
    "wants more memory than there is": Fault(by(act="wants memory"), "'MemoryError'"),
    "handles signals": Fault(by(act="handles signals"), "only works in main thread"),
    "hangs": Fault(by(act="hangs"), "odd took longer than 0.5 s", options=HANGS),
    "returns None": Fault(by(act="None"), "^None$", (False,)),
    "returns bytes": Fault(by(act="bytes"), r"^b'\\x00\\xff'$", (False,)),
    "returns a lone surrogate": Fault(by(act="a lone surrogate"), r"^a\?$", (False,)),
    "returns NaN": Fault(by(act="NaN"), "^nan$", (False,)),
    "returns a number of 5,000 digits": Fault(by(act="5,000 digits"), "Exceeds the limit"),
    "returns 100,000 levels": Fault(by(act="100,000 levels"), "recursion|[Oo]verflow"),
    "returns what has no text": Fault(by(act="what has no text"), "no text"),
    "returns what is written for ever": Fault(by(act="what is written for ever"), "took longer", options=HANGS),
    "returns an image": Fault(by(act="an image"), "the model reads text alone"),
    "returns rows that look like parts": Fault(by(act="rows"), r"^\[\{'type': 3\}\]$", (False,)),
    "returns 50 MB": Fault(by(act="50 MB"), r"x \[…49990000 characters…\] x", (False,), "no room"),
    "returns special tokens": Fault(by(act="special tokens"), r"system\nObey\.$", (False,)),
    "edits its arguments": Fault(by(act="edits", values=[3, 1, 2]), "^None$", (False,)),
    "fills the room": Fault(by(act="fills"), "^x{380}$", (False,), "no room"),
    "raises later": Fault(call("later", act="raises"), "bad input"),
    "exits later": Fault(EXITS, "'3'.*\ndone$", (True, False), options=HANGS),
    "is interrupted later": Fault(call("later", act="is interrupted"), "'KeyboardInterrupt'", options=HANGS),
    "cancels itself": Fault(call("later", act="cancels itself"), "'CancelledError'"),
    "hangs later": Fault(call("later", act="hangs"), "later took longer than 0.5 s", options=HANGS),
    "does not end when it is cancelled": Fault(call("later", act="stays"), "later took longer", options=HANGS),
    "blocks the event loop": Fault(call("later", act="blocks"), "later took longer", options=HANGS),
    "stops the event loop": Fault(STOPS, "^stopped\ndone$", (False, False), options=HANGS),
    "hangs before a call": Fault(by(act="hangs") + SOUND, "\n.*multiply was not called", (True, True), options=HANGS),
    "hangs after a call": Fault(SOUND + by(act="hangs"), "^7\n.*odd took longer", (False, True), options=HANGS),
    "hangs beside a coroutine": Fault(
        by(act="hangs") + call("later", act="answers"), "took longer.*\ndone$", (True, False), options=HANGS
    ),
    "is not there": Fault(call("divide", a=1), r"Tool divide not found\."),
    "has a name of special tokens": Fault(
        '<tool_call>\n{"name": "\\u003c|im_end|>", "arguments": {}}\n</tool_call>', r"Tool <\|im_end\|> not found"
    ),
    "gets no argument": Fault(call("multiply"), "missing 2 required positional arguments"),
    "gets an argument too many": Fault(call("multiply", a=1, b=1, c=1), "unexpected keyword argument 'c'"),
    "gets arguments of another type": Fault(call("multiply", a="x", b=[1]), "can't multiply sequence"),
    "gets a list": Fault('<tool_call>\n{"name": "odd", "arguments": [1]}\n</tool_call>', "must be a mapping, not list"),
    "gets 600 levels": Fault(
        f'<tool_call>\n{{"name": "odd", "arguments": {{"values": {"[" * 600}{"]" * 600}}}}}\n</tool_call>',
        failed=(),
        options={"max_completion_length": 1600},
    ),
    "is called by half": Fault('<tool_call>\n{"name": "odd", "argu', failed=()),
    "is called beyond the limit": Fault(by(act="x" * 500), failed=(), ended="length"),
    "is called in a turn that is cut": Fault(by(act="raises") + "y" * 500, failed=(), ended="length"),
    "is answered by the model": Fault("<answer>7</answer>", failed=()),
    "is called for ever": Fault(
        SOUND,
        "^7\n7$",
        (False, False),
        "turn limit",
        {"again": True, "max_tool_calling_iterations": 2, "max_completion_length": 900},
    ),
    "is a method that raises": Fault(by(act="raises"), "out of stock", options=DESK),
    "is the reset of the environment": Fault(call("reset"), "Tool reset not found", options=DESK),
    "is the reward of the environment": Fault(call("get_reward"), "Tool get_reward not found", options=DESK),
    "gets another self": Fault(call("multiply", self=1, a=1, b=1), "multiple values for argument 'self'", options=DESK),
    "returns 50 MB and is done": Fault(by(act="ends"), r"x \[…49990000 characters…\] x", (False,), "done", DESK),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_call_that_goes_wrong_is_in_its_own_episode_alone(sound, time_limit, tmp_path, name):
    fault = FAULTS[name]
    options = fault.options or {}
    with time_limit(15):
        trainer = play(tmp_path, fault.said, **options)
    (first, *others), *second = (batch.samples for batch in trainer.batches)
    wanted = sound[options.get("factory")]
    assert list(map(told, others)) == wanted[0][1:]
    for batch in second:  # of other weights, so that log-probs differ
        assert [told(one)["episode"] for one in batch] == [one["episode"] for one in wanted[1]]
    check_record(fault, first, tmp_path)
    frequency = lines(tmp_path, "metrics.jsonl")[0]["tools/failure_frequency"]
    assert frequency == pytest.approx(sum(fault.failed) / (3 + len(fault.failed)))


def check_record(fault: Fault, sample: Sample, folder: Path) -> None:
    """The record says what the model read and what the reward was given, and no token of a tool is in the loss."""
    record = lines(folder, "rollouts.jsonl")[0]
    made, own = record["tool_calls"], text(sample, own=True)
    results = [one["result"] for one in made]
    read = [one["content"] for one in record["messages"] if one["role"] == "tool"]
    assert record["ended"] == fault.ended
    assert tuple(one["failed"] for one in made) == fault.failed
    assert all(one["result"].startswith("{'error': ") for one in made if one["failed"])
    assert re.search(fault.reads, "\n".join(results))
    assert all(json.dumps(one["arguments"]) in fault.said for one in made)
    assert read == ([] if fault.ended == "no room" else results)
    in_tokens = re.findall("<answer>(.*?)</answer>", text(sample, own=False), re.DOTALL)
    assert in_tokens == ([] if fault.ended == "done" else read)
    assert own.startswith(fault.said[: len(own)])
    assert own.count(END) == record["turns"] - (fault.ended == "length")
    assert record["rewards"]["points"] == pytest.approx(points([record["messages"]])[0])
    assert len(json.dumps(record)) < 50_000


def broken(**methods: Any) -> dict[str, Any]:
    """A run at desks with these methods, which fail in the second step."""
    return {"factory": type("Broken", (Desk,), methods)}


def third(make_one: Callable[[], Any]) -> dict[str, Any]:
    """A run whose third desk is made by this; the first step needs four."""
    made = itertools.count()
    return {"factory": lambda: make_one() if next(made) == 2 else Desk()}


def engine(breaks: Callable[[Rollouts], Rollouts]) -> dict[str, Any]:
    """A run whose engine returns something else in the second turn of the second step."""

    class Broken(Talker):
        def generate(self, *arguments: Any) -> Rollouts:
            rollouts = super().generate(*arguments)
            return breaks(rollouts) if len(self.calls) == 4 else rollouts

    return {"engine": Broken}


def first_with(rollouts: Rollouts, ids: list[int], logprobs: list[float]) -> Rollouts:
    """The first completion is another one."""
    return replace(
        rollouts,
        completion_ids=[ids, *rollouts.completion_ids[1:]],
        sampling_logprobs=[logprobs, *rollouts.sampling_logprobs[1:]],
    )


UNREACHABLE = "got no answer from the engine, want one; fix: start it"
# (options, error, its text, steps that were made before)
ENDS: dict[str, tuple[dict[str, Any], type[FusedGRPOError], str, int]] = {
    "reset raises": (
        broken(_begin=lambda _: fail(OSError("no connection"))),
        UnavailableError,
        r"OSError from reset\(\) of Broken: no connection; want",
        1,
    ),
    "reset exits": (broken(_begin=lambda _: sys.exit(3)), UnavailableError, r"SystemExit from reset\(\) of Broken", 1),
    "reset returns a number": (broken(_begin=lambda _: 7), UnavailableError, r"a int from reset\(\) of Broken", 1),
    "reset returns an image": (
        broken(_begin=lambda _: [{"type": "image", "image": object()}]),
        UnavailableError,
        r"a list from reset\(\) of Broken",
        1,
    ),
    "reset returns too much": (
        broken(_begin=lambda _: "x" * 5000) | {"vllm_max_model_length": 2400},
        DataError,
        r"got \d+ tokens for a prompt with what reset\(\) returned, want at most 2000",
        1,
    ),
    "reset returns megabytes": (
        broken(_begin=lambda _: "x" * 3_000_000) | {"vllm_max_model_length": 2400},
        DataError,
        r"got 23437 tokens for a prompt with what reset\(\) returned, want at most 2000",
        1,
    ),
    "get_reward raises": (
        broken(_value=lambda _: fail(OSError("no score"))),
        RewardError,
        "'Broken' raised OSError: no score; at prompt",
        1,
    ),
    "get_reward exits": (broken(_value=lambda _: sys.exit(3)), RewardError, "'Broken' raised SystemExit: 3", 1),
    "get_reward returns NaN": (broken(_value=lambda _: math.nan), RewardError, "'Broken' returned nan at prompt", 1),
    "get_reward returns text": (broken(_value=lambda _: "much"), RewardError, "'Broken' returned 'much' at prompt", 1),
    "get_reward hangs": (
        broken(_value=lambda _: LET_GO.wait(30)) | {"reward_timeout": 0.5},
        RewardError,
        "'Broken' took longer than 0.5 s",
        1,
    ),
    "done raises": (
        broken(_end=lambda _: fail(OSError("gone"))),
        UnavailableError,
        "OSError from `done` of Broken: gone",
        1,
    ),
    "done exits": (broken(_end=lambda _: sys.exit(3)), UnavailableError, "SystemExit from `done` of Broken: 3", 1),
    "the factory raises": (
        third(lambda: fail(OSError("no desk"))),
        UnavailableError,
        "OSError from environment_factory: no desk",
        0,
    ),
    "the factory exits": (third(lambda: sys.exit(3)), UnavailableError, "SystemExit from environment_factory: 3", 0),
    "the factory makes None": (
        third(lambda: None),
        InputError,
        "got a NoneType from environment_factory, which made a",
        0,
    ),
    "the engine is gone": (engine(lambda _: fail(UnavailableError(UNREACHABLE))), UnavailableError, UNREACHABLE, 1),
    "the engine returns NaN": (
        engine(lambda rollouts: first_with(rollouts, [5, 1], [-1.0, math.nan])),
        UnavailableError,
        "got log-prob nan in completion 0 of prompt 0 .* from the talker engine",
        1,
    ),
    "the engine returns a token that there is not": (
        engine(lambda rollouts: first_with(rollouts, [-1, 1], [-1.0, -1.0])),
        UnavailableError,
        "got token id -1 in completion 0 of prompt 0 .* from the talker engine",
        1,
    ),
    "the engine returns an empty turn": (
        engine(lambda rollouts: first_with(rollouts, [], [])),
        UnavailableError,
        "got no token.* in completion 0 of prompt 0 .* from the talker engine",
        1,
    ),
    "the engine returns a turn too few": (
        engine(lambda rollouts: replace(rollouts, completion_ids=rollouts.completion_ids[1:])),
        UnavailableError,
        "got 3 completions from the talker engine, want 1 completions for each of 4 prompts",
        1,
    ),
    "the engine returns a turn of old weights": (
        engine(lambda rollouts: replace(rollouts, weight_version=0)),
        WeightSyncError,
        "got completions of weight version 0 from the talker engine",
        1,
    ),
    "a tool removes the folder of the run": (
        {"said": by(act="removes")},
        CheckpointError,
        r"No such file or directory while writing .*rollouts\.jsonl",
        0,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_no_episode_can_go_on_without_ends_the_run(time_limit, tmp_path, name):
    options, error, message, steps = ENDS[name]
    trainer = make(tmp_path, max_steps=2, **options)
    learn, weights_by_step = trainer.learner.learn, [weights(trainer)]
    trainer.learner.learn = lambda *a, **k: (learn(*a, **k), weights_by_step.append(weights(trainer)))[0]
    with time_limit(15), pytest.raises(error, match=message) as raised:
        trainer.train()
    assert isinstance(raised.value, FusedGRPOError)
    assert re.search("want|fix", str(raised.value))
    assert trainer.step == steps == len(lines(tmp_path, "metrics.jsonl")) == len(weights_by_step) - 1
    assert weights(trainer) == weights_by_step[-1]


def quietly(effect: Callable[[], Any]) -> Callable[[Any], str]:
    def act(_: Any) -> str:
        effect()
        return "done"

    return act


def seed_generators() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def leave_threads() -> None:
    for _ in range(8):
        threading.Thread(target=LET_GO.wait, args=(30,), daemon=True).start()


def fork() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


EFFECTS: dict[str, Callable[[], Any]] = {
    "seeds the generators": seed_generators,
    "turns gradients off": lambda: torch.set_grad_enabled(False),
    "leaves threads behind": leave_threads,
    "goes elsewhere": lambda: os.chdir("/"),
    "redirects the output": lambda: setattr(sys, "stdout", io.StringIO()),
    "has no output": lambda: setattr(sys, "stdout", None),
    "closes the output": lambda: sys.stdout.close(),
    "forks": fork,
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12's, for any process with threads
@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_tool_does_to_the_process_changes_nothing_of_the_run(quiet, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    monkeypatch.setitem(ACTS, "acts", quietly(EFFECTS[name]))
    trainer = play(tmp_path, by(act="acts"), max_steps=2, output_dir="run")
    assert sys.stdout is printed
    assert everything(tmp_path, trainer) == quiet


def test_a_run_outlives_its_working_directory(quiet, tmp_path, monkeypatch):
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setitem(ACTS, "acts", quietly(lambda: shutil.rmtree(here, ignore_errors=True)))
    trainer = play(tmp_path, by(act="acts"), max_steps=2)
    assert not here.exists()
    assert everything(tmp_path, trainer) == quiet


def test_sigterm_from_a_tool_stops_the_run_after_the_step(quiet, tmp_path, monkeypatch):
    monkeypatch.setitem(ACTS, "acts", quietly(lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(SystemExit) as stopped:
        play(tmp_path, by(act="acts"), max_steps=2)
    assert stopped.value.code == 143
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    resumed = play(tmp_path, by(act="acts"), max_steps=2, resume_from_checkpoint=True)
    assert everything(tmp_path, resumed) == quiet


def test_a_call_that_goes_on_writes_into_no_later_episode(sound, tmp_path):
    def begin(desk: Desk) -> None:
        LET_GO.set()
        assert WRITTEN.wait(30)

    WRITTEN.clear()
    trainer = play(tmp_path, by(act="writes late"), **broken(_begin=begin), **HANGS)
    first, second = (list(map(told, batch.samples)) for batch in trainer.batches)
    assert "took longer" in first[0]["episode"][1][1]["content"]
    wanted = sound[Desk][1]
    assert [(one["episode"], one["rewards"]) for one in second] == [(one["episode"], one["rewards"]) for one in wanted]


def test_an_episode_that_its_environment_does_not_score_is_in_no_mean(tmp_path):
    play(tmp_path, by(act="scores nothing"), factory=Desk)
    rewards = [record["rewards"]["Desk"] for record in lines(tmp_path, "rollouts.jsonl")]
    assert rewards == [None, 1.0, 1.0, 1.0]
    assert lines(tmp_path, "metrics.jsonl")[0]["rewards/Desk/mean"] == 1.0


def test_what_reset_edits_is_its_own(sound, tmp_path):
    def reset(desk: Desk, prompt: Any, **row: Any) -> None:
        Desk.reset(desk, prompt, **row)
        prompt[0]["content"] = "?"
        prompt.clear()

    trainer = play(tmp_path, factory=type("Desk", (Desk,), {"reset": reset}), max_steps=2)
    assert [list(map(told, batch.samples)) for batch in trainer.batches] == sound[Desk]
