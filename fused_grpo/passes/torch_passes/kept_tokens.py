"""The passes over kept tokens in plain torch, with the contract of those in `fused_grpo.kernels`.

An entry is one kept token of one row; E entries, D hidden size. Nothing of size [E, D] exists: rows of the head are
read where they are, or gathered a block at a time, in cache on a CPU. Sums are in the dtype of the accumulators, in the
order of the entries.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fused_grpo.passes import buffers


def entry_logits(hidden: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor, *, dtype: torch.dtype) -> Tensor:
    """h.w [E] in `dtype` of the entries (rows [E], tokens [E]), from operands in the dtype of `hidden`."""
    out = torch.empty(len(tokens), dtype=dtype, device=tokens.device)
    if weight.is_cpu and weight.is_contiguous() and hidden.dtype == weight.dtype == dtype:
        # On a CPU alone: for a GPU there are kernels, and in 16 bits torch has no such product.
        _make_sparse_quiet()
        # The hidden states of runs are gathered, in the worst case one for each entry.
        for block in buffers.chunks(len(tokens), _most_entries(weight, dtype, buffers.CPU_TILE_BYTES)):
            out[block] = _sampled_products(hidden, weight, rows[block], tokens[block])
        return out
    for block in buffers.chunks(len(tokens), _most_entries(weight, dtype, buffers.BLOCK_BYTES)):
        w = weight.index_select(0, tokens[block]).to(hidden.dtype).to(dtype)
        out[block] = torch.linalg.vecdot(hidden.index_select(0, rows[block]).to(dtype), w)
    return out


def _sampled_products(hidden: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """h.w [E] of hidden [N, D] and weight [V, D], fp32 or fp64, as the entries of a sparse matrix.

    It has a line for each run of equal `rows`. `tokens` are in range: no bounds are checked here.
    """
    # No sparse matrix can be of a subclass.
    hidden, weight, rows, tokens = (x.as_subclass(Tensor) for x in (hidden, weight, rows, tokens))
    lines, lengths = torch.unique_consecutive(rows, return_counts=True)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values, size = torch.zeros_like(tokens, dtype=weight.dtype), (len(lines), len(weight))
    # Its invariants want the tokens of a line in order, which no product needs.
    wanted = torch.sparse_csr_tensor(offsets, tokens, values, size=size, device=weight.device, check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(wanted, hidden.index_select(0, lines), weight.t(), beta=0.0)
    return products.values()


@functools.cache
def _make_sparse_quiet() -> None:
    """The first sparse matrix of a process warns that there is more to come."""
    with warnings.catch_warnings(action="ignore"):
        torch.eye(1, device="cpu").to_sparse_csr()


def weighted_rows_(
    out: Tensor,
    places: Tensor,
    offsets: Tensor,
    index: Tensor,
    factors: Tensor,
    matrix: Tensor,
    *,
    cast: torch.dtype,
    accumulate: bool = False,
) -> Tensor:
    """out[places_i] = (out[places_i] +) sum of factors_e * matrix[index_e] over offsets_i <= e < offsets_(i+1).

    No place occurs twice. The rows of `matrix` are rounded to `cast`, their sum is in the dtype of `factors`.
    """
    is_plain = matrix.dtype == factors.dtype == cast
    for segments, entries in _blocks(offsets, _most_entries(matrix, factors.dtype, buffers.BLOCK_BYTES)):
        ends, vectors, table = offsets[segments.start : segments.stop + 1] - entries.start, index[entries], matrix
        if not is_plain:
            table = matrix.index_select(0, vectors).to(cast).to(factors.dtype)
            vectors = torch.arange(len(vectors), device=vectors.device)
        options = {"per_sample_weights": factors[entries], "mode": "sum", "include_last_offset": True}
        sums = embedding_bag(vectors, table, ends, **options)  # type: ignore[arg-type]
        sums = out.index_select(0, places[segments]) + sums if accumulate else sums
        out.index_copy_(0, places[segments], sums.to(out.dtype))
    return out


def _most_entries(matrix: Tensor, dtype: torch.dtype, on_cpu: int) -> int:
    """How many gathered rows of the size of those of `matrix`, in `dtype`, a block holds."""
    budget = on_cpu if matrix.is_cpu else buffers.DEFAULT_TILE_BYTES
    return max(1, budget // max(1, matrix.shape[1] * dtype.itemsize))


def _blocks(offsets: Tensor, most: int) -> Iterator[tuple[slice, slice]]:
    """(segments, their entries) with at most `most` entries together, or one segment."""
    ends, start = offsets.cpu(), 0
    while start < len(ends) - 1:
        fitting = int(torch.searchsorted(ends, ends[start] + most, right=True)) - 1
        stop = max(start + 1, fitting)
        yield slice(start, stop), slice(int(ends[start]), int(ends[stop]))
        start = stop
