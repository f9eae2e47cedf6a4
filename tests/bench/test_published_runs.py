"""What the throughput model says of published runs, and of a run with made-up latencies."""

import json
import re
import statistics
from pathlib import Path

import pytest

from fused_grpo.bench.predictions import published_runs
from fused_grpo.bench.predictions.published_runs import BOUND, error, text

ROOT = Path(__file__).resolve().parents[2]
CONTENT = json.loads((ROOT / "bench/predictions/published_runs.json").read_text())
RAW = sorted((ROOT / "bench/results/cpu-2-cores").glob("simulated-*.json"))[-1]


@pytest.mark.parametrize(("source", "least"), [("NeMo RL", 4), ("prime-rl", 4)])
def test_runs_that_nothing_was_fitted_to_are_within_a_fifth(source, least):
    rows = [row for row in CONTENT["steps"] if row["source"].startswith(source) and "fitted" not in row]
    close = [row for row in rows if abs(error(row, CONTENT["sizes"])) <= BOUND]
    assert len(close) >= least


def test_a_row_that_is_far_off_says_why_and_no_other_does():
    far = [abs(error(row, CONTENT["sizes"])) > BOUND for row in CONTENT["steps"]]
    assert far == ["why" in row for row in CONTENT["steps"]]


def test_the_table_has_every_run_and_counts_the_close_ones():
    said = text(CONTENT)
    close, tested = map(int, re.match(r"(\d+) of the (\d+) runs that nothing was fitted to", said).groups())
    assert tested == sum("fitted" not in row for row in CONTENT["steps"])
    assert tested - close == sum("why" in row for row in CONTENT["steps"])
    assert said.count("\n|") >= len(CONTENT["steps"]) + len(CONTENT["phases"])


def test_a_wrong_prediction_is_bold(monkeypatch):
    monkeypatch.setattr(published_runs, "seconds", lambda row, sizes: 1.5 * row["published"])
    assert text(CONTENT).count("**+50%**") == len(CONTENT["steps"])


def test_the_simulated_run_took_what_was_predicted():
    for mode in json.loads(RAW.read_text())["modes"]:
        assert mode["predicted"]["seconds"] == pytest.approx(statistics.mean(mode["steps"]), rel=0.15), mode["mode"]


def test_a_small_simulated_run_takes_about_what_is_predicted(fork_server):
    said = fork_server.run("-m", "fused_grpo.bench.simulated_run", "--small", "--steps", "1", timeout=120)
    predicted, measured = map(float, re.search(r"small: predicted ([\d.]+) s, measured ([\d.]+) s", said).groups())
    # Processes that run beside it make it slower, and nothing makes it much faster.
    assert 0.8 * predicted < measured < 3 * predicted
