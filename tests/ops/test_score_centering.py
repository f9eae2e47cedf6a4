"""Score centering: its formula, its mean of zero, and every path beside the reference in fp64."""

import itertools
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, grpo_loss
from fused_grpo._maths import distributions
from fused_grpo.errors import InputError, UnsupportedError

B, T, D, V, K = 3, 14, 12, 61, 6
IMPLS = ["torch", "triton"]


class Problem(NamedTuple):
    leaves: dict[str, Tensor]
    head: dict[str, Any]
    loss: dict[str, Any]
    sampler: Tensor  # [B, T, V], log-probs of the whole vocabulary


def problem(seed: int = 0, *, shape: tuple[int, int, int, int] = (B, T, V, K), drift: float = 0.5) -> Problem:
    """A sampler near the policy. A token has fewer than K ids, one has a log-prob of the sampler that is not known."""
    generator = torch.Generator().manual_seed(seed)
    b, t, v, k = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    leaves = {"hidden": normal(b, t, D), "weight": normal(v, D) * 0.6, "bias": normal(v) * 0.3}
    head = {"temperature": 0.8, "logit_scale": 1.25}
    log_p = log_p_of(Problem(leaves, {**head, "targets": None}, {}, leaves["bias"])).view(b, t, v)
    sampler = (log_p + drift * normal(b, t, v)).log_softmax(-1)
    targets = torch.multinomial(sampler.exp().flatten(0, 1), 1, generator=generator).view(b, t)
    top = sampler.topk(k, -1)
    ids, logprobs = top.indices.clone(), top.values.clone()
    ids[0, :, k - 1 :], targets[0, 0] = -1, -100
    sampling = sampler.gather(-1, targets.clamp_min(0)[..., None])[..., 0].clone()
    sampling[-1, 1] = torch.nan
    mask = torch.ones(b, t)
    mask[1 % b, t - 3 :] = 0.0
    loss = {"advantages": torch.linspace(1.0, -0.7, b), "mask": mask, "sampling_logprobs": sampling}
    loss |= {"sampling_topk_ids": ids, "sampling_topk_logprobs": logprobs}
    return Problem(leaves, {**head, "targets": targets}, loss, sampler)


def with_support(problem: Problem, truncated: int = 5) -> Problem:
    """The sampler kept the likeliest few tokens and the sampled one; every third row is not restricted."""
    kept, sizes, logprobs = [], [], []
    targets = problem.head["targets"].flatten()
    for n, (target, row) in enumerate(zip(targets.tolist(), problem.sampler.flatten(0, 1), strict=True)):
        ids = torch.cat([row.topk(truncated - n % 2).indices, torch.tensor([max(0, target)])]).unique()
        ids = ids if n % 3 else ids[:0]
        kept.append(ids)
        sizes.append(len(ids))
        logprobs.append(row[ids].log_softmax(0))
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    loss = {**problem.loss, "sampling_topk_ids": None, "sampling_topk_logprobs": torch.cat(logprobs)}
    return problem._replace(loss={**loss, "support": (torch.cat(kept), offsets)})


def solve(problem: Problem, config: GRPOLossConfig, dtype: torch.dtype, *, frozen: bool = False, **options: Any):
    """{"loss", metrics and gradients}"""
    leaves = {
        name: x.to(dtype).clone().requires_grad_(not frozen or name == "hidden") for name, x in problem.leaves.items()
    }
    out = fused_linear_grpo_loss(**leaves, **problem.head, **problem.loss, config=config, **options)
    out.loss.backward()
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    unequal = ("recomputed_fraction", "zero_gradient_fraction")
    metrics = {name: x for name, x in out.metrics.items() if name not in unequal}
    return {"loss": out.loss.detach(), **metrics, **gradients}


def config_of(mode: str = "topk", **options: Any) -> GRPOLossConfig:
    return GRPOLossConfig(score_centering=mode, **options)


def assert_near(ours: dict[str, Tensor], exact: dict[str, Tensor], *, tolerance: float = 2e-5) -> None:
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        if value.isinf().any():  # extremes of no tokens
            assert torch.equal(ours[name].double(), value)
            continue
        error = (ours[name].double() - value.double()).abs().max().item()
        assert error <= tolerance * max(0.05, value.abs().max().item()), f"{name} differs by {error:.1e}"


def by_hand(problem: Problem, *, cap: float | None, whole: bool) -> Tensor:
    """The loss of the paper for "dapo" on policy, token by token, from full logits."""
    head, loss, terms = problem.head, problem.loss, []
    log_p = log_p_of(problem).view(*head["targets"].shape, -1)
    for b, t in (loss["mask"].bool() & (head["targets"] >= 0)).nonzero().tolist():
        row, y, sampler_of_y = log_p[b, t], int(head["targets"][b, t]), loss["sampling_logprobs"][b, t].double()
        pairs = zip(loss["sampling_topk_ids"][b, t].tolist(), loss["sampling_topk_logprobs"][b, t].exp(), strict=True)
        q = {v: float(q_v) for v, q_v in pairs if v >= 0 and not sampler_of_y.isnan()}
        p = {v: float(row[v].detach().exp()) for v in q}
        w, rho = 1.0, 0.0
        if cap is not None and not sampler_of_y.isnan():
            w = min(float((row[y].detach() - sampler_of_y).exp()), cap)
        if not whole:
            rho = (1 - sum(q.values())) / max(1 - sum(p.values()), 1e-6)
        term = w * row[y]
        for v in q:
            c = q[v] - rho * p[v] if cap is None else min(p[v], cap * q[v]) - min(1.0, cap * rho) * p[v]
            term = term - c * row[v]
        terms.append(-loss["advantages"][b].double() * term)
    return torch.stack(terms).mean()


def log_p_of(problem: Problem) -> Tensor:
    """[N, V]"""
    leaves, head = problem.leaves, problem.head
    raw = (leaves["hidden"] @ leaves["weight"].t()).flatten(0, 1)
    temperature = torch.full((len(raw),), head["temperature"], dtype=torch.float64)
    options = {"bias": leaves["bias"], "temperature": temperature, "logit_scale": head["logit_scale"]}
    return distributions.transform_logits(raw, **options).log_softmax(-1)


@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("mode", ["topk", "kept"])
def test_the_reference_is_the_formula_of_the_paper(mode, cap):
    given = problem()
    leaves = {name: x.clone().requires_grad_() for name, x in given.leaves.items()}
    exact = torch.autograd.grad(
        by_hand(given._replace(leaves=leaves), cap=cap, whole=mode == "kept"), [*leaves.values()]
    )
    correction = {"sampling_correction": None if cap is None else "token_truncate", "sampling_clip_max": cap}
    ours = solve(given, config_of(mode, **correction), torch.float64, impl="reference")
    for name, gradient in zip(leaves, exact, strict=True):
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12)


VARIANTS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gmpo": {"loss_type": "gmpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "vespo": {"loss_type": "vespo", "vespo_k_pos": 0.0, "vespo_k_neg": 0.0, "vespo_lambda_pos": 0.1},
    "dppo_tv": {"loss_type": "dppo_tv", "epsilon": 0.02},
    "ipo": {"loss_type": "ipo", "epsilon": 0.02, "epsilon_high": 0.03},
    "narrow ipo": {"loss_type": "ipo", "epsilon": 1.55e-3},
    "dppo_kl": {"loss_type": "dppo_kl", "epsilon": 0.02, "delta": 1.5},
    "dro": {"loss_type": "dro", "log_ratio_penalty": 0.1},
    "no ratio": {"loss_type": "dro", "log_ratio_penalty": 1e-20},
    "gpg": {"loss_type": "gpg"},
    "penalty": {"log_ratio_penalty": 0.1},
    "entropy bonus": {"entropy_coef": 0.01},
    "quantile": {"top_entropy_quantile": 0.5},
    "no weights": {"sampling_correction": None},
    "masked weights": {"sampling_correction": "token_mask", "sampling_clip_min": 0.7, "sampling_clip_max": 1.3},
    "weights between bounds": {"sampling_clip_min": 0.8, "sampling_clip_max": 1.2},
    "weights of sequences": {"sampling_correction": "sequence_truncate"},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
}


@pytest.mark.parametrize("mode", ["topk", "kept", "support"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_give_what_the_reference_gives(mode, variant):
    given = with_support(problem()) if mode == "support" else problem()
    config = config_of("topk" if mode == "topk" else "kept", **VARIANTS[variant])
    for head in ({}, {"softcap": 3.0}):
        given = given._replace(head=given.head | head)
        for frozen in (False, True):
            exact = solve(given, config, torch.float64, impl="reference", frozen=frozen)
            for chunk_bytes in (None, V * 4 * 9):
                ours = solve(given, config, torch.float32, impl="torch", frozen=frozen, chunk_bytes=chunk_bytes)
                assert_near(ours, exact)
            assert_near(solve(given, config, torch.float64, impl="torch", frozen=frozen), exact, tolerance=1e-10)


@pytest.mark.parametrize("mode", ["topk", "support"])
@pytest.mark.parametrize("variant", ["dapo", "sequence", "entropy bonus"])
def test_kernels_give_what_the_reference_gives(mode, variant):
    given = with_support(problem()) if mode == "support" else problem()
    config = config_of("topk" if mode == "topk" else "kept", **VARIANTS[variant])
    exact = solve(given, config, torch.float64, impl="reference")
    assert_near(solve(given, config, torch.float32, impl="triton", chunk_bytes=V * 4 * 20), exact)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("frozen", [False, True])
def test_bf16_loses_no_more_than_its_own_rounding(frozen, impl):
    given = problem()
    given = given._replace(leaves={name: x.bfloat16().double() for name, x in given.leaves.items()})
    exact = solve(given, config_of(), torch.float64, impl="reference", frozen=frozen)
    assert_near(solve(given, config_of(), torch.bfloat16, impl=impl, frozen=frozen), exact, tolerance=8e-3)


def every_token(sampler: Tensor, given: Problem, **head_of_sampler: Tensor) -> Problem:
    """One state, each token of the vocabulary sampled once, with its probability for an advantage."""
    hidden = given.leaves["hidden"][:1, :1].expand(1, V, D)
    loss = {"advantages": sampler.exp()[None], "sampling_logprobs": sampler[None]}
    loss |= {name: x.expand(1, V, -1) for name, x in head_of_sampler.items()}
    return Problem(given.leaves | {"hidden": hidden}, given.head | {"targets": torch.arange(V)[None]}, loss, sampler)


WEIGHTED = ["no weights", "dapo", "weights between bounds", "masked weights", "narrow ipo", "no ratio"]
# What dppo masks depends on p - q: in a tail that is a multiple of the policy's, on some tokens and not on others.
NARROW: dict[str, dict[str, Any]] = {
    "narrow dppo_tv": {"loss_type": "dppo_tv", "epsilon": 1.5e-3},
    "narrow dppo_kl": {"loss_type": "dppo_kl", "epsilon": 2e-4},
}
OF_MEANS = [*itertools.product(["topk", "kept"], WEIGHTED), *itertools.product(["kept"], NARROW)]


@pytest.mark.parametrize(("mode", "variant"), OF_MEANS)
def test_the_mean_of_the_gradient_over_the_sampler_is_zero(mode, variant):
    """Exactly so for a whole vocabulary, and for a tail that is a multiple of the policy's."""
    given, options = problem(drift=1.0), (VARIANTS | NARROW)[variant]
    log_p, sampler = log_p_of(given)[0], given.sampler[0, 0]
    if mode == "topk":
        tail = sampler.argsort()[:-K]
        mass = sampler[tail].exp().sum() / log_p[tail].exp().sum()
        sampler = sampler.index_copy(0, tail, log_p[tail] + mass.log())
        ids = sampler.argsort()[-K:]
    else:
        ids = torch.arange(V)
    asked = every_token(sampler, given, sampling_topk_ids=ids, sampling_topk_logprobs=sampler[ids])
    config = config_of(mode, **options)
    plain = solve(
        asked._replace(loss={k: v for k, v in asked.loss.items() if "topk" not in k}),
        GRPOLossConfig(**options),
        torch.float64,
        impl="torch",
    )
    centred = solve(asked, config, torch.float64, impl="torch")
    # Weights that are not cut have that mean already.
    assert variant == "dapo" or plain["weight"].abs().max() > 1e-5
    assert centred["weight"].abs().max() < 1e-14
    assert centred["hidden"].sum(1).abs().max() < 1e-14


@pytest.mark.parametrize("impl", IMPLS)
def test_on_policy_nothing_is_subtracted(impl):
    given = problem(drift=0.0)
    without = given._replace(loss={name: x for name, x in given.loss.items() if "topk" not in name})
    plain = solve(without, GRPOLossConfig(), torch.float32, impl=impl)
    centred = solve(given, config_of(), torch.float32, impl=impl)
    assert centred.pop("centering_l1") < 1e-5
    for name in ("centering_sampler_mass", "centering_trainer_mass"):
        assert 0 < centred.pop(name) < 1
    assert_near(centred, plain, tolerance=1e-4)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0])
def test_nor_where_almost_all_of_the_mass_is_known(gap, impl):
    """A tail of 1e-6 and less is a difference of roundings."""
    given = problem(drift=0.0)
    given.leaves["bias"][7:10] += gap
    top = log_p_of(given).view(B, T, V).topk(K, -1)
    given.head["targets"].copy_(top.indices[..., 1])
    loss = {"sampling_topk_ids": top.indices, "sampling_topk_logprobs": top.values}
    given = given._replace(loss=given.loss | loss | {"sampling_logprobs": top.values[..., 1]})
    for correction in (None, "token_truncate"):
        results = solve(given, config_of(sampling_correction=correction), torch.float32, impl=impl)
        assert results["centering_l1"] < 0.3


def test_a_token_that_is_almost_certain_keeps_the_gradients_of_the_others():
    """The factor of the softmax weights is 0 in fp32, and what is moved is not."""
    given = problem()
    given.leaves["bias"][7] += 200.0
    given.head["targets"].fill_(7)
    config = config_of("kept", sampling_correction=None)
    exact = solve(given, config, torch.float64, impl="reference")
    assert exact["hidden"].abs().max() > 1e-3
    for impl in IMPLS:
        assert_near(solve(given, config, torch.float32, impl=impl), exact)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_on_policy_nothing_is_subtracted_over_kept_tokens_either(impl):
    given = with_support(problem(drift=0.0))
    plain = given._replace(loss={name: x for name, x in given.loss.items() if "topk" not in name})
    centred = solve(given, config_of("kept"), torch.float64, impl=impl)
    assert centred.pop("centering_l1") < 1e-10
    for name in ("centering_sampler_mass", "centering_trainer_mass"):
        # Of two rows in three, but for those without a log-prob of the sampler.
        assert 0.6 < centred.pop(name) < 0.7
    assert_near(centred, solve(plain, GRPOLossConfig(), torch.float64, impl=impl), tolerance=1e-9)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_no_tokens_and_rows_without_a_support_are_no_error(impl):
    given = problem()
    nothing = {name: x[:, :0] if x.ndim > 1 else x for name, x in given.loss.items()}
    leaves = given.leaves | {"hidden": given.leaves["hidden"][:, :0]}
    none = Problem(leaves, given.head | {"targets": given.head["targets"][:, :0]}, nothing, given.sampler)
    empty = solve(none, config_of(), torch.float32, impl=impl)
    assert empty["loss"] == 0
    unrestricted = {"sampling_topk_ids": None, "sampling_topk_logprobs": torch.zeros(0)}
    unrestricted |= {"support": (torch.zeros(0, dtype=torch.int64), torch.zeros(B * T + 1, dtype=torch.int64))}
    free = given._replace(loss=given.loss | unrestricted)
    plain = given._replace(loss={name: x for name, x in given.loss.items() if "topk" not in name})
    ours = solve(free, config_of("kept"), torch.float64, impl=impl)
    assert ours.keys() == empty.keys()
    names = ("centering_sampler_mass", "centering_trainer_mass", "centering_l1")
    ours["centering_l1"] += 1.0  # a metric is the caller's, and no other one
    assert [ours.pop(name) for name in names] == [0, 0, 1]
    assert_near(ours, solve(plain, GRPOLossConfig(), torch.float64, impl=impl), tolerance=1e-9)


def test_a_kept_token_without_a_log_prob_leaves_its_row_uncentred():
    given = with_support(problem())
    given.loss["sampling_topk_logprobs"][[3, 20]] = torch.nan
    exact = solve(given, config_of("kept"), torch.float64, impl="reference")
    assert_near(solve(given, config_of("kept"), torch.float32, impl="torch"), exact)
    assert not exact["hidden"].isnan().any()


@pytest.mark.parametrize("gap", [50.0, 60.0, 70.0, 80.0, 87.0, 95.0, 110.0])
@pytest.mark.parametrize("num_tokens", [None, 1e6])
def test_what_is_moved_by_less_than_any_gradient_is_no_nan(num_tokens, gap):
    """On policy, a token that is certain is centred to a gradient of 0, beside those of the others near underflow."""
    given = problem()
    given.leaves["bias"][7] += gap
    given.head["targets"].fill_(7)
    top = log_p_of(given).view(B, T, V).topk(K, -1)
    head_of_sampler = {"sampling_topk_ids": top.indices, "sampling_topk_logprobs": top.values}
    sampling = {"sampling_logprobs": torch.zeros(B, T), "num_tokens": num_tokens}
    given = given._replace(loss=given.loss | head_of_sampler | sampling)
    for impl in IMPLS:
        ours = solve(given, config_of("kept", sampling_correction=None), torch.float32, impl=impl)
        for name in given.leaves:
            assert ours[name].abs().max() < 1e-15


def test_without_a_gradient_loss_and_metrics_are_the_same():
    for given in (problem(), with_support(problem())):
        for options in ({}, VARIANTS["sequence"]):
            config = config_of("kept", **options)
            exact = solve(given, config, torch.float64, impl="torch")
            with torch.no_grad():
                out = fused_linear_grpo_loss(**given.leaves, **given.head, **given.loss, config=config, impl="torch")
            for name, value in {"loss": out.loss, **out.metrics}.items():
                if name in exact:
                    torch.testing.assert_close(value, exact[name], rtol=1e-9, atol=1e-12)


def test_only_what_is_needed_leaves_rows_without_an_advantage_out():
    given = problem()
    given.loss["advantages"][1] = 0.0
    every, needed = (solve(given, config_of(), torch.float64, impl="torch", score=score) for score in ("all", "needed"))
    for name in ("loss", "hidden", "weight", "bias"):
        torch.testing.assert_close(every[name], needed[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("mode", ["topk", "kept", "support"])
@pytest.mark.parametrize("variant", ["dppo_tv", "sequence"])
def test_tokens_without_a_gradient_are_not_moved_by_centering_either(variant, mode, impl):
    given = with_support(problem()) if mode == "support" else problem()
    given.loss["advantages"][1] = 0.0
    config = config_of("topk" if mode == "topk" else "kept", **VARIANTS[variant])
    for score in ("all", "needed"):
        leaves = {name: x.float().requires_grad_() for name, x in given.leaves.items()}
        options = {"config": config, "impl": impl, "score": score, "chunk_bytes": V * 4 * 9}
        out = fused_linear_grpo_loss(**leaves, **given.head, **given.loss, **options)
        out.loss.backward()
        moved = (leaves["hidden"].grad != 0).any(-1).sum()
        tokens, share = out.metrics["loss_tokens"], out.metrics["zero_gradient_fraction"]
        assert 0 < moved < B * T - 4
        torch.testing.assert_close(tokens * (1 - share), moved.to(tokens.dtype))


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 4), st.integers(4, 9), st.integers(8, 90), st.integers(1, 8)),
    variant=st.sampled_from([*VARIANTS]),
    mode=st.sampled_from(["topk", "kept", "support"]),
    drift=st.sampled_from([0.0, 0.1, 3.0]),
    softcap=st.sampled_from([None, 5.0]),
)
def test_any_shape_and_option(seed, shape, variant, mode, drift, softcap):
    given = problem(seed, shape=shape, drift=drift)
    given = with_support(given, 3) if mode == "support" else given
    given = given._replace(head=given.head | {"softcap": softcap})
    config = config_of("topk" if mode == "topk" else "kept", **VARIANTS[variant])
    exact = solve(given, config, torch.float64, impl="reference")
    ours = solve(given, config, torch.float64, impl="torch", chunk_bytes=shape[2] * 8 * 3)
    assert_near(ours, exact, tolerance=1e-8)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no ids": ({}, {"sampling_topk_ids": None}, "sampling_topk_ids of dtype None"),
    "no log-probs": ({}, {"sampling_topk_logprobs": None}, "sampling_topk_logprobs of dtype None"),
    "neither": ({}, {"sampling_topk_ids": None, "sampling_topk_logprobs": None}, "fix: pass sampling_topk_ids"),
    "not asked for": ({"mode": "off"}, {}, "score_centering='off' with"),
    "no sampler": ({}, {"sampling_logprobs": None}, "without sampling_logprobs"),
    "other shapes": (
        {},
        {"sampling_topk_ids": torch.zeros(B, T, 2, dtype=torch.int64)},
        r"want both \(3, 14, K\)",
    ),
    "floating ids": ({}, {"sampling_topk_ids": torch.zeros(B, T, K)}, "of dtype torch.float32"),
    "an id twice": ({}, {"sampling_topk_ids": torch.zeros(B, T, K, dtype=torch.int32)}, "each once for a token"),
    "an id too large": ({}, {"sampling_topk_ids": torch.arange(V - K + 1, V + 1).expand(B, T, K)}, f"V={V}"),
    "an id below -1": ({}, {"sampling_topk_ids": torch.arange(-2, K - 2).expand(B, T, K)}, "or -1"),
    "more than certain": ({}, {"sampling_topk_logprobs": torch.full((B, T, K), 0.5)}, "got .* of 0.5, want log-probs"),
    "unknown mode": ({"mode": "top"}, {}, "want one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    given = problem()
    options, loss, said = BAD[case]
    with pytest.raises(InputError, match=said):
        solve(given._replace(loss=given.loss | loss), config_of(**options), torch.float32)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("mode", ["topk", "kept"])
def test_rows_that_are_not_scored_may_hold_anything_of_the_sampler(mode, value, impl):
    given = problem() if mode == "topk" else with_support(problem())
    ids, logprobs = given.loss["sampling_topk_ids"], given.loss["sampling_topk_logprobs"].clone()
    exact = solve(given, config_of(mode), torch.float64, impl=impl)
    for row in (0, T + T - 1, 2 * T + 1):  # ignored, masked, and without a log-prob of the sampler
        if mode == "topk":
            logprobs.view(-1, K)[row] = value
            ids.view(-1, K)[row] = V + 7
        else:
            logprobs[given.loss["support"][1][row] : given.loss["support"][1][row + 1]] = value
    given = given._replace(loss=given.loss | {"sampling_topk_logprobs": logprobs})
    assert_near(solve(given, config_of(mode), torch.float64, impl=impl), exact, tolerance=0)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("mode", ["topk", "kept"])
def test_tokens_that_the_policy_bans_move_nothing(mode, impl):
    """Their log-prob is -inf, which no gradient changes; the sampler knew nothing of it."""
    given = problem()
    banned = int(given.loss["sampling_topk_ids"][1, 0, 1])
    given.loss["sampling_topk_ids"][given.loss["sampling_topk_ids"] == banned] = -1
    targets = given.head["targets"].masked_fill(given.head["targets"] == banned, -100)
    bias = given.leaves["bias"].clone()
    bias[banned] = -torch.inf
    without = given._replace(leaves={**given.leaves, "bias": bias}, head={**given.head, "targets": targets})
    ids = without.loss["sampling_topk_ids"].clone()
    ids[1, 0, 1] = banned
    with_it = without._replace(loss={**without.loss, "sampling_topk_ids": ids})
    config = config_of(mode, sampling_correction=None)
    one, other = (solve(each, config, torch.float32, impl=impl) for each in (without, with_it))
    assert one["loss"].isfinite()
    for name in ("loss", "hidden", "weight"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7)


def test_what_does_not_go_together_is_refused():
    given, ids = with_support(problem()), problem().loss["sampling_topk_ids"]
    short = given.loss["sampling_topk_logprobs"][1:]
    for config, loss, error, said in (
        (config_of(), {}, UnsupportedError, "'topk' with a support"),
        (config_of("kept"), {"sampling_topk_ids": ids}, InputError, "sampling_topk_ids with a support"),
        (config_of("kept"), {"sampling_topk_logprobs": short}, InputError, "one for each token of the support"),
    ):
        with pytest.raises(error, match=said):
            solve(given._replace(loss=given.loss | loss), config, torch.float32)
    with pytest.raises(UnsupportedError, match="fix: fused_linear_grpo_loss"):
        grpo_loss(torch.zeros(1, 2), advantages=torch.ones(1), config=config_of())
