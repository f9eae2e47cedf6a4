"""What a model does is measured: another head, other positions, later tokens and dropout are found."""

import copy
import random

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import UnsupportedError
from fused_grpo.integrations.model_modes import disable_dropout, has_dropout, warn_of_rounding
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.self_check import self_check


def check(model):
    return self_check(PolicyLoss(model, GRPOLossConfig(), temperature=0.7))


def changed(model, change):
    """The model with logits that are `change(logits)`, and a config that does not say so."""
    own = model.forward

    def forward(*args, **options):
        output = own(*args, **options)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    return model


LIES = {
    "scaled": lambda logits: logits * 1.05,
    "capped": lambda logits: 30 * torch.tanh(logits / 30),
    "shifted": lambda logits: logits + torch.linspace(0, 1e-2, logits.shape[-1]),
    "cut": lambda logits: logits[..., :-1],
    "masked": lambda logits: logits.masked_fill(torch.arange(logits.shape[-1]) == 3, -1e4),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_transform_of_logits_that_is_not_in_the_config_is_refused(make_model, lie):
    with pytest.raises(UnsupportedError, match=r"got a Qwen2ForCausalLM that takes .* want the same"):
        check(changed(make_model(), LIES[lie]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rounding_is_not_another_model(make_model, dtype):
    assert check(make_model(vocab_size=1000).to(dtype)).share_rows


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_logits_that_are_no_numbers_are_refused(make_model, name, value):
    model = make_model()
    model.get_parameter(name).data[3] = value
    with pytest.raises(UnsupportedError, match="got a Qwen2ForCausalLM whose logits of a few tokens are NaN"):
        check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_on_other_states_than_it_is_given_is_refused(make_model, dtype):
    model = make_model().to(dtype)
    model.lm_head.register_forward_pre_hook(lambda layer, inputs: (inputs[0].roll(1, dims=-1),))
    assert check(model).share_rows  # what is before the head counts
    model = make_model().to(dtype)
    own = model.forward
    model.forward = lambda input_ids, **options: own(
        input_ids if "position_ids" in options else input_ids + 1, **options
    )
    with pytest.raises(UnsupportedError, match=r"differ by \d.* between its own logits and its head"):
        check(model)


def test_a_model_that_sees_later_tokens_is_refused_and_the_fix_works():
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = BertLMHeadModel(BertConfig(num_attention_heads=2, initializer_range=0.5, **sizes))
    with pytest.raises(UnsupportedError, match=r"change by \d.* with later tokens.* fix: is_decoder=True"):
        check(model)
    model = BertLMHeadModel(BertConfig(num_attention_heads=2, initializer_range=0.5, is_decoder=True, **sizes))
    assert not check(model).share_rows


def test_a_forward_that_fails_is_refused_by_name_but_not_for_memory(make_model):
    model = changed(make_model(), lambda logits: logits.no_such_method())
    with pytest.raises(UnsupportedError, match=r"Qwen2ForCausalLM whose forward fails .*AttributeError: .*no_such"):
        check(model)

    def no_memory(logits):
        raise torch.OutOfMemoryError("of the device")

    with pytest.raises(torch.OutOfMemoryError):
        check(changed(make_model(), no_memory))


def test_nothing_is_left_behind(make_model):
    model = make_model(attention_dropout=0.1)
    model.model.layers[0].eval()
    model.lm_head.weight.grad = grad = torch.ones_like(model.lm_head.weight)
    modes = [layer.training for layer in model.modules()]
    before, state = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    assert check(model).is_random
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    assert [layer.training for layer in model.modules()] == modes
    assert model.lm_head.weight.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model.lm_head)


OPT = {"vocab_size": 60, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MOE = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MOE |= {"num_key_value_heads": 2, "num_local_experts": 4}
RANDOM = {
    "in a function": lambda make: OPTForCausalLM(OPTConfig(**OPT, word_embed_proj_dim=32, dropout=0.05)),
    "of whole layers": lambda make: OPTForCausalLM(OPTConfig(**OPT, word_embed_proj_dim=32, dropout=0, layerdrop=0.5)),
    "in attention": lambda make: make(attention_dropout=0.05),
    "noise of routers": lambda make: MixtralForCausalLM(MixtralConfig(**MOE, router_jitter_noise=0.1)),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_randomness_in_training_is_found_and_switched_off(make_model, kind):
    torch.manual_seed(0)
    model = RANDOM[kind](make_model)
    assert has_dropout(model)
    disable_dropout(model)
    assert not has_dropout(model)
    assert torch.equal(*(model.train()(torch.arange(20)[None]).logits for _ in range(2)))


def test_random_numbers_that_change_nothing_are_no_dropout():
    assert not has_dropout(OPTForCausalLM(OPTConfig(**OPT, word_embed_proj_dim=32, dropout=0, layerdrop=0.0)))


def test_dropout_that_stays_is_refused_where_it_was_to_be_off(make_trainer, monkeypatch):
    monkeypatch.setattr("fused_grpo.trainer.learner.disable_dropout", lambda model: None)
    monkeypatch.setattr("fused_grpo.trainer.self_check.has_dropout", lambda model: True)
    with pytest.raises(UnsupportedError, match="got disable_dropout=True and a Qwen2ForCausalLM that is random"):
        make_trainer(disable_dropout=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trained_weights_of_16_bits_are_warned_of_and_frozen_ones_are_not(make_model, caplog, dtype):
    model = make_model().to(dtype)
    warn_of_rounding(model.requires_grad_(False), 1e-6)
    warn_of_rounding(make_model(), 1e-6)
    assert not caplog.text
    warn_of_rounding(model.requires_grad_(True), 1e-6)
    assert caplog.text.count(f"got trained weights in {dtype}, want float32") == 1
    bound = float(caplog.text.split("those above ")[1].split(",")[0])
    weights = torch.tensor([0.5, 3.0]).to(dtype) * 2 * bound
    assert torch.equal(weights + 1e-6, weights)
