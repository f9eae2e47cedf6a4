"""Ten steps beside TRL's trainer, in fp32, from the same weights and rollouts: the same parameters, and everything that
TRL logs, under the same name and with the same value. What differs by design is in docs/from-trl.md.

`-rP` shows the largest differences of each case.
"""

from typing import Any

import pytest
import trl_runs
from trl_compared import PARAMETERS, compare, with_tools

from fused_grpo.config import TRL_LOSS_TYPES

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore")]  # of TRL's, about what is experimental

GRID = [(loss_type, beta, updates) for loss_type in TRL_LOSS_TYPES for beta in (0.0, 0.04) for updates in (1, 2)]
SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
LUSPO = {"importance_sampling_level": "sequence", "loss_type": "luspo"}
OTHERS: dict[str, dict[str, Any]] = {
    "sequence-level ratio": SEQUENCE,
    "luspo of the paper": LUSPO,
    "clipped twice": {"delta": 1.2, "epsilon_high": 0.28, "loss_type": "dr_grpo"},
    "no clip": {"epsilon": 10.0, "epsilon_high": 10.0, "num_iterations": 2, "loss_type": "grpo"},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "scaled by batch": {"scale_rewards": "batch", "loss_type": "grpo"},
    "not scaled": {"scale_rewards": "none"},
    "truncated masked": {"mask_truncated_completions": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 3.7},
    "KL that is biased": {"beta": 0.04, "use_bias_correction_kl": False},
    "reference that follows": {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 3},
    "temperature": {"temperature": 0.7},
    "weight decay, cosine": {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.05},
    "logged every 3 steps": {"logging_steps": 3, "beta": 0.04},
}


def with_logprobs(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same rollouts with log-probs of another sampler: far from the policy's, and not to be corrected for."""
    rollouts = trl_runs.completions(prompts, trainer)
    return {**rollouts, "logprobs": [[-2.0 - 0.1 * (token % 7) for token in ids] for ids in rollouts["completion_ids"]]}


def of_one_length(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same completions of prompts that need no padding."""
    rollouts = trl_runs.completions(prompts, trainer)
    return {**rollouts, "prompt_ids": [(ids * 4)[:4] for ids in rollouts["prompt_ids"]]}


@pytest.mark.parametrize(("loss_type", "beta", "updates"), GRID)
def test_ten_steps_are_those_of_trl(trl, loss_type, beta, updates):
    high = 5.0 if loss_type == "cispo" else 0.28
    compare(trl, loss_type=loss_type, beta=beta, num_iterations=updates, epsilon_high=high)


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_options_are_those_of_trl(trl, options):
    compare(trl, **options)


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.5}, {"entropy_coef": 0.5, **LUSPO}])
def test_the_most_uncertain_tokens_are_those_of_trl(trl, options):
    """No entropy is near a threshold here: with 0.35 the next one is 2.7e-4 away."""
    compare(trl, model=trl_runs.saved_model(sharpness=20.0), top_entropy_quantile=0.35, **options)


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"epsilon": 1e-3, "num_iterations": 2, **SEQUENCE}])
def test_leaving_out_zero_advantages_changes_nothing_but_the_entropy(trl, options):
    compare(trl, changes={"skip_zero_advantages": True}, but=["entropy"], **options)


def test_log_probs_of_a_rollout_func_change_nothing_without_vllm(trl):
    compare(trl, rollout_func=with_logprobs, num_iterations=2)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sequence"])
def test_tokens_of_an_environment_are_left_out_as_by_trl(trl, loss_type):
    options = SEQUENCE if loss_type == "sequence" else {"loss_type": loss_type}
    compare(trl, rollout_func=with_tools, num_iterations=2, beta=0.04, epsilon_high=5.0, **options)


def test_an_adapter_is_trained_as_by_trl(trl):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    compare(trl, peft_config=adapter, beta=0.04, num_iterations=2)


def test_virtual_tokens_are_trained_as_by_trl(trl):
    """With prompts of one length: PEFT has the virtual tokens before the padding, so TRL's log-probs depend on it."""
    from peft import PromptTuningConfig

    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    compare(trl, peft_config=prompt, rollout_func=of_one_length, beta=0.04, num_iterations=2, max_steps=3)


def test_a_difference_is_seen(trl):
    """The comparison itself: TRL's trainer with other options than ours."""
    model = trl_runs.saved_model()
    one, _ = trl_runs.run(trl.GRPOTrainer, model=model, max_steps=2)
    other, _ = trl_runs.run(trl.GRPOTrainer, model=model, max_steps=2, learning_rate=1.02e-3)
    assert max((one[name] - other[name]).abs().max() for name in one) > PARAMETERS
