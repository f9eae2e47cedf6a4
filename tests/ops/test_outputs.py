"""`outputs=` of the log-prob ops: values against fp64, ties, what is detached, merged tiles, products, refusals."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_grpo import LogProbOutputs, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo._maths.moments import Moments, merge_moments
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.logprobs import OUTPUTS
from fused_grpo.passes import buffers, torch_passes

# NumPy, under Triton's interpreter, warns of infinities here.
pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

NUMBERS = ("logprobs", "sum_squared_probs", "mean_logit")
PATHS = [("torch", torch.float32), ("torch", torch.bfloat16), ("triton", torch.float32), ("triton", torch.bfloat16)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias, temperature": {"bias": "bias", "temperature": "per row"},
    "softcap": {"softcap": 2.5, "logit_scale": 1.25},
    "negative scale": {"bias": "bias", "softcap": 4.0, "logit_scale": -0.8, "temperature": 1.3},
}
PLANS: dict[str, tuple[str, ...]] = {"no gradient": (), "frozen head": ("hidden",), "trainable": ("hidden", "weight")}
Inputs = dict[str, Any]


def make_inputs(N: int, V: int, D: int, options: str = "plain", *, far: float = 0.0, seed: int = 0) -> Inputs:
    """fp64 inputs. Every fifth target is ignored; every other one is the likeliest token. `far` is in every logit."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16().double()

    inputs: Inputs = {"hidden": 2 * normal(N, D), "weight": normal(V, D) / 4}
    inputs["hidden"][:, 0], inputs["weight"][:, 0] = 1.0, far
    given = {"bias": normal(V), "temperature": 0.5 + torch.rand(N, generator=generator)}
    inputs |= {name: given[name] if isinstance(x, str) else x for name, x in OPTIONS[options].items()}
    targets = torch.randint(V, (N,), generator=generator)
    top = linear_logprobs(**inputs, targets=targets[:, None].expand(N, V) * 0 + torch.arange(V), impl="reference")
    targets[::2] = top.argmax(1)[::2]
    return inputs | {"targets": targets.index_fill(0, torch.arange(0, N, 5), -100)}


def solve(inputs: Inputs, dtype: torch.dtype, plan: str = "no gradient", **options: Any) -> LogProbOutputs:
    leaves = {name: inputs[name].to(dtype) for name in ("hidden", "weight", "bias") if name in inputs}
    for name in PLANS[plan]:
        leaves[name].requires_grad_()
    return linear_logprobs(**inputs | leaves, **{"outputs": OUTPUTS} | options)


def check(inputs: Inputs, dtype: torch.dtype, assert_as_exact: Any, **options: Any) -> None:
    held = {name: x.to(dtype) if isinstance(x, Tensor) and x.ndim == 2 else x for name, x in inputs.items()}
    ours = solve(inputs, dtype, **options)
    plain, exact = (solve(held, to, impl="reference") for to in (torch.float32, torch.float64))
    for name in NUMBERS:
        values = [getattr(out, name).detach() for out in (ours, plain, exact)]
        assert_as_exact(values[0], values[1].to(values[0].dtype), values[2], what=name)
    assert torch.equal(ours.is_top1, exact.is_top1)
    assert 0 < ours.is_top1.sum() < len(ours.is_top1)


@pytest.mark.parametrize(("impl", "dtype"), PATHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_values_are_as_exact_as_fp32_allows(assert_as_exact, plan, options, impl, dtype):
    shapes = [(33, 130, 24), (40, 7, 5), (21, 1031, 16)] if impl == "torch" else [(9, 137, 8)]
    for seed, shape in enumerate(shapes):
        inputs, whole = make_inputs(*shape, options, seed=seed), 4 * shape[0] * shape[1]
        for chunk_bytes in (None, whole // 2, whole // 20) if impl == "torch" else (None, whole):
            check(inputs, dtype, assert_as_exact, plan=plan, impl=impl, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("height", [12.0, 100.0])
def test_logits_that_rise_are_as_exact_as_any(assert_as_exact, monkeypatch, plan, height, impl):
    """Below the headroom the shift of the log-probs stays below the largest logit, here for many blocks of columns."""
    monkeypatch.setattr(buffers, "BLOCK_BYTES", 4 * 33 * 16)
    inputs = make_inputs(33, 130, 24)
    inputs["bias"] = height * torch.linspace(0, 1, 130).double()
    inputs["targets"][1::2] = 129
    check(inputs, torch.float32, assert_as_exact, plan=plan, impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_far_logits_have_the_probabilities_of_near_ones(impl, far):
    """Logits near 1e4 are rounded to 1e-3, and no other error is added."""
    near, away = (make_inputs(21, 130, 8, far=x) for x in (0.0, far))
    exact, ours = solve(near, torch.float64, impl="reference"), solve(away, torch.float32, impl=impl)
    torch.testing.assert_close(ours.sum_squared_probs.double(), exact.sum_squared_probs, rtol=4e-3, atol=0)
    mean = torch.where(near["targets"] == -100, 0.0, exact.mean_logit + far)
    torch.testing.assert_close(ours.mean_logit.double(), mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_almost_certain_tokens_have_the_squares_of_the_others_too(impl):
    """Of a target with logit x beside two of 0 the others' squares are far below the rounding of its own."""
    x = torch.tensor([0.0, 5.0, 20.0, 90.0, 500.0, -5.0, -90.0, -500.0]).double()
    hidden, weight = torch.stack([x, torch.zeros(8)], 1), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    out = linear_logprobs(hidden.float(), weight, torch.zeros(8).long(), outputs=OUTPUTS, impl=impl)
    p = 1 / (1 + 2 * torch.exp(-x))
    exact = p.square() + (1 - p).square() / 2
    torch.testing.assert_close(out.sum_squared_probs.double(), exact, rtol=1e-6, atol=0)
    assert (out.sum_squared_probs <= 1).all()
    assert out.is_top1.tolist() == [True] * 5 + [False] * 3
    torch.testing.assert_close(out.mean_logit.double(), x / 3, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_bytes", [None, 64])
def test_the_first_of_equal_logits_leads(impl, softcap, chunk_bytes):
    """As `argmax` has it, in one tile and across tiles."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]])
    rows, targets = torch.tensor(list(product(range(2), range(6)))).t()
    out = linear_logprobs(
        torch.eye(2)[rows], logits.t().contiguous(), targets, softcap=softcap, outputs=OUTPUTS, impl=impl,
        chunk_bytes=chunk_bytes,
    )  # fmt: skip
    assert out.is_top1.tolist() == (logits.argmax(1)[rows] == targets).tolist()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("support", [None, (torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([0, 3, 6]))], ids=str)
def test_no_target_leads_where_a_logit_is_none(impl, support):
    logits = torch.tensor([[math.nan, 1.0], [3.0, math.nan], [2.0, 0.0]])
    out = linear_logprobs(torch.eye(2), logits, torch.tensor([1, 1]), outputs=OUTPUTS, support=support, impl=impl)
    assert out.is_top1.tolist() == [False, False]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_banned_tokens_and_a_vocabulary_of_one(impl):
    hidden, weight, banned = torch.ones(3, 1), torch.zeros(3, 1), torch.tensor([0.0, -math.inf, -math.inf])
    out = linear_logprobs(hidden, weight, torch.arange(3), bias=banned, outputs=OUTPUTS, impl=impl)
    assert out.sum_squared_probs.tolist() == [1.0, 1.0, 1.0]
    assert out.mean_logit.tolist() == [-math.inf] * 3
    assert out.is_top1.tolist() == [True, False, False]
    out = linear_logprobs(hidden, weight[:1] + 2, torch.zeros(3).long(), outputs=OUTPUTS, impl=impl)
    assert [x.tolist() for x in out if x is not None] == [[0.0] * 3, [1.0] * 3, [True] * 3, [2.0] * 3]


ROWS = st.lists(st.lists(st.sampled_from([-60.0, -1.0, 0.0, 0.5, 0.5, 40.0]), min_size=5, max_size=5), min_size=1)


@given(ROWS, st.integers(1, 5), st.sampled_from(["torch", "triton"]), st.sampled_from([16, 64, None]), st.data())
@settings(deadline=None, max_examples=60)
def test_any_rows_are_those_of_the_reference(rows, V, impl, chunk_bytes, data):
    logits = torch.tensor(rows[:4])[:, :V]
    targets = torch.tensor(data.draw(st.lists(st.integers(-1, V - 1), min_size=len(logits), max_size=len(logits))))
    hidden, options = torch.eye(len(logits)), {"ignore_index": -1, "outputs": OUTPUTS}
    ours, exact = (
        linear_logprobs_and_entropy(hidden.to(dtype), logits.t().to(dtype), targets, **options, **plan)
        for dtype, plan in (
            (torch.float32, {"impl": impl, "chunk_bytes": chunk_bytes}),
            (torch.float64, {"impl": "reference"}),
        )
    )
    assert torch.equal(ours.is_top1, exact.is_top1)
    for name in (*NUMBERS, "entropy"):
        torch.testing.assert_close(getattr(ours, name).double(), getattr(exact, name), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_of_kept_tokens_they_are_those_of_full_logits_without_the_others(plan, impl):
    """Rows that keep one token, all, some in any order, or have no restriction; a tie at the top; ignored targets."""
    inputs, generator = make_inputs(30, 12, 5, "softcap"), torch.Generator().manual_seed(3)
    inputs["weight"][4:8:3, 0] = 6.0
    inputs["weight"][7] = inputs["weight"][4]  # above nearly all others
    targets, kept = inputs["targets"], list[Tensor]()
    targets[1::4] = 7
    for target, size in zip(targets.clamp_min(0).tolist(), [1, 12, 5, 0, 3] * 6, strict=True):
        others = torch.randperm(12, generator=generator)
        kept.append(torch.cat([others[others != target][: max(0, size - 1)], torch.tensor([target])])[:size])
    support = torch.cat(kept), torch.tensor([0, *map(len, kept)]).cumsum(0)
    out = solve(inputs, torch.float32, plan, support=support, impl=impl)
    exact = solve(inputs, torch.float64, support=support, impl="reference")
    assert torch.equal(out.is_top1, exact.is_top1)
    assert {*out.is_top1[targets == 7].tolist()} == {True, False}  # where the other of the tie is kept it is not
    for name in NUMBERS:
        torch.testing.assert_close(getattr(out, name).double(), getattr(exact, name), rtol=2e-5, atol=2e-6)
    logits = 2.5 * torch.tanh(1.25 * inputs["hidden"] @ inputs["weight"].t() / 2.5)
    for row, ids in enumerate(kept):
        z = logits[row, ids] if len(ids) else logits[row]
        if targets[row] >= 0:
            torch.testing.assert_close(exact.sum_squared_probs[row], z.softmax(0).square().sum())
            torch.testing.assert_close(exact.mean_logit[row], z.mean())


def moments_of(logits: Tensor, targets: Tensor) -> Moments:
    moments: list[Moments] = []
    passed = {"temperature": torch.ones(len(logits)), "moments": lambda fields, columns: moments.append(fields)}
    torch_passes.row_statistics(logits.clone(), targets, entropy=True, **passed)
    return moments[0]


def test_tiles_merge_to_the_moments_of_whole_rows():
    logits = 30 * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 9, 10, 25, 39, 12])
    logits[5, 30] = logits[5, 12] = 200.0
    whole = moments_of(logits, targets)
    columns = [slice(0, 10), slice(10, 11), slice(11, 40)]
    merged = merge_moments([moments_of(logits[:, at], targets - at.start) for at in columns])
    for name, one, other in zip(Moments._fields, merged, whole, strict=True):
        if name in ("shift", "squares", "logits", "largest", "target_logit"):
            torch.testing.assert_close(one, other, msg=name)
    for each in (merged, whole):
        leads = (each.target_logit >= each.largest) & (each.target_logit > each.before)
        assert torch.equal(leads, logits.argmax(1) == targets)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("op", [linear_logprobs, linear_logprobs_and_entropy])
def test_only_what_is_asked_for_is_there_and_detached(impl, op):
    inputs = make_inputs(10, 7, 4)
    hidden, weight = (inputs[name].float().requires_grad_() for name in ("hidden", "weight"))
    alone = op(hidden, weight, inputs["targets"], impl=impl)
    for asked in ((), *((name,) for name in OUTPUTS), OUTPUTS):
        out = op(hidden, weight, inputs["targets"], impl=impl, outputs=asked)
        assert {name for name in OUTPUTS if getattr(out, name) is not None} == {*asked}
        assert not any(getattr(out, name).requires_grad for name in asked)
        for one, other in zip(out[:2], alone if isinstance(alone, tuple) else (alone,), strict=False):
            assert torch.equal(one, other)
        gradients = torch.autograd.grad(sum(x.sum() for x in out[:2] if x is not None), (hidden, weight))
        expected = sum(x.sum() for x in alone) if isinstance(alone, tuple) else alone.sum()
        for one, other in zip(
            gradients, torch.autograd.grad(expected, (hidden, weight), retain_graph=True), strict=True
        ):
            assert torch.equal(one, other)


def test_leading_dimensions_are_those_of_the_targets():
    inputs = make_inputs(10, 7, 4)
    out = linear_logprobs(
        inputs["hidden"].view(2, 5, 4), inputs["weight"], inputs["targets"].view(2, 5), outputs=OUTPUTS
    )
    flat = linear_logprobs(inputs["hidden"], inputs["weight"], inputs["targets"], outputs=OUTPUTS)
    assert all(x is None or (x.shape == (2, 5) and torch.equal(x.flatten(), y)) for x, y in zip(out, flat, strict=True))
    assert out.is_top1.dtype == torch.bool


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_are_batch_invariant(impl):
    inputs = make_inputs(70, 130, 8)
    tensors = [inputs[name].float() if name != "targets" else inputs[name] for name in ("hidden", "weight", "targets")]
    hidden, weight, targets = tensors
    every = linear_logprobs(hidden, weight, targets, outputs=OUTPUTS, batch_invariant=True, impl=impl)
    alone = linear_logprobs(hidden[3:4], weight, targets[3:4], outputs=OUTPUTS, batch_invariant=True, impl=impl)
    assert all(one is None or torch.equal(one[3:4], other) for one, other in zip(every, alone, strict=True))


@pytest.mark.cpu_only(reason="on a GPU, `gemms` does not see the kernel without logits")
@pytest.mark.parametrize("plan", PLANS)
def test_outputs_take_no_further_product(gemms, plan):
    counts = []
    for outputs in (None, OUTPUTS):
        gemms.clear()
        out = solve(make_inputs(20, 31, 8), torch.float32, plan, outputs=outputs, impl="torch")
        logprobs = out if outputs is None else out.logprobs
        if logprobs.requires_grad:
            logprobs.sum().backward()
        counts.append(list(gemms))
    assert counts[0] == counts[1] != []


@pytest.mark.filterwarnings("default")
def test_a_compiled_call_is_the_eager_one():
    inputs = make_inputs(10, 7, 4)
    hidden, weight = inputs["hidden"].float(), inputs["weight"].float()

    def call(hidden: Tensor, weight: Tensor) -> LogProbOutputs:
        return linear_logprobs_and_entropy(hidden, weight, inputs["targets"], outputs=OUTPUTS)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(hidden, weight)
    assert all(torch.equal(one, other) for one, other in zip(compiled, call(hidden, weight), strict=True))


@pytest.mark.parametrize("outputs", ["is_top1", ["is_top1"], ("entropy",), ("is_top1", 3)])
def test_an_unknown_output_is_refused(outputs):
    with pytest.raises(InputError, match=r"got outputs=.*want a tuple of some of 'sum_squared_probs', 'is_top1', "):
        linear_logprobs(torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2).long(), outputs=outputs)


def test_outputs_without_a_meaning_are_refused():
    hidden, weight, targets = torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2).long()
    with pytest.raises(UnsupportedError, match="with several targets per row, want one target"):
        linear_logprobs(hidden, weight, targets[:, None].expand(2, 2), outputs=OUTPUTS)
    with pytest.raises(UnsupportedError, match=r"with process_group, want .* fix: "):
        linear_logprobs(hidden, weight, targets, process_group=torch.distributed.ProcessGroup(0, 1), outputs=OUTPUTS)


@pytest.mark.parametrize("call", [linear_logprobs, linear_logprobs_and_entropy])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_an_empty_tuple_of_outputs_asks_for_none(call, impl):
    inputs = make_inputs(10, 7, 4)
    hidden, weight, targets = inputs["hidden"].float(), inputs["weight"].float(), inputs["targets"]
    for wanted in (targets, targets[:, None].expand(-1, 3)):
        plain = call(hidden, weight, wanted, impl=impl)
        values = [plain] if isinstance(plain, Tensor) else list(plain)
        none = call(hidden, weight, wanted, impl=impl, outputs=())
        assert all(torch.equal(one, other) for one, other in zip(none, values, strict=False))
        assert none[len(values) :].count(None) == 5 - len(values)
