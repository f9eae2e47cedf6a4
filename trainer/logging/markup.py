"""HTML that text cannot break out of.

Text becomes HTML in one place, `element` (and `join`, which it uses): whatever is not already `Html` is escaped. So a
completion cannot add markup to a page, whoever edits that page next.
"""

from __future__ import annotations

import html

from fused_grpo.trainer.logging.formatting import visible

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f8fa; --text: #1f2328; --muted: #59636e; --rule: #d8dee4;
  --good: #0a6b4f; --bad: #a03c00; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1a2028; --text: #e6edf3; --muted: #9aa5b1;
  --rule: #2f3741; --good: #4cc9a0; --bad: #f0a030; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .8rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .6rem; }
.lead, .note { color: var(--muted); margin: 0 0 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1.4rem 0 0; }
.tile, .sample { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .7rem .9rem; }
.wide { grid-column: span 2; }
.tile dt, .label { color: var(--muted); font-size: .8rem; }
.tile dd { margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
img { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--muted); width: 40%; }
.sample { margin: 0 0 .75rem; }
.sample header { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin-bottom: .5rem; font-size: .85rem; }
.best { color: var(--good); font-weight: 600; } .worst { color: var(--bad); font-weight: 600; }
.random { font-weight: 600; }
pre { margin: .1rem 0 .6rem; max-height: 16rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; font: .84rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin: 0 0 .6rem; } summary { cursor: pointer; padding: .2rem 0; }
footer { margin-top: 3rem; color: var(--muted); font-size: .85rem; }
"""


class Html(str):
    """Text that is HTML already. Made by `element` and `join`, and nowhere from text of a run."""


def element(tag: str, *children: str, **attributes: str) -> Html:
    """`<tag>` around `children`, which are escaped unless they are `Html`; `class_` stands for class."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    written = "".join(f' {names[name]}="{html.escape(value)}"' for name, value in attributes.items())
    if tag in ("img", "meta", "source"):
        return Html(f"<{tag}{written}>")
    return Html(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*parts: str) -> Html:
    """`parts` one after the other; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(visible(part, keep="\n\t")) for part in parts))
