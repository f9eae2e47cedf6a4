"""All implementations that are measured: the bare products, ours, plain torch (implementations.py), and the peers.

Each peer runs in the setting that its own documentation or trainer uses for this task, and computes nothing that is not
compared. `limits` describes the works that it cannot do, from its sources at the version that is named here. On a CPU,
TRL and Liger take the torch paths that they have for devices without their kernels: such a time predicts nothing about
a GPU. A worker process imports one peer alone, because some set Triton's allocator or configure logging.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo.bench.heads.implementations import EPSILON, Implementation, no_compiler, ours, peer, plain, scored
from fused_grpo.bench.heads.work import Batch, Work

TRL, LIGER, CCE = "trl==1.16.0", "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1"
VERL, QUACK = "verl==0.9.1", "quack-kernels==0.6.5"
ROWS_OF_TORCH = 1024


def everyone() -> list[Implementation]:
    """The floor first, then ours, then the others, also those that are not installed."""
    return [*_without_imports(), *(make() for make in PEERS.values())]


def named(name: str) -> Implementation:
    """An implementation by its name, without importing the others."""
    return PEERS[name]() if name in PEERS else {entry.name: entry for entry in _without_imports()}[name]


def _without_imports() -> list[Implementation]:
    return [products(), *ours(), *plain()]


class Memory(NamedTuple):
    """The operands and results of the bare products."""

    rows: Tensor  # [N, D], the scored ones
    logits: Tensor  # [N, V]
    d_hidden: Tensor  # [N, D]
    d_weight: Tensor  # [V, D]


@dataclass(frozen=True, kw_only=True)
class Products(Implementation):
    """Full-size `torch.mm` into memory that exists already, and nothing else. The result has no meaning.

    The memory is made in the first run with a batch, and freed with the batch.
    """

    floor: bool = True
    _kept: dict[Work, Memory] = field(default_factory=dict, repr=False, compare=False)

    def why_not(self, work: Work, device: str) -> str | None:
        return None

    def forward(self, batch: Batch, work: Work) -> Tensor:
        memory = self._memory(batch, work)
        if batch.teacher_weight is not None:
            torch.mm(memory.rows, batch.teacher_weight.t(), out=memory.logits)
        return torch.mm(memory.rows, batch.weight.detach().t(), out=memory.logits)

    def backward(self, value: Tensor, batch: Batch, work: Work) -> None:
        memory, weight = self._memory(batch, work), batch.weight.detach()
        if work.gradients != "no_grad":
            torch.mm(memory.logits, weight, out=memory.d_hidden)
        if work.gradients == "trainable":
            torch.mm(memory.logits.t(), memory.rows, out=memory.d_weight)

    def _memory(self, batch: Batch, work: Work) -> Memory:
        if work not in self._kept:
            rows, weight = scored(batch.hidden.detach(), batch, work), batch.weight.detach()
            logits = rows.new_empty(len(rows), len(weight))
            self._kept[work] = Memory(rows, logits, torch.empty_like(rows), torch.empty_like(weight))
            weakref.finalize(batch.hidden, self._kept.pop, work, None)
        return self._kept[work]


def products() -> Implementation:
    """The floor: a lower bound for every implementation that computes all products."""
    setting = "torch.mm of logits, dH and dW, as the work has them"
    return Products(name="products alone", version=torch.__version__, setting=setting)


def trl(*, cast_lm_head_to_fp32: bool = False) -> Implementation:
    """The op behind TRL's trainers, called like `trl.trainer.utils.add_fused_lm_head` does where it has Triton.

    GRPOTrainer computes the entropy in the same pass, which costs extra, so it is left out here.
    """

    def load() -> dict[str, Any]:
        from trl.kernels import ChunkedLogProbFunction

        width = _width_of_trl()

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            # The op casts the head to the dtype of the hidden states, a tile at a time.
            hidden = hidden.float() if cast_lm_head_to_fp32 else hidden
            options = (1.0, width, work.shape.softcap, 1.0, ("log_probs",))
            values: Tensor = ChunkedLogProbFunction.apply(hidden, weight, None, targets, *options)[0]
            return values

        return {"logprobs": logprobs}

    if cast_lm_head_to_fp32:
        return peer("TRL, cast_lm_head_to_fp32", TRL, "the same op, its hidden states and head upcast", load)
    return peer("TRL", TRL, "ChunkedLogProbFunction, tiles of 4096 x 32768, given the scored rows", load)


def _width_of_trl() -> int:
    """Columns of a tile, from the module of the trainer in which the op looks up whether DeepSpeed sharded the head.

    That module needs more packages than the op. Where one is missing, a stand-in has the value of the version above.
    """
    try:
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE
    except ImportError:
        stand_in = types.ModuleType("trl.trainer.utils")
        vars(stand_in)["maybe_gather_lm_head_ctx"] = lambda *parameters: contextlib.nullcontext()
        sys.modules[stand_in.__name__] = stand_in
        return 32768
    return int(_CHUNKED_LOGPROB_CHUNK_SIZE)


def trl_divergence() -> Implementation:
    """The op of TRL's DistillationTrainer, given the scored rows, as that does where it has Triton."""

    def load() -> dict[str, Any]:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        def divergence(batch: Batch, work: Work) -> Tensor:
            assert batch.teacher_hidden is not None
            student, teacher = (scored(hidden, batch, work) for hidden in (batch.hidden, batch.teacher_hidden))
            models, softcap = (student, batch.weight, None, teacher, batch.teacher_weight, None), work.shape.softcap
            divergences: Tensor = ChunkedDivergenceFunction.apply(*models, 0.5, 1.0, 1.0, softcap, 1.0, softcap)[0]
            return divergences.mean()

        return {"divergence": divergence}

    return peer("TRL divergence", TRL, "ChunkedDivergenceFunction, tiles of 4096 x 32768, given the scored rows", load)


def liger_jsd() -> Implementation:
    """Liger's distillation loss without its term for hard labels, in its default chunks of 1024 rows."""

    def load() -> dict[str, Any]:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False)

        def divergence(batch: Batch, work: Work) -> Tensor:
            assert batch.teacher_hidden is not None
            student, teacher = (scored(hidden, batch, work) for hidden in (batch.hidden, batch.teacher_hidden))
            heads = (student, batch.weight, teacher, batch.teacher_weight)
            loss: Tensor = module(*heads, scored(batch.targets, batch, work))
            return loss

        return {"divergence": divergence}

    setting = "LigerFusedLinearJSDLoss, compiled=False, given the scored rows"
    return peer("Liger JSD", LIGER, setting, load, limits=_no_softcap)


def liger_grpo() -> Implementation:
    """Liger's GRPO loss, one chunk for the whole batch.

    Its default of one sequence a chunk adds to all of dW once for each sequence and is slower; its vocabulary slices
    bound the memory in both cases. It compiles the arithmetic on [B, T] numbers by default, without a measurable
    difference. It has no op for log-probs.
    """

    def load() -> dict[str, Any]:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        def loss(batch: Batch, work: Work) -> Tensor:
            module = LigerFusedLinearGRPOLoss(
                beta=0.0,
                use_ref_model=False,
                loss_type="dapo",
                epsilon_low=EPSILON,
                epsilon_high=EPSILON,
                compiled=False,
                chunk_size=len(batch.targets),
            )
            given = (batch.hidden, batch.weight, batch.targets, batch.mask, batch.advantages)
            loss: Tensor = module(*given, old_per_token_logps=batch.old_logprobs)[0]
            return loss

        return {"loss": loss}

    setting = "LigerFusedLinearGRPOLoss, one chunk, compiled=False, given the padded batch"
    return peer("Liger GRPO", LIGER, setting, load, limits=_no_softcap)


def liger_fslce() -> Implementation:
    """The op behind Liger's scaled cross entropy: CuTe kernels on Hopper, torch in steps of 512 tokens elsewhere."""

    def load() -> dict[str, Any]:
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            nll: Tensor = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets)
            return -nll

        return {"logprobs": logprobs}

    def limits(work: Work, device: str) -> str | None:
        if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
            if work.dtype != "bfloat16":
                return "takes only bf16 on Hopper"
            if importlib.util.find_spec("cutlass") is None:
                return f"has no CuTe DSL; fix: pip install '{LIGER.replace('==', '[cutedsl]==')}'"
        return _no_softcap(work, device)

    setting = "LigerFusedLinearScaledCrossEntropyFunction, without entropy"
    return peer("Liger FSLCE", LIGER, setting, load, limits=limits)


def cce(name: str, setting: str, *, limits: Callable[[Work, str], str | None], **options: Any) -> Implementation:
    """Apple's Cut Cross-Entropy."""

    def load() -> dict[str, Any]:
        from cut_cross_entropy import linear_cross_entropy

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            given = {"softcap": work.shape.softcap, "reduction": "none", **options}
            nll: Tensor = linear_cross_entropy(hidden, weight, targets, **given)
            return -nll

        return {"logprobs": logprobs}

    return peer(name, CCE, setting, load, limits=limits)


def torch_core() -> Implementation:
    """PyTorch's own, chunked; chunks of 1024 rows hold about as many bytes of logits as ours.

    Without a size it derives one from the aspect ratio of the head, which is a few rows for a vocabulary, and adds to
    all of dW once for each chunk: 16 rows and several times the duration for GPT-2's head on a CPU in fp32.
    """

    def load() -> dict[str, Any]:
        from torch.nn import LinearCrossEntropyOptions
        from torch.nn.functional import linear_cross_entropy

        options = LinearCrossEntropyOptions(batch_chunk_size=ROWS_OF_TORCH)

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            return -linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)

        return {"logprobs": logprobs}

    setting = f'linear_cross_entropy, reduction="none", chunks of {ROWS_OF_TORCH} rows'
    return peer("torch core", "torch>=2.13", setting, load, limits=_no_softcap)


def verl() -> Implementation:
    """verl's Triton kernels, called like its "triton" backend of `use_fused_kernels` does, entropy included."""

    def load() -> dict[str, Any]:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            values: Tensor = linear_cross_entropy(hidden, weight, targets, 1.0, "none")[0]
            return values

        return {"logprobs": logprobs}

    def limits(work: Work, device: str) -> str | None:
        if device == "cuda" and work.dtype == "float32":
            return "multiplies fp32 as TF32"
        if work.shape.hidden % 128:
            return "takes only hidden sizes that are multiples of 128"
        return _gpu_only(work, device) or _no_softcap(work, device)

    setting = "linear_cross_entropy, defaults: d logits in slices of the vocabulary"
    return peer("verl", VERL, setting, load, limits=limits)


def quack() -> Implementation:
    """QuACK's op with a loss per token. Its chunked op returns only sums or means, without weights of tokens."""

    def load() -> dict[str, Any]:
        from quack.linear_cross_entropy import linear_cross_entropy_func

        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
            nll: Tensor = linear_cross_entropy_func(
                hidden, weight, None, targets, reduction="none", inplace_backward=True
            )
            return -nll

        return {"logprobs": logprobs}

    def limits(work: Work, device: str) -> str | None:
        if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
            return "needs Hopper or later"
        return _gpu_only(work, device) or _no_softcap(work, device)

    setting = 'linear_cross_entropy_func, reduction="none", inplace_backward=True: full logits, then its cross entropy'
    return peer("quack", QUACK, setting, load, limits=limits)


def _no_softcap(work: Work, device: str) -> str | None:
    return "has no softcap" if work.shape.softcap is not None else None


def _gpu_only(work: Work, device: str) -> str | None:
    return None if device == "cuda" else "has kernels for GPUs only"


def _cce_kernels(work: Work, device: str) -> str | None:
    if device == "cuda" and work.dtype == "float32" and work.gradients != "no_grad":
        return "computes gradients in fp16 and bf16 only"
    return _gpu_only(work, device)


PEERS: dict[str, Callable[[], Implementation]] = {
    "TRL": trl,
    "TRL, cast_lm_head_to_fp32": functools.partial(trl, cast_lm_head_to_fp32=True),
    "TRL divergence": trl_divergence,
    "Liger GRPO": liger_grpo,
    "Liger JSD": liger_jsd,
    "Liger FSLCE": liger_fslce,
    "CCE": lambda: cce("CCE", 'impl="cce", filter_eps="high", its default', limits=_cce_kernels, impl="cce"),
    "CCE, exact": lambda: cce(
        "CCE, exact", 'impl="cce", filter_eps=None', limits=_cce_kernels, impl="cce", filter_eps=None
    ),
    "CCE, torch": lambda: cce("CCE, torch", 'impl="torch_compile"', limits=no_compiler, impl="torch_compile"),
    "torch core": torch_core,
    "verl": verl,
    "quack": quack,
}
