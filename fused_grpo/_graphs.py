"""What `torch.compile` shall call and not look into: values are looked at in it, and memory is planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, as a break in the graph of who compiles a call of it. Eager calls are as they were."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Not as a decorator: that imports the compiler, four seconds that eager users need not wait.
            uncompiled: Callable[P, R] = torch.compiler.disable(function)
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
