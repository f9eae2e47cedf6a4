"""The kept tokens of rows: an entry is one kept token of one row. Their segments, their tiles and their checks.

A caller gives them as (token_ids [E], offsets [N + 1]): row n keeps token_ids[offsets[n] : offsets[n + 1]], and a row
that keeps nothing is not restricted. Here rows with similarly many entries are neighbours, so that tiles [R, K] of
them are at most half empty. Making a plan takes the offsets on the host, for which it waits for a GPU a few times.

Letters: N rows, E entries, V vocabulary; R rows of a tile, K the largest number of entries in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo.errors import InputError, UnsupportedError, WrongTypeError
from fused_grpo.head.checks import check_tensors, may_synchronize, outside_graphs
from fused_grpo.head.head import Head

Support = tuple[Tensor, Tensor]
"""(token_ids [E], offsets [N + 1]), int64."""

_WANT = "want (token_ids [K], offsets [N + 1]) with the kept tokens of all rows, one row after the other"


class Segments(NamedTuple):
    """Items in consecutive segments: segment i has those from offsets[i] to offsets[i + 1]."""

    offsets: Tensor  # [S + 1] int64

    @staticmethod
    def from_sizes(sizes: Tensor) -> Segments:
        return Segments(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    @property
    def sizes(self) -> Tensor:
        """How many items each has, [S]."""
        return self.offsets.diff()

    def select(self, index: Tensor) -> tuple[Tensor, Segments]:
        """(the items of some segments, in the order of `index`; their segments)."""
        chosen = Segments.from_sizes(self.sizes[index])
        segment = chosen.segment_of_items()
        return (self.offsets[index] - chosen.offsets[:-1])[segment] + torch.arange(
            len(segment), device=index.device
        ), chosen

    def segment_of_items(self) -> Tensor:
        """The segment of each item."""
        sizes = self.sizes
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=int(self.offsets[-1]))

    def cut(self, most: int) -> tuple[Segments, Segments]:
        """(pieces of at most `most` items, the pieces of each segment)."""
        pieces = Segments.from_sizes((self.sizes + most - 1) // most)
        of = pieces.segment_of_items()
        number = torch.arange(len(of), device=of.device) - pieces.offsets[of]
        return Segments(torch.cat([self.offsets[of] + most * number, self.offsets[-1:]])), pieces


class Entries(NamedTuple):
    """The kept tokens of some rows."""

    rows: Tensor  # [R], of the head; those with the fewest entries first
    segments: Segments  # the entries of each row
    row: Tensor  # [E], the place in `rows` of each entry's row
    tokens: Tensor  # [E]

    def select(self, index: Tensor) -> tuple[Tensor, Entries]:
        """(the entries of some of the rows, in order; those rows)."""
        items, segments = self.segments.select(index)
        return items, Entries(self.rows[index], segments, segments.segment_of_items(), self.tokens[items])

    def places_of(self, targets: Tensor) -> Tensor:
        """Where the targets [R] are among the entries of their rows; -1 if they are not."""
        place = torch.arange(len(self.row), device=targets.device) - self.segments.offsets[self.row]
        place = torch.where(self.tokens == targets[self.row], place, -1)
        return torch.full_like(targets, -1).scatter_reduce_(0, self.row, place, "amax")

    def tiles(self, most: int) -> Iterator[tuple[slice, slice, int]]:
        """(rows, their entries, K) of tiles with R * K <= `most`, or R = 1."""
        ends, start = self.segments.offsets.cpu(), 0
        sizes = ends.diff()
        while start < len(sizes):
            similar = int(torch.searchsorted(sizes, 2 * sizes[start], right=True))
            stop = min(similar, start + max(1, most // int(sizes[similar - 1])))
            yield slice(start, stop), slice(int(ends[start]), int(ends[stop])), int(sizes[stop - 1])
            start = stop


@outside_graphs
def support_of(support: Any, head: Head, **refused: Any) -> Support | None:
    """The support of the head's rows in int64, checked; None if it restricts no row. `kept_entries` checks the targets.

    Options in `refused` that are set do not go with a support.
    """
    given = [name for name, value in refused.items() if value not in (None, False)]
    if given:
        raise UnsupportedError(f"got support with {given[0]}, want one of them; fix: leave the other")
    if not isinstance(support, tuple | list) or len(support) != 2:
        raise WrongTypeError(f"got support of type {type(support).__name__}, {_WANT}")
    if head.targets.ndim == 2:
        raise UnsupportedError("got support with several targets per row, want one; fix: leave the support")
    tokens, offsets = support
    check_tensors(hidden=head.hidden, token_ids=tokens, offsets=offsets)
    for name, values in (("token_ids", tokens), ("offsets", offsets)):
        if values.ndim != 1 or values.dtype not in (torch.int64, torch.int32):
            raise InputError(f"got {name} of support {tuple(values.shape)} {values.dtype}, {_WANT}, int64 or int32")
    if len(offsets) != len(head.targets) + 1:
        raise InputError(f"got {len(offsets)} offsets of support for N={len(head.targets)} rows, want N + 1")
    if not may_synchronize(tokens):
        raise UnsupportedError(
            "got support while a CUDA graph is captured, want a call outside: its plan depends on the offsets"
        )
    _check_offsets(offsets.cpu(), len(tokens))
    tokens, offsets = tokens.long(), offsets.long()
    _check_tokens(tokens, Segments(offsets), len(head.weight))
    return (tokens, offsets) if len(tokens) else None


def _check_offsets(offsets: Tensor, count: int) -> None:
    falls = (offsets.diff() < 0).nonzero()[:, 0]
    if len(falls):
        n = int(falls[0])
        raise InputError(f"got offsets of support that fall from {offsets[n]} to {offsets[n + 1]} at {n}, {_WANT}")
    if offsets[0] != 0 or offsets[-1] != count:
        raise InputError(f"got offsets of support from {offsets[0]} to {offsets[-1]}, want from 0 to K={count}")


def _check_tokens(tokens: Tensor, segments: Segments, vocab_size: int) -> None:
    outside = (tokens < 0) | (tokens >= vocab_size)
    want = f"want 0 <= token < V={vocab_size}, each once in a row"
    if tokens.is_cuda:
        torch._assert_async(~outside.any(), f"a token of the support is out of range; {want}")
    elif bool(outside.any()):
        raise InputError(f"got token {int(tokens[outside][0])} in the support; {want}")
    row = segments.segment_of_items()
    first_of_row = row[1:] != row[:-1]
    if not tokens.is_cuda and bool(((tokens[1:] > tokens[:-1]) | first_of_row).all()):
        return  # in ascending order, so that none occurs twice
    keys = (row * vocab_size + tokens).sort().values
    twice = keys[1:] == keys[:-1]
    if tokens.is_cuda:
        torch._assert_async(~twice.any(), f"a token occurs twice in the support of a row; {want}")
    elif bool(twice.any()):
        n, token = divmod(int(keys[1:][twice][0]), vocab_size)
        raise InputError(f"got token {token} twice in the support of row {n}; {want}; fix: unique ids in each row")


def kept_entries(support: Support, targets: Tensor, take_part: Tensor) -> tuple[Entries, Tensor]:
    """(the entries of the rows that are restricted and take part, where their targets [N] are among them), checked."""
    all_rows = Segments(support[1])
    rows = (take_part & (all_rows.sizes > 0)).nonzero()[:, 0]
    rows = rows[all_rows.sizes[rows].argsort(stable=True)]
    items, segments = all_rows.select(rows)
    entries, targets = Entries(rows, segments, segments.segment_of_items(), support[0][items]), targets[rows]
    places = entries.places_of(targets)
    lost = places < 0
    want = "want each target among the kept tokens of its row; fix: mask the row, or set its target to ignore_index"
    if lost.is_cuda:
        torch._assert_async(~lost.any(), f"a target is not in the support of its row; {want}")
    elif bool(lost.any()):
        n, token = min(zip(rows[lost].tolist(), targets[lost].tolist(), strict=True))
        raise InputError(f"got target {token} in row {n}, which is not in its support; {want}")
    return entries, places


def kept_mask(support: Support, vocab_size: int, targets: Tensor, take_part: Tensor) -> Tensor:
    """[N, V], True for the tokens that each row keeps, for `distributions.logprobs_and_entropy`.

    The targets are checked; of K targets [N, K] the first, which was sampled.
    """
    kept_entries(support, targets if targets.ndim == 1 else targets[:, 0], take_part)
    segments = Segments(support[1])
    mask = (segments.sizes == 0)[:, None].repeat(1, vocab_size)
    mask[segments.segment_of_items(), support[0]] = True
    return mask
