"""`fused_linear_divergence` against full logits in fp64, TRL's op, and what it promises."""

from typing import Any

import numpy
import pytest
import torch
from device_under_test import assert_rounded, rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_as_exact
from torch import Tensor

from fused_grpo import divergence, fused_linear_divergence
from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.head import logprob_plans

pytestmark = pytest.mark.grid

KINDS = ("reverse_kl", "forward_kl", "jsd")
LEAVES = ("student_hidden", "student_weight", "student_bias")
TENSORS = (*LEAVES, "teacher_hidden", "teacher_weight", "teacher_bias")
PATHS = [("torch", None), ("torch", 3000), ("triton", None), ("triton", 3000)]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
]
# Half of the tokens of a row are out of the vocabulary of both, one more is out of the teacher's alone.
NOT_ALLOWED = torch.zeros(23).masked_fill(torch.arange(23) % 2 == 1, -torch.inf)
Inputs = dict[str, Any]


def make_inputs(shape: tuple[int, int, int] = (9, 23, 6), *, options: bool = True, seed: int = 0) -> Inputs:
    """Inputs in fp32 of N tokens, a third of them masked; the teacher has another hidden size."""
    (N, V, D), generator = shape, torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    inputs: Inputs = {
        "student_hidden": 2 * normal(N, D),
        "student_weight": normal(V, D) / D**0.5,
        "teacher_hidden": 2 * normal(N, D + 3),
        "teacher_weight": normal(V, D + 3) / D**0.5,
        "mask": torch.arange(N) % 3 != 1,
        "temperature": 0.5 + torch.rand(N, generator=generator),
    }
    if options:
        inputs |= {"student_bias": normal(V), "teacher_bias": normal(V), "student_softcap": 4.0}
        inputs |= {"student_logit_scale": -1.25, "teacher_logit_scale": 0.8, "teacher_softcap": 3.0}
    return inputs


def upcast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) if name in TENSORS else x for name, x in inputs.items()}


def solve(inputs: Inputs, *, factor: float = 1.0, **plan: Any) -> dict[str, Tensor]:
    """Loss, divergences and the gradients of the student."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in LEAVES if name in inputs}
    out = fused_linear_divergence(**{**inputs, **leaves}, **plan)
    gradients = torch.autograd.grad(out.loss * factor, list(leaves.values()))
    return {"loss": out.loss.detach(), "divergence": out.divergence} | dict(zip(leaves, gradients, strict=True))


def judge(inputs: Inputs, *, upstream: float = 1.0, **plan: Any) -> dict[str, Tensor]:
    """Results, which have been held against plain torch in fp32 and in fp64 from the same inputs."""
    kind = {name: plan[name] for name in ("kind", "beta") if name in plan}
    plain, exact = (
        solve(upcast(inputs, dtype), impl="reference", factor=upstream, **kind)
        for dtype in (torch.float32, torch.float64)
    )
    ours = solve(inputs, factor=upstream, **plan)
    for name, value in ours.items():
        if exact[name].numel() and exact[name].abs().max() < 1e-20:
            assert value.abs().max() < 1e-20, name
        elif name in LEAVES and rounds(inputs[name].dtype):
            assert_rounded(value, exact[name], dtype=inputs[name].dtype, what=name)
        else:
            assert_as_exact(value, plain[name], exact[name], what=f"{name}, {plan}")
    assert (ours["divergence"] >= 0).all()
    return ours


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_bytes", [None, 9000])
@pytest.mark.parametrize("options", [False, True])
def test_in_fp64_divergence_and_gradients_have_ten_digits(kind, chunk_bytes, options):
    inputs = upcast(make_inputs((33, 211, 16), options=options), torch.float64)
    ours, exact = (
        solve(inputs, kind=kind, beta=0.3, chunk_bytes=budget, impl=impl)
        for impl, budget in (("torch", chunk_bytes), ("reference", None))
    )
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3), ("jsd", 0.5)])
def test_trl_gives_the_same_to_five_digits(kind, beta):
    trl = pytest.importorskip("trl.kernels.chunked_divergence")
    inputs = make_inputs((33, 1003, 16)) | {"temperature": 1.3}
    options = {"beta": beta} if kind == "jsd" else {}
    ours = solve(inputs, kind=kind, impl="torch", **options)
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    heads = [leaves[name] for name in LEAVES] + [inputs[name] for name in TENSORS[3:]]
    names = ("student_logit_scale", "student_softcap", "teacher_logit_scale", "teacher_softcap")
    rest = (beta, 1.3, *(inputs[name] for name in names))
    trl_divergence = trl.ChunkedDivergenceFunction.apply(*heads, *rest)[0]
    loss = trl_divergence[inputs["mask"]].sum() / inputs["mask"].sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    expected = [loss.detach(), trl_divergence.detach() * inputs["mask"], *gradients]
    for value, wanted in zip(ours.values(), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(("impl", "chunk_bytes"), PATHS)
def test_every_dtype_and_path_is_as_exact_as_torch(kind, dtypes, impl, chunk_bytes):
    inputs = make_inputs()
    for model, dtype in zip(("student", "teacher"), dtypes, strict=True):
        inputs |= {name: inputs[name].to(dtype) for name in TENSORS if name.startswith(model)}
    judge(inputs, kind=kind, impl=impl, chunk_bytes=chunk_bytes)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(st.sampled_from([0, 6, 12]), st.sampled_from([2, 3, 5, 64, 130]), st.integers(3, 9)),
    beta=st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    chunk_bytes=st.sampled_from([None, 1, 5000]),
    options=st.booleans(),
)
def test_any_shape_and_spread_is_as_exact_as_torch(kind, shape, beta, spread, chunk_bytes, options):
    inputs = make_inputs(shape, options=options, seed=shape[0])
    inputs |= {"student_hidden": spread * inputs["student_hidden"]}
    judge(inputs, kind=kind, beta=beta, impl="torch", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_have_no_divergence_and_no_gradient(kind, impl):
    inputs = make_inputs()
    inputs |= {f"teacher_{name}": inputs[f"student_{name}"] for name in ("hidden", "weight", "bias", "softcap")}
    ours = solve(inputs | {"teacher_logit_scale": -1.25}, kind=kind, impl=impl)
    assert not ours["divergence"].any()
    for name in LEAVES:
        # Two products of one number, of which the fused multiply-add of plain torch rounds one.
        assert ours[name].abs().max() < (1e-7 if kind == "forward_kl" and impl == "torch" else 1e-20)


@pytest.mark.parametrize(("impl", "chunk_bytes"), PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_confident_tokens_keep_their_divergence_and_gradient(kind, impl, chunk_bytes):
    """Both models give one token all but 1e-7 to 1e-10 of the probability; plain fp32 finds no difference."""
    inputs = make_inputs(options=False) | {"mask": None, "temperature": 1.0}
    for model, logits in (("student", (20.0, 21.0, 23.0)), ("teacher", (19.0, 22.0, 24.0))):
        hidden, weight = inputs[f"{model}_hidden"] / 16, inputs[f"{model}_weight"]
        weight[:, 0] = (torch.arange(len(weight)) == 5).float()
        hidden[:, 0] = torch.tensor(logits).repeat(3)
        inputs |= {f"{model}_hidden": hidden, f"{model}_weight": weight}
    exact = solve(upcast(inputs, torch.float64), kind=kind, impl="reference", factor=2.0**20)
    ours = solve(inputs, kind=kind, impl=impl, chunk_bytes=chunk_bytes, factor=2.0**20)
    for name, value in ours.items():
        if name != "loss":
            atol = 1e-5 * exact[name].abs().max().item()
            torch.testing.assert_close(value.double(), exact[name], rtol=2e-5, atol=atol)
            assert value.any()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_certain_student_of_an_uncertain_teacher_is_as_exact_as_torch(kind, impl):
    """The student is sure of one token, its teacher of none: the quotient of the largest probabilities is 1e3."""
    inputs = make_inputs((9, 4001, 6), options=False) | {"temperature": 1.0}
    judge(inputs | {"student_hidden": 8 * inputs["student_hidden"], "teacher_logit_scale": 0.01}, kind=kind, impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_shift_of_all_logits_costs_no_precision(kind, impl, shift):
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randint(-4, 5, (rows, 4), generator=generator) / 2
        for name, rows in (("student_hidden", 6), ("student_weight", 11), ("teacher_hidden", 6), ("teacher_weight", 11))
    }
    judge(inputs | {"student_bias": torch.full((11,), shift)}, kind=kind, impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_neither_model_allows_add_nothing(kind, impl):
    bias = {"student_bias": NOT_ALLOWED, "teacher_bias": NOT_ALLOWED}
    ours = solve(make_inputs(options=False) | bias, kind=kind, impl=impl)
    allowed = NOT_ALLOWED == 0
    inputs = make_inputs(options=False)
    inputs |= {f"{model}_weight": inputs[f"{model}_weight"][allowed] for model in ("student", "teacher")}
    fewer = solve(inputs | {"student_bias": torch.zeros(12)}, kind=kind, impl=impl)
    torch.testing.assert_close(ours["divergence"], fewer["divergence"], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(ours["student_weight"][allowed], fewer["student_weight"], rtol=1e-5, atol=1e-7)
    assert ours["student_weight"][~allowed].abs().max() < 1e-20


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("kind", "infinite"), [("reverse_kl", "teacher"), ("forward_kl", "student")])
def test_a_token_that_one_model_does_not_allow_makes_its_kl_infinite(kind, infinite, impl):
    inputs = make_inputs(options=False)
    for model in ("student", "teacher"):
        with numpy.errstate(invalid="ignore"):
            out = fused_linear_divergence(**inputs, **{f"{model}_bias": NOT_ALLOWED}, kind=kind, impl=impl)
        assert (out.divergence[inputs["mask"]] == torch.inf).all() == (model == infinite)
        jsd = solve(inputs | {"student_bias": torch.zeros(23), f"{model}_bias": NOT_ALLOWED}, kind="jsd", impl=impl)
        assert all(value.isfinite().all() for value in jsd.values())
        assert (jsd["divergence"] <= 0.6932).all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("chunk_bytes", [None, 3000])
def test_masked_tokens_cost_nothing_whatever_they_hold(gemms, impl, chunk_bytes):
    inputs = make_inputs(options=False)
    kept = inputs["mask"]
    clean = solve(inputs, impl=impl, chunk_bytes=chunk_bytes)
    del gemms[:]
    for name in ("student_hidden", "teacher_hidden"):
        inputs[name] = inputs[name].masked_fill(~kept[:, None], torch.nan)
    ours = solve(inputs, impl=impl, chunk_bytes=chunk_bytes)
    for name, value in ours.items():
        assert torch.equal(value, clean[name]), name
    assert not ours["student_hidden"][~kept].any()
    for what, sweeps in (("logits", 2), ("hidden", 1)):
        assert sum(rows for name, rows in gemms if name == what) == sweeps * kept.sum()


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_masked_rows_may_hold_anything_where_a_cuda_graph_is_captured(impl, monkeypatch):
    inputs = make_inputs()
    clean, kept = solve(inputs, impl=impl), inputs["mask"]
    for module in (divergence, logprob_plans):
        monkeypatch.setattr(module, "may_synchronize", lambda _: False)
    for name in ("student_hidden", "teacher_hidden"):
        inputs[name] = inputs[name].masked_fill(~kept[:, None], torch.nan)
    for name, value in solve(inputs, impl=impl).items():
        torch.testing.assert_close(value, clean[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_four_products(gemms, kind):
    inputs = make_inputs((50, 23, 6), options=False) | {"mask": None}
    solve(inputs, kind=kind, impl="torch", chunk_bytes=8000)
    chunks = len([what for what, _ in gemms if what == "hidden"])
    assert chunks > 1
    assert sorted(what for what, _ in gemms) == sorted(["logits", "logits", "hidden", "weight"] * chunks)
    del gemms[:]
    fused_linear_divergence(**inputs, kind=kind, impl="torch")
    assert [what for what, _ in gemms] == ["logits", "logits"]


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_no_tokens_give_a_loss_of_zero_with_gradients(impl, count):
    inputs = make_inputs((count, 23, 6)) | {"mask": torch.zeros(count, dtype=torch.bool)}
    for name, value in solve(inputs, impl=impl).items():
        assert not value.any(), name
    assert solve(inputs, impl=impl)["student_weight"].shape == (23, 6)


def test_micro_batches_add_up_to_the_batch():
    inputs = make_inputs()
    whole = solve(inputs)
    parts = []
    for rows in (slice(0, 4), slice(4, None)):
        part = {name: inputs[name][rows] for name in ("student_hidden", "teacher_hidden", "mask", "temperature")}
        parts.append(solve(inputs | part, num_tokens=inputs["mask"].sum()))
    for name in ("loss", "student_weight", "student_bias"):
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name])


@pytest.mark.cpu_only(reason="the ops are given copies there")
def test_the_teacher_gets_no_gradient_and_the_main_gradient_the_weights():
    inputs = make_inputs(options=False)
    expected = solve(inputs, factor=3.0)["student_weight"]
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if name in TENSORS}
    main_grad = torch.ones_like(expected)
    out = fused_linear_divergence(**{**inputs, **leaves}, weight_main_grad=main_grad)
    (3 * out.loss).backward()
    torch.testing.assert_close(main_grad, 1 + expected)
    assert {name for name, x in leaves.items() if x.grad is not None} == {"student_hidden"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_bytes", [None, 3000])
def test_two_runs_give_the_same_bits(kind, chunk_bytes):
    inputs = make_inputs((33, 211, 16))
    first, second = (solve(inputs, kind=kind, chunk_bytes=chunk_bytes) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("layout", ["transposed", "padded batch"])
def test_strides_and_leading_shapes_do_not_matter(layout):
    inputs = make_inputs((12, 23, 6)) | {"kind": "jsd"}
    flat = solve(inputs)
    if layout == "transposed":
        changed = {name: inputs[name].t().contiguous().t() for name in TENSORS if inputs[name].ndim == 2}
    else:
        names = ("student_hidden", "teacher_hidden", "mask", "temperature")
        changed = {name: inputs[name].unflatten(0, (3, 4)) for name in names}
    for name, value in solve(inputs | changed).items():
        torch.testing.assert_close(value.flatten(), flat[name].flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only(reason="values are checked on a CPU alone")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "kl"}, "kind='kl', want 'reverse_kl', 'forward_kl' or 'jsd'"),
        ({"kind": "jsd", "beta": 0.0}, "beta=0.0, want a number between 0 and 1; fix: kind='forward_kl'"),
        ({"kind": "jsd", "beta": torch.tensor(0.5)}, "want a number between 0 and 1"),
        ({"kind": "jsd", "beta": torch.ones(2)}, "want a number between 0 and 1"),
        ({"kind": "reverse_kl", "beta": "0.5"}, "beta='0.5', want a number between 0 and 1"),
        ({"kind": "forward_kl", "beta": -0.1}, "beta=-0.1, want a number between 0 and 1"),
        ({"teacher_weight": torch.randn(24, 9)}, r"vocabularies of 23 and 24, want one; fix: .*weight\[:V\]"),
        ({"teacher_hidden": torch.randn(8, 9)}, r"teacher_hidden \(8, 9\), want the same tokens"),
        ({"teacher_hidden": torch.randn(9, 8)}, r"of the teacher: got hidden \(9, 8\) and weight"),
        ({"teacher_hidden": torch.randn(9, 9).double()}, "want fp64 for both or for none"),
        ({"student_softcap": -1.0}, "of the student: got softcap=-1.0"),
        ({"student_hidden": None}, "student_hidden of type NoneType, want a torch.Tensor"),
        ({"temperature": 0.0}, "temperature=0.0, want a finite number > 0"),
        ({"mask": torch.ones(8)}, r"mask \(8,\), want \(9,\)"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
    ],
)
def test_mistakes_say_what_is_wanted(changes, message):
    with pytest.raises(InputError, match=message):
        fused_linear_divergence(**make_inputs(options=False) | {"temperature": 1.0} | changes)


@pytest.mark.cpu_only(reason="a GPU can run it")
def test_triton_refuses_what_it_cannot_compute():
    with pytest.raises(UnavailableError, match="no fp64"):
        fused_linear_divergence(**upcast(make_inputs(), torch.float64), impl="triton")
