"""Arguments of TRL's `GRPOTrainer` that this one does not have."""

from __future__ import annotations

from typing import Any

from fused_grpo.errors import UnsupportedError

MISSING = {
    "callbacks": "metrics are in metrics.jsonl and in trackers (report_to); checkpoints in save_steps",
    "tools": "rollout_func can run an agent",
    "environment_factory": "rollout_func can run an agent",
    "quantization_config": "load the quantized model yourself and pass it",
}


def refuse_missing(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for an argument of TRL's that is set, and TypeError for one that nobody has."""
    for name, value in arguments.items():
        if name not in MISSING:
            raise TypeError(f"GRPOTrainer got an unexpected keyword argument {name!r}")
        if value:
            raise UnsupportedError(f"got {name}, which this trainer does not have; fix: {MISSING[name]}")
