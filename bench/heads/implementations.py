"""Implementations that turn hidden states and a head into log-probs or into a GRPO loss, each behind one call.

    implementation.run(batch, work) -> Result(value, d_hidden, d_weight)

Each runs in its best documented setting, which `setting` describes. A peer with an op for log-probs is measured on the
loss as well: its op, followed by TRL's formula of the loss, line by line. An implementation that takes rows gets the
scored rows; one that takes padded tensors gets the padding. `missing` has the command that installs an implementation
which is not installed, and `why_not` the reason for which it cannot do a work.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

import fused_grpo
from fused_grpo import (
    Distillation,
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    linear_logprobs,
)
from fused_grpo.bench.heads.work import Batch, Work, kept_tokens, logprobs_of, sampler_head

EPSILON = 0.2
COEF = 0.1
"""Of the divergence in a distillation."""
CAP = 3.0
"""Of the weights of importance."""

LogprobOp = Callable[[Tensor, Tensor, Tensor, Work], Tensor]
"""(hidden [N, D], weight [V, D], targets [N] or [N, K], work) -> log-probs in the shape of targets."""
LossOp = Callable[[Batch, Work], Tensor]


class Result(NamedTuple):
    """The result of a run. Gradients are those of the value under `Batch.upstream`, or of the loss."""

    value: Tensor  # log-probs [B, T], 0 where masked, or the loss
    d_hidden: Tensor | None  # [B, T, D]
    d_weight: Tensor | None  # [V, D]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A project's op, or ours, in one setting."""

    name: str
    version: str | None
    setting: str
    logprobs: LogprobOp | None = None
    loss: LossOp | None = None
    """None: the log-probs, followed by TRL's formula."""
    divergence: LossOp | None = None
    distillation: LossOp | None = None
    centred: LossOp | None = None
    several: bool = False
    """Whether its op takes K targets per row."""
    missing: str | None = None
    floor: bool = False
    """Whether it is a lower bound, such as the bare products, whose result is not that of the work and not checked."""
    limits: Callable[[Work, str], str | None] = lambda work, device: None
    """The reason why it cannot do a work on a device; None if it can."""

    def why_not(self, work: Work, device: str) -> str | None:
        """The reason why it is not measured; None if it is."""
        if self.missing is not None:
            return self.missing
        if work.kind == "logprobs" and self.logprobs is None:
            return "has no op for log-probs"
        if work.kind == "loss" and self.loss is None and self.logprobs is None:
            return "has no op for log-probs or for the loss"
        if work.has_teacher and getattr(self, work.kind) is None:
            return f"has no op for a {work.kind}"
        if work.centred is not None and self.centred is None:
            return "has no score centering"
        if work.several is not None and not self.several:
            return "takes one target per row"
        return self.limits(work, device)

    def run(self, batch: Batch, work: Work) -> Result:
        """Forward, and backward where the work has one."""
        value = self.forward(batch, work)
        self.backward(value, batch, work)
        return Result(value.detach(), batch.hidden.grad, batch.weight.grad)

    def forward(self, batch: Batch, work: Work) -> Tensor:
        """The log-probs [B, T] or the loss. Old gradients are dropped, as in a trainer."""
        batch.hidden.grad = batch.weight.grad = None
        with torch.set_grad_enabled(work.gradients != "no_grad"):
            if work.kind != "logprobs":
                return self._loss(batch, work)
            assert self.logprobs is not None
            return over_scored(self.logprobs, batch, work)

    def backward(self, value: Tensor, batch: Batch, work: Work) -> None:
        """The backward pass from the value of `forward`, where the work has one."""
        if work.gradients != "no_grad":
            value.backward(batch.upstream if work.kind == "logprobs" else None)

    def _loss(self, batch: Batch, work: Work) -> Tensor:
        if work.has_teacher:
            value: Tensor = getattr(self, work.kind)(batch, work)
            return value
        if work.centred is not None:
            assert self.centred is not None
            return self.centred(batch, work)
        if self.loss is not None:
            return self.loss(batch, work)
        assert self.logprobs is not None
        return dapo(over_scored(self.logprobs, batch, work), batch)


def scored(values: Tensor, batch: Batch, work: Work) -> Tensor:
    """The rows [N, ...] of the scored tokens.

    Without padding there is nothing to select. A selection would wait for the device, sort in the backward pass, and
    count as time of the implementations that take rows alone.
    """
    return values.flatten(0, 1) if batch.mask.numel() == work.tokens else values[batch.mask.bool()]


def over_scored(op: LogprobOp, batch: Batch, work: Work) -> Tensor:
    """Log-probs in the shape of targets by an op that takes rows: it gets the scored rows."""
    return padded(op(scored(batch.hidden, batch, work), batch.weight, scored(batch.targets, batch, work), work), batch)


def padded(values: Tensor, batch: Batch) -> Tensor:
    """Values of the scored rows [N, ...] as [B, T, ...], 0 where masked."""
    shape = *batch.mask.shape, *values.shape[1:]
    if len(values) == batch.mask.numel():
        return values.view(shape)
    where = batch.mask.bool().view(*batch.mask.shape, *(1 for _ in values.shape[1:])).expand(shape)
    return values.new_zeros(shape).masked_scatter(where, values)


def dapo(logprobs: Tensor, batch: Batch) -> Tensor:
    """The default of `GRPOTrainer._compute_loss` of TRL 1.16, line by line, for a step of one batch."""
    mask, advantages = batch.mask, batch.advantages.unsqueeze(1)
    log_ratio = logprobs - batch.old_logprobs
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - EPSILON, 1 + EPSILON)
    per_token_loss1 = coef_1 * advantages
    per_token_loss2 = coef_2 * advantages
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    normalizer = mask.sum().clamp(min=1.0)
    return (per_token_loss * mask).sum() / normalizer


def full_log_softmax(batch: Batch, work: Work) -> list[Tensor]:
    """Log-probs of the whole vocabulary [N, V], of the student and of the teacher."""
    assert batch.teacher_hidden is not None
    assert batch.teacher_weight is not None
    softcap, log_probs = work.shape.softcap, []
    for hidden, weight in ((batch.hidden, batch.weight), (batch.teacher_hidden, batch.teacher_weight)):
        logits = linear(scored(hidden, batch, work), weight)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        log_probs.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1))
    return log_probs


def full_divergence(batch: Batch, work: Work) -> Tensor:
    """The ops of a trainer with both models' logits: the mean of the Jensen-Shannon divergence."""
    log_probs = full_log_softmax(batch, work)
    mixed = torch.logaddexp(*log_probs) - math.log(2.0)
    return sum((x.exp() * (x - mixed)).sum(-1).mean() for x in log_probs) / 2  # type: ignore[return-value]


def full_distillation(batch: Batch, work: Work) -> Tensor:
    """The same for the GRPO loss plus the mean of the reverse KL divergence."""
    p, q = full_log_softmax(batch, work)
    logprobs = over_scored(lambda hidden, weight, targets, work: p.gather(-1, targets[:, None])[:, 0], batch, work)
    return dapo(logprobs, batch) + COEF * (p.exp() * (p - q)).sum(-1).mean()


def full_centred(batch: Batch, work: Work) -> Tensor:
    """The GRPO loss with score centering from all log-probs, [N, V] of them and of their gradients."""
    softcap = work.shape.softcap
    logits, targets = linear(scored(batch.hidden, batch, work), batch.weight), scored(batch.targets, batch, work)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    ids, sampler = sampler_head(targets, work)
    head_logprobs, target_logprobs = log_p.gather(-1, ids), log_p.gather(-1, targets[:, None])[:, 0]
    p, q = head_logprobs.detach().exp(), sampler.to(log_p.dtype).exp()
    rho = (1 - q.sum(-1)) / (1 - p.sum(-1)).clamp_min(1e-6)
    c = torch.minimum(p, CAP * q) - (CAP * rho).clamp_max(1.0)[:, None] * p
    advantages = scored(batch.advantages[:, None].expand(batch.mask.shape), batch, work)
    return dapo(padded(target_logprobs, batch), batch) + (advantages * (c * head_logprobs).sum(-1)).sum() / len(c)


def ours_centred(batch: Batch, work: Work) -> Tensor:
    ids, logprobs = sampler_head(batch.targets, work)
    config = GRPOLossConfig(score_centering="topk", sampling_clip_max=CAP)
    given: dict[str, Any] = {"sampling_topk_ids": ids, "sampling_topk_logprobs": logprobs, "config": config}
    return ours_loss(sampling_logprobs=batch.old_logprobs, **given)(batch, work)


def ours_divergence(batch: Batch, work: Work) -> Tensor:
    assert batch.teacher_hidden is not None
    assert batch.teacher_weight is not None
    models = (batch.hidden, batch.weight, batch.teacher_hidden, batch.teacher_weight)
    caps: dict[str, Any] = {"student_softcap": work.shape.softcap, "teacher_softcap": work.shape.softcap}
    return fused_linear_divergence(*models, kind="jsd", mask=batch.mask, **caps).loss


def ours_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
    return linear_logprobs(hidden, weight, targets, softcap=work.shape.softcap, support=support_of(targets, work))


def support_of(targets: Tensor, work: Work) -> tuple[Tensor, Tensor] | None:
    """The kept tokens of all rows, as our ops take them."""
    kept = kept_tokens(targets.flatten(), work)
    if kept is None:
        return None
    return kept.flatten(), torch.arange(0, kept.numel() + 1, kept.shape[1], device=kept.device)


def ours_loss(**options: Any) -> LossOp:
    """`fused_linear_grpo_loss` without the entropy, which no peer here computes."""

    def loss(batch: Batch, work: Work) -> Tensor:
        given: dict[str, Any] = {"advantages": batch.advantages, "mask": batch.mask, "entropy": False, **options}
        given |= {"old_logprobs": batch.old_logprobs, "softcap": work.shape.softcap}
        given["support"] = support_of(batch.targets, work)
        return fused_linear_grpo_loss(batch.hidden, batch.weight, batch.targets, **given).loss

    return loss


def ours_distillation(kind: str) -> LossOp:
    def distillation(batch: Batch, work: Work) -> Tensor:
        assert batch.teacher_hidden is not None
        assert batch.teacher_weight is not None
        options: dict[str, Any] = {"coef": COEF, "kind": kind, "softcap": work.shape.softcap}
        return ours_loss(distillation=Distillation(batch.teacher_hidden, batch.teacher_weight, **options))(batch, work)

    return distillation


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
    """The ops of a causal LM and its trainer: logits in the model's dtype, log_softmax in fp32."""
    return logprobs_of(linear(hidden, weight), targets, work)


def full_logits_compiled(hidden: Tensor, weight: Tensor, targets: Tensor, work: Work) -> Tensor:
    return _compiler()(hidden, weight, targets, work)


@functools.cache
def _compiler() -> LogprobOp:
    """`full_logits` compiled, on first use because torch.compile takes seconds to import.

    Its kernels are tuned in each process: what one found while others used the device is not kept on disk.
    """
    return torch.compile(full_logits, dynamic=False, options={"autotune_local_cache": False})


def exact(batch: Batch, work: Work) -> Result:
    """The reference: full logits in fp64 from the same inputs."""
    leaves = {name: getattr(batch, name).detach().double() for name in ("hidden", "weight")}
    names = ["advantages", "old_logprobs", "upstream"]
    names += ["teacher_hidden", "teacher_weight"] if work.has_teacher else []
    wide = {name: getattr(batch, name).double() for name in names}
    leaves["hidden"].requires_grad_(work.gradients != "no_grad")
    leaves["weight"].requires_grad_(work.gradients == "trainable")
    ops: dict[str, Any] = {"logprobs": full_logits, "divergence": full_divergence, "distillation": full_distillation}
    ops |= {"centred": full_centred}
    reference = Implementation(name="fp64", version=None, setting="", several=True, **ops)
    return reference.run(batch._replace(**leaves, **wide), work)


@dataclass(frozen=True, kw_only=True)
class OneTarget(Implementation):
    """Ours for the first of K targets, to show what the others cost. Its result is that of another work."""

    def why_not(self, work: Work, device: str) -> str | None:
        return None if work.several is not None else "differs for several targets only"

    def forward(self, batch: Batch, work: Work) -> Tensor:
        batch.hidden.grad = batch.weight.grad = None
        return over_scored(ours_logprobs, batch._replace(targets=batch.targets[..., 0]), work)

    def backward(self, value: Tensor, batch: Batch, work: Work) -> None:
        value.backward(batch.upstream[..., 0])


def ours() -> list[Implementation]:
    """Each plan that a caller can select; the gradients of the work select among the others."""
    version = fused_grpo.__version__
    return [
        Implementation(
            name="fused-grpo",
            version=version,
            setting="defaults",
            logprobs=ours_logprobs,
            loss=ours_loss(),
            divergence=ours_divergence,
            distillation=ours_distillation("reverse_kl"),
            centred=ours_centred,
            several=True,
        ),
        Implementation(
            name="fused-grpo, not centred",
            version=version,
            setting="the loss without score centering",
            loss=ours_loss(),
            centred=ours_loss(),
            floor=True,
            limits=lambda work, device: None if work.centred else "differs for score centering only",
        ),
        OneTarget(name="fused-grpo, one target", version=version, setting="the first of K targets", floor=True),
        Implementation(
            name="fused-grpo, no teacher",
            version=version,
            setting="the loss of a distillation without its divergence",
            distillation=ours_loss(),
            floor=True,
        ),
        Implementation(
            name="fused-grpo, JSD",
            version=version,
            setting="the kind that takes longest, whose result is that of another work",
            distillation=ours_distillation("jsd"),
            floor=True,
        ),
        Implementation(
            name="fused-grpo, needed",
            version=version,
            setting='score="needed": no log-probs of sequences without an advantage',
            loss=ours_loss(score="needed"),
            limits=lambda work, device: (
                None if work.kind == "loss" and work.idle else "differs for the loss of idle sequences only"
            ),
        ),
    ]


def plain() -> list[Implementation]:
    """Full logits, eager and compiled."""
    version = torch.__version__
    return [
        Implementation(
            name="full logits",
            version=version,
            setting="F.linear, log_softmax in fp32",
            logprobs=full_logits,
            divergence=full_divergence,
            distillation=full_distillation,
            centred=full_centred,
            several=True,
        ),
        Implementation(
            name="full logits, compiled",
            version=version,
            setting="the same under torch.compile",
            logprobs=full_logits_compiled,
            limits=no_compiler,
        ),
    ]


def no_compiler(work: Work, device: str) -> str | None:
    """The reason why torch.compile cannot run: on a CPU it needs a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if device != "cpu" or shutil.which(compiler) is not None:
        return None
    return f"torch.compile finds no C++ compiler, {compiler}; fix: install it, or set CXX"


def peer(
    name: str, requirement: str, setting: str, load: Callable[[], dict[str, Any]], **options: Any
) -> Implementation:
    """An implementation that may not be installed: `load` imports it and returns its `logprobs` or `loss`."""
    version, ops, missing = None, {}, None
    try:
        version, ops = importlib.metadata.version(re.split("[<>=]", requirement)[0]), load()
    except importlib.metadata.PackageNotFoundError:
        missing = f"is not installed; fix: pip install {shlex.quote(requirement)}"
    except Exception as error:  # any error of an import makes it absent
        missing = f"{type(error).__name__}: {error}; fix: pip install {shlex.quote(requirement)}"
    return Implementation(name=name, version=version, setting=setting, missing=missing, **ops, **options)
