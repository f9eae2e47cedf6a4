"""Scripts that need compiled Triton kernels: pytest itself has imported the kernels in interpreter mode."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_script(script: Path, *arguments: str, cache: Path | None = None) -> list[Any]:
    """The JSON lines that the script prints, in a process without TRITON_INTERPRET; `cache` is Triton's."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {} if cache is None else {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, script, *arguments], env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
