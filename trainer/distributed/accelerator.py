"""The `Accelerator` of a run."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.trackers import tracker_arguments
from fused_grpo.trainer.models.loading import wants_bf16


def make_accelerator(args: GRPOConfig) -> Accelerator:
    """Accelerate, configured by the options and the launcher's environment."""
    return Accelerator(
        mixed_precision="bf16" if wants_bf16(args) else "no",
        # Without it, Accelerate on a machine without an accelerator lets every rank train by itself.
        cpu=not torch.accelerator.is_available(),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.ddp_timeout))],
        **tracker_arguments(args),
    )
