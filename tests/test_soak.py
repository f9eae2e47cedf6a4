"""A soak of seconds works, and what it looks for would be found."""

import importlib.util
import json
import random
import subprocess
from pathlib import Path

import psutil
import pytest

SOAK = Path(__file__).resolve().parent.parent / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_soak_of_seconds_trains_under_faults_and_leaves_nothing(fork_server, tmp_path):
    process = fork_server.start(SOAK, "--minutes", "0.1", "--seed", "1", "--out", tmp_path / "soak.json")
    status = process.wait(timeout=240)
    result = json.loads((tmp_path / "soak.json").read_text())
    # In seconds nothing is warm yet.
    assert [bar for bar in result["broken"] if "memory grew" not in bar] == [], process.output
    assert status == bool(result["broken"])
    steady, killed = result["tracks"]["steady"], result["tracks"]["killed"]
    assert steady["runs"] == 2
    assert steady["reward calls"] > 0
    assert steady["transformers checkpoints"] > 0
    assert steady["server checkpoints"] > 0
    assert killed["starts"] >= killed["runs"] >= 1


@pytest.mark.parametrize(("rise", "shape"), [(0.0, "flat"), (0.0, "sawtooth"), (0.03, "flat"), (0.1, "sawtooth")])
def test_growth_is_the_rise_after_the_warm_up_whatever_lies_on_it(soak, rise, shape):
    draw, series = random.Random(0), []
    for second in range(1800):
        warm = max(0.0, second / 1800 - soak.WARM_UP) / (1 - soak.WARM_UP)
        saw = 0.04 * (second % 90) / 90 if shape == "sawtooth" else 0.0
        spike = 0.5 if draw.random() < 0.01 else 0.0
        starting = 0.6 * min(1.0, second / 200)
        series.append(400e6 * (starting + rise * warm + saw + spike + draw.gauss(0, 0.002)))
    # Against where it stood after the warm-up: 0.6, and half a tooth.
    stood = 0.6 + (0.02 if shape == "sawtooth" else 0.0)
    assert soak.growth(series) == pytest.approx(rise / stood, abs=0.008)


def test_every_bar_that_fails_is_named(soak):
    track = {"failures": ["an error"], "growth": 0.021}
    result = {"left": {"processes": ["sleep 60"], "shared memory": []}, "tracks": {"steady": track}}
    assert soak.broken(result) == [
        "processes left: ['sleep 60']",
        "steady: an error",
        "steady: memory grew by 2.10 % after the warm-up",
    ]


def test_a_process_and_a_file_that_are_left_over_are_found(soak, tmp_path):
    (tmp_path / "left").touch()
    with subprocess.Popen(["sleep", "60"]) as running:
        while not psutil.Process(running.pid).cmdline():  # for a moment a new process has none
            pass
        leftovers = soak.left_over([psutil.Process(running.pid)], tmp_path, set())
        running.kill()
    assert leftovers["processes"] == ["sleep 60"]
    assert leftovers["temporary files"] == ["left"]


def test_runs_that_end_with_other_weights_differ(soak, tmp_path):
    for name, content in ("first", b"1"), ("second", b"2"):
        (tmp_path / name / "final").mkdir(parents=True)
        (tmp_path / name / "final" / "model.safetensors").write_bytes(content)
    assert soak.differences(tmp_path / "first", tmp_path / "first") == []
    assert soak.differences(tmp_path / "first", tmp_path / "second") == ["final/model.safetensors"]
