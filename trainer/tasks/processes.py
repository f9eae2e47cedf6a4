"""What of a task of reasoning-gym runs in processes of their own: generators make entries, verifiers score answers.

`python -m fused_grpo.trainer.tasks.processes` makes entries. Some generators go through sets of strings, whose order
differs from process to process: the ranks of a run, or a run and the one that resumes it, would have other entries. So
entries are made in a process with a fixed hash seed. It reads {"name", "options", "parts": [[seed, size], ...]} as JSON
from stdin, and writes {"parts": [[entry, ...], ...]} with entries as `entries.as_text` writes them, or {"error": text}.

`score` runs in the process of an isolated reward, which can be killed. Some verifiers run what a model wrote: `eval`,
or sympy's parser, which evaluates. An answer that ends its process, or takes more than its time or memory, costs that
process alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from fused_grpo.errors import shown
from fused_grpo.trainer.tasks.entries import as_text, from_text


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


def score(answers: Sequence[str | None], entries: Sequence[str], generators: Sequence[str]) -> list[float]:
    """Rewards of answers (None: there was none), by the generators of the entries: JSON lists of name and options."""
    return [_score(*row) for row in zip(answers, entries, generators, strict=True)]


def _score(answer: str | None, entry: str, generator: str) -> float:
    """One reward: 0 where the verifier raises, or returns something that is no number."""
    try:
        value = float(_generator(generator).score_answer(answer=answer, entry=from_text(entry)))
    except (Exception, SystemExit):  # of an answer that it cannot read, or that calls exit()
        return 0.0
    return value if math.isfinite(value) else 0.0


@functools.lru_cache(maxsize=8)
def _generator(generator: str) -> Any:
    import reasoning_gym

    name, options = json.loads(generator)
    return reasoning_gym.create_dataset(name, **options)


if __name__ == "__main__":
    main()
