"""Tools beside every other part of the trainer, with a real model: what is trained on is what was sampled.

Each combination trains twice: with `tools`, where the log-prob check holds for each turn, and with a `rollout_func`
that returns the same tokens, masks, log-probs and kept tokens. Both updates are the same, bit for bit.
"""

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import calculator
from fused_grpo.trainer.types import Sample

ROWS = calculator.build_splits()[0][:64]
COMBINATIONS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "kept tokens of top_p": {"top_p": 0.9, "sampling_support": "require"},
    "a ratio of sequences, two iterations": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "cispo, small micro-batches": {"loss_type": "cispo", "max_tokens_per_micro_batch": 128},
    "an entropy quantile": {"top_entropy_quantile": 0.5},
    "a reference, half a buffer": {"beta": 0.05, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "a teacher": {"distillation_coef": 0.5, "teacher_model": "self", "beta": 0.05},
    "each prompt computed once": {"share_prompts": True},
    "a correction by sequence": {"vllm_importance_sampling_mode": "sequence_mask"},
    "an adapter": {"peft_config": True},
    "recomputed activations": {"gradient_checkpointing": True},
}


class Kept(TrainerCallback):
    """The samples of each generated batch."""

    def __init__(self) -> None:
        self.batches: list[list[Sample]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.batches or self.trainer.scored.samples is not self.batches[-1]:
            self.batches.append(self.trainer.scored.samples)


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """More for an episode in which a tool was called."""
    return [len(ids) / 32 for ids in completion_ids]


@pytest.fixture
def trained(tmp_path):
    def train(name: str, options: dict[str, Any], **source: Any) -> tuple[GRPOTrainer, list[list[Sample]]]:
        options, arguments, kept = dict(options), dict(source), Kept()
        if options.pop("peft_config", False):
            from peft import LoraConfig

            arguments["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        arguments["teacher_model"] = options.pop("teacher_model", None)
        defaults = {"output_dir": str(tmp_path / name), "per_device_train_batch_size": 64, "max_steps": 2}
        defaults |= {"num_generations": 8, "max_completion_length": 32, "learning_rate": 1e-3, "save_strategy": "no"}
        defaults |= {"gradient_accumulation_steps": 1, "log_completions": False, "use_vllm": False, "bf16": False}
        defaults |= {"use_cpu": True, "gradient_checkpointing": False, "logprob_mismatch": "fail"}
        model, tokenizer = calculator.load_base_model()
        args = GRPOConfig(**{**defaults, **options})
        trainer = GRPOTrainer(model, length, args, ROWS, processing_class=tokenizer, callbacks=[kept], **arguments)
        kept.trainer = trainer
        trainer.train()
        return trainer, kept.batches

    return train


def as_output(samples: list[Sample]) -> dict[str, Any]:
    """What a `rollout_func` returns for these samples."""
    output: dict[str, Any] = {
        "prompt_ids": [sample.prompt_ids for sample in samples],
        "completion_ids": [sample.completion_ids for sample in samples],
        "logprobs": [sample.sampling_logprobs for sample in samples],
        "env_mask": [sample.completion_mask for sample in samples],
    }
    if samples[0].listed_tokens is not None:
        output["sampling_support"] = [
            [part.tolist() or None for part in listed.ids.split(listed.sizes.tolist())]
            for listed in (sample.listed_tokens for sample in samples)
        ]
    return output


@pytest.mark.parametrize("name", COMBINATIONS)
def test_an_update_is_that_of_the_tokens_that_were_sampled(trained, name):
    options = COMBINATIONS[name]
    own, batches = trained("own", options, tools=[calculator.multiply])
    assert all(sum(not all(sample.completion_mask) for sample in batch) > 1 for batch in batches)
    waiting = list(batches)
    given, again = trained("given", options, rollout_func=lambda prompts, trainer: as_output(waiting.pop(0)))
    assert waiting == []
    assert [[one.completion_ids for one in batch] for batch in again] == [
        [one.completion_ids for one in batch] for batch in batches
    ]
    untrained = calculator.load_base_model()[0].state_dict()
    parameters = dict(given.model.named_parameters())
    for key, value in own.model.named_parameters():
        assert torch.equal(value, parameters[key]), key
    assert "peft_config" in options or not torch.equal(own.model.lm_head.weight, untrained["lm_head.weight"])


CENTERED: dict[str, dict[str, Any]] = {
    "kept": {"top_p": 0.9, "score_centering": "kept", "sampling_support": "require"},
    "topk": {"score_centering": "topk", "score_centering_topk": 4},
}


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.engine)])
@pytest.mark.parametrize("kind", CENTERED)
def test_likely_tokens_of_several_turns_stay_with_the_tokens_of_the_model(trained, kind, engine):
    options = CENTERED[kind] | ({"use_vllm": True, "vllm_dtype": "float32"} if engine == "vllm" else {})
    _, batches = trained("centered", options, tools=[calculator.multiply])
    count = 0
    for sample in (sample for batch in batches for sample in batch):
        listed, sizes = sample.listed_tokens, sample.listed_tokens.sizes.tolist()
        assert len(listed.ids) == len(listed.logprobs)
        parts = zip(listed.ids.split(sizes), listed.logprobs.split(sizes), strict=True)
        named = zip(sample.completion_ids, sample.completion_mask, sample.sampling_logprobs, parts, strict=True)
        for token, is_own, logprob, (ids, logprobs) in named:
            assert len(ids) == (0 if not is_own else 4 if kind == "topk" else len(ids))
            assert (logprobs[ids == token] == torch.tensor(logprob)).all()
            count += int((ids == token).sum())
        assert kind == "topk" or count
    assert count > 100


@pytest.mark.engine
@pytest.mark.parametrize("name", ["kept tokens of top_p", "an adapter"])
def test_turns_of_vllm_are_what_is_trained_on(trained, name):
    """Or the log-prob check of a turn ends the run before its first update."""
    options = {**COMBINATIONS[name], "use_vllm": True, "vllm_dtype": "float32", "max_steps": 3}
    trainer, batches = trained("vllm", options, tools=[calculator.multiply])
    assert all(sum(not all(sample.completion_mask) for sample in batch) > 1 for batch in batches)
    assert all((sample.listed_tokens is not None) is ("top_p" in options) for batch in batches for sample in batch)
    logged = trainer.results.metrics
    for turn in (1, 2):
        assert logged[f"sampling/sampling_logp_difference/turn_{turn}/max"] < 1e-3
