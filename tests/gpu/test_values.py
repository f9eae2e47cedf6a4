"""Invalid values are checked on the device, where a failed assertion ends the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch, fused_grpo
hidden, weight = torch.randn(4, 16, device="cuda").bfloat16(), torch.randn(40, 16, device="cuda").bfloat16()
targets, temperature = torch.tensor({targets}, device="cuda"), torch.tensor({temperatures}, device="cuda")
fused_grpo.linear_logprobs(hidden, weight, targets, temperature=temperature)
torch.cuda.synchronize()
print("no check has failed")
"""
CASES = {
    "a target beyond the vocabulary": ([0, 40, 1, 2], [1.0] * 4),
    "a negative target": ([0, -1, 1, 2], [1.0] * 4),
    "a temperature of 0": ([0, 1, 2, 3], [1.0, 0.0, 1.0, 1.0]),
}


def run(targets: list[int], temperatures: list[float]) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(targets=targets, temperatures=temperatures)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_a_value_that_cannot_be_ends_the_process(name):
    process = run(*CASES[name])
    assert process.returncode != 0, process.stdout
    assert "assert" in process.stderr.lower()


def test_good_values_do_not():
    assert run([0, -100, 39, 2], [1.0, 0.5, 1.0, 1.0]).stdout.strip() == "no check has failed"
