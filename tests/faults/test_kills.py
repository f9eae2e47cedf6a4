"""kill -9 at thirty points, in a save and elsewhere: a complete checkpoint is found, and the run ends bit for bit.

The same with two batches in flight.
"""

import json
import random
import time
from pathlib import Path

import pytest
from clocked import read_log, unclocked
from safetensors.torch import load_file

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints, newest_checkpoint, verify_checkpoint

RUN = Path(__file__).parents[1] / "trainer" / "resume_run.py"
CHAINS = 6  # runs, each of which is killed five times
OUTSIDE = ("generation", "accumulation", "logging")


def kills(chain):
    """Where one run is killed, again and again. A save of this run changes files about forty times."""
    draw = random.Random(chain)
    yield OUTSIDE[chain % 3], draw.randint(0, 4)
    yield "wait", draw.uniform(0, 0.04)
    yield "operation in a save", draw.randint(1, 40)
    yield OUTSIDE[(chain + 1) % 3], draw.randint(0, 6)
    yield "operation in a save", draw.randint(1, 40)


def contents(path):
    return {name: value.numpy().tobytes() for name, value in load_file(path).items()}


def everything(output_dir):
    """Weights, optimizer, random generators, and all that was logged."""
    last = output_dir / "checkpoint-10"
    tensors = {path.name: contents(path) for path in sorted(last.glob("*.safetensors"))}
    state = unclocked(json.loads((last / "training.json").read_text()))
    return tensors, state, *(read_log(path) for path in sorted(output_dir.glob("*.jsonl")))


@pytest.fixture(scope="module", params=["transformers", pytest.param("queue", marks=pytest.mark.full)])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def undisturbed(fork_server, engine, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    fork_server.run(RUN, output_dir, engine, "fresh", "nowhere", 0)
    return everything(output_dir)


def how_to_start(output_dir, history):
    """Resumed where a save was finished before; else from the beginning."""
    try:
        verify_checkpoint(newest_checkpoint(output_dir))
    except CheckpointError:
        assert "a save is done" not in history
        return "fresh"
    return "resume"


def kill(fork_server, output_dir, engine, start, where, number):
    """Start the run and kill it; returns its output."""
    process = fork_server.start(RUN, output_dir, engine, start, where, number if where != "wait" else 0)
    if where == "wait":
        deadline = time.monotonic() + 120
        while "a save begins" not in process.output and process.poll() is None:
            assert time.monotonic() < deadline, process.output
            time.sleep(0.002)
        time.sleep(number)
        process.kill()
    assert process.wait() == -9, process.output
    print(f"{start}, {where} {number}:", *process.output.splitlines()[-1:])
    return process.output


@pytest.mark.parametrize("chain", [0, *(pytest.param(x, marks=pytest.mark.full) for x in range(1, CHAINS))])
def test_a_run_that_is_killed_again_and_again_is_the_same_run(
    fork_server, time_limit, engine, undisturbed, tmp_path, chain
):
    output_dir, history, inside, outside = tmp_path / "run", "", 0, 0
    for where, number in kills(chain):
        said = kill(fork_server, output_dir, engine, how_to_start(output_dir, history), where, number)
        is_inside = said.count("begins") > said.count("is done")
        history, inside = history + said, inside + is_inside
        outside += f"killed in {where}" in said and not is_inside
    assert inside >= 2  # of each of six chains
    assert outside == 2
    with time_limit(60):
        fork_server.run(RUN, output_dir, engine, how_to_start(output_dir, history), "nowhere", 0)
    assert everything(output_dir) == undisturbed
    assert [path.name for path in checkpoints(output_dir)] == ["checkpoint-9", "checkpoint-10"]
    assert not list(output_dir.glob(".*"))
