"""Every kernel compiles for every architecture as shipped, fits it, and uses its tensor cores. No GPU needed.

In a process of its own: this one imported the kernels in interpreter mode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KIB = 1024
SHARED_LIMIT = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
KERNELS = {
    "_grpo_loss_kernel",
    "_logits_gradient_kernel",
    "_logprob_forward_kernel",
    "_merge_splits_kernel",
    "_row_statistics_kernel",
}
# With 128 accumulators a thread, ptxas parks up to four registers outside the loop over D; none is touched inside it.
PARKED = {("_logprob_forward_kernel", "sm_90"): 16}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("compile_all.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kernel_compiles_and_fits_shared_memory(compiled: list[dict[str, Any]], arch: str, dtype: str) -> None:
    built = [facts for facts in compiled if (facts["arch"], facts["dtype"]) == (arch, dtype)]
    assert {facts["name"] for facts in built} == KERNELS
    assert all(facts["shared"] <= SHARED_LIMIT[arch] for facts in built)


def test_no_shipped_bf16_tile_spills_registers(compiled: list[dict[str, Any]]) -> None:
    spilled = {
        (facts["name"], facts["arch"]): facts["stack"]
        for facts in compiled
        if facts["dtype"] == "bfloat16" and facts["stack"] > PARKED.get((facts["name"], facts["arch"]), 0)
    }
    assert spilled == {}


def test_head_runs_on_hopper_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    counts = [facts["hgmma"] for facts in compiled if "hgmma" in facts and facts["dtype"] == "bfloat16"]
    assert counts
    assert all(count > 0 for count in counts)


def test_in_place_gradient_waits_for_its_readers(compiled: list[dict[str, Any]]) -> None:
    barriers = [facts["barriers"] for facts in compiled if facts["name"] == "_logits_gradient_kernel"]
    assert len(barriers) == 3 * len(SHARED_LIMIT)
    assert all(count > 0 for count in barriers)
