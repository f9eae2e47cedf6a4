"""The promise that the package is named after: never more than one chunk of logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_is_the_gradients_and_one_chunk():
    """At N=4096, V=50304, D=256 in fp32, where full logits are 786 MiB."""
    script = Path(__file__).with_name("peak_memory.py")
    run = subprocess.run([sys.executable, script, str(64 * MIB)], capture_output=True, text=True, check=True)
    measured = json.loads(run.stdout)
    allowed = 1.05 * (measured["gradients"] + 64 * MIB)
    print(f"peak {measured['peak'] / MIB:.1f} MiB, allowed {allowed / MIB:.1f} MiB")
    # Less than the chunk itself would mean that the measurement missed it.
    assert measured["gradients"] + 60 * MIB <= measured["peak"] <= allowed
