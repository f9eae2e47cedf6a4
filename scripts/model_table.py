"""The table of docs/models.md: what the trainer does with a tiny random model of each type that transformers has.

python scripts/model_table.py          write it (some minutes)
python scripts/model_table.py TYPE...  print what becomes of these types
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parent.parent
PAGE, MARK = ROOT / "docs" / "models.md", "<!-- models: scripts/model_table.py -->"
sys.path.append(str(ROOT / "tests" / "imported"))


def outcome_of(model_type: str) -> tuple[str, str]:
    """ "right", "refused" or "not built here", and why."""
    import tiny_models

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        word, why = tiny_models.outcome(model_type, Path(folder))
    return word, why.replace("|", "/")


def tables(outcomes: dict[str, tuple[str, str]]) -> str:
    """The types that are right by their first letter, and the others by the reason."""
    right, others = defaultdict[str, list[str]](list), defaultdict[tuple[str, str], list[str]](list)
    for name, (word, why) in outcomes.items():
        (right[name[0]] if word == "right" else others[word, why]).append(f"`{name}`")
    rows = [f"| {letter} | {', '.join(names)} |" for letter, names in sorted(right.items())]
    reasons = [
        f"| {word} | {', '.join(names)} | {why} |" for (word, why), names in sorted(others.items(), reverse=True)
    ]
    return "\n".join(["|  | right |", "|---|---|", *rows, "", "| outcome | types | why |", "|---|---|---|", *reasons])


def main(types: list[str]) -> None:
    import tiny_models

    transformers.logging.set_verbosity_error()
    outcomes = {model_type: outcome_of(model_type) for model_type in types or tiny_models.TYPES}
    if types:
        return print("\n".join(": ".join([name, *outcome]) for name, outcome in outcomes.items()))
    counts = Counter(word for word, _ in outcomes.values())
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    said = f"transformers {transformers.__version__}: {len(outcomes)} types, {summary}."
    PAGE.write_text("\n\n".join([PAGE.read_text().split(MARK)[0] + MARK, said, tables(outcomes)]) + "\n")
    return print(summary)


if __name__ == "__main__":
    main(sys.argv[1:])
