"""`python -m fused_grpo.bench`: run the suite of this machine, and make tables and charts of its result.

An interrupted run continues where it stopped if it is started again with the same code. The exit status is pytest's:
1 also where a promise was not met.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fused_grpo.errors import UnavailableError

HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite and write its result, or write tables and charts of a result file again.

    Raises:
        UnavailableError: pytest or pytest-benchmark is not installed.
        DataError: the file of `--render` is not a result file.
    """
    options = parser().parse_args(argv)
    if options.render is not None:
        from fused_grpo.bench.report.results_file import read

        write(read(options.render), options.render)
        return 0
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
    except ImportError as error:
        raise UnavailableError(f"got no {error.name}; fix: pip install 'fused-grpo[bench]'") from error
    options.output.mkdir(parents=True, exist_ok=True)
    kept = options.output / ".partial.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "result.json"
        arguments = [str(HERE), "--import-mode=importlib", "-q", "-rfE", "-Wignore", f"--benchmark-json={raw}"]
        arguments += [f"--resume={kept}", "--benchmark-columns=median,iqr,rounds"]
        for flag, value in (("--suite", options.suite), ("-k", options.only), ("-m", options.markers)):
            arguments += [flag, value] if value else []
        status = int(pytest.main([*arguments, "--tiny"] if options.tiny else arguments))
        if status == pytest.ExitCode.INTERRUPTED:
            print(f"interrupted; what was measured is kept in {kept}: the same command continues from there")
            return status
        if not raw.exists():
            return status or 1
        result = json.loads(raw.read_text())
    machine = result["machine_info"]
    output = options.output / (machine["name"] + ("-tiny" if machine["tiny"] else ""))
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name_of(options)}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    write(result, path)
    kept.unlink(missing_ok=True)
    return status


def name_of(options: argparse.Namespace) -> str:
    """`2026-11-24`, or `long-2026-11-26` of `-m long`: a part of the tests does not replace the rest of the day's."""
    chosen = re.findall(r"\w+", f"{options.markers or ''} {options.only or ''}")
    return "-".join([*chosen, datetime.date.today().isoformat()])


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="fused-grpo bench", description="Memory and speed beside the peers.")
    in_clone = (HERE / "results").is_dir()
    flags.add_argument(
        "--output",
        type=Path,
        default=HERE / "results" if in_clone else Path("bench-results"),
        metavar="DIR",
        help="folder for <machine>/<date>.json, .md and charts (default: bench-results, in a clone bench/results)",
    )
    flags.add_argument("--suite", choices=("cpu", "gpu"), help="suite to run (default: gpu where there is a GPU)")
    flags.add_argument("--tiny", action="store_true", help="use small sizes, to see that everything runs")
    flags.add_argument("--only", metavar="EXPR", help="run some of the tests, selected like pytest -k")
    flags.add_argument("-m", dest="markers", metavar="MARKERS", help="run the tests of cpu, gpu, trainer or long")
    flags.add_argument("--render", type=Path, metavar="FILE", help="only write tables and charts of FILE again")
    return flags


def write(result: dict[str, Any], path: Path) -> None:
    """Tables and charts beside the result file, and the tables on the terminal."""
    from fused_grpo.bench.report import charts, tables

    text = tables.render(result)
    path.with_suffix(".md").write_text(text)
    charts.write(result, path.with_suffix(""))
    print(text, f"raw figures, tables and charts: {path}, {path.with_suffix('.md').name}, {path.stem}/", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
