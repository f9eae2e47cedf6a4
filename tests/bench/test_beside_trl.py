"""Ours and TRL's trainer on a real model: what is given to both, what is measured, and how it is shown."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fused_grpo.bench.report.beside_trl import TRAINERS, draw, summary, table
from fused_grpo.bench.trainers import beside_trl
from fused_grpo.bench.trainers.beside_trl import Clock, arguments, sums, watch
from fused_grpo.errors import DataError


def content() -> dict:
    """Two seeds; every trainer's step takes as many seconds as its place, after two slow ones."""
    runs = [
        {
            "trainer": name,
            "seed": seed,
            "memory": 12e9 / place,
            "held_out": [0.25, 0.5 + seed / 10],
            "reward": [0.25] * 8 + [0.75] * 8,
            "seconds": [100.0, 100.0] + [12.0 / place] * 14,
            "generate": [50.0, 50.0] + [6.0 / place] * 14,
        }
        for seed in range(2)
        for place, name in enumerate(TRAINERS, 1)
    ]
    env = {"cpu_count": "2", "torch": "2", "transformers": "5"}
    work = {"steps": 16, "completions": 64, "held_out_sums": 200, "dtype": "float32"}
    return {"date": "2026-11-26", "commit": {"id": "abc"}, "environment": env, "work": work, "runs": runs}


def test_the_table_is_beside_trls_means_and_leaves_out_the_first_two_steps():
    lines = table(content()).splitlines()
    cells = [cell.strip() for cell in lines[4].split("|")[1:-1]]
    assert cells == ["ours, vLLM", "4.00 (0.33×)", "2.00 (0.33×)", "4.00 (0.33×)", "0.500, 0.600", "0.750, 0.750"]
    assert "0.250 of 200 sums" in lines[-1]
    assert "accumulation" not in lines[-1]
    parts = content()
    parts["work"]["accumulation of TRL"] = 8
    assert "TRL has gradient_accumulation_steps=8." in table(parts)
    assert "4.00 s a step, of it 2.00 s generating; reward 0.250 -> 0.750" in summary(content()["runs"][2])


def test_the_picture_is_the_same_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw(content(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert all(f">{name}</text>" in (tmp_path / "a.svg").read_text() for name in TRAINERS)


def test_no_pair_to_train_on_is_held_out():
    held_out = {row["prompt"][1]["content"] for row in sums(0, 200, held_out=True)}
    for seed in range(3):
        trained = [row["prompt"][1]["content"] for row in sums(seed, 320, held_out=False)]
        assert len(trained) == 320
        assert not held_out & set(trained)
    (row,) = sums(1, 1, held_out=False)
    a, sign, b = row["prompt"][1]["content"].removeprefix("What is ").partition("?")[0].split()
    assert int(row["answer"]) == int(a) + {"+": 1, "-": -1}[sign] * int(b)


def test_both_trainers_know_every_argument():
    trl = pytest.importorskip("trl")
    from fused_grpo.trainer import GRPOConfig

    options = SimpleNamespace(steps=2, completions=16, accumulation=1)
    for config in (trl.GRPOConfig, GRPOConfig):
        made = config(
            output_dir="unused", **arguments(options), **({"use_cpu": True} if config is not GRPOConfig else {})
        )
        assert (made.max_steps, made.num_generations, made.learning_rate) == (2, 8, 2e-5)


def test_the_clock_counts_each_step_and_its_generation():
    clock = Clock()
    generate = clock.timed(lambda: time.sleep(0.02))
    clock.on_train_begin()
    for calls in (1, 2):
        for _ in range(calls):
            generate()
        clock.on_step_end()
    assert 0.02 <= clock.generate[0] <= clock.steps[0]
    assert 0.04 <= clock.generate[1] <= clock.steps[1]


def test_memory_is_counted_in_children_and_not_in_mapped_files(tmp_path):
    mapped = tmp_path / "file"
    mapped.write_bytes(b"1" * 200_000_000)
    child = "x = bytearray(b'1') * 100_000_000; import time; time.sleep(60)"
    code = f"""
import mmap, subprocess, sys, time
with open({str(mapped)!r}, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(pages[::4096])
    other = subprocess.Popen([sys.executable, "-c", {child!r}])
    time.sleep(3)
    open({str(tmp_path / "trained")!r}, "w").close()
    other.kill()
    other.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    peak = watch(process, tmp_path / "trained")
    assert process.wait() == 0
    assert 100e6 < peak < 190e6


def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch):
    path, made = tmp_path / "result.json", content()
    path.write_text(json.dumps(made | {"runs": made["runs"][:4]}))
    asked, here = [], made | {"runs": []}

    def run(name, seed, options):
        asked.append((name, seed))
        return next(run for run in made["runs"] if (run["trainer"], run["seed"]) == (name, seed))

    monkeypatch.setattr(beside_trl, "one_run", run)
    monkeypatch.setattr(beside_trl, "raw_file", lambda name, made_by, **more: (path, here))
    beside_trl.main(["--seeds", "2", "--output", str(path)])
    assert asked == [(name, 1) for name in TRAINERS[1:]]
    assert json.loads(path.read_text())["runs"] == made["runs"]
    assert path.with_suffix(".svg").exists()
    here["commit"] = {"id": "of other code"}
    with pytest.raises(DataError, match=r"got .*result\.json of another commit, want one run .*fix: another --output"):
        beside_trl.main(["--seeds", "3", "--output", str(path)])
    assert len(asked) == 2


def test_a_run_that_fails_says_what_it_printed(fork_server, monkeypatch):
    def forked(command, stdout, stderr):
        assert (command[:2], stdout) == ([sys.executable, "-m"], stderr)
        process = fork_server.start(*command[1:])
        started = SimpleNamespace(pid=process.pid, poll=process.poll)

        def wait():
            started.returncode = process.wait()
            stdout.write(process.output)
            return started.returncode

        started.wait = wait
        return started

    monkeypatch.setattr(beside_trl, "subprocess", SimpleNamespace(Popen=forked))
    options = SimpleNamespace(steps="many", completions=8, accumulation=1)
    with pytest.raises(RuntimeError, match=r"(?s)TRL, seed 0, ended with 2:.*invalid int value: 'many'"):
        beside_trl.one_run("TRL", 0, options)
