"""The row passes in plain torch: the path for CPUs, and for any device that Triton does not serve.

The same passes that `fused_grpo.kernels` offers, so that the ops are written once over either module. `logits` [R, C]
is always a tile of raw h.w: some rows, and the whole vocabulary or a stretch of it, rows or columns in one piece in
memory. The passes walk it in blocks that fit the caches: a block is exponentiated, summed and differentiated while it
is still there, in place, or where that cannot be in scratch of its size. That keeps the peak at one tile and is also
the fast way on a CPU.
The numerics are those of `statistics.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo import planner, reference
from fused_grpo.config import TokenTerms
from fused_grpo.planner import BLOCK_BYTES
from fused_grpo.statistics import RowState, anchors, finish_rows, finite, share_of_others, start_rows

_PARTS = 4


def fold_tile_(
    logits: Tensor,
    targets: Tensor,
    state: RowState,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    weights: torch.dtype | None = None,
    weights_scale: float = 1.0,
    anchored: bool = False,
) -> Tensor | None:
    """Fold a tile [R, C] into the state of its rows; `targets` are -1 where the target is in another tile.

    With `weights`, the tile is overwritten by weights_scale * e^(z - m) * dsoftcap, 0 at the target, in that dtype, and
    returned: a view of its memory. Sums that were weighted before are relative to the m of then: scale them by
    e^(m_then - m). Without, the tile is left as it was.

    The state's m is raised to the largest logit, for which the tile is looked through once more. Rows that are
    `anchored` get theirs from the first block of their first tile.
    """
    tile = _Tile(logits, targets, bias, temperature, logit_scale, softcap)
    out = None if weights is None else _in_place(logits, weights)
    target_logit, _ = tile.at_target()
    state.target_logit.copy_(torch.where(tile.has_target, target_logit, state.target_logit))
    if not anchored:
        _raise_shift(state, tile.largest())
    elif not state.total.any():
        state.shift.copy_(anchors(tile.largest(most=1)))
    shift = finite(state.shift)[:, None]
    unshifted = anchored and not shift.any()
    # Straight to where it belongs, unless it has yet to be scaled or narrowed.
    direct = out is not None and out.dtype == logits.dtype and weights_scale == 1.0
    totals, products = tile.partial_sums(), tile.partial_sums() if entropy else None
    for block in tile.blocks(slope=out is not None, keep=out is None):
        rows, place = block.rows, None if out is None else out[block.rows, block.columns]
        e = place if direct and place is not None else block.scratch(1 if entropy else 0)
        centred = block.z
        if not unshifted:
            centred = torch.sub(block.z, shift[rows], out=block.scratch(0) if entropy else e)
        torch.exp(centred, out=e)
        if products is not None:
            # Below -128 exp is 0 or all but: the clamps only keep 0 * -inf out.
            products[block.part, rows] = tile.sums(centred.clamp_min_(-128.0).mul_(e))
        totals[block.part, rows] = tile.sums(e)
        if place is not None:
            e = e if block.slope is None else e.mul_(block.slope)
            if not direct:
                torch.mul(e, weights_scale, out=place)
    # Blocks first: their number grows with that of the rows, and so would the error of adding one to the next.
    state.total.add_(totals.sum(0))
    if products is not None:
        state.weighted.add_(products.sum(0))
    return out


def _raise_shift(state: RowState, largest: Tensor) -> None:
    """Make m no less than `largest` [R]."""
    top = torch.maximum(state.shift, largest)
    drop = state.shift - finite(top)
    rescale = drop.exp()
    state.weighted.add_(drop.clamp_min(-128.0) * state.total).mul_(rescale)
    state.total.mul_(rescale)
    state.shift.copy_(top)


def row_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, RowState]:
    """(log p [R], entropy [R] or None, their state) of whole rows that are left as they were."""
    state = start_rows(len(targets), dtype=logits.dtype, device=logits.device)
    options = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    fold_tile_(logits, targets, state, **options, entropy=entropy)  # type: ignore[arg-type]
    logprobs, entropies = finish_rows(state)
    return logprobs, entropies if entropy else None, state


def logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    maximum: Tensor,
    total: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """d(h.w) [R, C] in `dtype`, written over a tile: it shares the memory, at half width for 16-bit dtypes.

    `targets` are -1 where the target is in another tile; the statistics are those of the whole row, `maximum` its m.
    """
    tile, out = _Tile(logits, targets, bias, temperature, logit_scale, softcap), _in_place(logits, dtype)
    _, slope_at_target = tile.at_target()
    # Of each row, [R, 1]: once for the tile, not for each of its blocks.
    log_p_target, upstream, shift = logprobs[:, None], grad_logprobs[:, None], finite(maximum)[:, None]
    slope, share = logit_scale / temperature[:, None], share_of_others(log_p_target, total[:, None])
    at_target = upstream * -torch.expm1(log_p_target)
    factor = -upstream * slope * share
    of_entropy = None
    if grad_entropy is not None and entropy is not None:
        upstream_entropy, mean = grad_entropy[:, None], entropy[:, None]
        # The clamps, here and below, keep 0 * -inf out; beyond them a factor is 0 or all but.
        surprise = log_p_target.clamp_min(-128.0) + mean
        at_target = at_target - upstream_entropy * log_p_target.exp() * surprise
        of_entropy = -upstream_entropy, share.clamp_min(torch.finfo(share.dtype).tiny).log() + mean
        factor = slope * share
    at_target = at_target * slope if slope_at_target is None else at_target * slope * slope_at_target[:, None]
    for block in tile.blocks(slope=True, keep=False):
        rows, place = block.rows, out[block.rows, block.columns]
        # Straight to where it belongs, one pass less, unless it has yet to be narrowed.
        e = place if place.dtype == logits.dtype else block.scratch(1)
        centred = torch.sub(block.z, shift[rows], out=e if of_entropy is None else block.scratch(0))
        torch.exp(centred, out=e)
        if of_entropy is not None:
            push, offset = (value[rows] for value in of_entropy)
            e.mul_(centred.clamp_min_(-128.0).add_(offset).mul_(push).sub_(upstream[rows]))
        e.mul_(factor[rows])
        if block.slope is not None:
            e.mul_(block.slope)
        if e is not place:
            place.copy_(e)
    column = tile.column[:, None]
    out.scatter_(1, column, torch.where(tile.has_target[:, None], at_target.to(dtype), out.gather(1, column)))
    return out


def weights_(
    logits: Tensor,
    targets: Tensor,
    *,
    maximum: Tensor,
    bias: Tensor | None = None,
    temperature: Tensor,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """e^(z - m) * dsoftcap [R, C] over a tile, 0 at the target, with m that of the whole row, `maximum` [R]."""
    tile, shift = _Tile(logits, targets, bias, temperature, logit_scale, softcap), finite(maximum)[:, None]
    for block in tile.blocks(slope=True, keep=False):
        e = torch.sub(block.z, shift[block.rows], out=logits[block.rows, block.columns]).exp_()
        if block.slope is not None:
            e.mul_(block.slope)
    return logits


def _in_place(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`logits` [R, C] as memory for [R, C] of `dtype`; 16-bit dtypes take the front half of each row."""
    return logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]


def grpo_token_loss(
    logprobs: Tensor, *, log_ratio: Tensor | None = None, inputs: dict[str, Tensor | None], terms: TokenTerms
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(d loss / d log p [N], d loss / d log_ratio [N] if given, the statistics of `reference.token_loss`).

    `inputs` are the other [N] arguments of `reference.token_loss`.
    """
    everything = {"logprobs": logprobs, "log_ratio": log_ratio, **inputs}
    with torch.inference_mode(False), torch.enable_grad():
        # Tensors of inference mode cannot take part in autograd; copies of them can.
        ours = {name: x.clone() if x is not None and x.is_inference() else x for name, x in everything.items()}
        for name in ("logprobs", "log_ratio"):
            value = ours[name]
            ours[name] = None if value is None else value.detach().requires_grad_()
        leaves = [x for x in (ours["logprobs"], ours["log_ratio"]) if x is not None]
        loss, statistics = reference.token_loss(**ours, terms=terms)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return gradients[0], None if log_ratio is None else gradients[1], statistics


class _Block(NamedTuple):
    """A piece of a tile with its transformed logits."""

    tile: _Tile
    part: int  # of a row: the row passes add up blocks last
    rows: slice
    columns: slice
    z: Tensor  # [r, c], -inf at the targets; the tile itself where nothing transforms it, else scratch 0
    slope: Tensor | None  # [r, c] dz/dx of the soft cap, None without one

    def scratch(self, number: int) -> Tensor:
        """[r, c]."""
        return self.tile.scratch(number, *self.z.shape)


class _Tile:
    """A tile [R, C], what makes logits of its raw ones, and where its targets are."""

    def __init__(
        self,
        raw: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        logit_scale: float,
        softcap: float | None,
    ) -> None:
        self.raw, self.targets, self.bias, self.temperature = raw, targets, bias, temperature[:, None]
        self.logit_scale, self.softcap = logit_scale, softcap
        self.has_target, self.column = targets >= 0, targets.clamp_min(0)
        # At one temperature and scale 1 the raw logits are the logits; half of all calls, and a pass saved.
        self.as_it_is = bias is None and softcap is None and _all_equal(temperature, logit_scale)
        self.in_columns = raw.stride(0) < raw.stride(1)
        across = raw.shape[0] if self.in_columns else raw.shape[1]
        # Powers of two cut the rows of a batch-invariant tile into blocks that are all alike.
        self.thickness = 1 << (max(1, BLOCK_BYTES // max(1, across * raw.element_size())).bit_length() - 1)
        self._scratch: dict[int, Tensor] = {}

    def at_target(self) -> tuple[Tensor, Tensor | None]:
        """(z, its slope), each [R], at the target; of no meaning where it is in another tile."""
        column = self.column[:, None]
        raw, bias = self.raw.gather(1, column), None if self.bias is None else self.bias[column]
        z, slope = self._transformed(raw, bias, slice(None), torch.empty_like(raw), slope=True)
        return z[:, 0], None if slope is None else slope[:, 0]

    def blocks(self, *, slope: bool, keep: bool, most: int | None = None) -> Iterator[_Block]:
        """A cache-sized block at a time, all or the first; `keep` what is in the tile where it is not written over."""
        whole = slice(0, self.raw.shape[0]), slice(0, self.raw.shape[1])
        pieces = planner.chunks(self.raw.shape[1 if self.in_columns else 0], self.thickness)
        shown = _hide_(self.raw, self.targets) if self.as_it_is else ()
        for number, some in enumerate(itertools.islice(pieces, most)):
            rows, columns = (whole[0], some) if self.in_columns else (some, whole[1])
            raw, bias = self.raw[rows, columns], None if self.bias is None else self.bias[columns]
            z, slopes = raw, None
            if not self.as_it_is:
                z, slopes = self._transformed(raw, bias, rows, self.scratch(0, *raw.shape), slope=slope)
                _hide_(z, self.targets[rows] - columns.start)
            yield _Block(self, number if self.in_columns else 0, rows, columns, z, slopes)
        if keep and self.as_it_is:
            self.raw.scatter_(1, *shown)

    def largest(self, *, most: int | None = None) -> Tensor:
        """The largest logit but the target's, [R], of all blocks or the first."""
        found = self.raw.new_full((len(self.raw),), -torch.inf)
        for block in self.blocks(slope=False, keep=True, most=most):
            found[block.rows] = torch.maximum(found[block.rows], block.z.amax(1))
        return found

    def partial_sums(self) -> Tensor:
        """[blocks of a row, R] of zeros."""
        rows, columns = self.raw.shape
        return self.raw.new_zeros(-(-columns // self.thickness) if self.in_columns else 1, rows)

    def sums(self, values: Tensor) -> Tensor:
        """[r] over the columns of a block [r, c].

        Where columns are in one piece, in parts: twice as fast as one sum. (A product with ones would be as fast, and
        add one column to the next: equal ones would all round alike.)
        """
        if not self.in_columns or values.shape[1] % _PARTS:
            return values.sum(1)
        parts: Tensor = values.t().unflatten(0, (_PARTS, -1))
        return parts.sum(1).sum(0)

    def scratch(self, number: int, rows: int, columns: int) -> Tensor:
        """[r, c], in the order of the tile, made when it is first asked for, which is for the largest block."""
        if number not in self._scratch:
            self._scratch[number] = self.raw.new_empty(rows * columns)
        flat = self._scratch[number][: rows * columns]
        return flat.view(columns, rows).t() if self.in_columns else flat.view(rows, columns)

    def _transformed(
        self, raw: Tensor, bias: Tensor | None, rows: slice, out: Tensor, *, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(z, dz/dx of the soft cap if there is one and it is asked for), from `raw` [r, c] into `out`."""
        raw = raw if bias is None else torch.add(raw, bias, out=out)
        if self.softcap is None:
            # Where temperature and scale are equal this is exactly 1: a row is multiplied or not, to the same bits.
            return torch.mul(raw, self.logit_scale / self.temperature[rows], out=out), None
        torch.mul(raw, self.logit_scale / self.softcap, out=out).tanh_()
        slopes = 1 - out.square() if slope else None
        return out.mul_(self.softcap / self.temperature[rows]), slopes


def _hide_(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-inf at the targets that are columns of z [R, C]; what `z.scatter_(1, ...)` brings them back with."""
    column = targets[:, None].clamp(0, z.shape[1] - 1)
    kept = z.gather(1, column)
    z.scatter_(1, column, torch.where(targets[:, None] == column, -torch.inf, kept))
    return column, kept


def _all_equal(temperature: Tensor, value: float) -> bool:
    return temperature.device.type == "cpu" and bool((temperature == value).all())
