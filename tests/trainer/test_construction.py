"""What a trainer refuses when it is made, and the names of the weights that it serves."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fused_grpo.errors import CheckpointError, InputError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.learner import Learner

NAN = float("nan")


def test_an_effective_batch_of_broken_groups_is_refused_before_anything_is_written(make_trainer, tmp_path):
    with pytest.raises(
        InputError, match=r"= 6 sequences .* multiple of num_generations=4; fix: make the product 4 or 8"
    ):
        make_trainer(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("use_vllm", "corrects"), [(False, False), (True, True)])
def test_a_rollout_func_is_corrected_for_where_it_is_vllms(
    make_model, tokenizer, tmp_path, monkeypatch, use_vllm, corrects
):
    """TRL's rule. It is vLLM's with `use_vllm` alone: by itself, the log-probs are for the user to look at."""
    monkeypatch.setattr("fused_grpo.trainer.engines.engine_choice._make_engine", lambda *_: None)
    args = GRPOConfig(str(tmp_path), use_vllm=use_vllm)
    options = {"processing_class": tokenizer, "rollout_func": lambda prompts, trainer: None}
    trainer = GRPOTrainer(make_model(), lambda completions: completions, args, [{"prompt": "1+1="}], **options)
    assert (trainer.learner.loss_config.sampling_correction is not None) == corrects


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
