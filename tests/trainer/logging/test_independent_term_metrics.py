"""Every logged number of a step with Clip-Cov, KL-Cov, a teacher or score centering is what docs/ say."""

import copy
import json
from typing import Any

import independent_step_metrics
import independent_term_metrics as independent
import pytest
import torch
from watched_steps import BASE, reward, watched

from fused_grpo.trainer.engines.transformers_generate import TransformersEngine

REVERSE = {"distillation_coef": 0.3}
TOPK = {"score_centering": "topk", "score_centering_topk": 5, "learning_rate": 0.003}
MASKED = {"vllm_importance_sampling_clip_max": 1.2}
CUT = {"mask_truncated_completions": True, "loss_type": "grpo"}
CASES: dict[str, dict[str, Any]] = {
    "kl_cov": {"kl_cov_ratio": 0.2, "epsilon": 1.0, "epsilon_high": 1e6},
    "kl_cov of few tokens": {"kl_cov_ratio": 0.001, "kl_cov_coef": 3.0, "loss_type": "grpo"},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0},
    "clip_cov of tokens within narrow bounds": {"clip_cov_ratio": 0.9, "clip_cov_lb": -0.1, "clip_cov_ub": 0.1},
    "clip_cov of no tokens": {"clip_cov_ratio": 0.5, "clip_cov_lb": 50.0, "clip_cov_ub": 60.0},
    "clip_cov of sequences": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "importance_sampling_level": "sequence"},
    "from a teacher": REVERSE,
    "from a teacher by forward_kl": {**REVERSE, "distillation_kind": "forward_kl", "loss_type": "grpo"},
    "from a teacher by jsd": {**REVERSE, "distillation_kind": "jsd", "distillation_beta": 0.2, "beta": 0.1},
    "from a teacher, cut": {**REVERSE, "mask_truncated_completions": True, "max_tokens_per_micro_batch": 24},
    "centered": TOPK,
    "centered on all": {"score_centering": "topk", "learning_rate": 0.003},
    "centered without weights": {**TOPK, "vllm_importance_sampling_correction": False},
    "centered within bounds": {**TOPK, "vllm_importance_sampling_clip_max": 1.05, "skip_zero_advantages": False},
    "centered, cut": {
        **TOPK,
        "max_completion_length": 16,
        "mask_truncated_completions": True,
        "loss_type": "grpo",
        "share_prompts": False,
    },
    "centered, masked by tokens": {**TOPK, **MASKED, "vllm_importance_sampling_mode": "token_mask"},
    "centered, truncated by sequences": {**TOPK, **MASKED, "vllm_importance_sampling_mode": "sequence_truncate"},
    "centered, masked by sequences": {**TOPK, **MASKED, "vllm_importance_sampling_mode": "sequence_mask"},
    "centered, rejected": {**TOPK, "sequence_rejection": "k3", "sequence_rejection_max": 0.01},
    "centered, off policy": {**TOPK, "off_policy_mask_threshold": 0.01},
    "centered dppo": {**TOPK, "loss_type": "dppo_tv", "epsilon": 0.05, "delta": 1.1},
    "centered gspo": {**TOPK, "importance_sampling_level": "sequence", "epsilon": 0.01},
    "centered, uncertain tokens": {**TOPK, "top_entropy_quantile": 0.4},
}


class SamplingEngine(TransformersEngine):
    """Transformers' engine as the user's own, whose log-probs the loss corrects for."""


def full_sequences(batch: list[Any], models: Any, teacher: Any, args: Any) -> list[independent.FullSequence]:
    policy, old, reference = models
    rows = []
    for sample in batch:
        if args.mask_truncated_completions and sample.finish_reason == "length":
            continue
        given = sample.prompt_ids, sample.completion_ids, args.temperature
        with torch.no_grad():
            before, ref = (independent_step_metrics.measured(model, *given)[0] for model in (old, reference))
            teacher_logprobs = None if teacher is None else independent.distributions(teacher, *given)
        every = independent.distributions(policy, *given)
        listed = None
        if args.score_centering != "off":
            given_ids, sizes = sample.listed_tokens.ids, sample.listed_tokens.sizes.tolist()
            parts = (values.split(sizes) for values in (given_ids, sample.listed_tokens.logprobs))
            listed = [dict(zip(ids.tolist(), values.tolist(), strict=True)) for ids, values in zip(*parts, strict=True)]
        rows.append(
            independent.FullSequence(
                sample.advantage,
                every.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0],
                -(every.exp() * every).sum(1),
                before,
                ref if args.beta else None,
                torch.tensor(sample.sampling_logprobs, dtype=torch.float64),
                in_forward=not sample.skipped,
                every=every,
                teacher=teacher_logprobs,
                listed=listed,
            )
        )
    return rows


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_further_terms_are_their_definitions(make_trainer, make_model, name):
    teacher = {"teacher_model": make_model(3)} if "teacher" in name else {}
    engine = {"engine": SamplingEngine} if "centered" in name else {}
    trainer = make_trainer(reward, **BASE | CASES[name] | teacher | engine)
    reference = copy.deepcopy(trainer.model).double()
    teacher_model = copy.deepcopy(teacher["teacher_model"]).double() if teacher else None
    steps = watched(trainer, noise=0.0 if engine else 0.2)
    trainer.train()
    lines = (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    assert len(records) == len(steps) == BASE["max_steps"]
    for (batch, policy, old), record in zip(steps, records, strict=True):
        rows = full_sequences(batch, (policy, old, reference), teacher_model, trainer.args)
        expected = independent.FullStep(rows, trainer.args, total=len(batch)).metrics()
        wrong = {
            key: (record.get(key), value)
            for key, value in expected.items()
            if record.get(key) != pytest.approx(value, rel=2e-4, abs=2e-5)
        }
        further = {key for key in record if key.startswith(("centering_", "distillation", "aux_loss"))}
        assert further == {key for key in expected if key.startswith(("centering_", "distillation"))}
        assert not wrong, f"step {record['step']}: (got, want) {wrong}"
