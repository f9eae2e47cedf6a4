"""docs/troubleshooting.md has every error, under the standard exception that it also is."""

import re
from pathlib import Path

from fused_grpo import errors

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


def test_every_error_has_a_section_and_the_right_standard_exception():
    ours = {error.__name__: error.__bases__[1].__name__ for error in errors.FusedGRPOError.__subclasses__()}
    rows = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert {name: standard for name, _, standard in rows} == ours
    assert all(anchor == name.lower() for name, anchor, _ in rows)
    assert set(re.findall(r"^## (\w+Error)$", PAGE, flags=re.MULTILINE)) == ours.keys()
