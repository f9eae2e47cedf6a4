"""Every variant of the loss: one definition for all paths, and no trace of how a step was cut into calls."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, grpo_loss, linear_logprobs_and_entropy
from fused_grpo.config import BOUNDED, CORRECTIONS, LEVELS, LOSS_TYPES, OF_SAMPLER

pytestmark = pytest.mark.grid

B, T, D, V = 6, 7, 5, 11
# A whole step holds a sequence without any token, one that was cut off entirely, and holes where tools spoke.
LENGTHS = torch.tensor([7, 3, 5, 0, 1, 6])
OPTIONS = {
    "plain": {},
    "high": {"epsilon_high": 0.28},
    "delta": {"delta": 1.1},
    "kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "corrected kl": {"beta": 0.1},
    "k1": {"beta": 0.1, "kl_estimator": "k1"},
    "k2": {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "penalty": {"log_ratio_penalty": 0.2},
    "bonus": {"entropy_coef": 0.1},
    "quantile": {"top_entropy_quantile": 0.4},
    "quantile and bonus": {"top_entropy_quantile": 0.4, "entropy_coef": 0.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.1},
    "clip-cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.01},
    "kl-cov": {"kl_cov_ratio": 0.3},
    "rejection": {
        "sequence_rejection": "geometric_ratio",
        "sequence_rejection_min": 0.9,
        "sequence_rejection_max": 1.1,
    },
    "rejection by k3": {"sequence_rejection": "k3", "sequence_rejection_max": 0.06},
    "only measured": {"sampling_correction": None},
    **{name: {"sampling_correction": name, "sampling_clip_max": 1.3, "sampling_clip_min": 0.7} for name in CORRECTIONS},
}


# Types that differ in what they divide by share all else with dapo: each option is tried with that, a few with all.
DIVISORS_ALONE = ("grpo", "bnpo", "dr_grpo", "luspo")
FEW = ("plain", "corrected kl", "quantile and bonus", "sequence_mask")


def configs():
    for loss_type, level, name in itertools.product(LOSS_TYPES, LEVELS, OPTIONS):
        options = OPTIONS[name]
        if loss_type not in BOUNDED and name == "delta":
            continue
        if loss_type in ("vespo", *OF_SAMPLER) and name.startswith("sequence"):
            continue
        if loss_type in ("gmpo", *OF_SAMPLER) and level == "sequence":
            continue
        options = {"max_completion_length": 9, "importance_sampling_level": level, **options}
        if loss_type == "cispo":
            options["epsilon_high"] = 1.1
        elif loss_type == "dro":
            options["log_ratio_penalty"] = 0.2
        marks = pytest.mark.full if loss_type in DIVISORS_ALONE and name not in FEW else ()
        yield pytest.param(
            GRPOLossConfig(loss_type=loss_type, **options), id=f"{loss_type}-{level}-{name}", marks=marks
        )


def step(dtype=torch.float64, *, seed=0):
    """Leaves and the rest of a whole optimizer step, padded."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = {"hidden": normal(B, T, D), "weight": normal(V, D)}
    targets = torch.randint(V, (B, T), generator=generator)
    near = torch.log_softmax(leaves["hidden"] @ leaves["weight"].t(), -1).gather(-1, targets[..., None])[..., 0]
    rest = {name: near + 0.4 * normal(B, T) for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs")}
    rest["mask"] = (torch.arange(T) < LENGTHS[:, None]) & (torch.rand(B, T, generator=generator) > 0.15)
    rest["advantages"] = torch.tensor([1.0, -2.0, 0.0, 1.0, 0.5, -0.5], dtype=torch.float64)
    leaves = {name: x.to(dtype).requires_grad_() for name, x in leaves.items()}
    rest = {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in rest.items()}
    return leaves, {"targets": targets, **rest}


def solve(leaves, rest, op=fused_linear_grpo_loss, **options):
    """(loss, gradients, metrics) of one call; of `grpo_loss` on log-probs that autograd goes on from."""
    if op is grpo_loss:
        targets = rest["targets"]
        logprobs, entropy = linear_logprobs_and_entropy(**leaves, targets=targets, impl="reference")
        others = {name: x for name, x in rest.items() if name != "targets"}
        out = grpo_loss(logprobs, entropy=entropy, **others, **options)
    else:
        out = op(**leaves, **rest, **options)
    gradients = torch.autograd.grad(out.loss * 3, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return [out.loss.detach(), *gradients], out.metrics


def assert_close(ours, expected, tolerance):
    for one, other in zip(ours, expected, strict=True):
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm().clamp_min(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_the_default_dtype_changes_no_bit(impl, dtype):
    """Those who load a model in bf16 set it; constants of a loss are not rounded to it."""
    leaves, rest = step(torch.float32)
    plain = [config for config in configs() if config.id.endswith("-plain")]
    assert len(plain) > len(LOSS_TYPES)
    for config in plain:
        options = {"config": config.values[0], "impl": impl}
        expected, metrics = solve(leaves, rest, **options)
        torch.set_default_dtype(dtype)
        try:
            ours, own = solve(leaves, rest, **options)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(map(torch.equal, [*ours, *own.values()], [*expected, *metrics.values()])), config.id


@pytest.mark.parametrize("config", list(configs()))
def test_all_paths_give_the_loss_and_gradients_of_the_reference(config):
    leaves, rest = step()
    expected, metrics = solve(leaves, rest, config=config, impl="reference")
    assert all(x.isfinite().all() for x in expected)
    # Chunks of all rows, of one row, and log-probs from elsewhere.
    for op, options in (
        (fused_linear_grpo_loss, {"impl": "torch"}),
        (fused_linear_grpo_loss, {"impl": "torch", "chunk_bytes": 8 * V * 9}),
        (grpo_loss, {"impl": "torch"}),
        (grpo_loss, {"impl": "reference"}),
    ):
        ours, our_metrics = solve(leaves, rest, op, config=config, **options)
        assert_close(ours, expected, 1e-10)
        for name in our_metrics.keys() - {"recomputed_fraction"}:
            assert_close([our_metrics[name]], [metrics[name]], 1e-10)


INTERPRETED = [
    c
    if c.id.startswith("dapo-token") or c.id.endswith(FEW[1:])
    else pytest.param(*c.values, id=c.id, marks=pytest.mark.full)
    for c in configs()
    if not c.id.startswith(DIVISORS_ALONE)
]


@pytest.mark.parametrize("config", INTERPRETED)
def test_triton_gives_them_too(config):
    leaves, rest = step()
    expected, metrics = solve(leaves, rest, config=config, impl="reference")
    ours, our_metrics = solve(*step(torch.float32), config=config, impl="triton", chunk_bytes=4 * V * 24)
    assert_close(ours, expected, 1e-5)
    for name in metrics.keys() - {"recomputed_fraction"}:
        assert_close([our_metrics[name]], [metrics[name]], 1e-5)


def of_the_step(rest, config):
    """Which tokens of the whole step a covariance selects, whatever it is: a call on a part of it needs to be told."""
    selected = torch.arange(B * T).view(B, T) % 3 == 0
    return {**rest, "covariance_selected": selected} if config.selects_by_covariance else rest


def counts_of_the_step(rest, config):
    """The normalisers that a call on a part of a step needs."""
    counts = {"num_tokens": rest["mask"].sum(), "num_sequences": B}
    if config.top_entropy_quantile < 1.0:
        counts |= {"entropy_threshold": 1.5, "num_entropy_tokens": 7.0}
    return counts


@pytest.mark.parametrize("config", list(configs()))
def test_the_cut_into_calls_and_the_layout_leave_no_trace(config):
    leaves, rest = step()
    counts, rest = counts_of_the_step(rest, config), of_the_step(rest, config)
    whole, _ = solve(leaves, rest, config=config, **counts)
    cuts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    parts = []
    for cut in cuts:
        cut_leaves = {**leaves, "hidden": leaves["hidden"][cut]}
        parts.append(solve(cut_leaves, {name: x[cut] for name, x in rest.items()}, config=config, **counts)[0])
    assert_close([sum(part[0] for part in parts)], whole[:1], 1e-12)
    assert_close([torch.cat([part[1] for part in parts]), sum(part[2] for part in parts)], whole[1:], 1e-12)

    # Padding moves, and a packed row has none at all.
    wider = {name: torch.nn.functional.pad(x, (0, 2)) if x.ndim == 2 else x for name, x in rest.items()}
    hidden = torch.nn.functional.pad(leaves["hidden"], (0, 0, 0, 2))
    padded, _ = solve({**leaves, "hidden": hidden}, wider, config=config, **counts)
    assert_close([padded[0], padded[1][:, :T], padded[2]], whole, 1e-12)
    inside = torch.arange(T) < LENGTHS[:, None]
    packed = {name: x[inside] if x.ndim == 2 else x for name, x in rest.items()}
    packed["cu_seqlens"] = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)).int()
    flat, _ = solve({**leaves, "hidden": leaves["hidden"][inside]}, packed, config=config, **counts)
    assert_close([flat[0], flat[1], flat[2]], [whole[0], whole[1][inside], whole[2]], 1e-12)


@pytest.mark.parametrize("config", list(configs()))
def test_tokens_that_need_not_be_scored_change_nothing(config):
    leaves, rest = step()
    everyone, metrics = solve(leaves, rest, config=config, chunk_bytes=8 * V * 24)
    needed, fewer = solve(leaves, rest, config=config, chunk_bytes=8 * V * 24, score="needed")
    assert_close(needed, everyone, 1e-14)
    needs_every_token = config.beta or config.entropy_coef or config.selects_by_covariance or config.log_ratio_penalty
    if not (needs_every_token or config.top_entropy_quantile < 1.0):
        assert fewer["loss_tokens"] == metrics["loss_tokens"] - rest["mask"][2].sum()


@settings(derandomize=True, deadline=None, max_examples=50, database=None)
@given(
    loss_type=st.sampled_from(LOSS_TYPES),
    options=st.fixed_dictionaries(
        {"max_completion_length": st.just(9), "importance_sampling_level": st.sampled_from(LEVELS)},
        optional={
            "epsilon": st.floats(0, 1.5),
            "epsilon_high": st.floats(0, 1),
            "beta": st.floats(0, 1),
            "log_ratio_penalty": st.floats(0.01, 1),
            "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
            "use_bias_correction_kl": st.booleans(),
            "sampling_correction": st.sampled_from([None, "token_truncate", "token_mask"]),
            "sampling_clip_max": st.floats(1, 2),
            "off_policy_mask_threshold": st.floats(0, 0.3),
            "top_entropy_quantile": st.floats(0.2, 1),
            "entropy_coef": st.floats(0, 1),
            "kl_cov_ratio": st.floats(0, 1),
        },
    ),
    without=st.sets(st.sampled_from(["old_logprobs", "sampling_logprobs", "mask"])),
    per_token=st.booleans(),
    rows=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_options_in_any_company_are_those_of_the_reference(loss_type, options, without, per_token, rows, seed):
    leaves, rest = step(seed=seed)
    rest = {name: x for name, x in rest.items() if name not in without}
    if per_token:
        rest["advantages"] = rest["advantages"][:, None] * torch.arange(T).remainder(3)
    if loss_type == "dro":
        options.setdefault("log_ratio_penalty", 0.2)
    if loss_type in OF_SAMPLER:
        options["importance_sampling_level"] = "token"
    config = GRPOLossConfig(loss_type=loss_type, **options)
    expected, _ = solve(leaves, rest, config=config, impl="reference")
    for score in ("all", "needed"):
        ours, _ = solve(leaves, rest, config=config, impl="torch", chunk_bytes=8 * V * rows, score=score)
        assert_close(ours, expected, 1e-10)
