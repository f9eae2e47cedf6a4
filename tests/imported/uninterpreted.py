"""Scripts that need compiled Triton kernels: pytest itself has imported the kernels in interpreter mode."""

import json
from pathlib import Path
from typing import Any


def run_script(fork_server: Any, script: Path, *arguments: str, cache: Path | None = None) -> list[Any]:
    """The JSON lines that the script prints, in a process without TRITON_INTERPRET; `cache` is Triton's."""
    env = {"TRITON_INTERPRET": "0"} | ({} if cache is None else {"TRITON_CACHE_DIR": str(cache)})
    # That stage has not imported Triton, which reads the variable when it is.
    said = fork_server.run(script, *arguments, env=env, stage="torch", timeout=1200.0)
    return [json.loads(line) for line in said.splitlines()]
