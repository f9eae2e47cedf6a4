"""The main job as a user starts it: the command, real vLLM, files, last line; killed, and resumed by the command."""

import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from clocked import read_log
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fused_grpo.trainer.recipes.arithmetic import build_splits, build_tokenizer

pytestmark = pytest.mark.engine

STEPS, SAVE_EVERY = 24, 6
DEMO = ("--max-steps", STEPS, "--seed", 1, "--save-strategy", "steps", "--save-steps", SAVE_EVERY)


@pytest.fixture(scope="module")
def start(fork_server):
    """The command, in a process that has imported what it needs."""

    def start(output_dir, *options, teardown=False):
        arguments = ("train", "--output-dir", output_dir, *options)
        return fork_server.start("-m", "fused_grpo.trainer.cli", *arguments, stage="vllm", teardown=teardown)

    return start


@pytest.fixture(scope="module")
def demo(start, tmp_path_factory):
    """(its output, its directory) of a demo of fewer steps, which no test changes."""
    output_dir = tmp_path_factory.mktemp("undisturbed") / "demo"
    run = start(output_dir, *DEMO, teardown=True)
    assert run.wait(timeout=300) == 0, run.output
    return run.output, output_dir


def test_the_demo_trains_with_vllm_and_reports_held_out_accuracy(demo, start):
    output, folder = demo
    last = output.strip().splitlines()[-1]
    before, after = map(float, re.fullmatch(r"held-out accuracy: (\d\.\d+) -> (\d\.\d+)", last).groups())
    assert before < 0.25
    assert after >= before + 0.5  # as test_the_task_is_learned, whose chance to fail is known
    steps = [line for line in read_log(folder / "metrics.jsonl") if "reward" in line]
    assert [line["rollout_engine"] for line in steps] == ["vllm"] * STEPS
    assert [line["weight_version"] for line in steps] == list(range(STEPS))
    # Of all tokens of the run the largest, by rounding: 6e-5 on one CPU. A run ends at 1e-3.
    assert max(line["sampling/sampling_logp_difference/max"] for line in steps) < 5e-4
    assert (folder / "rollouts.jsonl").read_text().count("\n") == STEPS * 512
    assert "<polyline" in (folder / "report.html").read_text()
    assert "<polyline" in (folder / "reward.svg").read_text()
    AutoModelForCausalLM.from_pretrained(folder / "final")
    again = start(folder, "--dry-run")
    assert again.wait() == 0
    shown = " ".join(again.output.split())
    assert "holds another run (checkpoint-" in shown
    assert f"moved to {folder / 'former-run-1'}" in shown
    assert not (folder / "former-run-1").exists()


@pytest.mark.parametrize("kill", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_the_demo_killed_at_any_step_is_the_same_run_once_resumed(demo, start, tmp_path, kill):
    step = random.Random(os.environ.get("KILL_SEED", time.time_ns() + kill)).randrange(SAVE_EVERY + 1, STEPS - 2)
    print(f"killed once step {step} is logged")
    cut = start(tmp_path / "demo", *DEMO)
    kill_after(cut, tmp_path / "demo" / "metrics.jsonl", step)
    assert not (tmp_path / "demo" / "final").exists()
    resumed = start(tmp_path / "demo", *DEMO, "--resume")
    assert resumed.wait(timeout=300) == 0, resumed.output
    assert_same_run(demo[1], tmp_path / "demo")


def kill_after(run, log: Path, step: int) -> None:
    """kill -9, once that step is in the log."""
    while not log.exists() or f'"step": {step},' not in log.read_text():
        assert run.poll() is None, run.output
        time.sleep(0.01)
    run.kill()
    assert run.wait() == -9


def assert_same_run(whole: Path, resumed: Path) -> None:
    """Every record of both logs, and every weight."""
    for log in ("metrics.jsonl", "rollouts.jsonl"):
        assert read_log(whole / log) == read_log(resumed / log), log
    (whole_file,), (resumed_file,) = (
        sorted((folder / "final").glob("*model.safetensors")) for folder in (whole, resumed)
    )
    weights, expected = load_file(resumed_file), load_file(whole_file)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model, prompts and a reward of the user's, as options of the command."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer, shape = build_tokenizer(), {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=1, pad_token_id=0, **shape)
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(folder / "model")
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in build_splits().train[:64]))
    (folder / "rewards.py").write_text(
        "def ones(completions, **columns):\n    return [float(text.count('1')) for text in completions]\n"
    )
    options = ["--model", folder / "model", "--dataset", folder / "sums.jsonl", "--max-steps", 6, "--save-steps", 2]
    options += ["--reward-funcs", f"{folder / 'rewards.py'}:ones", "--max-completion-length", 6]
    return [*options, "--learning-rate", 1e-3, "--per-device-train-batch-size", 16, "--logging-steps", 1]


KINDS = {"LoRA": ("--use-peft", "--lora-r", 4), "KL": ("--beta", 0.1, "--sync-ref-model", "--ref-model-sync-steps", 3)}


# A reference that follows is killed and resumed by tests/trainer/checkpoint/test_resume.py, too.
@pytest.mark.parametrize("kind", ["LoRA", pytest.param("KL", marks=pytest.mark.full)])
def test_a_run_of_ones_own_goes_on_from_its_checkpoint_unchanged(start, given, tmp_path, kind):
    run = start(tmp_path / "whole", *given, *KINDS[kind])
    assert run.wait() == 0, run.output
    # As a kill after step 5 leaves it: no final model, and logs that are ahead of the newest checkpoint.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=shutil.ignore_patterns("final", "*.html", "*.svg"))
    resumed = start(tmp_path / "cut", *given, *KINDS[kind], "--resume")
    assert resumed.wait() == 0, resumed.output
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
