"""Logs without what a clock or the machine's load decides: the same in two runs that are the same."""

import json
from pathlib import Path
from typing import Any

CLOCKED = ("time", "seconds", "per_second", "memory")  # parts of names, as of `eval_runtime`


def unclocked(value: Any) -> Any:
    """`value`, with all that is in it, without the names of `CLOCKED`."""
    if isinstance(value, dict):
        return {name: unclocked(inner) for name, inner in value.items() if not any(part in name for part in CLOCKED)}
    return list(map(unclocked, value)) if isinstance(value, list) else value


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl or rollouts.jsonl."""
    return [unclocked(json.loads(line)) for line in path.read_text().splitlines()]
