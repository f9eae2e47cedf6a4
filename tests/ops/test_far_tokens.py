"""Tokens far less or far more likely than the others: how exact they are must not depend on the shift of a row."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from fused_grpo import fused_linear_grpo_loss, linear_logprobs
from fused_grpo._maths.statistics import RowState, finish_rows
from fused_grpo.passes import buffers, torch_passes

pytestmark = pytest.mark.grid

N, V = 40, 64
PLANS = ["no_grad", "frozen", "trainable", "loss"]
# Of the target, from the largest logit of the others, one of the last: nothing that fp32 can hold, just beyond what a
# logit may be above the shift, just within, and tokens without an alternative.
FAR = {3: -200.0, 7: -60.0, 8: -12.0, 20: 30.0, 21: 60.0, 39: 200.0}
CHUNKS = [None, 40 * V]  # all in one piece; several of rows, several of columns


def problem(far: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden, weight, targets) whose logits are the hidden states, but for rounding nowhere."""
    generator = torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(N, V, generator=generator), torch.randint(V, (N,), generator=generator)
    for row, distance in far.items():
        targets[row] = V - 2
        hidden[row, -1 if distance < 0 else -2] += abs(distance)
    return hidden, torch.eye(V), targets


@pytest.fixture(params=[buffers.BLOCK_BYTES, 8 * 4 * N], ids=["one block", "eight columns"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of the blocks of a row pass, of which the first with a logit decides the shift."""
    monkeypatch.setattr(buffers, "BLOCK_BYTES", request.param)
    return int(request.param)


def run(plan: str, inputs: tuple[torch.Tensor, ...], **options: object) -> list[torch.Tensor]:
    """Log-probs and the gradients that this plan has."""
    hidden, weight, targets = inputs
    hidden = hidden.clone().requires_grad_(plan != "no_grad")
    weight = weight.clone().requires_grad_(plan in ("trainable", "loss"))
    if plan == "loss":
        advantages = torch.linspace(-1, 1, N, dtype=hidden.dtype)
        everything = {"advantages": advantages[:, None], "mask": torch.ones(N, 1), **options}
        output = fused_linear_grpo_loss(hidden[:, None], weight, targets[:, None], **everything)
        output.loss.backward()
        return [output.logprobs[:, 0], hidden.grad, weight.grad]
    logprobs = linear_logprobs(hidden, weight, targets, **options)
    if plan == "no_grad":
        return [logprobs]
    (logprobs * torch.linspace(-1, 1, N, dtype=hidden.dtype)).sum().backward()
    return [logprobs.detach(), hidden.grad, *([] if weight.grad is None else [weight.grad])]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("softcap", [None, 1e4])
@pytest.mark.usefixtures("block")
def test_tokens_far_from_the_others_are_as_exact_as_any(plan, impl, chunk_bytes, softcap):
    inputs = problem(FAR)
    ours = run(plan, inputs, chunk_bytes=chunk_bytes, softcap=softcap, impl=impl)
    wide = (inputs[0].double(), inputs[1].double(), inputs[2])
    exact = run(plan, wide, softcap=softcap, impl="reference")
    for actual, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=2e-5, atol=2e-6)
    # Not by its size alone: where p is all but 1, 1 - p is what the gradient is made of.
    likely = [20, 21]
    logits, targets = inputs[0].double()[likely], inputs[2][likely, None]
    apart = (logits - logits.gather(1, targets)).scatter(1, targets, -torch.inf)
    rtol = 1e-5 if softcap is None else 1e-3  # which rounds the logits themselves
    torch.testing.assert_close(ours[0].double()[likely], -apart.exp().sum(1).log1p(), rtol=rtol, atol=0)


@pytest.mark.parametrize("level", [0.0, -86.0])
@pytest.mark.parametrize("banned", [8, 16])
def test_first_columns_of_banned_tokens_decide_no_shift(monkeypatch, banned, level):
    """A shift of -inf would be no number to take from a logit."""
    monkeypatch.setattr(buffers, "BLOCK_BYTES", 8 * 4 * N)
    hidden, weight, targets = problem({})
    targets[:4] = torch.arange(4)
    bias = torch.full((V,), level).index_fill_(0, torch.arange(banned), -torch.inf)
    wide = (hidden.double(), weight.double(), targets)
    exact = linear_logprobs(*wide, bias=bias.double(), impl="reference")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    ours = linear_logprobs(*leaves, targets, bias=bias, impl="torch")
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-6)
    assert (ours == -torch.inf).sum() == (targets < banned).sum()
    torch.where(ours.isinf(), 0.0, ours).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def logprobs_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    state = torch_passes.row_statistics(logits, targets, temperature=torch.ones(len(logits)))
    return finish_rows([state], entropy=False).logprobs.double()


@pytest.mark.parametrize("shape", [(441, 2048), (96, 50304)])
def test_equal_logits_and_one_above_all_others_are_summed_exactly(shape):
    """Sums of one column after the other would round all rows alike, and lose what is small beside a large one."""
    count, vocab_size = shape
    targets = torch.arange(count)
    level = torch.full((count, vocab_size), 0.31)
    for logits in (level, level.index_fill(1, torch.tensor([vocab_size - 1]), 15.0)):
        exact = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(logprobs_of(logits.t().contiguous().t(), targets), exact, rtol=0, atol=2e-6)


def test_a_log_prob_has_not_the_rounding_of_its_parts():
    """Which are log s of 0 to 14, where the shift is below the largest logit, and m - z_t, and add up to -2 to 2."""
    generator = torch.Generator().manual_seed(0)
    total = 1 + 2**20 * torch.rand(4096, generator=generator)
    gap = (4 * torch.rand(4096, generator=generator) - 2 - total.log()).mul(2**16).round().div(2**16)
    state = RowState(gap, total, total, torch.zeros(4096))
    exact = -softplus(gap.double() + total.double().log())
    ours = finish_rows([state], entropy=False).logprobs.double()
    torch.testing.assert_close(ours, exact, rtol=0, atol=3e-7)  # of 12 seeds 1.7e-7 to 2.1e-7; of a sum 4.7e-7 or more


def test_a_row_of_nans_stays_in_its_row():
    hidden, weight, targets = problem({})
    whole = run("frozen", (hidden, weight, targets), impl="torch")
    hidden[5] = math.nan
    ours = run("frozen", (hidden, weight, targets), impl="torch")
    others = torch.arange(N) != 5
    for actual, wanted in zip(ours, whole, strict=True):
        assert actual[5].isnan().all()
        torch.testing.assert_close(actual[others], wanted[others], rtol=1e-6, atol=1e-7)
