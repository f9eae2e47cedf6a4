"""Losses, rejections and estimators that TRL does not have, in whole runs: options reach the loss, which learns.

The engine's completions depend on the seed alone, so nothing here is left to chance.
"""

import copy
from typing import Any

import pytest
import torch

CORRECTED = {"num_iterations": 2, "learning_rate": 1e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "gmpo": {"loss_type": "gmpo", "epsilon": 0.4, **CORRECTED},
    "dppo": {"loss_type": "dppo_tv", "delta": 9.0, "beta": 0.01, **CORRECTED},
    "dppo by KL": {"loss_type": "dppo_kl", "epsilon": 0.05, **CORRECTED},
    "ipo": {"loss_type": "ipo", "epsilon": 0.1, "delta": 1e4, **CORRECTED},
    "dro": {"loss_type": "dro", "log_ratio_penalty": 0.02, **CORRECTED},
    "gpg": {"loss_type": "gpg", "advantage_estimator": "gpg", **CORRECTED},
    "icepop": {"vllm_importance_sampling_mode": "icepop"},
    "rejection": {"sequence_rejection": "k3", "sequence_rejection_max": 0.5, **CORRECTED},
    "clip-cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "gradient_accumulation_steps": 2, **CORRECTED},
    "kl-cov": {"kl_cov_ratio": 0.1, "top_entropy_quantile": 0.9, **CORRECTED},
    "rloo": {"advantage_estimator": "rloo"},
    "maxrl": {"advantage_estimator": "maxrl"},
    "opo": {"advantage_estimator": "opo"},
    "pkpo": {"advantage_estimator": "pkpo", "pkpo_k": 2},
    "optimal token baseline": {"advantage_estimator": "optimal_token_baseline", "variance_report": True},
    "the same of tools": {"advantage_estimator": "tir_optimal_token_baseline", **CORRECTED},
    "reinforce++, groups of one": {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1},
}


@torch.no_grad()
def favour(model, trainer, rollouts) -> float:
    """The log-probs of completions, each times its reward above the mean of its step: what learning increases."""
    total = 0.0
    for batch in rollouts:
        texts = trainer.processing_class.batch_decode(batch.completion_ids, skip_special_tokens=True)
        rewards = torch.tensor(trainer.rewards.functions[0](completions=texts))
        for index, (ids, above) in enumerate(zip(batch.completion_ids, rewards - rewards.mean(), strict=True)):
            prompt = batch.prompt_ids[index // batch.num_generations]
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            total += float(above * logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum())
    return total


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_learns_with_it(make_trainer, served_engine, options):
    trainer = make_trainer(engine=served_engine, **options)
    rollouts, generate, before = [], trainer.engine.generate, copy.deepcopy(trainer.model)
    trainer.engine.generate = lambda *given: rollouts.append(generate(*given)) or rollouts[-1]
    config = trainer.learner.loss_config
    for name, value in options.items():
        assert getattr(config, name, value) == value
    assert (config.sampling_clip_min == 0.5) is ("vllm_importance_sampling_mode" in options)
    metrics = trainer.train().metrics
    assert favour(trainer.model, trainer, rollouts) > favour(before, trainer, rollouts) + 1.0
    assert metrics["step"] == trainer.args.max_steps
    if options.get("loss_type") in ("gmpo", "dppo_tv", "dppo_kl", "ipo"):
        assert 0 <= metrics["clip_ratio/region_mean"] < 1
