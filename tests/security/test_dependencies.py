"""What SECURITY.md says of dependencies is what pyproject.toml says."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
ROWS = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| (.*CVE.*) \|$", TEXT, re.MULTILINE)


def floors() -> dict[str, Version]:
    """The lowest version of each package that pyproject.toml accepts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = map(Requirement, [*project["dependencies"], *extras["trainer"], *extras["vllm"]])
    return {need.name: Version(next(iter(need.specifier)).version) for need in needs if need.specifier}


def test_every_floor_of_the_list_is_the_projects():
    assert len(ROWS) >= 5
    assert {name: Version(floor) for name, floor, _ in ROWS} == {name: floors()[name] for name, _, _ in ROWS}


def test_every_floor_is_at_or_above_the_fix():
    fixes = [(name, Version(floor), fix) for name, floor, text in ROWS for fix in re.findall(r"\(\D*([\d.]+)\)", text)]
    assert len(fixes) >= 10
    assert [(name, fix) for name, floor, fix in fixes if Version(fix) > floor] == []
