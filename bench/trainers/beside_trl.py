"""A real model trained by TRL and by us on the same work: `python -m fused_grpo.bench.trainers.beside_trl`.

SmolLM2-135M learns sums of two numbers with TRL's trainer, with ours and transformers' generate, and with ours and
vLLM. Model, prompts and their order, reward, sampling and optimizer are the same, by arguments that both have. Each
training has a process of its own; one follows the other, seed by seed. It writes
bench/results/<machine>/beside-trl-<date>.json and a picture beside it, and goes on where it was interrupted:

    held_out          share of the held-out sums that are right, decoded greedily by transformers, before and after
    reward            mean of each step
    seconds           of each step, from the end of the one before: logging and callbacks included
    generate          of which in the rollout engine, weights' transfer included
    memory            the most bytes of the process and its children that no file backs, sampled every 0.1 s

TRL's update is computed in one piece, its default. With `--accumulation n` it has n micro-batches in a step, which is
its way to less memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from fused_grpo.bench.raw_file import begun, raw_file, write
from fused_grpo.bench.report.beside_trl import TRAINERS, draw, summary
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models.smollm2 import model_folder

SYSTEM = "You are a calculator. You reply with one number and nothing else."
HELD_OUT = 200
MICRO_BATCH_TOKENS = 256
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    if options.worker is not None:
        run(options.worker, options.seed, options)
        return
    path, fresh = raw_file("beside-trl", "python -m fused_grpo.bench.trainers.beside_trl", work=work(options), runs=[])
    path = options.output or path
    entries = begun(path, fresh, same=("commit", "environment", "work"), fix="another --output")
    for seed in range(options.seeds):
        for name in TRAINERS:
            if any((old["trainer"], old["seed"]) == (name, seed) for old in entries["runs"]):
                continue
            entries["runs"].append(one_run(name, seed, options))
            write(path, entries)
            print(summary(entries["runs"][-1]), flush=True)
    draw(entries, path.with_suffix(".svg"))
    print(path)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description="A real model trained by TRL and by us on the same work.")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=40)
    flags.add_argument("--completions", type=int, default=64, help="per step, in groups of 8")
    flags.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step of TRL's")
    flags.add_argument("--output", type=Path)
    flags.add_argument("--worker", choices=TRAINERS, help=argparse.SUPPRESS)
    flags.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    flags.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return flags


def work(options: argparse.Namespace) -> dict[str, Any]:
    facts = {"steps": options.steps, "completions": options.completions, "held_out_sums": HELD_OUT, "dtype": "float32"}
    facts |= {"micro_batch_tokens": MICRO_BATCH_TOKENS}
    return facts | ({"accumulation of TRL": options.accumulation} if options.accumulation > 1 else {})


def one_run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a worker, and watch its memory until it has trained."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "fused_grpo.bench.trainers.beside_trl", "--worker", name, "--seed", str(seed)]
        command += ["--result", str(result)]
        command += [f"--{option}={getattr(options, option)}" for option in ("steps", "completions", "accumulation")]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            peak = watch(process, result.with_name("trained"))
            if process.wait():
                log.seek(0)
                raise RuntimeError(f"{name}, seed {seed}, ended with {process.returncode}:\n{log.read()[-4000:]}")
        return {"trainer": name, "seed": seed, "memory": peak, **json.loads(result.read_text())}


def watch(process: subprocess.Popen[bytes], until: Path) -> int:
    """The most anonymous and shared bytes of the process and its children at a time."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None and not until.exists():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            peak = max(peak, sum(own_bytes(child.pid) for child in (root, *root.children(recursive=True))))
        time.sleep(0.1)
    return peak


def own_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


# ---------------------------------------------------------------------------------------------------------- a worker


def run(name: str, seed: int, options: argparse.Namespace) -> None:
    """Train once, and write what was seen."""
    warnings.simplefilter("ignore")
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = sums(seed, options.steps * options.completions // 8, held_out=False)
    held_out = sums(0, HELD_OUT, held_out=True)
    before, clock = accuracy(model, tokenizer, held_out), Clock()
    with tempfile.TemporaryDirectory() as output:
        shared = {"output_dir": output, "seed": seed, **arguments(options)}
        if name == "TRL":
            shared["per_device_train_batch_size"] //= options.accumulation
            shared["gradient_accumulation_steps"] = options.accumulation
        make = their_trainer if name == "TRL" else our_trainer
        trainer = make(model, shared, rows, tokenizer, clock, use_vllm=name.endswith("vLLM"))
        trainer.add_callback(clock)
        trainer.train()
    options.result.with_name("trained").touch()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    result: dict[str, Any] = {"held_out": [before, accuracy(model, tokenizer, held_out)], "reward": rewards}
    options.result.write_text(json.dumps(result | {"seconds": clock.steps, "generate": clock.generate}))


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of both trainers."""
    return {
        "max_steps": options.steps,
        "per_device_train_batch_size": options.completions,
        "num_generations": 8,
        "max_completion_length": 24,
        "temperature": 1.0,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "loss_type": "dapo",
        "beta": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def sums(seed: int, count: int, *, held_out: bool) -> list[Row]:
    """Sums and differences of two numbers below 50, as conversations. A tenth of the pairs is held out."""
    draw, rows = random.Random(seed), list[Row]()
    while len(rows) < count:
        a, b, sign = draw.randrange(1, 50), draw.randrange(1, 50), draw.choice("+-")
        if ((31 * a + 17 * b) % 10 == 0) != held_out:
            continue
        user = {"role": "user", "content": f"What is {a} {sign} {b}? Answer with the number only."}
        prompt = [{"role": "system", "content": SYSTEM}, user]
        rows.append({"prompt": prompt, "answer": str(a + b if sign == "+" else a - b)})
    return rows


def is_right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last number of the reply is the answer."""
    numbers = [re.findall(r"-?\d+", reply[0]["content"]) for reply in completions]
    return [float(guesses[-1:] == [want]) for guesses, want in zip(numbers, answer, strict=True)]


class Clock(TrainerCallback):
    """Seconds of each step, and of its calls of the rollout engine."""

    def __init__(self) -> None:
        self.steps, self.generate = list[float](), list[float]()
        self._since, self._generating = 0.0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._since)
        self.generate.append(self._generating)
        self._since, self._generating = now, 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*given, **named)
            self._generating += time.perf_counter() - start
            return result

        return wrapped


def their_trainer(model: Any, shared: dict[str, Any], rows: list[Row], tokenizer: Any, clock: Clock, **_: Any) -> Any:
    import datasets
    import trl

    args = trl.GRPOConfig(use_cpu=True, **shared)
    trainer = trl.GRPOTrainer(model, is_right, args, datasets.Dataset.from_list(rows), processing_class=tokenizer)
    trainer._generate_single_turn = clock.timed(trainer._generate_single_turn)
    return trainer


def our_trainer(
    model: Any, shared: dict[str, Any], rows: list[Row], tokenizer: Any, clock: Clock, *, use_vllm: bool
) -> GRPOTrainer:
    # The same update in less memory; TRL's micro-batches are counted in sequences.
    args = GRPOConfig(use_vllm=use_vllm, max_tokens_per_micro_batch=MICRO_BATCH_TOKENS, **shared)
    trainer = GRPOTrainer(model, is_right, args, rows, processing_class=tokenizer)
    trainer.engine.generate = clock.timed(trainer.engine.generate)  # type: ignore[method-assign]
    trainer.engine.load_weights = clock.timed(trainer.engine.load_weights)  # type: ignore[method-assign]
    return trainer


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: list[Row]) -> float:
    """The share of greedy replies that are right."""
    tokenizer.padding_side, right = "left", 0.0
    model.eval()
    for start in range(0, len(rows), 50):
        part = rows[start : start + 50]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in part],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        replies = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(is_right([[{"content": reply}] for reply in replies], [row["answer"] for row in part]))
    return right / len(rows)


if __name__ == "__main__":
    main()
