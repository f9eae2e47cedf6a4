"""The table of docs/models.md: what the trainer does with a tiny random model of each type that transformers has.

python scripts/model_table.py          write it (some minutes)
python scripts/model_table.py TYPE...  print the rows of these types
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parent.parent
PAGE, MARK = ROOT / "docs" / "models.md", "<!-- models: scripts/model_table.py -->"
sys.path.append(str(ROOT / "tests" / "imported"))


def row(model_type: str) -> str:
    """The line of a type in the table."""
    import tiny_models

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        word, why = tiny_models.outcome(model_type, Path(folder))
    return f"| `{model_type}` | {word} | {why.replace('|', '/')} |"


def main(types: list[str]) -> None:
    import tiny_models

    transformers.logging.set_verbosity_error()
    rows = [row(model_type) for model_type in types or tiny_models.TYPES]
    if types:
        return print("\n".join(rows))
    counts = Counter(line.split(" | ")[1] for line in rows)
    found = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    table = [f"transformers {transformers.__version__}: {len(rows)} types, {found}.", "", "| type | outcome | why |"]
    before = PAGE.read_text().split(MARK)[0]
    PAGE.write_text("\n".join([f"{before}{MARK}", "", *table, "|---|---|---|", *rows, ""]))
    return print(found)


if __name__ == "__main__":
    main(sys.argv[1:])
