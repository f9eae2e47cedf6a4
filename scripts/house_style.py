"""The house rules that ruff and mypy do not know: `python scripts/house_style.py` lists every breach and exits 1.

Floors: kernels -> fused_grpo -> trainer; an import never goes up. Inside the trainer rooms have an order, and imports
only go down; nowhere is there a circle. Imports inside functions and under TYPE_CHECKING count. Lengths: files of at
most 500 lines, functions of at most 60, jit kernels of at most 90, public functions of at most 4 positional parameters.
Honesty: no notes to self left in the code. What code may not do is in security.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"kernels": 0, "fused_grpo": 1, "trainer": 2}
# Of the trainer, from top to bottom.
ROOMS = ("cli", "loop", "collect", "learner", "policy", "checkpoint", "engines", "rewards", "data", "batching")
ROOMS += ("distributed", "models", "logging", "config", "types", "recipes")
MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_POSITIONAL = 500, 60, 90, 4
PUBLIC = ("logprobs", "loss", "fused_loss", "config", "loop")
FORBIDDEN = {
    r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b": "a note to self",
}


def main() -> int:
    breaches = [breach for path in sources() for breach in breaches_of(path)]
    imports = imports_of(path for path in sources() if path.relative_to(ROOT).parts[0] in FLOORS)
    breaches += [*upward(imports), *circles(imports)]
    print("\n".join(breaches) or f"house style: {len(list(sources()))} files are fine")
    return bool(breaches)


def sources() -> Iterator[Path]:
    for folder in (*FLOORS, "tests", "bench", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == path.resolve():  # not through fused_grpo/kernels or fused_grpo/trainer again
                yield path


def breaches_of(path: Path) -> Iterator[str]:
    text, name = path.read_text(), path.relative_to(ROOT)
    shipped = name.parts[0] in FLOORS
    if text.count("\n") > MAX_FILE:
        yield f"{name}: {text.count(chr(10))} lines, at most {MAX_FILE}"
    for pattern, what in FORBIDDEN.items():
        for match in re.finditer(pattern, text) if path != Path(__file__) else ():
            yield f"{name}:{text[: match.start()].count(chr(10)) + 1}: {what}"
    tree = ast.parse(text)
    if shipped and text.strip() and not ast.get_docstring(tree) and name.name != "_version.py":
        yield f"{name}: no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and shipped:
            yield from function_breaches(node, name)
        if isinstance(node, ast.Import | ast.ImportFrom) and shipped:
            yield from import_breaches(node, name)


def function_breaches(node: ast.FunctionDef, name: Path) -> Iterator[str]:
    where, kernel = f"{name}:{node.lineno}: {node.name}", any("jit" in ast.dump(d) for d in node.decorator_list)
    length, limit = (node.end_lineno or 0) - (node.body[0].lineno) + 1, MAX_KERNEL if kernel else MAX_FUNCTION
    if ast.get_docstring(node):
        length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    if length > limit:
        yield f"{where} has {length} lines of code, at most {limit}"
    positional = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls", "ctx")]
    autograd = node.args.args[:1] and node.args.args[0].arg == "ctx"
    public = name.stem in PUBLIC and not node.name.startswith("_") and not autograd
    if public and len(positional) > MAX_POSITIONAL:
        yield f"{where} takes {len(positional)} positional parameters, at most {MAX_POSITIONAL}"


def import_breaches(node: ast.Import | ast.ImportFrom, name: Path) -> Iterator[str]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        parts = module.split(".")
        if parts[0] != "fused_grpo":
            continue
        floor = FLOORS.get(parts[1] if len(parts) > 1 else "", 1)
        if floor > FLOORS[name.parts[0]] or name.parts[0] == "kernels":
            yield f"{name}:{node.lineno}: imports {module}, which is a floor above"


def imports_of(paths: Iterable[Path]) -> dict[str, set[str]]:
    """By module of the package, the modules that it imports anywhere."""
    modules = {module_of(path): path for path in paths}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        found[module] = (names & modules.keys()) - {module}
        # A package that is named for one of its modules is not imported for itself.
        found[module] -= {name for name in found[module] if any(x.startswith(f"{name}.") for x in found[module])}
    return found


def module_of(path: Path) -> str:
    """`fused_grpo.trainer.loop`, as it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fused_grpo" else ("fused_grpo", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> int | None:
    """Its place in the order; None outside of the trainer, and for the trainer's own face."""
    parts = module.split(".")
    return ROOMS.index(parts[2]) if parts[1:2] == ["trainer"] and len(parts) > 2 else None


def upward(imports: dict[str, set[str]]) -> Iterator[str]:
    for module, others in imports.items():
        for other in sorted(others):
            mine, theirs = room_of(module), room_of(other)
            if mine is not None and theirs is not None and theirs < mine:
                yield f"{module} imports {other}: {ROOMS[theirs]} is above {ROOMS[mine]}"


def circles(imports: dict[str, set[str]]) -> Iterator[str]:
    """Groups of modules that import each other, one way or another."""
    reached = {module: reachable(module, imports) for module in imports}
    seen = set[str]()
    for module in sorted(imports):
        circle = {other for other in reached[module] if module in reached[other]}
        if circle and module not in seen:
            seen |= circle
            yield f"a circle of imports: {', '.join(sorted(circle))}"


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found, left = set[str](), [start]
    while left:
        new = imports.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


if __name__ == "__main__":
    sys.exit(main())
