"""Security rules that ruff does not have: `python scripts/security.py` lists every violation and exits 1.

ruff rejects pickle, eval, shells, unsafe YAML, temporary files with known names, unchecked certificates and servers on
all interfaces (rules S and TID251 in pyproject.toml). This script rejects options that run remote code, sockets bound
to all interfaces by an empty host, and tokens. SECURITY.md has the reasons. Tests are not checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("fused_grpo", "trainer", "kernels", "bench", "scripts", "examples")
# Options that must not be True as an argument, a default, an assignment or a value of a mapping.
OPTIONS = {"allow_pickle": "unpickles anything", "trust_remote_code": "runs code that comes with weights"}
SECRET = re.compile(
    r"\b(hf_[A-Za-z]{30,}|sk-[A-Za-z0-9]{20,}|gh[pousr]_\w{30,}|AKIA[A-Z0-9]{16})\b|BEGIN [A-Z ]*PRIVATE KEY"
)


def main() -> int:
    # Without the links fused_grpo/kernels, fused_grpo/trainer and fused_grpo/bench.
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path == path.resolve()]
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {what}" for path in paths for line, what in offences(path.read_text())
    ]
    print("\n".join(offenders) or f"security: no violation in {len(paths)} files")
    return bool(offenders)


def offences(text: str) -> Iterator[tuple[int, str]]:
    """Line and description of each violation."""
    for node in ast.walk(ast.parse(text)):
        for name, value in options_in(node):
            if name in OPTIONS and isinstance(value, ast.Constant) and value.value is True:
                yield value.lineno, f"{name}=True {OPTIONS[name]}"
        match node:
            case ast.Call(func=ast.Attribute(attr="bind"), args=[ast.Tuple(elts=[ast.Constant(value="" | "::"), *_])]):
                yield node.lineno, "binds to all interfaces; fix: 127.0.0.1"
            case ast.Constant(value=str(value)) if SECRET.search(value):
                yield node.lineno, "looks like a secret"


def options_in(node: ast.AST) -> Iterator[tuple[object, ast.expr | None]]:
    """(name, value) of each argument, default, assignment or item of a mapping."""
    match node:
        case ast.keyword(arg=name, value=value):
            yield name, value
        case ast.Dict(keys=keys, values=values):
            yield from ((getattr(key, "value", None), value) for key, value in zip(keys, values, strict=True))
        case ast.arguments():
            positional = [*node.posonlyargs, *node.args]
            defaults = zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)
            pairs = [*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            yield from ((argument.arg, value) for argument, value in pairs)
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
            yield getattr(target, "attr", getattr(target, "id", None)), value


if __name__ == "__main__":
    sys.exit(main())
