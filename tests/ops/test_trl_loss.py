"""TRL's own loss, `GRPOTrainer._compute_loss`, on the same tensors: loss, gradients and metrics of every loss type.

`trl_loss.py` has the batches and runs it.
"""

import pytest
import torch
import trl_loss

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, grpo_loss
from fused_grpo.config import CLIPPED, LEVELS, TRL_LOSS_TYPES

pytestmark = pytest.mark.grid

B, T, V, RHO, OPTIONS = trl_loss.B, trl_loss.T, trl_loss.V, trl_loss.RHO, trl_loss.OPTIONS
EVERYTHING = [
    (x, level, option)
    for x in TRL_LOSS_TYPES
    for level in LEVELS
    for option in OPTIONS
    if trl_loss.goes_with(x, option)
]


@pytest.fixture(scope="module")
def trainer_class() -> type:
    """TRL's trainer. vLLM is hidden from TRL: importing it takes longer than all these tests."""
    import_utils = pytest.importorskip("trl.import_utils", reason="TRL is not installed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def of_ours(batch: trl_loss.Batch, config: GRPOLossConfig, path: str, **counts: float) -> trl_loss.Result:
    """`how`: from "log-probs", or "log-probs in triton"; fused, the "reference", and in chunks of five rows "torch", or
    "needed", where only tokens that may have a gradient are scored."""
    inputs = {"advantages": batch.advantages, "mask": batch.mask, "config": config, "old_logprobs": batch.old, **counts}
    inputs |= {"ref_logprobs": batch.ref, "sampling_logprobs": batch.sampling}
    leaves = (batch.hidden, batch.weight, batch.targets)
    if path.startswith("log-probs"):
        logprobs, entropy = trl_loss.head(*leaves)
        output = grpo_loss(logprobs, entropy=entropy, **inputs, impl="torch" if path == "log-probs" else "triton")
    elif path == "reference":
        output = fused_linear_grpo_loss(*leaves, **inputs, impl="reference")
    else:
        chunk = {"chunk_bytes": 5 * V * batch.hidden.element_size(), "impl": "torch"}
        output = fused_linear_grpo_loss(*leaves, **inputs, **chunk, score="needed" if path == "needed" else "all")
    return trl_loss.differentiated(output.loss, batch, output.metrics)


def assert_same(ours: trl_loss.Result, expected: trl_loss.Result, tolerance: float) -> None:
    for name in ("loss", "hidden", "weight"):
        one, other = getattr(ours, name), getattr(expected, name)
        error = ((one - other).norm() / other.norm()).item()
        assert error <= tolerance, f"{name}: {error:.2e} from TRL's, relative to its norm {other.norm():.2e}"


@pytest.mark.parametrize(("loss_type", "level", "option"), EVERYTHING)
def test_in_fp64_they_are_trls_to_ten_digits(trainer_class, loss_type, level, option):
    config, batch = trl_loss.config_of(loss_type, level, option), trl_loss.make_batch(option)
    trl_result = trl_loss.of_trl(trainer_class, batch, config)
    assert trl_result.loss.dtype == torch.float64
    for path in ("reference", "torch", "needed", "log-probs"):
        assert_same(of_ours(batch, config, path), trl_result, 1e-10)


# Each costs as much as three of the others: these options differ in the arguments of the kernel.
IN_TRITON = ("nothing", "delta", "kl without bias correction", "token_mask", "on policy", "all for tokens")


@pytest.mark.parametrize(("loss_type", "level", "option"), [x for x in EVERYTHING if x[2] in IN_TRITON])
def test_in_interpreted_triton_they_are_trls(trainer_class, loss_type, level, option):
    config, batch = trl_loss.config_of(loss_type, level, option), trl_loss.make_batch(option, torch.float32)
    trl_result = trl_loss.of_trl(trainer_class, batch, config)
    assert_same(of_ours(batch, config, "log-probs in triton"), trl_result, 1e-5)


@pytest.mark.parametrize(("loss_type", "level", "option"), [x for x in EVERYTHING if x[2] != "nothing"])
def test_each_option_makes_a_difference_to_trl(trainer_class, loss_type, level, option):
    without = trl_loss.of_trl(trainer_class, trl_loss.make_batch(), trl_loss.config_of(loss_type, level, "nothing"))
    with_it = trl_loss.of_trl(trainer_class, trl_loss.make_batch(option), trl_loss.config_of(loss_type, level, option))
    differences = [(getattr(with_it, x) - getattr(without, x)).norm().item() for x in ("loss", "weight")]
    # A sequence may be left out that was clipped before: only the loss tells.
    assert max(differences) > 1e-3


def test_the_numbers_cross_every_bound_from_both_sides():
    batch = trl_loss.make_batch("token_mask")
    config, on = trl_loss.config_of("grpo", "token", "delta"), batch.mask.bool()
    low, high, delta = 1 - config.epsilon, 1 + config.epsilon_high, config.delta
    change = (trl_loss.head(batch.hidden, batch.weight, batch.targets)[0] - batch.old).detach() * batch.mask
    mean_change = (change.sum(-1) / batch.mask.sum(-1))[:, None].expand(B, T)
    good = (batch.advantages > 0)[:, None]
    for ratio in (change.exp(), mean_change.exp()):
        for where in (good & (ratio < low), good & (ratio > high), ~good & (ratio < low), ~good & (ratio > delta)):
            assert (where & on).any()
    correction = torch.nan_to_num((batch.old - batch.sampling) * batch.mask, nan=0.0)
    for rho in (correction[on].exp(), correction.sum(-1).exp()):
        least, most = RHO["sampling_clip_min"], RHO["sampling_clip_max"]
        assert (rho < least).any()
        assert (rho > most).any()
        assert ((rho > least) & (rho < most)).any()
    assert not on.all()
    assert batch.sampling[on].isnan().any()


METRICS = {
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    "clip_ratio/region_mean": "clip_ratio_region",
    "cispo_clip_ratio": "clip_ratio_high",
    "policy_loss": "policy_term",
}
# Not with "kl": TRL reports it times the ratio, ours is the estimate itself.
MEASURED = ("nothing", "delta", "kl without bias correction", "token_mask", "tools", "off-policy mask", "entropy bonus")
MEASURED += ("truncated", "advantages of tokens", "on policy")


@pytest.mark.parametrize("path", ["torch", "log-probs"])
@pytest.mark.parametrize(
    ("loss_type", "option"), [(x, o) for x in (*CLIPPED, "cispo") for o in MEASURED if trl_loss.goes_with(x, o)]
)
def test_metrics_are_trls(trainer_class, loss_type, option, path):
    config, batch = trl_loss.config_of(loss_type, "token", option), trl_loss.make_batch(option, torch.float32)
    trl_metrics, ours = trl_loss.of_trl(trainer_class, batch, config).metrics, of_ours(batch, config, path).metrics
    shared = METRICS.keys() & trl_metrics.keys()
    clips = {"cispo_clip_ratio"} if loss_type == "cispo" else {x for x in METRICS if x.startswith("clip_ratio")}
    expected = {"entropy"} | clips | ({"kl"} if config.beta else set())
    assert shared == expected | ({"policy_loss"} if config.entropy_coef else set())
    for name in shared:
        assert ours[METRICS[name]] == pytest.approx(trl_metrics[name], rel=1e-5), name


def micro_batches(cut: int) -> tuple[trl_loss.Batch, list[trl_loss.Batch]]:
    """The whole step, and its sequences before and after the cut."""
    batch = trl_loss.make_batch("kl")
    return batch, [batch.part(slice(0, cut)), batch.part(slice(cut, B))]


def summed(results: list[trl_loss.Result], factors: tuple[float, ...] = (1.0, 1.0)) -> trl_loss.Result:
    """Of the micro-batches of a step, which share the weight but not the hidden states."""
    loss, weight = (
        sum(f * x for f, x in zip(factors, xs, strict=True))
        for xs in zip(*((r.loss, r.weight) for r in results), strict=True)
    )
    return trl_loss.Result(loss, torch.cat([f * r.hidden for f, r in zip(factors, results, strict=True)]), weight, {})


def step_of_ours(batch: trl_loss.Batch, parts: list[trl_loss.Batch], config: GRPOLossConfig) -> trl_loss.Result:
    counts = {"num_tokens": int(batch.mask.sum()), "num_sequences": B}
    counts["num_entropy_tokens"] = counts["num_tokens"]
    ours = summed([of_ours(part, config, "torch", **counts) for part in parts])
    assert_same(ours, of_ours(batch, config, "torch"), 1e-10)
    return ours


def step_of_trl(
    trainer_class: type, batch: trl_loss.Batch, parts: list[trl_loss.Batch], config: GRPOLossConfig
) -> list[trl_loss.Result]:
    options = {"accumulation_steps": len(parts), "num_tokens": int(batch.mask.sum())}
    return [trl_loss.of_trl(trainer_class, part, config, **options) for part in parts]


@pytest.mark.parametrize("loss_type", [x for x in TRL_LOSS_TYPES if x != "bnpo"])
@pytest.mark.parametrize("level", LEVELS)
def test_micro_batches_of_as_many_sequences_add_up_to_trls_step(trainer_class, loss_type, level):
    (batch, parts), config = micro_batches(2), trl_loss.config_of(loss_type, level, "kl")
    trl_step = summed(step_of_trl(trainer_class, batch, parts, config))
    assert_same(step_of_ours(batch, parts, config), trl_step, 1e-10)
    assert_same(trl_loss.of_trl(trainer_class, batch, config), trl_step, 1e-10)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_a_mean_over_the_steps_tokens_is_trls_however_the_step_is_cut(trainer_class, loss_type):
    (batch, parts), config = micro_batches(3), trl_loss.config_of(loss_type, "token", "kl")
    trl_step = summed(step_of_trl(trainer_class, batch, parts, config))
    assert_same(step_of_ours(batch, parts, config), trl_step, 1e-10)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo", "sapo", "bnpo"])
def test_where_trl_averages_micro_batches_ours_weighs_them_by_their_size(trainer_class, loss_type):
    """TRL: the mean over micro-batches. Ours: each counts by its share of the step's tokens or sequences."""
    (batch, parts), config = micro_batches(3), trl_loss.config_of(loss_type, "token", "kl")
    trl_step, ours = step_of_trl(trainer_class, batch, parts, config), step_of_ours(batch, parts, config)
    sizes = [int(part.mask.sum()) if loss_type == "bnpo" else len(part.mask) for part in parts]
    assert_same(ours, summed(trl_step, tuple(len(parts) * size / sum(sizes) for size in sizes)), 1e-10)
    assert_same(ours, trl_loss.of_trl(trainer_class, batch, config), 1e-10)
    assert (summed(trl_step).weight - ours.weight).norm() > 1e-2 * ours.weight.norm()


def test_the_entropy_bonus_is_a_mean_per_step_and_trls_per_micro_batch(trainer_class):
    batch, parts = micro_batches(2)
    config = trl_loss.config_of("dapo", "token", "entropy bonus")
    trl_step, ours = step_of_trl(trainer_class, batch, parts, config), step_of_ours(batch, parts, config)
    without = step_of_trl(trainer_class, batch, parts, trl_loss.config_of("dapo", "token", "nothing"))
    bonus = [x.loss - y.loss for x, y in zip(trl_step, without, strict=True)]
    sizes = [int(part.mask.sum()) for part in parts]
    weighed = sum(2 * size / sum(sizes) * x for size, x in zip(sizes, bonus, strict=True))
    torch.testing.assert_close(ours.loss, sum(x.loss for x in without) + weighed, rtol=1e-10, atol=0)
    assert (sum(bonus) - weighed).abs() > 1e-3 * weighed.abs()
