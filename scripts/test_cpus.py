"""The tests that compare numbers or learn, computed as on other CPUs: `make test-cpus` prints a table.

Three libraries select their code by the CPU: PyTorch's own kernels, MKL (fp32 and fp64 GEMMs) and oneDNN (bf16 GEMMs,
for autocast and vLLM). An environment variable of each selects the code of another CPU. That code, or another number of
threads, sums in another order. The table has one row per value of a variable. A row whose instructions this CPU does
not have is marked as left out.

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

# The ops, the drop-ins, tests of the trainer that compare two trainings, and all that say that a run learns.
LEARNING = ["tests/test_demo.py::test_the_demo_trains_with_vllm_and_reports_held_out_accuracy"]
LEARNING += ["tests/test_examples.py", "tests/trainer/recipes/test_arithmetic.py"]
LEARNING += ["tests/trainer/recipes/test_calculator.py"]
LEARNING += [f"tests/trainer/episodes/test_{name}.py" for name in ("combinations", "several_processes")]
LEARNING += [f"tests/trainer/test_{name}.py" for name in ("distillation", "loss_options", "optimizer")]
TESTS = ["tests/ops", "tests/integrations", *LEARNING] + [
    f"tests/trainer/{name}"
    for name in (
        *(
            "batching",
            "collect",
            "distributed",
            "models",
            "checkpoint/test_resume.py",
            "test_loop.py",
            "test_construction.py",
        ),
        *("test_packed_equals_padded.py", "test_textbook.py"),
    )
]

# Both kinds of GEMM, a sum, and a function that is approximated.
DIGEST = """
import hashlib, torch
x, w = (torch.arange(n * 257).reshape(n, 257).mul(0.7).sin() for n in (64, 99))
made = [x @ w.t(), (x.bfloat16() @ w.bfloat16().t()).float(), x.softmax(1), x.sum(1), x.double() @ w.double().t()]
print(hashlib.sha256(b"".join(y.numpy().tobytes() for y in made)).hexdigest()[:6])
"""


class Row(NamedTuple):
    variable: str
    value: str
    needs: frozenset[str] = frozenset()


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
    """Run pytest with these arguments for each row, with three workers."""
    flags, model = this_cpu()
    print(f"{model}\n\n| row | bits | passed | failed | skipped | minutes |\n|---|---|---:|---:|---:|---:|", flush=True)
    failed = 0
    for row in ROWS:
        name = f"{row.variable}={row.value}"
        if missing := row.needs - flags:
            print(f"| {name} | | not on this CPU, which has no {', '.join(sorted(missing))} | | | |", flush=True)
            continue
        # A fresh cache: the code in PyTorch's compiler cache is for the instructions of another row.
        cache = tempfile.mkdtemp()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache, row.variable: row.value}
        bits = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True)
        is_green, figures = run_tests(sys.executable, [*TESTS, *arguments], env=env)
        shutil.rmtree(cache)
        failed += not is_green
        print(f"| {name} | {bits.stdout.strip()} | {' | '.join(map(str, figures))} |", flush=True)
    return failed


def run_tests(
    python: str | Path, tests: Sequence[str], *, env: dict[str, str]
) -> tuple[bool, tuple[int, int, int, str]]:
    """Whether pytest was green; (passed, failed, skipped, minutes). Prints the output of a run that failed."""
    start = time.monotonic()
    command = [python, "-m", "pytest", "-q", "--numprocesses=3", "--dist=loadfile", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    summary = done.stdout.strip().rpartition("\n")[2]
    passed, failed, errors, skipped = (
        sum(map(int, re.findall(rf"(\d+) {what}", summary))) for what in ("passed", "failed", "error", "skipped")
    )
    return not done.returncode, (passed, failed + errors, skipped, f"{(time.monotonic() - start) / 60:.1f}")


def this_cpu() -> tuple[set[str], str]:
    """(the instruction sets, the name) of this CPU."""
    found = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in found.items()}
    return set(fields.get("flags", "").split()), fields.get("model name", "a CPU without a name")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
