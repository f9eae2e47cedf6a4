"""Clip-Cov and KL-Cov select from the whole step: its cut into micro-batches changes nothing."""

from typing import Any

import pytest
import torch
from batches import batch_of, column

from fused_grpo import GRPOLossConfig
from fused_grpo._maths.factors import select_by_covariance
from fused_grpo.trainer.types import Sample

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -1.0, -0.7, -0.3, 0.9, -0.9, 0.2, -0.2, 1.5, -0.5, -0.5, -0.5]
SHARE = 0.05
RULES: dict[str, dict[str, Any]] = {
    "Clip-Cov": {"clip_cov_ratio": SHARE, "clip_cov_lb": 0.0},
    "KL-Cov": {"kl_cov_ratio": SHARE},
}


@pytest.fixture(scope="module")
def batch() -> list[Sample]:
    """Uneven completions, two to a prompt, of a policy that has moved since."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (len(ADVANTAGES),), generator=generator).tolist()
    return batch_of(
        prompt_ids=[[2 + index // 2] * (1 + index // 2 % 4) for index in range(len(ADVANTAGES))],
        completion_ids=[torch.randint(2, 20, (length,), generator=generator).tolist() for length in lengths],
        sampling_logprobs=None,
        advantage=torch.tensor(ADVANTAGES),
        old_logprobs=[-3 - torch.rand(length, generator=generator) for length in lengths],
    )


def step(make_trainer: Any, batch: list[Sample], size: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a step with micro-batches of `size` sequences, and the number of selected tokens."""
    batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size}
    trainer = make_trainer(optim="sgd", learning_rate=0.0, max_grad_norm=None, **batches, **options)
    results, inner = {"selected": torch.tensor(0)}, trainer.learner.policy._loss

    def loss(part: Any, **options: Any) -> Any:
        results["selected"] = results["selected"] + part.covariance_selected.sum()
        return inner(part, **options)

    def keep(name: str) -> None:
        if name == "on_pre_optimizer_step":
            results["gradient"] = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    trainer.learner.policy._loss = loss
    trainer.learner.learn(batch, event=keep)
    return results["gradient"], results["selected"]


@pytest.mark.parametrize("rule", RULES)
def test_the_cut_into_micro_batches_leaves_no_trace(make_trainer, batch, rule):
    whole, count = step(make_trainer, batch, 16, **RULES[rule])
    assert count == int(SHARE * sum(map(len, column(batch, "completion_ids"))))
    for size in (1, 4):
        gradient, same = step(make_trainer, batch, size, **RULES[rule])
        assert same == count
        assert (gradient - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_tokens_leaves_no_trace(rule):
    config, generator = GRPOLossConfig(**RULES[rule]), torch.Generator().manual_seed(0)
    logprobs, advantages, clipped = (torch.randn(99, generator=generator) for _ in range(3))
    order = torch.randperm(99, generator=generator)
    selected = select_by_covariance(logprobs, advantages, clipped > 1, config)
    again = select_by_covariance(logprobs[order], advantages[order], clipped[order] > 1, config)
    assert torch.equal(again, selected[order])
    assert selected.sum() == int(SHARE * 99)
    nothing = torch.zeros(0)
    assert len(select_by_covariance(nothing, nothing, nothing > 0, config)) == 0
