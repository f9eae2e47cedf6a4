"""CONTRIBUTING.md has a line for every pass of the protocol, and no other."""

import re
from pathlib import Path

from fused_grpo.passes.protocol import RowPasses


def test_the_map_between_the_floors_has_every_pass_once():
    page = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    passes = {name for name in vars(RowPasses) if not name.startswith("_")}
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(passes)
