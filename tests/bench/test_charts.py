"""Charts show what the file says, all of it legible, and come out the same twice."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.colors import to_hex

from fused_grpo.bench import charts, drawing
from fused_grpo.bench.results_file import headline

LIGHT = drawing.THEMES[""]
PEERS = ("CCE", "CCE, exact", "torch core", "verl", "quack", "Liger FSLCE")


@pytest.fixture
def full(build):
    """Eleven contenders over three lengths and two models; one of them cannot do the middle length."""
    works = [replace(build.WORK, tokens=tokens) for tokens in (512, 1024, 2048)]
    works += [replace(build.WORK, head="Qwen3-0.6B")]
    benchmarks = [build.head(name, work) for work in works for name in build.SECONDS]
    for number, name in enumerate(PEERS):
        errors = {"value": 1e-6 * 1.3**number}
        benchmarks += [build.head(name, work, seconds=1.4 + 0.03 * number, errors=errors) for work in works]
    gone = works[1].name
    return build.result([b for b in benchmarks if (b["group"], b["extra_info"]["contender"]) != (gone, "verl")])


def drawn(result, name, group=None):
    """A light chart, as matplotlib has it."""
    with rc_context(drawing.RC):
        return dict(charts.figures(result, headline(result, name=group), LIGHT))[name]


def words_of(figure):
    """Texts that are seen, with the boxes they take, in pixels."""
    figure.canvas.draw()
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]


def test_files_are_every_chart_in_two_variants_and_the_same_byte_for_byte(full, tmp_path, monkeypatch):
    names = ("time", "memory", "front", "scaling-tokens", "scaling-heads")
    expected = {f"{name}{dark}.{kind}" for name in names for dark in ("", "-dark") for kind in ("svg", "png")}
    once = charts.write(full, tmp_path / "once")
    assert {path.name for path in once} == expected == {path.name for path in (tmp_path / "once").iterdir()}
    monkeypatch.setattr(charts.drawing, "THEMES", {"": charts.drawing.THEMES[""]})
    for path in charts.write(full, tmp_path / "twice"):
        assert path.read_bytes() == (tmp_path / "once" / path.name).read_bytes()
    assert (tmp_path / "once/time.svg").read_bytes() != (tmp_path / "once/time-dark.svg").read_bytes()
    root = ElementTree.parse(tmp_path / "once/time.svg").getroot()
    texts = {"".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Liger GRPO", "1.90 s", "1.90×", "products alone 1.00 s, 1×"} <= texts
    caption = next(text for text in texts if "abcdef0" in text)
    assert all(part in caption for part in ("Intel Xeon", "torch 2.13.0", "5 rounds", "2026-11-21"))


def test_bars_are_as_long_as_times_and_the_floor_is_where_it_is(full):
    (axes,) = drawn(full, "time").axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == sorted(row.median for row in headline(full).contenders)
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] == 0
    floor = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [set(line.get_xdata()) for line in floor] == [{1.0}]


def test_only_ours_is_in_colour_though_a_peer_be_faster(build):
    fast = build.head("Liger GRPO", seconds=1.01)
    (axes,) = drawn(build.result([build.head("fused-grpo"), fast, build.head("TRL")]), "time").axes
    assert [to_hex(bar.get_facecolor()) == LIGHT.line for bar in axes.patches] == [False, True, False]


def test_memory_is_sorted_by_memory_beside_the_gradients_alone(full):
    (axes,) = drawn(full, "memory", group="GPT-2, N=2048").axes
    names = [text.get_text() for text in axes.texts]
    assert names[0] == "fused-grpo"
    gradients = (2048 + 50304) * 768 * 4
    assert [set(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "--"] == [{gradients}]
    assert f"gradients alone {gradients / 2**20:.0f} MiB, 1×" in names


def test_an_axis_is_logarithmic_only_where_bars_would_show_nothing(build):
    work = replace(build.WORK, direction="no_grad")
    small, large = build.head("fused-grpo", work, peak_bytes=10_000), build.head("TRL", work, peak_bytes=10**9)
    figure = drawn(build.result([small, large]), "memory")
    assert figure.axes[0].get_xscale() == "log"
    assert not figure.axes[0].patches  # a bar on such an axis has a length that means nothing
    assert any("logarithmic" in text for text, _ in words_of(figure))


def test_the_area_of_a_point_is_its_memory(build):
    sizes = {"fused-grpo": 100, "TRL": 400, "full logits": 1600}
    result = build.result([build.head(name, peak_bytes=size * 2**20) for name, size in sizes.items()])
    (axes,) = drawn(result, "front").axes
    areas = [collection.get_sizes()[0] for collection in axes.collections]
    assert areas == pytest.approx([areas[0], areas[0] / 4, areas[0] / 16])
    x, y = axes.collections[-1].get_offsets()[0]
    assert (x, y) == pytest.approx((1.1, 4e-7))


@pytest.mark.parametrize("name", ["time", "memory", "front", "scaling-tokens", "scaling-heads"])
def test_no_words_run_into_each_other_or_off_the_page(full, name):
    figure = drawn(full, name)
    words = words_of(figure)
    for text, box in words:
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= 0, text
    for (one, box), (other, another) in itertools.combinations(words, 2):
        width = min(box.x1, another.x1) - max(box.x0, another.x0)
        height = min(box.y1, another.y1) - max(box.y0, another.y0)
        assert width <= 1 or height <= 2, (one, other)


def test_the_longest_names_leave_room_too(build):
    work = replace(build.WORK, idle=0.5, uneven=True, entropy=0.3)
    names = [*build.SECONDS, "full logits, compiled and more"]
    result = build.result([build.head(name, work, version="2.13.0+cpu") for name in names])
    for name in ("time", "memory", "front"):
        test_no_words_run_into_each_other_or_off_the_page(result, name)


def test_names_in_a_crowd_neither_meet_nor_cross_the_floor(build):
    crowd = {name: 1.02 + 0.02 * number for number, name in enumerate(PEERS)}
    benchmarks = [build.head(name, seconds=seconds, errors={"value": 1e-6}) for name, seconds in crowd.items()]
    result = build.result([*benchmarks, build.head("products alone"), build.head("TRL")])
    test_no_words_run_into_each_other_or_off_the_page(result, "front")
    figure = drawn(result, "front")
    floor = figure.axes[0].transData.transform((1.0, 1.0))[0]
    assert not [text for text, box in words_of(figure) if text in crowd and box.x0 < floor < box.x1]


def test_a_curve_has_a_gap_where_there_is_no_figure(full):
    time = drawn(full, "scaling-tokens").axes[0]
    gaps = [np.isnan(line.get_ydata()).tolist() for line in time.lines]
    assert gaps.count([False, True, False]) == 1
    assert gaps.count([False, False, False]) == len(gaps) - 1


def test_times_over_tokens_are_multiples_of_the_products(full):
    time, memory = drawn(full, "scaling-tokens").axes
    ours = [line for line in time.lines if line.get_color() == LIGHT.line]
    assert [line.get_ydata().tolist() for line in ours] == [pytest.approx([1.1, 1.1, 1.1])]
    assert [line.get_xdata().tolist() for line in ours] == [[512, 1024, 2048]]
    assert max(line.get_ydata()[-1] for line in memory.lines) == 1200 * 2**20


def test_models_go_by_the_size_of_their_heads(full):
    labels = [label.get_text().partition("\n")[0] for label in drawn(full, "scaling-heads").axes[0].get_xticklabels()]
    assert labels == ["GPT-2", "Qwen3-0.6B"]


def test_what_the_file_does_not_have_is_not_drawn(build):
    bare = build.result([build.head(name, peak_bytes=None) for name in build.SECONDS])
    assert [name for name, _ in charts.figures(bare, headline(bare), LIGHT)] == ["time"]


def test_names_at_the_ends_of_curves_are_apart_and_in_order():
    wanted = [1.0, 2.0, 40.0, 41.0, 42.0, 98.0, 99.0]
    heights = drawing.apart(wanted, 8.0, (0.0, 100.0))
    assert heights == pytest.approx([0.0, 8.0, 33.0, 41.0, 49.0, 92.0, 100.0])


def test_the_command_writes_the_group_that_is_asked_for(build, saved, tmp_path, capsys):
    frozen = replace(build.WORK, direction="frozen")
    path = saved(build.result([build.head(name, work) for work in (build.WORK, frozen) for name in build.SECONDS]))
    assert charts.main([str(path), "--output", str(tmp_path / "a"), "--group", "frozen"]) == 0
    assert "loss and dH" in (tmp_path / "a" / "time.svg").read_text()
    assert str(tmp_path / "a" / "time.svg") in capsys.readouterr().out
    assert charts.main([str(path), "--output", str(tmp_path / "b"), "--group", "nothing"]) == 2
    assert "got no group" in capsys.readouterr().err
