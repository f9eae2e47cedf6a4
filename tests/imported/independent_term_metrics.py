"""The metrics of a step's further terms, from docs/loss.md, docs/divergence.md and docs/score-centering.md, in fp64.

Of terms that change the metrics in independent_step_metrics.py: the selections of Clip-Cov and KL-Cov, the divergence
from a teacher, score centering, the load of a mixture's experts, how many of these the sampler chose otherwise.
Plain loops over full distributions, without packing, chunks or kernels.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from independent_step_metrics import OF_SAMPLER, Sequence, Step
from mixtures import hooked
from torch import Tensor


@dataclass
class FullSequence(Sequence):
    """A completion with all log-probs of its places, [n, V] each."""

    every: Tensor | None = None  # of the policy, with a gradient
    teacher: Tensor | None = None
    listed: list[dict[int, float]] | None = None  # of each place, log-probs of the sampler by token


def distributions(model: Any, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    """All log-probs of the places of a completion, [n, V]."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1)


def divergence(p: Tensor, q: Tensor, kind: str, beta: float) -> Tensor:
    """[n], of student p and teacher q, both log-probs [n, V]."""
    mixture = ((1 - beta) * p.exp() + beta * q.exp()).log()
    to = {"reverse_kl": [(1.0, p, q)], "forward_kl": [(1.0, q, p)]}
    terms = to.get(kind, [(beta, q, mixture), (1 - beta, p, mixture)])
    return sum(share * (a.exp() * (a - b)).sum(1) for share, a, b in terms)


class FullStep(Step):
    """A step with any of these terms."""

    def __init__(self, sequences: list[FullSequence], args: Any, *, total: int) -> None:
        super().__init__(sequences, args, total=total, entropy_coef=args.entropy_coef)
        self.selected = dict[int, list[bool]]()
        if args.kl_cov_ratio or args.clip_cov_ratio:
            self.selected = self._select()

    def _select(self) -> dict[int, list[bool]]:
        """Which tokens of each sequence Clip-Cov or KL-Cov selects."""
        args, places = self.args, list[tuple[float, float, bool, int, int]]()
        for number, one in enumerate(self.forward):
            of = super().own(one)
            for place, logprob in enumerate(one.logprobs.tolist()):
                is_clipped = bool(of["low"][place]) or bool(of["high"][place])
                places.append((logprob, one.advantage, is_clipped, number, place))
        means = [sum(row[column] for row in places) / len(places) for column in (0, 1)]
        rows = sorted(((row[0] - means[0]) * (row[1] - means[1]), *row[2:]) for row in places)
        if args.kl_cov_ratio:
            chosen = rows[-max(1, int(args.kl_cov_ratio * len(rows))) :]
        else:
            inside = [row for row in rows if args.clip_cov_lb < row[0] < args.clip_cov_ub and not row[1]]
            count = min(max(1, int(args.clip_cov_ratio * len(rows))), len(inside))
            chosen = [inside[int((k + 0.5) * len(inside) / count)] for k in range(count)]
        selected = {id(one): [False] * len(one.old) for one in self.forward}
        for *_, number, place in chosen:
            selected[id(self.forward[number])][place] = True
        return selected

    def own(self, one: FullSequence) -> dict[str, Tensor]:
        of, args = super().own(one), self.args
        if id(one) in self.selected and args.kl_cov_ratio:
            chosen = torch.tensor(self.selected[id(one)])
            of["rest"] = of["rest"] + args.kl_cov_coef * chosen * (one.logprobs - one.old).abs()
        if one.teacher is not None:
            own = divergence(one.every, one.teacher, args.distillation_kind, args.distillation_beta)
            of |= {"divergence": own, "rest": of["rest"] + args.distillation_coef * own}
        if one.listed is not None:
            c, of["sampler_mass"], of["trainer_mass"], of["l1"] = self._centering(one)
            centred = torch.stack([(row * place).sum() for row, place in zip(c, one.every, strict=True)])
            of["rest"] = of["rest"] + one.advantage * self._of_sequence(one) * centred
            of["c"] = c
        return of

    def _factor(self, one: FullSequence) -> Tensor:
        factor = super()._factor(one)
        if self.args.clip_cov_ratio and id(one) in getattr(self, "selected", {}):
            factor = factor * ~torch.tensor(self.selected[id(one)])
        return factor

    def _of_sequence(self, one: FullSequence) -> Tensor:
        """The factor of the policy term without what is of a token's own importance: [n]."""
        factor = self._factor(one)
        is_per_token = self.rho(one) is not None and not self.correction.startswith("sequence")
        return factor / self.rho(one) if is_per_token else factor

    def _weighted(self, p: float, q: float, advantage: float) -> float:
        """q f(p / q), with f the weight of a token by its importance; 0 for that of the tail."""
        args = self.args
        if args.loss_type in OF_SAMPLER and self.correction:
            moved = p - q
            is_far = (advantage < 0 and moved < -self.low) or (advantage > 0 and moved > self.high)
            assert args.loss_type == "dppo_tv"
            return 0.0 if is_far else min(p, q * (math.inf if args.delta is None else args.delta))
        if not self.correction or self.correction.startswith("sequence"):
            return q
        least, most = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        least, most = (0.0 if least is None else least) * q, (math.inf if most is None else most) * q
        if self.correction == "token_truncate":
            return min(max(p, least), most)
        return p if least <= p <= most else 0.0

    def _centering(self, one: FullSequence) -> tuple[Tensor, list[float], list[float], list[float]]:
        """c [n, V], and of each place the mass of the listed tokens under sampler and policy, and the sum of |c|."""
        table, masses = torch.zeros_like(one.every), [list[float](), list[float](), list[float]()]
        for place, listed in enumerate(one.listed):
            p = {token: math.exp(one.every[place, token].item()) for token in listed}
            q = {token: math.exp(logprob) for token, logprob in listed.items()}
            rho = max(1 - sum(q.values()), 1e-6) / max(1 - sum(p.values()), 1e-6)
            tail = self._weighted(1.0, rho, 0.0)
            for token in listed:
                table[place, token] = self._weighted(p[token], q[token], one.advantage) - tail * p[token]
            for values, value in zip(masses, (sum(q.values()), sum(p.values()), table[place].abs().sum()), strict=True):
                values.append(float(value))
        return table, *masses

    def metrics(self) -> dict[str, float]:
        values, own = super().metrics(), [(one, self.own(one)) for one in self.forward]

        def over_tokens(name: str) -> float:
            total = sum(float(torch.as_tensor(of[name]).detach().sum()) for _, of in own)
            return total / sum(len(one.old) for one, _ in own)

        if own[0][0].teacher is not None:
            values["distillation"] = over_tokens("divergence")
        for name in ("sampler_mass", "trainer_mass", "l1") if own[0][0].listed is not None else ():
            values[f"centering_{name}"] = over_tokens(name)
        if self.args.score_centering != "off" or own[0][0].teacher is not None:
            values["zero_gradient_fraction"] = self._still(own)
        return values

    def _still(self, own: Any) -> float:
        """The share of tokens none of whose log-probs has a gradient."""
        loss = sum(self.weight(one) * (of["term"] + of["rest"]).sum() for one, of in own)
        slopes = torch.autograd.grad(loss, [one.every for one, _ in own], retain_graph=True)
        moved = sum(int((slope != 0).any(1).sum()) for slope in slopes)
        return (self.tokens - moved) / self.tokens


def routed(model: Any, ids: list[int], k: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of each layer with experts: the probabilities [T, E] of these, and the k that are chosen, from its logits."""
    logits = list[Tensor]()

    def record(layer: int, router: Any, inputs: Any, output: Any) -> None:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        logits.append(hidden @ router.weight.T)

    handles = hooked(model, record)
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    probabilities = [each.double().softmax(1) for each in logits]
    return probabilities, [each.argsort(1, descending=True)[:, :k] for each in probabilities]


def load_loss(model: Any, sequences: list[list[int]], k: int) -> float:
    """E sum_e f_e P_e, with means over the tokens of all sequences and the routers of all layers."""
    shares, chances, count = 0.0, 0.0, 0
    for ids in sequences:
        for probabilities, chosen in zip(*routed(model, ids, k), strict=True):
            experts = probabilities.shape[1]
            shares = shares + torch.nn.functional.one_hot(chosen, experts).sum((0, 1)).double()
            chances, count = chances + probabilities.sum(0), count + len(ids)
    return float(experts * (shares / count * chances / count).sum())


def disagreement(model: Any, sequences: list[list[int]], chosen: list[Tensor], k: int) -> float:
    """The share of tokens times layers whose experts, of those that were `chosen` [T - 1, layers, k], are others."""
    other, count = 0, 0
    for ids, given in zip(sequences, chosen, strict=True):
        for layer, own in enumerate(routed(model, ids, k)[1]):
            for place in range(len(ids) - 1):
                other += set(own[place].tolist()) != set(given[place, layer].tolist())
                count += 1
    return other / count
