"""Two processes make the update that one process makes of the same rollouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("ddp_run.py")


def run(out: Path, loss_type: str, processes: int, batch: int, accumulation: int) -> dict:
    out.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), str(out), loss_type, str(batch), str(accumulation)]
    # The same hash of a prompt in every process; gloo, and one thread each.
    env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return torch.load(out / "result.pt", weights_only=True)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_two_processes_equal_one(tmp_path, loss_type):
    alone = run(tmp_path / "one", loss_type, processes=1, batch=16, accumulation=1)
    shared = run(tmp_path / "two", loss_type, processes=2, batch=4, accumulation=2)
    for name, tensor in alone["parameters"].items():
        torch.testing.assert_close(shared["parameters"][name], tensor, rtol=0, atol=1e-6)
    for name in ("loss", "grad_norm", "reward", "entropy", "num_tokens"):
        assert shared["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-5), name
