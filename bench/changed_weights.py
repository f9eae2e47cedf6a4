"""What a sync of changed weights sends of a real model: `python -m fused_grpo.bench.changed_weights [--steps 6]`.

It writes bench/results/<machine>/changed-weights-<date>.json, whose figures docs/scaling-out.md quotes. SmolLM2-135M
learns sums in fp32 (32 completions of a step), sampled by a vLLM server in bf16 that this script starts. A run that
sends all weights each time follows, with the same seeds: its losses should be the same numbers. `time/sync` is from
this machine, whose files are in memory: there is no network, where bytes would count. Before it, what both ends compute
for each GB of weights, on one of torch's threads.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fused_grpo.bench.raw_file import raw_file, write
from fused_grpo.bench.trainers.beside_trl import sums
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.changed_weights import RECEIVER, apply_changes, changes, digest
from fused_grpo.trainer.engines.server import server_command, server_folder
from fused_grpo.trainer.logging.run_log import read_metrics
from fused_grpo.trainer.models.smollm2 import model_folder

URL_PORT = 8471
RUNS = [(1e-6, 100), (1e-5, 100), (1e-5, 1)]  # learning rate, vllm_full_sync_interval
NAMES = ("loss", "weight_sync/bytes", "weight_sync/changed_fraction", "time/sync", "reward", "grad_norm")
DIFFERENCE = "sampling/sampling_logp_difference/mean"


def main() -> None:
    parser = argparse.ArgumentParser(description="Shares and bytes of syncs that send changed weights alone.")
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    path, entries = raw_file("changed-weights", "python -m fused_grpo.bench.changed_weights")
    seconds = min((_seconds() for _ in range(3)), key=lambda seconds: seconds["trainer"])
    print(seconds, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_folder())
        served = server_folder(_model(), tokenizer, Path(scratch, "served"))
        options = ("--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager", "--no-enable-chunked-prefill")
        command, variables = server_command(
            served, port=URL_PORT, options=(*options, "--worker-extension-cls", RECEIVER)
        )
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        with Path(scratch, "log").open("w") as log, _started(command, variables, log) as server:
            try:
                runs = [_trained(*run, steps, tokenizer, Path(scratch, str(run))) for run in RUNS]
            finally:
                server.terminate()
    write(path, entries | {"seconds_for_each_gb": seconds, "runs": runs})
    print(path)


def _seconds() -> dict[str, float]:
    """For each GB of bf16, of which 1 % changed: copy, comparison and digest; and a worker before it loads."""
    before = {f"{number}": torch.randn(1 << 23).bfloat16() for number in range(16)}
    after = {name: weight.clone() for name, weight in before.items()}
    for weight in after.values():
        weight[torch.rand(len(weight)) < 0.01] *= -1.5
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.perf_counter()
    copies = {name: weight.to("cpu", copy=True) for name, weight in after.items()}
    sent = [changes(name, before[name], weight)[1:] for name, weight in copies.items()]
    wanted = digest(copies)
    written = time.perf_counter()
    for key, part in sent:
        apply_changes(before, key, part)
    assert digest(before) == wanted
    read, size = time.perf_counter(), sum(weight.nbytes for weight in after.values()) / 1e9
    torch.set_num_threads(threads)
    return {"trainer": (written - start) / size, "worker": (read - written) / size}


def _started(command: list[str], variables: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)


def _model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)


def closeness(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer, less for a number far from it: other than 0 or 1, so that each step has a gradient."""
    numbers = [re.findall(r"-?\d{1,9}", reply[0]["content"]) for reply in completions]
    pairs = zip(numbers, answer, strict=True)
    return [1 / (1 + abs(int(guesses[-1]) - int(want))) if guesses else 0.0 for guesses, want in pairs]


def _trained(rate: float, interval: int, steps: int, tokenizer: Any, folder: Path) -> dict[str, Any]:
    args = GRPOConfig(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=24,
        learning_rate=rate,
        lr_scheduler_type="constant",
        bf16=False,
        save_strategy="no",
        vllm_mode="server",
        vllm_server_base_url=f"http://127.0.0.1:{URL_PORT}",
        vllm_full_sync_interval=interval,
        vllm_server_timeout=600.0,
    )
    trainer = GRPOTrainer(_model(), closeness, args, sums(0, 4 * steps, held_out=False), processing_class=tokenizer)
    trainer.train()
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    run: dict[str, Any] = {"learning_rate": rate, "vllm_full_sync_interval": interval}
    run |= {name: [line.get(name) for line in lines] for name in (*NAMES, DIFFERENCE)}
    print(run, flush=True)
    return run


if __name__ == "__main__":
    main()
