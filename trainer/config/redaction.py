"""Values as JSON, and a configuration that is safe to publish.

Reports are made to be shared. So host and user names are never collected, and secrets and home directories are removed
from a configuration before it is written to the disk.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

REDACTED = "<redacted>"

# `hub_token` and `token` are secrets; `eos_token`, `max_tokens` and `pad_token` are not.
_SECRET_KEY = re.compile(
    r"(^|[_-])(password|passwd|passphrase|secret|credentials?|cookie|(api|access|secret|private)[_-]?key"
    r"|(hub|hf|api|auth|access|bearer)[_-]?token)$|^((proxy-)?authorization|auth|token)$",
    re.IGNORECASE,
)
# Known forms of tokens, after "Bearer", before the @ of a URL, and values of such keys in its query.
_SECRET_VALUE = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_)\w[\w-]{15,}|(?<=://)[^/@\s]+(?=@)|(?<=bearer )\S+|(?<=basic )\S+"
    r"|(?<=key=)[^&\s]+|(?<=token=)[^&\s]+|(?<=secret=)[^&\s]+|(?<=password=)[^&\s]+",
    re.IGNORECASE,
)
_HOME = re.compile(r"(?<![\w.~/-])(/root|/(home|Users)/[^/\s:]+)(?![\w.-])")


def to_json(value: object) -> object:
    """`value` for strict JSON: NaN and infinities as null, paths and unknown objects as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if hasattr(type(value), "tolist"):  # of NumPy, or a tensor
        return to_json(value.tolist())  # type: ignore[attr-defined]
    return getattr(value, "__qualname__", None) or str(value)


def redacted(value: object, key: str = "") -> object:
    """`to_json(value)` without secrets (by the name of their key, or by their form) and without home directories."""
    if value and _SECRET_KEY.search(key):
        return REDACTED
    if isinstance(value, Mapping):
        return {str(name): redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redacted(item) for item in value]
    plain = to_json(value)
    return _without_home(_SECRET_VALUE.sub(REDACTED, plain)) if isinstance(plain, str) else plain


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=/|$)", "~", text)
    return _HOME.sub("~", text)
