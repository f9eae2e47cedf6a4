"""DDP and FSDP2: how ranks are connected, and a policy is sharded across them (docs/scaling-out.md).

Embedding, last norm and head stay with the root: the loss reads the head's weight inside the root's forward, where it
is a plain tensor and its gradient is reduced with the rest.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, fsdp2_prepare_model
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_utils import enable_full_determinism
from transformers.utils.import_utils import enable_tf32
from transformers.utils.logging import log_levels, set_verbosity

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed.failures import all_ranks_succeed, gather_objects, report_failure
from fused_grpo.trainer.logging.console import progress
from fused_grpo.trainer.logging.run_output import tracker_arguments
from fused_grpo.trainer.models.loading import fingerprint, wants_bf16

M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger(__name__)
# Schedulers and containers set some of them for every process.
LAUNCHED = (
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED"),
    *(f"{mpi}_{of}" for mpi in ("PMI", "OMPI_COMM_WORLD", "MV2_COMM_WORLD") for of in ("SIZE", "RANK")),
)
REPLACING = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_FP8_BACKEND")
# Variables of `accelerate launch` that are "true" -> what they ask for.
REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed, which Accelerate has update the weights inside the backward pass of every "
    "micro-batch, before the step is complete and checked",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM, which has a model and a step of its own",
}
COMPARED, APART = 4, 1e-3  # values of each weight, and a share of the largest of them
SPLITTING = ("TP", "CP", "SP")  # parallelism in which ranks share the sequences of a batch
STARTING = "starting"
LAST_SECONDS = timedelta(seconds=30)
DDP_OPTIONS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def make_accelerator(args: GRPOConfig) -> Accelerator:
    """Accelerate, configured by the options and the launcher's environment.

    UnavailableError where Accelerate raises anything; UnsupportedError as `check_launch`.
    """
    with before_ranks_connect(args):
        options = _options(args)
    launched = {name: os.environ[name] for name in LAUNCHED if name in os.environ}  # Accelerate sets others of them
    processes = os.environ.get("WORLD_SIZE", "1")  # another job may have left it: then no others come
    words = f"waiting for the {processes} processes of WORLD_SIZE at {os.environ.get('MASTER_ADDR')}"
    try:
        with nullcontext() if processes == "1" else progress(words):
            accelerator = Accelerator(**options)
    except Exception as error:
        # What is half done would fail again in the next cell of a notebook.
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in set(LAUNCHED).difference(launched):
            os.environ.pop(name, None)
        given = " ".join(f"{name}={value!r}" for name, value in launched.items())
        if isinstance(error, distributed.DistError) and processes != "1":
            raise UnavailableError(
                f"got {error} from a rank that waited for the others with {given}, want all {processes} to come within "
                f"ddp_timeout={args.ddp_timeout}; fix: the log of one that did not says why it ended before; or unset "
                "these variables where another job left them"
            ) from error
        raise UnavailableError(
            f"got {type(error).__name__} from Accelerate ({error}) with {given or 'no variable of a launcher'}, want "
            "all variables of a launcher or none; fix: torchrun or accelerate launch, or unset them; else what it says"
        ) from error
    if accelerator.num_processes > 1:
        with report_failure(accelerator), all_ranks_succeed(accelerator, STARTING):
            pass  # here; another rank may have failed before it connected
    if is_on("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        warn_once("got FSDP2, which Accelerate has on several accelerators alone: nothing is sharded; fix: DDP")
    level = args.log_level if accelerator.is_main_process else args.log_level_replica
    # As in transformers, "warning" is the level without any option.
    if level != "passive" and (accelerator.is_main_process or level != "warning"):
        number = log_levels[level]
        logging.getLogger("fused_grpo").setLevel(number)
        set_verbosity(number)
    return accelerator


def _options(args: GRPOConfig) -> dict[str, Any]:
    """The arguments of `Accelerator`, and what is set for this process before there is one."""
    check_launch(args)
    check_backend(args)
    if args.full_determinism:
        enable_full_determinism(args.seed)
    if args.tf32 is not None:
        enable_tf32(args.tf32)
    ddp = {name.removeprefix("ddp_"): getattr(args, name) for name in DDP_OPTIONS if getattr(args, name) is not None}
    AcceleratorState._reset_state()  # as transformers: a cell that runs again may ask for another precision
    return {
        "mixed_precision": "bf16" if wants_bf16(args) else "no",
        "cpu": args.trains_on_cpu,
        "kwargs_handlers": [
            InitProcessGroupKwargs(**args.process_group_options()),
            DistributedDataParallelKwargs(**ddp),
        ],
        # Without it, a variable of `accelerate launch` divides every loss: ours are of the whole step.
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1),
        **tracker_arguments(args),
    }


@contextmanager
def before_ranks_connect(args: GRPOConfig) -> Iterator[None]:
    """Around what a rank does alone before it connects: where it raises, the others get the error instead of waiting.

    They wait in `make_accelerator`, and this rank at most LAST_SECONDS for them. Of what a script raises before it
    calls us they learn nothing: its launcher ends them, or ddp_timeout does.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get("WORLD_SIZE", "1") != "1" and (state := _last_connection(args, error)) is not None:
            with report_failure(state), all_ranks_succeed(state, STARTING):
                raise
        raise


def _last_connection(args: GRPOConfig, error: Exception) -> Any:
    """Accelerate's state of a rank that only has an error to report; None where the others do not come."""
    _log.error("%s: %s; telling the other ranks", type(error).__name__, error)
    try:  # what cannot be used may be an option of the connection
        timeout = min(timedelta(seconds=args.ddp_timeout), LAST_SECONDS)
        backend = None if args.trains_on_cpu else args.ddp_backend
        state = PartialState(args.trains_on_cpu, timeout=timeout, backend=backend)
    except Exception:
        PartialState._reset_state()
        return None
    return state if distributed.is_initialized() else None


def check_backend(args: GRPOConfig) -> None:
    """InputError for a `ddp_backend` that several processes on this device would not get: Accelerate takes another."""
    if args.ddp_backend is None or args.world_size == 1 or not args.trains_on_cpu:
        return
    backends = ("gloo", *["mpi"] * distributed.is_mpi_available())
    if args.ddp_backend not in backends:
        raise InputError(
            f"got ddp_backend={args.ddp_backend!r} on a CPU, want {' or '.join(backends)}, or None for the one of the "
            "device; fix: ddp_backend=None, or a GPU where there should be one (use_cpu, CUDA_VISIBLE_DEVICES)"
        )


def is_on(name: str) -> bool:
    """Whether a variable of the environment is true, as Accelerate reads it."""
    return os.environ.get(name, "").lower() == "true"


def check_launch(args: GRPOConfig) -> None:
    """Check what a launcher asks Accelerate for, before ranks wait for each other.

    UnsupportedError for what compiles the policy, replaces its layers, or shares a batch otherwise than DDP and FSDP2.
    InputError for activations that Accelerate is to recompute where the trainer's own options do not say so.
    A warning where Slurm has started several processes that will not find each other.
    """
    for name in REPLACING:
        if (value := os.environ.get(name, "no")).lower() not in ("", "no"):
            raise UnsupportedError(
                f"got {name}={value!r}, by which Accelerate wraps or replaces the policy's layers, want them as they "
                f"are; fix: unset {name} (in a configuration of accelerate: no dynamo_config and no fp8_config)"
            )
    for name, what in REFUSED.items():
        if is_on(name):
            raise UnsupportedError(
                f"got {what}; want DDP or FSDP2; fix: accelerate launch --config_file fsdp2.yaml, or unset {name}"
            )
    if is_on("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UnsupportedError(
            "got FSDP 1, want FSDP2: the older one hides parameters from the loss; fix: fsdp_version: 2 in fsdp_config"
        )
    if is_on("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_AUTO_WRAP_POLICY") == "SIZE_BASED_WRAP":
        raise UnsupportedError(
            "got SIZE_BASED_WRAP, by which FSDP2 shards lists of layers, which it refuses, and the head apart from its "
            "loss; want a group for each layer; fix: fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        )
    checkpoints = is_on("ACCELERATE_USE_FSDP") and is_on("FSDP_ACTIVATION_CHECKPOINTING")
    offloads = checkpoints and is_on("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
    if (checkpoints and not args.gradient_checkpointing) or (
        offloads and not (args.gradient_checkpointing_kwargs or {}).get("offload")
    ):
        fix = "gradient_checkpointing=True" + ', gradient_checkpointing_kwargs={"offload": True}' * offloads
        raise InputError(
            f"got fsdp_activation_checkpointing{'_offload' * offloads} of Accelerate, want the trainer's own option, "
            f"which recomputes the same layers; fix: {fix}, or false in fsdp_config"
        )
    sizes = {name: os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1") for name in SPLITTING}
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG") and set(sizes.values()) != {"1"}:
        raise UnsupportedError(
            f"got parallelism of {', '.join(f'{name} {size}' for name, size in sizes.items())}, want 1 of each: every "
            "rank has sequences of its own here; fix: no tp_size, cp_size and sp_size in parallelism_config"
        )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "WORLD_SIZE" not in os.environ:
        warn_once(
            f"got {tasks} processes from srun and no WORLD_SIZE, by which they would find each other: each is a run of "
            "its own; fix: srun with one task on each machine, which starts torchrun or accelerate launch"
        )


def prepare_sharding(accelerator: Accelerator) -> None:
    """Make FSDP2 pass the inputs of the loss unrounded and sum gradients in fp32, and wrap no layer but to shard it."""
    plugin: Any = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is None:
        return
    plugin.activation_checkpointing = False  # `gradient_checkpointing` does it, and no module gets another name
    if plugin.mixed_precision_policy is not None:
        # By default it rounds inputs as well, old log-probs and advantages among them, and the loss that comes out.
        options: Any = {"reduce_dtype": torch.float32, "output_dtype": None, "cast_forward_inputs": False}
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, **options)


def prepare(accelerator: Accelerator, policy: nn.Module, optimizer: Any) -> Any:
    """As Accelerate's, with the state of each parameter that some optimizers make at once, such as Adagrad.

    FSDP2 puts shards into the places of the parameters, and Accelerate leaves their state with these.
    """
    if not accelerator.is_fsdp2:
        return accelerator.prepare(policy, optimizer)
    states = [optimizer.state.pop(parameter, None) for group in optimizer.param_groups for parameter in group["params"]]
    policy, optimizer = accelerator.prepare(policy, optimizer)
    _check_groups(policy)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter, state in zip(parameters, states, strict=True):
        if state is not None:
            full = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
            optimizer.state[parameter] = state | {name: as_shards(value, parameter) for name, value in full.items()}
    return policy, optimizer


def _check_groups(policy: Any) -> None:
    """InputError where FSDP2 has the head in a group of a layer: the loss reads its weight in the group of the root."""
    weight = policy.model.get_output_embeddings().weight
    groups = {name: one for name, one in policy.named_modules() if name and isinstance(one, FSDPModule)}
    for name, module in cast("dict[str, nn.Module]", groups).items():
        if any(one is weight for one in module.parameters()):
            raise InputError(
                f"got a group of FSDP2 for {name}, which has the head's weight, want that in the group of the root, "
                "where the loss reads it; fix: decoder layers alone in fsdp_transformer_layer_cls_to_wrap"
            )


def as_shards(full: Tensor, like: Tensor | None) -> Tensor:
    """A full tensor on the device of `like` and, where that has the same shape and is sharded, in shards like it."""
    if isinstance(like, DTensor) and like.shape == full.shape:
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements)
    return full if like is None else full.to(like.device)


def same_weights(accelerator: Accelerator, what: str, model: Any) -> str:
    """The `fingerprint` of a model of which each rank keeps its own weights; InputError where they are not rank 0's.

    Under FSDP2 rank 0 may be the only one that has read them: then all get its. A collective.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    is_read = accelerator.is_main_process or plugin is None or not plugin.cpu_ram_efficient_loading
    first, *others = gather_objects(f"comparing {what}", fingerprint(model) if is_read else None)
    assert first is not None
    if rank := next((rank for rank, other in enumerate(others, 1) if other not in (None, first)), None):
        raise InputError(
            f"got other weights of {what} on rank {rank} than on rank 0, of which each rank keeps its own, want the "
            "same; fix: the same files on every machine, and torch.manual_seed(...) before what draws weights"
        )
    return first


def reduced_parameters(policy: nn.Module, args: GRPOConfig) -> dict[str, nn.Parameter]:
    """By name, those that DDP sums only where each of them has a gradient; none under FSDP2 or by its options."""
    if not isinstance(policy, DistributedDataParallel) or args.ddp_find_unused_parameters or args.ddp_static_graph:
        return {}
    return {name: weight for name, weight in policy.module.named_parameters() if weight.requires_grad}


def check_reduced(parameters: Mapping[str, nn.Parameter]) -> None:
    """UnsupportedError where one of them has no gradient: DDP leaves those beside it as they are on each rank."""
    if missing := [name for name, weight in parameters.items() if weight.grad is None]:
        raise UnsupportedError(
            f"got {len(missing)} trained parameter(s) without a gradient, such as {missing[0]}, want one of each, or "
            "DDP does not sum those of others; nothing was updated; fix: requires_grad_(False) of what no completion "
            "reaches, or ddp_find_unused_parameters=True"
        )


def warn_of_other_replicas(accelerator: Accelerator, policy: nn.Module, step: int) -> None:
    """A warning where weights that DDP has on every rank are not the same: it sums gradients and sends no weights.

    The first values of each are compared, up to what other GPUs round otherwise. A collective, of a few kB.
    """
    first = [weight.detach().flatten()[:COMPARED].float().cpu() for weight in policy.parameters()]
    ranks = gather_objects("comparing the weights", nn.utils.rnn.pad_sequence(first, batch_first=True))
    sizes = ranks[0].abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    apart = max(((rank - ranks[0]).abs().amax(1) / sizes).max().item() for rank in ranks)
    if apart > APART and accelerator.is_main_process:
        warn_once(
            f"got weights that differ by {apart:.2g} of their size between ranks after step {step}, want the same on "
            "all: each trains another model, and that of rank 0 is saved; fix: an optimizer that draws no random "
            "numbers, or the same on all ranks, and callbacks that change rates and weights alike"
        )


def frozen_copy(accelerator: Accelerator, policy: M) -> M:
    """A copy of a policy that is not wrapped yet, because wrappers do not copy. It is not trained.

    It is on this rank's device, to which the policy is moved; under FSDP2 it has no weights before `shard_frozen`.
    """
    memo: dict[int, Any] = {}
    if accelerator.is_fsdp2:
        # By these a deep copy replaces the policy's own parameters; one that is tied stays tied.
        memo = {id(weight): nn.Parameter(weight.detach().to("meta")) for weight in policy.parameters()}
    else:
        policy.to(accelerator.device)
    return copy.deepcopy(policy, memo).requires_grad_(False).eval()


def shard_frozen(accelerator: Accelerator, frozen: M, policy: nn.Module | None = None) -> M:
    """A model that is not trained, on this rank's device; under FSDP2 sharded.

    The `frozen_copy` of a `policy` is sharded as that is by now, with copies of its shards; any other model by the
    layers of its own family.
    """
    if not accelerator.is_fsdp2:
        return frozen.to(accelerator.device)
    plugin: Any = accelerator.state.fsdp_plugin
    before = plugin.cpu_ram_efficient_loading, plugin.transformer_cls_names_to_wrap
    if policy is None:
        plugin.transformer_cls_names_to_wrap = None  # those of the options are the policy's
    else:
        plugin.cpu_ram_efficient_loading = False  # rank 0 has no weights of the copy that it could send
    try:
        sharded: M = fsdp2_prepare_model(accelerator, frozen)
    finally:
        plugin.cpu_ram_efficient_loading, plugin.transformer_cls_names_to_wrap = before
    if policy is not None:
        for parameter, trained in zip(sharded.parameters(), policy.parameters(), strict=True):
            shard = trained.detach().to(parameter.dtype, copy=True)
            torch.utils.swap_tensors(parameter, nn.Parameter(shard, requires_grad=False))
    return sharded
