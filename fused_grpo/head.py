"""The language-model head as the ops see it: flat rows, its big GEMMs, and where its gradients accumulate.

The GEMMs belong to the vendor library. What this file guarantees around them: products of bf16 or fp16 inputs are
accumulated and *kept* in fp32 (logits are never rounded before the log-sum-exp, dW is never rounded between chunks),
and nothing of size N x V or a second copy of W is made on the way. CUDA does this in one call (`out_dtype`); elsewhere
W is widened a slice at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo import planner
from fused_grpo.reference import compute_dtype

# A slice of W as fp32 on the CPU: large enough for a good GEMM, small beside any chunk.
_SLICE_BYTES = 4 * 2**20


def full_precision(tensor: Tensor) -> torch.autocast:
    """No autocast in here: it would round logits and gradients behind our back."""
    return torch.autocast(tensor.device.type, enabled=False)


@dataclass(frozen=True)
class Head:
    """N rows that share a head."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N], all in [0, V)
    temperature: Tensor  # [N], fp32
    logit_scale: float
    softcap: float | None

    @property
    def dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs: of logits, statistics and accumulators."""
        return compute_dtype(self.hidden)

    def row_arguments(self, rows: slice) -> dict[str, Any]:
        """What a row pass needs to know of these rows besides their raw logits."""
        return {
            "bias": self.bias,
            "temperature": self.temperature[rows],
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
        }

    def chunked_logits(self, chunk_bytes: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """(rows, h.w for these rows [R, V]) over all rows. Every chunk lives in the same buffer."""
        (num_rows, _), vocab_size = self.hidden.shape, self.weight.shape[0]
        rows = planner.chunk_rows(num_rows, vocab_size, itemsize=self.dtype.itemsize, chunk_bytes=chunk_bytes)
        buffer = self.hidden.new_empty((rows, vocab_size), dtype=self.dtype)
        for chunk in planner.chunks(num_rows, rows):
            logits = buffer[: chunk.stop - chunk.start]
            self._logits_into(logits, self.hidden[chunk])
            yield chunk, logits

    def _logits_into(self, out: Tensor, hidden: Tensor) -> None:
        if hidden.dtype == out.dtype:
            torch.mm(hidden, self.weight.t(), out=out)
        elif hidden.is_cuda:
            torch.mm(hidden, self.weight.t(), out_dtype=out.dtype, out=out)
        else:
            wide = hidden.to(out.dtype)
            for columns, weight in widened(self.weight):
                torch.mm(wide, weight.t(), out=out[:, columns])


class HeadGradients:
    """dH, dW and db of one pass over the rows: only those asked for, W and b accumulated in fp32 (fp64 for fp64)."""

    def __init__(self, head: Head, *, hidden: bool, weight: bool, bias: bool) -> None:
        self._head = head
        self.hidden = torch.empty_like(head.hidden) if hidden else None
        self._weight = torch.zeros_like(head.weight, dtype=head.dtype) if weight else None
        self._bias = head.weight.new_zeros(head.weight.shape[0], dtype=head.dtype) if bias else None

    @property
    def gemm_dtype(self) -> torch.dtype:
        """What d-logits should be for the GEMMs: the tensor cores' width on a GPU, the accumulators' elsewhere."""
        return self._head.hidden.dtype if self._head.hidden.is_cuda else self._head.dtype

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Take in d(h.w) [R, V] of these rows."""
        if self.hidden is not None:
            self.hidden[rows] = self._hidden_gradient(dlogits)
        if self._weight is not None:
            self._add_weight_gradient(dlogits, self._head.hidden[rows])
        if self._bias is not None:
            self._bias += dlogits.sum(0, dtype=self._bias.dtype)

    def _hidden_gradient(self, dlogits: Tensor) -> Tensor:
        weight = self._head.weight
        if dlogits.dtype == weight.dtype:
            return dlogits @ weight
        out = dlogits.new_zeros((dlogits.shape[0], weight.shape[1]))
        for columns, wide in widened(weight):
            out.addmm_(dlogits[:, columns], wide)
        return out

    def _add_weight_gradient(self, dlogits: Tensor, hidden: Tensor) -> None:
        assert self._weight is not None
        if dlogits.dtype == self._weight.dtype:
            self._weight.addmm_(dlogits.t(), hidden.to(dlogits.dtype))
        else:
            torch.addmm(self._weight, dlogits.t(), hidden, out_dtype=self._weight.dtype, out=self._weight)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dH, dW, db), each in its input's dtype. The accumulators are given away."""
        head, self._head = self._head, None  # type: ignore[assignment]
        weight = None if self._weight is None else self._weight.to(head.weight.dtype)
        bias = None if self._bias is None or head.bias is None else self._bias.to(head.bias.dtype)
        hidden, self.hidden, self._weight, self._bias = self.hidden, None, None, None
        return hidden, weight, bias


def widened(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(columns of the logits, those rows of W in fp32), a slice at a time."""
    vocab_size, hidden_size = weight.shape
    step = max(1, _SLICE_BYTES // (hidden_size * torch.float32.itemsize))
    for columns in planner.chunks(vocab_size, step):
        yield columns, weight[columns].float()
