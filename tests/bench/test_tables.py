"""Tables show the figures of the file: winners that are not ours, absent implementations, and promises not met."""

import json
import math
from dataclasses import replace

import pytest

from fused_grpo.bench import __main__ as bench
from fused_grpo.bench.report import tables
from fused_grpo.bench.report.results_file import bytes_text, groups_of, headline, number_text, read, seconds_text
from fused_grpo.errors import DataError


def lines_of(text: str, group: str) -> dict[str, list[str]]:
    """Cells of a group's table, by the first of each line."""
    section = text.partition(f"## {group}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in lines}


def test_a_line_has_the_figures_of_its_benchmark(build):
    lines = lines_of(tables.render(build.result()), build.WORK.name)
    assert list(lines)[2:] == ["products alone", "fused-grpo", "full logits", "Liger GRPO", "TRL"]
    assert lines["implementation"][1:] == [
        "time (s)",
        "spread",
        "x products",
        "GFLOP/s",
        "memory (MiB)",
        "largest error",
    ]
    rate = build.WORK.flop / 2.7 / 1e9
    assert lines["TRL"] == ["1.2.3", "2.70", "5%", "2.70", f"{rate:.3g}", "700", "1.1e-05"]


def test_the_floor_is_first_though_something_is_faster(build):
    fast = build.head("fused-grpo, needed", seconds=0.6)
    lines = lines_of(tables.render(build.result([fast, build.head("products alone")])), build.WORK.name)
    assert list(lines)[2:] == ["products alone", "fused-grpo, needed"]
    assert lines["fused-grpo, needed"][3] == "0.60"


def test_a_peer_that_wins_is_bold_and_the_floor_never_is(build):
    quick = build.head("Liger GRPO", seconds=1.05, peak_bytes=100 * 2**20)
    others = [build.head(name) for name in ("products alone", "fused-grpo")]
    lines = lines_of(tables.render(build.result([*others, quick])), build.WORK.name)
    assert lines["Liger GRPO"][1] == "**1.05**"
    assert lines["Liger GRPO"][5] == "**100**"
    assert not [cell for name in ("products alone", "fused-grpo") for cell in lines[name] if "*" in cell]


def test_absent_implementations_stand_below_their_table_with_the_reason(build):
    why = "No package metadata was found for verl; fix: pip install verl"
    absent = [{"group": build.WORK.name, "implementation": "verl", "why": why}]
    smaller = build.head("fused-grpo", replace(build.WORK, tokens=512))
    text = tables.render(build.result([build.head("fused-grpo"), smaller], absent=absent))
    first, second = text.split("\n## ")[1:3]
    assert f"- verl was not measured: {why}" in first
    assert "verl" not in second


def test_a_group_of_which_nothing_could_be_measured_is_not_dropped(build):
    absent = [{"group": "loss, huge", "implementation": "fused-grpo", "why": "out of memory"}]
    assert "## loss, huge\n\n- fused-grpo was not measured: out of memory" in tables.render(build.result(absent=absent))


def test_promises_say_whether_they_were_met(build):
    kept = {"what": "a / b", "group": "g", "value": 1.1234, "bound": "<= 1.2", "met": True}
    broken = {**kept, "what": "c / d", "value": 1.2004, "met": False}
    lines = lines_of(tables.render(build.result(promises=[kept, broken])), "Promises")
    assert lines["a / b"] == ["g", "1.123", "<= 1.2", "met"]
    assert lines["c / d"] == ["g", "1.2", "<= 1.2", "**NOT MET**"]


def test_trainers_have_what_they_differ_in_as_columns_and_the_rest_above(build):
    group, shared = "training phase, dapo", {"vocab": 32000, "completion_lengths": [100, 200], "dtype": "float32"}
    slow = build.other(group, "TRL", 4.0, completion_tokens_per_second=250.0, peak_bytes=2**32, **shared)
    fast = build.other(
        group, "fused-grpo trainer", 0.5, completion_tokens_per_second=2000.0, peak_bytes=2**28, **shared
    )
    text = tables.render(build.result([build.head("fused-grpo"), slow, fast]))
    lines = lines_of(text, group)
    assert lines["fused-grpo trainer"] == ["**0.500**", "5%", "2,000", "**256**"]
    assert lines["TRL"] == ["4.00", "5%", "250", "4,096"]
    assert "vocab 32,000, completion lengths 100 to 200 (mean 150), dtype float32" in text


def test_generation_shows_its_calls(build):
    ways = [build.other("generation", name, 1.0 * n, calls=n) for name, n in (("once", 1), ("by parts", 16))]
    lines = lines_of(tables.render(build.result(ways)), "generation")
    assert lines["by parts"] == ["16.0", "5%", "16"]


def test_the_longest_is_bold_and_others_have_a_reason(build):
    work = build.WORK.described()
    longest = [
        {"work": work, "implementation": "full logits", "tokens": 65536},
        {"work": work, "implementation": "fused-grpo", "tokens": 1048576},
        {"work": work, "implementation": "verl", "absent": "no softcap"},
        {"work": work, "implementation": "TRL", "tokens": 0},
    ]
    lines = lines_of(
        tables.render(build.result(longest=longest)),
        "Most tokens before memory runs out: loss, GPT-2, float32, trainable",
    )
    assert lines["fused-grpo"] == ["**1,048,576**"]
    assert lines["full logits"] == ["65,536"]
    assert lines["verl"] == ["- (no softcap)"]
    assert lines["TRL"] == ["not even the first"]


def test_what_was_not_measured_is_a_dash_and_nan_is_the_largest_error(build):
    nothing = build.head("TRL", errors=None, peak_bytes=None)
    wrong = build.head("Liger GRPO", errors={"value": 1e-3, "d_hidden": math.nan, "d_weight": None})
    lines = lines_of(tables.render(build.result([nothing, wrong])), build.WORK.name)
    assert lines["TRL"][-2:] == ["-", "-"]
    assert lines["Liger GRPO"][-1] == "nan"
    assert lines["TRL"][3] == "-"  # no products alone to be a multiple of


def test_a_bar_in_a_name_does_not_break_the_table(build):
    text = tables.render(build.result([build.head("a|b")]))
    assert "| a\\|b | 1.2.3 |" in text


def test_the_head_says_where_and_when_and_that_a_trial_run_is_one(build):
    result = build.result()
    for part in ("cpu-2-cores (Intel Xeon, 2 CPU cores", "torch 2.13.0", "`abcdef0`", "2026-11-21", "5 rounds"):
        assert part in tables.render(result)
    assert "--tiny" not in tables.render(result)
    result["machine_info"]["tiny"] = True
    assert "nothing about speed or memory" in tables.render(result)


def test_sources_with_changes_are_not_passed_off_as_a_commit(build):
    dirty = build.result(commit_info={"id": "abcdef0123456789", "dirty": True})
    assert "`abcdef0 with changes`" in tables.render(dirty)


def test_the_headline_is_the_largest_ordinary_loss_with_all_gradients(build):
    works = [replace(build.WORK, tokens=n) for n in (512, 4096)]
    works += [replace(build.WORK, tokens=8192, idle=0.5), replace(build.WORK, tokens=8192, gradients="frozen")]
    works += [replace(build.WORK, tokens=8192, kind="logprobs")]
    works += [replace(build.WORK, tokens=8192, **{name: 20}) for name in ("kept", "centred", "several")]
    result = build.result([build.head("fused-grpo", work) for work in works])
    assert headline(result).name == works[1].name
    assert headline(result, kind="logprobs").name == works[4].name
    assert headline(result, name="frozen").name == works[3].name
    with pytest.raises(DataError, match="'missing' in its name, want one of: loss, GPT-2, N=512"):
        headline(result, name="missing")


def test_gradients_alone_are_those_that_were_asked_for(build):
    sizes = {}
    for gradients in ("no_grad", "frozen", "trainable"):
        work = replace(build.WORK, gradients=gradients, dtype="bfloat16")
        (group,) = groups_of(build.result([build.head("fused-grpo", work)])).values()
        sizes[gradients] = group.gradient_bytes
    assert sizes == {"no_grad": 0, "frozen": 2048 * 768 * 2, "trainable": (2048 + 50304) * 768 * 2}


def test_quantities_have_three_digits():
    assert [seconds_text(x) for x in (12.345, 0.9999, 0.0184, 2.5e-5)] == ["12.3 s", "1.00 s", "18.4 ms", "25.0 µs"]
    assert [bytes_text(x) for x in (2**30, 2**30 - 1, 1536, 87e6)] == ["1.00 GiB", "1.00 GiB", "1.50 KiB", "83.0 MiB"]
    assert [number_text(x) for x in (151936.4, 9.996, 0.0, 7)] == ["151,936", "10.0", "0", "7"]


def test_the_command_writes_tables_and_charts_of_a_file_again(build, saved, capsys):
    path = saved(build.result())
    assert bench.main(["--render", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == tables.render(read(path))
    assert tables.render(read(path)) in capsys.readouterr().out
    assert (path.with_suffix("") / "time.svg").exists()


def test_a_file_with_the_keys_of_before_is_read_like_one_of_today(build, saved):
    text = json.dumps(build.result(absent=[{"group": "g", "implementation": "verl", "why": "not installed"}]))
    old = json.loads(text.replace('"implementation"', '"contender"').replace('"gradients"', '"direction"'))
    assert read(saved(old)) == json.loads(text)


@pytest.mark.parametrize("content", ["", "[]", '{"benchmarks": []}', '{"benchmarks": [{"extra_info": {"gemms": 3}}]}'])
def test_a_file_of_something_else_is_refused(content, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(DataError, match="want a result file of the benchmarks"):
        read(path)


def test_a_missing_file_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(DataError, match=r"got no file at .*fix: fused-grpo bench"):
        read(tmp_path / "none.json")
