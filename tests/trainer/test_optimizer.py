"""The optimizer of a run is the one that transformers' Trainer makes: its class, options and groups of parameters."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.models.optimizer import make_optimizer

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def qwen() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, **HEADS))


def gpt_oss() -> transformers.PreTrainedModel:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"]}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SHAPE, **HEADS, **experts))


def with_lora() -> torch.nn.Module:
    return get_peft_model(qwen(), LoraConfig(r=2, target_modules=["q_proj"]))


def groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[float, set[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_decay = {group["weight_decay"]: {names[one] for one in group["params"]} for group in optimizer.param_groups}
    return {decay: members for decay, members in by_decay.items() if members}


@pytest.mark.parametrize("make", [qwen, gpt_oss, with_lora])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
def test_the_groups_are_those_of_transformers(make, optim, tmp_path):
    model, options = make(), {"weight_decay": 0.1, "optim": optim, "learning_rate": 2e-3, "adam_beta2": 0.9}
    args = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[], **options)
    expected = transformers.Trainer(model, args).create_optimizer()
    optimizer = make_optimizer(model, GRPOConfig(**options))
    assert type(optimizer) is type(expected)
    assert groups(model, optimizer) == groups(model, expected)
    assert optimizer.defaults == expected.defaults
    kept = [group for group in expected.param_groups if group["params"]]
    for actual, full in zip(optimizer.param_groups, kept, strict=True):
        assert list(map(id, actual["params"])) == list(map(id, full["params"]))  # in the same order


def test_expert_biases_do_not_decay():
    model = gpt_oss()
    decaying = groups(model, make_optimizer(model, GRPOConfig(weight_decay=0.1)))[0.1]
    assert any(name.endswith("gate_up_proj") for name in decaying)
    assert not any("bias" in name for name in decaying)


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(InputError, match="got a model without trained parameters, want some"):
        make_optimizer(qwen().requires_grad_(False), GRPOConfig())


def test_an_optimizer_whose_package_is_missing_is_refused():
    with pytest.raises(UnavailableError, match=r"got optim='apollo_adamw'.*apollo_torch"):
        make_optimizer(qwen(), GRPOConfig(optim="apollo_adamw", optim_target_modules="all-linear"))


@pytest.mark.parametrize("optim", ["adam", "lomo", "galore_adamw_layerwise", "schedule_free_adamw"])
def test_an_optimizer_that_cannot_be_used_is_refused_by_name(optim):
    with pytest.raises(InputError, match=f"got optim={optim!r}, want one"):
        GRPOConfig(optim=optim)


def test_arguments_of_an_optimizer_are_passed_on():
    optimizer = make_optimizer(qwen(), GRPOConfig(optim="sgd", optim_args="momentum=0.9"))
    assert (type(optimizer), optimizer.defaults["momentum"]) == (torch.optim.SGD, 0.9)


def test_a_run_with_another_optimizer_learns(make_trainer):
    trainer = make_trainer(optim="adafactor", max_steps=1, max_grad_norm=0, torch_empty_cache_steps=1)
    before = {name: tensor.clone() for name, tensor in trainer.learner.weights().items()}
    assert trainer.train().metrics["grad_norm"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.learner.weights().items())


def test_parameters_that_an_optimizer_leaves_alone_keep_no_gradient(make_trainer):
    """It would be in the norm by which those of all later steps are clipped."""
    trainer = make_trainer(optimizers=lambda model: (torch.optim.SGD(model.model.layers.parameters(), lr=1e-3), None))
    trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
