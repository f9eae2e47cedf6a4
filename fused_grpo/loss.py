"""`grpo_loss`: the GRPO loss of given log-probs. Its gradient is computed in the forward pass.

`loss_inputs` checks what both public losses take beside log-probs: it raises InputError, with what was got, what is
wanted and a fix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fused_grpo._maths import factors, formulas
from fused_grpo._maths.formulas import LossInputs, Sequences, TokenInputs, token_weights
from fused_grpo._maths.statistics import compute_dtype
from fused_grpo.config import DEFAULT_LOSS, LARGEST, GRPOLossConfig, checked_config
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head.checks import check_plan, check_tensors, is_number, outside_graphs
from fused_grpo.head.chunked_loss import AttachGradients, statistics_of, value_and_gradient
from fused_grpo.passes import choice

FLOATING = ("old_logprobs", "ref_logprobs", "sampling_logprobs")


class GRPOLossOutput(NamedTuple):
    """A loss, its metrics, and the log-probs that it was computed from."""

    loss: Tensor
    """0-d, fp32 (fp64 for fp64 inputs)."""
    metrics: dict[str, Tensor]
    """Detached 0-d tensors of this call, means over its unmasked tokens except for counts and extremes: `policy_term`
    (the loss without KL and entropy terms), `loss_tokens` (the count), `ratio_mean`, `ratio_min`, `ratio_max`,
    `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_region`, `effective_weight` (the factor of the policy term after
    corrections and masks), `zero_gradient_fraction`, and where their inputs are given `entropy` (nats), `kl`,
    `sampling_difference_mean` and `_max` (|log p - sampling log p|). With score centering `centering_sampler_mass` and
    `centering_trainer_mass` (the probability of the sampler's tokens that were given, under each), and `centering_l1`
    (the sum of |c| over them). No collective, no synchronization."""
    logprobs: Tensor
    """Detached log-probs in the shape of the tokens. They can be the `old_logprobs` of a second iteration."""


@outside_graphs
def grpo_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    num_entropy_tokens: float | Tensor | None = None,
    covariance_selected: Tensor | None = None,
    config: GRPOLossConfig | None = None,
    impl: choice.Impl = "auto",
) -> GRPOLossOutput:
    """The GRPO loss of given log-probs, differentiable with respect to `logprobs` and `entropy`.

    Equals, with r = exp(logprobs - old_logprobs) and m the mask (for "dapo"; docs/loss.md has the others):
        `l = -torch.min(r * A, r.clamp(1 - epsilon, 1 + epsilon_high) * A) + beta * kl`
        `loss = (l * m).sum() / num_tokens`

    Args:
        logprobs: padded [B, T], or packed [N] with `cu_seqlens`. Floating; computed in fp32 (fp64 for fp64).
        advantages: [B], one per sequence, or the shape of `logprobs`.
        mask: shape of `logprobs`, non-zero for tokens in the loss. It is 0 for padding, for tool outputs, and for
            truncated completions that should not count. None: all tokens are in the loss.
        cu_seqlens: [B+1] int32, the start of each packed sequence, and N.
        old_logprobs: log-probs under the policy that sampled. None: on policy, `logprobs.detach()`.
        ref_logprobs: log-probs under the reference model; needed where `config.beta > 0`.
        sampling_logprobs: the log-probs of the sampler, for `config.sampling_correction`, `config.sequence_rejection`,
            "dppo_*", "ipo" and "dro". A token with NaN is not corrected.
        entropy: per-token entropy (nats), for the metric, `config.entropy_coef` and `config.top_entropy_quantile`.
        entropy_threshold: the least entropy of a token in the loss, for a `config.top_entropy_quantile` over the whole
            optimizer step. None: the quantile of this call's tokens.
        num_tokens: unmasked tokens of the whole step. None: of this call.
        num_sequences: sequences of the whole step ("grpo", "sapo", "gmpo", "luspo", "dr_grpo"). None: of this call.
        num_entropy_tokens: tokens of the whole step with an entropy bonus: those above `config.top_entropy_quantile`.
            None: `num_tokens`, or with a quantile the tokens of this call.
        covariance_selected: shape of `logprobs`, non-zero for the tokens that `config.clip_cov_ratio` or
            `config.kl_cov_ratio` selects from the whole step. None: from the tokens of this call.
        config: the variant and its constants. None: `GRPOLossConfig()`.
        impl: "auto", "triton", "torch" (any device) or "reference" (autograd through the formulas).

    Raises:
        InputError: shapes, dtypes or devices that disagree, or a value out of range.
        UnavailableError: impl="triton" where Triton cannot run.
        UnsupportedError: a config with score centering, which `fused_linear_grpo_loss` has.

    Source: arXiv:2402.03300 eq. 3 (GRPO), arXiv:2503.14476 eq. 8 (DAPO); formulas and names as in TRL.
    """
    config = DEFAULT_LOSS if config is None else checked_config(config)
    if config.score_centering != "off":
        raise UnsupportedError(
            f"got score_centering={config.score_centering!r} with log-probs of the sampled tokens alone; "
            "fix: fused_linear_grpo_loss, which has the logits of others"
        )
    check_plan(impl)
    check_loss_tokens(logprobs, entropy, config)
    dtype = compute_dtype(logprobs)
    given = LossArguments(
        advantages=advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        sampling_logprobs=sampling_logprobs,
        entropy_threshold=entropy_threshold,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_entropy_tokens=num_entropy_tokens,
        covariance_selected=covariance_selected,
    )
    inputs = loss_inputs(given, logprobs.shape, config, dtype=dtype, device=logprobs.device)
    flat, flat_entropy = (None if x is None else x.reshape(-1).to(dtype) for x in (logprobs, entropy))
    assert flat is not None
    chosen = choice.choose(impl, logprobs)
    passes = choice.passes(chosen)
    upstream, sums = value_and_gradient(flat, flat_entropy, inputs, config=config, passes=passes)
    statistics = statistics_of([sums], upstream, inputs.tokens.mask, config, passes)
    if chosen == "reference":
        loss = factors.grpo_loss(flat, flat_entropy, inputs, config)[0]
    else:
        attached = (statistics["loss"], upstream, None, passes)
        loss = AttachGradients.apply(*attached, flat, flat_entropy)  # type: ignore[no-untyped-call]
    metrics = formulas.finish_metrics(statistics, inputs, has_entropy=entropy is not None)
    return GRPOLossOutput(loss, metrics, logprobs.detach())


def check_loss_tokens(logprobs: Tensor, entropy: Tensor | None, config: GRPOLossConfig) -> None:
    """Check the log-probs and entropies.

    Raises:
        InputError: dtypes, shapes or devices that cannot be right, or no entropy where the config needs it.
    """
    check_tensors({"entropy": entropy}, logprobs=logprobs)
    for name, tensor in (("logprobs", logprobs), ("entropy", entropy)):
        if tensor is not None and not tensor.is_floating_point():
            raise InputError(f"got {name} of dtype {tensor.dtype}, want a floating dtype")
    if entropy is not None and entropy.shape != logprobs.shape:
        raise InputError(f"got entropy {tuple(entropy.shape)}, want {tuple(logprobs.shape)}: one per token")
    if entropy is None and (config.entropy_coef or config.top_entropy_quantile < 1.0):
        raise InputError(
            f"got entropy_coef={config.entropy_coef} and top_entropy_quantile={config.top_entropy_quantile} without "
            "entropy; fix: pass entropy, which linear_logprobs_and_entropy gives"
        )


class LossArguments(NamedTuple):
    """What a caller gives both losses beside log-probs and a config, under the names of `grpo_loss`."""

    advantages: Tensor
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    sampling_logprobs: Tensor | None = None
    entropy_threshold: float | Tensor | None = None
    num_tokens: float | Tensor | None = None
    num_sequences: float | Tensor | None = None
    num_entropy_tokens: float | Tensor | None = None
    covariance_selected: Tensor | None = None


def loss_inputs(
    given: LossArguments,
    shape: torch.Size,
    config: GRPOLossConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kept: Tensor | None = None,
) -> LossInputs:
    """Check the arguments against tokens of `shape` and flatten them. `kept` [N] masks on top of `mask`."""
    named = given._asdict()
    per_token = {name: named[name] for name in ("mask", *FLOATING, "covariance_selected")}
    check_tensors(per_token | {"cu_seqlens": given.cu_seqlens}, advantages=given.advantages)
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != shape:
            raise InputError(f"got {name} {tuple(tensor.shape)}, want {tuple(shape)}: one per token")
        if tensor is not None and name in FLOATING and not tensor.is_floating_point():
            raise InputError(f"got {name} of dtype {tensor.dtype}, want a floating dtype")
    if config.beta > 0 and given.ref_logprobs is None:
        raise InputError(f"got beta={config.beta} without ref_logprobs; fix: pass ref_logprobs, or beta=0.0")
    if given.advantages.device != device:
        raise InputError(f"got advantages on {given.advantages.device} and tokens on {device}, want one device")
    for name in ("num_tokens", "num_sequences", "num_entropy_tokens"):
        if named[name] is not None:
            check_normaliser(name, named[name], device)
    if given.entropy_threshold is not None:
        check_threshold(given.entropy_threshold, device)
    sequences, num_entropy_tokens = sequences_of(shape, given.cu_seqlens), given.num_entropy_tokens
    advantages = given.advantages.detach()
    if not advantages.is_floating_point():
        raise InputError(f"got advantages of dtype {advantages.dtype}, want a floating dtype; fix: advantages.float()")
    if advantages.shape == (sequences.count,):
        advantages = sequences.spread(advantages, shape.numel())
    elif advantages.shape != shape:
        raise InputError(
            f"got advantages {tuple(advantages.shape)}, want [B] = ({sequences.count},), one per sequence, "
            f"or {tuple(shape)}, one per token"
        )
    mask = torch.ones(shape.numel(), dtype=torch.bool, device=device) if kept is None else kept
    mask = mask if given.mask is None else torch.logical_and(given.mask.reshape(-1), mask)
    flat = {name: None if (x := named[name]) is None else x.detach().to(dtype).reshape(-1) for name in FLOATING}
    tokens = TokenInputs(
        advantages=advantages.reshape(-1).to(dtype),
        weights=token_weights(mask, sequences, given.num_tokens, given.num_sequences, config).to(dtype),
        mask=mask,
        **flat,
    )
    if num_entropy_tokens is None and config.entropy_coef and config.top_entropy_quantile == 1.0:
        num_entropy_tokens = mask.sum().clamp_min(1.0) if given.num_tokens is None else given.num_tokens
    selected = None if given.covariance_selected is None else given.covariance_selected.reshape(-1) != 0
    return LossInputs(tokens, sequences, given.entropy_threshold, num_entropy_tokens, selected)


def sequences_of(shape: torch.Size, cu_seqlens: Tensor | None) -> Sequences:
    """The sequences of tokens of `shape`, packed or padded."""
    if cu_seqlens is None:
        if len(shape) != 2:
            raise InputError(
                f"got tokens of shape {tuple(shape)} without cu_seqlens; "
                "want padded [B, T] (with a mask), or packed [N] with cu_seqlens [B+1]"
            )
        return Sequences(shape[0], (shape[0], shape[1]))
    if len(shape) != 1:
        raise InputError(f"got cu_seqlens with tokens of shape {tuple(shape)}, want packed tokens [N]; fix: .flatten()")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"got cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}, want [B+1] int32")
    lengths = cu_seqlens.diff()
    if cu_seqlens.device.type == "cpu":
        first, last, ordered = int(cu_seqlens[0]), int(cu_seqlens[-1]), bool((lengths >= 0).all())
        if first != 0 or last != shape[0] or not ordered:
            raise InputError(f"got cu_seqlens from {first} to {last}, want ascending from 0 to N={shape[0]}")
    return Sequences(len(lengths), lengths)


def check_normaliser(name: str, value: float | Tensor, device: torch.device) -> None:
    """Check a count over the whole optimizer step; on a GPU, not its value."""
    if isinstance(value, Tensor):
        check_scalar(name, value, device)
        if value.device.type != "cpu":
            return
        value = value.item()
    if not (is_number(value, 0, LARGEST) and value):
        raise InputError(f"got {name}={value!r}, want a finite number > 0: the count over the whole optimizer step")


def check_threshold(value: float | Tensor, device: torch.device) -> None:
    """Check a threshold of entropies."""
    if isinstance(value, Tensor):
        check_scalar("entropy_threshold", value, device)
    elif not is_number(value, -LARGEST, LARGEST):
        raise InputError(f"got entropy_threshold={value!r}, want a finite number, a 0-d tensor or None")


def check_scalar(name: str, value: Tensor, device: torch.device) -> None:
    """Check that `value` is one real number on the CPU or on `device`."""
    if value.device.type not in ("cpu", device.type):
        raise InputError(f"got {name} on {value.device} and tokens on {device}, want one device")
    check_tensors(**{name: value})
    if value.ndim != 0 or value.is_complex():
        raise InputError(f"got {name} of shape {tuple(value.shape)} {value.dtype}, want a number or a real 0-d tensor")
