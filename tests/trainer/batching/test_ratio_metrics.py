"""Metrics of ratios: by hand, and the same however a step is cut. tests/trainer/collect compares them with TRL's."""

import pytest
import torch
from batches import batch_of

from fused_grpo.config import GRPOLossConfig
from fused_grpo.trainer.batching.micro_batch_metrics import means, merge_metrics, ratio_sums
from fused_grpo.trainer.batching.micro_batches import Packing, micro_batches

NAN = float("nan")
OLD = [[-1.0, -2.0], [-0.5], [-3.0, -1.0, -2.0]]
SAMPLING = [[-1.5, NAN], [-0.25], [-5.0, -1.0, -2.5]]
NEW = [[-1.5, -2.0], [-0.25], [-3.0, -0.9, -1.0]]  # ratios e^-0.5, 1; e^0.25; 1, e^0.1, e
BATCH = batch_of(
    prompt_ids=[[1]] * 3,
    completion_ids=[[2] * len(row) for row in OLD],
    sampling_logprobs=SAMPLING,
    advantage=torch.tensor([-1.0, 1.0, 1.0]),
    old_logprobs=[torch.tensor(row) for row in OLD],
)


def measured(sequences: int, **options) -> dict[str, float]:
    config = GRPOLossConfig(**{"sampling_correction": "token_truncate", "sampling_clip_max": 3.0, **options})
    parts = micro_batches(
        BATCH, Packing(one_row=True, sequences=sequences), device=torch.device("cpu"), agree=lambda count: count + 1
    )
    rows = [[value for index in part.sequence_index.tolist() for value in NEW[index]] for part in parts]
    sums = [ratio_sums(part, torch.tensor(row), config) for part, row in zip(parts, rows, strict=True)]
    return means(merge_metrics(sums))


def test_shares_are_of_tokens_and_extremes_of_sequences():
    metrics = measured(3)
    clips = {"low_mean": 1 / 6, "low_min": 0.0, "high_mean": 2 / 6, "high_max": 1.0, "region_mean": 3 / 6}
    assert {name: metrics[f"clip_ratio/{name}"] for name in clips} == pytest.approx(clips)
    metrics = measured(3, importance_sampling_level="sequence", epsilon=0.21)  # e^-0.25, e^0.25, e^0.367
    clips = {"low_mean": 1 / 3, "low_min": 0.0, "high_mean": 2 / 3, "high_max": 1.0, "region_mean": 1.0}
    assert {name: metrics[f"clip_ratio/{name}"] for name in clips} == pytest.approx(clips)


def test_the_sampler_is_compared_with_the_old_policy_where_it_is_known():
    metrics = measured(3)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx((0.5 + 0.25 + 2.0 + 0.0 + 0.5) / 5)
    assert metrics["sampling/sampling_logp_difference/max"] == 2.0
    apart = torch.tensor([0.5, -0.25, 2.0, 0.0, 0.5])  # of the policy's log-probs from the sampler's
    assert metrics["sampling/mismatch_kl"] == pytest.approx((apart.exp() - 1 - apart).mean().item())
    assert metrics["sampling/bit_equal_fraction"] == pytest.approx(1 / 5)  # of the tokens whose log-prob is known
    rho = torch.tensor([0.5, 0.0, -0.25, 2.0, 0.0, 0.5]).exp().clamp(max=3.0)
    for name in ("min", "mean", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(getattr(rho, name)().item())
    effective = rho.sum() ** 2 / (6 * rho.square().sum())
    assert metrics["sampling/effective_sample_size"] == pytest.approx(effective.item())
    assert effective < 0.9
    metrics, rho = measured(3, sampling_correction="sequence_mask"), torch.tensor([0.5, -0.25]).exp()
    assert metrics["sampling/importance_sampling_ratio/min"] == 0.0  # e^2.5 is beyond the bound
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(rho.sum().item() / 3)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_the_cut_changes_nothing(loss_type):
    assert measured(1, loss_type=loss_type) == pytest.approx(measured(3, loss_type=loss_type))
