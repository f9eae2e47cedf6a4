"""Predicted times are those of the code as it is, and as short as was promised."""

from pathlib import Path
from typing import Any

import pytest
import torch
from uninterpreted import run_script

from fused_grpo.bench.predictions import predicted

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="a CPU build of torch has no fake CUDA tensors")

REWRITE = "fix: python -m fused_grpo.bench.predict --write"


@pytest.fixture(scope="module")
def fresh(fork_server: Any) -> list[dict[str, Any]]:
    return run_script(fork_server, Path(__file__).with_name("fresh_predictions.py"))


def test_the_committed_file_is_of_this_code(fresh: list[dict[str, Any]]) -> None:
    assert len(fresh) > 80
    for row in fresh:
        shape = (row["plan"], row["D"], row["N"], row["machine"])
        assert predicted.entry(*shape) == row["facts"], f"{shape}; {REWRITE}"


@pytest.mark.parametrize(
    ("plan", "D", "N", "most"),
    [
        ("loss, trainable", 4096, 8192, 46.0),
        ("loss, trainable", 1024, 8192, 12.0),
        ("loss, frozen", 4096, 8192, 31.5),
        ("logprobs, no_grad", 4096, 8192, 16.5),
        ("logprobs, trainable", 4096, 8192, 46.0),
        ("loss, trainable", 4096, 1024, 6.5),
        ("loss, trainable", 1024, 64, 0.4),
        ("logprobs, no_grad", 1024, 64, 0.14),
        ("divergence, trainable", 4096, 8192, 68.0),
        ("loss, trainable, 20 kept", 4096, 8192, 2.5),
    ],
)
def test_on_an_h200_ours_takes_no_longer(fresh: list[dict[str, Any]], plan: str, D: int, N: int, most: float) -> None:
    asked = {"machine": "H200", "plan": f"fused-grpo: {plan}", "D": D, "N": N}
    (facts,) = [row["facts"] for row in fresh if asked.items() <= row.items()]
    print(f"{plan}, D={D}, N={N}: {facts['device_ms']} ms of the device, at most {most}")
    assert facts["device_ms"] <= most
