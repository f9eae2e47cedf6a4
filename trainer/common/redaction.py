"""A configuration that is safe to publish, and the one list of what looks like a secret.

Reports are made to be shared. So host and user names are never collected, and secrets and home directories are removed
from a configuration before it is written to the disk. Isolated rewards get no environment variable that looks like a
secret.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Mapping

from fused_grpo.trainer.common.formatting import to_json

REDACTED = "<redacted>"

# Names in snake case. A word that some options have too (eos_token, sort_key) makes a secret of a text alone, and in
# upper case, as environment variables are, wherever it stands.
_SECRET_NAME = re.compile(
    "passw|passphrase|passcode|secret|credential|cookie|authorization|(api|access|private|encryption|signing)_?key"
    r"|(^|_)(pwd|creds|jwt)(_|\d|$)"
)
_SECRET_NAME_OF_TEXT = re.compile(
    r"(^|_)auth(_|$)|(^|_)(pass|pats?|sig)\d*$|(api|auth|access|refresh|bearer|session|hub|hf|bot)_?tokens?(_|\d|$)"
    r"|(?<!\w)(?!(.*_)?(eos|bos|pad|unk|sep|cls|mask|eot|eom|image|video|audio|vision|special|start|end|begin|stop"
    "|prefix|middle|suffix|think|tool|per|new|next|first|last|max|min|num|decoder|forced|prompt|completion|response"
    "|sort|primary|foreign|group|answer|label|text|column|cache|dict|metric|input|output|field|value|query|dataset"
    r"|reward|message|score)_(token|key)\d*$)(.*_)?(token|key)\d*$"
)
_SECRET_NAME_IN_UPPER_CASE = re.compile(r"token(?!iz)|keys?(_|\d|$)")
# Forms of keys and tokens, private keys, and the user part of a URL.
_SECRET_FORM = re.compile(
    r"(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z))|(?<=://)[^/\s\"'<>]+(?=@)"
    r"|\b(hf_|gh[pousr]_|npm_|gsk_|r8_|whsec_|api_org_|wandb_v1_|shp(at|ss)_|dop_v1_)[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"
    r"|\b(gl(pat|dt|rt|cbt|ptt|ft|agent|oas|soat|imt)|xox[a-z]|xapp|pypi|nvapi|pplx|GOCSPX)-[\w-]{10,}|\bSG\.[\w-]{16,}\S*"
    r"|(?<![\w-])[sr]k[-_]((?=[\w-]*\d)[\w-]{16,}|[\w-]*[A-Za-z0-9]{16}[\w-]*)|\bAIza[\w-]{20,}|\bya29\.[\w-]{10,}"
    r"|\b(AKIA|ASIA|ABIA|ACCA|AROA|AIDA)[A-Z0-9]{12,}|\beyJ[\w-]{5,}\.[\w-]+(\.[\w-]*)*"
    r"|(?<=hooks\.slack\.com/services/)\S+|(?<=/api/webhooks/)\S+|\b\d{8,10}:AA[\w-]{30,}"
    r"|(?<=(?i:bearer) )[^\s\"']{6,}|(?<=(?i:basic) )(?=\S*([\d=]|[a-z][A-Z]))[A-Za-z0-9+/]{6,}=*"
)
# In queries of URLs, connection strings, and text that holds a configuration.
_ASSIGNED = re.compile(r"(?<![\w-])(?P<name>[\w-]+)(?P<by>[\"']?\s*[=:]\s*[\"']?)(?=(?P<value>[^&\s;,\"']{1,4096}))")
_HOME = re.compile(r"(?<![\w.~/-])(/root|/(home|Users)/[^/\s:]+)(?![\w.-])")


def redacted(value: object, key: str = "") -> object:
    """`to_json(value)` without secrets (by the name of their key, or by their form) and without home directories."""
    if _is_secret(key, value) and value:
        return REDACTED
    if isinstance(value, Mapping):
        return {_public_name(str(name)): redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redacted(item) for item in value]
    plain = to_json(value)
    if not isinstance(plain, str):
        return plain
    text, home = public_text(plain), os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=/|$)", "~", text)
    return _HOME.sub("~", text)


def public_text(text: str) -> str:
    """The text without what has the form of a secret, or is assigned to the name of one."""
    text, parts, end = _SECRET_FORM.sub(REDACTED, text), list[str](), 0
    for match in _ASSIGNED.finditer(text):
        name, by, value = match.group("name", "by", "value")
        is_signed = "=" in by and name.lower().endswith("signature")
        # "key=5", and "The key: look" of a sentence.
        is_prose = "=" not in by and by[0] in ": " and "_" not in _snake_case(name)
        is_plain = is_prose or (value.isdecimal() and len(value) < 9)
        if match.start() >= end and (is_signed or _is_secret(name, 0 if is_plain else value)):
            parts += [text[end : match.end()], REDACTED]
            end = match.end("value")
    return "".join([*parts, text[end:]])


_public_name = functools.lru_cache(maxsize=1024)(public_text)  # of options, which a run writes several times


def without_secrets(environment: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """The environment without variables whose names or values look like secrets, except for those to keep."""
    kept = {*keep, "PWD"}  # the working directory
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not (_is_secret(name, value) or public_text(value) != value)
    }


def _is_secret(name: str, value: object) -> bool:
    return not isinstance(value, bool) and _names_a_secret(name, is_text=not isinstance(value, int | float))


@functools.lru_cache(maxsize=1024)
def _names_a_secret(name: str, *, is_text: bool) -> bool:
    words = _snake_case(name)
    patterns = [_SECRET_NAME, *([_SECRET_NAME_OF_TEXT] if is_text else [])]
    patterns += [_SECRET_NAME_IN_UPPER_CASE] if is_text and name.isupper() else []
    return any(pattern.search(words) for pattern in patterns)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\W", "_", name).lower()
