"""Losses, rejections and estimators that TRL does not have, in whole runs: options reach the loss, which learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CORRECTED = {"num_iterations": 2, "learning_rate": 1e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "gmpo": {"loss_type": "gmpo", "epsilon": 0.4, **CORRECTED},
    "dppo": {"loss_type": "dppo_tv", "delta": 9.0, "beta": 0.01, **CORRECTED},
    "dppo by KL": {"loss_type": "dppo_kl", "epsilon": 0.05, **CORRECTED},
    "icepop": {"vllm_importance_sampling_mode": "icepop"},
    "rejection": {"sequence_rejection": "k3", "sequence_rejection_max": 0.5, **CORRECTED},
    "clip-cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "gradient_accumulation_steps": 2, **CORRECTED},
    "kl-cov": {"kl_cov_ratio": 0.1, "top_entropy_quantile": 0.9, **CORRECTED},
    "rloo": {"advantage_estimator": "rloo"},
    "maxrl": {"advantage_estimator": "maxrl"},
    "reinforce++, groups of one": {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_learns_with_it(make_trainer, served_engine, options):
    trainer = make_trainer(engine=served_engine, **options)
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    config = trainer.learner.loss_config
    for name, value in options.items():
        assert getattr(config, name, value) == value
    assert (config.sampling_clip_min == 0.5) is ("vllm_importance_sampling_mode" in options)
    metrics = trainer.train().metrics
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert after.isfinite().all()
    assert not torch.equal(before, after)
    assert metrics["step"] == trainer.args.max_steps
    if options.get("loss_type") in ("gmpo", "dppo_tv", "dppo_kl"):
        assert 0 <= metrics["clip_ratio/region_mean"] < 1
