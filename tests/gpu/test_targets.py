"""A wrong target ends in an assertion of the device, which ends its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys, torch
from fused_grpo import linear_logprobs
hidden, weight = torch.randn(300, 64, device="cuda"), torch.randn(128, 64, device="cuda")
targets = torch.randint(128, (300,), device="cuda")
targets[7], targets[8] = int(sys.argv[1]), -100
print(linear_logprobs(hidden, weight, targets, impl=sys.argv[2]).sum().item())
"""


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("target", ["127", "128", "-1"])
def test_a_wrong_target_is_an_assertion_of_the_device(impl, target):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", SCRIPT, target, impl]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    right = target == "127"
    assert (process.returncode == 0) == right, process.stderr
    assert ("a target is out of range" in process.stderr + process.stdout) != right
