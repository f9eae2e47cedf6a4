"""Prompt tuning: packed rows and left-padded generation are PEFT's own forward on each sequence alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import batch_of, column
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.engines.weight_files import temporary_weight_files
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import Sample, SamplingParams

N = 3
PROMPT = "prompt_encoder.default.embedding.weight"
LSTM = {"encoder_reparameterization_type": "LSTM", "encoder_hidden_size": 8, "encoder_num_layers": 1}
BATCH = batch_of(
    prompt_ids=[[2, 3, 4], [5, 6], [7], [8, 9, 10, 11, 12]],
    completion_ids=[[7, 8, 9, 1], [10, 11, 12, 13, 1], [14, 1], [15, 16, 17, *range(2, 9)]],
    sampling_logprobs=None,
    advantage=torch.tensor([1.0, -0.5, 0.3, -0.8]),
)


def config(**options: Any) -> PromptTuningConfig:
    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=N, **options)


KINDS = {"prompt": config(), "network": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=N, **LSTM)}


def digit_reward(completions: list[str], **columns: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def make(make_model, tokenizer, tmp_path) -> Callable[..., GRPOTrainer]:
    def make(*, model: Any = None, peft_config: Any = None, **options: Any) -> GRPOTrainer:
        defaults = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4, "num_generations": 4}
        defaults |= {"max_completion_length": 6, "max_steps": 4, "learning_rate": 1e-1, "max_grad_norm": 0}
        return GRPOTrainer(
            make_model() if model is None else model,
            digit_reward,
            GRPOConfig(**{**defaults, "overwrite_output_dir": True, "save_strategy": "no", **options}),
            [{"prompt": f"{a}+{b}="[b:]} for a in range(4) for b in range(3)],
            processing_class=tokenizer,
            peft_config=config() if peft_config is None and model is None else peft_config,
        )

    return make


@pytest.fixture
def tuned(make_model) -> PeftModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(make_model(), config())


def of_peft(model: Any, batch: list[Sample], *, virtual: int = N) -> torch.Tensor:
    """Log-probs of completion tokens, from the model's own logits of one sequence at a time."""
    logprobs = []
    for sample in batch:
        prompt, completion = sample.prompt_ids, sample.completion_ids
        logits = model(torch.tensor([prompt + completion])).logits[0, virtual + len(prompt) - 1 : -1]
        logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(logprobs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputed", [None, False, True], ids=["stored", "recomputed", "reentrant"])
def test_loss_and_gradient_are_those_of_pefts_logits(make, kind, recomputed):
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": bool(recomputed)}}
    checkpointing["gradient_checkpointing"] = recomputed is not None
    learner = make(peft_config=KINDS[kind], **checkpointing).learner
    model, lengths = learner.policy.model, torch.tensor([4, 5, 2, 10])
    assert learner._pack(BATCH)[0].input_ids.shape[0] < 4  # sequences share rows
    weight = model.get_parameter(PROMPT)
    logprobs = of_peft(model.eval(), BATCH)
    loss = (
        -((logprobs - logprobs.detach()).exp() * column(BATCH, "advantage").repeat_interleave(lengths)).sum()
        / lengths.sum()
    )
    (expected,) = torch.autograd.grad(loss, weight)
    gradients = []
    batch, metrics = learner.learn(BATCH, check=lambda *_: gradients.append(weight.grad.clone()))
    torch.testing.assert_close(torch.cat(column(batch, "old_logprobs")), logprobs.detach(), rtol=1e-5, atol=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(gradients[0], expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().amax(dim=1).min() > (1e-3 if kind == "prompt" else 1e-5)


def test_a_rank_without_sequences_has_a_gradient_too(make):
    learner = make().learner
    nothing = list[Sample]()
    (part,) = learner._pack(nothing)
    learner._backward(part, learner._counts([part], nothing), last=True)
    assert learner.policy.model.get_parameter(PROMPT).grad.abs().max() == 0


def test_a_budget_of_tokens_counts_virtual_ones(make):
    parts = make(max_tokens_per_micro_batch=20).learner._pack(BATCH)
    assert max(part.input_ids.numel() for part in parts) <= 20
    assert sum(int(part.attention_mask.sum()) for part in parts) == 32 + 4 * N


def test_the_reference_has_no_virtual_tokens(make, make_model):
    learner = make(beta=0.1).learner
    ref_logprobs = torch.cat(column(learner._with_reference(BATCH), "ref_logprobs"))
    torch.testing.assert_close(ref_logprobs, of_peft(make_model(), BATCH, virtual=0).detach(), rtol=1e-5, atol=1e-5)
    assert (ref_logprobs - of_peft(learner.policy.model, BATCH)).abs().max() > 1e-2


def test_the_reference_of_a_given_prompt_is_that_prompt(make, tuned):
    start = of_peft(tuned, BATCH).detach()
    trainer = make(model=tuned, beta=0.1)
    trainer.train()
    ref_logprobs = torch.cat(column(trainer.learner._with_reference(BATCH), "ref_logprobs"))
    torch.testing.assert_close(ref_logprobs, start, rtol=1e-5, atol=1e-5)
    assert (of_peft(trainer.model, BATCH) - start).abs().max() > 1e-2
    assert [name for name, value in trainer.model.named_parameters() if value.requires_grad] == [PROMPT]


def test_prompts_of_any_lengths_are_continued_as_peft_says(tuned, tokenizer):
    engine = TransformersEngine(tuned, tokenizer)
    given = column(BATCH, "prompt_ids")
    rollouts = engine.generate(given, SamplingParams(n=2, max_tokens=6, seed=0, repetition_penalty=1.0))
    prompts = [prompt for prompt in given for _ in range(2)]
    batch = batch_of(
        prompt_ids=prompts,
        completion_ids=rollouts.completion_ids,
        sampling_logprobs=None,
        advantage=torch.zeros(8),
    )
    logprobs = torch.tensor([value for row in rollouts.sampling_logprobs for value in row])
    torch.testing.assert_close(logprobs, of_peft(tuned, batch).detach(), rtol=0, atol=1e-5)
    assert rollouts.prompt_ids == given


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_prompt_changes_and_a_resumed_run_is_the_same(make, tmp_path: Path, kind):
    options = {"peft_config": KINDS[kind], "beta": 0.1, "num_iterations": 2, "learning_rate": 1e-2}
    whole = make(output_dir=str(tmp_path / "whole"), **options)
    start = {name: value.clone() for name, value in whole.model.named_parameters()}
    whole.train()
    expected = dict(whole.model.named_parameters())
    changed = [name for name, value in expected.items() if not torch.equal(value, start[name])]
    assert changed == [name for name in start if name.startswith("prompt_encoder.default.")]
    options["output_dir"] = str(tmp_path / "cut")
    make(**options, save_strategy="steps", save_steps=3).train()
    resumed = make(**options, overwrite_output_dir=False)
    resumed.train(resume_from_checkpoint=tmp_path / "cut" / "checkpoint-3")
    assert all(torch.equal(resumed.model.get_parameter(name), expected[name]) for name in changed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_prompt_is_what_peft_loads(make, make_model, kind):
    trainer = make(peft_config=KINDS[kind])
    trainer.learner.learn(BATCH)
    directory = trainer.save_model()
    assert load_file(directory / "adapter_model.safetensors").keys() == {"prompt_embeddings"}
    loaded = PeftModel.from_pretrained(make_model(), directory)
    assert torch.equal(of_peft(loaded, BATCH), of_peft(trainer.model.eval(), BATCH))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"use_vllm": True}, UnsupportedError, "vLLM has no virtual tokens; fix: use_vllm=False"),
        ({"vllm_mode": "server"}, UnsupportedError, "vLLM has no virtual tokens"),
        ({"peft_config": PromptTuningConfig(num_virtual_tokens=2)}, InputError, "task_type='CAUSAL_LM'"),
        (
            {"peft_config": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
            UnsupportedError,
            "KV cache",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize("read", [dict, lambda weights: temporary_weight_files(weights).__enter__()])
def test_an_engine_with_weights_of_its_own_is_refused(tuned, read):
    with pytest.raises(UnsupportedError, match="no weights of its base"):
        read(checkpoint_weights(tuned))
