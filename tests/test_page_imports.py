"""What the pages import from the package can be imported."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
IMPORTS = {
    (page.relative_to(ROOT).as_posix(), module, name.strip())
    for page in PAGES
    for block in re.findall(r"^```(?:python|diff)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for module, names in re.findall(r"^\+? *from (fused_grpo[\w.]*) import ([\w, ]+)", block, re.MULTILINE)
    for name in re.sub(r" as \w+", "", names).split(",")
    if module != "fused_grpo.integrations.trl"  # it imports TRL; test_trl.py does what its page says
}


@pytest.mark.parametrize(("page", "module", "name"), sorted(IMPORTS))
def test_what_a_page_imports_is_there(page, module, name):
    assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
