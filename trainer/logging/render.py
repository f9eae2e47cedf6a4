"""Fills the Jinja templates of the report and of the model card, in `templates/`.

Every value in HTML and SVG is escaped, so a completion cannot add markup to a page; `visible` shows its control
characters as escape sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from fused_grpo._text import visible


def _finalize(value: Any) -> Any:
    # Markup, which is a str too, is the output of a macro.
    return visible(value, keep="\n\t") if type(value) is str else value


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(("html", "svg")),
    finalize=_finalize,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **values: Any) -> str:
    """The text of a template with these values."""
    return ENVIRONMENT.get_template(template).render(values)
