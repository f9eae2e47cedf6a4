"""The metrics of a step: merged as if there were one micro-batch."""

import math

import pytest
import torch

from fused_grpo.trainer.batching.micro_batch_metrics import merge_metrics


def test_merged_metrics_are_those_of_the_batch_in_one_piece() -> None:
    torch.manual_seed(0)
    kl, ratio, sizes = torch.rand(12), torch.rand(12), (1, 8, 3)

    def described(kl: torch.Tensor, ratio: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "loss_tokens": torch.tensor(float(len(kl))),
            "loss": kl.sum(),
            "kl": kl.mean(),
            "ratio_max": ratio.max(),
            "ratio_min": ratio.min(),
        }

    parts = [described(a, b) for a, b in zip(kl.split(sizes), ratio.split(sizes), strict=True)]
    whole = {name: value.item() for name, value in described(kl, ratio).items()}
    merged = merge_metrics(parts)
    assert list(merged) == list(whole)
    assert merged == pytest.approx(whole, rel=1e-6)


def test_a_micro_batch_without_tokens_changes_nothing_whatever_it_holds() -> None:
    full = {
        "loss_tokens": torch.tensor(4.0),
        "kl": torch.tensor(0.5),
        "loss": torch.tensor(2.0),
        "r_max": torch.tensor(3.0),
    }
    empty = {
        "loss_tokens": torch.tensor(0.0),
        "kl": torch.tensor(math.nan),
        "loss": torch.tensor(0.0),
        "r_max": -torch.inf * torch.ones(()),
    }
    assert merge_metrics([empty, full]) == {name: value.item() for name, value in full.items()}


def test_a_metric_that_some_micro_batches_lack_is_the_mean_of_the_others() -> None:
    first = {"loss_tokens": torch.tensor(1), "kl": torch.tensor(1.0)}
    second = {"loss_tokens": torch.tensor(3), "kl": torch.tensor(2.0), "entropy": torch.tensor(0.7)}
    merged = merge_metrics([first, second])
    assert merged == pytest.approx({"loss_tokens": 4.0, "kl": 1.75, "entropy": 0.7})
    assert merge_metrics([]) == {}


def test_merging_waits_for_the_device_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _n=name, _r=real: (waits.append(_n), _r(self, *a))[1])
    merge_metrics([{"loss_tokens": torch.tensor(2.0), "kl": torch.tensor(0.1), "r_min": torch.tensor(0.9)}] * 50)
    assert waits == ["tolist"]
