"""A kernel is compiled once per model: not again for another number of rows, nor for a slice that starts elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only(reason="it compiles ahead of time, the same on any machine")


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_neither_row_count_nor_alignment_of_a_slice_compiles_again(arch: str, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("launch_keys.py")), arch]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(launches) == 2 * 4 * 4 * 9
    keys: dict[tuple[str, str, int], set[str]] = {}
    for launch in launches:
        keys.setdefault((launch["dtype"], launch["kernel"], launch["number"]), set()).add(launch["key"])
    assert len(keys) == 18
    assert {name: found for name, found in keys.items() if len(found) > 1} == {}
