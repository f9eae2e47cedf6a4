"""The pure parts of the trainer: advantages, packing, configuration."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fused_grpo.errors import CheckpointError, InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.collect.advantages import group_advantages, total_rewards
from fused_grpo.trainer.learner import Learner

INF, NAN = float("inf"), float("nan")


def test_advantages_are_those_of_the_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    scale = torch.tensor([1.0, 0.0, 0.0, 1.0]).std() + 1e-4
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]) / scale
    torch.testing.assert_close(group_advantages(rewards, 4, scale="group"), expected)
    torch.testing.assert_close(group_advantages(rewards, 4, scale="none"), expected * scale)
    torch.testing.assert_close(group_advantages(rewards, 4, scale="batch"), expected * scale / (rewards.std() + 1e-4))


def test_unscored_completions_take_no_part_in_their_group():
    advantages = group_advantages(torch.tensor([NAN, 1.0, 3.0, NAN, NAN, NAN]), 3, scale="none")
    torch.testing.assert_close(advantages, torch.tensor([0.0, -1.0, 1.0, 0.0, 0.0, 0.0]))


def test_total_rewards_weigh_what_was_scored():
    per_function = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    torch.testing.assert_close(
        total_rewards(per_function, torch.tensor([1.0, 10.0])), torch.tensor([21.0, 20.0, NAN]), equal_nan=True
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0, want > 0"),
        ({"num_generations": 1}, "num_generations=1"),
        ({"epsilon": -1}, "epsilon=-1"),
        ({"loss_type": "ppo"}, "loss_type='ppo'"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"scale_rewards": "std"}, "scale_rewards='std'"),
        ({"top_k": -1}, "top_k=-1"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"adam_beta2": 2.0}, "adam_beta2=2.0"),
        ({"ddp_timeout": 10**18}, "ddp_timeout=1000000000000000000, want seconds, 100000000 at most"),
        ({"reward_timeout": INF}, "reward_timeout=inf"),
        ({"num_train_epochs": INF}, "num_train_epochs=inf, want a finite number"),
        ({"warmup_steps": INF}, "warmup_steps=inf"),
        ({"seed": -1}, "seed=-1, want a number from 0 to 2147483647"),
        ({"data_seed": 2**31}, "data_seed=2147483648"),
        ({"entropy_target": NAN}, "entropy_target=nan"),
        ({"entropy_coef_delta": NAN}, "entropy_coef_delta=nan"),
        ({"entropy_coef_min": NAN}, "entropy_coef_min=nan"),
    ],
)
def test_a_config_out_of_range_is_refused(option, message):
    with pytest.raises(InputError, match=message):
        GRPOConfig(**option)


def test_a_loss_of_the_completion_length_gets_it():
    assert GRPOConfig(loss_type="dr_grpo", max_completion_length=77).loss_config().max_completion_length == 77


def test_an_effective_batch_of_broken_groups_is_refused_before_anything_is_written(make_trainer, tmp_path):
    with pytest.raises(
        InputError, match=r"= 6 sequences .* multiple of num_generations=4; fix: make the product 4 or 8"
    ):
        make_trainer(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert not (tmp_path / "run").exists()


def test_another_runs_directory_is_refused_untouched(make_trainer):
    make_trainer().train()
    with pytest.raises(CheckpointError, match="overwrite"):
        make_trainer(overwrite_output_dir=False)


def test_what_is_no_reward_function_is_refused(make_trainer):
    with pytest.raises(InputError, match="want a function or a non-empty list of functions"):
        make_trainer([])
    with pytest.raises(InputError, match="got 2 reward_weights for 1 reward functions"):
        make_trainer(reward_weights=[1.0, 2.0])
    with pytest.raises(InputError, match="want finite numbers"):
        make_trainer(reward_weights=[NAN])


def test_an_engine_is_given_the_names_of_a_checkpoint(tokenizer, tmp_path):
    """Experts lie in one tensor while they are trained, and one by one in a checkpoint."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **sizes, **experts))
    model.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    learner = Learner(model, GRPOConfig(), Accelerator(cpu=True), max_steps=1)
    served = dict(learner.served_weights())
    assert served.keys() == saved.keys() != model.state_dict().keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in saved.items())
