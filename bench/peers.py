"""Who turns hidden states and a head's weight into per-token log-probs: ours and its peers, each behind one call.

    run(hidden [B, T, D], weight [V, D], targets [B, T], upstream [B, T]) -> Result(logprobs, dH, dW)

Gradients come back in the dtype of their inputs; dW is None for a weight that asks for none. `upstream`, the gradient
of the loss in each log-prob, is the same number all along a sequence, as GRPO's is on policy: a peer that only gives
the gradients of a whole loss can be had that way, too.

Each peer runs as its own trainer or class sets it up, and nothing is asked for that is not compared. TRL takes, on a
CPU, the torch path it has for devices without Triton, which rounds where its kernels round; Liger's is torch anywhere.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

import fused_grpo

TRL, LIGER = "trl==1.16.0", "liger-kernel==0.8.5"


class Result(NamedTuple):
    logprobs: Tensor
    """[B, T]"""
    hidden: Tensor
    """[B, T, D], the gradient"""
    weight: Tensor | None
    """[V, D], the gradient"""


Run = Callable[[Tensor, Tensor, Tensor, Tensor], Result]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    version: str | None
    setting: str
    run: Callable[..., Any] | None
    """A `Run`, or that of `loss_peers`; None where it is missing."""
    missing: str | None = None
    """Why, and the command that mends it."""


def contenders() -> list[Contender]:
    """Everyone, ours first; those that are not installed say so in `missing`."""
    here, torch_version = fused_grpo.__version__, torch.__version__
    return [
        Contender(name="fused-grpo", version=here, setting="linear_logprobs", run=ours),
        Contender(name="fused-grpo, frozen head", version=here, setting="weight without gradient", run=ours_frozen),
        Contender(name="full logits", version=torch_version, setting="F.linear, log_softmax in fp32", run=full_logits),
        Contender(name="full logits, fp32", version=torch_version, setting="inputs upcast", run=full_logits_fp32),
        trl(),
        trl(cast_lm_head_to_fp32=True),
        liger(),
    ]


def differentiated(forward: Forward) -> Run:
    """Forward and backward of log-probs [B, T] from (hidden, weight, targets)."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Result:
        hidden = hidden.detach().requires_grad_()
        logprobs = forward(hidden, weight, targets)
        leaves = [hidden, weight] if weight.requires_grad else [hidden]
        gradients = torch.autograd.grad(logprobs, leaves, upstream)
        return Result(logprobs.detach(), gradients[0], gradients[1] if weight.requires_grad else None)

    return run


ours = differentiated(fused_grpo.linear_logprobs)


def ours_frozen(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Result:
    """Another plan than the trainable head's: the gradient is taken in the forward pass."""
    return ours(hidden, weight.detach(), targets, upstream)


def chosen(log_p: Tensor, targets: Tensor) -> Tensor:
    return log_p.gather(-1, targets[..., None])[..., 0]


@differentiated
def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What a causal LM and its trainer do: logits in the model's dtype, log_softmax in fp32."""
    return chosen(linear(hidden, weight).float().log_softmax(-1), targets)


@differentiated
def full_logits_fp32(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return chosen(linear(hidden.float(), weight.float()).log_softmax(-1), targets)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Result:
    """The oracle: full logits in fp64 from the very same inputs, and nothing rounded after."""
    run = differentiated(lambda hidden, weight, targets: chosen(linear(hidden, weight).log_softmax(-1), targets))
    weight = weight.detach().double().requires_grad_(weight.requires_grad)
    return run(hidden.double(), weight, targets, upstream.double())


def trl(*, cast_lm_head_to_fp32: bool = False) -> Contender:
    """The op behind TRL's trainers, called as `trl.trainer.utils.add_fused_lm_head` calls it.

    GRPOTrainer asks for the entropy, too, in the same pass; here as there it costs extra, so it is left out.
    """

    def load() -> Run:
        return differentiated(trl_logprobs(cast_lm_head_to_fp32=cast_lm_head_to_fp32))

    if cast_lm_head_to_fp32:
        return peer("TRL, cast_lm_head_to_fp32", TRL, "the same op with its inputs upcast", load)
    return peer("TRL", TRL, "ChunkedLogProbFunction, tiles of 4096 x 32768", load)


def trl_logprobs(*, cast_lm_head_to_fp32: bool = False) -> Forward:
    """Log-probs [B, T] by TRL's op; ImportError where TRL is missing."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    def forward(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if cast_lm_head_to_fp32:
            hidden, weight = hidden.float(), weight.float()
        rows, options = hidden.reshape(-1, hidden.shape[-1]), (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0)
        values = ChunkedLogProbFunction.apply(rows, weight, None, targets.reshape(-1), *options, ("log_probs",))
        return values[0].view(targets.shape)

    return forward


def liger() -> Contender:
    """Liger has no log-prob op: log-probs from the function inside its GRPO loss, gradients from the loss itself.

    Loss type, chunk (one sequence) and clip range are the class's defaults; without the KL term, on policy, the loss is
    -sum_t A_b log p_t / N but for its value. Compiling its loss arithmetic changes nothing of what is compared.
    """

    def load() -> Run:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
        from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

        loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False)
        chunk_forward = LigerFusedLinearPPOBase.chunk_forward

        def run(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Result:
            if not torch.equal(upstream, upstream[:, :1].expand_as(upstream)):
                raise ValueError("got an upstream that differs within a sequence, want one advantage for each")
            with torch.no_grad():
                pieces = zip(hidden.split(1), targets.split(1), strict=True)
                logprobs = torch.cat([chunk_forward(rows, weight, ids) for rows, ids in pieces])
            hidden, advantages = hidden.detach().requires_grad_(), -upstream[:, 0] * targets.numel()
            value = loss(hidden, weight, targets, torch.ones_like(upstream), advantages)[0]
            leaves = [hidden, weight] if weight.requires_grad else [hidden]
            gradients = torch.autograd.grad(value, leaves)
            return Result(logprobs, gradients[0], gradients[1] if weight.requires_grad else None)

        return run

    return peer("Liger", LIGER, "LigerFusedLinearGRPOLoss, one sequence a chunk", load)


def peer(name: str, requirement: str, setting: str, load: Callable[[], Callable[..., Any]]) -> Contender:
    """A contender that may not be installed: `load` imports it."""
    try:
        version, run, missing = importlib.metadata.version(requirement.partition("==")[0]), load(), None
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        version, run, missing = None, None, f"{error}; fix: pip install {requirement}"
    return Contender(name=name, version=version, setting=setting, run=run, missing=missing)


def check(run: Run, *, frozen: bool = False) -> None:
    """Nothing wrong is measured: log-probs and gradients in fp32 against fp64, over several of anyone's tiles."""
    (hidden, weight, targets, upstream), right = _small_problem()
    result = run(hidden, weight.detach().requires_grad_(not frozen), targets, upstream)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4)
    close(result.logprobs.double(), right.logprobs, atol=1e-5)
    close(result.hidden.double(), right.hidden, atol=1e-5 * right.hidden.abs().max().item())
    if result.weight is not None:
        close(result.weight.double(), right.weight, atol=1e-5 * right.weight.abs().max().item())


@functools.cache
def _small_problem() -> tuple[tuple[Tensor, ...], Result]:
    generator, (B, T, D, V) = torch.Generator().manual_seed(0), (3, 16, 32, 40000)
    hidden = torch.randn(B, T, D, generator=generator)
    weight = torch.randn(V, D, generator=generator).mul_(0.4).requires_grad_()
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[0, :2] = torch.tensor([0, V - 1])
    upstream = torch.tensor([1.0, -2.0, 0.5])[:, None].expand(B, T) / (B * T)
    inputs = (hidden, weight, targets, upstream)
    return inputs, exact(*inputs)
