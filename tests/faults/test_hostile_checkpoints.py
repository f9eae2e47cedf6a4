"""Damaged and manipulated checkpoints: each is refused with a CheckpointError, and nothing in one is ever run."""

from __future__ import annotations

import json
import os
import pickle
import random
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import find_checkpoint
from fused_grpo.trainer.checkpoint.manifest import MANIFEST_FILE, write_manifest
from fused_grpo.trainer.checkpoint.resume import restore

RUN = Path(__file__).parents[1] / "trainer" / "resume_run.py"
FIELDS = ("step", "run", "optimizer", "scheduler", "collector", "entropy", "skipped", "eval_before", "buffers")
PICKLES = (
    "pytorch_model.bin",
    "optimizer.pt",
    "state.PKL",
    "scheduler.pth",
    "more/rng_state.pickle",
    "x.ckpt",
    "a.npy",
)


@pytest.fixture(scope="module")
def checkpoint(farm, tmp_path_factory):
    """In the middle of a buffer of rollouts, so that it holds all there is."""
    output_dir = tmp_path_factory.mktemp("complete") / "run"
    farm.run(RUN, output_dir, "transformers", "fresh", "nowhere", 0)
    return output_dir / "checkpoint-9"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Of the same run."""
    return runpy.run_path(str(RUN))["make_trainer"](str(tmp_path_factory.mktemp("loads") / "run"))


@pytest.fixture
def copy(checkpoint, tmp_path):
    """Makes copies of the checkpoint, of links; `replace` gives a file a content of its own."""

    def copy(name="copy"):
        directory = tmp_path / name / "checkpoint-9"
        shutil.copytree(checkpoint, directory, copy_function=os.link)
        return directory

    return copy


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def damage(directory: Path, draw: random.Random) -> None:
    """What disks, interrupted copies and people do to files."""
    path = draw.choice(sorted(directory.iterdir()))
    content = bytearray(path.read_bytes())
    match draw.randrange(7):
        case 0:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case 1:
            del content[draw.randrange(len(content)) :]
        case 2:
            content += draw.randbytes(draw.randint(1, 100))
        case 3:
            return path.unlink()
        case 4:
            path.unlink()
            return path.mkdir()
        case 5:
            path.unlink()
            return path.symlink_to("/etc/passwd")
        case 6:
            start = draw.randrange(len(content))
            content[start : start + 64] = bytes(len(content[start : start + 64]))
            content += b"\0"  # where it was zeros before
    return replace(path, bytes(content))


def test_a_damaged_checkpoint_is_refused(copy, portion):
    count = portion(1700)
    for number in range(count):
        directory = copy(str(number))
        damage(directory, random.Random(number))
        with pytest.raises(CheckpointError, match=r"(?s)^got .*fix: "):
            find_checkpoint(directory.parent, directory)
        shutil.rmtree(directory.parent)


@pytest.mark.parametrize("value", [None, "x", [1], 0.5])
def test_a_field_of_another_type_is_refused_and_named(trainer, copy, value):
    for name in FIELDS:
        directory = copy(name)
        state = json.loads((directory / "training.json").read_bytes())
        del state[name]
        if value is not None:  # null is a value of `eval_before`
            state[name] = value
        replace(directory / "training.json", json.dumps(state).encode())
        (directory / MANIFEST_FILE).unlink()
        write_manifest(directory)
        with pytest.raises(CheckpointError, match=rf"training\.json does not fit this run .*{name}.*fix: "):
            restore(find_checkpoint(directory.parent, directory), trainer.learner, trainer.collector)


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {shlex.quote(str(self.canary))}",))


def test_a_payload_is_refused_by_its_name_and_never_runs(copy, tmp_path, time_limit):
    canary = tmp_path / "it ran"
    with time_limit(20):
        for name in PICKLES:
            for in_manifest in (False, True):
                directory = copy(f"{name} {in_manifest}".replace("/", "-"))
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(pickle.dumps(Payload(canary)))
                if in_manifest:
                    (directory / MANIFEST_FILE).unlink()
                    write_manifest(directory)
                with pytest.raises(CheckpointError, match=f"whose {name} is of a format that can run code"):
                    find_checkpoint(directory.parent, directory)
    assert not canary.exists()


def test_the_payload_runs_where_it_is_unpickled(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(pickle.dumps(Payload(tmp_path / "it ran")))
    subprocess.run([sys.executable, "-m", "pickle", tmp_path / "optimizer.pt"], capture_output=True)
    assert (tmp_path / "it ran").exists()
