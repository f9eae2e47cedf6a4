"""A run that is killed and resumed again and again, until it ends where the undisturbed one ends: bit for bit.

`kill -9` at any moment, SIGTERM, and now and then the newest checkpoint loses a byte before the run goes on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from processes import ended, start
from rewards import REPEATABLE
from runs import damage_newest, make_rewards, make_trainer

STEPS = 24
LONGEST = 300.0  # seconds for a start that is left alone
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)


def victim(output_dir: Path) -> None:
    """One start of the run, from its newest whole checkpoint or from nothing."""
    torch.set_num_threads(1)
    rewards = make_rewards(rate=0.02, kinds=REPEATABLE)
    trainer = make_trainer(output_dir, rewards, max_steps=STEPS, save_steps=3, num_iterations=2, use_vllm=False)
    trainer.train()
    trainer.save_checkpoint()


def rounds(folder: Path, deadline: float, seed: int) -> None:
    """Rounds of one run each until the time is up, each compared with the undisturbed one."""
    draw = random.Random(seed)
    whole, counts, wrong = folder / "undisturbed", Counter[str](), list[str]()
    began = time.monotonic()
    status = ended(start(victim, whole, log=folder / "undisturbed.log"), within=LONGEST)
    if status != 0:
        raise RuntimeError(f"the undisturbed run ended with {status}: {(folder / 'undisturbed.log').read_text()}")
    mean = (time.monotonic() - began) / 3
    counts["undisturbed seconds"] = round(3 * mean)
    while True:
        output_dir, log = folder / f"round-{counts['rounds']}", folder / "round.log"
        counts["rounds"] += 1
        troubles = list(disturbed(output_dir, draw, mean, counts, log))
        troubles = troubles or [f"another {name}" for name in differences(whole, output_dir)]
        troubles += [f"{path.name} is left" for path in output_dir.rglob(".*")]
        wrong += [f"round {counts['rounds']}: {trouble}" for trouble in troubles]
        shutil.rmtree(output_dir, ignore_errors=True)
        if time.monotonic() >= deadline:
            break
    found = {"steps": STEPS, **counts, "wrong": wrong[:20]}
    folder.with_suffix(".json").write_text(json.dumps(found))


def disturbed(output_dir: Path, draw: random.Random, mean: float, counts: Counter[str], log: Path) -> Iterator[str]:
    """Start the run, stop it and start it again until it ends by itself; yields what should not have happened."""
    for _ in range(50):
        log.unlink(missing_ok=True)
        pid = start(victim, output_dir, log=log)
        counts["starts"] += 1
        status = ended(pid, within=draw.expovariate(1 / mean))
        if status is None:
            number = draw.choices([signal.SIGKILL, signal.SIGTERM], weights=[3, 1])[0]
            os.kill(pid, number)
            status = ended(pid, within=LONGEST)
            counts[number.name] += 1
            expected: tuple[int, ...] = (0, *(TERMINATED if number == signal.SIGTERM else (-signal.SIGKILL,)))
        else:
            expected = (0,)
        if status not in expected:
            yield f"ended with {status}: {log.read_text()[-2000:]}"
            return
        if status == 0:
            return
        if draw.random() < 0.25 and damage_newest(output_dir):
            counts["truncated checkpoints"] += 1
    yield "never came to its end"


def differences(first: Path, second: Path) -> list[str]:
    """Files of two runs that differ: weights, optimizer, random generators, and all that was logged but times."""
    last = f"checkpoint-{STEPS}"
    tensors = ("model.safetensors", "optimizer.safetensors", "process-0.safetensors")
    names = [f"{last}/{name}" for name in tensors] + ["final/model.safetensors"]
    different = [name for name in names if _bytes(first / name) != _bytes(second / name)]
    logs = ("metrics.jsonl", "rollouts.jsonl")
    return different + [name for name in logs if _lines(first / name) != _lines(second / name)]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _lines(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{k: v for k, v in record.items() if "time" not in k and k != "tokens_per_second"} for record in records]
