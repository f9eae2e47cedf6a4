"""The `Accelerator` of a run."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from transformers.trainer_utils import enable_full_determinism
from transformers.utils.import_utils import enable_tf32
from transformers.utils.logging import log_levels, set_verbosity

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.run_output import tracker_arguments
from fused_grpo.trainer.models.loading import wants_bf16

DDP_OPTIONS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def make_accelerator(args: GRPOConfig) -> Accelerator:
    """Accelerate, configured by the options and the launcher's environment."""
    _set_process_options(args)
    ddp = {name.removeprefix("ddp_"): getattr(args, name) for name in DDP_OPTIONS if getattr(args, name) is not None}
    backend = {} if args.ddp_backend is None else {"backend": args.ddp_backend}
    accelerator = Accelerator(
        mixed_precision="bf16" if wants_bf16(args) else "no",
        # Without it, Accelerate on a machine without an accelerator lets every rank train by itself.
        cpu=args.use_cpu or not torch.accelerator.is_available(),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=args.ddp_timeout), **backend),
            DistributedDataParallelKwargs(**ddp),
        ],
        **tracker_arguments(args),
    )
    level = args.log_level if accelerator.is_main_process else args.log_level_replica
    # As in transformers, "warning" is the level without any option.
    if level != "passive" and (accelerator.is_main_process or level != "warning"):
        number = log_levels[level]
        logging.getLogger("fused_grpo").setLevel(number)
        set_verbosity(number)
    return accelerator


def _set_process_options(args: GRPOConfig) -> None:
    """What holds for the whole process."""
    if args.full_determinism:
        enable_full_determinism(args.seed)
    if args.tf32 is not None:
        enable_tf32(args.tf32)
