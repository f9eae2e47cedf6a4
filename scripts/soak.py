"""Train under faults for a while: `python scripts/soak.py --minutes 30 --seed 0 --vllm`. Exits with 1 if a bar fails.

Processes run side by side, each with one thread:

    steady   trains all the time, in turn with a server and with transformers
    vllm     trains all the time with a vLLM engine in its process (with --vllm)
    killed   starts runs, stops them with SIGKILL or SIGTERM, and resumes them until they end
    server   stands in for a vLLM server; it fails at random, and is killed and started again

The bars: memory of `steady` and `vllm` grows by at most 2 % after the warm-up; only a fault of the server may end a
trainer; a killed run equals the undisturbed run bit for bit; no process, temporary file or shared memory is left over.
"""

from __future__ import annotations

import argparse
import ctypes
import filecmp
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from fused_grpo.env import environment
from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.checkpoint.checkpoint import checkpoints
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer
from fused_grpo.trainer.rewards import isolated

TESTS = Path(__file__).resolve().parent.parent / "tests" / "trainer"
sys.path += [str(TESTS), str(TESTS / "engines")]
import resume_run  # noqa: E402
from fake_vllm import FakeServer  # noqa: E402

MAX_GROWTH, WARM_UP = 0.02, 0.2  # of memory; of the time
OVERTIME = 240.0  # seconds after the deadline in which all processes have to end
START_SECONDS = 300.0  # for one start of a run that is left alone
HANG_SECONDS = 4.0
MAX_FRUITLESS = 10  # trainers in a row that end before their first reward
# For the worker process of the isolated reward, which ends on one completion in 200.
FRAGILE_REWARD = """
import os, zlib
def fragile(prompts, completions):
    number = zlib.crc32(f"{prompts[0]} {completions[0]}".encode())
    return [number % 10 / 10] if number % 200 else os._exit(1)
"""


class FailingReward:
    """Fails in one of four ways in one call of ten. After the deadline it stops the trainer."""

    __name__ = "failing"

    def __init__(self, deadline: float, seed: int) -> None:
        self.deadline, self.random = deadline, random.Random(seed)
        self.calls, self.faults = 0, Counter[str]()

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        values = [len(set(text)) + 0.1 * len(text) for text in completions]
        if time.monotonic() >= self.deadline:
            # The trainer finishes its step, saves a checkpoint and raises SystemExit.
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.random.random() < 0.1:
            return self.fail(values)
        return values

    def fail(self, values: list[float]) -> list[float]:
        fault = self.random.choice(["raises", "returns NaN", "returns too few values", "hangs"])
        self.faults[fault] += 1
        if fault == "raises":
            raise RuntimeError("a fault of the soak")
        if fault == "hangs":
            time.sleep(HANG_SECONDS)
        return [float("nan")] * len(values) if fault == "returns NaN" else values[1:]


def train_steadily(folder: Path, engines: Sequence[str], deadline: float, seed: int, port: int) -> dict[str, Any]:
    """Runs with each engine in turn; where a fault of the server ends a trainer, the next trainer resumes the run."""
    (folder / "fragile.py").write_text(FRAGILE_REWARD)
    failing = FailingReward(deadline, seed)
    rewards = [failing, isolated(f"{folder / 'fragile.py'}:fragile", timeout=10.0, on_failure=None)]
    options: dict[str, dict[str, Any]] = {
        "transformers": {"use_vllm": False, "max_steps": 60},
        "server": {"vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{port}", "max_steps": 60},
        "vllm": {"use_vllm": True, "max_steps": 10**6},
    }
    options["server"]["top_p"] = 0.9  # the log-probs of this server are not the model's, so that they are not compared
    counts, errors, failures, fruitless = Counter[str](), Counter[str](), list[str](), 0
    while not failures and (counts["runs"] < len(engines) or time.monotonic() < deadline):
        engine = engines[counts["runs"] % len(engines)]
        counts["trainers"] += 1
        before = failing.calls
        try:
            make_trainer(folder / "run", rewards, **options[engine]).train()
        except SystemExit:
            pass  # after the deadline
        except Exception as error:
            errors[f"{engine}: {type(error).__name__}"] += 1
            fruitless = 0 if failing.calls > before else fruitless + 1
            explained = engine == "server" and isinstance(error, UnavailableError | WeightSyncError)
            if not explained or fruitless == MAX_FRUITLESS:
                failures.append(f"{engine}: {type(error).__name__}: {error}")
            if time.monotonic() < deadline:
                continue
        counts["runs"] += 1
        counts[f"{engine} checkpoints"] += len(checkpoints(folder / "run"))
        shutil.rmtree(folder / "run", ignore_errors=True)
    counts["reward calls"] = failing.calls
    return {"engines": engines, **counts, "reward faults": failing.faults, "errors": errors, "failures": failures}


def make_trainer(output_dir: Path, rewards: list[Any], **options: Any) -> GRPOTrainer:
    """A trainer of a tiny model; it resumes from the newest complete checkpoint where there is one."""
    shape = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    shape |= {"num_generations": 4, "max_completion_length": 6, "vllm_max_model_length": 64}
    faults = {"reward_failure": "drop", "reward_timeout": HANG_SECONDS / 2, "vllm_server_timeout": 15.0}
    start = {"resume_from_checkpoint": True} if checkpoints(output_dir) else {"overwrite_output_dir": True}
    saves = {"save_steps": 10, "save_total_limit": 3, "logging_steps": 1000}
    args = GRPOConfig(str(output_dir), learning_rate=1e-4, **{**shape, **faults, **start, **saves, **options})
    return GRPOTrainer(resume_run.model(), rewards, args, resume_run.ROWS, processing_class=build_tokenizer())


def kill_and_resume(folder: Path, deadline: float, seed: int) -> dict[str, Any]:
    """Runs that are stopped and resumed until they end; each has to equal the undisturbed run."""
    draw, counts, failures = random.Random(seed), Counter[str](), list[str]()
    began = time.monotonic()
    start(folder / "undisturbed.log", train_once, folder / "undisturbed").join(START_SECONDS)
    mean = (time.monotonic() - began) / 3
    while not counts["runs"] or time.monotonic() < deadline:
        counts["runs"] += 1
        output_dir = folder / f"run-{counts['runs']}"
        wrong = disturb(output_dir, draw, mean, counts)
        wrong = wrong or [f"{name} differs" for name in differences(folder / "undisturbed", output_dir)]
        wrong += [f"{path.name} is left" for path in output_dir.rglob(".*")]
        failures += [f"run {counts['runs']}: {what}" for what in wrong]
        shutil.rmtree(output_dir, ignore_errors=True)
    return {**counts, "failures": failures[:20]}


def train_once(output_dir: Path) -> None:
    """Ten steps in all: from the newest complete checkpoint, or from the beginning."""
    start = "resume" if checkpoints(output_dir) else "fresh"
    resume_run.main(str(output_dir), "transformers", start, "nowhere", "0")


def disturb(output_dir: Path, draw: random.Random, mean: float, counts: Counter[str]) -> list[str]:
    """Start the run, stop it after about `mean` seconds and resume it, until it ends by itself; what went wrong."""
    while True:
        process = start(output_dir.with_suffix(".log"), train_once, output_dir)
        counts["starts"] += 1
        process.join(draw.expovariate(1 / mean))
        number = draw.choice([signal.SIGKILL, signal.SIGTERM])
        if process.is_alive():
            os.kill(process.pid, number)
            counts[number.name] += 1
        process.join(START_SECONDS)
        if process.exitcode not in (0, -number, 128 + number):
            process.kill()
            return [f"exit status {process.exitcode}, see {output_dir.with_suffix('.log')}"]
        if process.exitcode == 0:
            return []


def differences(first: Path, second: Path) -> list[str]:
    """Files of two runs that differ: weights, optimizer and random generators."""
    files = [*first.glob("checkpoint-10/*.safetensors"), first / "final" / "model.safetensors"]
    _, different, missing = filecmp.cmpfiles(first, second, [file.relative_to(first) for file in files], shallow=False)
    return [str(name) for name in (*different, *missing)]


def serve(port: int, seed: int) -> None:
    """A server that fails one request in 30 and some weight syncs, and is killed within two minutes."""
    draw, server = random.Random(seed), FakeServer(port)
    server.faults = iter(lambda: draw.choices([None, 500, "cut off", "no answer"], weights=[97, 1, 1, 1])[0], "")
    for _ in range(draw.randrange(20, 240)):
        server.refuses_weights = draw.random() < 0.01
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def start(log: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work(*arguments)` in a fork of this process, with its output in `log` and its result as JSON beside it."""

    def run() -> None:
        with log.open("a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        log.with_suffix(".json").write_text(json.dumps(work(*arguments)))

    log.with_suffix(".json").write_text('{"failures": ["it did not come to its end"]}')
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def growth(series: Sequence[float]) -> float:
    """The relative growth of a series after its warm-up, 0.02 for 2 %. Medians disregard spikes and short cycles."""
    warm = series[int(WARM_UP * len(series)) :]
    quarter = max(1, len(warm) // 4)
    first, last = statistics.median(warm[:quarter]), statistics.median(warm[-quarter:])
    # From the middle of the first quarter to the middle of the last one.
    return (last / first - 1) / 0.75


def left_over(processes: list[psutil.Process], folder: Path, shared_memory: set[str]) -> dict[str, list[str]]:
    """Command lines of processes, files in the temporary folder, and shared memory that was not there before."""
    new = sorted(set(os.listdir("/dev/shm")) - shared_memory)
    return {
        "processes": [" ".join(process.cmdline())[:200] for process in processes],
        "temporary files": [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))],
        "shared memory": [name for name in new if name.startswith("fused-grpo")],
    }


def broken(result: dict[str, Any]) -> list[str]:
    """The bars that failed."""
    said = [f"{kind} left: {names}" for kind, names in result["left"].items() if names]
    for name, track in result["tracks"].items():
        said += [f"{name}: {failure}" for failure in track["failures"]]
        if track.get("growth", 0.0) > MAX_GROWTH:
            said.append(f"{name}: memory grew by {100 * track['growth']:.2f} % after the warm-up")
    return said


def soak(folder: Path, *, minutes: float, seed: int, vllm: bool) -> dict[str, Any]:
    """Run everything at once until the time is up, and return what was found."""
    shared_memory, deadline = set(os.listdir("/dev/shm")), time.monotonic() + 60 * minutes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start(folder / "server.log", serve, port, seed)
    tracks = {"killed": start(folder / "killed.log", kill_and_resume, folder / "killed", deadline, seed)}
    engines = {"steady": ("server", "transformers")} | ({"vllm": ("vllm",)} if vllm else {})
    for name, names in engines.items():
        tracks[name] = start(folder / f"{name}.log", train_steadily, folder / name, names, deadline, seed, port)
    memory: dict[str, list[int]] = {name: [] for name in engines}
    while (running := [name for name in tracks if tracks[name].is_alive()]) and time.monotonic() < deadline + OVERTIME:
        for name in memory.keys() & running:
            memory[name].append(psutil.Process(tracks[name].pid).memory_info().rss)
        time.sleep(1.0)
        if not server.is_alive():
            server = start(folder / "server.log", serve, port, seed := seed + 1)
    server.kill()
    server.join()
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in tracks}
    for name, series in memory.items():
        results[name]["growth"] = growth(series)
    # Workers of a trainer that has ended have some time to notice it.
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=5.0)
    leftovers = left_over(alive, folder / "tmp", shared_memory)
    for process in alive:
        process.kill()
    return {"tracks": results, "left": leftovers}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python scripts/soak.py", description="Train under faults for a while.")
    parser.add_argument("--minutes", type=float, default=30.0, help="duration; memory levels off after about ten")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the faults")
    parser.add_argument("--out", type=Path, default=Path("runs/soak.json"), help="file that the figures are written to")
    parser.add_argument("--vllm", action="store_true", help="also train with a real vLLM engine all the time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # PR_SET_CHILD_SUBREAPER: a process whose parent has ended becomes a child of this one.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="fused-grpo-soak-"))
    for name in ("tmp", "steady", "vllm", "killed"):
        (folder / name).mkdir()
    os.environ |= {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # Python would try the folder with a file of its own in each fork, and a kill between its two calls would leave it.
    tempfile.tempdir = os.environ["TMPDIR"]
    result = environment() | soak(folder, minutes=options.minutes, seed=options.seed, vllm=options.vllm)
    result["broken"] = broken(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(*(result["broken"] or ["all bars held"]), f"figures: {options.out}, logs: {folder}", sep="\n")
    if not result["broken"]:
        shutil.rmtree(folder)
    return int(bool(result["broken"]))


if __name__ == "__main__":
    sys.exit(main())
