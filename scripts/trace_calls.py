"""How much of the house a call walks through: `python scripts/trace_calls.py [--list]`.

Runs a plain loss forward and backward, on the torch path, and prints how many functions of the package ran, in how many
files, how many calls that were, and how often a call went to another file. With --list also the functions of each file.
The fewer, the easier the code is to follow.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Walk(NamedTuple):
    """The functions that ran, by file, and their calls in order."""

    functions: dict[str, set[str]]
    calls: list[str]  # the file of each

    def __str__(self) -> str:
        changes = sum(one != other for one, other in zip(self.calls, self.calls[1:], strict=False))
        functions = sum(map(len, self.functions.values()))
        return (
            f"{functions} functions in {len(self.functions)} files, {len(self.calls)} calls, {changes} to another file"
        )


def walk_of(call: Callable[[], Any]) -> Walk:
    """What of the package `call` runs; generators and comprehensions count as the function that they stand in."""
    functions, calls = defaultdict[str, set[str]](set), list[str]()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("scripts", ".venv")
        if event == "call" and ours and not name.endswith(">"):
            file = str(path.resolve().relative_to(ROOT))
            functions[file].add(name)
            calls.append(file)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(dict(functions), calls)


def plain_loss() -> Callable[[], None]:
    """A loss of two padded sequences, forward and backward."""
    from fused_grpo import fused_linear_grpo_loss

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((2, 9, 16), (99, 16)))
    targets, advantages = torch.randint(99, (2, 9), generator=generator), torch.tensor([1.0, -1.0])

    def call() -> None:
        fused_linear_grpo_loss(hidden, weight, targets, advantages=advantages, mask=torch.ones(2, 9)).loss.backward()

    return call


def main(arguments: list[str]) -> int:
    call = plain_loss()
    call()  # once, for what is imported or cached at the first call
    # Autograd runs a backward pass in the thread of the caller on a CPU, so that its calls count.
    walk = walk_of(call)
    print(f"a plain loss, forward and backward: {walk}")
    for file, functions in walk.functions.items() if "--list" in arguments else ():
        print(f"  {file}: {', '.join(sorted(functions))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
