"""The house rules that ruff and mypy do not know: `python scripts/house_style.py` lists every breach and exits 1.

Floors: kernels -> fused_grpo -> trainer; an import never goes up. Inside a floor rooms have an order, and imports only
go down; nowhere is there a circle. The drawing in CONTRIBUTING.md has every arrow between rooms and no other. Imports
inside functions and under TYPE_CHECKING count. Lengths: files of at most 500 lines, functions of at most 60, jit
kernels of at most 90, public functions of at most 4 positional parameters; pages of at most 250 lines; names of tests
of at most 70 characters. Words: code and pages use the field's terms instead of those in WORDS; no notes to self. A
variable, an argument or a field is named by a noun that says what it is: none is VAGUE.
Pages: every relative link, its anchor, and every file named in backticks exists, and docs/README.md links every page.
What code may not do is in security.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"kernels": 0, "fused_grpo": 1, "trainer": 2}
# Of each floor, from top to bottom.
ROOMS = {
    "fused_grpo": (
        *("integrations", "env", "fused_loss", "divergence", "logprobs", "loss"),
        *("head", "passes", "_maths", "config", "errors"),
    ),
    "trainer": (
        *("cli", "loop", "transformers_face", "collect", "learner", "self_check", "policy", "checkpoint"),
        *("episodes", "engines", "environments"),
        *("tasks", "rewards", "data", "batching", "distributed", "models", "logging", "config", "types"),
        *("throughput", "recipes", "common"),
    ),
}
DRAWN_INSIDE = ("fused_grpo.head",)
MAX_FILE, MAX_FUNCTION, MAX_POSITIONAL = 500, 60, 4
MAX_KERNEL, MAX_ARGUMENTS = 90, 24  # of a jit function, with its signature and docstring, and constexpr included
PUBLIC = ("logprobs", "loss", "fused_loss", "config", "loop")
MAX_PAGE, MAX_TEST_NAME = 250, 70
WORDS = {  # between two characters that are no letters, in any case; what a reviewer has to judge is not in here
    r"TO" r"DO|FIX" r"ME|X" r"XX": "a note to self is left",
    r"stretch(es|ed)?": "say vocabulary slice, split",
    r"adrift|anchor that holds": "say out of range of the fixed shift",
    r"made again": "say recomputed",
    r"deals?|dealt|dealing|hands": "say balanced, assignments, passes",
    r"divided(?! by)|made whole": "say sharded, gathered; cut, split",
    r"last[ _]words|settle[sd]?|(?<!\w)(anywhere|together)(?=\()": "say report_failure, barrier, any_rank",
    r"(?<!git )(?<!always_)push(es|ed)?(?!_to_hub|_in_|_begin)": "say softmax scale, target scale",
    r"pull(s|ed)?(?! request)": "say softmax scale, target scale",
    r"foreseen": "say speculative gradient",
    r"(?<!generate[_-])ahead(?!-of-time| of )": "say prefetched",
    r"givers?|unsure": "say responders, stale",
    r"(?<!\")contenders?|crew|in turns": "say implementations, worker processes, interleaved rounds",
    r"used[ _]up|comes[ _]again|(?<=\.)learns|learns(?=:|=)": "say exhausted, has_more_iterations, in_loss",
    r"(?-i:[Nn]obody|[Ww]hoever)": "name who it is",
    r"farms?": "say fork server",
    r"oracles?": "say independent implementation",
    r"rehears(e[ds]?|als?|ing)": "say dry run",
}
VAGUE = re.compile(r"left|some|mine|theirs|known|found|done|how|of_\w+")  # as a variable, an argument or a field
FIELDS = ("done", "left")  # which environments and saved buffers have, and drawings
NAMED_FILE = r"`((?:bench|docs|examples|fused_grpo|kernels|scripts|tests|trainer)/[\w./-]+\.(?:py|md|toml|yaml|json))`"


def main() -> int:
    breaches = [breach for path in sources() for breach in breaches_of(path)]
    imports = imports_of(path for path in sources() if path.relative_to(ROOT).parts[0] in FLOORS)
    breaches += [*upward(imports), *circles(imports), *drawing_breaches(imports)]
    breaches += [breach for page in pages() for breach in (*word_breaches(page), *page_breaches(page))]
    breaches += unlisted_pages()
    print("\n".join(breaches) or f"house style: {len(list(sources()))} files and {len(pages())} pages are fine")
    return bool(breaches)


def sources() -> Iterator[Path]:
    for folder in (*FLOORS, "tests", "bench", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == path.resolve():  # not through fused_grpo/kernels or fused_grpo/trainer again
                yield path


def pages() -> list[Path]:
    """What is written for readers. The changelog may name what it renames, and results what they measured."""
    tops = [page for page in sorted(ROOT.glob("*.md")) if page.name != "CHANGELOG.md"]
    return [*tops, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("[ek]*s/*.md"))]


def word_breaches(path: Path) -> Iterator[str]:
    text = path.read_text()
    for pattern, say in WORDS.items():
        for match in re.finditer(rf"(?<![a-z])(?:{pattern})(?![a-z])", text, re.IGNORECASE):
            yield f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}: {match[0]!r}: {say}"


def page_breaches(page: Path) -> Iterator[str]:
    text, name = page.read_text(), page.relative_to(ROOT)
    if text.count("\n") > MAX_PAGE:
        yield f"{name}: {text.count(chr(10))} lines, at most {MAX_PAGE}"
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not re.match(r"\w+:", link) and (not file.exists() or (anchor and anchor not in anchors(file))):
            yield f"{name}: a link to {link}, which does not exist"
    for table in re.findall(r"(?:^\|.*\n?)+", prose, re.MULTILINE):
        if not re.match(r".*\n\|[ :|-]+\|$", table, re.MULTILINE):
            yield f"{name}: {table.partition(chr(10))[0][:40]!r} begins a table without a header"
    for file in re.findall(NAMED_FILE, prose):
        if not (ROOT / file).exists():
            yield f"{name}: names {file}, which does not exist"


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of its headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unlisted_pages() -> Iterator[str]:
    folder = ROOT / "docs"
    listed = re.findall(r"\]\(([\w./-]+\.md)[)#]", (folder / "README.md").read_text())
    for page in sorted(folder.rglob("*.md")):
        if page.name != "README.md" and page.relative_to(folder).as_posix() not in listed:
            yield f"{page.relative_to(ROOT)}: docs/README.md has no link to it"


def breaches_of(path: Path) -> Iterator[str]:
    text, name = path.read_text(), path.relative_to(ROOT)
    shipped = name.parts[0] in FLOORS
    if text.count("\n") > MAX_FILE:
        yield f"{name}: {text.count(chr(10))} lines, at most {MAX_FILE}"
    if path.name not in (Path(__file__).name, "test_house_style.py"):
        yield from word_breaches(path)
    tree = ast.parse(text)
    if shipped and text.strip() and not ast.get_docstring(tree):
        yield f"{name}: no module docstring"
    yield from name_breaches(tree, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and shipped:
            yield from function_breaches(node, name)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
            yield f"{name}:{node.lineno}: {node.name} has {len(node.name)} characters, at most {MAX_TEST_NAME}"


def name_breaches(tree: ast.Module, name: Path) -> Iterator[str]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = [line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign)]
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=defined, ctx=ast.Store()) | ast.arg(arg=defined):
                allowed = FIELDS if node in fields else ()
            case ast.Attribute(value=ast.Name(id="self"), attr=defined, ctx=ast.Store()):
                allowed = FIELDS
            case _:
                continue
        if VAGUE.fullmatch(defined) and defined not in allowed:
            yield f"{name}:{node.lineno}: {defined!r} is vague: name what it is"


def function_breaches(node: ast.FunctionDef, name: Path) -> Iterator[str]:
    where, kernel = f"{name}:{node.lineno}: {node.name}", any("jit" in ast.dump(d) for d in node.decorator_list)
    if kernel:
        yield from kernel_breaches(node, where)
        return
    length = (node.end_lineno or 0) - node.body[0].lineno + 1
    if ast.get_docstring(node):
        length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    if length > MAX_FUNCTION:
        yield f"{where} has {length} lines of code, at most {MAX_FUNCTION}"
    positional = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls", "ctx")]
    autograd = node.args.args[:1] and node.args.args[0].arg == "ctx"
    public = name.stem in PUBLIC and not node.name.startswith("_") and not autograd
    if public and len(positional) > MAX_POSITIONAL:
        yield f"{where} takes {len(positional)} positional parameters, at most {MAX_POSITIONAL}"


def kernel_breaches(node: ast.FunctionDef, where: str) -> Iterator[str]:
    length = (node.end_lineno or 0) - node.lineno + 1
    arguments = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    if length > MAX_KERNEL:
        yield f"{where} is a kernel of {length} lines, at most {MAX_KERNEL}"
    if arguments > MAX_ARGUMENTS:
        yield f"{where} is a kernel with {arguments} arguments, at most {MAX_ARGUMENTS}"


def imports_of(paths: Iterable[Path]) -> dict[str, set[str]]:
    """By module of the package, the modules that it imports anywhere."""
    modules = {module_of(path): path for path in paths}
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        imports[module] = (names & modules.keys()) - {module}
        # A package that is named for one of its modules is not imported for itself.
        imports[module] -= {name for name in imports[module] if any(x.startswith(f"{name}.") for x in imports[module])}
    return imports


def module_of(path: Path) -> str:
    """`fused_grpo.trainer.loop`, as it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fused_grpo" else ("fused_grpo", *parts)
    parts = tuple(part for part in parts if part not in ("torch-ext", "fused_grpo_kernels"))  # behind a link
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place(module: str) -> tuple[int, int]:
    """Floor, and height of the room in it: no import goes to a higher place. A room that is not in ROOMS is at 0."""
    floor, room = room_of(module)
    rooms = ROOMS.get(floor, ())
    height = len(rooms) - rooms.index(room) if room in rooms else 0 if room else len(rooms) + 1
    return FLOORS[floor], height if rooms else 0


def upward(imports: dict[str, set[str]]) -> Iterator[str]:
    for module, others in imports.items():
        floor, height = place(module)
        if rooms := next((ROOMS[name] for name in ROOMS if FLOORS[name] == floor and not height), ()):
            yield f"{module} is in none of the rooms {', '.join(rooms)}"
        for other in sorted(others):
            if place(other) > (floor, height):
                yield f"{module} imports {other}, which is above it"


def drawing_breaches(imports: dict[str, set[str]]) -> Iterator[str]:
    """Where the lines `room -> rooms | rooms of the floor below` of CONTRIBUTING.md are not what the code imports."""
    drawn = re.findall(r"^\w+ +->.*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    wanted = [arrows_of(room, floor, imports) for floor in reversed(ROOMS) for room in ROOMS[floor]]
    wanted = [line for line in wanted if line]
    wanted += [line for folder in DRAWN_INSIDE for line in arrows_inside(folder, imports)]
    for line in wanted:
        if drawn.count(line) < wanted.count(line):
            yield f"CONTRIBUTING.md: the drawing lacks the line {line!r}"
    for line in drawn:
        if line not in wanted:
            yield f"CONTRIBUTING.md: the drawing has the line {line!r}, which is not what the code imports"
    if sorted(drawn) == sorted(wanted) and drawn != wanted:
        yield "CONTRIBUTING.md: the rooms of the drawing are not in their order from top to bottom"


def arrows_of(room: str, floor: str, imports: dict[str, set[str]]) -> str:
    """A line of the drawing; nothing for a room without files."""
    modules = [module for module in imports if room_of(module) == (floor, room)]
    others = {room_of(other) for module in modules for other in imports[module]} - {(floor, room)}
    own = [name for name in ROOMS[floor] if (floor, name) in others]
    below = [name for name in ROOMS["fused_grpo"] if floor == "trainer" and ("fused_grpo", name) in others]
    below += ["kernels"] * any(name == "kernels" for name, _ in others)
    return " ".join([f"{room:<12} ->", *own, *(["|", *below] if below else [])]) if modules else ""


def arrows_inside(folder: str, imports: dict[str, set[str]]) -> list[str]:
    """The lines of the files in a room; what imports most in a chain is at the top."""
    files = {module.removeprefix(f"{folder}.") for module in imports if module.startswith(f"{folder}.")}
    below = {file: {other for other in files if f"{folder}.{other}" in imports[f"{folder}.{file}"]} for file in files}
    reached = {file: reachable(file, below) for file in files}
    order = sorted(files, key=lambda file: (-len(reached[file]), file))
    return [" ".join([f"{file:<18} ->", *(other for other in order if other in below[file])]) for file in order]


def room_of(module: str) -> tuple[str, str]:
    """Its floor, and its room there; "" for what a floor's own __init__.py exports."""
    floor, *rest = [*module.split(".")[1:], ""]
    return (floor, rest[0]) if floor in FLOORS else ("fused_grpo", floor)


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
    reached, unvisited = set[str](), [start]
    while unvisited:
        new = imports.get(unvisited.pop(), set()) - reached
        reached |= new
        unvisited += new
    return reached


if __name__ == "__main__":
    sys.exit(main())
