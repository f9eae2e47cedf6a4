"""K targets per row: values and all gradients against fp64, repeated and ignored targets, cost, memory, errors."""

from itertools import accumulate, product
from typing import Any

import pytest
import torch
from device_under_test import assert_rounded, rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fused_grpo import fused_linear_grpo_loss, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.errors import InputError

# NumPy, under Triton's interpreter, warns of infinities here.
pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LEAVES = ("hidden", "weight", "bias")
# What asks for a gradient, and whether one comes through the entropy.
PLANS = {
    "no gradient": ((), False),
    "frozen head": (("hidden",), False),
    "frozen head, entropy": (("hidden",), True),
    "weight alone": (("weight",), False),
    "trainable": (LEAVES, False),
    "trainable, entropy": (LEAVES, True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"bias": None},
    "bias, temperature": {"temperature": "per row"},
    "softcap": {"softcap": 2.5, "logit_scale": 1.25},
    "negative scale": {"softcap": 4.0, "logit_scale": -0.8, "temperature": "per row"},
}
PATHS = [("torch", torch.float32), ("torch", torch.bfloat16), ("triton", torch.float32), ("triton", torch.float16)]
PATHS += [("triton", torch.bfloat16)]
IMPLS = ["torch", "triton"]
Inputs = dict[str, Any]


def make_inputs(shape: tuple[int, int, int, int], options: str = "plain", *, seed: int = 0) -> Inputs:
    """fp64 inputs. Of the targets some repeat, some are ignored, and every other row has its likeliest token."""
    (N, V, D, K), generator = shape, torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).half().double()

    inputs: Inputs = {"hidden": 2 * normal(N, D), "weight": normal(V, D) / D**0.5, "bias": normal(V)}
    inputs["targets"] = torch.randint(V, (N, K), generator=generator)
    inputs["targets"][::2, -1] = (inputs["hidden"] @ inputs["weight"].t()).argmax(1)[::2]
    inputs["targets"][1::3, 0] = inputs["targets"][1::3, -1]
    inputs["targets"][2::5, 0] = inputs["targets"][7::8] = -100
    inputs["g"], inputs["g_entropy"] = normal(N, K), normal(N)
    inputs["g"][3::7] = inputs["g_entropy"][3::7] = 0.0
    inputs["g"][4::6, 0] -= inputs["g"][4::6].sum(1)  # the gradients of these rows add up to 0
    return with_options(inputs, options, 0.5 + torch.rand(N, generator=generator))


def with_options(inputs: Inputs, options: str, temperature: Tensor) -> Inputs:
    inputs |= OPTIONS[options]
    if isinstance(inputs.get("temperature"), str):
        inputs["temperature"] = temperature
    return inputs


def solve(inputs: Inputs, plan: str, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Tensor]:
    (asked, through_entropy), inputs = PLANS[plan], {**inputs, **options}
    g, g_entropy = inputs.pop("g"), inputs.pop("g_entropy")
    leaves = {name: inputs[name] for name in LEAVES if inputs[name] is not None}
    leaves = {name: x.detach().to(dtype).requires_grad_(name in asked) for name, x in leaves.items()}
    if through_entropy:
        out = linear_logprobs_and_entropy(**{**inputs, **leaves})._asdict()
    else:
        out = {"logprobs": linear_logprobs(**{**inputs, **leaves})}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    upstream = [x.to(out["logprobs"].dtype) for x in (g, g_entropy)[: len(out)]]
    gradients = torch.autograd.grad(list(out.values()), list(wanted.values()), upstream) if wanted else ()
    return {name: x.detach() for name, x in out.items()} | dict(zip(wanted, gradients, strict=True))


def references(inputs: Inputs, plan: str, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """What full logits give in fp32 and in fp64, from the values that `dtype` holds."""
    held = {name: x.to(dtype) if name in LEAVES and x is not None else x for name, x in inputs.items()}
    return [solve(held, plan, to, impl="reference") for to in (torch.float32, torch.float64)]


def check(inputs: Inputs, plan: str, dtype: torch.dtype, assert_as_exact: Any, **options: Any) -> None:
    plain, exact = references(inputs, plan, dtype)
    ours = solve(inputs, plan, dtype, **options)
    assert ours.keys() == exact.keys()
    assert (ours["logprobs"] <= 0).all()
    for name, value in ours.items():
        if name in LEAVES and rounds(dtype):
            assert_rounded(value, exact[name], dtype=dtype, what=f"{name} of {plan}")
        else:
            assert_as_exact(value, plain[name].to(value.dtype), exact[name], what=f"{name} of {plan}")


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_values_and_gradients_are_as_exact_as_fp32_allows(assert_as_exact, plan, options, impl, dtype):
    shapes = [(33, 130, 24, 8), (20, 7, 5, 7), (9, 257, 16, 3)] if impl == "torch" else [(9, 37, 8, 3)]
    for seed, shape in enumerate(shapes):
        inputs = make_inputs(shape, options, seed=seed)
        N, V, D, _ = shape
        # Tiles of some of the columns, and of some of the rows besides.
        whole = 4 * N * V + (0 if dtype == torch.float32 else 8 * D * (N + V))
        for chunk_bytes in (None, whole // 2, whole // 20) if impl == "torch" else (None, whole):
            check(inputs, plan, dtype, assert_as_exact, impl=impl, chunk_bytes=chunk_bytes)


TARGETS = st.integers(1, 6).flatmap(
    lambda V: st.tuples(
        st.just(V),
        st.integers(1, 7).flatmap(
            lambda K: st.lists(st.lists(st.integers(-1, V - 1), min_size=K, max_size=K), min_size=1, max_size=6)
        ),
    )
)


@settings(derandomize=True, max_examples=150, database=None)
@given(
    drawn=TARGETS,
    plan=st.sampled_from(sorted(PLANS)),
    options=st.sampled_from(sorted(OPTIONS)),
    pieces=st.integers(0, 6),
    invariant=st.booleans(),
    ignore_index=st.sampled_from([-100, 0]),
)
def test_any_targets_give_what_full_logits_give_in_fp64(drawn, plan, options, pieces, invariant, ignore_index):
    """Repeated, all the same, all of the vocabulary, ignored, one of one token; in tiles of a few rows and columns."""
    V, targets = drawn
    inputs = make_inputs((len(targets), V, 4, len(targets[0])), options)
    inputs["targets"] = torch.where(torch.tensor(targets) < 0, ignore_index, torch.tensor(targets))
    chunk_bytes = None if not pieces else 1 + 8 * 3 * inputs["targets"].shape[0] * V // pieces
    chosen = {"chunk_bytes": chunk_bytes, "batch_invariant": invariant, "impl": "torch", "ignore_index": ignore_index}
    ours = solve(inputs, plan, **chosen)
    for name, exact in solve(inputs, plan, impl="reference", ignore_index=ignore_index).items():
        torch.testing.assert_close(ours[name], exact, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.cpu_only(reason="the ties are those of one GEMM's sums")
@pytest.mark.parametrize("options", ["plain", "softcap", "negative scale"])
def test_of_logits_that_are_almost_equal_one_is_the_largest(assert_as_exact, options):
    """Their log-probs are equal in fp32, the gradients of their logits are not: which one it is, is decided once."""
    plans = ("frozen head", "frozen head, entropy", "trainable")
    every = product(plans, [-9, -8, -7, -6], ["no rows", "two rows", "almost two rows"])
    for seed, (plan, exponent, equal) in enumerate(every):
        inputs = make_inputs((20, 7, 33, 3), options, seed=seed)
        inputs["hidden"] *= 10.0**exponent
        inputs["bias"] = None if inputs["bias"] is None else 0.0 * inputs["bias"]
        weight = inputs["weight"] = inputs["weight"].float()
        weight[2] = {"no rows": weight[2], "almost two rows": weight[5].nextafter(weight[6])}.get(equal, weight[5])
        check(inputs, plan, torch.float32, assert_as_exact, impl="torch", chunk_bytes=[None, 800, 1600][seed % 3])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_without_any_target_has_no_gradient(impl):
    inputs = make_inputs((3, 5, 4, 2))
    inputs["targets"].fill_(-100)
    for plan in PLANS:
        for name, value in solve(inputs, plan, torch.float32, impl=impl).items():
            assert not value.any(), f"{name} of {plan}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("plan", PLANS)
def test_one_target_in_a_last_dimension_changes_no_bit(plan, impl):
    inputs = make_inputs((11, 19, 6, 1), "bias, temperature")
    single = {**inputs, "targets": inputs["targets"][:, 0], "g": inputs["g"][:, 0]}
    expected = solve(single, plan, torch.float32, impl=impl, chunk_bytes=900)
    for name, value in solve(inputs, plan, torch.float32, impl=impl, chunk_bytes=900).items():
        assert torch.equal(value, expected[name][:, None] if name == "logprobs" else expected[name]), name


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("impl", "shape", "runs"), [("torch", (70, 300, 16, 8), 10), ("triton", (4, 11, 5, 3), 2)])
def test_every_run_gives_the_same_bits(impl, shape, runs, plan):
    inputs = make_inputs(shape, "softcap")
    first = solve(inputs, plan, torch.float32, impl=impl, chunk_bytes=9000)
    for _ in range(runs - 1):
        for name, value in solve(inputs, plan, torch.float32, impl=impl, chunk_bytes=9000).items():
            assert torch.equal(value, first[name]), name


@pytest.mark.parametrize("leading", [(12,), (3, 4), (2, 1, 6)])
def test_leading_shapes_change_no_bit(leading):
    inputs = make_inputs((12, 19, 6, 4), "bias, temperature")
    names = ("hidden", "targets", "temperature", "g", "g_entropy")
    shaped = {name: inputs[name].view(*leading, *inputs[name].shape[1:]) for name in names}
    expected = solve(inputs, "trainable, entropy", torch.float32)
    for name, value in solve(inputs | shaped, "trainable, entropy", torch.float32).items():
        assert torch.equal(value.reshape(expected[name].shape), expected[name]), name
    assert linear_logprobs(shaped["hidden"], inputs["weight"], shaped["targets"]).shape == (*leading, 4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("chunk_bytes", [None, 300])
@pytest.mark.parametrize("plan", ["frozen head", "trainable", "trainable, entropy"])
def test_a_confident_target_keeps_its_logprob_and_gradient_beside_others(plan, chunk_bytes, impl):
    """1 - p is from 7e-8 to 1e-9, below what fp32 can tell from 1; its gradient is far below those of the others."""
    weight = -torch.rand(37, 4, generator=torch.Generator().manual_seed(0)).double().mul(4).round().div(4)
    weight[:, 0] = torch.eye(37, dtype=torch.float64)[5]
    hidden = torch.full((4, 4), 0.25, dtype=torch.float64)
    hidden[:, 0] = torch.tensor([20.0, 21.0, 22.0, 24.0])
    inputs: Inputs = {"hidden": hidden, "weight": weight, "bias": None, "g_entropy": torch.ones(4)}
    inputs["targets"] = torch.tensor([[3, 5, 20, 5]]).repeat(4, 1)
    for g in ([0.0, 1.0, 0.0, 0.5], [1.0, 1.0, -1.0, 0.0], [0.0, 1.0, 1e-9, 1.0]):
        inputs["g"] = torch.tensor(g).repeat(4, 1)
        ours = solve(inputs, plan, torch.float32, impl=impl, chunk_bytes=chunk_bytes)
        for name, exact in solve(inputs, plan, impl="reference").items():
            atol = 1e-6 * exact.abs().max().item() if name != "logprobs" else 0.0
            torch.testing.assert_close(ours[name].double(), exact, rtol=1e-5, atol=atol, msg=f"{name} of {g}")
            assert ours[name].abs().amax() > 0


def bias_of(default: float, special: float, *at: int) -> Tensor:
    return torch.full((37,), default).index_fill(0, torch.tensor(at), special).double()


SCENARIOS: dict[str, Inputs] = {
    "all logits near 1e4": {"bias": bias_of(8192.0, 8192.0, 0)},
    "a target far above": {"bias": bias_of(0.0, 8192.0, 5)},
    "a target far below": {"bias": bias_of(0.0, -8192.0, 5)},
    "all equal": {"weight": torch.zeros(37, 4, dtype=torch.float64)},
    "banned targets": {"bias": bias_of(0.0, -torch.inf, *range(0, 37, 3))},
    "one token allowed": {"bias": bias_of(-torch.inf, 0.5, 5)},
    "banned targets under a soft cap": {"bias": bias_of(0.0, -torch.inf, *range(0, 37, 3)), "softcap": 2.0},
    "hot and cold": {"temperature": torch.tensor([1e-2, 1e4]).repeat(4)[:7]},
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_extreme_logits_are_as_exact_as_any(assert_as_exact, scenario, impl):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randint(-4, 5, (n, 4), generator=generator).double() / 4 for n in (7, 37))
    inputs: Inputs = {"hidden": hidden, "weight": weight, "bias": None, "g_entropy": torch.linspace(-1, 1, 7)}
    inputs |= SCENARIOS[scenario]
    inputs["targets"] = torch.tensor([5, 0, 36, 9, -100, 5, 20, 1, 3, 8, 5, 13]).repeat(2)[:21].view(7, 3)
    inputs["g"] = torch.linspace(-1, 2, 21).view(7, 3)
    for plan in ("frozen head", "trainable, entropy"):
        for chunk_bytes in (None, 300) if impl == "torch" else (700,):
            check(inputs, plan, torch.float32, assert_as_exact, impl=impl, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("plan", PLANS)
def test_nan_in_rows_without_a_target_stays_there(plan, impl):
    inputs = make_inputs((12, 19, 6, 3), "softcap")
    without = inputs["targets"].lt(0).all(1) | inputs["g"].eq(0).all(1)
    inputs["targets"][without] = -100
    assert without.sum() == 3
    clean = solve(inputs, plan, torch.float32, impl=impl)
    inputs["hidden"] = inputs["hidden"].masked_fill(without[:, None], torch.nan)
    for name, value in solve(inputs, plan, torch.float32, impl=impl).items():
        torch.testing.assert_close(value, clean[name], rtol=1e-5, atol=1e-6)
        assert name in ("weight", "bias") or (value[without] == 0).all()


# Rows of logits, then of dH: in the forward pass those with a target, in the backward pass those with a gradient.
COSTS = {"no gradient": (1, 0, 0, 0), "frozen head": (1, 0, 1, 0), "frozen head, entropy": (1, 1, 1, 1)}
COSTS |= {"weight alone": (1, 1, 0, 0), "trainable": (1, 1, 0, 1), "trainable, entropy": (1, 1, 0, 1)}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("plan", PLANS)
def test_each_plan_is_one_pass_and_leaves_out_idle_rows(gemms, plan, impl):
    inputs = make_inputs((24, 40, 6, 5))
    solve(inputs, plan, torch.float32, impl=impl)
    with_target = (inputs["targets"] >= 0).any(1)
    needed = int((with_target & (inputs["g"] != 0).any(1)).sum())
    # Triton without a gradient does not wait for the count of rows.
    kept = 24 if impl == "triton" and plan == "no gradient" else int(with_target.sum())
    assert needed < with_target.sum() < 24
    spent = [sum(rows for kind, rows in gemms if kind == what) for what in ("logits", "hidden")]
    logits, again, hidden, later = COSTS[plan]
    assert spent == [logits * kept + again * needed, hidden * kept + later * needed]


@pytest.mark.cpu_only(reason="allocations of a CPU; tests/gpu counts those of a GPU")
@pytest.mark.parametrize("plan", ["no gradient", "frozen head", "trainable", "trainable, entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_held_but_gradients_the_budget_and_the_targets(plan, dtype):
    N, V, D, K, budget = 2048, 8003, 64, 8, 8 * 2**20
    inputs = make_inputs((N, V, D, K))
    inputs |= {name: inputs[name].to(dtype) for name in ("hidden", "weight")}
    inputs |= {name: inputs[name].float() for name in ("g", "g_entropy")}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = solve(inputs, plan, dtype, chunk_bytes=budget)
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    gradients = sum(x.nbytes for name, x in kept.items() if name in LEAVES)
    accumulators = 4 * N * D if dtype == torch.bfloat16 or plan == "frozen head" else 0
    extra = peak - gradients - accumulators
    print(f"{extra / 2**20:.2f} MiB of {budget / 2**20:.0f}")
    assert extra <= budget + (64 + 64 * K) * N


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(6, 0).long(), r"targets \(6, 0\), want \(6,\): one per row of hidden, or \(6, 'K'\) with K > 0"),
        (torch.zeros(5, 2).long(), r"targets \(5, 2\), want \(6,\)"),
        (torch.zeros(6, 2, 2).long(), r"targets \(6, 2, 2\), want \(6,\)"),
        (torch.tensor([[0, 1]] * 5 + [[9, 0]]), r"target 9 at \[5, 0\]; want 0 <= target < V=9"),
    ],
)
@pytest.mark.cpu_only(reason="a GPU looks at values in an assertion, which ends the process")
def test_targets_of_a_wrong_shape_or_value_are_named(targets, message):
    with pytest.raises(InputError, match=message):
        linear_logprobs(torch.randn(6, 4), torch.randn(9, 4), targets)


def test_the_loss_takes_one_target_per_row():
    tensors, rest = (torch.randn(6, 4), torch.randn(9, 4)), {"cu_seqlens": torch.tensor([0, 6]).int()}
    with pytest.raises(InputError, match=r"targets \(6, 2\), want \(6,\): one per row of hidden$"):
        fused_linear_grpo_loss(*tensors, torch.zeros(6, 2).long(), advantages=torch.ones(1), **rest)
    with pytest.raises(InputError, match=r"temperature \(6, 2\)"):
        linear_logprobs(*tensors, torch.zeros(6, 2).long(), temperature=torch.ones(6, 2))
