"""Predicted times of GPUs, from predicted.json, which `predict.py` makes.

Needs the standard library alone, and can be loaded as a file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("predicted.json")


def predicted(plan: str, D: int, N: int, machine: str) -> float | None:
    """Milliseconds; None where nothing was predicted, or where memory runs out.

    Args:
        plan: the name that `plan_of` makes.
        D: the hidden size.
        N: the tokens that are scored; all have a gradient.
        machine: the name that `machine_of` finds.
    """
    ms: float | None = entry(plan, D, N, machine).get("ms")
    return ms


def entry(plan: str, D: int, N: int, machine: str) -> dict[str, Any]:
    """The entry of a trace: "ms", "device_ms" without the host, "launches", "waits", "peak" bytes beside the inputs."""
    facts: dict[str, Any] = content()["predicted"].get(machine, {}).get(plan, {}).get(shape_of(D, N), {})
    return facts


def seconds_of_work(implementation: str, work: Mapping[str, Any], device: str) -> float | None:
    """Seconds for a row of a result file, by `Work.described` and the device name of torch."""
    machine, file = machine_of(device), content()
    asked = (work["vocab"], work["dtype"], work["sequences"], work["idle"], work["uneven"])
    if machine is None or asked != (file["vocab"], file["dtype"], file["sequences"], 0.0, False):
        return None
    plan = plan_of(implementation, work["kind"], work["gradients"], work.get("several"), work.get("kept"))
    ms = predicted(plan, work["hidden"], work["tokens"], machine)
    return None if ms is None else ms / 1000


def plan_of(implementation: str, kind: str, gradients: str, several: int | None = None, kept: int | None = None) -> str:
    """`fused-grpo: loss, trainable`; K targets or the number of kept tokens follow: `..., K=8`, `..., 20 kept`."""
    more = (f", K={several}" if several else "") + (f", {kept} kept" if kept else "")
    return f"{implementation}: {kind}, {gradients}{more}"


def shape_of(D: int, N: int) -> str:
    return f"D={D},N={N}"


def machine_of(device: str) -> str | None:
    """The machine with this `torch.cuda.get_device_name()`; None if nothing was predicted of it."""
    machines: dict[str, dict[str, Any]] = content()["machines"]
    whole = (name for name, facts in machines.items() if device.startswith(facts["device"]) and "MIG" not in device)
    return next(whole, None)


@functools.cache
def content() -> dict[str, Any]:
    """The content of predicted.json."""
    loaded: dict[str, Any] = json.loads(PATH.read_text())
    return loaded
