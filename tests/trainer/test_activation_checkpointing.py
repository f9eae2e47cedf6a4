"""`gradient_checkpointing_kwargs` reach transformers and torch, or are refused; the page has what they keep."""

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers.modeling_utils
from peft import LoraConfig
from transformers import CTRLConfig, CTRLLMHeadModel, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.integrations.model_modes import checkpoint_activations
from fused_grpo.trainer import GRPOConfig, GRPOTrainer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OFFLOADS = pytest.mark.skipif(
    not hasattr(transformers.modeling_utils, "save_on_cpu"), reason="transformers before 5.16"
)


def enable(model: Any, options: dict[str, Any] | None) -> None:
    checkpoint_activations(model, options or {})


def recomputed(model: Any) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


class Seen(TrainerCallback):
    """The modes within a step."""

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.modes = (all(layer.training for layer in model.modules()), all(recomputed(model)))


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """In place of `save_on_cpu`, whose pinned memory takes a GPU."""

    kept: ClassVar[list[torch.Tensor]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda tensor: self.kept.append(tensor.clone()) or self.kept[-1], lambda tensor: tensor)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_comes_back_in_the_modes_in_which_it_was_given(make_model, tokenizer, tmp_path, training, adapted):
    model = make_model().train(training)
    for number, recomputes in enumerate([True, False]):
        lora = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5) if adapted and not number else None
        trainer = GRPOTrainer(
            model,
            lambda completions, **_: [float(len(text)) for text in completions],
            GRPOConfig(
                output_dir=str(tmp_path / str(number)),
                max_steps=1,
                gradient_checkpointing=recomputes,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=4,
                use_vllm=False,
                save_strategy="no",
            ),
            [{"prompt": "1+1="}],
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[seen := Seen()],
        )
        for _ in range(2):  # a second `train` recomputes, too
            trainer.train()
            assert seen.modes == (True, recomputes)
            assert {layer.training for layer in trainer.model.modules()} == {training}
            assert not any(recomputed(trainer.model))
            assert not any(layer._forward_hooks for layer in trainer.model.modules())  # transformers sets one
        model = trainer.model


def megabytes(tensors: Any, without: Any) -> float:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for place, size in storages.items() if place not in without) / 1e6


@OFFLOADS
def test_the_page_has_what_autograd_keeps_on_the_device_and_on_the_host(monkeypatch):
    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", OnHost)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    rows = re.findall(r"^\| (no check.*|None|`\{.*\}`) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 5
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 8}
    for options, on_device, on_host in rows:
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=60, num_key_value_heads=4, **sizes)).train()
        if not options.startswith("no"):
            enable(model, eval(options.strip("`")))
        kept, weights = [], {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        OnHost.kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # noqa: B023
            model.model(torch.ones(4, 64, dtype=torch.int64), use_cache=False)
        assert f"{megabytes(kept, weights):.1f}" == on_device, options
        assert f"{megabytes(OnHost.kept, set()):.1f}" == on_host, options


@OFFLOADS
def test_offload_on_a_cpu_is_said_to_change_nothing(make_model, caplog):
    model = make_model()
    enable(model, {"offload": True, "every_n_layers": 2, "determinism_check": "none"})
    assert recomputed(model) == [True, False]
    model.train()(torch.tensor([[2, 3]])).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    assert "offload=True on a CPU, where it changes nothing" in caplog.text or torch.accelerator.is_available()


@pytest.mark.parametrize(
    "name", ["ofload", "use_rentrant", "every_n_layer", "function", "args", "kwargs", "attention_mask"]
)
def test_an_option_that_a_layer_would_swallow_is_refused(make_model, name):
    with pytest.raises(InputError, match=f"with '{name}', want arguments of torch.utils.checkpoint"):
        enable(make_model(), {name: True})


def test_options_of_torch_pass(make_model):
    enable(make_model(), {"use_reentrant": True, "preserve_rng_state": False})
    enable(make_model(), {"early_stop": False, "debug": False})


def test_the_name_that_transformers_gives_it_later_is_preferred(make_model):
    model, calls = make_model(), []
    model.activation_checkpointing_enable = lambda options, every_n_layers=1: calls.append((options, every_n_layers))
    enable(model, {"every_n_layers": 3})
    assert calls == [({"use_reentrant": False}, 3)]


def test_a_model_that_cannot_is_refused_by_name():
    model = CTRLLMHeadModel(CTRLConfig(vocab_size=60, n_embd=32, dff=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedError, match=r"CTRLLMHeadModel does not .* fix: gradient_checkpointing=False"):
        enable(model, None)


def test_the_later_names_of_the_options_are_the_same_options():
    args = GRPOConfig(activation_checkpointing=False, activation_checkpointing_kwargs='{"every_n_layers": 2}')
    assert (args.gradient_checkpointing, args.gradient_checkpointing_kwargs) == (False, {"every_n_layers": 2})
    assert GRPOConfig(gradient_checkpointing=False).gradient_checkpointing is False
