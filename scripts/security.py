"""What the code may not do, looked for in its syntax tree: `python scripts/security.py` lists every place and exits 1.

No code from data (pickle and its kin, eval, yaml.load), no shell, no file name that somebody else may take, no server
for everybody, no unchecked certificate, no remote code by default, no secret in the source. SECURITY.md says why.
Tests are not looked at: they plant what is refused.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("fused_grpo", "trainer", "kernels", "bench", "scripts", "examples")
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "telnetlib", "ftplib"}
CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "makes code of text",
    "os.system": "starts a shell",
    "os.popen": "starts a shell",
    "subprocess.getoutput": "starts a shell",
    "subprocess.getstatusoutput": "starts a shell",
    "yaml.load": "may construct anything; fix: yaml.safe_load",
    "yaml.load_all": "may construct anything; fix: yaml.safe_load_all",
    "yaml.full_load": "constructs more than data; fix: yaml.safe_load",
    "yaml.unsafe_load": "constructs anything; fix: yaml.safe_load",
    "tempfile.mktemp": "names a file that somebody else may make first; fix: tempfile.mkstemp",
    "ssl._create_unverified_context": "checks no certificate",
}
# What a keyword may not be, in any call and as a key of any literal mapping.
OPTIONS = {
    "shell": (True, "starts a shell"),
    "verify": (False, "checks no certificate"),
    "weights_only": (False, "unpickles anything"),
    "allow_pickle": (True, "unpickles anything"),
    "trust_remote_code": (True, "runs code that comes with weights"),
}
EVERYBODY = {"0.0.0.0", "[::]"}
IMPORTERS = {"importlib.import_module", "__import__"}
SECRET = re.compile(
    r"\b(hf_[A-Za-z]{30,}|sk-[A-Za-z0-9]{20,}|gh[pousr]_\w{30,}|AKIA[A-Z0-9]{16})\b|BEGIN [A-Z ]*PRIVATE KEY"
)
# Files that are not looked at, and why.
ALLOWED = {"scripts/security.py": "names what it looks for"}


def main() -> int:
    # Not through fused_grpo/kernels, fused_grpo/trainer and fused_grpo/bench, which are links, again.
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path == path.resolve()]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    found = [
        f"{name}:{line}: {what}" for name, text in texts.items() if name not in ALLOWED for line, what in offences(text)
    ]
    print("\n".join(found) or f"security: nothing to object to in {len(paths)} files")
    return bool(found)


def offences(text: str) -> Iterator[tuple[int, str]]:
    """Line and offence of all that a source does wrong."""
    tree = ast.parse(text)
    names = dict(imported(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from ((node.lineno, f"imports {module}") for module in modules(node) if root(module) in MODULES)
            case ast.Call():
                yield from ((node.lineno, what) for what in call_offences(node, names))
            case ast.Dict():
                keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
                yield from ((node.lineno, what) for what in option_offences(zip(keys, node.values, strict=True)))
            case ast.arguments():
                named = [*node.posonlyargs, *node.args][len(node.posonlyargs) + len(node.args) - len(node.defaults) :]
                pairs = [*zip(named, node.defaults, strict=True), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
                given = [(argument.arg, value) for argument, value in pairs if value is not None]
                yield from ((value.lineno, what) for name, value in given for what in option_offences([(name, value)]))
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                name = dotted(target, {}).rpartition(".")[2]
                yield from ((node.lineno, what) for what in option_offences([(name, value)]))
            case ast.Constant(value=str(value)):
                if value in EVERYBODY:
                    yield node.lineno, f"{value!r} is every network; fix: 127.0.0.1"
                if SECRET.search(value):
                    yield node.lineno, "looks like a secret"


def call_offences(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    called = dotted(node.func, names).removeprefix("builtins.")
    first = node.args[0] if node.args else None
    if called in IMPORTERS and isinstance(first, ast.Constant) and root(str(first.value)) in MODULES:
        yield f"imports {first.value}"
    if isinstance(node.func, ast.Attribute) and node.func.attr == "bind" and is_everybody(first):
        yield "binds to every network; fix: 127.0.0.1"
    if called in CALLS:
        yield f"{called} {CALLS[called]}"
    if called in ("torch.load", "torch.serialization.load") and not any(
        keyword.arg == "weights_only" for keyword in node.keywords
    ):
        yield "torch.load unpickles; fix: weights_only=True, or safetensors"
    yield from option_offences((keyword.arg, keyword.value) for keyword in node.keywords)


def is_everybody(address: ast.expr | None) -> bool:
    """Whether it is ("", port) or ("::", port): strings that elsewhere are harmless."""
    host = address.elts[0] if isinstance(address, ast.Tuple) else None
    return isinstance(host, ast.Constant) and host.value in ("", "::")


def option_offences(options: Iterable[tuple[object, ast.expr]]) -> Iterator[str]:
    for name, value in options:
        bad, why = OPTIONS.get(str(name), (None, ""))
        if why and isinstance(value, ast.Constant) and value.value is bad:
            yield f"{name}={bad} {why}"


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(local name, full name) of all that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (root(alias.name), root(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def root(module: str) -> str:
    return module.partition(".")[0]


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """ "os.system" for what is called so, whatever it was imported as; "" for what has no such name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
