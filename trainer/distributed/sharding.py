"""FSDP2, as Accelerate runs it: how a policy is divided among processes, and its weights made whole again.

Each decoder layer is gathered when it is used. Embedding, last norm and head stay with the root, tied or not: the loss
reads the head's weight inside the root's forward, where it is a plain tensor and its gradient is reduced with the rest.
A reference is divided as the policy is.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fused_grpo.errors import UnsupportedError

M = TypeVar("M", bound=nn.Module)


def prepare_sharding(accelerator: Accelerator) -> None:
    """Have FSDP2 keep what the loss is given as it is, and sum gradients in fp32; nothing to do without FSDP.

    Raises:
        UnsupportedError: DeepSpeed, FSDP 1, or weights that the first process alone has read.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UnsupportedError(
            "got DeepSpeed, want DDP or FSDP2: Accelerate has it move the weights inside the backward pass of every "
            "micro-batch, where a step is neither whole nor checked; fix: accelerate launch --config_file fsdp2.yaml"
        )
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin: Any = accelerator.state.fsdp_plugin
    if not accelerator.is_fsdp2:
        raise UnsupportedError(
            "got FSDP 1, want FSDP2: the older one hides parameters from the loss; fix: fsdp_version: 2 in fsdp_config"
        )
    if plugin.cpu_ram_efficient_loading:
        raise UnsupportedError(
            "got fsdp_cpu_ram_efficient_loading, want every process to read the weights: each tries them before they "
            "are divided; fix: fsdp_cpu_ram_efficient_loading: false in fsdp_config"
        )
    if plugin.mixed_precision_policy is not None:
        # By default it rounds inputs as well, old log-probs and advantages among them, and the loss that comes out.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=plugin.mixed_precision_policy.param_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )


def shard_like_policy(accelerator: Accelerator, module: M) -> M:
    """A module that is not trained, where this process runs it: divided under FSDP2, whole otherwise."""
    if not accelerator.is_fsdp2:
        return module.to(accelerator.device)
    divided: M = fsdp2_prepare_model(accelerator, module)
    return divided


def reshard(module: nn.Module) -> None:
    """Give back what a forward pass without a backward has left gathered: the root of a module under FSDP2."""
    if isinstance(module, FSDPModule):
        module.reshard()


def is_divided(weight: Tensor) -> bool:
    """Whether it is a DTensor, of which a process has no more than a part."""
    return isinstance(weight, DTensor)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a module, its divided tensors gathered to the CPU one by one. Names that share one still do.

    Where some are divided, every process has to ask.
    """
    whole: dict[int, Tensor] = {}
    # The parameters themselves, because a tied one has to be known again.
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for value in state.values():
        if is_divided(value) and id(value) not in whole:
            whole[id(value)] = value.detach().full_tensor().cpu()
    return {name: whole.get(id(value), value).detach() for name, value in state.items()}
