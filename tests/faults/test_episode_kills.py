"""kill -9 at twenty places of episodes: the run ends bit for bit, and calls no tool for a batch that it has saved."""

import json
import random
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from clocked import read_log, unclocked
from safetensors.torch import load_file

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints, newest_checkpoint, step_of

RUN = Path(__file__).with_name("episode_run.py")
PLACES, KILLS = ("tool", "turn", "save", "between turns", "reward"), 20
ROWS, STEPS = 2, 2  # of a generated batch; the run has three of them

Call = tuple[str, int]  # the tool, and the number of the row


class Whole(NamedTuple):
    """The run that nothing disturbs."""

    end: Any
    counts: dict[str, int]  # how often it comes to each place
    calls: list[Call]


def everything(output_dir: Path) -> tuple[Any, ...]:
    """Weights, optimizer, random generators, and all that was logged."""
    last = output_dir / f"checkpoint-{3 * STEPS}"
    tensors = {
        path.name: {name: value.numpy().tobytes() for name, value in load_file(path).items()}
        for path in sorted(last.glob("*.safetensors"))
    }
    state = unclocked(json.loads((last / "training.json").read_text()))
    return tensors, state, *(read_log(path) for path in sorted(output_dir.glob("*.jsonl")))


def calls(output_dir: Path) -> list[Call]:
    """Those of all processes so far."""
    path = Path(f"{output_dir}.calls")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, int(number)) for name, number in map(str.split, lines)]


@pytest.fixture(scope="module")
def whole(fork_server, tmp_path_factory) -> Whole:
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    output = fork_server.run(RUN, output_dir, "fresh", "nowhere", 0, "SIGKILL")
    counts = json.loads(re.search(r"^counted (.*)$", output, re.MULTILINE)[1])
    assert all(counts[place] >= KILLS for place in PLACES), counts
    made = calls(output_dir)
    assert {number for _, number in made} == set(range(3 * ROWS))
    return Whole(everything(output_dir), counts, made)


def saved_step(output_dir: Path) -> int:
    try:
        return step_of(newest_checkpoint(output_dir))
    except CheckpointError:
        return 0


def resume(fork_server, output_dir: Path, whole: Whole) -> int:
    """Go on from what was saved, or from the beginning: it is the whole run. Returns the step that was saved."""
    step, made = saved_step(output_dir), len(calls(output_dir))
    fork_server.run(RUN, output_dir, "resume" if step else "fresh", "nowhere", 0, "SIGKILL")
    assert everything(output_dir) == whole.end
    # The batches that the checkpoint has, or has behind it, call no tool; the others call what they called.
    first = ROWS * -(-step // STEPS)
    assert sorted(calls(output_dir)[made:]) == sorted(one for one in whole.calls if one[1] >= first)
    return step


@pytest.mark.parametrize("case", [*range(3), *(pytest.param(x, marks=pytest.mark.full) for x in range(3, KILLS))])
def test_a_run_that_is_killed_in_its_episodes_is_the_same_run(fork_server, time_limit, whole, tmp_path, case):
    place, output_dir = PLACES[case % len(PLACES)], tmp_path / "run"
    # In each twentieth of the run once.
    share = (7 * case % KILLS + random.Random(case).random()) / KILLS
    number = 1 + int(share * whole.counts[place])
    process = fork_server.start(RUN, output_dir, "fresh", place, number, "SIGKILL")
    assert process.wait() == -signal.SIGKILL, process.output
    assert f"SIGKILL in {place} {number}\n" in process.output
    with time_limit(60):
        step = resume(fork_server, output_dir, whole)
    print(f"killed in {place} {number} of {whole.counts[place]}, resumed from step {step}")
    assert not list(output_dir.glob(".*"))


def test_sigterm_while_a_tool_runs_ends_after_the_step_half_a_batch_saved(fork_server, time_limit, whole, tmp_path):
    output_dir = tmp_path / "run"
    with time_limit(60):
        process = fork_server.start(RUN, output_dir, "fresh", "tool", 1, "SIGTERM")
        assert process.wait() == 143, process.output
    assert "SIGTERM in tool 1\n" in process.output
    assert "stopped by SIGTERM after step 1" in process.output
    assert [path.name for path in checkpoints(output_dir)] == ["checkpoint-1"]
    # All calls of the batch were made, and are not repeated.
    assert sorted(calls(output_dir)) == sorted(one for one in whole.calls if one[1] < ROWS)
    assert resume(fork_server, output_dir, whole) == 1


def test_ctrl_c_while_a_tool_runs_ends_at_once(fork_server, time_limit, whole, tmp_path):
    output_dir, number = tmp_path / "run", whole.counts["tool"]
    with time_limit(60):
        process = fork_server.start(RUN, output_dir, "fresh", "tool", number, "SIGINT")
        assert process.wait() == -signal.SIGINT, process.output
    assert process.output.splitlines()[-1] == "KeyboardInterrupt"
    assert resume(fork_server, output_dir, whole) == 4
