"""Two processes make the update that one process makes of the same rollouts, and go on together after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("ddp_run.py")


def run(out: Path, *, processes: int, batch: int, accumulation: int, **options: Any) -> dict:
    out.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    # Prompts that start with a 4 are among the first drawn, and cost their group from the second step on.
    options = {"reward_failure": "drop", **options}
    command = [sys.executable, *launcher, str(SCRIPT), str(out), str(batch), str(accumulation), json.dumps(options)]
    # The same hash of a prompt in every process; gloo, and one thread each.
    env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return torch.load(out / "result.pt", weights_only=True)


OPTIONS = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo", "num_iterations": 3},
    "by tokens, with a KL term": {"max_tokens_per_micro_batch": 24, "beta": 0.1, "num_iterations": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_processes_equal_one(tmp_path, options):
    alone = run(tmp_path / "one", processes=1, batch=32, accumulation=1, **options)
    shared = run(tmp_path / "two", processes=2, batch=8, accumulation=2, **options)
    for name, tensor in alone["parameters"].items():
        torch.testing.assert_close(shared["parameters"][name], tensor, rtol=0, atol=1e-6)
    for name in ("loss", "grad_norm", "reward", "entropy", "num_tokens"):
        assert shared["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-5), name


def test_two_processes_go_on_where_they_stopped(tmp_path):
    options = {
        "processes": 2,
        "batch": 8,
        "accumulation": 1,
        "steps_per_generation": 2,
        "lr_scheduler_type": "constant",
    }
    whole = run(tmp_path / "whole", max_steps=5, **options)
    run(tmp_path / "cut", max_steps=4, save_steps=3, **options)  # in the middle of a generated batch
    resumed = run(tmp_path / "cut", max_steps=5, resume_from_checkpoint=True, **options)
    for name, tensor in whole["parameters"].items():
        assert torch.equal(resumed["parameters"][name], tensor), name
