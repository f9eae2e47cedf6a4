"""docs/gpu.md and its charts, from a small results.jsonl."""

import json

import pytest

from fused_grpo.bench.gpu import page
from fused_grpo.bench.gpu.clock import figure_of
from fused_grpo.bench.gpu.peers import shape_of
from fused_grpo.bench.gpu.scale import FULL
from fused_grpo.bench.pages import figures
from fused_grpo.bench.report.gpu_results import SECTIONS, read_lines
from fused_grpo.bench.report.results_file import groups_of, read
from fused_grpo.errors import DataError

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

FACTS = {"gpu": "NVIDIA H200", "memory": 140 * 2**30, "torch": "2.11.0", "trl": "1.16.0", "date": "2026-11-26"}
MS = {"products alone": 40.0, "fused-grpo": 50.0, "TRL": 45.0, "full logits": 90.0}
GIB = {"fused-grpo": 4.0, "TRL": 6.0, "full logits": 20.0}
WORK = FULL.work("loss", "trainable", "Qwen3-8B", 8192)


def line(stage: str, figure: str, value: float | None = None, unit: str = "", **more) -> dict:
    return {"stage": stage, "figure": figure, "value": value, "unit": unit, "commit": "abc1234", "tiny": False, **more}


def lines() -> list[dict]:
    shape = figure_of("", None, "", None, **shape_of(WORK)).shape
    results = [line("machine", "machine", facts=FACTS)]
    results += [line("device", "tests", 12, "passed", note="== 1 failed, 12 passed, 3 skipped in 4.00s ==")]
    results += [line("device", "failed", note="FAILED tests/x.py::test_y[a|b] - assert 1")]
    results += [line("sanitizer", "memcheck", 0, "errors", note="status 0")]
    for name, ms in MS.items():
        results += [line("peers", f"{name}: loss, trainable", 1.0, "ms", shape=shape)]  # of an earlier run
        results += [line("peers", f"{name}: loss, trainable", ms, "ms", shape=shape, rounds=[ms, ms - 1, ms + 3])]
        results += (
            [line("peers", f"{name}: loss, trainable: peak", GIB[name], "GiB", shape=shape)] if name in GIB else []
        )
    results += [line("peers", "CCE: loss, trainable", None, "ms", shape=shape, note="absent: is not installed")]
    results += [line("peers", "TRL / fused-grpo: loss, trainable", 0.9, "x", shape=shape, promised=">= 1.25")]
    sizes = {"model": "Qwen3-0.6B", "completions": 8, "longest": 8192}
    for name, seconds in {"fused-grpo trainer": 2.0, "TRL": 5.0}.items():
        results += [line("phase", f"a step: {name}", seconds, "s", shape=sizes, rounds=[seconds, seconds])]
        results += [line("phase", f"training phase: {name}", 1e4 / seconds, "tokens/s", shape=sizes)]
        results += [line("phase", f"training phase: {name}, peak", seconds, "GiB", shape=sizes)]
    results += [line("passes", "scale_", 3000.0, "GB/s", predicted=4300.0, shape={"R": 4096})]
    return [*results, line("ceilings", "copy", 4200.0, "GB/s", predicted=4300.0)]


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results" / "h200" / "2026-11-26.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    return path


def test_the_page_has_what_was_found_and_where_from(results, tmp_path):
    made, beside = tmp_path / "gpu.md", tmp_path / "measured.md"
    page.main([str(results), "--page", str(made), "--beside", str(beside)])
    text, predicted = made.read_text(), beside.read_text()
    assert "NVIDIA H200 (140 GiB" in text
    assert "trl 1.16.0; commit `abc1234`." in text
    assert "| `device` | 12 | 1 | 0 | 3 |" in text
    assert "- FAILED tests/x.py::test_y[a\\|b] - assert 1" in text
    assert "`compute-sanitizer --tool memcheck`: 0 errors" in text
    assert "| TRL / fused-grpo: loss, trainable | N=8,192, D=4,096 | 0.9 | >= 1.25 | **NOT MET** |" in text
    assert "| scale_ | R=4,096 | GB/s | 3,000 | 4,300 | **0.70** |" in predicted
    assert "| copy |  | GB/s | 4,200 | 4,300 | 0.98 |" in predicted
    assert text.count("Raw file: [2026-11-26.jsonl](results/h200/2026-11-26.jsonl).") == 5
    charts = {file.name for file in results.with_suffix("").iterdir()}
    assert charts == {"time.svg", "memory.svg", "overview.svg"}
    drawn = (results.with_suffix("") / "overview.svg").read_text()
    assert all(f">{text}<" in drawn for text in ("TRL 1.16.0", "45.0 ms  1.12×", "4.00 GiB  3.27×"))
    assert "NVIDIA H200" in drawn


def test_a_test_that_passes_in_a_later_run_is_no_failure():
    one, other = (line("gpu", "failed", note=f"FAILED tests/gpu/x.py::test_{name}") for name in "ab")
    counts = [line("gpu", "tests", n, "passed", note=f"{n} passed, {2 - n} failed") for n in range(3)]
    device = line("device", "failed", note="FAILED tests/y.py::test_c")
    text = SECTIONS["correctness"]([device, one, other, counts[0], other, counts[1]])
    assert [place for place in text.splitlines() if place.startswith("- ")] == [
        "- FAILED tests/y.py::test_c",
        "- FAILED tests/gpu/x.py::test_b",
    ]
    assert "FAILED tests/gpu" not in SECTIONS["correctness"]([device, one, other, counts[0], other, *counts[1:]])


def test_peers_are_sorted_by_time_with_the_best_in_bold(results):
    text = figures("gpu", "peers", results)
    rows = [row.split(" | ")[:4] for row in text.splitlines() if row.startswith("| ")][2:]
    assert [row[0].strip("| ") for row in rows] == ["products alone", "TRL 1.16.0", "fused-grpo", "full logits 2.11.0"]
    assert [row[1] for row in rows] == ["40.0", "**45.0**", "50.0", "90.0"]
    assert [row[2] for row in rows] == ["1.00", "1.12", "1.25", "2.25"]
    assert [row[3] for row in rows] == ["-", "6,144", "**4,096**", "20,480"]
    assert text.endswith("- CCE was not measured: is not installed")


def test_whole_trainers_are_beside_each_other(results):
    text = figures("gpu", "training", results)
    assert "training phase, model=Qwen3-0.6B, completions=8, longest=8,192:" in text
    assert "| fused-grpo trainer | **2.00** | 0% | 5,000 | **2,048** |" in text


def test_a_group_has_the_rounds_and_the_work_that_was_measured(results):
    (group, *_) = groups_of(read(results)).values()
    assert group.name == WORK.name
    ours = next(row for row in group.rows if row.ours)
    assert ours.work == WORK.described()
    assert ours.seconds == pytest.approx((0.050, 0.049, 0.053))


def test_a_page_keeps_its_words_and_gets_the_figures_of_the_new_file(results, tmp_path):
    made, later = tmp_path / "gpu.md", results.with_name("2026-11-27.jsonl")
    beside = ["--beside", str(tmp_path / "measured.md")]
    page.main([str(results), "--page", str(made), *beside])
    made.write_text(made.read_text().replace("## Correctness", "## Correctness\n\nOur words."))
    later.write_text(results.read_text().replace("12 passed", "13 passed"))
    page.main([str(later), "--page", str(made), *beside])
    assert "Our words." in made.read_text()
    assert "| `device` | 13 | 1 | 0 | 3 |" in made.read_text()
    assert "2026-11-26.jsonl" not in made.read_text()


def test_what_was_not_measured_is_said(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(lines()[0]) + "\n")
    for section in ("promises", "peers", "training"):
        assert figures("gpu", section, path) == "Not measured yet."
    assert SECTIONS["predictions"](read_lines(path)).startswith("0 of 0 figures")


@pytest.mark.parametrize("text", ["no json\n", '{"figure": "x"}\n', ""])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"want a results\.jsonl of scripts/gpu_first\.py"):
        figures("gpu", "machine", path)


def test_another_section_is_refused(results):
    with pytest.raises(DataError, match="got the section 'weather' of a GPU, want machine, correctness, predictions"):
        figures("gpu", "weather", results)
