"""All tests whose result another CPU's arithmetic may change: `make test-cpus` prints a table.

Three libraries select their code by the CPU: PyTorch's own kernels, MKL (fp32 and fp64 GEMMs) and oneDNN (bf16 GEMMs,
for autocast and vLLM). An environment variable of each selects the code of another CPU. That code, or another number of
threads, sums in another order. The table has one row per value of a variable: all of them, or those whose names are
given (ROWS of make). A row whose instructions this CPU does not have is marked as left out.

"bits" is a digest of a few sums under that row: if it differs from that of the first row, other code has run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

# What a row leaves out, by path or by name, and why. It runs all other tests: a new one is in without a change here.
LEFT_OUT = {
    "needs a GPU, or plays one that does not compute": (
        *("gpu", "fake_cuda", "test_device_run.py", "test_gpu_first.py"),
        *(f"bench/test_gpu_{name}.py" for name in ("page", "peers", "timings", "training")),
    ),
    "compiles for GPUs, or executes what was compiled instruction by instruction": (
        *("ptx", "kernels/test_compile.py", "kernels/test_tuning.py"),
    ),
    "runs the tests of other files, with a bug in the code": ("test_planted_bugs.py",),
    "measures bytes or seconds, not results": (
        *("ops/test_memory.py", "trainer/models/test_memory_estimate.py", "trainer/collect/test_pace.py"),
    ),
    "is about processes that are killed": (
        *(f"faults/test_{name}.py" for name in ("alike", "disk_full", "episode_kills", "hostile_checkpoints")),
        *(f"faults/test_{name}.py" for name in ("kills", "leftovers", "peers", "rewards", "starts", "tools")),
        *("security", "test_fork_server.py", "bench/test_worker_pool.py", "trainer/rewards/test_isolation.py"),
        *("trainer/episodes/test_isolated_tools.py", "trainer/engines/test_vllm_process.py"),
    ),
    "is about files, options and texts": (
        *("trainer/cli", "trainer/common", "trainer/config", "trainer/collect/test_start_checks.py"),
        *("trainer/checkpoint/test_output_dir.py", "hostile/test_commands.py", "hostile/test_config.py"),
        *("bench/test_charts.py", "bench/test_pages.py", "bench/test_published_runs.py"),
        *("test_house_style.py", "test_package.py", "test_page_imports.py", "test_signatures.py", "test_slips.py"),
    ),
}
# By variable, on a CPU with AMX: vLLM computes small products in bf16 with it whatever oneDNN may use, asks oneDNN for
# its kernels, and aborts. A CPU without AMX takes other code.
ABORT_WITH_AMX = {"ONEDNN_MAX_CPU_ISA": ["--ignore=tests/trainer/engines/test_sampling_dtype.py"]}
TESTS = ["tests", *(f"--ignore=tests/{path}" for paths in LEFT_OUT.values() for path in paths)]

# GEMMs of each type, attention, sums, and functions that are approximated; of a size at which MKL selects its code for
# small ones, and of one at which another order shows in bf16 and two threads share a row.
DIGEST = """
import hashlib, torch
from torch.nn import functional as F
made = []
for n, m, k in ((64, 99, 257), (300, 400, 2570)):
    x, w = (torch.arange(rows * k).reshape(rows, k).mul(0.7).sin() for rows in (n, m))
    made += [x @ w.t(), x.bfloat16() @ w.bfloat16().t(), x.half() @ w.half().t(), x.double() @ w.double().t()]
    made += [x.softmax(1), x.sum(1), x.exp(), F.silu(x), F.scaled_dot_product_attention(*(w[None, None],) * 3)]
print(hashlib.sha256(b"".join(y.double().numpy().tobytes() for y in made)).hexdigest()[:6])
"""


class Row(NamedTuple):
    variable: str
    value: str
    needs: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.variable}={self.value}"


ROWS = [
    Row("OMP_NUM_THREADS", "1"),
    Row("OMP_NUM_THREADS", "2"),
    Row("ATEN_CPU_CAPABILITY", "default"),
    Row("ATEN_CPU_CAPABILITY", "avx2", frozenset({"avx2"})),
    Row("ATEN_CPU_CAPABILITY", "avx512", frozenset(AVX512)),
    Row("MKL_CBWR", "COMPATIBLE"),
    Row("MKL_CBWR", "AVX2", frozenset({"avx2"})),
    Row("MKL_CBWR", "AVX512", frozenset(AVX512)),
    Row("ONEDNN_MAX_CPU_ISA", "SSE41"),
    Row("ONEDNN_MAX_CPU_ISA", "AVX2", frozenset({"avx2"})),
]


def main(arguments: list[str]) -> int:
    """Run the rows that are named, or all, with three workers each; other arguments are pytest's."""
    named = [row for row in ROWS if row.name in arguments]
    options = [argument for argument in arguments if argument not in {row.name for row in named}]
    flags, model = this_cpu()
    print(f"{model}\n\n| row | bits | passed | failed | skipped | minutes |\n|---|---|---:|---:|---:|---:|", flush=True)
    failed = 0
    for row in named or ROWS:
        if missing := row.needs - flags:
            print(f"| {row.name} | | not on this CPU, which has no {', '.join(sorted(missing))} | | | |", flush=True)
            continue
        # A fresh cache: the code in PyTorch's compiler cache is for the instructions of another row.
        cache = tempfile.mkdtemp()
        # Threads that wait in a loop take the cores of those that compute: there are more than cores.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHINDUCTOR_CACHE_DIR": cache}
        env[row.variable] = row.value
        bits = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True)
        aborting = ABORT_WITH_AMX.get(row.variable, []) if "amx_tile" in flags else []
        is_green, figures = run_tests(sys.executable, [*TESTS, *aborting, *options], env=env)
        shutil.rmtree(cache)
        failed += not is_green
        print(f"| {row.name} | {bits.stdout.strip()} | {' | '.join(map(str, figures))} |", flush=True)
    return failed


def run_tests(
    python: str | Path, tests: Sequence[str], *, env: dict[str, str]
) -> tuple[bool, tuple[int, int, int, str]]:
    """Whether pytest was green; (passed, failed, skipped, minutes). Prints the output of a run that failed."""
    start = time.monotonic()
    command = [python, "-m", "pytest", "-q", "--numprocesses=3", "--dist=loadfile", *tests]
    process = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        print(process.stdout, file=sys.stderr)
    summary = process.stdout.strip().rpartition("\n")[2]
    passed, failed, errors, skipped = (
        sum(map(int, re.findall(rf"(\d+) {what}", summary))) for what in ("passed", "failed", "error", "skipped")
    )
    return not process.returncode, (passed, failed + errors, skipped, f"{(time.monotonic() - start) / 60:.1f}")


def this_cpu() -> tuple[set[str], str]:
    """(the instruction sets, the name) of this CPU."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    return set(fields.get("flags", "").split()), fields.get("model name", "a CPU without a name")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
