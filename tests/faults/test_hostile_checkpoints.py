"""Thousands of spoiled checkpoints: each is loaded or refused with a CheckpointError, and none runs anything."""

from __future__ import annotations

import os
import random
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fused_grpo.errors import CheckpointError, FusedGRPOError
from fused_grpo.trainer.checkpoint.checkpoint import load_trainer_state
from fused_grpo.trainer.checkpoint.manifest import MANIFEST_FILE, seal
from fused_grpo.trainer.checkpoint.resume import find_checkpoint, restore
from fused_grpo.trainer.checkpoint.saved_rollouts import check_ahead
from fused_grpo.trainer.collect.prefetch import rollouts_as_tensors, rollouts_from_tensors
from fused_grpo.trainer.logging import run_output
from fused_grpo.trainer.types import Rollouts

sys.path.insert(0, str(Path(__file__).parent))
from hostile_checkpoints import add_payload, change_manifest, change_one, change_state, change_tensors, damage

RUN = Path(__file__).parents[1] / "trainer" / "resume_run.py"
STATE = ("training.json", "training.json", "training.json", "trainer_state.json", "config.json")
ROLLOUTS = Rollouts(
    prompt_ids=[[1, 2]],
    completion_ids=[[3, 4], [5]],
    sampling_logprobs=[[-0.5, -0.25], [-1.0]],
    finish_reasons=["stop", "length"],
    num_generations=2,
    weight_version=3,
)
WAYS = {
    "files are damaged": (1700, damage, 1700),
    "manifest is written anew": (1100, change_manifest, 1000),
    "JSON is changed and sealed again": (400, lambda directory, draw: change_state(directory, draw, STATE), 200),
    "tensors are changed and sealed again": (400, change_tensors, 250),
}


@pytest.fixture(scope="module")
def checkpoint(farm, tmp_path_factory):
    """In the middle of a buffer of rollouts, so that it holds all there is."""
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    farm.run(RUN, output_dir, "transformers", "fresh", "nowhere", 0)
    return output_dir / "checkpoint-9"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Of the same run; nothing is loaded into it that has not been accepted."""
    return runpy.run_path(str(RUN))["make_trainer"](str(tmp_path_factory.mktemp("loads") / "run"))


@pytest.fixture
def spoiled(checkpoint, tmp_path):
    """Makes copies, of links."""

    def copy(number, spoil, *, sealed):
        directory = tmp_path / f"{number}" / "checkpoint-9"
        directory.mkdir(parents=True)
        for path in checkpoint.iterdir():
            os.link(path, directory / path.name)
        result = spoil(directory, random.Random(number))
        if sealed:
            (directory / MANIFEST_FILE).unlink()
            seal(directory)
        return directory, result

    return copy


def load(trainer, directory):
    """The error that refuses it, or None."""
    try:
        load_trainer_state(find_checkpoint(directory.parent, directory))
        restore(trainer, directory)
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("way", WAYS)
def test_a_spoiled_checkpoint_is_loaded_or_refused_with_a_documented_error(trainer, spoiled, monkeypatch, portion, way):
    (count, spoil, at_least), refused = WAYS[way], 0
    count, at_least = portion(count), portion(at_least)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of times
    for number in range(count):
        directory, _ = spoiled(number, spoil, sealed="sealed" in way)
        try:
            error = load(trainer, directory)
        except BaseException:
            print(f"{way}: number {number}, {directory}")
            raise
        assert error is None or (str(error).startswith("got ") and "fix: " in str(error))
        refused += error is not None
        shutil.rmtree(directory.parent)
    print(f"{way}: {refused} of {count} refused")
    assert refused >= at_least


def test_rollouts_sampled_ahead_are_whole_or_refused():
    accepted = 0
    for number in range(400):
        draw = random.Random(number)
        tensors = change_one(rollouts_as_tensors(ROLLOUTS), draw)
        try:
            check_ahead(tensors, prompts=1, num_generations=2, vocab_size=9)
        except ValueError:
            continue
        rollouts, accepted = rollouts_from_tensors(tensors), accepted + 1
        assert [len(ids) for ids in rollouts.completion_ids] == [2, 1]
        assert all(0 <= token < 9 for ids in rollouts.completion_ids for token in ids)
    assert 10 < accepted < 200


def test_a_payload_is_refused_by_its_name_and_never_runs(trainer, spoiled, tmp_path, time_limit):
    canary = tmp_path / "it ran"
    with time_limit(20):
        for number in range(60):
            spoil = partial(add_payload, canary=canary)
            directory, name = spoiled(number, spoil, sealed=number % 2 == 0 or number > 40)
            error = load(trainer, directory)
            assert error is not None
            assert name in str(error)
    assert not canary.exists()


def test_the_canary_of_a_payload_sings_where_somebody_loads_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    draw = random.Random(0)
    while (name := add_payload(tmp_path, draw, tmp_path / "it ran")) != "optimizer.pt":
        pass
    subprocess.run([sys.executable, "-m", "pickle", tmp_path / name], capture_output=True)
    assert (tmp_path / "it ran").exists()


@pytest.mark.parametrize("spoil", [change_tensors, lambda directory, draw: change_state(directory, draw, STATE)])
def test_what_is_not_refused_can_be_trained_on_or_ends_in_a_documented_error(
    trainer, spoiled, tmp_path, monkeypatch, spoil
):
    make_trainer, accepted = runpy.run_path(str(RUN))["make_trainer"], 0
    monkeypatch.setattr(run_output, "write_report", lambda folder: folder)
    for number in range(1000, 1100):
        directory, _ = spoiled(number, spoil, sealed=True)
        if load(trainer, directory) is None:
            accepted += 1
            resumed = make_trainer(str(tmp_path / f"run-{number}"))
            with suppress(FusedGRPOError):
                resumed.train(resume_from_checkpoint=str(directory))
        if accepted == 3:
            return
    pytest.fail(f"{accepted} of 100 were accepted, want 3 to train on")
