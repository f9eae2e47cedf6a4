"""Bar 5: nothing unwritten is read, nothing outside is written, inputs stay, bits repeat, no work is for nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_under_test import assert_rounded, rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_grpo import linear_logprobs_and_entropy

pytestmark = pytest.mark.grid

LEAVES = ("hidden", "weight", "bias")
# What asks for a gradient, and whether one comes through the entropy.
PLANS = {
    "no gradient": ((), False),
    "frozen head": (("hidden",), False),
    "frozen head, entropy": (("hidden",), True),
    "weight alone": (("weight",), True),
    "bias alone": (("bias",), False),
    "trainable": (LEAVES, True),
}
PATHS = [("torch", torch.float32), ("torch", torch.bfloat16), ("triton", torch.float32), ("triton", torch.float16)]
PATHS += [("triton", torch.bfloat16)]
EPS = torch.finfo(torch.float32).eps
Inputs = dict[str, Any]


def make_inputs(N: int, V: int, D: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias, g, g_entropy = (
        torch.randn(*size, generator=generator) for size in ((N, D), (V, D), (V,), (N,), (N,))
    )
    targets = torch.randint(V, (N,), generator=generator)
    targets[::6] = -100
    g[1::4] = g_entropy[1::4] = 0.0
    leaves = {"hidden": hidden.to(dtype), "weight": (weight / D**0.5).to(dtype), "bias": bias}
    return {**leaves, "targets": targets, "temperature": 0.5 + torch.rand(N, generator=generator), "g": (g, g_entropy)}


def solve(inputs: Inputs, plan: str = "trainable", **options: Any) -> dict[str, Tensor]:
    asked, through_entropy = PLANS[plan]
    inputs = dict(inputs)
    g, g_entropy = inputs.pop("g")
    leaves = {name: inputs[name].detach().requires_grad_(name in asked) for name in LEAVES if name in inputs}
    out = linear_logprobs_and_entropy(**{**inputs, **leaves}, **options)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    outputs, upstream = (tuple(out), (g, g_entropy)) if through_entropy else ((out.logprobs,), (g,))
    upstream = tuple(one.to(other.dtype) for one, other in zip(upstream, outputs, strict=True))
    gradients = torch.autograd.grad(outputs, list(wanted.values()), upstream) if wanted else ()
    return {name: x.detach() for name, x in out._asdict().items()} | dict(zip(wanted, gradients, strict=True))


def assert_same_bits(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name


class Fence:
    """Allocators whose memory is poisoned, lies between two bands of a pattern, and is looked at afterwards."""

    BAND, PATTERN = 256, 0xA5

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[Tensor] = []
        self.full = torch.full
        for owner, names in (
            (torch, ("empty", "empty_like", "zeros", "zeros_like", "full", "full_like")),
            (torch.Tensor, ("new_empty", "new_zeros", "new_full")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self.fenced(getattr(owner, name), poisoned="empty" in name))

    def fenced(self, allocate: Callable[..., Tensor], *, poisoned: bool) -> Callable[..., Tensor]:
        def allocator(*args: Any, **kwargs: Any) -> Tensor:
            plain = allocate(*args, **kwargs)
            size = plain.untyped_storage().nbytes()
            buffer = self.full((size + 2 * self.BAND,), self.PATTERN, dtype=torch.uint8, device=plain.device)
            self.buffers.append(buffer)
            middle = buffer[self.BAND : self.BAND + size].view(plain.dtype).as_strided(plain.shape, plain.stride())
            poison = torch.nan if plain.is_floating_point() else 113
            return middle.fill_(poison) if poisoned else middle.copy_(plain)

        return allocator

    def check(self) -> None:
        assert len(self.buffers) >= 3, "the allocators were not used"
        for buffer in self.buffers:
            assert (buffer[: self.BAND] == self.PATTERN).all(), "written before the start"
            assert (buffer[-self.BAND :] == self.PATTERN).all(), "written past the end"


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("chunk_bytes", [None, 900])
@pytest.mark.parametrize("plan", PLANS)
def test_unwritten_memory_is_not_read_and_nothing_outside_is_written(monkeypatch, impl, dtype, chunk_bytes, plan):
    inputs = make_inputs(9, 19, 6, dtype)
    expected = solve(inputs, plan, impl=impl, chunk_bytes=chunk_bytes)
    with monkeypatch.context() as patch:
        fence = Fence(patch)
        ours = solve(inputs, plan, impl=impl, chunk_bytes=chunk_bytes)
    fence.check()
    assert_same_bits(ours, expected)


@pytest.mark.parametrize("plan", PLANS)
def test_memory_that_torch_itself_leaves_unwritten_is_not_read(plan):
    """Under deterministic algorithms torch fills new memory, also inside its own operators."""
    inputs = make_inputs(9, 19, 6, torch.bfloat16)
    expected = solve(inputs, plan, chunk_bytes=900)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        ours = solve(inputs, plan, chunk_bytes=900)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(ours, expected)


@pytest.mark.cpu_only(reason="the ops are given copies there; tests/gpu looks at what they were given")
@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("chunk_bytes", [None, 900])
def test_inputs_stay_as_they_are(impl, dtype, chunk_bytes):
    inputs = make_inputs(9, 19, 6, dtype)
    inputs["hidden"][0] = 77.0  # an ignored row
    kept = {name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)}
    upstream = tuple(x.clone() for x in inputs["g"])
    for plan in PLANS:
        solve(inputs, plan, impl=impl, chunk_bytes=chunk_bytes)
        assert all(torch.equal(x, inputs[name]) for name, x in kept.items()), plan
        assert all(map(torch.equal, upstream, inputs["g"])), plan


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("impl", "shape", "chunk_bytes", "runs"), [("torch", (70, 300, 16), 9000, 20), ("triton", (3, 7, 5), 100, 3)]
)
def test_every_run_gives_the_same_bits(impl, plan, shape, chunk_bytes, runs):
    inputs = make_inputs(*shape)
    first = solve(inputs, plan, impl=impl, chunk_bytes=chunk_bytes)
    for _ in range(runs - 1):
        assert_same_bits(solve(inputs, plan, impl=impl, chunk_bytes=chunk_bytes), first)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "softcap": st.sampled_from([0.5, 3.0, 30.0]),
        "logit_scale": st.sampled_from([-0.7, 0.3, 1.5]),
        "temperature": st.sampled_from([0.4, 1.0, 2.5]),
        "batch_invariant": st.booleans(),
    },
)
PIECES = st.one_of(st.just(0), st.integers(1, 40))


def check_against_fp64(inputs: Inputs, plan: str, pieces: int, impl: str, **options: Any) -> None:
    """At most twice the error of plain torch, beyond what the rounding of the logits may do to either."""
    logits = 4 * len(inputs["targets"]) * len(inputs["weight"])
    # A third of a small budget goes to the tile.
    ours = solve(inputs, plan, impl=impl, chunk_bytes=1 + 3 * logits // pieces if pieces else None, **options)
    head = {name: options[name] for name in options if name != "batch_invariant"}
    plain, exact = references(inputs, plan, **head)
    rounding = 4 * EPS * max(2.0, largest_logit(inputs, **head))
    for name, value in ours.items():
        if name in LEAVES and rounds(inputs["hidden"].dtype):
            assert_rounded(value, exact[name], dtype=inputs["hidden"].dtype, what=name)
            continue
        error = (value.double() - exact[name]).abs().amax() if value.numel() else 0.0
        plain_error = (plain[name].to(value.dtype).double() - exact[name]).abs().amax() if value.numel() else 0.0
        scale = max(1.0, exact[name].abs().max().item() if value.numel() else 0.0)
        assert error <= 2 * plain_error + rounding * scale, (
            f"{name}: error {error:.2e}, of plain torch {plain_error:.2e}"
        )
    assert (ours["logprobs"] <= 0).all()


def references(inputs: Inputs, plan: str, **head: Any) -> list[dict[str, Tensor]]:
    """What plain torch finds in fp32, and in fp64."""
    return [
        solve({n: x.to(dtype) if n in LEAVES else x for n, x in inputs.items()}, plan, **head, impl="reference")
        for dtype in (torch.float32, torch.float64)
    ]


def largest_logit(inputs: Inputs, *, softcap: float | None = None, logit_scale: float = 1.0, **others: Any) -> float:
    """What a rounding of it adds to a log-prob is so many times as large as what it adds to a number of one."""
    logits = logit_scale * (inputs["hidden"].double() @ inputs["weight"].double().t() + inputs.get("bias", 0.0))
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    scaled = capped / torch.as_tensor(others.get("temperature", inputs.get("temperature", 1.0))).reshape(-1, 1)
    return scaled.abs().max().item() if scaled.numel() else 0.0


@settings(derandomize=True, deadline=None, max_examples=120, database=None)
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 70), st.integers(1, 20)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    without=st.sets(st.sampled_from(["bias", "temperature"])),
    plan=st.sampled_from(sorted(PLANS)),
    pieces=PIECES,
    options=OPTIONS,
    seed=st.integers(0, 99),
)
def test_any_shape_with_any_options_is_exact_on_the_torch_path(shape, dtype, without, plan, pieces, options, seed):
    inputs = {name: x for name, x in make_inputs(*shape, dtype, seed=seed).items() if name not in {*without, *options}}
    if "bias" in inputs or plan != "bias alone":
        check_against_fp64(inputs, plan, pieces, "torch", **options)


def rows_of(inputs: Inputs, index: Tensor) -> Inputs:
    per_row = {name: inputs[name][index] for name in ("hidden", "targets", "temperature") if name in inputs}
    return {**inputs, **per_row, "g": tuple(x[index] for x in inputs["g"])}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("V", "D"), [(2, 7), (33, 1), (127, 64), (1003, 200), (5000, 16)])
def test_batch_invariant_rows_have_the_same_bits_in_any_company(V, D, dtype, threads):
    inputs = make_inputs(200, V, D, dtype)
    check_invariance(inputs, (1, 2, 3, 5, 8, 31, 63, 64, 65, 127, 128, 129, 199), threads)


@pytest.mark.parametrize(
    ("V", "N"), [(40000, 65), (40000, 66), (151936, 65), pytest.param(151936, 66, marks=pytest.mark.full)]
)
def test_batch_invariant_rows_over_a_large_vocabulary(V, N):
    check_invariance(make_inputs(N, V, 4), (1, 2, 64), threads=2)


def check_invariance(inputs: Inputs, counts: tuple[int, ...], threads: int) -> None:
    """Rows alone, first, last and amid others, in another order, against all rows in order."""
    before, total = torch.get_num_threads(), len(inputs["targets"])
    torch.set_num_threads(threads)
    try:
        everyone = solve(inputs, "no gradient", batch_invariant=True, impl="torch")
        for count in counts:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(count))
            for index in (order[:count], torch.arange(count), torch.arange(total - count, total)):
                selected = solve(rows_of(inputs, index), "no gradient", batch_invariant=True, impl="torch")
                assert_same_bits(selected, {name: value[index] for name, value in everyone.items()})
    finally:
        torch.set_num_threads(before)


def test_a_temperature_equal_to_the_scale_does_not_look_at_its_neighbours():
    """1.28125 * (1 / 1.28125) is not 1 in fp32: a row must not be multiplied by it or spared by what others have."""
    inputs = {**make_inputs(9, 33, 8), "logit_scale": 1.28125}
    del inputs["bias"]
    inputs["hidden"], inputs["temperature"] = 16 * inputs["hidden"], torch.tensor([1.28125] * 3 + [1.3] * 6)
    together = solve(inputs, "no gradient", batch_invariant=True, impl="torch")
    alone = solve(rows_of(inputs, torch.arange(3)), "no gradient", batch_invariant=True, impl="torch")
    assert_same_bits(alone, {name: value[:3] for name, value in together.items()})


@pytest.fixture
def gemms(monkeypatch) -> list[tuple[int, int, int]]:
    """(m, k, n) of every matrix product."""
    seen: list[tuple[int, int, int]] = []

    def recorded(owner: Any, name: str, first: int) -> None:
        multiply = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            a, b = args[first : first + 2]
            if b.shape[1] > 1:  # the gradient of a bias is no product of matrices
                seen.append((a.shape[0], a.shape[1], b.shape[1]))
            return multiply(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    recorded(torch, "mm", 0)
    recorded(torch, "addmm", 1)
    return seen


# (forward, backward) in U = 2 * rows * D * V. In Triton, a forward that no backward will follow is all in a kernel.
COSTS = {
    "no gradient": (1, 0),
    "frozen head": (2, 0),
    "frozen head, entropy": (2, 2),
    "weight alone": (1, 2),
    "bias alone": (1, 1),
    "trainable": (1, 3),
}


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("chunk_bytes", [None, 3000])
@pytest.mark.parametrize("plan", PLANS)
def test_each_plan_multiplies_what_it_needs_and_no_more(gemms, plan, impl, dtype, chunk_bytes):
    """Rows that are ignored, or whose upstream gradient is zero, take no part."""
    N, V, D = 24, 19, 6
    inputs = make_inputs(N, V, D, dtype)
    solve(inputs, plan, impl=impl, chunk_bytes=chunk_bytes)
    kept = inputs["targets"] >= 0
    needed = kept & (inputs["g"][0] != 0)
    assert needed.sum() < kept.sum() < N
    forward, backward = COSTS[plan]
    backward -= plan == "bias alone" and chunk_bytes is None
    rows_forward = 0 if impl == "triton" and plan == "no gradient" else int(kept.sum()) * forward
    spent = sum(m * k * n for m, k, n in gemms)
    assert spent == (rows_forward + int(needed.sum()) * backward) * D * V


@pytest.mark.parametrize(("impl", "rows_forward"), [("torch", 64), ("triton", 0)])
def test_batch_invariance_costs_the_frozen_head_one_gemm_more(gemms, impl, rows_forward):
    """In Triton the forward is all in a kernel, whose products are not counted here."""
    inputs = make_inputs(64, 19, 6)
    solve(inputs, "frozen head", batch_invariant=True, impl=impl)
    needed = (inputs["targets"] >= 0) & (inputs["g"][0] != 0)
    assert sum(m * k * n for m, k, n in gemms) == (rows_forward + 2 * int(needed.sum())) * 6 * 19


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_rows_without_an_upstream_gradient_change_no_gradient(assert_as_exact, plan, impl):
    inputs = make_inputs(24, 19, 6)
    needed = ((inputs["targets"] >= 0) & (inputs["g"][0] != 0)).nonzero()[:, 0]
    all_rows = solve(inputs, plan, impl=impl)
    plain, exact = references(rows_of(inputs, needed), plan)
    if "hidden" in exact:
        assert not all_rows["hidden"].index_fill(0, needed, 0.0).any()
        all_rows["hidden"] = all_rows["hidden"][needed]
    for name in exact.keys() & set(LEAVES):
        assert_as_exact(all_rows[name], plain[name], exact[name], what=name)
