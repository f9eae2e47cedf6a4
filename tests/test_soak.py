"""The soak in seconds: everything in it works. And what it looks for would be found."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parent.parent / "scripts" / "soak"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SOAK / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bars, processes = load("bars"), load("processes")


def test_a_soak_of_seconds_trains_under_faults_and_leaves_nothing(farm, tmp_path):
    soak = farm.start(SOAK / "__main__.py", "--minutes", "0.1", "--seed", "1", "--out", tmp_path / "soak.json")
    soak.wait(timeout=240)
    found = json.loads((tmp_path / "soak.json").read_text())
    # In seconds nothing is warm yet.
    assert [bar for bar in found["broken"] if "memory" not in bar] == [], soak.output
    steady, killed = found["tracks"]["steady"], found["tracks"]["killed"]
    assert steady["steps"] > 0
    assert steady["held_at_the_end"]["children"] == 1, "the isolated reward's worker, seen by the count of leftovers"
    assert killed["rounds"] >= 1
    assert killed["starts"] >= killed["rounds"]


@pytest.mark.parametrize(("rise", "shape"), [(0.0, "flat"), (0.0, "sawtooth"), (0.03, "flat"), (0.1, "sawtooth")])
def test_growth_is_the_rise_after_the_warm_up_whatever_lies_on_it(rise, shape):
    draw, series = random.Random(0), []
    for second in range(1800):
        warm = max(0.0, second / 1800 - bars.WARM_UP) / (1 - bars.WARM_UP)
        saw = 0.04 * (second % 90) / 90 if shape == "sawtooth" else 0.0
        spike = 0.5 if draw.random() < 0.01 else 0.0
        starting = 0.6 * min(1.0, second / 200)
        series.append(400e6 * (starting + rise * warm + saw + spike + draw.gauss(0, 0.002)))
    # Against where it stood after the warm-up: 0.6, and half a tooth.
    stood = 0.6 + (0.02 if shape == "sawtooth" else 0.0)
    assert bars.growth(series) == pytest.approx(rise / stood, abs=0.008)


def test_every_bar_that_breaks_is_named():
    track = {"wrong": ["an error"], "memory": {"growth": 0.021}}
    held = {"held_after_warm_up": {"threads": 4, "socket": 0}, "held_at_the_end": {"threads": 5, "socket": 1}}
    found = {"left": {"processes": ["sleep 60"], "shared memory": []}, "tracks": {"steady": track | held}}
    assert bars.broken(found) == [
        "processes left: ['sleep 60']",
        "steady: an error",
        "steady: memory grew by 2.10 % after its warm-up",
        "steady: 1 more threads than after the warm-up",
        "steady: 1 more socket than after the warm-up",
    ]


def test_a_process_or_a_file_that_stays_open_is_seen(tmp_path):
    before = processes.held()
    with (tmp_path / "open").open("w"), subprocess.Popen(["sleep", "60"]) as left:
        assert left.pid in processes.descendants(os.getpid())
        after = processes.held()
        left.kill()
    assert after["file"] == before["file"] + 1
    assert after["children"] == before["children"] + 1
