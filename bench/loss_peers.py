"""Who turns hidden states, a head's weight and a batch's advantages into the GRPO loss: ours and its peers.

    run(batch) -> Result(loss, dH, dW)

The loss is "dapo" with TRL's defaults, the mean over the unmasked tokens, in fp32 (fp64 for the oracle). Everyone's own
code gives the same value of it, so nobody's is scaled. The gradients are left in the `.grad` of the batch's two leaves,
as a trainer would have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import peers
import torch
from torch import Tensor
from torch.nn.functional import linear

from fused_grpo import fused_linear_grpo_loss

EPSILON = 0.2


class Batch(NamedTuple):
    hidden: Tensor
    """[B, T, D], a leaf"""
    weight: Tensor
    """[V, D], a leaf"""
    targets: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T], 1 for tokens that count"""
    advantages: Tensor
    """[B]"""
    old_logprobs: Tensor
    """[B, T]"""


class Result(NamedTuple):
    loss: Tensor
    hidden: Tensor
    """[B, T, D], the gradient"""
    weight: Tensor
    """[V, D], the gradient"""


Run = Callable[[Batch], Result]


def batch_of(sequences: int, tokens: int, hidden: int, vocab: int, *, padding: int = 0) -> Batch:
    """A batch in fp32, off policy, whose logits have a standard deviation of 2.5; `padding` ends its first sequence."""
    generator, length = torch.Generator().manual_seed(0), tokens // sequences
    states = torch.randn(sequences, length, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator).mul_(2.5 / hidden**0.5)
    targets = torch.randint(0, vocab, (sequences, length), generator=generator)
    targets[-1, :2] = torch.tensor([0, vocab - 1])
    mask = torch.ones(sequences, length, dtype=torch.int64)
    mask[0, length - padding :] = 0
    size, sign = 0.5 + torch.rand(sequences, generator=generator), 1.0 - 2.0 * (torch.arange(sequences) % 4 >= 2)
    old_logprobs = logprobs_of(states, weight, targets) - log_ratios(sequences, length)
    return Batch(states.requires_grad_(), weight.requires_grad_(), targets, mask, size * sign, old_logprobs)


def log_ratios(sequences: int, length: int) -> Tensor:
    """log p - log p_old: one token in 16 is outside of the clip range, half of those with the sign that clips.

    None is near a bound of the range, where rounding would decide whether it has a gradient. More of them would flatter
    whoever leaves clipped tokens out of the GEMMs.
    """
    token = torch.arange(sequences * length).view(sequences, length)
    outside = 0.3 * (1.0 - 2.0 * (token // 16 % 2))
    return torch.where(token % 16 == 5, outside, 0.1 * torch.cos(token))


def every_second_at_zero(batch: Batch) -> Batch:
    """The same batch, as if every second sequence had earned just what its group did on average."""
    even = torch.arange(len(batch.advantages)) % 2 == 0
    return batch._replace(advantages=torch.where(even, batch.advantages, 0.0))


def logprobs_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Through full logits, in the dtype of the inputs."""
    return peers.chosen(linear(hidden, weight).log_softmax(-1), targets)


def differentiated(loss_of: Callable[[Batch], Tensor]) -> Run:
    """Forward and backward of a loss, as a trainer does it: the gradients of before are gone."""

    def run(batch: Batch) -> Result:
        batch.hidden.grad = batch.weight.grad = None
        loss = loss_of(batch)
        loss.backward()
        assert batch.hidden.grad is not None
        assert batch.weight.grad is not None
        return Result(loss.detach(), batch.hidden.grad, batch.weight.grad)

    return run


def ours(**options: Any) -> Run:
    """`fused_linear_grpo_loss` as it comes, but for `options`, and for the entropy: no peer here measures it."""

    def loss_of(batch: Batch) -> Tensor:
        given = {"advantages": batch.advantages, "mask": batch.mask, "old_logprobs": batch.old_logprobs}
        given |= {"entropy": False, **options}
        return fused_linear_grpo_loss(batch.hidden, batch.weight, batch.targets, **given).loss

    return differentiated(loss_of)


def dapo(logprobs: Tensor, batch: Batch) -> Tensor:
    """Line by line what `GRPOTrainer._compute_loss` of TRL 1.16 does by default, in a step of one batch."""
    mask, advantages = batch.mask, batch.advantages.unsqueeze(1)
    log_ratio = logprobs - batch.old_logprobs
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - EPSILON, 1 + EPSILON)
    per_token_loss1 = coef_1 * advantages
    per_token_loss2 = coef_2 * advantages
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    normalizer = mask.sum().clamp(min=1.0)
    return (per_token_loss * mask).sum() / normalizer


@differentiated
def full_logits(batch: Batch) -> Tensor:
    """F.linear, log_softmax and gather, with everything else autograd's."""
    return dapo(logprobs_of(batch.hidden, batch.weight, batch.targets), batch)


def exact(batch: Batch) -> Result:
    """The oracle: full logits in fp64 from the very same inputs."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (batch.hidden, batch.weight))
    advantages, old_logprobs = batch.advantages.double(), batch.old_logprobs.double()
    return full_logits(batch._replace(hidden=hidden, weight=weight, advantages=advantages, old_logprobs=old_logprobs))


def trl() -> peers.Contender:
    """The op behind TRL's trainers, as `peers.trl` sets it up, and the loss of its trainer."""

    def load() -> Run:
        logprobs_of_trl = peers.trl_logprobs()
        return differentiated(lambda batch: dapo(logprobs_of_trl(batch.hidden, batch.weight, batch.targets), batch))

    return peers.peer("TRL", peers.TRL, "ChunkedLogProbFunction, tiles of 4096 x 32768; dapo", load)


def liger() -> peers.Contender:
    """Liger's GRPO loss, one chunk for the whole batch.

    Its default of one sequence a chunk adds to all of dW once a sequence and is slower; memory is bounded by its slices
    of the vocabulary either way. Compiling, its default, is of the arithmetic on [B, T] numbers alone and makes no
    difference that can be measured.
    """

    def load() -> Run:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        def loss_of(batch: Batch) -> Tensor:
            loss = LigerFusedLinearGRPOLoss(
                beta=0.0, use_ref_model=False, loss_type="dapo", compiled=False, chunk_size=len(batch.targets)
            )
            given = (batch.hidden, batch.weight, batch.targets, batch.mask, batch.advantages)
            return loss(*given, old_per_token_logps=batch.old_logprobs)[0]

        return differentiated(loss_of)

    return peers.peer("Liger", peers.LIGER, "LigerFusedLinearGRPOLoss, one chunk", load)


def bare_gemms(batch: Batch) -> Callable[[], None]:
    """Logits, dH and dW: full-size products into memory that is there already, and nothing between them."""
    rows, weight = batch.hidden.detach().flatten(0, 1), batch.weight.detach()
    logits = rows.new_empty(len(rows), len(weight))
    d_hidden, d_weight = torch.empty_like(rows), torch.empty_like(weight)

    def run() -> None:
        torch.mm(rows, weight.t(), out=logits)
        torch.mm(logits, weight, out=d_hidden)
        torch.mm(logits.t(), rows, out=d_weight)

    return run


def check(run: Run, batch: Batch) -> None:
    """Nothing wrong is measured: a loss and gradients in fp32 against fp64."""
    result, right = run(batch), exact(batch)
    torch.testing.assert_close(result.loss.double(), right.loss, rtol=1e-5, atol=1e-6)
    for name in ("hidden", "weight"):
        mine, exactly = getattr(result, name).double(), getattr(right, name)
        torch.testing.assert_close(mine, exactly, rtol=1e-4, atol=1e-5 * exactly.abs().max().item())


def apart(one: Tensor, other: Tensor) -> float:
    """How far, relative to the norm."""
    return ((one - other).norm(dtype=torch.float64) / other.norm(dtype=torch.float64)).item()
