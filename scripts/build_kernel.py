"""Build a repository of the Hugging Face Kernel Hub from `kernels/`: `python scripts/build_kernel.py OUTPUT`.

kernel-builder, the Hub's own tool, needs Nix. A kernel without compiled code ("noarch") needs only a copy of its
sources per backend, with metadata. This script writes them from the same `build.toml`, with Python alone:

    OUTPUT/build/CARD.md              the card with its placeholders filled, README.md on the Hub
    OUTPUT/build/torch-<backend>/     the sources, metadata.json, and <package>/__init__.py for plain imports
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "kernels"
SECTIONS, GENERAL = {"general", "torch-noarch"}, {"name", "version", "edition", "license", "backends"}
ARCHS = {"cuda": "cuda_capabilities", "rocm": "rocm_archs"}
INNER = """import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("{id}", pathlib.Path(__file__).parents[1] / "__init__.py")
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
globals().update({{name: getattr(module, name) for name in module.__all__}})
"""


def build(project: Path, output: Path, repo_id: str | None = None) -> None:
    """Write the kernel of `project` into `output`, an empty or new folder."""
    config = tomllib.loads((project / "build.toml").read_text())
    general, noarch = config.get("general", {}), config.get("torch-noarch", {})
    # An unknown option is refused, so that no option is ignored silently.
    odd = config.keys() ^ SECTIONS | (general.keys() - {"hub"}) ^ GENERAL
    odd |= noarch.keys() ^ {ARCHS.get(backend, backend) for backend in general.get("backends", ())}
    want(not odd, f"{sorted(odd)} missing or unknown in build.toml", "mend it, or build with kernel-builder")
    want(general["edition"] == 5, f"edition {general['edition']} in build.toml", "edition = 5, which this script knows")
    package = general["name"].replace("-", "_")
    sources = project / "torch-ext" / package
    want((sources / "__init__.py").is_file(), f"no package at {sources}", "call it what build.toml does")
    want(not output.exists() or not any(output.iterdir()), f"{output}, not empty", "remove it, or give another OUTPUT")
    blanks = {"repo_id": repo_id or general.get("hub", {}).get("repo-id", f"OWNER/{general['name']}"), **general}
    card = re.sub(r"{{ (version|repo_id) }}", lambda blank: str(blanks[blank[1]]), (project / "CARD.md").read_text())
    want("{{" not in card and "{%" not in card, "an unknown blank in CARD.md", "use {{ repo_id }} and {{ version }}")

    # The id becomes the module's name. Other sources, another id: two versions in one process share no module.
    unique = hashlib.sha256(json.dumps(hashes(sources)).encode()).hexdigest()[:7]
    for backend in general["backends"]:
        variant, identity = output / "build" / f"torch-{backend}", f"_{package}_{backend}_{unique}"
        shutil.copytree(sources, variant, ignore=shutil.ignore_patterns("__pycache__"))
        (variant / package).mkdir()
        (variant / package / "__init__.py").write_text(INNER.format(id=identity))
        metadata = {"id": identity, **{key: general[key] for key in ("name", "version", "license")}}
        metadata |= {"kernels-minver": "0.14.0", "python-depends": [], "kernel-depends": []}
        metadata |= {"backend": {"type": backend, "archs": noarch[ARCHS[backend]]}}
        metadata |= {"digest": {"algorithm": "sha256", "files": hashes(variant)}}
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (output / "build" / "CARD.md").write_text(card)


def want(condition: object, got: str, fix: str) -> None:
    condition or sys.exit(f"got {got}; fix: {fix}")


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file by its path, in base64, as the Hub's digests have them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    digests = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).digest() for path in files}
    return {name: base64.b64encode(digest).decode() for name, digest in digests.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a repository of the Hugging Face Kernel Hub from kernels/.")
    parser.add_argument("output", type=Path, help="an empty or new folder")
    parser.add_argument("--repo-id", help="OWNER/NAME on the Hub, for the card")
    build(PROJECT, **vars(parser.parse_args()))
