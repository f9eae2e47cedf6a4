"""A head over the kept tokens equals full logits with the others at -inf: values, gradients, and what it leaves out."""

from typing import Any

import pytest
import torch
from device_under_test import NAME, assert_rounded, rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import largest, rms
from torch import Tensor

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head import kept_tokens

LEAVES = ("hidden", "weight", "bias")
IMPLS = ["torch", "triton"]
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "softcap": {"softcap": 2.5},
    "negative": {"logit_scale": -0.8},
    "scale, softcap, temperature": {"logit_scale": 1.25, "softcap": 4.0, "temperature": True},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"importance_sampling_level": "sequence", "beta": 0.1},
    "entropy bonus": {"entropy_coef": 0.1, "loss_type": "grpo"},
    "quantile": {"top_entropy_quantile": 0.5},
}
Inputs = dict[str, Any]


def make_inputs(sizes: list[int], V: int = 40, D: int = 12, *, seed: int = 0, temperature: bool = False) -> Inputs:
    """Rows that keep so many tokens, in no order, their target among them; every fifth row is ignored."""
    generator = torch.Generator().manual_seed(seed)
    N = len(sizes)
    targets = torch.randint(V, (N,), generator=generator)
    kept = []
    for target, size in zip(targets.tolist(), sizes, strict=True):
        others = torch.randperm(V, generator=generator)
        kept.append(torch.cat([others[others != target][: size - 1], torch.tensor([target])])[:size].flip(0))
    targets[4::5] = -100
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    inputs: Inputs = {
        name: torch.randn(*size, generator=generator) for name, size in zip(LEAVES, ((N, D), (V, D), (V,)), strict=True)
    }
    inputs["targets"], inputs["support"] = targets, (torch.cat([torch.empty(0).long(), *kept]), offsets.int())
    return inputs | ({"temperature": 0.5 + torch.rand(N, generator=generator)} if temperature else {})


def cast(inputs: Inputs, dtype: torch.dtype, names: tuple[str, ...] = LEAVES) -> Inputs:
    return {name: x.to(dtype) if name in names else x for name, x in inputs.items()}


def solve(inputs: Inputs, call: Any = None, **options: Any) -> dict[str, Tensor]:
    """Outputs of log-probs, or of another call, and the gradients of all leaves."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in LEAVES}
    out = (call or log_probs)(**{**inputs, **leaves}, **options)
    total = out.pop("total")
    return out | dict(zip(LEAVES, torch.autograd.grad(total, list(leaves.values())), strict=True))


def log_probs(**inputs: Any) -> dict[str, Tensor]:
    out = linear_logprobs_and_entropy(**inputs)
    steps = torch.arange(len(out.logprobs))
    total = (out.logprobs * torch.sin(1 + steps)).sum() + (out.entropy * torch.cos(3 * steps)).sum()
    return {"logprobs": out.logprobs.detach(), "entropy": out.entropy.detach(), "total": total}


def loss_of(N: int, **config: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    given = {
        "old_logprobs": -2 + torch.rand(N, generator=generator),
        "cu_seqlens": torch.tensor([0, N // 3, N // 3, N]),
    }
    given |= {"ref_logprobs": -2 + torch.rand(N, generator=generator), "advantages": torch.tensor([1.0, -2.0, -0.5])}

    def call(**inputs: Any) -> dict[str, Tensor]:
        out = fused_linear_grpo_loss(**inputs, **given, config=GRPOLossConfig(**config))
        return {
            "loss": out.loss.detach(),
            "logprobs": out.logprobs,
            "entropy": out.metrics["entropy"],
            "total": out.loss,
        }

    return call


def judge(inputs: Inputs, call: Any = None, **options: Any) -> None:
    """At most twice the error of plain torch with fp32 logits from the same values; gradients have their own dtypes."""
    upcast = {**inputs, "weight": inputs["weight"].to(inputs["hidden"].dtype)}
    plain, exact = (solve(cast(upcast, dtype), call, impl="reference") for dtype in (torch.float32, torch.float64))
    ours = solve(inputs, call, **options)
    for name, value in ours.items():
        plain_value = plain[name].to(value.dtype)
        assert value.dtype == (inputs[name].dtype if name in LEAVES else torch.float32)
        if name in LEAVES and rounds(inputs["hidden"].dtype):
            assert_rounded(value, exact[name], dtype=inputs["hidden"].dtype, what=name)
            continue
        scale = max(largest(exact[name]), 0.1)
        if name == "loss":  # one number, whose error is one draw: as much as it moves where hidden is rounded once
            scale = max(scale, 0.5 * float((inputs["hidden"].double() * exact["hidden"]).abs().sum()))
        if NAME == "cuda" and name in LEAVES and call is not None:
            # Of a row far from its reference, times the exponential of a difference of log-probs: its relative error is
            # the error of that exponent, half an ulp where the log-prob is rounded, and half where it is times log2(e).
            scale *= 1 + largest(exact["logprobs"]) / 4
        for norm in (largest, rms):
            error, allowed = norm(value.double() - exact[name]), norm(plain_value.double() - exact[name])
            allowed = 2 * (allowed + 2 * torch.finfo(torch.float32).eps * scale)
            assert error <= allowed, f"{name}: {norm.__name__} error {error:.3e}, allowed {allowed:.3e}"


# Rows of one token, of all, of the whole vocabulary without a restriction; several tiles.
MIXED = [3, 1, 40, 0, 17, 1, 2, 20, 0, 5, 39, 40, 4, 1]


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk_bytes", [None, 1000])
def test_each_option_is_as_exact_as_full_logits(options, impl, chunk_bytes):
    given = dict(OPTIONS[options])
    inputs = make_inputs(MIXED, temperature=given.pop("temperature", False)) | given
    judge(inputs, impl=impl, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize(
    ("impl", "hidden", "weight"),
    [
        ("torch", torch.bfloat16, torch.bfloat16),
        ("torch", torch.float16, torch.float32),
        ("torch", torch.float32, torch.bfloat16),
        ("triton", torch.float16, torch.float16),
        ("triton", torch.float16, torch.float32),
        ("triton", torch.bfloat16, torch.bfloat16),
        ("triton", torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("sizes", [MIXED, [5, 3, 9, 1]])
def test_narrow_inputs_are_rounded_once(impl, hidden, weight, sizes):
    inputs = cast(cast(make_inputs(sizes), hidden, ("hidden", "bias")), weight, ("weight",))
    judge(inputs, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_loss_over_kept_tokens_is_that_of_full_logits(impl, config):
    judge(make_inputs(MIXED), loss_of(len(MIXED), **CONFIGS[config]), impl=impl)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_support_is_that_of_masked_logits(data):
    V = data.draw(st.integers(1, 9))
    sizes = data.draw(st.lists(st.integers(0, V), max_size=8))
    sizes = [size for size in sizes for _ in range(data.draw(st.integers(1, 2)))]  # neighbours with equally many
    seed, chunk_bytes = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([None, 50, 400]))
    inputs = cast(make_inputs(sizes, V, 3, seed=seed), torch.float64)
    ours, exact = (
        solve(inputs, **options) for options in ({"impl": "torch", "chunk_bytes": chunk_bytes}, {"impl": "reference"})
    )
    for name, value in ours.items():
        torch.testing.assert_close(value, exact[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", IMPLS)
def test_long_segments_are_summed_in_pieces(monkeypatch, impl):
    """Every row keeps the same tokens: each of them, and each row, has more entries than a piece."""
    monkeypatch.setattr(kept_tokens, "PIECE", 3)
    inputs = make_inputs([20] * 11, V=21)
    judge(inputs, impl=impl)
    judge(make_inputs([20, 1, 0] * 4, V=21), impl=impl)


def test_a_token_that_all_rows_keep_is_as_exact_as_a_product():
    judge(make_inputs([4] * 3000, V=4, D=3), impl="torch")


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_call_gives_the_same_bits(impl):
    inputs = make_inputs(MIXED * 2)
    first, again = (solve(inputs, call, impl=impl) for call in (None, None))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("impl", IMPLS)
def test_tokens_that_no_scored_row_keeps_have_no_gradient(impl):
    inputs = make_inputs([3, 2, 0, 4, 40], V=50)
    inputs["targets"][2] = -100
    inputs["hidden"][[2, 4]] = torch.nan  # ignored rows, whatever they hold
    inputs["support"][0][-40:] = torch.arange(40)  # without a target that any row has
    ours, kept = solve(inputs, impl=impl), inputs["support"][0][:9].unique()
    left_out = torch.ones(50, dtype=torch.bool).index_fill_(0, kept, False)
    assert (ours["weight"][left_out] == 0).all()
    assert (ours["bias"][left_out] == 0).all()
    assert (ours["hidden"][[2, 4]] == 0).all()
    assert all(ours[name].isfinite().all() for name in ours)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_of_one_token_is_certain(impl):
    ours = solve(make_inputs([1] * 4), impl=impl)
    assert all((value == 0).all() for value in ours.values())


def test_logits_far_apart_keep_a_gradient_where_probabilities_round_to_one():
    inputs = make_inputs([2, 5])
    inputs["bias"][inputs["targets"]] += 30.0
    ours, exact = solve(inputs, impl="torch"), solve(cast(inputs, torch.float64), impl="reference")
    assert (ours["logprobs"] < 0).all()
    torch.testing.assert_close(ours["weight"].double(), exact["weight"], rtol=1e-4, atol=0)


def test_a_support_without_entries_changes_no_bit():
    inputs = make_inputs([0] * 7)
    ours = solve(inputs)
    expected = solve({**inputs, "support": None})
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


@pytest.mark.parametrize("score", ["all", "needed"])
def test_rows_without_advantage_and_masked_rows_take_no_part(monkeypatch, score):
    seen = []
    original = kept_tokens.kept_entries

    def kept_entries(*given):
        entries, places = original(*given)
        seen.append(entries.rows.tolist())
        return entries, places

    monkeypatch.setattr(kept_tokens, "kept_entries", kept_entries)
    inputs = make_inputs([3] * 6)
    inputs["support"][0][:3] = torch.arange(3)  # of a masked row, without its target
    inputs["targets"][:] = torch.where(torch.arange(6) > 0, inputs["support"][0][::3], 39)
    options = {
        "mask": torch.arange(6) > 0,
        "cu_seqlens": torch.tensor([0, 3, 6]),
        "advantages": torch.tensor([0.0, 1.0]),
    }
    inputs["weight"].requires_grad_()
    out = fused_linear_grpo_loss(**inputs, **options, score=score)
    out.loss.backward()
    assert sorted(seen[0]) == ([3, 4, 5] if score == "needed" else [1, 2, 3, 4, 5])
    touched = (inputs["weight"].grad != 0).any(1).nonzero()[:, 0]
    assert set(touched.tolist()) <= set(inputs["support"][0][9:].tolist())


@pytest.mark.cpu_only(reason="the ops are given copies there")
def test_main_grad_gets_what_the_weight_would():
    inputs, main = make_inputs(MIXED), torch.ones(40, 12)
    call = loss_of(len(MIXED))
    weight = solve(inputs, call)["weight"]
    leaves = {"hidden": inputs["hidden"].requires_grad_(), "weight": inputs["weight"].requires_grad_()}
    call(**{**inputs, **leaves}, weight_main_grad=main)["total"].backward()
    torch.testing.assert_close(main - 1, weight, rtol=0, atol=1e-6)


def test_padded_tokens_are_those_of_the_flat_rows():
    inputs = make_inputs([3, 0, 5, 2, 1, 7])
    flat = linear_logprobs(**inputs)
    shaped = {"hidden": inputs["hidden"].view(2, 3, -1), "targets": inputs["targets"].view(2, 3)}
    assert torch.equal(linear_logprobs(**{**inputs, **shaped}), flat.view(2, 3))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_without_a_gradient_are_those_with_one(impl, entropy):
    """Rows without a restriction take another plan then."""
    inputs, op = make_inputs(MIXED), linear_logprobs_and_entropy if entropy else linear_logprobs
    results = [op(**{**inputs, "hidden": inputs["hidden"].requires_grad_(grad)}, impl=impl) for grad in (False, True)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.cpu_only(reason="the ops are given copies there")
def test_a_weight_that_has_changed_is_found_out_a_temperature_is_copied():
    inputs = make_inputs([3, 2], temperature=True)
    weight = inputs["weight"].requires_grad_()
    (expected,) = torch.autograd.grad(linear_logprobs(**inputs).sum(), weight)
    again, changed = linear_logprobs(**inputs).sum(), linear_logprobs(**inputs).sum()
    inputs["temperature"].mul_(2.0)
    assert torch.equal(torch.autograd.grad(again, weight)[0], expected)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.backward()


GOOD = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3]))


@pytest.mark.cpu_only(reason="checks on the host are the same on any device; those of values end a process on a GPU")
@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (GOOD[0], r"support of type Tensor, want \(token_ids \[K\], offsets \[N \+ 1\]\)"),
        ((GOOD[0], [0, 2, 2, 3]), "offsets of type list"),
        ((GOOD[0].float(), GOOD[1]), r"token_ids of support \(3,\) torch.float32"),
        ((GOOD[0], GOOD[1][:-1]), "got 3 offsets of support for N=3 rows, want N [+] 1"),
        ((GOOD[0], torch.tensor([0, 2, 1, 3])), "fall from 2 to 1 at 1"),
        ((GOOD[0], torch.tensor([0, 2, 2, 2])), "from 0 to 2, want from 0 to K=3"),
        ((torch.tensor([1, 9, 3]), GOOD[1]), "token 9 in the support; want 0 <= token < V=9"),
        ((torch.tensor([1, -1, 3]), GOOD[1]), "token -1 in the support"),
        ((torch.tensor([1, 1, 3]), GOOD[1]), "token 1 twice in the support of row 0; .*fix: unique ids"),
        ((torch.tensor([2, 5, 3]), GOOD[1]), "target 1 in row 0, which is not in its support; .* fix: mask the row"),
    ],
)
def test_a_support_that_cannot_be_is_refused(kept, message):
    inputs = {"hidden": torch.randn(3, 4), "weight": torch.randn(9, 4), "targets": torch.tensor([1, 5, 3])}
    inputs |= {"support": kept}
    for call, more in (
        (linear_logprobs, {}),
        (fused_linear_grpo_loss, {"advantages": torch.ones(3), "cu_seqlens": torch.arange(4)}),
    ):
        for impl in ("auto", "reference"):
            with pytest.raises(InputError, match=message):
                call(**inputs, **more, impl=impl)


def test_what_does_not_go_with_a_support_is_refused():
    inputs = make_inputs([3, 2])
    with pytest.raises(UnsupportedError, match="support with batch_invariant"):
        linear_logprobs(**inputs, batch_invariant=True)
    with pytest.raises(UnsupportedError, match="several targets per row"):
        linear_logprobs(**inputs | {"targets": inputs["targets"][..., None].repeat(1, 2)})
    hidden = inputs["hidden"].requires_grad_()
    value = linear_logprobs(**inputs).sum()
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(value, hidden, create_graph=True)


@pytest.mark.cpu_only(reason="allocations of a CPU; tests/gpu counts those of a GPU")
def test_nothing_like_the_logits_is_in_memory():
    """Eight tokens of 8003: beside gradients, numbers per entry and a block of gathered rows."""
    from torch.profiler import ProfilerActivity, profile

    N, V, D = 512, 8003, 64
    generator = torch.Generator().manual_seed(0)
    kept = torch.stack([torch.randperm(V, generator=generator)[:8] for _ in range(N)])
    hidden, weight = torch.randn(N, D).requires_grad_(), torch.randn(V, D).requires_grad_()
    given = {"targets": kept[:, 0].contiguous(), "support": (kept.flatten(), torch.arange(0, 8 * N + 1, 8))}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        linear_logprobs(hidden, weight, **given).sum().backward()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak, held = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak <= 4 * D * (N + V) + 200 * 8 * N + 3 * 2**20 < 4 * N * V
