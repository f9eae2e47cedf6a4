"""Text that others wrote (a model, a server, an exception of the user's code), made safe to show.

It is untrusted: an escape sequence can recolour or retitle a terminal, a bidirectional override reverses text, and it
may have any length. `visible` escapes such characters instead of dropping them, so that the shown text is still what
was written. Every error of this package goes through `shown`.
"""

from __future__ import annotations

import unicodedata

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
