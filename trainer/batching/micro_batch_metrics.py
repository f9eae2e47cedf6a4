"""What the log-probs of micro-batches say of a whole optimizer step: its metrics, and the tokens that Clip-Cov selects.

`merge_metrics` merges the micro-batches of a step and of all ranks. `ratio_sums` are what TRL measures of ratios that
the loss op does not: by sequence, times the ratio, or of the sampler. The ratio of a sequence
(`importance_sampling_level="sequence"`, "gmpo") counts once, the ratio of a token once for each token.

    clip_ratio/low_min, high_max           extremes over sequences of the share of a sequence's tokens that is clipped
    kl                                     mean over tokens of the KL estimate (use_bias_correction_kl: times the ratio)
    vespo/phi_seq_mean                     mean over sequences of their weight phi
    sampling/sampling_logp_difference/*    |old log p - sampling log p|, over the tokens for which the sampler has one
    sampling/mismatch_kl                   KL(sampler || policy) per token by k3, over the same tokens
    .../turn_<k>/*                         the same over turn k of completions with a mask; the last k has all after it
    sampling/importance_sampling_ratio/*   rho of the sampling correction, after its bounds
    ratio_mean                             mean over sequences, where the ratio is that of a sequence

docs/trainer.md has those that TRL has not.

The selection of Clip-Cov or KL-Cov depends on all tokens of the step, so it takes a forward pass of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, islice, takewhile
from math import isinf, sqrt
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from fused_grpo._maths.factors import ratio_and_clipped, sampling_weights, select_by_covariance, vespo_weights
from fused_grpo._maths.formulas import LossInputs, kl_term, log_rho
from fused_grpo.config import BOUNDED, GRPOLossConfig
from fused_grpo.head.checks import LossArguments, loss_inputs
from fused_grpo.loss import GRPOLossOutput
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, joined_rows
from fused_grpo.trainer.distributed.failures import gather_objects
from fused_grpo.trainer.types import MicroBatch, Sample

Sums = dict[str, Tensor]
# Each is a count, or divided by a count of the whole step.
SUMMED = frozenset({"loss_tokens", "loss", "policy_term", "aux_loss"})
DIFFERENCE, RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
BIT_EQUAL, SAMPLE_SIZE = "sampling/bit_equal_fraction", "sampling/effective_sample_size"
MISMATCH = "sampling/mismatch_kl"
MOST_TURNS = 8  # with metrics of their own
FIRST_TURN = f"{DIFFERENCE}/turn_1/max"  # is known where there are turns


def step_metrics(
    batch: list[Sample], packed: Sequence[MicroBatch], outputs: Sequence[GRPOLossOutput], config: GRPOLossConfig
) -> dict[str, float]:
    """The loss op's metrics of an optimizer step, and TRL's of its ratios, over all ranks. A collective."""
    reports = "squared_gradients" in outputs[0].metrics  # not of an evaluation
    squared = [output.metrics.pop("squared_gradients") for output in outputs if reports]
    variance_metrics = variance_report(batch, packed, squared) if reports else {}
    loss_metrics = merge_metrics([{"loss": output.loss.detach(), **output.metrics} for output in outputs])
    logprobs = [output.logprobs for output in outputs]
    ratio_metrics = merge_metrics([ratio_sums(part, own, config) for part, own in zip(packed, logprobs, strict=True)])
    turn_metrics = turn_sums(batch, packed, logprobs) if any(sample.completion_mask for sample in batch) else {}
    own = [(loss_metrics, ratio_metrics | turn_metrics), skipped_metrics(batch, config)]
    losses, ratios = zip(*chain.from_iterable(gather_objects("joining metrics", own)), strict=True)
    # A step without a token has the names of every other, as in TRL: callbacks read them.
    nothing = torch.zeros(1)
    names = [*_clip_sums(nothing, nothing, nothing, config), *(["kl"] if config.beta else [])]
    absent = dict.fromkeys(names, 0.0) | ({"vespo/phi_seq_mean": 1.0} if config.loss_type == "vespo" else {})
    return means(absent | merge_metrics(losses) | merge_metrics(ratios)) | variance_metrics


@torch.no_grad()
def ratio_sums(part: MicroBatch, logprobs: Tensor, config: GRPOLossConfig) -> Sums:
    """TRL's metrics of a micro-batch, to be merged, from the policy's log-probs [N]; none of one without sequences."""
    if not len(part.advantages):
        return {}
    inputs = inputs_of(part, config)
    current, tokens, sequences, terms = logprobs.float(), inputs.tokens, inputs.sequences, config.token_terms
    old = current if tokens.old_logprobs is None else tokens.old_logprobs
    ratio, *clipped = ratio_and_clipped(current, inputs, config)
    low, high = (sequences.mean(is_clipped, tokens.mask) for is_clipped in clipped)
    counts = sequences.sum(tokens.mask)
    sums = _clip_sums(low, high, counts, config)
    if config.ratio_of_sequence:
        sums["ratio_mean"] = _mean(sequences.mean(ratio, tokens.mask), counts > 0)
    if tokens.ref_logprobs is not None:
        kl = kl_term(tokens.ref_logprobs - current, terms.kl_estimator)
        sums["kl"] = _mean(kl * ratio if terms.bias_correction_kl else kl, counts)
    if config.loss_type == "vespo":
        phi = sequences.mean(vespo_weights(current, old, inputs, config), tokens.mask)
        sums["vespo/phi_seq_mean"] = _mean(phi, counts > 0)
    if (sampling := tokens.sampling_logprobs) is not None:
        is_known = ~sampling.isnan()
        apart = torch.where(is_known, old - sampling, 0.0)
        sums |= {f"{DIFFERENCE}/mean": _mean(apart.abs(), is_known), f"{DIFFERENCE}/max": apart.abs().amax()}
        sums |= {MISMATCH: _mean(kl_term(apart, "k3"), is_known), BIT_EQUAL: _mean(old == sampling, is_known)}
        if config.sampling_correction is not None and terms.correction != "sampler":  # whose weights are in the ratio
            rho = _rho(old, inputs, config)
            ones = torch.ones_like(rho)
            sums |= {f"{RATIO}/mean": _mean(rho, ones), SAMPLE_SIZE: _mean(rho.square(), ones)}
            sums |= {f"{RATIO}/min": rho.amin(), f"{RATIO}/max": rho.amax()}
    return sums


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """[2]: a sum, and the count that it goes over."""
    return torch.stack([values.sum().float(), counts.sum().float()])


def _clip_sums(low: Tensor, high: Tensor, counts: Tensor, config: GRPOLossConfig) -> Sums:
    """Of sequences with so many tokens, from the shares [b] of these that are clipped on either side."""
    weights = torch.ones_like(counts) if config.ratio_of_sequence else counts
    low_mean, high_mean = (_mean(share * weights, weights) for share in (low, high))
    if config.loss_type in (*BOUNDED, "gmpo"):
        sums = {"clip_ratio/low_mean": low_mean, "clip_ratio/low_min": low.amin()}
        return sums | {"clip_ratio/high_mean": high_mean, "clip_ratio/high_max": high.amax()}
    return {"cispo_clip_ratio": high_mean} if config.loss_type == "cispo" else {}


def inputs_of(part: MicroBatch, config: GRPOLossConfig) -> LossInputs:
    """The inputs of the loss of a micro-batch, without the counts of its step."""
    arguments = LossArguments(
        part.advantages,
        cu_seqlens=part.cu_seqlens,
        old_logprobs=part.old_logprobs,
        ref_logprobs=part.ref_logprobs,
        sampling_logprobs=part.sampling_logprobs,
    )
    return loss_inputs(arguments, part.targets.shape, config, dtype=torch.float32, device=part.targets.device)


def means(merged: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step, each pair as its quotient, and two more that are made of them. None is left out but
    extremes of no tokens."""
    pairs = {name: value for name, value in merged.items() if isinstance(value, tuple)}
    metrics = dict(merged) | {name: total / max(1.0, count) for name, (total, count) in pairs.items()}
    if "clip_ratio/low_mean" in metrics:
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    if SAMPLE_SIZE in pairs:
        squares, count = pairs[SAMPLE_SIZE]
        metrics[SAMPLE_SIZE] = pairs[f"{RATIO}/mean"][0] ** 2 / (squares * count) if squares else 0.0
    # The extremes of no tokens are infinite, and would be in the mean of ten steps.
    return {name: value for name, value in metrics.items() if metrics.get("loss_tokens") or not isinf(value)}


def _rho(old: Tensor, inputs: LossInputs, config: GRPOLossConfig) -> Tensor:
    """The weights of the sampling correction: of sequences [b] where it is of those, or of tokens [N]."""
    tokens = inputs.tokens
    assert tokens.sampling_logprobs is not None
    log_ratio = log_rho(old, tokens.sampling_logprobs, tokens.mask)
    return sampling_weights(inputs.sequences.sum(log_ratio) if config.corrects_sequences else log_ratio, config)


def correction_weights(old: Tensor, part: MicroBatch, config: GRPOLossConfig) -> Tensor:
    """The weight of the sampling correction of each token [N] of a micro-batch, from the policy's log-probs; or 1."""
    if not len(part.advantages) or config.sampling_correction is None or part.sampling_logprobs is None:
        return torch.ones_like(old)
    inputs = inputs_of(part, dataclasses.replace(config, beta=0.0))  # before the reference is asked
    rho = _rho(old.float(), inputs, config)
    return inputs.sequences.spread(rho, len(old)) if config.corrects_sequences else rho


def turn_sums(batch: Sequence[Sample], packed: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> dict[str, Any]:
    """`ratio_sums` of turns, from the policy's log-probs [N] of each micro-batch."""
    turns, differences = list[Tensor](), list[Tensor]()
    for sample, current in zip(batch, per_sequence(packed, logprobs, len(batch)), strict=True):
        if sample.completion_mask is None or sample.sampling_logprobs is None or not len(current):
            continue  # without tokens in a micro-batch, or without log-probs
        own = torch.tensor(sample.completion_mask)
        begins = own & ~torch.cat([own.new_zeros(1), own[:-1]])
        turns.append(begins.cumsum(0)[own].clamp(max=MOST_TURNS))
        old = current if sample.old_logprobs is None else sample.old_logprobs
        differences.append((old - torch.tensor(sample.sampling_logprobs, dtype=torch.float32)[own]).abs())
    if not turns:
        return {}
    sums, numbers, values = dict[str, Any](), torch.cat(turns), torch.cat(differences)
    for turn in range(1, int(numbers.max()) + 1):
        in_turn = values[(numbers == turn) & ~values.isnan()]
        if len(in_turn):
            name = f"{DIFFERENCE}/turn_{turn}"
            sums |= {f"{name}/mean": (in_turn.sum().item(), len(in_turn)), f"{name}/max": in_turn.max().item()}
    return sums


def turn_differences(metrics: Mapping[str, float]) -> list[tuple[float, float]]:
    """(mean, maximum) of turns 1, 2, ... among the metrics of a step, up to the first one without log-probs."""
    names = (f"{DIFFERENCE}/turn_{number}" for number in range(1, MOST_TURNS + 1))
    turn_names = takewhile(lambda name: f"{name}/max" in metrics, names)
    return [(metrics[f"{name}/mean"], metrics[f"{name}/max"]) for name in turn_names]


def merge_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of an optimizer step from those of its micro-batches, or of ranks, with one wait for the device.

    Those in SUMMED are summed, as are pairs [2] of a sum and the count that it is to go over; those that end with
    "max" and "min" are extremes, all others are means weighted by `loss_tokens`. A micro-batch without tokens has no
    weight in a mean, whatever its value is. A metric that a micro-batch lacks is merged over the others. The order is
    that in which the names first appear. They are floats, pairs or tensors of one device, with `loss_tokens` among them
    where there are means.
    """
    as_number = functools.partial(torch.as_tensor, dtype=torch.float32)
    parts = [{name: as_number(value).detach() for name, value in part.items()} for part in metrics]
    names = list(dict.fromkeys(name for part in parts for name in part))
    if not names:
        return {}
    merged = [_merge(name, [part for part in parts if name in part]) for name in names]
    numbers = iter(torch.cat([value.flatten() for value in merged]).tolist())
    values = [tuple(islice(numbers, 2)) if value.ndim else next(numbers) for value in merged]
    return dict(zip(names, values, strict=True))


def _merge(name: str, parts: list[Sums]) -> Tensor:
    values = torch.stack([part[name] for part in parts])
    if name in SUMMED or values.ndim > 1:
        return values.sum(0)
    if name.endswith("max"):
        return values.amax()
    if name.endswith("min"):
        return values.amin()
    weights = torch.stack([part["loss_tokens"] for part in parts])
    return torch.where(weights > 0, values * weights, 0.0).sum() / weights.sum().clamp(min=1.0)


def with_covariance_selection(
    packed: Sequence[MicroBatch], logprobs: Sequence[Tensor], config: GRPOLossConfig, accelerator: Accelerator
) -> list[MicroBatch]:
    """The micro-batches of this rank with `covariance_selected`, from the log-probs [N] of each. A collective."""
    facts = list[Tensor]()  # of each: log-probs, advantages and whether a token is clipped, [3, N] on the CPU
    for part, values in zip(packed, logprobs, strict=True):
        inputs, own = inputs_of(part, config), values.float()
        _, below, above = ratio_and_clipped(own, inputs, config)
        facts.append(torch.stack([own, inputs.tokens.advantages, (below | above).to(own)]).cpu())
    ranks = gather_objects("selecting by covariance", torch.cat(facts, dim=1))
    current, advantages, clipped = torch.cat(ranks, dim=1)
    selected = select_by_covariance(current, advantages, clipped != 0, config)
    rank_selected = selected.split([rank.shape[1] for rank in ranks])[accelerator.process_index]
    parts = rank_selected.split([len(part.targets) for part in packed])
    return [
        dataclasses.replace(part, covariance_selected=values.to(part.targets.device))
        for part, values in zip(packed, parts, strict=True)
    ]


def quantile(values: Tensor, share: float) -> Tensor:
    """The quantile of [N] values, 0-d fp32 on the CPU; 0 of none. `torch.quantile` takes at most 2^24 of them."""
    return torch.tensor(np.quantile(values.double().cpu(), share) if len(values) else 0.0, dtype=torch.float32)


def threshold_of_uncertain(entropies: Tensor, share: float) -> Tensor:
    """What divides the `share` of the [N] tokens with the largest entropies from the others, 0-d fp32 on the CPU.

    It is half-way between the last of these tokens and the next one, so that the loss, whose entropies are rounded in
    another order, takes the same tokens. A group's first tokens have equal entropies: all of them are in, or none.
    """
    least = quantile(entropies, 1.0 - share)
    least = least - 2e-6 * least.abs()  # equal entropies differ by less, by rounding
    inside, outside = entropies[entropies >= least], entropies[entropies < least]
    if not len(inside):
        return least
    below = outside.max() if len(outside) else -1.0  # less than any entropy
    return (inside.min() + below) / 2


def per_sequence(packed: Sequence[MicroBatch], values: Sequence[Tensor], total: int) -> list[Tensor]:
    """[N] of each micro-batch as one tensor for each of `total` sequences, on the CPU; empty for those in no batch."""
    rows = [torch.zeros(0)] * total
    for part, flat in zip(packed, values, strict=True):
        pieces = flat.detach().float().cpu().split(part.cu_seqlens.diff().tolist())
        for index, piece in zip(part.sequence_index.tolist(), pieces, strict=True):
            rows[index] = piece.clone()
    return rows


def evidence(batch: list[Sample], packed: Sequence[MicroBatch], outputs: Sequence[GRPOLossOutput]) -> dict[str, Tensor]:
    """The batch as tensors, and the log-probs that the policy gave its tokens."""
    logprobs = per_sequence(packed, [output.logprobs for output in outputs], len(batch))
    return as_tensors(batch) | joined_rows("logprobs", logprobs, torch.float32)


def skipped_metrics(batch: Sequence[Sample], config: GRPOLossConfig) -> tuple[dict[str, float], Sums]:
    """(metrics, `ratio_sums`) of a micro-batch of this rank's skipped completions: none of their tokens is clipped."""
    lengths = torch.tensor([float(sample.num_own) for sample in batch if sample.skipped])
    if not len(lengths):
        return {}, {}
    unclipped = torch.zeros_like(lengths)
    metrics = {"loss_tokens": lengths.sum().item(), "zero_gradient_fraction": 1.0}
    return metrics, _clip_sums(unclipped, unclipped, lengths, config)


def variance_report(batch: list[Sample], packed: Sequence[MicroBatch], squared: list[Tensor]) -> dict[str, float]:
    """Where the gradient of an optimizer step comes from, with the squared norm [N] of each token's d loss / d logits.

    Their sum over a completion is e_i, and over the completions of a prompt E_p. They stand for squared norms of
    gradients in the weights, as in arXiv:2602.07078, with tokens taken for orthogonal. Over all ranks,

        gradient/effective_sequences   (sum sqrt e_i)^2 / sum e_i: B where B completions contribute alike, 1: one does
        gradient/effective_groups      (sum sqrt E_p)^2 / sum E_p: the same of prompts
        gradient/largest_group_share   max E_p / sum E_p

    Completions without a gradient count for nothing: how far these numbers are below those of the batch is what is lost
    to groups with equal rewards, clipped tokens, and a few completions that dominate. A collective.
    """
    rows = per_sequence(packed, squared, len(batch))
    energies = [(tuple(sample.prompt_ids), row.double().sum().item()) for sample, row in zip(batch, rows, strict=True)]
    groups, sequences = defaultdict[tuple[int, ...], float](float), list[float]()
    for prompt, energy in chain.from_iterable(gather_objects("joining gradients", energies)):
        groups[prompt] += energy
        sequences.append(energy)
    total = sum(sequences)
    return {
        "gradient/effective_sequences": effective_number(sequences),
        "gradient/effective_groups": effective_number(groups.values()),
        "gradient/largest_group_share": max(groups.values(), default=0.0) / total if total else 0.0,
    }


def effective_number(squares: Collection[float]) -> float:
    """Kish's effective sample size of contributions with these squared norms; 0 of none.

    >>> effective_number([1.0, 1.0, 1.0, 1.0]), effective_number([9.0, 1.0, 0.0])
    (4.0, 1.6)
    """
    total = sum(squares)
    return sum(map(sqrt, squares)) ** 2 / total if total else 0.0
