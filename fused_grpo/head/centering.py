"""Score centering in the pass of a loss: the tokens H of each row, their log-probs and the gradients in these.

The targets of a row are its own token and H, [N, 1 + K]; `several_targets.py` has their log-probs and gradients. The
loss gets sum_n a_n sum_v c_v log p_v (`_maths/centering.py`), with a the advantage times the weight of the policy term.
So its upstream gradient in log p_v is a_n c_v: K reads and writes of a tile of logits, beside a multiple of its softmax
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths import formulas
from fused_grpo._maths.centering import Bounds, coefficients
from fused_grpo._maths.formulas import LossInputs
from fused_grpo._maths.statistics import Statistics
from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head.checks import FLOATS, check_tensors
from fused_grpo.head.entries import Segments, Support
from fused_grpo.head.head import Head

_ROUNDED_UP = 1e-2  # what a sampler in 16 bits makes of a log-prob of 0
# All are 0 where a support restricts no row, so that nothing is centred.
METRICS = ("centering_sampler_mass", "centering_trainer_mass", "centering_l1", "zero_gradient_fraction")


@dataclass
class Centering:
    """The tokens H of N rows under the sampler, and what a pass finds out of them."""

    ids: Tensor  # [N, K] int64, -1 where there is none, and where a row is not scored
    repeats: Tensor  # [N, K], which of H is the row's own token
    sampler: Tensor  # [N, K], log-probs
    logprobs: Tensor  # [N, K], NaN for rows that have not been visited
    advantages: Tensor  # [N]
    weights: Tensor  # [N], a
    bounds: Bounds
    whole: bool
    closed: bool

    def with_targets(self, head: Head) -> Head:
        """The head with H beside the target of each row, each token once."""
        return replace(head, targets=torch.cat([head.targets[:, None], self.ids.masked_fill(self.repeats, -1)], 1))

    def keep(self, rows: slice | Tensor, logprobs: Tensor) -> Tensor:
        """The log-probs [R] of the rows' own tokens, from those [R, 1 + K] of all targets, which are kept."""
        self.logprobs[rows] = torch.where(self.repeats[rows], logprobs[:, :1], logprobs[:, 1:])
        return logprobs[:, 0]

    def every_logprob(self, rows: slice | Tensor, statistics: Statistics) -> Statistics:
        """The statistics of rows with the log-probs [R, 1 + K] of all targets."""
        head_logprobs = self.logprobs[rows].masked_fill(self.repeats[rows], -torch.inf)
        return statistics._replace(logprobs=torch.cat([statistics.logprobs[:, None], head_logprobs], 1))

    def largest_statistics(self, index: Tensor | None, statistics: Statistics) -> Statistics:
        """The statistics of rows, None for all, with the log-prob of their largest target, which the sums leave out."""
        every = self.every_logprob(slice(None) if index is None else index, statistics)
        return every._replace(logprobs=every.logprobs.amax(1))

    def upstream(self, rows: slice | Tensor, grad_logprobs: Tensor) -> Tensor:
        """d loss / d log p [R, 1 + K], from that of the rows' own tokens [R] without centering."""
        _, d_head, _ = self._terms(rows)
        repeats = self.repeats[rows]
        d_own = grad_logprobs + torch.where(repeats, d_head, 0.0).sum(1)
        return torch.cat([d_own[:, None], d_head.masked_fill(repeats, 0.0)], 1)

    def weigh(self, policy_weights: Tensor | None) -> None:
        """Once the factors of the policy term [N] are known, where they depend on other tokens."""
        if policy_weights is not None:
            self.weights = self.weights * policy_weights

    def added_to(self, statistics: dict[str, Tensor], without: Tensor) -> dict[str, Tensor]:
        """The statistics of the loss, with this part of it; `without` this part the tokens [N] have no gradient."""
        c, d_head, mass = self._terms(slice(None))
        return with_centering(statistics, c, d_head, self.logprobs, mass, without & (d_head == 0).all(1))

    def _terms(self, rows: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(c [R, K], d loss / d log p of H [R, K], the probability of H under the sampler and the policy [2, R])."""
        logprobs, weights = self.logprobs[rows], self.weights[rows, None]
        unknown = self.sampler[rows].isnan() & (self.ids[rows] >= 0)
        unknown = unknown.any(1, keepdim=True) if self.closed else unknown
        present = (self.ids[rows] >= 0) & ~(logprobs.isnan() | unknown)
        given = logprobs, self.sampler[rows], self.advantages[rows], present
        c, mass = coefficients(*given, self.bounds, whole=self.whole, closed=self.closed)
        return c, torch.where(weights == 0, 0.0, weights * c), mass


def scored_by_sampler(inputs: LossInputs) -> Tensor:
    """Which tokens [N] are in the loss and have a log-prob of the sampler."""
    sampling = inputs.tokens.sampling_logprobs
    assert sampling is not None
    return inputs.tokens.mask & ~sampling.isnan()


def weights_of(inputs: LossInputs) -> Tensor:
    """a [N], without what depends on other tokens."""
    return torch.where(scored_by_sampler(inputs), inputs.tokens.weights * inputs.tokens.advantages, 0.0)


def with_centering(
    statistics: dict[str, Tensor], c: Tensor, d_head: Tensor, logprobs: Tensor, mass: Tensor, zero: Tensor
) -> dict[str, Tensor]:
    """The statistics of a loss with sum(d_head * logprobs) in it, with the metrics of c, of the masses [2, N] and of
    the tokens [N] with a gradient of `zero`."""
    loss = torch.where(d_head == 0, 0.0, d_head * logprobs).sum()
    means = formulas.over_tokens(torch.stack([*mass.sum(1), c.abs().sum(), zero.sum()]), statistics)
    return {**statistics, "loss": statistics["loss"] + loss, **dict(zip(METRICS, means, strict=True))}


class SamplerHead(NamedTuple):
    """What a caller says of the sampler: ids [..., K] and log-probs [..., K], or log-probs [E] of a support's ids."""

    ids: Tensor | None
    logprobs: Tensor | None
    vocab_size: int

    def check(
        self,
        config: GRPOLossConfig,
        tokens: Tensor,
        *,
        support: Support | None,
        sampling: Tensor | None,
        teacher: Any,
    ) -> None:
        """Check that the loss wants them, both for its targets `tokens`, and whether they go with its other inputs.

        Raises:
            InputError: shapes, dtypes or devices that cannot be right, or one without the other.
            UnsupportedError: "topk" with a support, or a distillation.
        """
        wanted, given = config.score_centering != "off", self.ids is not None or self.logprobs is not None
        if wanted != given:
            fix = "pass sampling_topk_ids and sampling_topk_logprobs" if wanted else "leave the sampler's tokens out"
            raise InputError(
                f"got score_centering={config.score_centering!r} with{'out' * wanted} "
                f"log-probs of the sampler's tokens; fix: {fix}, or set score_centering"
            )
        if teacher is not None:
            raise UnsupportedError("got score_centering with a distillation, want one of them; fix: leave the other")
        if sampling is None:
            raise InputError("got score_centering without sampling_logprobs; fix: pass those of the sampled tokens")
        check_tensors({"sampling_topk_ids": self.ids, "sampling_topk_logprobs": self.logprobs}, targets=tokens)
        if self.logprobs is None or self.logprobs.dtype not in FLOATS:
            dtype = None if self.logprobs is None else self.logprobs.dtype
            raise InputError(f"got sampling_topk_logprobs of dtype {dtype}, want one of {', '.join(map(str, FLOATS))}")
        if support is not None:
            self._check_of_support(config, support)
        else:
            self._check_ids(tokens)

    def _check_values(self, inputs: LossInputs, support: Support | None) -> None:
        """InputError for ids or log-probs of a scored token that cannot be right; a GPU asserts, and of ids alone."""
        scored, logprobs = scored_by_sampler(inputs), self.logprobs
        if support is None and self.ids is not None:
            scored = scored.view(*self.ids.shape[:-1], 1)
            _check_in_range(torch.where(scored, self.ids, -1), self.vocab_size)
        if logprobs is None or not logprobs.numel() or logprobs.device.type != "cpu":
            return  # elsewhere both the rows of a support and the largest value would synchronize
        if support is not None:
            scored = scored[Segments(support[1]).segment_of_items()]
        most = logprobs.nan_to_num(-torch.inf, posinf=torch.inf).masked_fill(~scored, -torch.inf).max().item()
        if most > _ROUNDED_UP:
            raise InputError(f"got a sampling_topk_logprobs of {most:g}, want log-probs, which are at most 0")

    def _check_of_support(self, config: GRPOLossConfig, support: Support) -> None:
        if config.score_centering == "topk":
            raise UnsupportedError("got score_centering='topk' with a support, which is all that was kept; fix: 'kept'")
        if self.ids is not None:
            raise InputError("got sampling_topk_ids with a support; fix: leave them out, they are its token_ids")
        assert self.logprobs is not None
        if self.logprobs.shape != support[0].shape:
            got, want = tuple(self.logprobs.shape), tuple(support[0].shape)
            raise InputError(f"got sampling_topk_logprobs {got}, want {want}: one for each token of the support")

    def _check_ids(self, tokens: Tensor) -> None:
        ids, logprobs = self.ids, self.logprobs
        assert logprobs is not None
        if ids is None or ids.dtype not in (torch.int32, torch.int64):
            dtype = None if ids is None else ids.dtype
            raise InputError(f"got sampling_topk_ids of dtype {dtype}, want int64 or int32")
        if ids.shape != logprobs.shape or ids.shape[:-1] != tokens.shape or not ids.shape[-1]:
            raise InputError(
                f"got sampling_topk_ids {tuple(ids.shape)} and sampling_topk_logprobs {tuple(logprobs.shape)}, want "
                f"both ({', '.join(map(str, tokens.shape))}, K), K >= 1 tokens for each token"
            )

    def centering(
        self, targets: Tensor, inputs: LossInputs, config: GRPOLossConfig, support: Support | None, impl: str
    ) -> Centering | None:
        """For the targets [N] over the whole vocabulary, where ids were given, or the reference's `support` has them.

        InputError for ids or log-probs that cannot be right of a token that the loss scores; no others are read.
        """
        self._check_values(inputs, support)
        support = support if impl == "reference" else None
        ids, logprobs = (self.ids, self.logprobs) if support is None else self._padded(support)
        if ids is None or logprobs is None:
            return None
        sampler = logprobs.detach().to(inputs.tokens.weights.dtype)
        ids, sampler = (x.reshape(-1, ids.shape[-1]) for x in (ids.long(), sampler))
        return Centering(
            ids=torch.where(scored_by_sampler(inputs)[:, None], ids, -1),
            repeats=ids == targets[:, None],
            sampler=sampler,
            logprobs=torch.full_like(sampler, torch.nan),
            advantages=inputs.tokens.advantages,
            weights=weights_of(inputs),
            bounds=Bounds.of(config.token_terms),
            whole=config.score_centering == "kept",
            closed=support is not None,
        )

    def _padded(self, support: Support) -> tuple[Tensor, Tensor]:
        """The ids of a support and their log-probs, both [N, K]."""
        tokens, segments = support[0], Segments(support[1])
        assert self.logprobs is not None
        row = segments.segment_of_items()
        column = torch.arange(len(tokens), device=tokens.device) - segments.offsets[row]
        ids = tokens.new_full((len(segments.sizes), max(1, int(segments.sizes.amax()))), -1)
        logprobs = torch.zeros_like(ids, dtype=self.logprobs.dtype)
        ids[row, column], logprobs[row, column] = tokens, self.logprobs.detach()
        return ids, logprobs


def _check_in_range(ids: Tensor, vocab_size: int) -> None:
    ordered = ids.sort(-1).values
    wrong = (ordered[..., :1] < -1) | (ordered[..., -1:] >= vocab_size)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1, keepdim=True)
    want = f"want 0 <= id < V={vocab_size}, each once for a token, or -1 where there is none"
    if ids.is_cuda:
        torch._assert_async(~(wrong | twice).any(), f"a token of sampling_topk_ids is out of range; {want}")
    elif bool((wrong | twice).any()):
        at = (wrong | twice)[..., 0].nonzero()[0].tolist()
        raise InputError(f"got sampling_topk_ids {str(ids[tuple(at)].tolist())[:200]} at {at}; {want}")
