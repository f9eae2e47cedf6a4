"""The process that makes the entries of a generator: `python -m fused_grpo.trainer.tasks.make_entries`.

Some generators go through sets of strings, whose order differs from process to process: the ranks of a run, or a run
and the one that resumes it, would have other entries. So entries are made in a process with a fixed hash seed.

It reads {"name", "options", "parts": [[seed, size], ...]} as JSON from stdin, and writes {"parts": [[entry, ...], ...]}
with entries as `entries.as_text` writes them, or {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from fused_grpo.errors import shown
from fused_grpo.trainer.tasks.entries import as_text


def main() -> None:
    request, replies = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some generators print
    print(json.dumps(_reply(request)), file=replies, flush=True)


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    import reasoning_gym

    parts = list[list[str]]()
    for seed, size in request["parts"]:
        index, part = 0, list[str]()
        try:
            dataset = reasoning_gym.create_dataset(request["name"], seed=seed, size=max(1, size), **request["options"])
            for index in range(size):
                part.append(as_text(dataset[index]))
        except Exception as error:  # of the generator
            return {"error": f"{type(error).__name__} for entry {index} of seed {seed}: {shown(error)}"}
        parts.append(part)
    return {"parts": parts}


if __name__ == "__main__":
    main()
