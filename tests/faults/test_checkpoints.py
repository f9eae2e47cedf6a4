"""A checkpoint that is damaged, or of another run: noticed, named, and what can be used instead is said."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path

import pytest

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint import checkpoints, remove_old_checkpoints, save_checkpoint
from fused_grpo.trainer.metrics import METRICS_FILE, ROLLOUTS_FILE, rewind_logs
from fused_grpo.trainer.prompt_sampler import PromptSampler
from fused_grpo.trainer.resume import find_checkpoint

RUN = Path(__file__).parents[1] / "trainer" / "resume_run.py"


@pytest.fixture(scope="module")
def parts():
    parts = runpy.run_path(str(RUN))
    return {"model": parts["model"](), "tokenizer": parts["tokenizer"]()}


@pytest.fixture
def run(parts, tmp_path):
    for step in (2, 4, 6):
        save_checkpoint(tmp_path / f"checkpoint-{step}", trainer_state={"step": step}, **parts)
    return tmp_path


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_truncated_checkpoint_is_named_with_the_one_that_can_be_used(run, fault):
    truncate(run / "checkpoint-6")
    policy = "nothing is loaded; the error names the file, and the newest checkpoint that is whole"
    with (
        fault("a checkpoint is truncated or corrupted", policy=policy, within=5),
        pytest.raises(CheckpointError) as said,
    ):
        find_checkpoint(run, run / "checkpoint-6")
    assert f"{run / 'checkpoint-6'}, whose model.safetensors is truncated" in str(said.value)
    assert str(said.value).endswith(f"the newest whole checkpoint is {run / 'checkpoint-4'}")


def test_resuming_passes_over_what_is_broken_and_says_so(run, caplog, fault):
    truncate(run / "checkpoint-6")
    (run / "checkpoint-4" / "manifest.json").unlink()
    policy = "resume_from_checkpoint=True takes the newest that is whole, and warns of the others"
    with fault("the newest checkpoints are broken", policy=policy, within=5), caplog.at_level(logging.WARNING):
        assert find_checkpoint(run, True) == run / "checkpoint-2"
    left_out = [record.message for record in caplog.records]
    assert [name in line for name, line in zip(("checkpoint-6", "checkpoint-4"), left_out, strict=True)] == [True, True]


def test_where_nothing_is_whole_the_error_says_that_too(run):
    for path in checkpoints(run):
        truncate(path)
    with pytest.raises(CheckpointError, match="there is no other whole checkpoint in"):
        find_checkpoint(run, run / "checkpoint-6")


def test_a_checkpoint_that_a_killed_save_stepped_aside_for_is_found(run):
    for step in (2, 4):
        truncate(run / f"checkpoint-{step}")
    (run / "checkpoint-6").rename(run / ".checkpoint-6.previous")
    assert find_checkpoint(run, True) == run / ".checkpoint-6.previous"


def test_broken_checkpoints_of_later_steps_do_not_push_out_whole_ones(run):
    truncate(run / "checkpoint-6")
    remove_old_checkpoints(run, keep=1, step=4)  # a run that went on from step 2 has just saved step 4
    assert [path.name for path in checkpoints(run)] == ["checkpoint-4", "checkpoint-6"]
    assert find_checkpoint(run, True) == run / "checkpoint-4"


@pytest.mark.parametrize("change", ["another order", "another answer"])
def test_another_dataset_of_the_same_length_is_noticed(fault, change):
    rows = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(300)]
    state = PromptSampler(rows, prompts_per_batch=2, seed=0, shuffle=True).state_dict()
    others = rows[1:] + rows[:1] if change == "another order" else [{**row, "answer": 0} for row in rows]
    policy = "CheckpointError before anything is loaded; up to 256 rows of it are compared"
    resumed = PromptSampler(others, prompts_per_batch=2, seed=0, shuffle=True)
    with (
        fault("a run is resumed with another dataset of the same length", policy=policy, within=5),
        pytest.raises(CheckpointError, match=r"train_dataset with contents=\w{16}, want contents='\w{16}'"),
    ):
        resumed.load_state_dict(state)
    PromptSampler(rows, prompts_per_batch=2, seed=0, shuffle=True).load_state_dict(state)


@pytest.mark.parametrize("line", ["{", "[]", '"step"', '{"step": "two"}', "[" * 100_000])
def test_a_log_that_cannot_be_cut_back_is_named_and_stays_as_it_is(tmp_path, line):
    (tmp_path / ROLLOUTS_FILE).write_text('{"step": 1}\n')
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(CheckpointError, match=r"got line 2 of .*metrics\.jsonl, which is no record"):
        rewind_logs(tmp_path, step=1)
    assert (tmp_path / METRICS_FILE).read_text() == f'{{"step": 1}}\n{line}\n'
