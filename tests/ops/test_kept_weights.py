"""Trainable log-probs that keep softmax weights: whichever rows are ignored or idle, and when they do not."""

import pytest
import torch

from fused_grpo import kernels, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.head import logprob_plans, registered_ops

N, D, V = 48, 32, 200


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the products of each backward pass from kept weights."""
    seen: list[int] = []
    add = logprob_plans.HeadGradients.add_softmax_weights

    def counted(self, tile, passes, weights, *rest):
        seen.append(len(weights))
        add(self, tile, passes, weights, *rest)

    monkeypatch.setattr(logprob_plans.HeadGradients, "add_softmax_weights", counted)
    return seen


def problem(ignored: int = 0, idle: int = 0) -> tuple[torch.Tensor, ...]:
    """(hidden, weight, bias, targets, upstream gradients)."""
    generator = torch.Generator().manual_seed(ignored + 100 * idle)
    hidden, weight, bias, upstream = (torch.randn(size, generator=generator) for size in ((N, D), (V, D), (V,), (N,)))
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.randperm(N, generator=generator)[:ignored]] = -100
    upstream[torch.randperm(N, generator=generator)[:idle]] = 0.0
    return hidden, weight, bias, targets, upstream


def gradients(inputs: tuple[torch.Tensor, ...], impl: str, *, dtype: torch.dtype = torch.float32, **options):
    hidden, weight, bias, targets, upstream = inputs
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    logprobs = linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], impl=impl, **options)
    return torch.autograd.grad((logprobs * upstream.to(dtype)).sum(), leaves)


def check(inputs: tuple[torch.Tensor, ...], impl: str = "triton", **options) -> None:
    ours, exact = gradients(inputs, impl, **options), gradients(inputs, "reference", dtype=torch.float64)
    for actual, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.cpu_only(reason="on a GPU so few rows keep nothing")
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("ignored", "idle", "rows"),
    [(0, 0, N), (7, 0, N - 7), (0, 5, N), (0, 10, N - 10), (7, 3, N - 7), (30, 0, 18), (0, 40, 8)],
)
def test_products_take_rows_that_have_a_gradient(products, ignored, idle, rows, impl):
    """Where at most an eighth of the others has none, they take part."""
    check(problem(ignored, idle), impl)
    assert products == [rows]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("ignored", [7, 30, N])
@pytest.mark.parametrize("idle", [10, 40, N])
def test_rows_that_are_ignored_or_idle_in_any_mixture(ignored, idle, impl):
    check(problem(ignored, idle), impl)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("ignored", "idle"), [(0, 0), (7, 0), (7, 20)])
def test_tiles_of_copied_weights_add_up(monkeypatch, several, ignored, idle, impl):
    """By columns, and where they are low by rows: the weight's gradient then accumulates."""
    hidden, weight, bias, targets, upstream = problem(ignored, idle)
    if several:  # the second is that of another row, the third repeats the first, the last is ignored
        others = targets.roll(5)
        targets = torch.stack([targets, others, targets, others.new_full((N,), -100)], 1)
        upstream = torch.stack([upstream, upstream.roll(5), 0.5 * upstream, upstream], 1)
    for tile in (5_000, 50_000, 500_000):
        monkeypatch.setattr(logprob_plans.buffers, "kept_budgets", lambda *_, tile=tile: (10**9, tile))
        monkeypatch.setattr(logprob_plans.Head, "writes_weight_gradient", False)
        check((hidden, weight, bias, targets, upstream), impl)


@pytest.mark.parametrize("several", [False, True])
def test_rows_that_are_not_counted_may_hold_anything(monkeypatch, several):
    """A GPU leaves none of a few rows out, since it would have to count them."""
    for module in (logprob_plans, registered_ops):
        monkeypatch.setattr(module, "leaves_out_rows", lambda _: False)
    hidden, weight, bias, targets, upstream = problem(ignored=7, idle=10)
    if several:
        targets, upstream = (x[:, None].repeat(1, 3) for x in (targets, upstream))
    nothing = (targets == -100) | (upstream == 0)
    hidden[nothing if nothing.ndim == 1 else nothing.all(1)] = torch.nan
    ours = gradients((hidden, weight, bias, targets, upstream), "torch")
    exact = gradients((hidden.nan_to_num(), weight, bias, targets, upstream), "reference", dtype=torch.float64)
    for actual, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=2e-5)


def test_a_graph_that_is_kept_gives_the_same_gradient_again():
    hidden, weight, _, targets, upstream = problem(ignored=5)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = (linear_logprobs(hidden, weight, targets, impl="triton") * upstream).sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_nothing_is_kept_that_the_budget_has_no_room_for(products, monkeypatch):
    check(problem(ignored=5), chunk_bytes=V * 4 * N // 2)
    check(problem(ignored=5), batch_invariant=True)
    monkeypatch.setattr(logprob_plans, "backward_with_weights", None)  # not called
    check(problem(ignored=5), chunk_bytes=V * 4 * N // 2)


def test_where_there_is_no_memory_the_error_says_how_to_do_without(monkeypatch):
    def full(*shape, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "empty_tile", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        gradients(problem(), "triton")
    assert "fix: a smaller chunk_bytes" in caught.value.__notes__[0]


@pytest.mark.parametrize("unlikely", [0.0, 20.0, 35.0, 60.0])
def test_an_entropy_with_a_gradient_recomputes_logits(products, unlikely):
    """From statistics relative to the target, which other tokens may be much more likely than."""
    hidden, weight, bias, targets, upstream = problem(ignored=5)
    bias[targets[10]] -= unlikely
    gradients = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        logprobs, entropy = linear_logprobs_and_entropy(*leaves[:2], targets, bias=leaves[2], impl=impl)
        loss = (logprobs * upstream.to(dtype)).sum() + 0.1 * entropy.sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    assert products == []
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.cpu_only(reason="on a GPU so few rows keep nothing")
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_compiled_call_keeps_them_as_well(products, impl):
    hidden, weight, bias, targets, upstream = problem(ignored=5)
    eager = gradients(problem(ignored=5), impl)[:2]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(hidden, weight):
        return (linear_logprobs(hidden, weight, targets, bias=bias, impl=impl) * upstream).sum()

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    compiled = torch.autograd.grad(loss(*leaves), leaves)
    assert products == [N - 5, N - 5]
    for actual, others in zip(compiled, eager, strict=True):
        torch.testing.assert_close(actual, others, rtol=1e-5, atol=1e-5)
