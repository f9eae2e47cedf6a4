"""Every error that fused-grpo raises on purpose. Each is also the standard exception that a caller would expect.

Messages have three parts: what was got, what is wanted, and how to fix it. They may quote what others wrote (a model,
a server, the exception of a reward function), so control characters in a message are escaped and its length is bounded.

That text is untrusted: an escape sequence can recolour or retitle a terminal, a bidirectional override reverses text,
and it may have any length. `visible` escapes such characters instead of dropping them, so that what is shown is still
what was written. Every error goes through `shown`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

CHARACTERS, LINES = 4000, 60  # of an error
NOTE = 40  # characters, which the note about those that were left out does not reach


def visible(text: str, *, keep: str = "") -> str:
    """`text` with control, format and unassigned characters escaped (`\\x1b`, `\\n`), except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or _is_harmless(c) else c.encode("unicode_escape").decode() for c in text)


def elide_middle(text: str, limit: int) -> str:
    """At most about `limit` characters of `text`: its start and its end, and how many were left out between them."""
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]} […{len(text) - head - tail} characters…] {text[len(text) - tail :]}"


def elide_lines(text: str, limit: int) -> str:
    """At most `limit` lines of `text` and one more: its start and its end, and how many were left out between them."""
    lines = text.split("\n")
    if len(lines) <= limit:
        return text
    head, tail = lines[: (limit + 1) // 2], lines[len(lines) - limit // 2 :]
    return "\n".join([*head, f"[…{len(lines) - limit} lines…]", *tail])


def shown(text: object, characters: int = CHARACTERS) -> str:
    """`str(text)`, visible and of a bounded length: of a long one the start and the end. Newlines and tabs stay.

    Text that went through this once is not changed by a second time: errors quote errors, and are pickled.
    """
    try:
        written = str(text)
    except Exception as error:  # of somebody's __str__
        written = f"{type(text).__name__} without text ({type(error).__name__})"
    for _ in range(2):  # before, since it may be long, and after, since an escape is longer than its character
        written = elide_middle(written, characters) if len(written) > characters + NOTE else written
        written = visible(written, keep="\n\t")
    return elide_lines(written, LINES) if written.count("\n") > LINES else written


def is_shown(text: object) -> bool:
    """Whether `str(text)` is what `shown` makes of it."""
    try:
        return str(text) == shown(text)
    except Exception:
        return False


def quoted(value: object, characters: int = 500) -> str:
    """`repr(value)`, of a bounded length."""
    try:
        return shown(repr(value), characters)
    except Exception:  # of somebody's __repr__, or of a value that is nested too deeply
        return f"<{type(value).__name__}>"


def _is_harmless(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


class FusedGRPOError(Exception):
    """Base of all errors of this package."""

    def __init__(self, *message: object) -> None:
        super().__init__(*map(shown, message))


class InputError(FusedGRPOError, ValueError):
    """An argument that cannot be right: shape, dtype, device or range."""


class WrongTypeError(InputError, TypeError):
    """An argument of another type than the one that is wanted."""


class UnsupportedError(FusedGRPOError, NotImplementedError):
    """A known option that this version does not offer."""


class MissingAttributeError(UnsupportedError, AttributeError):
    """An attribute that others expect of an object."""


class UnavailableError(FusedGRPOError, RuntimeError):
    """An implementation or engine that cannot run on this machine."""


class DataError(FusedGRPOError, ValueError):
    """A dataset or a column that cannot be used."""


class DatasetTypeError(DataError, TypeError):
    """Something else than a dataset."""


class RewardError(FusedGRPOError, RuntimeError):
    """A reward function that raised or returned something unusable."""


class RewardValueError(RewardError, ValueError):
    """A reward function that returned something unusable."""


class WeightSyncError(FusedGRPOError, RuntimeError):
    """The rollout engine does not serve the trainer's weights."""


class CheckpointError(FusedGRPOError, RuntimeError):
    """An output directory or checkpoint that cannot be used."""


class NonFiniteError(FusedGRPOError, ArithmeticError):
    """A loss or gradient that is NaN or infinite. Parameters were not updated."""


class PeerError(FusedGRPOError, RuntimeError):
    """Another rank of the run failed, and this rank stopped with it."""


def show_causes(error: BaseException) -> None:
    """Put stand-ins in the place of the causes of an error of ours that a terminal must not get: Python prints them.

    A stand-in has the name of the cause's class, its traceback, and its text as an error of this package would have it.
    """
    if not isinstance(error, FusedGRPOError):
        return
    while True:
        link = "__context__" if error.__cause__ is None else "__cause__"
        cause = getattr(error, link)
        if cause is None or (link == "__context__" and error.__suppress_context__):
            return
        if not is_shown(cause):
            kind = type(type(cause).__name__, (Exception,), {"__module__": type(cause).__module__})
            stand_in = kind(shown(cause)).with_traceback(cause.__traceback__)
            stand_in.__cause__, stand_in.__context__ = cause.__cause__, cause.__context__
            stand_in.__suppress_context__ = cause.__suppress_context__
            setattr(error, link, stand_in)
        error = getattr(error, link)


@contextmanager
def causes_shown() -> Iterator[None]:
    """Around what a script calls, or as its decorator: `show_causes` of an error that leaves it."""
    try:
        yield
    except FusedGRPOError as error:
        show_causes(error)
        raise
