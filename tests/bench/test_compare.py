"""A regression of ours is seen through noise and through a slow machine; neither of them is taken for one."""

import pytest

from fused_grpo.bench import compare
from fused_grpo.bench.compare import Thresholds

SHAKEN = (1.04, 0.97, 1.05, 1.01, 0.99)


@pytest.fixture
def verdicts(build):
    """What fails, as {implementation: what is worse}, from `result` to one of these benchmarks."""

    def run(*benchmarks, old=None, **thresholds):
        before = build.result(old)
        changes = compare.compare(before, build.result(list(benchmarks)), Thresholds(**thresholds))
        return {change.row.implementation: change.worse for change in changes if change.fails}

    return run


@pytest.fixture
def everyone(build):
    """All benchmarks of the default file, with one of them replaced."""

    def make(**replaced):
        names = {name.replace(" ", "_").replace("-", "_"): name for name in build.SECONDS}
        return [build.head(name, **replaced.get(key, {})) for key, name in names.items()]

    return make


def test_the_same_file_is_no_change(verdicts, everyone):
    assert verdicts(*everyone()) == {}


def test_a_slower_implementation_is_flagged(verdicts, everyone):
    assert verdicts(*everyone(fused_grpo={"seconds": 1.15 * 1.1})) == {"fused-grpo": ("15% slower",)}


def test_growth_within_the_threshold_is_not_flagged(verdicts, everyone):
    assert verdicts(*everyone(fused_grpo={"seconds": 1.08 * 1.1})) == {}
    slower = everyone(fused_grpo={"seconds": 1.15 * 1.1})
    assert verdicts(*slower, time=0.2) == {}
    assert verdicts(*everyone(fused_grpo={"seconds": 1.06 * 1.1}), time=0.05) == {"fused-grpo": ("6% slower",)}


def test_noise_is_not(verdicts, everyone):
    """The median is a fifth off, but two of five rounds were as fast as ever."""
    before = everyone(fused_grpo={"rounds": SHAKEN})
    noisy = everyone(fused_grpo={"rounds": (1.19, 1.0, 1.25, 1.02, 1.19)})
    assert verdicts(*noisy, old=before) == {}
    slower = everyone(fused_grpo={"seconds": 1.15 * 1.1, "rounds": SHAKEN})
    assert verdicts(*slower, old=before) == {"fused-grpo": ("15% slower",)}


@pytest.mark.parametrize(("old", "new"), [((1.0, 0.98, 1.01, 3.0, 0.99), None), (None, (1.0, 0.8, 1.01, 1.03, 0.99))])
def test_one_disturbed_round_of_either_file_hides_nothing(verdicts, everyone, build, old, new):
    before = everyone(fused_grpo={"rounds": old or build.ROUNDS})
    slower = everyone(fused_grpo={"seconds": 1.15 * 1.1, "rounds": new or build.ROUNDS})
    assert list(verdicts(*slower, old=before)) == ["fused-grpo"]


def test_a_slow_machine_is_no_regression(verdicts, build):
    """Everyone takes a third longer, the products alone, too."""
    slow = [build.head(name, seconds=1.33 * seconds) for name, seconds in build.SECONDS.items()]
    assert verdicts(*slow) == {}


def test_a_machine_that_got_faster_hides_no_regression(verdicts, build):
    fast = {name: 0.7 * seconds for name, seconds in build.SECONDS.items()} | {"fused-grpo": 1.1}
    worse = verdicts(*[build.head(name, seconds=seconds) for name, seconds in fast.items()])
    assert worse == {"fused-grpo": ("43% slower",)}


def test_a_round_is_compared_with_the_products_of_the_same_round(verdicts, build):
    """A disturbed machine disturbs both; without the products the spread of the rounds would hide the change."""
    shaken = {"rounds": (1.0, 2.0, 1.0, 2.0, 1.5)}
    old = [build.head(name, **shaken) for name in ("products alone", "fused-grpo")]
    new = [build.head("products alone", **shaken), build.head("fused-grpo", seconds=1.15 * 1.1, **shaken)]
    assert verdicts(*new, old=old) == {"fused-grpo": ("15% slower",)}


def test_without_the_products_seconds_are_compared(verdicts, build):
    old = [build.other("training phase", "fused-grpo trainer", 1.0)]
    assert verdicts(build.other("training phase", "fused-grpo trainer", 1.05), old=old) == {}
    slower = build.other("training phase", "fused-grpo trainer", 1.2)
    assert verdicts(slower, old=old) == {"fused-grpo trainer": ("20% slower",)}


def test_two_percent_more_memory_is_flagged_and_half_a_percent_is_not(verdicts, everyone):
    worse = verdicts(*everyone(fused_grpo={"peak_bytes": 255 * 2**20}))
    assert worse == {"fused-grpo": ("5.00 MiB more memory",)}
    assert verdicts(*everyone(fused_grpo={"peak_bytes": 251 * 2**20})) == {}
    assert verdicts(*everyone(fused_grpo={"peak_bytes": 255 * 2**20}), memory=0.05) == {}
    assert list(verdicts(*everyone(fused_grpo={"peak_bytes": None}))) == ["fused-grpo"]


@pytest.mark.parametrize("d_hidden", [9e-7, float("nan"), None])
def test_an_error_that_grew_or_is_gone_is_flagged(verdicts, everyone, d_hidden):
    errors = {"value": 1e-7, "d_hidden": d_hidden, "d_weight": 2e-7}
    assert list(verdicts(*everyone(fused_grpo={"errors": errors}))) == ["fused-grpo"]


def test_an_error_below_a_rounding_is_luck(verdicts, everyone):
    old = everyone(fused_grpo={"errors": {"value": 1e-9}})
    assert verdicts(*everyone(fused_grpo={"errors": {"value": 1e-7}}), old=old) == {}
    assert "fused-grpo" in verdicts(*everyone(fused_grpo={"errors": {"value": 1e-6}}), old=old)


def test_what_vanished_is_flagged_with_the_reason(build, everyone):
    without = [b for b in everyone() if b["extra_info"]["implementation"] != "fused-grpo"]
    absent = [{"group": build.WORK.name, "implementation": "fused-grpo", "why": "out of memory"}]
    changes = compare.compare(build.result(), build.result(without, absent=absent), Thresholds())
    assert [change.worse for change in changes if change.fails] == [("gone: out of memory",)]


def test_products_that_vanished_are_flagged(verdicts, everyone):
    assert verdicts(*everyone()[1:]) == {"products alone": ("gone",)}


def test_what_is_new_is_shown_and_fails_nothing(build, everyone):
    more = build.result([*everyone(), build.head("fused-grpo, needed")])
    changes = compare.compare(build.result(), more, Thresholds())
    assert not [change for change in changes if change.fails]
    assert compare.verdict_of(changes[-1]) == "new"


def test_peers_are_shown_and_fail_nothing(build, everyone, saved, capsys):
    changed = everyone(TRL={"seconds": 9.9, "peak_bytes": 2**33, "errors": {"value": 1.0}})
    new = saved(build.result([b for b in changed if b["extra_info"]["implementation"] != "full logits"]), "new.json")
    assert compare.main([str(saved(build.result(), "old.json")), str(new)]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("| TRL"))
    assert "2.70 s | 9.90 s | +266.7% x products | 700 MiB | 8.00 GiB |" in line
    assert "| full logits | 1.50 s | - |" in shown
    assert shown.endswith("Nothing of ours is worse.\n")


def test_the_command_fails_on_a_regression_and_names_it(build, everyone, saved, capsys):
    new = saved(build.result(everyone(fused_grpo={"seconds": 1.15 * 1.1})), "new.json")
    assert compare.main([str(saved(build.result(), "old.json")), str(new)]) == 1
    shown = capsys.readouterr().out
    assert "**WORSE**: 15% slower" in shown
    assert f"1 of ours worse:\n\n- fused-grpo, {build.WORK.name}: 15% slower" in shown
    assert compare.main([str(saved(build.result(), "old.json")), str(new), "--time", "0.2"]) == 0


@pytest.mark.parametrize("field", ["name", "device", "threads", "torch"])
def test_another_machine_is_refused_unless_allowed(build, saved, capsys, field):
    other = build.result()
    machine = other["machine_info"]
    (machine["versions"] if field == "torch" else machine)[field] = "another"
    arguments = [str(saved(build.result(), "old.json")), str(saved(other, "new.json"))]
    assert compare.main(arguments) == 2
    error = capsys.readouterr().err
    assert "'another'" in error
    assert "fix: measure both on one machine, or --allow-other-machine" in error
    assert compare.main([*arguments, "--allow-other-machine"]) == 0
