"""Argument checks of the ops: got / want / fix, before anything is computed or allocated.

On a CPU all values are checked. On a GPU that would synchronize the stream: target ids and temperatures are checked by
an assertion on the device, and other values are not checked. Shapes, dtypes and devices are checked everywhere.

Every `check_...`, `checked_config` and `loss_inputs` raise InputError for the first argument that cannot be right;
`differentiated_once` raises UnsupportedError, and `check_plan`, `check_tensors`, `check_main_grad` and
`check_squared_gradients` may. Functions that read values are called by `torch.compile` without being traced:
`outside_graphs`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_grpo._maths.formulas import LossInputs, Sequences, TokenInputs, token_weights
from fused_grpo.config import EXACT, LARGEST, GRPOLossConfig, plain_number
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.passes.torch_passes.row_passes import transformed

P = ParamSpec("P")
R = TypeVar("R")


def is_exporting() -> bool:
    """Whether torch.export traces. `torch.compiler.is_exporting` is true of what torch 2.11 compiles, too."""
    return torch.compiler._is_exporting_flag


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which breaks the graph where a call of it is compiled. Eager calls do not change.

    UnsupportedError in torch.export, which takes no break, and for fake tensors, or wrappers around others, whose
    values are read.
    """
    name = _CALLED.get(function.__name__, function.__name__)
    told = (
        f"got {name} in torch.export or with fake tensors, want tensors with values, by which it plans "
        "its work; fix: trace the model up to its hidden states, or linear_logprobs, and call it outside"
    )

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            if is_exporting() and not function.__name__.startswith("_"):
                if torch.compiler.is_dynamo_compiling():  # strict=True, which traces no exception and no variable
                    torch._dynamo.graph_break(msg=told)
                raise UnsupportedError(told)
            # Not as a decorator: that imports the compiler, which costs eager users four seconds.
            uncompiled: Callable[P, R] = torch.compiler.disable(function)
            return uncompiled(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if type(error).__name__ in _FAKE_TENSOR_ERRORS:
                raise UnsupportedError(told) from error
            if _WRAPPER_MESSAGE.search(str(error)) is None:
                raise
            raise UnsupportedError(
                f"got {name} with a tensor of a class that wraps others, whose values cannot be read "
                f"({str(error).partition(' at ')[0]}), want plain tensors; fix: what it wraps"
            ) from error

    return call


_CALLED = {"support_of": "support", "_finish": "return_logprobs", "apply": "FusedGRPOTrainer"}  # by users
# By name: importing them imports the compiler.
_FAKE_TENSOR_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
_WRAPPER_MESSAGE = re.compile(r"^\.?tolist\(\) |/RegisterFunctionalization")  # subclasses and functional tensors


_GREEDY = "fix: greedy sampling has no log-probs to train on; pass the temperature that sampling used"
IMPLS = ("auto", "triton", "torch", "reference")
FLOATING = ("old_logprobs", "ref_logprobs", "sampling_logprobs")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT64 = 2**63
FEW_ROWS = 256
SMALLEST = torch.finfo(torch.float32).tiny

# What torch.func, and batched gradients, wrap tensors in.
_wrapped: Any = torch._C._functorch


class HeadOptions(NamedTuple):
    """How a caller says that h.w becomes a logit: softcap(logit_scale * (h.w + bias)) / temperature."""

    bias: Tensor | None = None  # [V]
    temperature: float | Tensor = 1.0  # or one per row of hidden
    logit_scale: float = 1.0
    softcap: float | None = None


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    *,
    sharded: bool = False,
    several: bool = False,
) -> None:
    """Check the arguments that decide the logits, except for values.

    `targets` has the leading shape of `hidden`, or with `several` that and a last dimension of at least 1.
    """
    bias, temperature, logit_scale, softcap = options
    check_tensors({"bias": bias}, hidden=hidden, weight=weight, targets=targets)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in FLOATS:
            raise InputError(f"got {name} of dtype {tensor.dtype}, want one of {', '.join(map(str, FLOATS))}")
    if weight.ndim != 2:
        fix = "; fix: DeepSpeed keeps it elsewhere: call this in the forward of the module that it wraps"
        raise InputError(
            f"got weight of shape {tuple(weight.shape)}, want [V, D] (nn.Linear's layout)"
            + (fix if hasattr(weight, "ds_id") else "")
        )
    if not hidden.ndim or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"got hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}, want [..., D] and [V, D] with one D"
            + ("; fix: pass weight.t()" if hidden.ndim and hidden.shape[-1] == weight.shape[0] else "")
        )
    if not weight.shape[1] or not (weight.shape[0] or sharded):
        raise InputError(f"got weight {tuple(weight.shape)}, want at least one token and one hidden feature")
    if targets.dtype != torch.int64:
        raise InputError(f"got targets of dtype {targets.dtype}, want torch.int64; fix: targets.long()")
    rows = hidden.shape[:-1]
    if targets.shape != rows and not (several and targets.shape[:-1] == rows and targets.shape[-1] > 0):
        either = f", or {(*rows, 'K')} with K > 0 for several" if several else ""
        raise InputError(f"got targets {tuple(targets.shape)}, want {tuple(rows)}: one per row of hidden{either}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in FLOATS):
        raise InputError(f"got bias {tuple(bias.shape)} {bias.dtype}, want [V] = {tuple(weight.shape[:1])}, floating")
    if isinstance(temperature, Tensor):
        check_tensors(temperature=temperature, targets=targets)
        if temperature.shape != rows or not temperature.is_floating_point():
            raise InputError(
                f"got temperature {tuple(temperature.shape)} {temperature.dtype}, "
                f"want a float, or a floating tensor of targets' shape {tuple(rows)}"
            )
    else:
        check_temperature_values(temperature)
    if not is_number(logit_scale, -LARGEST, LARGEST):
        raise InputError(f"got logit_scale={logit_scale!r}, want a finite number")
    if softcap is not None and not is_number(softcap, SMALLEST, LARGEST):
        raise InputError(f"got softcap={softcap!r}, want a finite number > 0, or None for no cap")


def is_number(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a number from `low` to `high` that a tensor can represent: Python's or NumPy's, no tensor."""
    if isinstance(value, bool) or not isinstance(value, int | float):  # a compiler traces no more than this
        if not (isinstance(value, Real) and hasattr(value, "dtype")):  # NumPy's; tensors take no other, like Fraction
            return False
        value = int(value) if isinstance(value, Integral) else float(value)
    number: float = value
    largest = EXACT if isinstance(number, int) else LARGEST
    return low <= number <= high and -largest <= number <= largest


def check_tensors(optional: Mapping[str, Any] | None = None, /, **tensors: Any) -> None:
    """Check that all are dense local tensors with values on one device; those in `optional` may be None."""
    given = tensors | {name: tensor for name, tensor in (optional or {}).items() if tensor is not None}
    inside_transform = transformed()
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"got {name} of type {type(tensor).__name__}, want a torch.Tensor")
        # Torchao's and others' have a dequantize of their own, and a product that leaves its out= as it was.
        quantized = tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize
        if tensor.is_nested or quantized or tensor.layout is not torch.strided:
            raise InputError(
                f"got {name} as a nested, quantized or sparse tensor, want a dense one; "
                "fix: .to_padded_tensor(), .dequantize() or .to_dense()"
            )
        if tensor.is_complex():
            raise InputError(f"got {name} of dtype {tensor.dtype}, want a real one; fix: {name}.real")
        # A DTensor is recognised by an attribute: importing its module is slow.
        if hasattr(tensor, "full_tensor"):
            raise InputError(
                f"got {name} as a DTensor, of which each process has a part, want a plain tensor; fix: call this in "
                "the forward of the module that FSDP wraps, where weights are plain tensors; those of a module with "
                "a fully_shard of its own are after module.unshard()"
            )
        if inside_transform:
            _check_has_values(name, tensor)
    (first, *others) = [tensor.device for tensor in given.values()]
    if any(device != first for device in others):
        listing = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise InputError(f"got {listing}; want all on one device; fix: .to({first!s})")
    if first.type == "meta":
        raise InputError(f"got {', '.join(given)} on the device meta, want tensors with values; fix: load them")


@outside_graphs
def _check_has_values(name: str, tensor: Tensor) -> None:
    while _wrapped.is_functorch_wrapped_tensor(tensor):
        if not _wrapped.is_gradtrackingtensor(tensor):
            raise UnsupportedError(
                f"got {name} inside torch.vmap or torch.func.functionalize, want a plain tensor, whose values can be "
                "read; fix: instead of vmap, pass more leading dimensions, [..., D], or loop over the calls"
            )
        tensor = _wrapped.get_unwrapped(tensor)


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that refuses to be differentiated (PyTorch would take its results for constants) or batched."""

    @functools.wraps(backward)
    def checked(ctx: Any, *upstream: Tensor | None) -> Any:
        batched = transformed() or any(x is not None and _wrapped.is_legacy_batchedtensor(x) for x in upstream)
        if torch.is_grad_enabled() or batched:
            got = "a batch of gradients (is_grads_batched, vectorize, vmap)" if batched else "create_graph=True"
            raise UnsupportedError(
                f"got {got}, want the first derivatives of one number; these gradients have none of their own; "
                "fix: impl='reference', which autograd sees through"
            )
        return backward(ctx, *upstream)

    return checked


def save_for_backward(ctx: Any, given: Sequence[Tensor | None], *computed: Tensor | None) -> None:
    """`ctx.save_for_backward`, but for what is given from inference_mode, which it refuses: that is kept as it is.

    A loop may sample, or load a frozen head, in inference_mode. Such tensors have no version that could be checked.
    """
    ctx.inference_tensors = {}
    for at, x in enumerate(given):
        if x is not None and x.is_inference():
            ctx.inference_tensors[at] = x
    if ctx.inference_tensors:
        given = [None if at in ctx.inference_tensors else x for at, x in enumerate(given)]
    ctx.save_for_backward(*given, *computed)


def saved_tensors(ctx: Any) -> Sequence[Any]:
    """What `save_for_backward` saved."""
    saved: tuple[Any, ...] = ctx.saved_tensors
    return [ctx.inference_tensors.get(at, x) for at, x in enumerate(saved)] if ctx.inference_tensors else saved


def check_plan(
    impl: str,
    chunk_bytes: int | None = None,
    ignore_index: int = -100,
    process_group: Any = None,
    *,
    score: str = "all",
    **flags: bool,
) -> tuple[int | None, int]:
    """Check the arguments that do not change the result: implementation, memory budget, process group and flags.

    Every op calls this. It also refuses a call that torch.func or forward-mode AD would differentiate. Returns
    `chunk_bytes` and `ignore_index` as Python's integers, which NumPy's are taken for, as in torch.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"got {name}={value!r}, want True or False")
    if not isinstance(score, str) or score not in ("all", "needed"):
        raise InputError(f"got score={score!r}, want 'all' or 'needed'")
    if not isinstance(impl, str) or impl not in IMPLS:
        raise InputError(f"got impl={impl!r}, want {', '.join(map(repr, IMPLS[:-1]))} or {IMPLS[-1]!r}")
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace records what these values lead to, for all others
        raise UnsupportedError(
            "got a call inside torch.jit.trace, want one outside, or torch.compile; fix: trace the model up to its "
            "hidden states, or torch.export with linear_logprobs"
        )
    forward = forward_ad._current_level >= 0
    traced = forward and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    if traced or (impl != "reference" and (forward or transformed())):  # the tangents would be 0
        _refuse_transforms(impl)
    if type(ignore_index) is not int:
        ignore_index = plain_number(ignore_index)
    if chunk_bytes is not None and type(chunk_bytes) is not int:
        chunk_bytes = plain_number(chunk_bytes)
    if type(ignore_index) is not int or not -INT64 <= ignore_index < INT64:
        raise InputError(f"got ignore_index={ignore_index!r}, want a whole number of 64 bits")
    if process_group is not None and not isinstance(process_group, torch.distributed.ProcessGroup):
        raise InputError(
            f"got process_group of type {type(process_group).__name__}, want a torch.distributed.ProcessGroup; "
            "fix: that of a DeviceMesh is mesh.get_group(name)"
        )
    if chunk_bytes is not None and not (type(chunk_bytes) is int and 0 < chunk_bytes < INT64):
        raise InputError(f"got chunk_bytes={chunk_bytes!r}, want a whole number of bytes > 0, or None for the default")
    return chunk_bytes, ignore_index


@outside_graphs  # the compiler of torch 2.10 cannot trace an exception
def _refuse_transforms(impl: str) -> NoReturn:
    raise UnsupportedError(
        f"got impl={impl!r} inside torch.func (jvp, grad, linearize, ...) or torch.autograd.forward_ad, want a call "
        "outside of them: its gradients are those of a backward pass; fix: torch.autograd.grad, or impl='reference', "
        "which all of them but linearize see through"
    )


def may_synchronize(tensor: Tensor) -> bool:
    """Whether reading values of the tensor is allowed: not while a CUDA graph is captured."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def leaves_out_rows(tensor: Tensor) -> bool:
    """Whether rows that need nothing are left out, for which they have to be counted on the host.

    Not where a CUDA graph is captured, nor where a GPU has so few rows that a product with W takes the time of reading
    W: then the rows' hidden states, which may hold anything, must be replaced.
    """
    return not tensor.is_cuda or (tensor.shape[0] > FEW_ROWS and may_synchronize(tensor))


def check_temperature_values(temperature: float | Tensor) -> None:
    """Check the temperature, or every one of a tensor."""
    if not isinstance(temperature, Tensor):
        if not is_number(temperature, SMALLEST, LARGEST):
            raise InputError(f"got temperature={temperature!r}, want a finite number > 0; {_GREEDY}")
        return
    allowed = (temperature >= SMALLEST) & (temperature <= LARGEST)
    if temperature.device.type == "cuda":
        torch._assert_async(allowed.all(), f"a temperature is out of range; want finite numbers > 0; {_GREEDY}")
    elif not bool(allowed.all()):
        wrong = temperature[~allowed][0].item()
        raise InputError(f"got a temperature of {wrong}, want finite numbers > 0; {_GREEDY}")


def check_squared_gradients(
    out: Tensor, targets: Tensor, dtype: torch.dtype, process_group: Any, distillation: Any
) -> None:
    """Check that the squared gradients can be written to `out`, in the shape of the targets.

    Raises:
        InputError: another shape, dtype or device than wanted, or a tensor that requires a gradient.
        UnsupportedError: a process_group or a distillation, with which there are none.
    """
    if process_group is not None or distillation is not None:
        other = "process_group" if distillation is None else "distillation"
        raise UnsupportedError(f"got squared_gradients with a {other}; fix: leave one of them out")
    _check_written("squared_gradients", out, targets, dtype)


def check_main_grad(main_grad: Tensor, weight: Tensor, impl: str) -> None:
    """Check that dW can be added to `main_grad`.

    Raises:
        InputError: another shape, dtype or device than wanted, or a tensor that requires a gradient.
        UnsupportedError: impl="reference".
    """
    if impl == "reference":
        raise UnsupportedError(
            "got weight_main_grad with impl='reference', whose gradients are autograd's; fix: leave it"
        )
    _check_written("weight_main_grad", main_grad, weight, torch.float32)


def _check_written(name: str, out: Tensor, like: Tensor, dtype: torch.dtype) -> None:
    """Check that values can be written to it: not where autograd or inference_mode refuses, nor to one place twice."""
    check_tensors(**{name: out})
    frozen = out.is_inference() and not torch.is_inference_mode_enabled()
    plain = not (frozen or out.requires_grad or torch._debug_has_internal_overlap(out) == 1)
    if not plain or out.shape != like.shape or out.dtype != dtype or out.device != like.device:
        raise InputError(
            f"got {name} {tuple(out.shape)} {out.dtype} on {out.device}, requires_grad={out.requires_grad}; want "
            f"{tuple(like.shape)} {dtype} on {like.device}, nothing that is expanded or of inference_mode; "
            "fix: a plain tensor"
        )


def checked_config(config: Any) -> GRPOLossConfig:
    """The config, which is one."""
    if not isinstance(config, GRPOLossConfig):
        raise InputError(f"got config of type {type(config).__name__}, want a GRPOLossConfig, or None for the default")
    return config


class LossArguments(NamedTuple):
    """What a caller gives both losses beside log-probs and a config, under the names of `grpo_loss`."""

    advantages: Tensor
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    sampling_logprobs: Tensor | None = None
    entropy_threshold: float | Tensor | None = None
    num_tokens: float | Tensor | None = None
    num_sequences: float | Tensor | None = None
    num_entropy_tokens: float | Tensor | None = None
    covariance_selected: Tensor | None = None


def loss_inputs(
    given: LossArguments,
    shape: torch.Size,
    config: GRPOLossConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kept: Tensor | None = None,
) -> LossInputs:
    """Check the arguments against tokens of `shape` and flatten them. `kept` [N] masks on top of `mask`."""
    named = given._asdict()
    per_token = {name: named[name] for name in ("mask", *FLOATING, "covariance_selected")}
    check_tensors(per_token | {"cu_seqlens": given.cu_seqlens}, advantages=given.advantages)
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != shape:
            raise InputError(f"got {name} {tuple(tensor.shape)}, want {tuple(shape)}: one per token")
        if tensor is not None and name in FLOATING and not tensor.is_floating_point():
            raise InputError(f"got {name} of dtype {tensor.dtype}, want a floating dtype")
    if config.beta > 0 and given.ref_logprobs is None:
        raise InputError(f"got beta={config.beta} without ref_logprobs; fix: pass ref_logprobs, or beta=0.0")
    if given.advantages.device != device:
        raise InputError(f"got advantages on {given.advantages.device} and tokens on {device}, want one device")
    for name in ("num_tokens", "num_sequences", "num_entropy_tokens"):
        if named[name] is not None:
            check_normaliser(name, named[name], device)
    if given.entropy_threshold is not None:
        check_threshold(given.entropy_threshold, device)
    sequences, num_entropy_tokens = sequences_of(shape, given.cu_seqlens), given.num_entropy_tokens
    advantages = given.advantages.detach()
    if not advantages.is_floating_point():
        raise InputError(f"got advantages of dtype {advantages.dtype}, want a floating dtype; fix: advantages.float()")
    if advantages.shape == (sequences.count,):
        advantages = sequences.spread(advantages, shape.numel())
    elif advantages.shape != shape and (len(shape) == 2 or advantages.shape != (*shape, 1)):
        raise InputError(
            f"got advantages {tuple(advantages.shape)}, want [B] = ({sequences.count},), one per sequence, "
            f"or {tuple(shape)}, one per token"
        )
    mask = torch.ones(shape.numel(), dtype=torch.bool, device=device) if kept is None else kept
    if given.mask is not None:
        given_mask = given.mask.reshape(-1)
        if given_mask.dtype not in (torch.bool, torch.int32, torch.int64, *FLOATS):  # of which torch promotes not all
            given_mask = given_mask != 0
        mask = torch.logical_and(given_mask, mask)
    flat = {name: None if (x := named[name]) is None else x.detach().to(dtype).reshape(-1) for name in FLOATING}
    tokens = TokenInputs(
        advantages=advantages.reshape(-1).to(dtype),
        weights=token_weights(mask, sequences, given.num_tokens, given.num_sequences, config).to(dtype),
        mask=mask,
        **flat,
    )
    if num_entropy_tokens is None and config.entropy_coef and config.top_entropy_quantile == 1.0:
        num_entropy_tokens = mask.sum().clamp_min(1.0) if given.num_tokens is None else given.num_tokens
    selected = None if given.covariance_selected is None else given.covariance_selected.reshape(-1) != 0
    return LossInputs(tokens, sequences, given.entropy_threshold, num_entropy_tokens, selected)


def sequences_of(shape: torch.Size, cu_seqlens: Tensor | None) -> Sequences:
    """The sequences of tokens of `shape`, packed or padded."""
    if cu_seqlens is None:
        if len(shape) != 2:
            raise InputError(
                f"got tokens of shape {tuple(shape)} without cu_seqlens; "
                "want padded [B, T] (with a mask), or packed [N] with cu_seqlens [B+1]"
            )
        return Sequences(shape[0], (shape[0], shape[1]))
    if len(shape) != 1:
        raise InputError(f"got cu_seqlens with tokens of shape {tuple(shape)}, want packed tokens [N]; fix: .flatten()")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"got cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}, want [B+1] int32")
    lengths = cu_seqlens.diff()
    if cu_seqlens.device.type == "cpu":
        first, last, ordered = int(cu_seqlens[0]), int(cu_seqlens[-1]), bool((lengths >= 0).all())
        if first != 0 or last != shape[0] or not ordered:
            raise InputError(f"got cu_seqlens from {first} to {last}, want ascending from 0 to N={shape[0]}")
    return Sequences(len(lengths), lengths)


def check_normaliser(name: str, value: float | Tensor, device: torch.device) -> None:
    """Check a count over the whole optimizer step; on a GPU, not its value."""
    if isinstance(value, Tensor):
        check_scalar(name, value, device)
        if value.device.type != "cpu":
            return
        value = value.item()
    if not (is_number(value, 0, LARGEST) and value):
        raise InputError(f"got {name}={value!r}, want a finite number > 0: the count over the whole optimizer step")


def check_threshold(value: float | Tensor, device: torch.device) -> None:
    """Check a threshold of entropies."""
    if isinstance(value, Tensor):
        check_scalar("entropy_threshold", value, device)
    elif not is_number(value, -LARGEST, LARGEST):
        raise InputError(f"got entropy_threshold={value!r}, want a finite number, a 0-d tensor or None")


def check_scalar(name: str, value: Tensor, device: torch.device) -> None:
    """Check that `value` is one number on the CPU or on `device`, and a constant."""
    if value.device.type not in ("cpu", device.type):
        raise InputError(f"got {name} on {value.device} and tokens on {device}, want one device")
    check_tensors(**{name: value})
    if value.ndim != 0 or value.requires_grad:
        got = f"of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
        raise InputError(f"got {name} {got}, want a number or a 0-d tensor without a gradient; fix: .detach()")
