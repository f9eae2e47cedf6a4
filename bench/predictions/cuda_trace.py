"""A trace of a call on a GPU, on a machine without one: operations in their order, waits and memory.

    with fake_gpu(capability=(9, 0), memory=141 * 2**30):
        call = prepare()
        with Trace() as trace:
            kept = call()
    trace.operations, trace.waits, trace.peak

Tensors are fake: they have a shape, a dtype and `device="cuda"`, and nothing computes. The Python code is the real one,
so a wrong branch, a wrong keyword or a wait for the device shows. Needs a CUDA build of torch (a CPU build has no CUDA
device) and a process without TRITON_INTERPRET. Where a plan follows from values, as that of kept tokens does,
`fake_with_values` gives a tensor some, and what follows from such tensors alone is computed too, on the CPU.

Bytes of an operation follow from shapes: each input is read once, each new output is written once, and a tensor that is
changed in place is read and written. A Triton kernel reads or writes each of its tensors once; a pass in place gets its
memory twice, as input and as output. Gathers and scatters move as many elements or rows as they pick.

Autograd's engine has a thread for each device that exists, so none for this one; `backward` walks the same nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_grpo.head import head, registered_ops
from fused_grpo.kernels._device import architecture
from fused_grpo.kernels.divergence import KINDS
from fused_grpo.passes import buffers

Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]
"""A kernel and its arguments; of tensors only the dtypes."""

# The values of fake tensors that have some, on the CPU.
VALUES: Any = WeakTensorKeyDictionary()
# Operations that wait for the device, and the value that they return here for a tensor without values.
ANSWERS = {"_local_scalar_dense": 1, "is_nonzero": True, "equal": True}
NO_LAUNCH = {
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "prim::device",
    "promote_types",
    "scalar_tensor",
    "set_",
    "stride",
    "sym_size",
}
# Their last two tensors are multiplied.
GEMMS = {"mm", "addmm", "addmm_"}
# With arguments N and sizes, which begin with D and V.
TRITON_GEMMS = {"_logprob_forward_kernel", "_softmax_weights_forward_kernel"}
# Arguments that TRL's kernels (of log-probs and of divergences) read and write although they get them once.
TRITON_IN_PLACE = {"_backward_kernel": ("mm_ptr", "s_ptr")}
# Matrices of which a kernel reads or writes one row for each element of another argument.
TRITON_ROWS = {"_entry_logits_kernel": {"weight": "tokens"}, "_anchor_kernel": {"weight": "targets"}}
TRITON_ROWS["_weighted_rows_kernel"] = {"matrix": "index", "out": "places"}
# Matrices of which a kernel touches one element of each row.
TRITON_FEW = {"_finish_weights_kernel": {"weights"}}
# The names of the columns of a tile in kernels that walk rows.
TRITON_COLUMNS = ("BLOCK_V", "BLOCK_SIZE")
# Instructions per logit of the loops over a row, all sweeps together, as compiled for sm_90 (ours by Triton 3.9, TRL's
# by 3.6), of kernels that do not only wait for memory. Passes of ours that are not here have 7 to 12.
TRITON_INSTRUCTIONS = {
    "divergence._divergence_kernel": 160,  # jsd with a gradient
    "chunked_divergence._stats_kernel": 54,
    "chunked_divergence._jsd_kernel": 76,
    "chunked_divergence._backward_kernel": 75,
    "chunked_logprob._forward_kernel": 20,
    "chunked_logprob._backward_kernel": 25,
}
# The upstream gradient of a loss is 1 where the backward pass begins, so these kernels move nothing.
TRITON_UNTOUCHED = {"_scale_kernel"}
# Arguments whose rows do not fit shared memory and are read anew: for the largest, the sum and the result; for the sum
# and the result.
SWEEPS = {("_log_softmax", "self"): 3, ("_log_softmax_backward_data", "grad_output"): 2}
# Operations whose first argument is only written, or only gives a shape.
UNREAD = {"copy_", "fill_", "zero_", "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
# Operations with results in a shape that depends on values.
BY_VALUES = {"nonzero", "unique_consecutive"}
GATHERS = {"embedding", "gather", "index", "index_select", "take"}
# Operations by the position of the argument that they move.
SCATTERS = {"_index_put_impl_": 2, "index_add_": 3, "index_copy_": 3, "index_put_": 2, "scatter_": 3, "scatter_add_": 3}
# Formulas of autograd change their own new tensors in place, except where they see a subclass of tensors.
IN_PLACE = {"index_put": "index_put_", "scatter_add": "scatter_add_"}


@dataclass(frozen=True)
class Operation:
    """One launch."""

    name: str
    bytes: int
    """Bytes that are read and written."""
    flops: int = 0
    """FLOP of a GEMM; 0 for everything else, which memory bounds."""
    dtype: torch.dtype | None = None
    """The dtype of a GEMM's operands."""
    triton: bool = False
    tiles: int = 0
    """Tiles of columns that a program of a pass in Triton walks, one after the other; 0 of any other operation."""
    instructions: int = 0
    """Of all threads; 0 where they are too few to matter."""


@dataclass
class Trace(TorchDispatchMode):
    """The operations of a call. The number of rows that a mask selects is assumed to be `share` of all."""

    share: float = 1.0
    operations: list[Operation] = field(default_factory=list)
    kernels: list[Launch] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    """The number of operations before each wait, and before each backward pass."""
    gemms: list[tuple[int, ...]] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    """The most bytes at a time that the call has allocated."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: set[int] = set()
        self._masked = 0  # the rows of the masks that were summed last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        if func.namespace == "fused_grpo":
            with self:  # the operations inside a custom op
                return getattr(registered_ops, "_" + func._opname)(*args, **kwargs)
        values = computed(func, args, kwargs)
        leaves_gpu = name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
        if (name in ANSWERS or leaves_gpu) and args[0].is_cuda:
            self._wait("cpu" if leaves_gpu else name)
        if name in ANSWERS:
            return ANSWERS[name] if values is None else values
        if name == "sum" and args[0].dtype == torch.bool:
            self._masked = args[0].shape[-1]
        if name in IN_PLACE:
            func = getattr(getattr(torch.ops.aten, IN_PLACE[name]), func._overloadname)
        made = self._made(func, args, kwargs, values)
        if values is not None:
            pairs = zip(tree_leaves(made), tree_leaves(values), strict=True)
            VALUES.update((tensor, its) for tensor, its in pairs if isinstance(tensor, Tensor))
        if not func.is_view and name != "prim::device":
            for tensor in _tensors(made):
                self._hold(tensor)
            if name not in NO_LAUNCH:
                self._add(func, args, kwargs, made)
        return made

    def _made(self, func: Any, args: Any, kwargs: Any, values: Any) -> Any:
        """The result of an operation, whose shape may depend on the values of a mask."""
        name = name_of(func)
        if name in BY_VALUES and values is not None:
            if args[0].is_cuda:
                self._wait(name)
            return tree_map(lambda real: args[0].new_empty(real.shape, dtype=real.dtype), values)
        if name == "nonzero":
            self._wait(name)
            indices = args[0].new_empty(self._some(args[0].shape[0]), args[0].ndim, dtype=torch.int64)
            if len(VALUES):  # the first ones, so that what follows has values
                with _disable_current_modes():
                    VALUES[indices] = torch.arange(len(indices))[:, None].expand(indices.shape)
            return indices
        if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
            self._wait("index by a mask")
            (mask,) = args[1]
            return args[0].new_empty(self._some(mask.numel()), *args[0].shape[mask.ndim :])
        if name in GEMMS and kwargs.get("out") is not None:  # torch 2.10 has no fake `addmm` with an out_dtype
            return kwargs["out"]
        return func(*args, **kwargs)

    def _some(self, rows: int) -> int:
        return math.ceil(rows * self.share)

    def answer(self, tensor: Tensor) -> list[int]:
        """The number of rows that may have a gradient, and of those that are scored."""
        self._wait("tolist")
        return VALUES[tensor].tolist() if tensor in VALUES else [self._some(self._masked)] * len(tensor)

    def _wait(self, name: str) -> None:
        self.waits.append(name)
        self.waited.append(len(self.operations))

    def _add(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        if not any(tensor.is_cuda for tensor in _tensors((args, kwargs, made))):
            return
        name, flops, dtype = name_of(func), 0, None
        if name in GEMMS:
            a, b = _tensors(args)[-2:]
            self.gemms.append((*a.shape, b.shape[1]))
            flops, dtype = 2 * a.shape[0] * a.shape[1] * b.shape[1], a.dtype
        self.operations.append(Operation(name, traffic(func, args, kwargs, made), flops, dtype))

    def add_launch(self, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], programs: int) -> None:
        """Record a kernel that Triton would launch, with so many programs."""
        name, given = kernel.__name__, dict(zip(kernel.arg_names, args, strict=False))
        if name == "_clean_targets_kernel" and given["targets"] in VALUES:
            with _disable_current_modes():
                targets = VALUES[given["targets"]]
                VALUES[given["kept"]] = kept = targets != given["ignore_index"]
                VALUES[given["cleaned"]] = targets * kept
        touched = [given[x] for x in given if x not in TRITON_FEW.get(name, ())]
        tensors = _tensors([x.base if isinstance(x, TensorDescriptor) else x for x in touched])
        moved = _sizes(tensors) + sum(_sizes(given[x]) for x in TRITON_IN_PLACE.get(name, ()) if x in given)
        for matrix, picked in TRITON_ROWS.get(name, {}).items():
            moved += (len(given[picked]) - len(given[matrix])) * given[matrix][:1].nbytes
        sweeps = 1
        if name == "_divergence_kernel":  # both tiles are read twice, or three times; once less without a gradient
            sweeps += (kwargs["KIND"] == KINDS["jsd"].value) + (given["gradient"] is not None)
            moved += (sweeps - 1) * _sizes([given["student"], given["teacher"]])
        # Nor those for rows far from the others: there is none.
        idle = name in TRITON_UNTOUCHED or given.get("only") is not None
        moved = 0 if idle else moved
        flops = 2 * given["N"] * math.prod(given["sizes"][:2]) if name in TRITON_GEMMS and not idle else 0
        dtype = tensors[0].dtype if flops else None
        largest, tiles = max((x.numel() for x in tensors), default=0), 0
        columns = next((kwargs[x] for x in TRITON_COLUMNS if x in kwargs), None)
        if columns is not None and moved and not flops:
            tiles = math.ceil(sweeps * largest / programs / columns)
        instructions = largest * TRITON_INSTRUCTIONS.get(f"{kernel.__module__.rpartition('.')[2]}.{name}", 0)
        operation = Operation(name, moved, flops, dtype, triton=True, tiles=tiles, instructions=instructions)
        self.operations.append(operation)
        self.kernels.append((kernel, tuple(stand_in(x) for x in args), kwargs))

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def fake_with_values(values: Tensor) -> Tensor:
    """A fake tensor with these values on the fake GPU."""
    fake = torch.empty(values.shape, dtype=values.dtype, device="cuda")
    VALUES[fake] = values
    return fake


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on the values of its tensors; None if they have none."""
    if not len(VALUES):
        return None
    tensors = _tensors((args, kwargs))
    if not all(tensor in VALUES for tensor in tensors) or not (tensors or name_of(func) == "arange"):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                VALUES.pop(value, None)
        return None
    with _disable_current_modes():
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return VALUES[value] if isinstance(value, Tensor) else value


def name_of(func: Any) -> str:
    """The name of one of torch's operations."""
    name: str = func._schema.name
    return name.removeprefix("aten::")


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor; an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size) * tensor.itemsize


def traffic(func: Any, args: Any, kwargs: Any, made: Any) -> int:
    """The bytes that one of torch's operations reads and writes."""
    name, schema = name_of(func), func._schema
    if name in GATHERS:
        return 2 * _sizes(made)
    if name in SCATTERS:
        return 2 * _sizes(args[SCATTERS[name]])
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    # A new result is written; any other is among the arguments.
    moved = 0 if any(x.alias_info is not None for x in schema.returns) else _sizes(made)
    for place, argument in enumerate(schema.arguments):
        changed = argument.alias_info is not None and argument.alias_info.is_write
        read = not argument.is_out and not (place == 0 and name in UNREAD)
        moved += (changed + read * SWEEPS.get((name, argument.name), 1)) * _sizes(given.get(argument.name))
    return moved


def _sizes(values: Any) -> int:
    return sum(map(size_of, _tensors(values)))


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def stand_in(value: Any) -> Any:
    """An equal argument for a compiler, so that a record does not hold memory which the call frees."""
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=stand_in(value.base))
    if not isinstance(value, Tensor):
        return value
    with _disable_current_modes():
        return torch.empty(0, dtype=value.dtype, device="meta")


def running() -> Trace | None:
    """The active trace."""
    return next((mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, Trace)), None)


def _launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if (trace := running()) is not None:
        trace.add_launch(self, args, kwargs, math.prod(grid(kwargs) if callable(grid) else grid))


def _answer(tensor: Tensor) -> list[int]:
    trace = running()
    return [len(tensor)] * len(tensor) if trace is None else trace.answer(tensor)


def aligned(tensor: Tensor) -> int:
    """An aligned address."""
    return 0


@torch.no_grad()
def backward(value: Tensor, gradient: Tensor | None = None) -> None:
    """`value.backward(gradient)`, one node of the graph after the other, the latest first."""
    assert value.grad_fn is not None
    if (trace := running()) is not None:
        trace.backwards.append(len(trace.operations))
    waiting: dict[Any, dict[int, Tensor]] = {}
    waiting[value.grad_fn] = {value.output_nr: torch.ones_like(value) if gradient is None else gradient}
    del gradient
    while waiting:
        node = max(waiting, key=lambda node: node._sequence_nr())
        for (target, number), part in _gradients(node, waiting.pop(node)):
            if target is not None and part is not None:
                part = part.sum_to_size(target._input_metadata[number].shape)  # one that was broadcast
                gradients = waiting.setdefault(target, {})
                gradients[number] = gradients[number] + part if number in gradients else part


def _gradients(node: Any, upstream: dict[int, Tensor]) -> Iterator[tuple[tuple[Any, int], Tensor | None]]:
    """(target, gradient) pairs of a node, from its upstream gradients."""
    if hasattr(node, "variable"):
        leaf, gradient = node.variable, upstream[0]
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        return
    given = [upstream.get(number) for number in range(len(node._input_metadata))]
    upstream.clear()
    gradients = node.apply(*given) if hasattr(node, "needs_input_grad") else node(*given)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    targets = node.next_functions
    if hasattr(node, "needs_input_grad"):  # nodes in Python return gradients of arguments that are no tensors, too
        gradients = tuple(part for part, needed in zip(gradients, node.needs_input_grad, strict=True) if needed)
        targets = [target for target in targets if target[0] is not None]
    yield from zip(targets, gradients, strict=True)


@contextlib.contextmanager
def fake_gpu(*, capability: tuple[int, int], memory: int) -> Iterator[None]:
    """A GPU with so many bytes of memory, as far as our code can tell, and fake tensors."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", _launch),
            (torch.Tensor, "data_ptr", aligned),
            (torch.Tensor, "backward", backward),
            (FakeTensor, "tolist", _answer),
            (torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (buffers, "total_memory", lambda device: memory),
            (head, "keeps_sums", lambda device, dtype: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        architecture.cache_clear()
        stack.callback(architecture.cache_clear)
        stack.enter_context(FakeTensorMode())
        yield
