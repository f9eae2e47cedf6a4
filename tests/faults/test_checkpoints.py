"""A checkpoint that is damaged, or of another run: the error names it, and what can be used instead."""

import errno
import logging
import os
import runpy
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import (
    FORMAT,
    checkpoints,
    find_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from fused_grpo.trainer.checkpoint.resume import restore
from fused_grpo.trainer.logging.run_log import METRICS_FILE, ROLLOUTS_FILE, rewind_logs
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

RUN = Path(__file__).parents[1] / "trainer" / "resume_run.py"


@pytest.fixture(scope="module")
def parts():
    return runpy.run_path(str(RUN))


@pytest.fixture(scope="module")
def save(parts):
    model = {"model": parts["model"](), "tokenizer": build_tokenizer()}
    return lambda path, step: save_checkpoint(path / f"checkpoint-{step}", trainer_state={"step": step}, **model)


@pytest.fixture
def run(save, tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    return tmp_path


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_truncated_checkpoint_is_named_with_the_one_that_can_be_used(run, time_limit):
    truncate(run / "checkpoint-6")
    with time_limit(5), pytest.raises(CheckpointError) as said:
        find_checkpoint(run, run / "checkpoint-6")
    assert f"{run / 'checkpoint-6'}, whose model.safetensors is truncated" in str(said.value)
    assert str(said.value).endswith(f"the newest complete checkpoint is {run / 'checkpoint-4'}")


def test_resuming_ignores_damaged_checkpoints_and_warns(run, caplog, time_limit):
    truncate(run / "checkpoint-6")
    (run / "checkpoint-4" / "manifest.json").unlink()
    with time_limit(5), caplog.at_level(logging.WARNING):
        assert find_checkpoint(run, True) == run / "checkpoint-2"
    said = [record.message for record in caplog.records]
    names = (
        "ignoring {}/checkpoint-6",
        "ignoring {}/checkpoint-4",
        "{}/checkpoint-6 is called",
        "{}/checkpoint-4 is called",
    )
    assert [name.format(run) in line for name, line in zip(names, said, strict=True)] == [True] * 4


def test_damaged_checkpoints_are_moved_aside_and_saved_again(run, save):
    truncate(run / "checkpoint-6")
    (run / "checkpoint-6" / "manifest.json").unlink()
    assert find_checkpoint(run, True) == run / "checkpoint-4"
    assert find_checkpoint(run, save(run, 6)) == run / "checkpoint-6"
    truncate(run / "checkpoint-6")
    assert find_checkpoint(run, True) == run / "checkpoint-4"
    assert len(checkpoints(run)) == 2
    assert {path.name for path in run.glob("*.unusable-*")} == {"checkpoint-6.unusable-1", "checkpoint-6.unusable-2"}


def test_a_damaged_checkpoint_that_is_named_stays_where_it_is(run):
    truncate(run / "checkpoint-6")
    with pytest.raises(CheckpointError):
        find_checkpoint(run, run / "checkpoint-6")
    assert (run / "checkpoint-6").is_dir()


def test_where_no_checkpoint_is_complete_the_error_says_so(run):
    for path in checkpoints(run):
        truncate(path)
    with pytest.raises(CheckpointError, match="there is no other complete checkpoint in"):
        find_checkpoint(run, run / "checkpoint-6")


def test_a_checkpoint_that_a_killed_save_has_renamed_is_found(run):
    for step in (2, 4):
        truncate(run / f"checkpoint-{step}")
    (run / "checkpoint-6").rename(run / ".checkpoint-6.previous")
    assert find_checkpoint(run, True) == run / ".checkpoint-6.previous"


def test_damaged_checkpoints_of_later_steps_do_not_displace_complete_ones(run):
    truncate(run / "checkpoint-6")
    remove_old_checkpoints(run, keep=1, step=4)  # a run that went on from step 2 has just saved step 4
    assert [path.name for path in checkpoints(run)] == ["checkpoint-4", "checkpoint-6"]
    assert find_checkpoint(run, True) == run / "checkpoint-4"


@pytest.fixture
def saved(parts, tmp_path):
    """The checkpoint of a run before its first step, and what makes runs like it with other rows."""
    rows = [{"prompt": f"{number % 10}+1=", "answer": number + 1} for number in range(300)]
    make = partial(parts["make_trainer"], str(tmp_path / "run"), "transformers")
    return make("fresh", rows=rows).save_checkpoint(), rows, partial(make, "resume")


@pytest.mark.parametrize("change", ["another order", "another answer"])
def test_another_dataset_of_equal_length_is_refused_before_anything_loads(time_limit, saved, change):
    checkpoint, rows, make = saved
    others = rows[1:] + rows[:1] if change == "another order" else [{**row, "answer": 0} for row in rows]
    resumed = make(rows=others)
    torch.nn.init.zeros_(resumed.model.lm_head.weight)
    with (
        time_limit(5),
        pytest.raises(CheckpointError, match=r"train_dataset with contents=\w{16}, want contents='\w{16}'"),
    ):
        restore(checkpoint, resumed.learner, resumed.collector)
    assert not resumed.model.lm_head.weight.any()
    same = make(rows=rows)
    restore(checkpoint, same.learner, same.collector)


NODES = """
import os, sys
from pathlib import Path
from accelerate import Accelerator
from fused_grpo.trainer.distributed.failures import barrier
from fused_grpo.trainer.checkpoint.resume import agreed_checkpoint
os.chdir(f"{sys.argv[1]}/{os.environ['RANK']}")
accelerator = Accelerator(cpu=True)
try:
    print("found", agreed_checkpoint(accelerator, Path("run"), True))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
barrier(accelerator, "ending")
"""


@pytest.fixture
def nodes(fork_server, save, tmp_path):
    """Two processes, each with a disk of its own, and what each of them finds there."""
    (tmp_path / "nodes.py").write_text(NODES)
    for step in (2, 4):
        save(tmp_path / "0" / "run", step)
    shutil.copytree(tmp_path / "0", tmp_path / "1")

    def find():
        ranks = fork_server.start_ranks(tmp_path / "nodes.py", tmp_path)
        assert [rank.wait(60) for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
        return [rank.output for rank in ranks]

    return tmp_path / "1" / "run", find


def test_all_processes_resume_from_the_checkpoint_that_the_first_has_found(nodes):
    other_disk, find = nodes
    (other_disk / "checkpoint-4" / "config.json").unlink()
    assert ["found run/checkpoint-4" in said for said in find()] == [True, True]


def test_a_process_that_has_another_checkpoint_of_that_name_stops_all(nodes, time_limit):
    other_disk, find = nodes
    path = other_disk / "checkpoint-4" / "manifest.json"
    path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0', 1))
    with time_limit(20):
        first, second = find()
    assert "PeerError: rank 1 of 2 failed while looking at run/checkpoint-4" in first
    assert "CheckpointError: got a run/checkpoint-4 on rank 1 whose manifest is another one" in second


def test_a_checkpoint_of_another_version_is_named_and_can_be_replaced(run, save):
    path = run / "checkpoint-6" / "manifest.json"
    path.write_text(path.read_text().replace(FORMAT, "fused-grpo checkpoint 1"))
    with pytest.raises(
        CheckpointError, match=r"written by another version of fused-grpo \('fused-grpo checkpoint 1'\)"
    ):
        find_checkpoint(run, run / "checkpoint-6")
    assert find_checkpoint(run, save(run, 6)) == run / "checkpoint-6"


def test_a_refused_save_does_not_read_the_checkpoint_that_it_names(run, monkeypatch):
    class Full:
        def save_pretrained(self, directory, state_dict=None):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fused_grpo.trainer.checkpoint.checkpoint.sha256_of", lambda path: pytest.fail(f"read {path}"))
    with pytest.raises(CheckpointError, match=r"the newest complete checkpoint is .*checkpoint-6; fix: free"):
        save_checkpoint(run / "checkpoint-8", model=Full(), tokenizer=None, trainer_state={})


@pytest.mark.parametrize(
    ("keep", "best", "steps"),
    [(1, None, [6]), (2, None, [4, 6]), (1, 2, [2, 6]), (2, 2, [2, 6]), (2, 6, [4, 6]), (4, 2, [2, 4, 6])],
)
def test_the_best_checkpoint_is_one_of_those_that_are_kept(run, keep, best, steps):
    remove_old_checkpoints(run, keep=keep, best=None if best is None else f"elsewhere/checkpoint-{best}")
    assert [path.name for path in checkpoints(run)] == [f"checkpoint-{step}" for step in steps]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(run, monkeypatch, caplog):
    unlink = Path.unlink

    def refused(path, **options):
        if path.parent.name == "checkpoint-2":
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    remove_old_checkpoints(run, keep=1)
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-6"]
    assert f"could not remove {run / 'checkpoint-2'}" in caplog.text


def test_logs_are_cut_back_in_place_at_the_first_record_of_a_later_step(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    inode = path.stat().st_ino
    rewind_logs(tmp_path, step=2)
    assert (path.read_text(), path.stat().st_ino) == ('{"step": 1}\n{"step": 2}\n', inode)


def test_a_log_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / ROLLOUTS_FILE).write_text('{"step": 1}\n')
    monkeypatch.setattr(os, "truncate", refuse)
    with pytest.raises(CheckpointError, match=r"got Input/output error while cutting .*rollouts\.jsonl back to step 1"):
        rewind_logs(tmp_path, step=1)


@pytest.mark.parametrize("line", ["{", "[]", '"step"', '{"step": "two"}', "[" * 100_000])
def test_a_log_that_cannot_be_cut_back_is_named_and_stays_as_it_is(tmp_path, line):
    (tmp_path / ROLLOUTS_FILE).write_text('{"step": 1}\n')
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(CheckpointError, match=r"got line 2 of .*metrics\.jsonl, which is no record"):
        rewind_logs(tmp_path, step=1)
    assert (tmp_path / METRICS_FILE).read_text() == f'{{"step": 1}}\n{line}\n'
