"""A step whose loss is NaN updates nothing on any rank, keeps its batch, and is skipped only where that is allowed."""

import json
from pathlib import Path

import pytest
import torch
from batches import column
from safetensors import SafetensorError
from safetensors.torch import load_file

from fused_grpo.errors import NonFiniteError
from fused_grpo.trainer.batching.rollout_buffer import from_tensors
from fused_grpo.trainer.distributed.failures import NonFiniteSteps

SCRIPT = Path(__file__).with_name("loop_run.py")


def same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def loaded(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def skipped(run: Path) -> list[float]:
    return [json.loads(line)["skipped_steps"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_without_numbers_ends_the_run_and_moves_nothing(fork_server, time_limit, tmp_path, processes):
    with time_limit(20) as clock:
        ranks = fork_server.start_ranks(SCRIPT, tmp_path, "nan", processes - 1, "{}", processes=processes)
        assert [process.wait() for process in ranks] == [1] * processes
        clock.started = float((tmp_path / "happened").read_text())
    for rank, process in enumerate(ranks):
        assert "NonFiniteError: got loss nan and gradient norm nan in step 2" in process.output
        assert str(tmp_path / "run" / "nonfinite-step-2") in process.output
        assert same(loaded(tmp_path / f"before-{rank}.pt"), loaded(tmp_path / f"after-{rank}.pt"))
        kept = tmp_path / "run" / "nonfinite-step-2" / f"rank-{rank}"
        batch = from_tensors(load_file(kept.with_suffix(".safetensors")))
        assert bool(column(batch, "advantage").isnan().all()) is (rank == processes - 1)
        assert column(batch, "reward").tolist() == [float(sum(sample.completion_ids) % 7) for sample in batch]
        facts = json.loads(kept.with_suffix(".json").read_text())
        assert (facts["step"], facts["rank"], facts["metrics"]["loss"]) == (2, rank, None)


@pytest.mark.parametrize("fails", ["evidence", "writing"])
def test_a_batch_that_cannot_be_kept_changes_nothing_but_the_message(tmp_path, monkeypatch, caplog, fails):
    def full(*_: object) -> dict:
        raise SafetensorError("I/O error: No space left on device") if fails == "writing" else MemoryError("20 GiB")

    monkeypatch.setattr("fused_grpo.trainer.distributed.failures.save_file", full)
    steps, metrics = NonFiniteSteps(tmp_path, rank=0, limit=1), {"loss": float("nan"), "grad_norm": 1.0}
    evidence = full if fails == "evidence" else lambda: {"rewards": torch.ones(2)}
    assert steps.may_update(metrics, 1, evidence) is False
    lost = "its batch is lost (20 GiB)" if fails == "evidence" else "its batch is lost (I/O error: No space left"
    assert lost in caplog.text
    with pytest.raises(NonFiniteError, match=r"in step 2 and in 1 step\(s\) before it.* its batch is lost"):
        steps.may_update(metrics, 2, evidence)


def test_steps_without_numbers_are_skipped_up_to_the_limit(fork_server, tmp_path):
    process = fork_server.start(SCRIPT, tmp_path, "nans", 0, json.dumps({"max_steps": 6, "max_skipped_steps": 2}))
    assert process.wait() == 1
    assert "in step 4 and in 2 step(s) before it" in process.output
    assert skipped(tmp_path / "run") == [0.0, 1.0, 2.0]
    assert same(loaded(tmp_path / "before-0.pt"), loaded(tmp_path / "after-0.pt"))


def test_a_run_that_skipped_a_step_resumes_exactly(fork_server, tmp_path):
    options = {"max_steps": 4, "max_skipped_steps": 1, "save_steps": 2}
    for name, fault, more in ("whole", "nan", {}), ("resumed", "none", {"resume_from_checkpoint": True}):
        (tmp_path / name).mkdir()
        if name == "resumed":
            (tmp_path / "whole" / "run").rename(tmp_path / name / "run")
        fork_server.run(SCRIPT, tmp_path / name, fault, 0, json.dumps(options | more))
        assert skipped(tmp_path / name / "run") == [0.0, 1.0, 1.0, 1.0]
    assert same(loaded(tmp_path / "whole" / "after-0.pt"), loaded(tmp_path / "resumed" / "after-0.pt"))
