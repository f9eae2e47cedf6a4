"""A head over the kept tokens: the softmax of a row is over the tokens that its sampler kept, not over the vocabulary.

Under top-p, top-k or min-p a sampler draws from a few tokens, renormalised. With S_n the tokens kept in row n,

    log p_n = z_t - logsumexp(z_v over v in S_n)        H_n = -sum over v in S_n of p_v log p_v

and all that a gradient needs are the logits of the entries (`entries.py`), E of them:

    x_e = h_n . w_v + b_v        one number per entry, kept from the forward to the backward pass
    g_e = dL / dx_e              by the passes over rows, on tiles [R, K] of rows with similarly many entries
    dH_n = sum of g_e w_v over the entries of row n
    dW_v = sum of g_e h_n over the entries of token v        db_v = sum of g_e

6*E*D FLOP take the place of 6*N*D*V; gathering the rows of W decides the time. For dW the entries are sorted by token
and summed in that order, without atomics. Segments of more than `PIECE` entries (a row that keeps much, a token that
many rows keep) are summed in pieces, and then the pieces are: no program is much longer than the others, and rounding
errors do not grow with the length.

In a tile, the places past the end of a row are -inf, after the soft cap: tokens of probability 0, which no pass treats
in another way. Rows without a restriction go through `logprob_plans.py`: 1U forward, 3U backward.

Letters: N rows, E entries, D hidden size, V vocabulary; R rows of a tile, K its largest number of kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_grpo._maths import distributions
from fused_grpo._maths.moments import RowsMoments
from fused_grpo._maths.statistics import RowState, Statistics, Upstream, full_precision, joined
from fused_grpo.head import logprob_plans
from fused_grpo.head.checks import differentiated_once, outside_graphs, save_for_backward, saved_tensors
from fused_grpo.head.entries import Entries, Segments, Support, kept_entries
from fused_grpo.head.head import Gradients, Head, Wanted
from fused_grpo.passes import buffers, choice
from fused_grpo.passes.protocol import RowPasses

PIECE = 256
"""How many entries are summed at a time."""

# A tile and the temporaries of its entries take about this many numbers per place.
_COPIES = 6


class SupportedHead:
    """The rows of a head that `take_part` [N], some of them restricted to their support.

    `statistics` computes the logits of the entries, from which `gradients` takes the gradients.
    """

    def __init__(
        self,
        head: Head,
        support: Support,
        take_part: Tensor,
        passes: RowPasses,
        *,
        chunk_bytes: int | None,
        wanted: Wanted,
    ) -> None:
        self.head, self._passes, self._chunk_bytes, self._wanted = head, passes, chunk_bytes, wanted
        self._all_segments = Segments(support[1])
        self.full_rows = (take_part & (self._all_segments.sizes == 0)).nonzero()[:, 0]
        self._entries, self._places = kept_entries(support, head.targets, take_part)

    @property
    def items(self) -> Tensor:
        """The places of the entries among the support's token_ids, [E]."""
        return self._all_segments.select(self._entries.rows)[0]

    @property
    def row_of_entries(self) -> Tensor:
        """[E]"""
        return self._entries.rows[self._entries.row]

    def statistics(self, *, entropy: bool, moments: bool = False) -> Statistics:
        """The statistics of all rows, [N] each, 0 for rows that take no part; with `moments`, for a call of that."""
        head, parts = self.head, []
        if len(self.full_rows):
            row_moments = RowsMoments(len(head.weight)) if moments else None
            options = logprob_plans.Options(entropy, self._chunk_bytes, wanted=self._wanted, moments=row_moments)
            parts.append((self.full_rows, logprob_plans.forward(head.select(self.full_rows), self._passes, options)))
            if row_moments is not None:
                self._full_row_moments = row_moments.finish(parts[0][1])
        with full_precision(head.hidden):
            self._raw = self._logits()
            tiles = self._tiles(self._entries, self._raw)
            groups = [self._tile_statistics(z, self._places[rows], entropy=entropy) for rows, _, z in tiles]
        parts += [(self._entries.rows, joined(groups))] if groups else []
        fields = [head.temperature.new_zeros(len(head.targets)) for _ in Statistics._fields]
        for rows, values in parts:
            for out, column in zip(fields, values, strict=True):
                if column is not None:
                    out.index_copy_(0, rows, column)
        logprobs, entropies, shifts, totals = fields
        return Statistics(logprobs, entropies if entropy else None, shifts, totals)

    def _logits(self) -> Tensor:
        """x = h.w + b of the entries, [E]."""
        head, e = self.head, self._entries
        raw: Tensor = self._passes.entry_logits(head.hidden, head.weight, e.rows[e.row], e.tokens, dtype=head.dtype)
        return raw if head.bias is None else raw.add_(head.bias[e.tokens])

    def _tiles(self, e: Entries, raw: Tensor) -> Iterator[tuple[slice, tuple[slice, Tensor, Tensor], Tensor]]:
        """(rows, (their entries, the row and the column of each in the tile), logits z [R, K])."""
        head, device = self.head, raw.device
        most = buffers.chunk_budget(self._chunk_bytes, device) // (_COPIES * head.dtype.itemsize)
        for rows, items, width in e.tiles(most):
            row = e.row[items]
            values = self._transformed(raw[items], e.rows[row])
            column = torch.arange(items.start, items.stop, device=device) - e.segments.offsets[row]
            z = self._passes.empty_tile(rows.stop - rows.start, width, dtype=head.dtype, device=device)
            z.fill_(-torch.inf)[row - rows.start, column] = values
            yield rows, (items, row - rows.start, column), z

    def _transformed(self, raw: Tensor, rows: Tensor) -> Tensor:
        """z [E] of entries of `rows` [E] from h.w + b."""
        temperature, scale, softcap = self.head.temperature[rows], self.head.logit_scale, self.head.softcap
        given = raw[:, None]
        return distributions.transform_logits(given, temperature=temperature, logit_scale=scale, softcap=softcap)[:, 0]

    def entry_logprobs(self, statistics: Statistics) -> Tensor:
        """log p of the entries, [E], from the statistics of all rows."""
        e, z = self._entries, self._transformed(self._raw, self.row_of_entries)
        target_logits = z[e.segments.offsets[:-1] + self._places]
        return statistics.logprobs[self.row_of_entries] + (z - target_logits[e.row])

    def moments(self, statistics: Statistics) -> Tensor:
        """`finish_moments` [3, N] of the rows over their kept tokens, 0 for rows that take no part."""
        e, z = self._entries, self._transformed(self._raw, self.row_of_entries)
        target_entries = e.segments.offsets[:-1] + self._places
        target_logits = z[target_entries][e.row]
        # `argmax` over the vocabulary takes the first of the largest. Where a logit is NaN, no target leads.
        before = torch.where(z == target_logits, e.tokens < e.tokens[target_entries][e.row], ~(z < target_logits))
        leads = self._sums(before.to(z.dtype)) == 0
        squares = self._sums(torch.exp(2 * self.entry_logprobs(statistics)))
        parts = [squares, self._sums(z) / e.segments.sizes, leads.to(z.dtype)]
        moments = z.new_zeros(3, len(self.head.targets)).index_copy_(1, e.rows, torch.stack(parts))
        return moments.index_copy_(1, self.full_rows, self._full_row_moments) if len(self.full_rows) else moments

    def sums_of_rows(self, values: Tensor) -> Tensor:
        """For each entry the sum of `values` [E] over its row, [E]."""
        return self._sums(values)[self._entries.row]

    def _sums(self, values: Tensor) -> Tensor:
        lengths = self._entries.segments.sizes
        return torch.segment_reduce(values, "sum", lengths=lengths, initial=0, unsafe=True)

    def _tile_statistics(self, z: Tensor, places: Tensor, *, entropy: bool) -> Statistics:
        state = RowState(*self._passes.row_statistics(z, places, entropy=entropy, temperature=z.new_ones(len(z))))
        return Statistics(*self._passes.finish_rows([state], entropy=entropy))

    def gradients(
        self,
        statistics: Statistics,
        upstream: Upstream,
        d_entries: Tensor | None = None,
        *,
        rounded: bool = True,
    ) -> Gradients:
        """Gradients of hidden, weight (in fp32 if not `rounded`) and bias, where wanted, for upstream gradients [N].

        With `d_entries`, those in the log-probs of all entries [E] come on top.
        """
        head, moved = self.head, None
        if d_entries is not None:
            upstream, moved = self._moved(upstream, d_entries)
        has_gradient = upstream.have_gradient()
        if moved is not None:
            has_gradient = has_gradient.index_put((self.row_of_entries[moved != 0],), has_gradient.new_ones(()))
        index = has_gradient[self._entries.rows].nonzero()[:, 0]
        items, e = self._entries.select(index)
        with full_precision(head.hidden):
            d_hidden, d_weight, d_bias = self._full_row_gradients(statistics, upstream, rounded=rounded)
            g = self._entry_gradients(e, self._raw[items], self._places[index], statistics, upstream)
            if moved is not None:
                g += moved[items] * self._slopes(e, self._raw[items])
            if d_hidden is not None:
                self._put_sums(d_hidden, e.rows, e.segments, e.tokens, g, head.weight)
            self._put_sums_of_tokens(d_weight, d_bias, e, g)
        d_weight = d_weight.to(head.weight.dtype) if d_weight is not None and rounded else d_weight
        return d_hidden, d_weight, None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype)

    def _full_row_gradients(self, statistics: Statistics, upstream: Upstream, *, rounded: bool) -> Gradients:
        """Gradients of the rows without a restriction, which those of the entries complete."""
        head, wanted, rows = self.head, self._wanted, self.full_rows
        if len(rows):
            # A bias in the dtype of the accumulators has a gradient that is not rounded yet.
            bias = None if head.bias is None else head.bias.to(head.dtype)
            return logprob_plans.backward(
                replace(head, bias=bias).select(rows),
                self._passes,
                statistics.rows(rows),
                upstream.rows(rows),
                wanted,
                chunk_bytes=self._chunk_bytes,
                rounded=False,
            )
        # Each row of these is written once, so that it is rounded once.
        dtype = head.weight.dtype if rounded else head.dtype
        d_weight = buffers.empty_like(head.weight, dtype).zero_() if wanted.weight else None
        d_bias = head.temperature.new_zeros(len(head.weight)) if wanted.bias else None
        return torch.zeros_like(head.hidden) if wanted.hidden else None, d_weight, d_bias

    def _entry_gradients(
        self, e: Entries, raw: Tensor, places: Tensor, statistics: Statistics, upstream: Upstream
    ) -> Tensor:
        """g = dL/dx of the entries, [E]."""
        g = torch.empty_like(raw)
        for rows, (items, *at), z in self._tiles(e, raw):
            grad_logprobs, grad_entropy = upstream.rows(e.rows[rows])
            gradient = self._passes.logits_gradient_(
                z,
                places[rows],
                statistics=statistics.rows(e.rows[rows]),
                grad_logprobs=grad_logprobs,
                grad_entropy=grad_entropy,
                temperature=z.new_ones(len(z)),
                dtype=z.dtype,
            )
            g[items] = gradient[tuple(at)]
        return g.mul_(self._slopes(e, raw))

    def _slopes(self, e: Entries, raw: Tensor) -> Tensor:
        """dz / d(h.w) of the entries, [E]."""
        head = self.head
        slope = head.logit_scale / head.temperature[e.rows[e.row]]
        if head.softcap is not None:
            slope = slope * distributions.cap_slope(raw * (head.logit_scale / head.softcap))
        return slope

    def _moved(self, upstream: Upstream, d_entries: Tensor) -> tuple[Upstream, Tensor]:
        """The gradient of rows as if all were in the log-prob of their own token, and the rest of dL/dz [E].

        As for several targets: log p_e = log p_t + (z_e - z_t).
        """
        e, target_entries = self._entries, self._entries.segments.offsets[:-1] + self._places
        moved = d_entries.index_fill(0, target_entries, 0.0)
        sums = self._sums(moved)
        gradient = upstream.logprobs.index_copy(0, e.rows, upstream.logprobs[e.rows] + sums + d_entries[target_entries])
        return upstream._replace(logprobs=gradient), moved.index_copy(0, target_entries, -sums)

    def _put_sums_of_tokens(self, d_weight: Tensor | None, d_bias: Tensor | None, e: Entries, g: Tensor) -> None:
        """Add the sums over the entries of each token to dW and db, which have those of the full rows, or 0."""
        if d_weight is None and d_bias is None:
            return
        order = e.tokens.argsort(stable=True)
        tokens, sizes = e.tokens[order].unique_consecutive(return_counts=True)
        segments, more = Segments.from_sizes(sizes), len(self.full_rows) > 0
        if d_weight is not None:
            self._put_sums(d_weight, tokens, segments, e.rows[e.row][order], g[order], self.head.hidden, add=more)
        if d_bias is not None:
            self._put_sums(d_bias[:, None], tokens, segments, order, torch.ones_like(g), g[:, None], add=more)

    def _put_sums(
        self,
        out: Tensor,
        places: Tensor,
        segments: Segments,
        index: Tensor,
        factors: Tensor,
        matrix: Tensor,
        *,
        add: bool = False,
    ) -> None:
        """out[places_i] = sum of factors_e * matrix[index_e] over segment i; long segments are summed in pieces."""
        put = self._passes.weighted_rows_
        cast = self.head.hidden.dtype if matrix is self.head.weight else matrix.dtype
        long = (segments.sizes > PIECE).nonzero()[:, 0]
        if len(long):
            items, long_segments = segments.select(long)
            pieces, pieces_of_segments = long_segments.cut(PIECE)
            piece_index = torch.arange(len(pieces.sizes), device=out.device)
            sums = factors.new_zeros(len(piece_index), matrix.shape[1])
            put(sums, piece_index, pieces.offsets, index[items], factors[items], matrix, cast=cast)
            ones = torch.ones_like(sums[:, 0])
            put(out, places[long], pieces_of_segments.offsets, piece_index, ones, sums, cast=sums.dtype, accumulate=add)
            short = (segments.sizes <= PIECE).nonzero()[:, 0]
            items, segments = segments.select(short)
            places, index, factors = places[short], index[items], factors[items]
        put(out, places, segments.offsets, index, factors, matrix, cast=cast, accumulate=add)


@outside_graphs
def supported_logprobs(
    head: Head, support: Support, options: logprob_plans.Options, *, ignore_index: int, impl: str, moments: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log p [N], entropy [N] or zeros, moments [3, N]) over the kept tokens; targets may be `ignore_index`."""
    passes = choice.passes(choice.choose(impl, head.hidden))
    kept, head = head.without_ignored(passes, ignore_index)
    wanted, leaves = Wanted.of(head), (head.hidden, head.weight, head.bias)
    bias = None if head.bias is None else head.bias.detach()
    head = replace(head, hidden=head.hidden.detach(), weight=head.weight.detach(), bias=bias)
    rows = SupportedHead(head, support, kept, passes, chunk_bytes=options.chunk_bytes, wanted=wanted)
    return _Supported.apply(*leaves, rows, options.entropy, moments)  # type: ignore[no-any-return, no-untyped-call]


class _Supported(torch.autograd.Function):
    """(log p, entropy, moments) of a `SupportedHead`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: SupportedHead, entropy: bool, moments: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        statistics = rows.statistics(entropy=entropy, moments=moments)
        seen = rows.moments(statistics) if moments else None
        if seen is not None:
            ctx.mark_non_differentiable(seen)
        ctx.set_materialize_grads(False)
        # What the backward pass reads is saved, and kept nowhere else: autograd finds out if it was changed, and frees
        # it. A caller gets copies, to edit in place.
        save_for_backward(ctx, (hidden, weight, bias, rows.head.temperature), *statistics)
        nothing = hidden.new_empty(0)
        rows.head = replace(rows.head, hidden=nothing, weight=nothing, bias=None, temperature=nothing)
        ctx.rows = rows
        return statistics.logprobs.clone(), None if statistics.entropy is None else statistics.entropy.clone(), seen

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, temperature, *fields = saved_tensors(ctx)
        statistics, rows = Statistics(*fields), copy(ctx.rows)
        rows.head = replace(rows.head, hidden=hidden, weight=weight, bias=bias, temperature=temperature)
        g = torch.zeros_like(statistics.logprobs) if grad_logprobs is None else grad_logprobs
        return *rows.gradients(statistics, Upstream(g, grad_entropy)), None, None, None
