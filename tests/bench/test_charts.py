"""Charts show the figures of the file, and are equal byte for byte when they are made twice."""

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fused_grpo.bench.heads.work import Kind
from fused_grpo.bench.report import charts
from fused_grpo.bench.report.results_file import headline
from fused_grpo.errors import UnavailableError


@pytest.fixture
def full(build):
    """All implementations over three lengths and two models; one of them was not measured at the middle length."""
    works = [replace(build.WORK, tokens=tokens) for tokens in (512, 1024, 2048)]
    works += [replace(build.WORK, head="Qwen3-0.6B")]
    benchmarks = [build.head(name, work) for work in works for name in build.SECONDS]
    gone = (works[1].name, "TRL")
    return build.result([b for b in benchmarks if (b["group"], b["extra_info"]["implementation"]) != gone])


def drawn(result, name):
    return dict(charts.figures(result, headline(result)))[name]


def test_every_chart_is_one_svg_and_the_same_byte_for_byte(full, tmp_path):
    once, twice = (charts.write(full, tmp_path / folder) for folder in ("once", "twice"))
    assert [path.stem for path in once] == ["time", "memory", "overview", "pareto", "scaling-tokens", "scaling-heads"]
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in twice]
    root = ElementTree.parse(tmp_path / "once" / "time.svg").getroot()
    texts = {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Liger GRPO 1.2.3", "1.90 s  1.90×", "products alone 1.00 s"} <= texts
    caption = next(text for text in texts if "abcdef0" in text)
    assert all(part in caption for part in ("Intel Xeon", "torch 2.13.0", "5 rounds", "2026-11-21"))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_file_of_any_kind_of_work_alone_has_charts(build, kind):
    """As `fused-grpo bench --only divergence` makes one."""
    works = [replace(build.WORK, kind=kind, tokens=tokens, several=2, centred=4) for tokens in (512, 1024)]
    result = build.result([build.head(name, work) for work in works for name in build.SECONDS])
    assert drawn(result, "time").get_suptitle().endswith("fp32, 2 targets per token, 4 tokens centred per row")
    assert {"overview", "pareto", "scaling-tokens"} <= dict(charts.figures(result, headline(result))).keys()


def test_bars_are_as_long_as_times_and_the_floor_is_a_line(full):
    (axes,) = drawn(full, "time").axes
    assert [bar.get_width() for bar in axes.patches] == [row.median for row in headline(full).implementations]
    assert [line.get_xdata()[0] for line in axes.lines] == [1.0]


def test_only_ours_has_the_colour_of_ours_though_a_peer_is_faster(build):
    fast = build.head("Liger GRPO", seconds=1.01)
    (axes,) = drawn(build.result([build.head("fused-grpo"), fast, build.head("TRL")]), "time").axes
    assert [to_hex(bar.get_facecolor()) == charts.OURS for bar in axes.patches] == [False, True, False]


def test_memory_is_sorted_by_memory_beside_the_gradients_alone(full):
    (axes,) = drawn(full, "memory").axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == sorted(widths)
    assert [line.get_xdata()[0] for line in axes.lines] == [headline(full).gradient_bytes]


def test_the_area_of_a_point_is_its_memory(build):
    sizes = {"fused-grpo": 100, "TRL": 400, "full logits": 1600}
    result = build.result([build.head(name, peak_bytes=size * 2**20) for name, size in sizes.items()])
    (axes,) = drawn(result, "pareto").axes
    areas = {tuple(point.get_offsets()[0]): point.get_sizes()[0] for point in axes.collections}
    assert sorted(areas.values()) == pytest.approx([charts.LARGEST_POINT / 16, charts.LARGEST_POINT / 4, 1200.0])
    assert areas[(1.1, 4e-7)] == min(areas.values())


def test_a_curve_has_gaps_and_its_times_are_multiples_of_the_products(full):
    time, memory = drawn(full, "scaling-tokens").axes
    lines = {line.get_label(): line for line in time.lines}
    assert np.isnan(lines["TRL"].get_ydata()).tolist() == [False, True, False]
    assert lines["fused-grpo"].get_ydata() == pytest.approx([1.1, 1.1, 1.1])
    assert lines["fused-grpo"].get_xdata().tolist() == [512, 1024, 2048]
    assert max(line.get_ydata()[-1] for line in memory.lines) == 1200
    labels = [label.get_text() for label in drawn(full, "scaling-heads").axes[0].get_xticklabels()]
    assert labels == ["GPT-2", "Qwen3-0.6B"]


def test_figures_that_the_file_does_not_have_are_not_drawn(build, tmp_path):
    bare = build.result([build.head(name, peak_bytes=None) for name in build.SECONDS])
    assert [name for name, _ in charts.figures(bare, headline(bare))] == ["time"]
    assert charts.write(build.result([build.other("training phase", "TRL", 1.0)]), tmp_path) == []


def test_without_matplotlib_the_error_has_the_command_that_installs_it(full, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnavailableError, match=r"fix: pip install 'fused-grpo\[bench\]'"):
        charts.write(full, tmp_path)
