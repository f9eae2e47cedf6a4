"""Losses that TRL does not have, against a second implementation of each, written from its paper, a token at a time."""

import math

import pytest
import torch

from fused_grpo import GRPOLossConfig, grpo_loss

B, T = 7, 9
IMPLS = ["reference", "torch", "triton"]
ADVANTAGES = [1.0, -2.0, 0.0, 1.5, -0.5, 0.7, -1.0]


def numbers(spread=0.5):
    """Log-probs of the policy, the old policy and the sampler, and a mask with holes and an empty sequence."""
    generator = torch.Generator().manual_seed(3)

    def near(values):
        return (values + spread * torch.randn(B, T, generator=generator, dtype=torch.float64)).clamp(max=-0.01)

    policy = near(-2.5 * torch.rand(B, T, generator=generator, dtype=torch.float64))
    mask = torch.rand(B, T, generator=generator) > 0.2
    mask[4] = False
    return {"policy": policy, "old": near(policy), "sampler": near(policy), "mask": mask}


def of_ours(given, config, impl, **options):
    """The loss and its gradient in the log-probs."""
    dtype = torch.float32 if impl == "triton" else torch.float64
    leaf = given["policy"].to(dtype).requires_grad_()
    inputs = {"old_logprobs": given.get("old"), "sampling_logprobs": given.get("sampler")}
    inputs = {name: None if values is None else values.to(dtype) for name, values in inputs.items()}
    inputs |= {"advantages": torch.tensor(ADVANTAGES, dtype=dtype), "mask": given["mask"]}
    loss = grpo_loss(leaf, config=config, impl=impl, **inputs, **options).loss
    return loss.detach().double(), torch.autograd.grad(loss, leaf)[0].double()


def check(given, config, authors, impl, **options):
    """`authors` is a function of log-probs [B, T] as nested lists of 0-d tensors."""
    leaf = given["policy"].clone().requires_grad_()
    loss = authors([list(row) for row in leaf])
    (gradient,) = torch.autograd.grad(loss, leaf)
    ours = of_ours(given, config, impl, **options)
    torch.testing.assert_close(ours[0], loss.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1], gradient, rtol=1e-6, atol=1e-6)
    assert gradient.abs().max() > 1e-3


def tokens_of(given):
    return [(i, t) for i in range(B) for t in range(T) if given["mask"][i, t]]


def binary_divergence(kind, mu, pi):
    """Of (mu, 1 - mu) from (pi, 1 - pi), DPPO eq. 13 and 14."""
    if kind == "dppo_tv":
        return abs(mu - pi)
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("anchor", ["old", "sampler"])
@pytest.mark.parametrize(("kind", "bounds"), [("dppo_tv", (0.15, 0.2)), ("dppo_kl", (0.05, 0.08))])
def test_dppo_masks_by_the_divergence_what_moves_away(kind, bounds, anchor, impl):
    """The mean over tokens of -M r A, where M is 0 if D > delta and (A > 0, r > 1) or (A < 0, r < 1)."""
    given, masked = numbers(), set()

    def authors(logprobs):
        total = 0.0
        for i, t in tokens_of(given):
            mu, pi = given[anchor][i, t].exp().item(), logprobs[i][t].exp().item()
            rises = ADVANTAGES[i] > 0
            away = pi / mu > 1 if rises else pi / mu < 1
            if away and binary_divergence(kind, mu, pi) > bounds[rises]:
                masked.add((i, t))
            else:
                total = total - (logprobs[i][t] - given[anchor][i, t]).exp() * ADVANTAGES[i]
        return total / len(tokens_of(given))

    correction = "token_truncate" if anchor == "sampler" else None
    options = {"epsilon": bounds[0], "epsilon_high": bounds[1], "sampling_correction": correction}
    check(given, GRPOLossConfig(loss_type=kind, **options), authors, impl)
    assert 3 < len(masked) < len(tokens_of(given)) - 9


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("anchor", ["old", "sampler"])
def test_ipo_masks_what_is_far_from_the_sampler_on_either_side(anchor, impl):
    """The mean over tokens of -stop(M min(p / q, C)) A log p, M = 0 where |p - q| > eps; adv_tau is a factor of A."""
    given, eps, cap, masked = numbers(), 0.1, 1.6, {-1: 0, 1: 0}

    def authors(logprobs):
        total = 0.0
        for i, t in tokens_of(given):
            p, q = logprobs[i][t].exp(), given[anchor][i, t].exp()
            if abs(p - q) > eps:
                masked[1 if (p - q) * ADVANTAGES[i] > 0 else -1] += 1
                continue
            r = (p / q).detach()
            r, passes = min(r, torch.tensor(cap)), logprobs[i][t] - logprobs[i][t].detach()
            total = total - r * ADVANTAGES[i] * (1 + passes)
        return total / len(tokens_of(given))

    correction = "token_truncate" if anchor == "sampler" else None
    config = GRPOLossConfig(loss_type="ipo", epsilon=eps, delta=cap, sampling_correction=correction)
    check(given, config, authors, impl)
    assert min(masked.values()) > 3


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("anchor", ["old", "sampler"])
def test_dro_is_a_policy_gradient_with_a_quadratic_penalty(anchor, impl):
    """The mean over tokens of -(A log p - beta / 2 (log p - log q)^2)."""
    given, beta = numbers(), 0.4

    def authors(logprobs):
        tokens = [(logprobs[i][t], given[anchor][i, t], ADVANTAGES[i]) for i, t in tokens_of(given)]
        return sum(beta / 2 * (p - q) ** 2 - A * p for p, q, A in tokens) / len(tokens)

    correction = "token_truncate" if anchor == "sampler" else None
    config = GRPOLossConfig(loss_type="dro", log_ratio_penalty=beta, sampling_correction=correction)
    check(given, config, authors, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_gpg_has_no_ratio_but_that_of_the_correction(impl):
    """GPG eq. 5: the mean over tokens of -A log p, here times the truncated rho of the token."""
    given = numbers()
    rho = (given["old"] - given["sampler"]).exp().clamp(max=1.3)

    def authors(logprobs):
        return -sum(rho[i, t] * ADVANTAGES[i] * logprobs[i][t] for i, t in tokens_of(given)) / len(tokens_of(given))

    check(given, GRPOLossConfig(loss_type="gpg", sampling_clip_max=1.3), authors, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("c", [1.28, 1.5, 3.0])
def test_dual_clip_is_delta_above_the_upper_clip(c, impl):
    """Dual-clip PPO eq. 5: max(min(r A, clip(r) A), c A) where A < 0, PPO's elsewhere; for c >= 1 + epsilon_high."""
    given, cut = numbers(spread=0.9), 0

    def authors(logprobs):
        nonlocal cut
        total = 0.0
        for i, t in tokens_of(given):
            r, A = (logprobs[i][t] - given["old"][i, t]).exp(), ADVANTAGES[i]
            objective = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
            cut += A < 0 and objective.item() < c * A
            total = total - (torch.maximum(objective, torch.tensor(c * A)) if A < 0 else objective)
        return total / len(tokens_of(given))

    check(given, GRPOLossConfig(epsilon_high=0.28, delta=c, sampling_correction=None), authors, impl)
    assert cut


@pytest.mark.parametrize("impl", IMPLS)
def test_truncated_dppo_has_the_gradient_of_a_bounded_weight(impl):
    """As the authors' code: -stop(min(r, C)) A log p has this gradient; the value is that of the objective."""
    given = numbers()
    del given["sampler"]
    config = GRPOLossConfig(loss_type="dppo_tv", epsilon=1.0, delta=1.2)
    leaf = given["policy"].clone().requires_grad_()
    ratio = (leaf - given["old"]).exp().detach().clamp(max=1.2)
    weights = given["mask"] * torch.tensor(ADVANTAGES)[:, None] / given["mask"].sum()
    (gradient,) = torch.autograd.grad(-(weights * ratio * leaf).sum(), leaf)
    loss, ours = of_ours(given, config, impl)
    torch.testing.assert_close(ours, gradient, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, -(weights * ratio).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(impl):
    """GMPO eq. 4: (prod over t of |min(r A, clip(r, e^-low, e^high) A)|)^(1/n) * sgn(A), averaged over sequences."""
    given, low, high = numbers(), 0.2, 0.4

    def authors(logprobs):
        total = 0.0
        for i, A in enumerate(ADVANTAGES):
            tokens = [t for t in range(T) if given["mask"][i, t]]
            if not tokens or A == 0:
                continue
            product = 1.0
            for t in tokens:
                r = (logprobs[i][t] - given["old"][i, t]).exp()
                product = product * torch.minimum(r * A, r.clamp(math.exp(-low), math.exp(high)) * A).abs()
            total = total - product ** (1 / len(tokens)) * math.copysign(1.0, A)
        return total / B

    config = GRPOLossConfig(loss_type="gmpo", epsilon=low, epsilon_high=high, sampling_correction=None)
    check(given, config, authors, impl)


STATISTICS = {
    "ratio": lambda rhos: sum(rhos) / len(rhos),
    "geometric_ratio": lambda rhos: math.prod(rhos) ** (1 / len(rhos)),
    "k1": lambda rhos: sum(-math.log(rho) for rho in rhos) / len(rhos),
    "k2": lambda rhos: sum(math.log(rho) ** 2 / 2 for rho in rhos) / len(rhos),
    "k3": lambda rhos: sum(rho - 1 - math.log(rho) for rho in rhos) / len(rhos),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", STATISTICS)
def test_sequences_are_rejected_by_the_mean_of_their_tokens(name, impl):
    given = numbers()
    tokens = [[t for t in range(T) if given["mask"][i, t]] for i in range(B)]
    rhos = [[(given["old"] - given["sampler"])[i, t].exp().item() for t in row] for i, row in enumerate(tokens)]
    statistics = sorted(STATISTICS[name](row) for row in rhos if row)
    low, high = (statistics[1] + statistics[2]) / 2, (statistics[3] + statistics[4]) / 2
    kept = [i for i, row in enumerate(rhos) if row and low <= STATISTICS[name](row) <= high]
    assert len(kept) == 2

    def authors(logprobs):
        ratios = [(i, (logprobs[i][t] - given["old"][i, t]).exp()) for i in kept for t in tokens[i]]
        return -sum(r * ADVANTAGES[i] for i, r in ratios) / sum(map(len, tokens))

    bounds = {"sequence_rejection_min": low, "sequence_rejection_max": high, "epsilon": 1.0, "epsilon_high": 99.0}
    config = GRPOLossConfig(sequence_rejection=name, sampling_correction=None, **bounds)
    if any(ADVANTAGES[i] for i in kept):
        check(given, config, authors, impl)


def test_icepop_is_the_token_mask_within_its_bounds():
    given = numbers(spread=1.2)
    rho = (given["old"] - given["sampler"]).exp()
    keep = given["mask"] & (rho >= 0.5) & (rho <= 5.0)
    outside = given["mask"] & ~keep
    assert (outside & (rho < 0.5)).any()
    assert (outside & (rho > 5)).any()

    def authors(logprobs):
        total = 0.0
        for i, t in zip(*keep.nonzero().T.tolist(), strict=True):
            r, A = (logprobs[i][t] - given["old"][i, t]).exp(), ADVANTAGES[i]
            total = total - rho[i, t] * torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
        return total / given["mask"].sum()

    check(given, GRPOLossConfig(sampling_correction="icepop"), authors, "torch")
    bounds = {"sampling_clip_min": 0.5, "sampling_clip_max": 5.0}
    assert GRPOLossConfig(sampling_correction="icepop") == GRPOLossConfig(sampling_correction="token_mask", **bounds)


def covariances(given):
    """By token: (log p - mean log p) * (A - mean A)."""
    tokens = tokens_of(given)
    logprob = sum(given["policy"][i, t].item() for i, t in tokens) / len(tokens)
    advantage = sum(ADVANTAGES[i] for i, _ in tokens) / len(tokens)
    return {(i, t): (given["policy"][i, t].item() - logprob) * (ADVANTAGES[i] - advantage) for i, t in tokens}


@pytest.mark.parametrize("impl", IMPLS)
def test_kl_cov_penalises_the_tokens_of_largest_covariance(impl):
    """Of k = share * N tokens; the policy term is not clipped in the paper."""
    given = numbers()
    by_token = covariances(given)
    chosen = sorted(by_token, key=by_token.__getitem__)[-int(0.2 * len(by_token)) :]

    def authors(logprobs):
        total = 0.0
        for i, t in by_token:
            change = logprobs[i][t] - given["old"][i, t]
            total = total - change.exp() * ADVANTAGES[i] + ((i, t) in chosen) * 0.7 * change.abs()
        return total / len(by_token)

    options = {"epsilon": 1.0, "epsilon_high": 1e6, "sampling_correction": None}
    check(given, GRPOLossConfig(kl_cov_ratio=0.2, kl_cov_coef=0.7, **options), authors, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_clip_cov_takes_the_policy_term_from_tokens_within_its_bounds(impl):
    given, low, high = numbers(), 0.0, 2.0
    by_token = covariances(given)
    ratio, A = (given["policy"] - given["old"]).exp(), torch.tensor(ADVANTAGES)[:, None]
    clipped = ((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))
    inside = sorted((c, token) for token, c in by_token.items() if low < c < high and not clipped[token])
    count = int(0.1 * len(by_token))
    assert 1 < count < len(inside) - 2
    chosen = {inside[int((k + 0.5) * len(inside) / count)][1] for k in range(count)}

    def authors(logprobs):
        total = 0.0
        for i, t in by_token.keys() - chosen:
            r = (logprobs[i][t] - given["old"][i, t]).exp()
            total = total - torch.minimum(r * ADVANTAGES[i], r.clamp(0.8, 1.2) * ADVANTAGES[i])
        return total / len(by_token)

    options = {"clip_cov_lb": low, "clip_cov_ub": high, "sampling_correction": None}
    check(given, GRPOLossConfig(clip_cov_ratio=0.1, **options), authors, impl)


def test_a_confident_token_has_a_finite_divergence_but_from_certainty():
    """p = 1 to fp32, on either side: no NaN, and certainty that was there before is not masked."""
    for old, policy, masked in ((-1e-30, 0.0, False), (0.0, 0.0, False), (-0.5, 0.0, True), (0.0, -0.5, False)):
        leaf = torch.tensor([[policy]], requires_grad=True)
        given = {"advantages": torch.ones(1), "old_logprobs": torch.tensor([[old]])}
        loss = grpo_loss(leaf, **given, config=GRPOLossConfig(loss_type="dppo_kl", epsilon=0.05), impl="torch").loss
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert loss.isfinite()
        assert (gradient.item() == 0.0) is masked
