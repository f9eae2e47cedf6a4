"""A disk that is full, or read-only, while a checkpoint is saved: an error that says so, and nothing is lost."""

import json
import re
import runpy
from functools import partial
from pathlib import Path

import pytest

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import (
    checkpoints,
    newest_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from fused_grpo.trainer.checkpoint.output_dir import check_output_dir
from fused_grpo.trainer.common.file_names import REPORT_FILE, REWARD_FILE, RUN_FILE
from fused_grpo.trainer.logging.report import write_report
from fused_grpo.trainer.logging.run_log import METRICS_FILE, RunLog, read_metrics, rewind_logs
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

SAVE = Path(__file__).with_name("save_run.py")
RUN = Path(__file__).parents[1] / "trainer" / "resume_run.py"
REFUSALS = {
    "limited": ("File too large", 14),
    "full": ("No space left on device", 6),
    "read-only": ("Permission denied", 2),
}


def files(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(tmp_path):
    parts = runpy.run_path(str(RUN))
    options = {"model": parts["model"](), "tokenizer": build_tokenizer(), "trainer_state": {"step": 1}}
    return save_checkpoint(tmp_path / "run" / "checkpoint-1", **options)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_save_that_the_disk_refuses_leaves_the_earlier_checkpoint(fork_server, time_limit, checkpoint, refusal):
    reason, saves = REFUSALS[refusal]
    before = files(checkpoint)
    with time_limit(30):
        messages = fork_server.run(SAVE, checkpoint.parent, refusal).splitlines()
    if messages == ["not allowed"]:
        pytest.skip("only root may mount a small file system")
    assert len(messages) == saves
    for step, message in enumerate(messages):
        assert reason in message
        assert re.search(rf"while saving checkpoint-{step % 2 + 1}; want about 2[34]\d kB, ", message)
        assert "the newest complete checkpoint is checkpoint-1; fix: free some space" in message
    assert files(checkpoint) == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint-1"]


def test_a_run_whose_save_is_refused_has_whole_logs_and_can_be_resumed(fork_server, tmp_path):
    run = fork_server.start(RUN, tmp_path / "run", "transformers", "fresh", "full", 6)
    assert run.wait() == 1
    assert "File too large (os error 27) while saving" in run.output
    assert f"the newest complete checkpoint is {tmp_path / 'run' / 'checkpoint-3'};" in run.output
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-3"
    logged = [record["step"] for record in read_metrics(tmp_path / "run" / METRICS_FILE) if "loss" in record]
    assert logged == [1, 2, 3, 4, 5, 6]
    fork_server.run(RUN, tmp_path / "run", "transformers", "resume", "nowhere", 0)
    verify_checkpoint(tmp_path / "run" / "checkpoint-10")


def test_a_log_on_a_full_disk_is_an_error_that_names_it(tmp_path):
    log = RunLog(tmp_path)
    (tmp_path / METRICS_FILE).unlink()
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"got No space left on device while writing .*metrics\.jsonl"):
        log.log_metrics({"step": 1})


@pytest.mark.parametrize("name", [RUN_FILE, REPORT_FILE, REWARD_FILE])
def test_what_else_a_run_writes_on_a_full_disk_is_an_error_that_names_it(tmp_path, name):
    log = RunLog(tmp_path)
    log.log_metrics({"step": 1, "reward": 1.0})
    (tmp_path / name).symlink_to("/dev/full" if name != RUN_FILE else "no/such/folder")
    write = partial(log.log_config, {}) if name == RUN_FILE else partial(write_report, tmp_path)
    with pytest.raises(CheckpointError, match=rf"got No s.* while writing .*{name}; want .*; fix: free some space"):
        write()


def test_a_folder_of_another_user_is_refused_in_one_line(tmp_path, monkeypatch):
    def refuse(path, **unused):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    assert checkpoints(tmp_path / "theirs") == []
    with pytest.raises(CheckpointError, match=r"theirs, which cannot be written \(Permission denied\); want"):
        check_output_dir(tmp_path / "theirs")


def test_a_record_that_was_cut_off_is_cut_away_when_the_run_goes_on(tmp_path):
    RunLog(tmp_path).log_metrics({"step": 1})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "los')
    rewind_logs(tmp_path, 1)
    RunLog(tmp_path).log_metrics({"step": 2})
    assert [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
    ]
