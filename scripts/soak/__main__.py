"""A soak: `python scripts/soak --minutes 30 --seed 0 --vllm`. Exits with 1 where a bar did not hold.

Side by side, each process with one thread:

    steady    one process that trains all the time, with transformers and with a server in turn, and meets faults
    vllm      one trainer with a real vLLM engine in its process, all the time, with reward faults (--vllm)
    killed    a run that is killed and resumed until it ends where the undisturbed one does
    server    stands in for vLLM: it fails now and then, and is itself killed and started again

The bars: memory of the first two grows by 2 % at most after their warm-up; every fault ends in its error or in none;
killed runs equal the undisturbed one bit for bit; no process, file, thread, descriptor or shared memory is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Before anything imports torch.
os.environ |= dict.fromkeys(THREADS, "1") | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}

from bars import broken, growth, thinned  # noqa: E402
from machine import described  # noqa: E402
from processes import adopt_orphans, command, descendants, ended, preload, resident, start  # noqa: E402

OVERTIME = 240.0  # seconds after the end in which everything has to have stopped
SHARED_MEMORY = Path("/dev/shm")


class Server:
    """The stand-in for vLLM, killed now and then and started again."""

    def __init__(self, folder: Path, seed: int) -> None:
        from server import serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._serve, self._folder, self._random = serve, folder, random.Random(seed)
        self.counts, self.kills = folder / "server-faults.json", 0
        self.pid: int | None = None
        self._next = 0.0
        self.tick()

    def tick(self) -> None:
        """Start it where it is down long enough, kill it where it is up long enough."""
        if time.monotonic() < self._next:
            return
        if self.pid is None:
            seed = self._random.getrandbits(32)
            self.pid = start(self._serve, self.port, seed, self.counts, log=self._folder / "server.log")
            self._next = time.monotonic() + 10 + self._random.expovariate(1 / 60)
        else:
            self.stop()
            self.kills += 1
            self._next = time.monotonic() + self._random.uniform(0, 3)

    def stop(self) -> None:
        """kill -9."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            ended(self.pid, within=10)
            self.pid = None


def main() -> int:
    """Run, write what was found, and say whether it is good."""
    parser = argparse.ArgumentParser(prog="python scripts/soak", description="Train under faults for a while.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak.json"))
    parser.add_argument("--vllm", action="store_true", help="beside the others, a real vLLM engine all the time")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fused-grpo-soak-"))
    command = f"python scripts/soak --minutes {options.minutes:g} --seed {options.seed}{' --vllm' * options.vllm}"
    found = {"command": command, "minutes": options.minutes, "seed": options.seed, **described()}
    found |= soaked(folder, options)
    found["broken"] = broken(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(found["broken"]) or "every bar held", f"figures: {options.out}", sep="\n")
    shutil.rmtree(folder) if not found["broken"] else print(f"logs: {folder}")
    return int(bool(found["broken"]))


def soaked(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at once, until the time is up and all have stopped."""
    adopt_orphans()
    (folder / "tmp").mkdir()
    os.environ |= {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    tempfile.tempdir = None
    preload()
    shared = set(os.listdir(SHARED_MEMORY))
    server = Server(folder, options.seed)
    tracks = start_tracks(folder, options, server.port)
    series = watch(tracks, server, until=time.monotonic() + 60 * options.minutes + OVERTIME)
    server.stop()
    time.sleep(2.0)
    found: dict[str, Any] = {"tracks": {name: result(folder / f"{name}.json") for name in tracks}}
    for name in series:
        found["tracks"][name]["memory"] = memory(series[name])
    found["server"] = {"kills": server.kills, "faults": result(server.counts)}
    found["left"] = left_over(folder, shared)
    return found


def start_tracks(folder: Path, options: argparse.Namespace, port: int) -> dict[str, int]:
    from killed import rounds
    from steady import Steady

    deadline, seed = time.monotonic() + 60 * options.minutes, options.seed
    work: dict[str, Any] = {
        "steady": Steady(folder / "steady", ("transformers", "server"), deadline, seed, port),
        "killed": lambda: rounds(folder / "killed", deadline, seed),
    }
    if options.vllm:
        work["vllm"] = Steady(folder / "vllm", ("vllm",), deadline, seed, fatal=False)
    for name in work:
        (folder / name).mkdir()
    return {name: start(call, log=folder / f"{name}.log") for name, call in work.items()}


def watch(tracks: dict[str, int], server: Server, *, until: float) -> dict[str, list[int]]:
    """Memory of the long-lived processes, once a second until all have ended; who goes on after `until` is killed."""
    series: dict[str, list[int]] = {name: [] for name in tracks if name != "killed"}
    running = dict(tracks)
    while running:
        server.tick()
        for name, pid in list(running.items()):
            late = time.monotonic() > until
            if late:
                os.kill(pid, signal.SIGKILL)
            if ended(pid, within=5.0 if late else 0.0) is not None:
                del running[name]
            elif name in series:
                series[name].append(resident(pid) or 0)
        time.sleep(1.0)
    return series


def memory(series: list[int]) -> dict[str, Any]:
    mebibytes = [round(value / 2**20, 1) for value in thinned(series, 60)]
    return {"growth": round(growth(series), 5), "samples": len(series), "mebibytes": mebibytes}


def left_over(folder: Path, shared: set[str]) -> dict[str, list[str]]:
    """Processes, temporary files and shared memory that nobody has cleaned up."""
    new = [name for name in sorted(set(os.listdir(SHARED_MEMORY)) - shared) if name.startswith("fused-grpo")]
    running = descendants(os.getpid())
    found = {
        "processes": [command(pid) for pid in running],
        "temporary files": sorted(str(path.relative_to(folder / "tmp")) for path in (folder / "tmp").rglob("*"))[:20],
        "shared memory": [name for name in new if (SHARED_MEMORY / name).exists()],
    }
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return found


def result(path: Path) -> dict[str, Any]:
    """What a track has written; where it died before, that it is so."""
    if not path.exists():
        return {} if path.name == "server-faults.json" else {"wrong": ["it did not come to its end"]}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
