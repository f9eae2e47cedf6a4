"""The metrics of an optimizer step, from the table in docs/trainer.md and the formulas in docs/loss.md, in fp64.

One sequence after the other, without packing, micro-batches, ranks or kernels; autograd has the gradients. `measured`
asks a model for what it says of completions, `Step` makes the metrics of it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
OF_SAMPLER = ("dppo_tv", "dppo_kl", "ipo", "dro")
BY_TOKENS = ("bnpo", "dapo", "cispo", "vespo", "gpg", *OF_SAMPLER)


@dataclass
class Sequence:
    """One completion of the step, of its own tokens alone: [n] each, fp64."""

    advantage: float
    logprobs: Tensor  # of the policy, with a gradient
    entropy: Tensor
    old: Tensor
    ref: Tensor | None = None
    sampling: Tensor | None = None  # NaN: not known
    in_forward: bool = True  # False: its advantage is 0, and no term but that one has a gradient
    mask: list[bool] | None = None  # of all its tokens, which are its own


def measured(model: Any, prompt: list[int], completion: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of a completion's tokens, [n] each."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double() / temperature
    every = logits.log_softmax(-1)
    return every.gather(1, torch.tensor(completion)[:, None])[:, 0], -(every.exp() * every).sum(-1)


def mean(values: Any) -> float:
    values = list(values)
    return float(sum(values) / len(values)) if values else 0.0


class Controller:
    """The coefficient of the entropy bonus, as TRL's documentation has it."""

    def __init__(self, args: Any) -> None:
        self.args, self.coefficient = args, args.entropy_coef
        self.applied = 0.0 if args.use_adaptive_entropy else args.entropy_coef

    def after(self, entropy: float) -> dict[str, float]:
        """The metrics of a step with this mean entropy, of the tokens that the bonus is about."""
        args, applied = self.args, self.applied
        if not args.use_adaptive_entropy:
            return {"entropy_coef": self.coefficient} if self.coefficient else {}
        is_low = entropy <= args.entropy_target
        moved = self.coefficient + (args.entropy_coef_delta if is_low else -args.entropy_coef_delta)
        self.coefficient = min(max(moved, args.entropy_coef_min), args.entropy_coef_max)
        self.applied = self.coefficient if is_low else 0.0
        return {"entropy_coef": self.coefficient, "entropy_coef_applied": applied}


class Step:
    """Sequences and options of a step: every metric is a method's result, or an entry of `metrics`."""

    def __init__(self, sequences: list[Sequence], args: Any, *, total: int, entropy_coef: float) -> None:
        self.sequences, self.args, self.total, self.entropy_coef = sequences, args, total, entropy_coef
        is_corrected = args.vllm_importance_sampling_correction
        self.correction = args.vllm_importance_sampling_mode if is_corrected else None
        self.forward = [one for one in sequences if one.in_forward]
        self.low, self.high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.tokens = sum(len(one.old) for one in sequences)
        self.entropy_least = self._entropy_least()

    def _entropy_least(self) -> float:
        share = self.args.top_entropy_quantile
        every = torch.cat([one.entropy.detach() for one in self.forward])
        if share == 1.0 or not len(every):
            return -math.inf
        return float(torch.quantile(every, 1 - share)) - 1e-9  # first tokens of a prompt have one entropy, but for bits

    def own(self, one: Sequence) -> dict[str, Tensor]:
        """Of the tokens of a sequence: ratio, clipped from below and above, factor and value of the policy term, KL."""
        args, kind, A = self.args, self.args.loss_type, one.advantage
        old = one.old
        if kind in OF_SAMPLER and self.correction and one.sampling is not None:
            old = torch.where(one.sampling.isnan(), one.old, one.sampling)
        d = one.logprobs - old
        log_ratio = d
        if kind == "gmpo":
            cut = d.clamp(max=self.high) if A > 0 else d.clamp(min=-self.low) if A < 0 else 0 * d
            log_ratio = cut.mean().expand_as(d)
        elif args.importance_sampling_level == "sequence":
            log_ratio = d.mean().expand_as(d)
        ratio = log_ratio.exp()
        term, low, high = self._term(one, d, ratio, old)
        factor = self._factor(one)
        term = torch.where(factor == 0, 0.0, term * factor)
        regular = torch.zeros_like(d)
        kl = self._kl(one, ratio)
        if kl is not None:
            regular = regular + args.beta * kl
        regular = regular + args.log_ratio_penalty / 2 * (one.logprobs - old) ** 2
        return {"ratio": ratio, "low": low, "high": high, "factor": factor, "term": term, "rest": regular}

    def _term(self, one: Sequence, d: Tensor, ratio: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the policy term, whether it is clipped from below, from above)."""
        kind, A, none = self.args.loss_type, one.advantage, torch.zeros_like(d, dtype=torch.bool)
        fixed, delta = ratio.detach(), math.inf if self.args.delta is None else self.args.delta
        if kind in CLIPPED:
            bounded, inside = ratio.clamp(max=delta), ratio.clamp(1 - self.low, 1 + self.high)
            low, high = bounded < 1 - self.low, bounded > 1 + self.high
            return -torch.minimum(bounded * A, inside * A), low & (A < 0), high & (A > 0)
        if kind == "cispo":
            return -fixed.clamp(max=self.high) * A * one.logprobs, none, (fixed > self.high) & (A > 0)
        if kind == "sapo":
            tau = self.args.sapo_temperature_pos if A > 0 else self.args.sapo_temperature_neg
            return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * A, none, none
        if kind == "gmpo":
            return -ratio * A, (d < -self.low) & (A < 0), (d > self.high) & (A > 0)
        if kind in ("dppo_tv", "dppo_kl", "ipo"):
            mu, p = old.exp(), one.logprobs.detach().exp()
            moved = (mu - p).abs()
            if kind == "dppo_kl":
                moved = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p)).log()
            low, high = (p < mu) & (moved > self.low), (p > mu) & (moved > self.high)
            low, high = (low & (A < 0), high & (A > 0)) if kind != "ipo" else (low & (A != 0), high & (A != 0))
            bounded = fixed.clamp(max=delta) * (one.logprobs - one.logprobs.detach()).exp()
            return torch.where(low | high, 0.0, -bounded * A), low, high
        return -A * one.logprobs, none, none

    def rho(self, one: Sequence) -> Tensor | None:
        """The weights of the sampling correction, [n], or of the whole sequence, [1]; None: there is none."""
        if one.sampling is None or self.correction is None or self.args.loss_type in OF_SAMPLER:
            return None
        log_rho = torch.where(one.sampling.isnan(), 0.0, one.old - one.sampling)
        is_per_sequence = self.correction.startswith("sequence")
        rho = (log_rho.sum()[None] if is_per_sequence else log_rho).exp()
        least, most = self.args.vllm_importance_sampling_clip_min, self.args.vllm_importance_sampling_clip_max
        least, most = 0.0 if least is None else least, math.inf if most is None else most
        if self.correction.endswith("truncate"):
            return rho.clamp(least, most)
        return torch.where((rho < least) | (rho > most), 0.0, rho)

    def phi(self, one: Sequence) -> Tensor:
        args, log_w = self.args, (one.logprobs.detach() - one.old).clamp(-20, 20).sum()
        if (rho := self.rho(one)) is not None:
            log_w = log_w + rho.log().clamp(math.log(1e-8), 20).sum()
        log_w, side = log_w.clamp(math.log(1e-8), 20), "pos" if one.advantage >= 0 else "neg"
        k, decay = getattr(args, f"vespo_k_{side}"), getattr(args, f"vespo_lambda_{side}")
        return (decay + k * log_w - decay * log_w.exp()).exp()

    def _factor(self, one: Sequence) -> Tensor:
        factor, args = torch.ones_like(one.old), self.args
        rho = self.rho(one)
        if args.loss_type == "vespo":
            factor = factor * self.phi(one)
        elif rho is not None:
            factor = factor * rho
        if args.off_policy_mask_threshold is not None and one.advantage < 0:
            from_sampler = one.old if one.sampling is None else one.sampling
            drift = torch.where(from_sampler.isnan(), 0.0, from_sampler - one.logprobs.detach()).mean()
            factor = factor * float(drift <= args.off_policy_mask_threshold)
        if args.sequence_rejection is not None and one.sampling is not None:
            log_rho = torch.where(one.sampling.isnan(), 0.0, one.old - one.sampling)
            means = {"ratio": log_rho.exp(), "k1": -log_rho, "k2": log_rho**2 / 2, "k3": log_rho.exp() - log_rho - 1}
            geometric = args.sequence_rejection == "geometric_ratio"
            value = float(log_rho.mean().exp() if geometric else means[args.sequence_rejection].mean())
            least, most = args.sequence_rejection_min, args.sequence_rejection_max
            is_kept = (-math.inf if least is None else least) <= value <= (math.inf if most is None else most)
            factor = factor * float(is_kept)
        return factor * (one.entropy.detach() >= self.entropy_least)

    def _kl(self, one: Sequence, ratio: Tensor) -> Tensor | None:
        if one.ref is None:
            return None
        q = one.ref - one.logprobs
        kl = {"k1": -q, "k2": q**2 / 2, "k3": q.exp() - q - 1}[self.args.kl_estimator]
        return kl * ratio if self.args.use_bias_correction_kl else kl

    def weight(self, one: Sequence) -> float:
        kind, count = self.args.loss_type, self.total
        if kind in BY_TOKENS:
            return 1 / self.tokens
        if kind == "luspo":
            return 1 / count
        return 1 / (count * (self.args.max_completion_length if kind == "dr_grpo" else len(one.old)))

    def metrics(self) -> dict[str, float]:
        """All of them; the loss is kept for `grad_norm`."""
        args, own = self.args, [(one, self.own(one)) for one in self.forward]
        is_sequence = args.importance_sampling_level == "sequence" or args.loss_type == "gmpo"

        def over(name: str) -> list[float]:  # tokens, or sequences
            return [v for _, of in own for v in ([of[name].detach().mean()] if is_sequence else of[name].detach())]

        policy = sum(self.weight(one) * of["term"].sum() for one, of in own)
        sure = [h for one in self.forward for h in one.entropy if h.detach() >= self.entropy_least]
        bonus = self.entropy_coef * (sum(sure) / len(sure) if sure else 0.0)
        without = policy + sum(self.weight(one) * of["rest"].sum() for one, of in own)
        self.loss = without - bonus
        every = [v for _, of in own for v in of["factor"]]
        slopes = torch.autograd.grad(without, [one.logprobs for one in self.forward], retain_graph=True)
        moved = [
            (slope != 0) | ((one.entropy >= self.entropy_least) & (self.entropy_coef != 0))
            for one, slope in zip(self.forward, slopes, strict=True)
        ]
        still = self.tokens - sum(int(of.sum()) for of in moved)
        values = {
            "completion_tokens": self.tokens,
            "loss": self.loss.detach(),
            "policy_term": policy.detach(),
            "policy_loss": without.detach(),
            "entropy": mean(h for one in self.forward for h in one.entropy.detach()),
            "ratio_mean": mean(over("ratio")),
            "ratio_min": min(v.detach() for _, of in own for v in of["ratio"]),
            "ratio_max": max(v.detach() for _, of in own for v in of["ratio"]),
            "effective_weight": mean(every),
            "zero_gradient_fraction": still / self.tokens,
        }
        return {
            name: float(value) for name, value in (values | self._clips(own, is_sequence) | self._sampler()).items()
        }

    def _clips(self, own: Any, is_sequence: bool) -> dict[str, float]:
        """Shares of what is clipped: of tokens, or of sequences; a completion without a gradient has none."""
        skipped = [len(one.old) for one in self.sequences if not one.in_forward]
        shares = {
            side: [float(of[side].double().mean()) for _, of in own] + [0.0] * len(skipped) for side in ("low", "high")
        }
        counts = [1 if is_sequence else len(one.old) for one, _ in own] + [1 if is_sequence else n for n in skipped]
        low, high = (sum(s * n for s, n in zip(shares[side], counts, strict=True)) / sum(counts) for side in shares)
        if self.args.loss_type == "cispo":
            return {"cispo_clip_ratio": high}
        if self.args.loss_type not in (*CLIPPED, "gmpo", "dppo_tv", "dppo_kl", "ipo"):
            return {}
        clips = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
        return clips | {"clip_ratio/low_min": min(shares["low"]), "clip_ratio/high_max": max(shares["high"])}

    def _sampler(self) -> dict[str, float]:
        metrics = dict[str, float]()
        if self.forward and self.forward[0].ref is not None:
            ones = [(one, self.own(one)["ratio"].detach()) for one in self.forward]
            metrics["kl"] = mean(v for one, ratio in ones for v in self._kl(one, ratio).detach())
        if self.args.loss_type == "vespo":
            metrics["vespo/phi_seq_mean"] = mean(self.phi(one) for one in self.forward)
        if self.forward[0].sampling is None:
            return metrics
        apart = [v for one in self.forward for v in (one.old - one.sampling) if not v.isnan()]
        metrics["sampling/sampling_logp_difference/mean"] = mean(abs(v) for v in apart)
        metrics["sampling/sampling_logp_difference/max"] = max((abs(float(v)) for v in apart), default=0.0)
        metrics["sampling/mismatch_kl"] = mean(v.exp() - v - 1 for v in apart)
        rhos = [self.rho(one) for one in self.forward]
        if rhos[0] is not None:
            rho = [float(v) for row in rhos for v in row]
            squares = sum(v**2 for v in rho)
            metrics["sampling/effective_sample_size"] = sum(rho) ** 2 / (len(rho) * squares) if squares else 0.0
            name = "sampling/importance_sampling_ratio"
            metrics |= {f"{name}/mean": mean(rho), f"{name}/min": min(rho), f"{name}/max": max(rho)}
        return metrics
