"""Functions that `torch.compile` must call without tracing them: they read values of tensors and plan memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which breaks the graph where a call of it is compiled. Eager calls do not change."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Not as a decorator: that imports the compiler, which costs eager users four seconds.
            uncompiled: Callable[P, R] = torch.compiler.disable(function)
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
