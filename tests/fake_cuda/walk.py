"""Every branch of the ops for CUDA, walked without a GPU: `walk.py [--compile]`.

Tensors are fake: they have a shape, a dtype and `device="cuda"`, and nothing computes. What is real is our Python, so a
forgotten branch, a wrong keyword or a wait for the device shows. Needs a CUDA build of torch (a CPU build has no
notion of a CUDA device) and a process without TRITON_INTERPRET. Prints a JSON object per call: its launches and waits,
the GEMMs it asked for, the most bytes that it held at a time, and with --compile how many kernels Triton compiled for
sm_90 with exactly the arguments that they were launched with.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))
import compile_all

from fused_grpo import GRPOLossConfig, _ops, fused_linear_grpo_loss, grpo_loss, planner

N, D, V = 8192, 4096, 151936
MEMORY = 141 * 2**30
DTYPES = {"bf16": (torch.bfloat16,) * 2, "fp16": (torch.float16,) * 2, "fp32": (torch.float32,) * 2}
DTYPES["master weight"] = (torch.bfloat16, torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "softcap, scale": {"softcap": 30.0, "logit_scale": 0.5}}
OPTIONS["bias"] = {}  # made with the other tensors
# What waits for the device, and what it would have answered.
ANSWERS = {"_local_scalar_dense": 1, "is_nonzero": True, "equal": True}
NO_LAUNCH = (
    "prim::device",
    "scalar_tensor",
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "detach",
    "sym_size",
    "stride",
    "set_",
)


@dataclass
class Seen(TorchDispatchMode):
    """What a call did, op by op."""

    last: ClassVar[Seen]
    tokens: ClassVar[int]
    launches: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)
    gemms: list[tuple[int, ...]] = field(default_factory=list)
    held: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        Seen.last = self
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name in ANSWERS:
            self.waits.append(name)
            return ANSWERS[name]
        if name == "nonzero":  # as if every other row were in it
            self.waits.append(name)
            return args[0].new_empty((len(args[0]) + 1) // 2, args[0].ndim, dtype=torch.int64)
        if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
            self.waits.append("index by a mask")
            return args[0].new_empty((len(args[0]) + 1) // 2, *args[0].shape[1:])
        if name in ("mm", "addmm"):
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            self.gemms.append((*a.shape, b.shape[1]))
            if kwargs.get("out") is not None:  # torch 2.10 knows no fake `addmm` with an out_dtype
                self.launches[name] += 1
                return kwargs["out"]
        made = func(*args, **kwargs)
        if not func.is_view and name not in NO_LAUNCH:
            self.launches[name] += 1
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not func.is_view:
                self._hold(tensor)
        return made

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


def aligned(tensor: Tensor) -> int:
    """An address."""
    return 0


def asked(tensor: Tensor) -> list[int]:
    """How many rows may have a gradient, and how many are scored: half of them."""
    Seen.last.waits.append("tolist")
    return [(Seen.tokens + 1) // 2] * len(tensor)


@contextlib.contextmanager
def pretended() -> Iterator[list[compile_all.Launch]]:
    """An H200, as far as our code asks; the kernels that would be launched."""
    launches: list[compile_all.Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # Stand-ins, lest what is recorded holds memory that a call gives back.
        with _disable_current_modes():
            stand_ins = [torch.empty(0, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in args]
        launches.append((self, tuple(stand_ins), kwargs))

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", record),
            (torch.Tensor, "data_ptr", aligned),
            (FakeTensor, "tolist", asked),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (planner, "total_memory", lambda device: MEMORY),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode())
        yield launches


def head(dtype: str, options: str, **sizes: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    n, d, v = (sizes.get(name, size) for name, size in (("N", N), ("D", D), ("V", V)))
    of_hidden, of_weight = DTYPES[dtype]
    tensors = {
        "hidden": torch.empty(n, d, dtype=of_hidden, device="cuda"),
        "weight": torch.empty(v, d, dtype=of_weight, device="cuda"),
        "targets": torch.empty(n, dtype=torch.int64, device="cuda"),
    }
    given = dict(OPTIONS[options])
    if options == "bias":
        given["bias"] = torch.empty(v, dtype=of_weight, device="cuda")
    return tensors, given


def call_logprobs(dtype: str, options: str, wanted: str, entropy: bool, **sizes: int) -> Callable[[], Any]:
    tensors, given = head(dtype, options, **sizes)
    temperature = torch.empty(len(tensors["targets"]), device="cuda")
    flags = [wanted != "no_grad", wanted == "trainable", wanted == "trainable" and "bias" in given]
    inputs = (tensors["hidden"], tensors["weight"], given.get("bias"), tensors["targets"], temperature)
    rest = (given.get("logit_scale", 1.0), given.get("softcap"), -100, entropy, "auto", None, False, flags)

    def call() -> Any:
        out = _ops._linear_logprobs(*inputs, *rest)
        if wanted == "no_grad":
            return out
        grads = (torch.empty_like(out[0]), torch.empty_like(out[0]) if entropy else None)
        return _ops._linear_logprobs_backward(*inputs, *out, *grads, *rest)

    return call


LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.04},
    "sequence": {"importance_sampling_level": "sequence"},
    "entropy bonus": {"entropy_coef": 0.01},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "quantile": {"top_entropy_quantile": 0.2},
}


def call_loss(
    dtype: str, options: str, wanted: str, loss: str, given: str, *, entropy: bool = True, **sizes: int
) -> Callable[[], Any]:
    tensors, rest = head(dtype, options, **sizes)
    n = Seen.tokens = len(tensors["targets"])
    tensors["hidden"].requires_grad_(wanted != "no_grad")
    for name in ("weight", "bias"):
        if wanted == "trainable" and (leaf := tensors.get(name, rest.get(name))) is not None:
            leaf.requires_grad_()
    rest["cu_seqlens"] = torch.empty(17, dtype=torch.int32, device="cuda")
    rest["advantages"] = torch.empty(16, device="cuda")
    names = {"on policy": (), "old": ("old_logprobs",), "sampler": ("sampling_logprobs",)}[given]
    rest |= {name: torch.empty(n, device="cuda") for name in names}
    if LOSSES[loss].get("beta"):
        rest["ref_logprobs"] = torch.empty(n, device="cuda")
    config = GRPOLossConfig(**LOSSES[loss])
    return lambda: fused_linear_grpo_loss(
        **tensors, **rest, config=config, num_tokens=1e4, num_sequences=64.0, entropy=entropy
    )


def call_grpo_loss(loss: str, given: str) -> Callable[[], Any]:
    logprobs = torch.empty(N, device="cuda", requires_grad=True)
    rest: dict[str, Any] = {"cu_seqlens": torch.empty(17, dtype=torch.int32, device="cuda")}
    rest |= {"advantages": torch.empty(16, device="cuda"), "entropy": torch.empty(N, device="cuda")}
    if given != "on policy":
        rest["sampling_logprobs" if given == "sampler" else "old_logprobs"] = torch.empty(N, device="cuda")
    if LOSSES[loss].get("beta"):
        rest["ref_logprobs"] = torch.empty(N, device="cuda")
    rest["entropy_threshold"] = 1.0
    return lambda: grpo_loss(logprobs, **rest, config=GRPOLossConfig(**LOSSES[loss]))


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    def capturing() -> Any:
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            return call()

    return capturing


def calls() -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """(name, what prepares the call) of every op, dtype, plan and option."""
    for dtype, options, wanted, entropy in itertools.product(
        DTYPES, OPTIONS, ("no_grad", "frozen", "trainable"), (False, True)
    ):
        name = f"log-probs, {wanted}, {dtype}, {options}{', entropy' * entropy}"
        yield name, lambda a=(dtype, options, wanted, entropy): call_logprobs(*a)
    for dtype, wanted, loss in itertools.product(DTYPES, ("no_grad", "frozen", "trainable"), LOSSES):
        for given in ("on policy", "old", "sampler") if dtype == "bf16" else ("sampler",):
            yield (
                f"loss, {wanted}, {dtype}, {loss}, {given}",
                lambda a=(dtype, "plain", wanted, loss, given): call_loss(*a),
            )
    for options, wanted in itertools.product(("softcap, scale", "bias"), ("frozen", "trainable")):
        yield f"loss, {wanted}, bf16, {options}", lambda a=(options, wanted): call_loss("bf16", *a, "dapo", "old")
    for loss, given in itertools.product(LOSSES, ("on policy", "old", "sampler")):
        yield f"grpo_loss, {loss}, {given}", lambda a=(loss, given): call_grpo_loss(*a)
    yield (
        "loss, trainable, while a graph is captured",
        lambda: captured(call_loss("bf16", "plain", "trainable", "dapo", "old")),
    )
    for tokens in (8192, 32768):  # with a KL term every row has a gradient
        yield (
            f"loss, trainable, N={tokens}, KL",
            lambda n=tokens: call_loss("bf16", "plain", "trainable", "grpo, KL", "old", N=n),
        )
    for sizes in ({"N": 64}, {"N": 1024}, {"V": 151665}, {"D": 1024}, {"N": 1, "V": 50257, "D": 768}):
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        yield f"loss, trainable, {shown}", lambda s=sizes: call_loss("bf16", "plain", "trainable", "dapo", "old", **s)
        yield f"log-probs, trainable, {shown}", lambda s=sizes: call_logprobs("bf16", "plain", "trainable", False, **s)


def walk(prepare: Callable[[], Callable[[], Any]], compiled: dict[str, Any], *, compiles: bool) -> dict[str, Any]:
    with pretended() as kernels:
        call, seen = prepare(), Seen()
        with seen:
            kept = call()
        del kept
    facts: dict[str, Any] = {
        "launches": seen.launches.total() + len(kernels),
        "ops": seen.launches,
        "kernels": len(kernels),
        "waits": seen.waits,
    }
    facts |= {"gemms": seen.gemms, "peak": seen.peak}
    for launch in kernels if compiles else ():
        with mock.patch.object(torch.Tensor, "data_ptr", aligned):
            source, options, key = compile_all.specialise(launch, "sm_90")
        if (known := f"{launch[0].__name__} {key}") not in compiled:
            compiled[known] = compile_all.triton.compile(source, target=compile_all.TARGETS["sm_90"], options=options)
    return facts | {"compiled": len(compiled)}


def main(*arguments: str) -> None:
    compiled: dict[str, Any] = {}
    for name, prepare in calls():
        try:
            facts = walk(prepare, compiled, compiles="--compile" in arguments)
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"call": name} | facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
