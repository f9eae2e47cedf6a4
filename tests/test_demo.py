"""The main job as a user starts it, cut short: the command, real vLLM, files, last line."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM


@pytest.mark.engine
def test_the_demo_trains_with_vllm_and_reports_held_out_accuracy(tmp_path):
    command = [sys.executable, "-m", "fused_grpo.trainer.cli", "train", "--output-dir", str(tmp_path / "demo")]
    run = subprocess.run([*command, "--max-steps", "40", "--seed", "1"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    last = run.stdout.strip().splitlines()[-1]
    before, after = map(float, re.fullmatch(r"held-out accuracy: (\d\.\d+) -> (\d\.\d+)", last).groups())
    assert before <= 0.6
    assert after > before
    lines = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert [line["rollout_engine"] for line in steps] == ["vllm"] * 40
    assert [line["weight_version"] for line in steps] == list(range(40))
    assert max(line["sampling/sampling_logp_difference/max"] for line in steps) < 1e-4
    assert (tmp_path / "demo" / "rollouts.jsonl").read_text().count("\n") == 40 * 512
    assert "<img" in (tmp_path / "demo" / "report.html").read_text()
    assert (tmp_path / "demo" / "reward.png").read_bytes()[:4] == b"\x89PNG"
    AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "final")
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 1
    assert "holds another run" in again.stderr
