"""A virtual environment with some of the distributions that are installed here, and nothing that must be fetched."""

import importlib.metadata
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def bare_venv(folder: Path, *names: str) -> Path:
    """The folder, with an environment of these distributions and what they need."""
    venv.create(folder, symlinks=True)
    for name in needed_by(*names):
        link(name, site_packages(folder))
    return folder


def site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def needed_by(*names: str) -> set[str]:
    """Distributions, and what they require, with the extras that they ask for."""
    needed, queue = set[tuple[str, str]](), [(name, "") for name in names]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in needed:
            continue
        needed.add((name, extra))
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
                queue += [(canonicalize_name(requirement.name), each) for each in ("", *requirement.extras)]
    return {name for name, _ in needed}


def link(name: str, site: Path) -> None:
    """Have the files of a distribution that is installed here in another environment, too."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(distribution.locate_file(top))
