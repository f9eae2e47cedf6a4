"""The logs of a run: whole lines, strict JSON, nothing private."""

import json
import math
from pathlib import Path

import pytest
import torch

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.common.file_names import METRICS_FILE, OLD_ROLLOUTS_FILE, ROLLOUTS_FILE, RUN_FILE
from fused_grpo.trainer.logging.run_log import RunLog, metric, read_metrics, rewind_logs


def test_metrics_keep_the_order_of_their_keys_and_come_back_equal(tmp_path: Path) -> None:
    RunLog(tmp_path).log_metrics({"step": 1, "reward": 0.25, "engine": "vllm", "aaa": 3.0})
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1, "reward": 0.25, "engine": "vllm", "aaa": 3.0}\n'
    assert read_metrics(tmp_path / METRICS_FILE) == [{"step": 1, "reward": 0.25, "engine": "vllm", "aaa": 3.0}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null_because_nan_is_not_json(tmp_path: Path, value: float) -> None:
    RunLog(tmp_path).log_metrics({"step": 1, "kl": value})
    line = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "kl": None}


def test_a_resumed_log_does_not_continue_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    RunLog(tmp_path).log_metrics({"step": 1})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "rew')
    rewind_logs(tmp_path, 2)
    RunLog(tmp_path).log_metrics({"step": 3})
    assert read_metrics(tmp_path / METRICS_FILE) == [{"step": 1}, {"step": 3}]


def test_reading_skips_a_last_line_cut_short_but_names_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2, "rew\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"line 2 of metrics\.jsonl"):
        read_metrics(path)


@pytest.mark.parametrize(
    "text", ["a\nb\r\nc", "line\u2028separator\x85", "lone \ud800 surrogate", '"quoted" \x00 \x1b[1m']
)
def test_a_completion_is_one_line_and_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    rows = [{"prompt": "p", "completion": text, "reward": 1.0}, {"prompt": "q", "completion": "", "reward": math.nan}]
    RunLog(tmp_path).log_rollouts(7, rows)
    back = read_metrics(tmp_path / ROLLOUTS_FILE)
    assert [row["completion"] for row in back] == [text, ""]
    assert back[1] == {"step": 7, "prompt": "q", "completion": "", "reward": None}


def test_run_json_says_what_ran_where_and_a_second_run_does_not_rewrite_it(tmp_path: Path) -> None:
    RunLog(tmp_path).log_config({"beta": 0.04}, task="arithmetic")
    RunLog(tmp_path).log_config({"beta": 0.5}, task="other")
    run = json.loads((tmp_path / RUN_FILE).read_text())
    assert run["task"] == "arithmetic"
    assert run["config"] == {"beta": 0.04}
    assert run["versions"]["torch"] == torch.__version__
    assert run["machine"]["cpu_count"] >= 1


def test_secrets_and_home_directories_do_not_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    config = {
        "hub_token": "abc123",
        "report": {"wandb_api_key": "def456"},
        "model": "/srv/people/ada/models/tiny",
        "data": ["/home/grace/data.json", Path("/root/x")],
        "url": "https://grace:pa55@127.0.0.1:8000",
        "note": "use hf_ABCDEFGHIJKLMNOPQRST",
    }
    RunLog(tmp_path).log_config(config)
    text = (tmp_path / RUN_FILE).read_text()
    for private in ("abc123", "def456", "ada", "grace", "/root", "pa55", "hf_ABC"):
        assert private not in text
    assert json.loads(text)["config"]["data"] == ["~/data.json", "~/x"]


def test_settings_that_only_look_like_secrets_are_kept(tmp_path: Path) -> None:
    config = {"max_tokens": 5, "eos_token": "</s>", "num_tokens": 9, "hub_token": None, "path": "/data/root/home/x"}
    RunLog(tmp_path).log_config(config)
    assert json.loads((tmp_path / RUN_FILE).read_text())["config"] == config


def test_a_metric_is_a_finite_number() -> None:
    assert metric({"kl": 1}, "kl") == 1.0
    assert metric({"kl": math.inf}, "kl") is metric({}, "kl") is None
    assert metric({"kl": None}, "kl") is None
    assert metric({"kl": "much"}, "kl") is None


def logged(folder: Path, steps: range, kept: int) -> None:
    log = RunLog(folder, kept)
    for step in steps:
        log.log_rollouts(step, [{"completion": "x" * step}, {"completion": "y"}])
        log.log_metrics({"step": step})


def contents(folder: Path) -> dict[str, list[int]]:
    return {path.name: [row["step"] for row in read_metrics(path)] for path in sorted(folder.iterdir())}


def test_rollouts_of_the_newest_steps_are_kept(tmp_path: Path) -> None:
    logged(tmp_path / "bounded", range(1, 12), 3)
    assert contents(tmp_path / "bounded") == {
        METRICS_FILE: list(range(1, 12)),
        OLD_ROLLOUTS_FILE: [7, 7, 8, 8, 9, 9],
        ROLLOUTS_FILE: [10, 10, 11, 11],
    }
    logged(tmp_path / "all", range(1, 12), 0)
    assert not (tmp_path / "all" / OLD_ROLLOUTS_FILE).exists()
    assert len(contents(tmp_path / "all")[ROLLOUTS_FILE]) == 22


def test_a_resumed_log_of_rollouts_is_that_of_a_run_that_was_never_stopped(tmp_path: Path) -> None:
    for number, (killed, checkpoint) in enumerate((k, c) for k in (2, 4, 8) for c in range(k + 1)):
        folder, whole = tmp_path / f"{number}", tmp_path / f"{number}-whole"
        logged(folder, range(1, killed + 1), 3)
        rewind_logs(folder, checkpoint)
        logged(folder, range(checkpoint + 1, killed + 1), 3)
        logged(whole, range(1, killed + 1), 3)
        assert contents(folder) == contents(whole), (killed, checkpoint)
        assert (folder / ROLLOUTS_FILE).read_bytes() == (whole / ROLLOUTS_FILE).read_bytes()


def test_a_kill_between_two_blocks_of_rollouts_loses_none(tmp_path: Path) -> None:
    logged(tmp_path, range(1, 7), 3)
    (tmp_path / ROLLOUTS_FILE).replace(tmp_path / OLD_ROLLOUTS_FILE)
    rewind_logs(tmp_path, 6)
    logged(tmp_path, range(7, 8), 3)
    assert contents(tmp_path)[OLD_ROLLOUTS_FILE] == [4, 4, 5, 5, 6, 6]
