"""The KL estimate times the ratio, far from the reference: as many digits of values and gradients as of the inputs."""

import math

import pytest
import torch
from mpmath import exp, mp, mpf

from fused_grpo._maths import formulas
from fused_grpo.config import TokenTerms
from fused_grpo.integrations.liger import LigerFusedLinearGRPOLoss
from fused_grpo.kernels import grpo_token_loss, token_statistics

FAR = [0.0, 1e-4, 0.3, 1.9, 2.1, 5.0, 10.0, 15.9, 16.1, 25.0, 60.0, 87.0, 95.0, 180.0]
# (q, log r): the policy is far below the reference, or above it, and near the old policy, or below it, or above it.
PLACES = [(sign * q, change) for q in FAR for sign in (1, -1) for change in (0.0, -0.7, 0.7, -40.0, -95.0)]
PLACES = [(q, change) for q, change in PLACES if q + change < 80]  # what they multiply to is a number of fp32
CONFIG = {"form": "clipped", "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": None, "sapo_temperatures": (1.0, 1.05)}
CONFIG |= {"beta": 0.25, "kl_estimator": "k3", "bias_correction_kl": True, "correction": None, "clip_min": None}
CONFIG |= {"clip_max": None, "log_ratio_penalty": 0.0}
SPACING = 2.0**-23
TINY = 1e-37  # below it fp32 has fewer digits, and a GPU none


def problem(q, change):
    """Log-probs of a token that are at most 0: of the policy, the old policy and the reference."""
    logprob = -max(0.0, q, -change) - 0.01
    given = {"logprobs": logprob, "old_logprobs": logprob - change, "ref_logprobs": logprob + q}
    given |= {"advantages": 0.0, "weights": 1.0, "mask": True}
    return {name: torch.tensor([value]) for name, value in given.items()}


def by_formulas(inputs, change=None):
    leaves = {"logprobs": inputs["logprobs"].clone().requires_grad_()}
    leaves |= {} if change is None else {"log_ratio": change.clone().requires_grad_()}
    loss, _ = formulas.token_loss(**inputs | leaves, terms=TokenTerms(**CONFIG))
    return [loss.item(), *(grad.item() for grad in torch.autograd.grad(loss, list(leaves.values())))]


def by_kernel(inputs, change=None):
    rest = {name: x for name, x in inputs.items() if name != "logprobs"}
    *gradients, sums = grpo_token_loss(inputs["logprobs"], log_ratio=change, inputs=rest, terms=tuple(CONFIG.values()))
    loss = token_statistics([sums])["loss"]
    return [loss.item(), *(grad.item() for grad in gradients if grad is not None)]


def by_liger(inputs, change=None):
    level = "token" if change is None else "sequence"
    loss = LigerFusedLinearGRPOLoss(use_bias_correction_kl=True, importance_sampling_level=level)
    leaves = [inputs["logprobs"].clone().requires_grad_()]
    leaves += [] if change is None else [change.clone().requires_grad_()]
    log_ratio = leaves[0] - inputs["old_logprobs"] if change is None else leaves[1]
    kl = CONFIG["beta"] * loss._kl(leaves[0], log_ratio, inputs["ref_logprobs"], inputs["old_logprobs"])
    return [kl.item(), *(grad.item() for grad in torch.autograd.grad(kl, leaves))]


def exact(inputs, change=None):
    """The loss and its gradients in log p, and in log r where that is given; and how far rounded inputs move each."""
    mp.prec = 400
    logprob, old, ref = (mpf(inputs[name].item()) for name in ("logprobs", "old_logprobs", "ref_logprobs"))
    q, log_ratio = ref - logprob, logprob - old if change is None else mpf(change.item())
    r, beta = exp(log_ratio), mpf(CONFIG["beta"])
    value = beta * r * (exp(q) - 1 - q)
    own = -beta * r * q if change is None else beta * r * (1 - exp(q))
    values = [value, own] if change is None else [value, own, value]
    # Differences of log-probs are rounded once, and the exponential of one is as far off as that. Autograd has exp(q)
    # where q is small, too, rounded to a number near 1.
    rounding = (4 + abs(q) + abs(log_ratio) + abs(q + log_ratio)) * SPACING
    return [(float(one), float(abs(one) * rounding + beta * r * SPACING)) for one in values]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, under the interpreter, of the exp that is not used
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("compute", [by_formulas, by_kernel, by_liger])
def test_a_policy_far_from_the_reference_has_every_digit(compute, per_sequence):
    wrong = []
    for q, change in PLACES:
        inputs = problem(q, change)
        given = torch.tensor([change]) if per_sequence else None
        for name, actual, (wanted, rounding) in zip(
            ("loss", "of log p", "of log r"), compute(inputs, given), exact(inputs, given), strict=False
        ):
            if not abs(actual - wanted) <= 6 * rounding + TINY:
                wrong.append((q, change, name, actual, wanted))
    assert not wrong, f"{len(wrong)} of {len(PLACES)}: {wrong[:8]}"


def test_the_two_terms_that_cancel_are_what_this_is_about():
    q = torch.tensor(20.0)
    assert (1 - q.exp()) + (q.exp() - 1 - q) != -q  # in fp32
    assert math.isnan((1 - torch.tensor(90.0).exp()) + (torch.tensor(90.0).exp() - 91))
