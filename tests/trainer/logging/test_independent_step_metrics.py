"""Every logged number of an optimizer step is what docs/trainer.md says: by an independent implementation in fp64."""

import copy
import json
import math
from typing import Any

import independent_step_metrics as independent
import pytest
import torch
from watched_steps import BASE, reward, watched

CASES: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon_high": 0.28},
    "grpo with a reference": {"loss_type": "grpo", "beta": 0.1},
    "k2 without the ratio": {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "k1 of sequences": {"beta": 0.1, "kl_estimator": "k1", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "gspo without completions of advantage 0": {"importance_sampling_level": "sequence", "epsilon": 0.01},
    "bounded": {"delta": 1.1, "loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "entropy_coef": 0.05},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.02},
    "sapo": {"loss_type": "sapo", "learning_rate": 1e-4},
    "vespo": {"loss_type": "vespo", "learning_rate": 1e-4},
    "gmpo": {"loss_type": "gmpo", "epsilon": 0.03},
    "dppo_tv": {"loss_type": "dppo_tv", "epsilon": 0.02},
    "dppo_kl": {"loss_type": "dppo_kl", "epsilon": 0.001, "delta": 1.2},
    "dppo from the old policy": {"loss_type": "dppo_tv", "epsilon": 0.02, "vllm_importance_sampling_correction": False},
    "ipo": {"loss_type": "ipo", "epsilon": 0.02},
    "ipo of all completions": {"loss_type": "ipo", "epsilon": 0.02, "skip_zero_advantages": False},
    "gpg": {"loss_type": "gpg"},
    "dro": {"loss_type": "dro", "log_ratio_penalty": 0.05},
    "towards an entropy": {
        **{"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 2.7, "entropy_coef_delta": 0.02},
        **{"entropy_coef_min": 0.09, "entropy_coef_max": 0.13},
    },
    "uncertain tokens": {"top_entropy_quantile": 0.4, "entropy_coef": 0.05},
    "uncertain tokens, of which one has the least entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    "masked by tokens": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.2},
    "masked by sequences": {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.5},
    "truncated sequences": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "off policy mask": {"off_policy_mask_threshold": 0.02},
    "rejected sequences": {"sequence_rejection": "k3", "sequence_rejection_max": 0.02},
    "far sequences": {"sequence_rejection": "geometric_ratio", "sequence_rejection_min": 0.95},
    "cut completions": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "all completions": {"skip_zero_advantages": False},
    "by tokens": {"max_tokens_per_micro_batch": 24},
    "whole prompts": {"share_prompts": False},
}


def sequences(batch: list[Any], policy: Any, old: Any, reference: Any, args: Any) -> list[independent.Sequence]:
    rows = []
    for sample in batch:
        if args.mask_truncated_completions and sample.finish_reason == "length":
            continue
        given = sample.prompt_ids, sample.completion_ids, args.temperature
        with torch.no_grad():
            before, ref = independent.measured(old, *given)[0], independent.measured(reference, *given)[0]
        logprobs, entropy = independent.measured(policy, *given)
        assert not (sample.skipped and sample.advantage)
        rows.append(
            independent.Sequence(
                sample.advantage,
                logprobs,
                entropy,
                before,
                ref if args.beta else None,
                torch.tensor(sample.sampling_logprobs, dtype=torch.float64),
                in_forward=not sample.skipped,
            )
        )
    return rows


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_an_optimizer_step_are_their_definitions(make_trainer, name):
    trainer = make_trainer(reward, **BASE | CASES[name])
    reference, steps = copy.deepcopy(trainer.model).double(), watched(trainer)
    trainer.train()
    lines = (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    assert len(records) == len(steps) == BASE["max_steps"]
    controller = independent.Controller(trainer.args)
    for (batch, policy, old), record in zip(steps, records, strict=True):
        rows = sequences(batch, policy, old, reference, trainer.args)
        step = independent.Step(rows, trainer.args, total=len(batch), entropy_coef=controller.applied)
        expected = step.metrics()
        expected |= controller.after(expected["entropy"])
        grads = torch.autograd.grad(step.loss, list(policy.parameters()))
        expected["grad_norm"] = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
        wrong = {
            key: (record.get(key), value)
            for key, value in expected.items()
            if record.get(key) != pytest.approx(value, rel=2e-4, abs=2e-5)
        }
        others = {key for key in record if key.startswith(("sampling/", "clip_ratio/", "kl", "vespo"))}
        assert others - expected.keys() == {"sampling/bit_equal_fraction"}
        assert not wrong, f"step {record['step']}: (got, want) {wrong}"
