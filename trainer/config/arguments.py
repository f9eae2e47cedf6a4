"""Arguments of `GRPOTrainer` that cannot be had: TRL's that are missing here, and what does not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fused_grpo.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from fused_grpo.trainer.config.grpo_config import GRPOConfig

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


def refuse_function_ahead(args: GRPOConfig | None, rollout_func: Any) -> None:
    """Raise where a function of the user's would run beside the training of the model that it may sample from."""
    if rollout_func is not None and args is not None and args.generate_ahead:
        raise InputError("got generate_ahead with rollout_func, want vLLM servers alone; fix: leave one of them out")
