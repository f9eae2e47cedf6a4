"""What the console shows of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fused_grpo.trainer.logging.console import Console
from fused_grpo.trainer.logging.run_log import read_metrics
from fused_grpo.trainer.logging.run_output import StepMetrics


@pytest.fixture
def shown(monkeypatch) -> list[tuple[int, dict[str, Any]]]:
    """What the console is given for its lines: step, metrics."""
    lines = list[Any]()
    monkeypatch.setattr(Console, "step", lambda _, *line: lines.append(line))
    return lines


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"logging_first_step": True}], ids=str)
def test_the_console_shows_the_means_that_the_history_has(make_trainer, shown, options) -> None:
    trainer = make_trainer(max_steps=5, logging_steps=2, **options)
    trainer.train()
    entries = {entry["step"]: entry for entry in trainer.state.log_history if "reward" in entry}
    assert [step for step, *_ in shown] == [1, 2, 4, 5]
    assert "time/reward/digit_reward" in shown[-1][1]
    for step, metrics in shown:
        if step == 1 and step not in entries:
            continue
        same = entries[step].keys() & metrics.keys() - {"step_time", "epoch"}
        assert {"reward", "loss", "grad_norm", "completions/mean_length"} <= same
        assert {name: metrics[name] for name in same} == {name: entries[step][name] for name in same}
        assert metrics["time/train"] == entries[step]["time/train"]


def test_the_first_step_has_a_line_of_its_own_and_its_time_is_in_no_mean(make_trainer, shown, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=4, logging_steps=4)
    trainer.train()
    lines = (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    (first, last) = shown
    assert first[1]["reward"] == records[0]["reward"]
    assert last[1]["reward"] == pytest.approx(sum(record["reward"] for record in records) / 4)
    assert last[1]["step_time"] == pytest.approx(sum(record["step_time"] for record in records[1:]) / 3)


def test_what_is_not_logged_does_not_grow_with_the_steps() -> None:
    """As with logging_strategy="no": each checkpoint has it."""
    steps, size = StepMetrics(), set()
    for step in range(1000):
        steps.add({"loss": 0.5, "num_tokens": 7 * step, "reward": None if step % 2 else 1.5, "kl": None}, {})
        size |= {len(json.dumps(steps.windows)) // 64}
    assert max(size) < 8
    assert steps.take() == {"loss": 0.5, "num_tokens": 6993, "reward": 1.5, "kl": None}
    assert steps.closing(1)["train_loss"] == 0.5


@pytest.mark.parametrize("options", [{}, {"eval_strategy": "steps", "eval_steps": 2, "eval_at_ends": True}], ids=str)
def test_a_finished_run_that_is_resumed_is_evaluated_once(make_trainer, options) -> None:
    options |= {"eval_dataset": [{"prompt": "1+1=", "answer": "2"}], "max_steps": 2, "save_steps": 2}
    before = make_trainer(**options).train()
    trainer = make_trainer(**options, overwrite_output_dir=False)
    after = trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry][-2:] != [2, 2]
    written = [one["step"] for one in read_metrics(trainer.output_dir / "metrics.jsonl") if "eval/reward" in one]
    assert written == [0, 2]
    assert after.eval_before == before.eval_before
    assert after.eval_after == before.eval_after


def test_the_last_lines_say_where_report_and_model_are(make_trainer, capsys) -> None:
    result = make_trainer(max_steps=1).train()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"report: {result.report}", f"model: {result.checkpoint}"]
    assert not lines[-3].startswith("rewards:")
    assert result.report.is_file()
    assert (result.checkpoint / "config.json").is_file()


def test_before_them_is_what_became_of_the_parts_of_a_reward(make_trainer, capsys) -> None:
    def rises(completions, trainer_state, **columns) -> list[float]:
        return [float(trainer_state.global_step)] * len(completions)

    def length(completions, **columns) -> list[float]:
        return [float(len(text)) for text in completions]

    trainer = make_trainer([rises, length], max_steps=3, logging_steps=1)
    trainer.train()
    line = capsys.readouterr().out.splitlines()[-3]
    lengths = [entry["rewards/length/mean"] for entry in trainer.state.log_history if "rewards/length/mean" in entry]
    match = re.fullmatch(r"training rewards: rises 0\S* -> 2\S*, length (\S+) -> (\S+)", line)
    assert [float(number) for number in match.groups()] == pytest.approx([lengths[0], lengths[-1]], rel=0.01)
