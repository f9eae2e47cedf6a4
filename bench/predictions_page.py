"""docs/predictions.md from predicted.json, and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fused_grpo.bench.predicted import plan_of, shape_of
from fused_grpo.bench.results_file import number_text
from fused_grpo.bench.suites import FLOOR
from fused_grpo.bench.tables import MISSING, markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "predictions.md"

TEMPLATE = """\
<!-- Made by {made_by}; do not edit. -->

# Predicted times, not measured ones

What a roofline says of the works that `make bench-gpu` measures, to hold measurements against. Nothing on this page was
measured. Each implementation ran on fake CUDA tensors, which have shapes and no numbers, and every operation that it
launched is given the longest of what its FLOP, its bytes and a launch take. What the model leaves out is in
[bench/predict.py](../bench/predict.py); a measurement should be a little above its prediction.

Vocabulary {vocab:,}, {dtype}, {sequences} sequences of one length, all tokens scored and all with a gradient. The loss
is dapo, with `old_logprobs`. `{floor}` are bare GEMMs: the logits, dH and dW as far as they are wanted, and the logits
once more for log-probs with a trainable head, unless all of them are kept, as full logits are. TRL is version 1.16; its
Triton kernels are traced as they are.

What is assumed of the machines. The FLOP/s are those of the vendor's GEMMs; one in Triton is assumed to reach
{triton_gemm:.0%} of them.

{machines}

```bash
.venv/bin/python -m fused_grpo.bench.predict --write    # a CUDA build of torch, and TRL; no GPU
```

Where torch with CUDA and TRL are not in the same environment, `--site-packages FOLDER` says where TRL is. Tests compare
`bench/predicted.json` with fresh traces, and the tables of a GPU's result file have a column of measured over predicted
times.

## {name}

Milliseconds, and in parentheses how many times the bare GEMMs. A dash: memory runs out.

{by_size}

### Launches, waits for the device, memory

D={D}, N={N}; memory is the most bytes at a time beside the inputs, gradients among them.

{facts}

### Where the time goes

D={D}, N={N}; operations that take less than 0.3 % are added up.

{operations}

## Other machines

Milliseconds, and in parentheses how many times the bare GEMMs, at N={N}.

{others}
"""


def render(content: Mapping[str, Any]) -> str:
    """The page."""
    name, *others = content["machines"]
    ((shape, operations),) = content["operations"][name].items()
    D, N = (int(part.partition("=")[2]) for part in shape.split(","))
    times = content["predicted"][name]
    return TEMPLATE.format(
        **{key: content[key] for key in ("made_by", "vocab", "dtype", "sequences", "triton_gemm")},
        floor=FLOOR,
        name=name,
        D=D,
        N=N,
        machines=machines_table(content["machines"]),
        by_size="\n\n".join(size_table(times, size) for size in sizes_of(times)[0]),
        facts=facts_table(times, shape),
        operations="\n\n".join(operations_table(plan, rows) for plan, rows in operations.items()),
        others=others_table({name: content["predicted"][name] for name in others}, N),
    )


def sizes_of(times: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Every D and every N."""
    shapes = [shape.split(",") for shape in next(iter(times.values()))]
    found = ([int(part[place].partition("=")[2]) for part in shapes] for place in (0, 1))
    D, N = (list(dict.fromkeys(values)) for values in found)
    return D, N


def machines_table(machines: Mapping[str, Any]) -> str:
    header = ["", "memory (GiB)", "TFLOP/s", "TB/s", "launch (µs)"]
    lines = [
        [name, f"{m['memory'] / 2**30:g}", f"{m['flops'] / 1e12:g}", f"{m['bytes_per_s'] / 1e12:g}", launch_text(m)]
        for name, m in machines.items()
    ]
    return markdown(header, lines)


def launch_text(machine: Mapping[str, Any]) -> str:
    return f"{machine['launch_s'] * 1e6:g}"


def size_table(times: Mapping[str, Any], D: int) -> str:
    tokens = sizes_of(times)[1]
    lines = [[plan, *(cell(times, plan, shape_of(D, N)) for N in tokens)] for plan in times]
    return f"### D={D}\n\n" + markdown(["", *(f"N={N:,}" for N in tokens)], lines)


def cell(times: Mapping[str, Any], plan: str, shape: str) -> str:
    """`42.4 (1.10)`."""
    contender, _, work = plan.partition(": ")
    ms, floor = times[plan][shape]["ms"], times[plan_of(FLOOR, *work.split(", "))][shape]["ms"]
    if ms is None:
        return MISSING
    return number_text(ms) if contender == FLOOR or floor is None else f"{number_text(ms)} ({ms / floor:.2f})"


def facts_table(times: Mapping[str, Any], shape: str) -> str:
    rows = {plan: shapes[shape] for plan, shapes in times.items()}
    lines = [[p, str(f["launches"]), str(f["waits"]), f"{f['peak'] / 2**30:.2f}"] for p, f in rows.items()]
    return markdown(["", "launches", "waits", "memory (GiB)"], lines)


def operations_table(plan: str, rows: list[list[Any]]) -> str:
    total = sum(ms for _, _, ms in rows)
    large = [row for row in rows if row[2] >= 0.003 * total]
    small = rows[len(large) :]
    lines = [[f"`{name}`", str(count), number_text(ms), f"{ms / total:.1%}"] for name, count, ms in large]
    rest = sum(ms for _, _, ms in small)
    lines.append(["others", str(sum(count for _, count, _ in small)), number_text(rest), f"{rest / total:.1%}"])
    return markdown([plan, "launches", "ms", "share"], lines)


def others_table(times: Mapping[str, Any], N: int) -> str:
    """A column for each machine and D."""
    columns = [(name, D) for name in times for D in sizes_of(times[name])[0]]
    plans = next(iter(times.values()))
    lines = [[plan, *(cell(times[name], plan, shape_of(D, N)) for name, D in columns)] for plan in plans]
    return markdown(["", *(f"{name}, D={D}" for name, D in columns)], lines)
