"""docs/gpu.md, predictions/measured.md and charts from the results of a GPU: `... -m fused_grpo.bench.gpu.page FILE`.

Words of the pages stay as they are; their blocks of figures, and the charts in README.md and there, are of this file
then.
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
projects ([beside the predicted ones](../bench/predictions/measured.md)). How to run it: [benchmarks](benchmarks.md).

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
"""
PREDICTED = """\
# Measured and predicted

What was measured [on a GPU](../../docs/gpu.md), beside [what was predicted](README.md).

{predictions}
"""
START = re.compile(r"(<!-- figures: gpu of \w+ from )\S+( -->)")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="bench/results/<machine>/<date>.jsonl")
    parser.add_argument("--page", type=Path, default=Path("docs/gpu.md"), help="the page (default: docs/gpu.md)")
    measured = Path("bench/predictions/measured.md")
    parser.add_argument("--beside", type=Path, default=measured, help=f"measured and predicted (default: {measured})")
    given = parser.parse_args(argv)
    for page, new in ((given.page, NEW), (given.beside, PREDICTED)):
        text = page.read_text() if page.exists() else new_page(new)
        path = os.path.relpath(given.results, page.parent)
        text = START.sub(rf"\g<1>{path}\2", text)
        page.write_text(pages.rewritten(text, page.parent))
    written = charts.write(read(given.results), given.results.with_suffix(""))
    print(f"wrote {given.page}, its predictions and {len(written)} charts in {given.results.with_suffix('')}")


def new_page(text: str) -> str:
    names = ("machine", "correctness", "promises", "peers", "training", "predictions")
    return text.format_map({name: f"<!-- figures: gpu of {name} from FILE -->\n{pages.END}" for name in names})


if __name__ == "__main__":
    main()
