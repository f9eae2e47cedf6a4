"""Plants a bug in modules that are imported, and runs the tests that have to find it: `swap.py '[...]'`.

The argument is a `Bug` of planted_bugs.py as JSON; without a file there is no bug. The fork server runs this in a fork
of its stage `collected`, where pytest has imported and collected all those tests: that takes longer than to run a few.

Functions get the code that they would have in the changed file. ValueError where something else would change, too, as a
constant of a module. Processes that a test starts have no bug. For both see plant.py.
"""

import contextlib
import gc
import importlib
import inspect
import json
import linecache
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import plant
import pytest
from _pytest.config import _prepareconfig

# Of the stage, for its forks. A fork that looked through them all would copy their memory.
session: pytest.Session
items: dict[str, list[pytest.Item]] = defaultdict(list)  # of a file of tests
functions: dict[tuple[str, CodeType], list[FunctionType]] = defaultdict(list)  # of a file of the project, by code


def collect() -> None:
    """What the fork server calls once."""
    global session
    os.chdir(plant.ROOT)
    planted_bugs = runpy.run_path(str(plant.ROOT / "tests" / "planted_bugs.py"))
    os.environ.update(planted_bugs["ENVIRONMENT"])
    files = {bug.caught_by[0].partition("::")[0] for bug in planted_bugs["BUGS"].values()}
    # What is captured would not go where a fork writes.
    config = _prepareconfig([*plant.OPTIONS, "--capture=no", *sorted(files)])
    session = pytest.Session.from_config(config)
    config._do_configure()
    config.hook.pytest_sessionstart(session=session)
    config.hook.pytest_collection(session=session)
    for item in session.items:
        items[item.nodeid.partition("::")[0]].append(item)
    gc.unfreeze()  # by tests/conftest.py, so that they are seen
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename.startswith(f"{plant.ROOT}/"):
            functions[os.path.realpath(function.__code__.co_filename), function.__code__].append(function)


def swap(file: str, old: str, new: str) -> None:
    """Give functions the code of the file with a bug."""
    path, text = os.path.realpath(plant.ROOT / file), plant.changed(file, old, new)
    name = file.replace("kernels/torch-ext/fused_grpo_", "").removesuffix(".py").replace("/", ".")
    name = name if name.startswith("fused_grpo.") else f"fused_grpo.{name}"
    source: str = importlib.import_module(name).__file__
    assert os.path.realpath(source) == path, source
    codes = [compile(each, source, "exec", dont_inherit=True) for each in (Path(path).read_text(), text)]
    swapped = [(function, code) for was, code in changes(*codes) for function in functions[path, was]]
    if not swapped or any(function.__code__.co_freevars != code.co_freevars for function, code in swapped):
        raise ValueError(f"{file} without {old!r} needs another import")
    for function, code in swapped:
        function.__code__ = code
    # Triton reads the source of a kernel, at its first call.
    linecache.cache[source] = (len(text), None, text.splitlines(keepends=True), source)


def changes(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The code of functions that differ, as it is and as it is to be."""
    if old.co_flags & inspect.CO_OPTIMIZED:  # of a function, not of a module or a class, which have run
        if old != new:
            yield old, new
    elif own(old) != own(new):
        raise ValueError(f"{old.co_qualname} of {old.co_filename} would have to run again")
    inner = [[part for part in code.co_consts if isinstance(part, CodeType)] for code in (old, new)]
    if [part.co_qualname for part in inner[0]] == [part.co_qualname for part in inner[1]]:
        for pair in zip(*inner, strict=True):
            yield from changes(*pair)


def own(code: CodeType) -> tuple[object, ...]:
    """What it does, but for the functions and classes that it makes."""
    constants = [part for part in code.co_consts if not isinstance(part, CodeType)]
    return code.co_code, code.co_names, [(type(part), part) for part in constants]


def main(file: str, old: str, new: str, selection: list[str]) -> int:
    """pytest's status for the tests that are selected."""
    if file:
        swap(file, old, new)
    config, (wanted, *options) = session.config, selection
    session.items = [
        item
        for item in items[wanted.partition("::")[0]]
        if item.nodeid == wanted or item.nodeid.startswith((f"{wanted}::", f"{wanted}["))
    ]
    config.option.keyword = options[1] if options else ""
    config.pluginmanager.getplugin("mark").pytest_collection_modifyitems(session.items, config)
    session.testscollected = len(session.items)
    with contextlib.suppress(session.Failed):  # -x
        config.hook.pytest_runtestloop(session=session)
    status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
    status = status if session.items else pytest.ExitCode.NO_TESTS_COLLECTED
    config.hook.pytest_sessionfinish(session=session, exitstatus=status)
    return int(status)


if __name__ == "__main__":
    import swap as collected  # the module of the stage

    sys.exit(collected.main(*json.loads(sys.argv[1])))
