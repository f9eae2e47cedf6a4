"""`contextmanager` as contextlib's, whose errors all leave it.

contextlib cannot tell a RuntimeError that explains a StopIteration of the body from the one that Python puts in the
place of a StopIteration in any generator: it drops both, and most errors of ours are RuntimeErrors. A reward function,
an optimizer or a library that calls `next` on an empty iterator would end a run with an error without a text.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def contextmanager(make: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """A function with one `yield` as a context manager.

    Equals `contextlib.contextmanager(make)`, but for what the function raises in the place of a StopIteration.
    """

    @wraps(make)
    def context(*args: P.args, **options: P.kwargs) -> AbstractContextManager[T]:
        return _Context(cast(Callable[..., Any], make), args, options)

    return context


def finalizer(owner: object, end: Callable[..., object], *args: object) -> weakref.finalize[Any, Any]:
    """As `weakref.finalize(owner, end, *args)`, but nothing in a fork, whose end calls it too."""
    return weakref.finalize(owner, _in_process, os.getpid(), end, *args)


def _in_process(process: int, end: Callable[..., object], *args: object) -> None:
    if os.getpid() == process:
        end(*args)


class _Context(_GeneratorContextManager[T]):
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if not isinstance(error, StopIteration):
            return super().__exit__(kind, error, trace)
        try:
            self.gen.throw(error)
        except StopIteration:  # the function returned: the error ends here
            return True
        except RuntimeError as raised:
            if type(raised) is not RuntimeError or raised.__cause__ is not error:
                raise
            error.__traceback__ = trace
            return False
        raise RuntimeError("got a context manager that yields twice, want one yield")
