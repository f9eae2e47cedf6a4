"""Every branch of the ops for CUDA, walked without a GPU: `walk.py [--compile]`.

What our Python would launch is real, and nothing computes: see bench/predictions/cuda_trace.py. Needs a CUDA build of
torch and a process without TRITON_INTERPRET. Prints a JSON object per call: its launches and waits, the GEMMs it asked
for, the most bytes that it held at a time, and with --compile how many kernels Triton compiled for sm_90, in all calls
together, with exactly the arguments that they were launched with.
"""

import itertools
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))
import compile_all
from torch.utils._python_dispatch import _disable_current_modes

from fused_grpo import (
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    grpo_loss,
    linear_logprobs_and_entropy,
)
from fused_grpo.bench.predictions.cuda_trace import Launch, Trace, aligned, fake_gpu, fake_with_values
from fused_grpo.head import registered_ops

N, D, V = 8192, 4096, 151936
MEMORY = 141 * 2**30
DTYPES = {"bf16": (torch.bfloat16,) * 2, "fp16": (torch.float16,) * 2, "fp32": (torch.float32,) * 2}
DTYPES["master weight"] = (torch.bfloat16, torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "softcap, scale": {"softcap": 30.0, "logit_scale": 0.5}}
OPTIONS["bias"] = {}  # made with the other tensors


def head(dtype: str, options: str, **sizes: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    n, d, v = (sizes.get(name, size) for name, size in (("N", N), ("D", D), ("V", V)))
    hidden_dtype, weight_dtype = DTYPES[dtype]
    tensors = {
        "hidden": torch.empty(n, d, dtype=hidden_dtype, device="cuda"),
        "weight": torch.empty(v, d, dtype=weight_dtype, device="cuda"),
        "targets": torch.empty(n, dtype=torch.int64, device="cuda"),
    }
    given = dict(OPTIONS[options])
    if options == "bias":
        given["bias"] = torch.empty(v, dtype=weight_dtype, device="cuda")
    return tensors, given


def call_logprobs(
    dtype: str, options: str, wanted: str, entropy: bool, *several: int, **sizes: int
) -> Callable[[], Any]:
    """With `several`, K targets per row."""
    tensors, given = head(dtype, options, **sizes)
    tensors["targets"] = torch.empty(len(tensors["targets"]), *several, dtype=torch.int64, device="cuda")
    temperature = torch.empty(len(tensors["targets"]), device="cuda")
    flags = [wanted != "no_grad", wanted == "trainable", wanted == "trainable" and "bias" in given]
    inputs = (tensors["hidden"], tensors["weight"], given.get("bias"), tensors["targets"], temperature)
    rest = (given.get("logit_scale", 1.0), given.get("softcap"), -100, entropy, "auto", None, False, True, flags)

    def call() -> Any:
        *out, _ = registered_ops._linear_logprobs(*inputs, False, *rest)
        if wanted == "no_grad":
            return out
        grads = (torch.empty_like(out[0]), torch.empty_like(out[1]) if entropy else None)
        return registered_ops._linear_logprobs_backward(*inputs, *out, *grads, *rest)

    return call


LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.04},
    "sequence": {"importance_sampling_level": "sequence"},
    "entropy bonus": {"entropy_coef": 0.01},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "quantile": {"top_entropy_quantile": 0.2},
    "dppo": {"loss_type": "dppo_kl", "epsilon": 0.05},
    "gmpo, of a sequence": {"loss_type": "gmpo", "epsilon": 0.4},
}


def call_loss(
    dtype: str, options: str, wanted: str, loss: str, given: str, *, entropy: bool = True, **sizes: int
) -> Callable[[], Any]:
    tensors, rest = head(dtype, options, **sizes)
    n = len(tensors["targets"])
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


def call_divergence(dtype: str, wanted: str, kind: str, **options: Any) -> Callable[[], Any]:
    """A teacher of half the hidden size, in bf16."""
    student, teacher = head(dtype, "plain")[0], head("bf16", "plain", D=D // 2)[0]
    student["hidden"].requires_grad_(wanted != "no_grad")
    student["weight"].requires_grad_(wanted == "trainable")
    models = [models[name] for models in (student, teacher) for name in ("hidden", "weight")]
    given: dict[str, Any] = {"kind": kind, "mask": torch.empty(N, dtype=torch.bool, device="cuda"), **options}
    return lambda: fused_linear_divergence(*models, num_tokens=1e4, **given)


def call_support(dtype: str, wanted: str, options: str = "plain", *, loss: str | None = None) -> Callable[[], Any]:
    """Most rows keep 20 tokens, some a thousand, and some everything. Without `loss`, log-probs and entropies."""
    tensors, rest = head(dtype, options)
    tensors["hidden"] = torch.empty(1, N, D, dtype=tensors["hidden"].dtype, device="cuda")
    tensors["hidden"].requires_grad_(wanted != "no_grad")
    for name in ("weight", "bias"):
        if wanted == "trainable" and (leaf := tensors.get(name, rest.get(name))) is not None:
            leaf.requires_grad_()
    with _disable_current_modes():
        sizes = torch.full((N,), 20)
        sizes[::8], sizes[1::256] = 0, 1000
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        row = torch.arange(N).repeat_interleave(sizes)
        token_ids = (31 * row + torch.arange(len(row)) - offsets[row]) % V
        values = {"targets": 31 * torch.arange(N)[None] % V, "mask": torch.ones(1, N), "advantages": torch.ones(1)}
    fake = {name: fake_with_values(its) for name, its in values.items()}
    rest |= {"support": (fake_with_values(token_ids), fake_with_values(offsets))}
    tensors["targets"] = fake.pop("targets")
    if loss is not None:
        names = ["old_logprobs", "ref_logprobs"][: 1 + bool(LOSSES[loss].get("beta"))]
        rest |= fake | {name: torch.empty(1, N, device="cuda") for name in names}
        config = GRPOLossConfig(**LOSSES[loss])
        return lambda: fused_linear_grpo_loss(**tensors, **rest, config=config, num_tokens=1e4, num_sequences=64.0)

    def call() -> Any:
        output = linear_logprobs_and_entropy(**tensors, **rest)
        if wanted != "no_grad":
            output.logprobs.backward(torch.empty_like(output.logprobs))
        return output

    return call


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
    for dtype, options, wanted in itertools.product(DTYPES, OPTIONS, ("no_grad", "frozen", "trainable")):
        for entropy in (False, True) if options == "plain" else (False,):
            name = f"log-probs, {wanted}, {dtype}, {options}{', entropy' * entropy}, 8 targets"
            yield name, lambda a=(dtype, options, wanted, entropy, 8): call_logprobs(*a)
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
    for dtype, wanted, kind in itertools.product(
        DTYPES, ("no_grad", "frozen", "trainable"), ("reverse_kl", "forward_kl", "jsd")
    ):
        yield f"divergence, {wanted}, {dtype}, {kind}", lambda a=(dtype, wanted, kind): call_divergence(*a)
    yield (
        "divergence, trainable, bf16, soft caps",
        lambda: call_divergence("bf16", "trainable", "jsd", student_softcap=30.0, teacher_softcap=50.0),
    )
    for dtype, wanted in itertools.product(DTYPES, ("no_grad", "frozen", "trainable")):
        for options in OPTIONS if dtype == "bf16" else ("plain",):
            shown = f"{wanted}, {dtype}, {options}"
            yield f"kept tokens, log-probs, {shown}", lambda a=(dtype, wanted, options): call_support(*a)
        for loss in ("dapo", "sequence", "entropy bonus") if dtype == "bf16" else ("dapo",):
            shown = f"{wanted}, {dtype}, {loss}"
            yield f"kept tokens, loss, {shown}", lambda a=(dtype, wanted), loss=loss: call_support(*a, loss=loss)
    for sizes in ({"N": 64}, {"N": 1024}, {"V": 151665}, {"D": 1024}, {"N": 1, "V": 50257, "D": 768}):
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        yield f"loss, trainable, {shown}", lambda s=sizes: call_loss("bf16", "plain", "trainable", "dapo", "old", **s)
        yield f"log-probs, trainable, {shown}", lambda s=sizes: call_logprobs("bf16", "plain", "trainable", False, **s)


@dataclass(frozen=True)
class Compiler:
    """Compiles kernels for sm_90, in other processes, each once for all launches that Triton would compile it for."""

    pool: ProcessPoolExecutor
    futures: dict[str, Future[None]] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)

    def add(self, launch: Launch) -> str:
        """The key in `futures` of what it needs."""
        shown = described(launch)
        if shown not in self.seen:
            self.seen[shown] = key = f"{launch[0].__name__} {specialised(launch)[2]}"
            if key not in self.futures:
                kernel, args, kwargs = launch
                self.futures[key] = self.pool.submit(compiled, kernel.__module__, kernel.__name__, args, kwargs)
        return self.seen[shown]


def described(launch: Launch) -> str:
    """All that Triton looks at, and more: values where it may only ask whether 16 divides them."""
    kernel, args, kwargs = launch
    values = [
        (x.base.dtype, x.block_shape) if isinstance(x, TensorDescriptor) else x.dtype if isinstance(x, Tensor) else x
        for x in args
    ]
    return f"{kernel.__name__} {values} {kwargs}"


def specialised(launch: Launch) -> tuple[Any, dict[str, Any], str]:
    with mock.patch.object(torch.Tensor, "data_ptr", aligned):
        return compile_all.specialise(launch, "sm_90")


def compiled(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    source, options, _ = specialised((getattr(sys.modules[module], name), args, kwargs))
    compile_all.triton.compile(source, target=compile_all.TARGETS["sm_90"], options=options)


def walk(prepare: Callable[[], Callable[[], Any]]) -> Trace:
    """Half of the rows are scored, and have a gradient."""
    with fake_gpu(capability=(9, 0), memory=MEMORY):
        call, trace = prepare(), Trace(share=0.5)
        with trace:
            kept = call()
    del kept
    return trace


def facts_of(trace: Trace) -> dict[str, Any]:
    return {
        "launches": len(trace.operations),
        "ops": Counter(operation.name for operation in trace.operations if not operation.triton),
        "kernels": len(trace.kernels),
        "waits": trace.waits,
        "gemms": trace.gemms,
        "peak": trace.peak,
    }


def main(*arguments: str) -> None:
    rows: list[tuple[dict[str, Any], list[str]]] = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        compiler = Compiler(pool)
        for name, prepare in calls():
            facts, keys = {"call": name}, []
            try:
                trace = walk(prepare)
                facts |= facts_of(trace)
                keys = [compiler.add(launch) for launch in trace.kernels] if "--compile" in arguments else []
            except Exception as error:
                facts["error"] = f"{type(error).__name__}: {error}"
            rows.append((facts, keys))
        for facts, keys in rows:
            errors = (compiler.futures[key].exception() for key in dict.fromkeys(keys))
            if error := next((error for error in errors if error is not None), None):
                facts["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(facts | {"compiled": len(compiler.futures)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
