"""The report: one file that needs nothing, shows the right numbers, and cannot be written into by a completion."""

import json
import math
import os
import random
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.common.formatting import duration, short_number
from fused_grpo.trainer.logging.report import (
    PHASE,
    REWARD_FUNCTION,
    Chart,
    columns,
    first_and_last_rows,
    function_chart,
    moving_mean,
    named_series,
    panel_charts,
    phase_chart,
    pick_samples,
    render,
    reward_chart,
    series,
    write_report,
)
from fused_grpo.trainer.logging.run_log import RunLog, metric, read_metrics

HOSTILE = "<script>alert(1)</script>[bold]</pre><img src=http://x onerror=alert(2)>\x1b[31m"
VOID = {"meta"}


def step_record(step: int, total: int, rng: random.Random) -> dict[str, float | int | str]:
    """One step of a run that learns on a logistic curve."""
    learned = 1 / (1 + math.exp(-(step - total / 4) / (total / 12 + 1)))
    times = {"generate": 2 + rng.random(), "reward": 0.02, "train": 1.3 + rng.random(), "sync": 0.2}
    return {
        "step": step,
        "reward": 0.1 + 0.8 * learned + rng.gauss(0, 0.03),
        "reward_std": 0.05 + learned * (1 - learned),
        "completions/mean_length": 40 + 120 * learned,
        "clip_ratio/region_mean": 0.012 + abs(rng.gauss(0, 0.004)),
        "entropy": 0.3 + 2 * math.exp(-step / 60),
        "grad_norm": 0.4 + rng.random() / 3,
        "completion_tokens": 64 * (40 + 120 * learned),
        "step_time": sum(times.values()),
        **{f"time/{name}": seconds for name, seconds in times.items()},
    }


def write_run(directory: Path, steps: int, *, completion: str = "19") -> Path:
    """The files of a run that looks real."""
    rng, log = random.Random(0), RunLog(directory)
    log.log_config(
        {"learning_rate": 1.2345e-6, "note": completion}, task=f"sums {completion}", model="tiny", engine="vllm"
    )
    log.log_metrics({"step": 0, "eval/reward": 0.125})
    for step in range(1, steps + 1):
        log.log_metrics(step_record(step, steps, rng))
        row = {"prompt": f"12 + 7? {completion}", "completion": completion, "advantage": 0.5, "finish_reason": "stop"}
        log.log_rollouts(step, [row | {"reward": i / 8, "rewards": {completion: 1.0}} for i in range(8)])
    log.log_metrics({"step": steps, "eval/reward": 0.875})
    return directory


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open_tags: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.shown = ""
        self.feed(text)
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self.open_tags += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data


def test_hostile_text_is_shown_and_never_becomes_markup(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, 2, completion=HOSTILE)).read_text()
    page = Page(text)
    assert "<script" not in text
    assert HOSTILE.replace("\x1b", "\\x1b") in page.shown
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    harmless = (
        "html head meta title style body header h1 h2 h3 p dl dt dd details summary section table tr th td div pre"
    )
    harmless += " article span footer svg g line polyline circle text tspan"
    assert page.tags <= set(harmless.split())


def test_the_page_asks_for_nothing_from_anywhere(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, 3)).read_text()
    page = Page(text)
    assert not [value for name, value in page.attributes if name in ("src", "srcset", "href")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "@import" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_headline_compares_held_out_prompts_and_counts_steps_and_time(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path, 30)).read_text())
    assert "sums 19: held-out reward 0.125 → 0.875" in page.shown
    spent = sum(metric(record, "step_time") or 0.0 for record in read_metrics(tmp_path / "metrics.jsonl"))
    assert f"optimizer steps30time in steps{duration(spent)}" in page.shown
    assert "modeltinyenginevllm" in page.shown
    assert "1.2345e-06" in page.shown


def test_eval_sets_with_names_have_headline_tiles_and_curves(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(3):
        eval_metrics = {
            "eval/easy_reward": 0.5 + step / 8,
            "eval/very_hard_reward": step / 8,
            "eval/rewards/f/mean": 1.0,
        }
        log.log_metrics({"step": step} | eval_metrics)
        log.log_metrics({"step": step + 1, "reward": step / 20})
    page = Page(write_report(tmp_path).read_text())
    assert "GRPO run: held-out easy_reward 0.500 → 0.750" in page.shown
    assert "held-out very_hard_reward0 → 0.250" in page.shown
    assert "at the first and at the last evaluation" in page.shown
    assert "no held-out prompts" not in page.shown
    chart = reward_chart(columns(read_metrics(tmp_path / "metrics.jsonl")))
    assert chart.labels == ["mean reward of the step", "held-out easy_reward", "held-out very_hard_reward"]


def test_accuracy_is_the_headline_and_one_evaluation_is_said_to_be_one(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.log_metrics({"step": 1, "reward": 0.5, "eval/reward": 0.25, "eval/a_accuracy": 0.5})
    assert "were evaluated only once" in Page(write_report(tmp_path).read_text()).shown
    log.log_metrics({"step": 2, "eval/reward": 0.5, "eval/a_accuracy": 0.75})
    assert "GRPO run: held-out a_accuracy 0.500 → 0.750" in Page(write_report(tmp_path).read_text()).shown


def test_without_held_out_prompts_the_headline_compares_tenths_of_training(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(1, 21):
        log.log_metrics({"step": step, "reward": step / 20})
    page = Page(write_report(tmp_path).read_text())
    assert "GRPO run: training reward 0.075 → 0.975" in page.shown
    assert "There were no held-out prompts" in page.shown


@pytest.mark.parametrize("steps", [1, 2, 60])
def test_runs_of_any_length_give_charts(tmp_path: Path, steps: int) -> None:
    text = write_report(write_run(tmp_path, steps)).read_text()
    charts = [ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text, flags=re.DOTALL)]
    assert len(charts) == (5 if steps == 1 else 6)
    alone = ElementTree.parse(tmp_path / "reward.svg").getroot()
    for chart in (*charts, alone):
        assert "nan" not in ElementTree.tostring(chart, encoding="unicode")


@pytest.mark.parametrize("steps", [1, 19, 20, 2000])
def test_points_of_charts_say_their_step_and_value_and_are_few(steps: int) -> None:
    chart = reward_chart(columns({"step": step, "reward": step / 4} for step in range(1, steps + 1)))
    points = chart.points("mean reward of the step")
    assert points[0] == (steps, steps / 4, f"step {steps}: mean reward of the step: {short_number(steps / 4)}")
    assert len(points) == min(steps, 112)  # 2000 steps: every 18th, of at most 115
    drawn = ElementTree.fromstring(render("chart.svg", chart=chart).strip())
    titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[: len(points)] == [text for _, _, text in points]


def test_a_run_with_nothing_but_one_bad_step_still_gets_a_report(tmp_path: Path) -> None:
    RunLog(tmp_path).log_metrics({"step": 1, "reward": math.nan, "kl": math.inf})
    assert "training reward - → -" in Page(write_report(tmp_path).read_text()).shown


def test_a_directory_without_a_run_is_named_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no metrics\.jsonl with a step in it; want .*; fix: "):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["[" * 20_000, "{", "9" * 5000, ""])
def test_a_damaged_description_of_a_run_is_named(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, 2)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"got .*run\.json, which is not JSON; want .*; fix: "):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "run", [{"machine": None}, {"machine": "a name", "config": [1], "versions": 2, "started": 5}, [1], None]
)
def test_a_run_that_another_program_describes_has_a_report(tmp_path: Path, run: object) -> None:
    write_run(tmp_path, 2)
    (tmp_path / "run.json").write_text(json.dumps(run))
    log = RunLog(tmp_path)
    log.log_metrics({"step": 3, "reward": 10**400, "entropy": 0.5})
    log.log_rollouts(3, [{"completion": "c", "reward": 1.0, "ended": "stop"}, {"completion": "c", "reward": 10**400}])
    assert "device" in write_report(tmp_path).read_text()


def test_samples_are_of_the_first_and_the_last_step_only(tmp_path: Path) -> None:
    rows = first_and_last_rows(write_run(tmp_path, 5) / "rollouts.jsonl")
    assert {step: len(samples) for step, samples in rows.items()} == {1: 8, 5: 8}
    assert "Step 1, 8 completions" in Page(write_report(tmp_path).read_text()).shown


def test_samples_are_the_best_the_worst_and_always_the_same_random_one() -> None:
    rows: list[dict[str, Any]] = [{"reward": reward} for reward in (0.2, 0.9, None, 0.1, 0.5, 0.4)]
    chosen = pick_samples(rows, seed=3)
    assert [kind for kind, _ in chosen] == ["best", "worst", "random"]
    assert [row["reward"] for _, row in chosen[:2]] == [0.9, 0.1]
    assert chosen[2][1]["reward"] in (0.2, 0.4, 0.5)
    assert pick_samples(rows, seed=3) == chosen
    assert [kind for kind, _ in pick_samples(rows[:1], seed=0)] == ["best"]
    assert pick_samples([{"reward": None}], seed=0) == []


def test_of_a_step_that_was_repeated_the_last_record_counts() -> None:
    records = [{"step": 1, "kl": 0.1}, {"step": 2, "kl": 0.2}, {"step": 1, "kl": 0.3}, {"step": 3, "kl": None}]
    assert series(columns(records), "kl") == ([1.0, 2.0], [0.3, 0.2])


def test_charts_show_the_data_and_not_only_axes() -> None:
    base = [{"step": i, "reward": 0.1 * i, "time/train": 1.0, "time/sync": 1.0, "entropy": 1.0} for i in range(1, 6)]
    other = [record | {"reward": 0.5, "time/sync": 3.0, "entropy": float(record["step"])} for record in base]
    for draw in (reward_chart, phase_chart, lambda records: panel_charts(records)[0]):
        assert drawn(draw(columns(base))) == drawn(draw(columns(base)))
        assert drawn(draw(columns(base))) != drawn(draw(columns(other)))
    assert panel_charts(columns([{"step": 1, "reward": 0.1, "kl": None, "grad_norm": 0.0}])) == []


def test_a_long_line_has_no_more_points_than_pixels_and_keeps_its_peaks() -> None:
    steps, values = [float(step) for step in range(1, 50_001)], [0.5] * 50_000
    values[31_234], values[40_001] = 9.0, -9.0
    chart = Chart(title="", lines={"": (steps, values), "few": (steps[:9], values[:9])}, height=100)
    path = chart.path("")
    assert len(path) <= 2 * chart.width
    assert {(31_235.0, 9.0), (40_002.0, -9.0)} <= set(path)
    assert path == sorted(path)
    assert chart.path("few") == list(zip(steps[:9], values[:9], strict=True))


def test_a_report_reads_a_log_without_keeping_its_records(tmp_path: Path) -> None:
    metrics = {f"m{number}": number / 7 for number in range(60)}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, **metrics}) + "\n" for s in range(2000)))
    tracemalloc.start()
    write_report(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2000 * 60 * 40  # bytes: of a number with its step 16; of records, with their names, over 100


def drawn(chart: Chart | None) -> str:
    return render("chart.svg", chart=chart)


def test_several_reward_functions_get_a_chart_of_their_own(tmp_path: Path) -> None:
    records = [{"step": i, "rewards/a/mean": 0.1 * i, "rewards/b/mean": 1.0, "rewards/b/std": 9.0} for i in (1, 2, 3)]
    functions = named_series(columns(records), REWARD_FUNCTION)
    assert functions["a"] == ([1.0, 2.0, 3.0], pytest.approx([0.1, 0.2, 0.3]))
    assert list(functions) == ["a", "b"]
    assert drawn(function_chart(columns(records))) != drawn(function_chart(columns(records[:2])))
    log = RunLog(tmp_path)
    for record in records:
        log.log_metrics(record | {"reward": 0.5})
    assert "Mean of each reward function" in write_report(tmp_path).read_text()


@pytest.mark.parametrize(("values", "is_log"), [((1e-5, 1e-2), True), ((0.1, 0.2), False), ((0.0, 1.0), False)])
def test_a_metric_of_many_magnitudes_gets_a_logarithmic_axis(values: tuple[float, ...], is_log: bool) -> None:
    (chart,) = panel_charts(columns({"step": i, "kl": value} for i, value in enumerate(values)))
    assert chart.is_log is is_log


def test_a_part_of_a_phase_is_not_counted_twice() -> None:
    series = columns([{"step": 1, "time/reward": 2.0, "time/reward/accuracy": 1.9}])
    assert list(named_series(series, PHASE)) == ["reward"]


def test_a_conversation_is_shown_message_by_message(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.log_metrics({"step": 1, "reward": 0.5})
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    answer = [{"role": "assistant", "content": "because"}]
    log.log_rollouts(1, [{"prompt": prompt, "completion": answer, "reward": 1.0}])
    assert "systembe briefuserwhy?assistantbecause" in Page(write_report(tmp_path).read_text()).shown


def test_an_episode_is_shown_with_its_calls_and_answers_and_has_charts(tmp_path: Path) -> None:
    log, names = RunLog(tmp_path), ("tools/turns", "tools/call_frequency", "tools/failure_frequency")
    for step in (1, 2):
        log.log_metrics({"step": step, "reward": 0.5, **dict.fromkeys(names, 0.25 * step)})
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": HOSTILE}}}
    said = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": HOSTILE}]
    record = {"prompt": "why?", "completion": "", "messages": said, "turns": 1, "ended": "turn limit", "reward": 1.0}
    log.log_rollouts(1, [record])
    text = write_report(tmp_path).read_text()
    page = Page(text)
    assert "1 turns, ended: turn limit" in page.shown
    assert "assistantlook(at='<script>" in page.shown
    assert text.count('class="answer"') == 1
    assert "script" not in page.tags
    assert [chart.title for chart in panel_charts(columns(read_metrics(tmp_path / "metrics.jsonl")))] == [
        "turns of an episode",
        "tool calls per completion, share that failed",
    ]


def test_a_moving_mean_keeps_its_length_and_narrows_at_the_ends() -> None:
    assert moving_mean([0.0, 3.0, 6.0, 3.0], 1) == [1.5, 3.0, 4.0, 4.5]
    assert moving_mean([1e308, 1e308, -1e-300, 1e308, 1e308], 1)[0::4] == [1e308, 1e308]


USES = {
    "report.html": write_report,
    "reward.svg": write_report,
    "metrics.jsonl": write_report,
    "rollouts.jsonl": RunLog,
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_an_error_and_no_wait(tmp_path, name, make):
    """A pipe would be opened when somebody opens its other end."""
    run = write_run(tmp_path / "run", 3)
    (run / name).unlink(missing_ok=True)
    make(run / name)
    with pytest.raises(CheckpointError, match="; fix: "):
        USES[name](run)


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324])
def test_a_metric_that_is_at_the_end_of_its_range_has_a_panel(tmp_path, value):
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.log_metrics({"step": step, "reward": 0.5, "kl": value, "grad_norm": value})
    assert "KL to the reference" in write_report(tmp_path).read_text()
