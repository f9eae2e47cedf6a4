"""docs/gpu.md and its charts from the results of a GPU: `python -m fused_grpo.bench.gpu.page RESULTS.jsonl`.

Words of the page stay as they are; its blocks of figures, and the charts in README.md and there, are of this file then.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fused_grpo.bench import pages
from fused_grpo.bench.report import charts
from fused_grpo.bench.report.results_file import read

NEW = """\
# On a GPU

What [scripts/gpu_first.py](../scripts/gpu_first.py) found on a real GPU: its tests, and times beside those of other
projects and beside [the predicted ones](predictions.md). How to run it: [benchmarks](benchmarks.md).

{machine}

## Correctness

{correctness}

## What was promised

{promises}

## Beside other projects

Sorted by time; the best is bold, ours or not. Each is timed in interleaved rounds, after its check against fp64.

{peers}

## Whole trainers

{training}

## Measured and predicted

{predictions}
"""
START = re.compile(r"(<!-- figures: gpu of \w+ from )\S+( -->)")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="bench/results/<machine>/<date>.jsonl")
    parser.add_argument("--page", type=Path, default=Path("docs/gpu.md"), help="the page (default: docs/gpu.md)")
    given = parser.parse_args(argv)
    text = given.page.read_text() if given.page.exists() else new_page()
    path = os.path.relpath(given.results, given.page.parent)
    text = START.sub(rf"\g<1>{path}\2", text)
    given.page.write_text(pages.rewritten(text, given.page.parent))
    written = charts.write(read(given.results), given.results.with_suffix(""))
    print(f"wrote {given.page} and {len(written)} charts in {given.results.with_suffix('')}")


def new_page() -> str:
    names = ("machine", "correctness", "promises", "peers", "training", "predictions")
    blocks = {name: f"<!-- figures: gpu of {name} from FILE -->\n{pages.END}" for name in names}
    return NEW.format_map(blocks)


if __name__ == "__main__":
    main()
