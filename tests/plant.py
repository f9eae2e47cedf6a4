"""Plants a bug in a copy of this repository and runs the tests there that have to find it: `plant.py '[...]'`.

The argument is a `Bug` of planted_bugs.py as JSON; without a file there is no bug. The fork server runs it, in a fork
of a process that has imported everything except the package. The copy is of links, but for the file with the bug.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Plugins of pytest's own that no test here needs: setting all of them up takes longer than the simplest tests.
UNUSED = ("cacheprovider", "debugging", "doctest", "faulthandler", "legacypath", "pastebin", "setuponly", "setupplan")
UNUSED += ("stepwise", "subtests")
# Rewritten assertions explain themselves better, but rewriting takes longer than most of these tests.
OPTIONS = ["-x", "-q", "--assert=plain", "--tb=no", "--full", *(f"-pno:{plugin}" for plugin in UNUSED)]
PARTS = ("fused_grpo", "kernels", "trainer", "tests", "pyproject.toml")  # of the project, which a test may need


def link_the_project(folder: Path, *, but: str = "") -> None:
    """A copy of the project but for one file, of links: they bring along the bytecode of all that is unchanged."""
    file, cache = ROOT / but, (ROOT / but).parent / "__pycache__"
    # Links of fused_grpo/ lead to other folders of the copy.
    own = {path for path in (ROOT / "fused_grpo", cache, *file.parents) if path.is_relative_to(ROOT)} | {ROOT}
    for source in filter(Path.is_dir, sorted(own)):
        target = folder / source.relative_to(ROOT)
        target.mkdir(exist_ok=True)
        for entry in map(ROOT.joinpath, PARTS) if source == ROOT else source.iterdir():
            is_of_file = entry == file or (source == cache and entry.name.startswith(f"{file.stem}."))
            if entry not in own and not is_of_file:
                (target / entry.name).symlink_to(entry.readlink() if entry.is_symlink() else entry)


def changed(file: str, old: str, new: str) -> str:
    """The text of a file with a bug."""
    text = (ROOT / file).read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file} has {old!r} {text.count(old)} times, want once; fix: mend planted_bugs.py")
    return text.replace(old, new)


def run(selection: list[str], folder: Path) -> int:
    """pytest's status for these tests, in and of the copy."""
    assert "fused_grpo" not in sys.modules, "the tests would see no bug"
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)  # for what the tests start
    sys.path.insert(0, str(folder))
    import pytest

    import fused_grpo

    assert Path(fused_grpo.__file__).is_relative_to(folder), fused_grpo.__file__
    return int(pytest.main([*OPTIONS, *selection]))


def main(file: str, old: str, new: str, selection: list[str]) -> int:
    """pytest's status for the tests that are selected."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        link_the_project(path := Path(folder).resolve(), but=file)
        if file:
            (path / file).write_text(changed(file, old, new))
        return run(selection, path)


if __name__ == "__main__":
    sys.exit(main(*json.loads(sys.argv[1])))
