"""Models and adapters that a run would train in part, or lose after its last step: refused by name at the start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_runs import model_of, places, trainer_in
from torch import nn
from transformers import PreTrainedModel, Qwen2ForSequenceClassification, Qwen2Model

from fused_grpo.errors import FusedGRPOError, InputError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def make(tmp_path) -> Callable[..., GRPOTrainer]:
    def trainer(model: Any, peft_config: Any = None, **options: Any) -> GRPOTrainer:
        return trainer_in(tmp_path, model, peft_config=peft_config, max_steps=1, **options)

    return trainer


class NoHead(nn.Module):
    """As a model with a head for values is: a module around a causal LM."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()
        self.config = self.inner.config


def with_rows(embedding: int, head: int) -> PreTrainedModel:
    model = model_of()
    model.model.embed_tokens, model.lm_head = nn.Embedding(embedding, 16), nn.Linear(16, head, bias=False)
    return model


def without_generation_config() -> PreTrainedModel:
    model = model_of()
    model.generation_config = None
    return model


WRONG = {
    "a classifier": (lambda: model_of(Qwen2ForSequenceClassification), "SequenceClassification .* without output emb"),
    "a backbone": (lambda: model_of(Qwen2Model), "Qwen2Model as model, without output embeddings, want a causal LM"),
    "a wrapper": (NoHead, "NoHead as model, without output embeddings"),
    "a head that draws unknown tokens": (lambda: with_rows(16, 24), "head of 24 tokens and an embedding of 16"),
    "an embedding that is too small": (lambda: with_rows(12, 12), "want ids below 12, the rows of the model's embedd"),
    "nothing to save": (without_generation_config, "generation_config is None, .* GenerationConfig.from_model_config"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_module_that_no_run_can_train_is_refused_at_the_start(make, name):
    made, message = WRONG[name]
    with pytest.raises(FusedGRPOError, match=message):
        make(made())


def test_of_a_teacher_and_of_a_model_without_a_path_errors_name_them(make):
    with pytest.raises(FusedGRPOError, match="got a Qwen2Model as teacher_model, without output embeddings"):
        GRPOTrainer(
            model_of(),
            args=GRPOConfig(distillation_coef=1.0, num_generations=2, per_device_train_batch_size=2, use_vllm=False),
            train_dataset=[{"prompt": "1+1="}],
            processing_class=build_tokenizer(),
            teacher_model=model_of(Qwen2Model),
        )
    moved = model_of()
    moved.config._name_or_path = "/nowhere/at/all"
    with pytest.raises(FusedGRPOError, match="model '/nowhere/at/all', whose tokenizer"):
        GRPOTrainer(moved, places, GRPOConfig(num_generations=2, use_vllm=False), [{"prompt": "1+1="}])


@pytest.mark.parametrize("place", ["model.norm", "lm_head", "model.layers.1.mlp.up_proj", "model.embed_tokens"])
def test_what_is_trained_beside_an_adapter_would_not_be_saved(make, place):
    adapted = get_peft_model(model_of(), LoraConfig(**LORA))
    adapted.get_base_model().get_submodule(place).requires_grad_(True)
    with pytest.raises(InputError, match=f"beside its adapter, such as .*{place}.*fix: modules_to_save"):
        make(adapted)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["norm", "lm_head"]},
        {"lora_bias": True},
        {"use_dora": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]},
    ],
)
def test_all_that_peft_saves_may_be_trained(make, more, tmp_path):
    trainer = make(model_of(), LoraConfig(**{**LORA, **more}))
    trainer.train()
    ids = torch.tensor([[2, 12, 3, 5]])
    loaded = PeftModel.from_pretrained(model_of(), tmp_path / "run" / "final").eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


def named(trained: str, other: str | None) -> PeftModel:
    """A PeftModel whose adapters change something."""
    model = get_peft_model(model_of(), LoraConfig(**LORA), adapter_name=trained)
    if other is not None:
        model.add_adapter(other, LoraConfig(**LORA))
        model.set_adapter(trained)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(("trained", "other"), [("ref", None), ("default", "ref"), ("ref", "default")])
def test_an_adapter_with_the_name_of_the_frozen_copy_is_kept(make, trained, other):
    model = named(trained, other)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=r"an adapter 'ref', and a reference, .*delete_adapter\('ref'\)"):
        make(model, beta=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    make(model).train()  # without a reference its name is free


def test_a_second_trainer_has_the_adapter_of_now_as_its_reference(make):
    model = named("default", None)
    make(model, beta=0.1).train()
    for name, parameter in model.named_parameters():
        if "lora_B.default" in name:
            nn.init.zeros_(parameter)  # equal to its base again
    again = make(model, beta=0.1, overwrite_output_dir=True)
    again.train()
    assert again.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ["nope"]}, "a LoraConfig that PEFT refuses for a Qwen2ForCausalLM .*'nope'.* not found"),
        ({"layers_to_transform": [7]}, "that PEFT refuses"),
        ({"modules_to_save": ["nope"], "target_modules": ["nope", "no"]}, "that PEFT refuses"),
        ({"inference_mode": True}, "a PeftModel that is frozen, .* inference_mode=False"),
    ],
)
def test_a_config_that_does_not_fit_the_model_is_refused_by_name(make, config, message):
    with pytest.raises(InputError, match=message):
        make(model_of(), LoraConfig(**{**LORA, **config}))


@pytest.mark.parametrize(
    ("rows", "more", "is_said"),
    [
        (24, {}, True),
        (16, {}, False),
        (24, {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        (24, {"modules_to_save": ["norm"]}, True),
    ],
)
@pytest.mark.parametrize("is_given", [True, False], ids=["a PeftModel", "a config"])
def test_rows_that_an_adapter_does_not_save_are_said(make, tmp_path, caplog, rows, more, is_said, is_given):
    warn_once.cache_clear()
    model_of().save_pretrained(tmp_path / "base")
    model = type(model_of()).from_pretrained(tmp_path / "base")
    if rows != 16:
        model.resize_token_embeddings(rows)
    config = LoraConfig(**{**LORA, **more})
    make(*((get_peft_model(model, config),) if is_given else (model, config)))
    assert ("rows of the embedding that were added are lost" in caplog.text) is is_said


class HalfATokenizer:
    eos_token_id, pad_token_id = 1, 0


@pytest.mark.parametrize("given", [HalfATokenizer(), HalfATokenizer, "a/name", 3, object()])
def test_what_is_no_tokenizer_is_refused_by_name(make, given):
    with pytest.raises(FusedGRPOError, match="as processing_class, want a tokenizer of transformers"):
        make(model_of(), processing_class=given)
