"""`python -m fused_grpo.bench`: run the suite of this machine, and make tables and charts of what comes out.

    --output DIR   where <machine>/<date>.json, .md and charts go (default: bench-results, in a clone bench/results)
    --suite gpu    of a GPU; where there is none, with --tiny
    --tiny         small sizes, to see that everything runs
    --only EXPR    some of the tests, as pytest -k has it; -m MARKERS as pytest has it

A run that was interrupted goes on where it stopped if it is started again with the same code. Ends with pytest's
status: 1 where a promise was not met, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fused_grpo.errors import UnavailableError

HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and write; pytest's exit status."""
    parser = argparse.ArgumentParser(prog="fused-grpo bench", description="Memory and speed beside the peers.")
    in_clone = (HERE / "results").is_dir()
    parser.add_argument("--output", type=Path, default=HERE / "results" if in_clone else Path("bench-results"))
    parser.add_argument("--suite", choices=("cpu", "gpu"), help="default: gpu where there is one")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--only", metavar="EXPR", help="some of the tests, as pytest -k has it")
    parser.add_argument("-m", dest="markers", metavar="MARKERS", help="cpu, gpu or trainer, as pytest -m has it")
    options = parser.parse_args(argv)
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
            print(f"interrupted; what was measured is kept in {kept}: the same command goes on from there")
            return status
        if not raw.exists():
            return status or 1
        result = json.loads(raw.read_text())
    write(result, options.output)
    kept.unlink(missing_ok=True)  # it has served its purpose
    return status


def write(result: dict, output: Path) -> None:  # type: ignore[type-arg]
    """The raw file, its tables and its charts."""
    from fused_grpo.bench import charts, tables

    machine = result["machine_info"]
    folder = output / (machine["name"] + ("-tiny" if machine["tiny"] else ""))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    text = tables.render(result)
    path.with_suffix(".md").write_text(text)
    charts.write(result, folder / path.stem)
    print(text, f"raw figures, tables and charts: {path}, {path.with_suffix('.md').name}, {path.stem}/", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
