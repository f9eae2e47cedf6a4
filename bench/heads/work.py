"""The works that are measured: heads of real models, and rollouts like those of GRPO.

A `Work` describes a measurement but for its implementation. Letters: B sequences of at most T tokens, N of them scored
(completions have uneven lengths, and padding is not counted), D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["logprobs", "loss", "divergence", "distillation"]
Gradients = Literal["no_grad", "frozen", "trainable"]


class Head(NamedTuple):
    """The shape of a model's head."""

    hidden: int
    vocab: int
    softcap: float | None = None


HEADS = {
    "SmolLM2": Head(576, 49152),
    "GPT-2": Head(768, 50304),
    "Qwen3-0.6B": Head(1024, 151936),
    "Qwen3-1.7B": Head(2048, 151936),
    "Qwen3-8B": Head(4096, 151936),
    "Llama-3-8B": Head(4096, 128256),
    "Gemma-2-2B": Head(2304, 256000, softcap=30.0),
    "Gemma-3-4B": Head(2560, 262208),
    "Phi-4-mini": Head(3072, 200064),
    "tiny": Head(128, 3001),
    "tiny, capped": Head(128, 3001, softcap=30.0),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement."""

    kind: Kind
    """Log-probs and gradients for a given upstream gradient; the GRPO loss (dapo, off policy) and its gradients; the
    Jensen-Shannon divergence (beta 0.5) from a teacher with the same shape, and its gradients; or that loss plus
    `COEF` times the reverse KL divergence from such a teacher, and its gradients."""
    head: str
    """A name in `HEADS`."""
    tokens: int
    """N, the scored tokens."""
    sequences: int = 8
    dtype: str = "float32"
    gradients: Gradients = "trainable"
    """No gradient, dH of a frozen head, or dH and dW of a trainable head."""
    entropy: float | None = None
    """Mean entropy of the softmax, in nats; None for logits with a standard deviation of 2.5."""
    idle: float = 0.0
    """Share of sequences with an advantage of zero, as in groups whose rewards are equal."""
    several: int | None = None
    """K targets per token, for log-probs; None for one."""
    uneven: bool = False
    """Whether lengths differ like those of samples, with the longest twice the mean; else all are equal."""
    kept: int | None = None
    """The tokens of each row that its sampler kept, the target first; None for the whole vocabulary."""
    centred: int | None = None
    """The tokens of each row by which score centering corrects the loss, the target first; None for no centering."""

    @property
    def shape(self) -> Head:
        return HEADS[self.head]

    @property
    def name(self) -> str:
        parts = [self.kind, self.head, f"N={self.tokens}", self.dtype, self.gradients]
        parts += [f"entropy {self.entropy:g}"] if self.entropy is not None else []
        parts += [f"K={self.several}"] if self.several is not None else []
        parts += [f"{self.idle:.0%} idle"] if self.idle else []
        parts += [f"{self.kept} kept"] if self.kept else []
        parts += [f"{self.centred} centred"] if self.centred else []
        return ", ".join([*parts, "uneven"] if self.uneven else parts)

    @property
    def unit(self) -> int:
        """U, the FLOP of one product over the head, or over the kept tokens."""
        return 2 * self.tokens * self.shape.hidden * (self.kept or self.shape.vocab)

    @property
    def products(self) -> int:
        """Products over the head that every plan needs: logits, dH, dW, and the logits of a teacher. (With a trainable
        head, log-probs need those of all tokens at once, or compute them again.)"""
        return {"no_grad": 1, "frozen": 2, "trainable": 3}[self.gradients] + self.has_teacher

    @property
    def has_teacher(self) -> bool:
        return self.kind in ("divergence", "distillation")

    @property
    def flop(self) -> int:
        """The FLOP of those products."""
        return self.unit * self.products

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that every implementation returns, [N, D] and [V, D]."""
        rows = {"no_grad": 0, "frozen": self.tokens, "trainable": self.tokens + self.shape.vocab}[self.gradients]
        dtype: torch.dtype = getattr(torch, self.dtype)
        return rows * self.shape.hidden * dtype.itemsize

    def small(self) -> Work:
        """The same work at a size for a reference in fp64, which still has several tiles of every implementation."""
        head = "tiny, capped" if self.shape.softcap else "tiny"
        return replace(self, head=head, tokens=min(self.tokens, 96), sequences=min(self.sequences, 4))

    def described(self) -> dict[str, Any]:
        """The work as an entry of a result file."""
        return {**asdict(self), "hidden": self.shape.hidden, "vocab": self.shape.vocab, "flop": self.flop}


class Batch(NamedTuple):
    """The inputs of every implementation; hidden and weight are leaves."""

    hidden: Tensor  # [B, T, D]
    weight: Tensor  # [V, D]
    targets: Tensor  # [B, T], or [B, T, K]
    mask: Tensor  # [B, T], 1 for the tokens that are scored
    advantages: Tensor  # [B]
    old_logprobs: Tensor  # [B, T], 0 where masked, and in works without a ratio
    upstream: Tensor  # as targets, the gradient of each log-prob for "logprobs": that of GRPO on policy, split over K
    teacher_hidden: Tensor | None = None  # [B, T, D], for works with a teacher
    teacher_weight: Tensor | None = None  # [V, D]


def kept_tokens(targets: Tensor, work: Work) -> Tensor | None:
    """[*targets, kept], the target first and the others far apart; None for the whole vocabulary."""
    return None if work.kept is None else _apart(targets, work.kept, work.shape.vocab)


def _apart(targets: Tensor, count: int, vocab: int) -> Tensor:
    return (targets[..., None] + torch.arange(count, device=targets.device) * (vocab // count)) % vocab


def sampler_head(targets: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    """(ids, the sampler's log-probs) [*targets, centred], the target first. The sampler has nine tenths there."""
    assert work.centred is not None
    logprobs = torch.linspace(0.0, -8.0, work.centred, device=targets.device).log_softmax(0) + math.log(0.9)
    return _apart(targets, work.centred, work.shape.vocab), logprobs.expand(*targets.shape, -1)


def batch_of(work: Work, device: str = "cpu") -> Batch:
    """Random inputs that depend on `work` and the device's generator alone."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, head = getattr(torch, work.dtype), work.shape
    mask = mask_of(work).to(device)
    b, t = mask.shape
    hidden = torch.randn(b, t, head.hidden, generator=generator, device=device)
    weight = torch.randn(head.vocab, head.hidden, generator=generator, device=device)
    spread = 2.5 if work.entropy is None else spread_for(work.entropy, head)
    weight = weight.mul_(spread / math.sqrt(head.hidden)).to(dtype)
    hidden = hidden.to(dtype)
    k = () if work.several is None else (work.several,)
    targets = torch.randint(0, head.vocab, (b, t, *k), generator=generator, device=device)
    targets[-1, :2, ...] = torch.tensor([0, head.vocab - 1], device=device).view(2, *(1 for _ in k))
    advantages = torch.randn(b, generator=generator, device=device).sign() * torch.linspace(0.5, 1.5, b, device=device)
    advantages[: int(work.idle * b)] = 0.0
    old_logprobs = torch.zeros(b, t, device=device)
    if work.kind in ("loss", "distillation"):
        old_logprobs = (_logprobs(hidden, weight, targets, work) - log_ratios(b, t).to(device)) * mask
    upstream = (-advantages[:, None] / work.tokens) * mask
    if k:
        upstream = upstream[..., None] * torch.linspace(1.0, -0.5, *k, device=device)
    hidden.requires_grad_(work.gradients != "no_grad")
    weight.requires_grad_(work.gradients == "trainable")
    teacher: tuple[Tensor, ...] = ()
    if work.has_teacher:
        others = torch.randn(b, t, head.hidden, generator=generator, device=device)
        vectors = torch.randn(head.vocab, head.hidden, generator=generator, device=device)
        teacher = (others.to(dtype), vectors.mul_(spread / math.sqrt(head.hidden)).to(dtype))
    return Batch(hidden, weight, targets, mask, advantages, old_logprobs, upstream, *teacher)


def mask_of(work: Work) -> Tensor:
    """The mask [B, T]: lengths of completions add up to `tokens`."""
    b, n = work.sequences, work.tokens
    shares = torch.linspace(0.0, 1.0, b).add_(0.15).pow_(1.5) if work.uneven else torch.ones(b)
    lengths = (shares / shares.sum() * n).floor().clamp_min_(1).long()
    lengths[-1] += n - int(lengths.sum())
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()


def log_ratios(b: int, t: int) -> Tensor:
    """log p - log p_old: one token in 16 is outside of the clip range, half of those with the sign that clips.

    None is near a bound of the range, where rounding would decide whether it has a gradient. More clipped tokens would
    favour implementations that leave them out of the products.
    """
    token = torch.arange(b * t).view(b, t)
    outside = 0.3 * (1.0 - 2.0 * (token // 16 % 2))
    return torch.where(token % 16 == 5, outside, 0.1 * torch.cos(token))


def spread_for(entropy: float, head: Head) -> float:
    """The standard deviation of normal logits whose softmax has this mean entropy, by bisection."""
    rows = torch.randn(32, head.vocab, generator=torch.Generator().manual_seed(1))
    low, high = 0.0, 64.0
    for _ in range(30):
        middle = (low + high) / 2
        logits = middle * rows
        logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
        log_p = logits.log_softmax(-1)
        low, high = (middle, high) if -(log_p.exp() * log_p).sum(-1).mean() > entropy else (low, middle)
    return middle


def _logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
    """Log-probs from logits in fp32, a few rows at a time."""
    logprobs, wide = list[Tensor](), weight.float()
    for rows, ids in zip(hidden.flatten(0, 1).split(256), targets.flatten().split(256), strict=True):
        logits = rows.float() @ wide.t()
        logprobs.append(logprobs_of(logits, ids, work))
    return torch.cat(logprobs).view(targets.shape)


def logprobs_of(logits: Tensor, targets: Tensor, work: Work) -> Tensor:
    """Log-probs of the targets, [N] or [N, K], among the kept tokens where there are such, from raw logits [N, V]."""
    if (softcap := work.shape.softcap) is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if (kept := kept_tokens(targets, work)) is not None:
        return logits.gather(-1, kept).to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)[:, 0]
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_p.gather(-1, targets) if targets.ndim == 2 else log_p.gather(-1, targets[:, None])[:, 0]
