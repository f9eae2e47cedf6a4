"""What TRL's trainer does or has that ours does not: behaviour with the size of its effect, methods and attributes.

The tables in docs/from-trl.md are made from this file and from trl_fields.py, by scripts/trl_table.py.
"""

from __future__ import annotations

from typing import NamedTuple

# A size that somebody has yet to measure; the house rules find it in a page.
UNMEASURED = "TO" + "DO-JUDGE"
NO_NUMBERS = "none: no number of a step depends on it"


class Behaviour(NamedTuple):
    """One thing that TRL does in another way, and what that changes."""

    trl: str
    here: str
    size: str


BEHAVIOURS = [
    Behaviour('"bnpo" is normalised by each micro-batch', "by the whole optimizer step", UNMEASURED),
    Behaviour(
        "a generation that is used for several optimizer steps is shuffled into them, completion by completion",
        "groups stay whole, and a step learns from one generated batch",
        UNMEASURED,
    ),
    Behaviour("metrics are means over micro-batches and ranks of their means", "means over all tokens", UNMEASURED),
    Behaviour("an epoch leaves out the prompts that fill no batch", "the next epoch goes on with them", UNMEASURED),
    Behaviour("old log-probs cost another forward pass with vLLM", "on policy they are those of the step", "none"),
    Behaviour("the trainer is a subclass of `transformers.Trainer`", "its loop is its own, on Accelerate", "none"),
    Behaviour(
        '`vllm_mode="server"` needs `trl vllm-serve`',
        "it needs a plain vLLM server with `VLLM_SERVER_DEV_MODE=1` ([scaling out](scaling-out.md))",
        "none",
    ),
    Behaviour("`output_dir` is overwritten", "refused without `overwrite_output_dir`", "none"),
    Behaviour("resuming loses the rollouts in progress", "a resumed run is exact and keeps them", UNMEASURED),
]

# Of the fields in trl_fields.DIFFERENT, those that change the numbers of a run. None of the others does.
SIZES = {
    "bf16": UNMEASURED,
    "generation_batch_size": UNMEASURED,
    "gradient_accumulation_steps": UNMEASURED,
    "num_generations_eval": UNMEASURED,
    "steps_per_generation": UNMEASURED,
    "vllm_importance_sampling_mode": UNMEASURED,
}

# By reason, the public methods and attributes of TRL's `GRPOTrainer` that ours does not have. Attributes that repeat an
# option are not in here: `trainer.args` has them.
ABSENT: dict[str, str] = {
    "`learner` makes the steps: `learner.optimizer`, `learner.scheduler`, `learner.reference`": """
        training_step compute_loss compute_loss_context_manager autocast_smart_context_manager create_optimizer
        create_optimizer_and_scheduler create_scheduler get_learning_rates get_decay_parameter_names
        get_optimizer_cls_and_kwargs get_optimizer_group optimizer lr_scheduler optimizer_cls_and_kwargs ref_model
        model_wrapped current_gradient_accumulation_steps compute_loss_func loss_is_scaled_for_ga
        model_accepts_loss_kwargs""",
    "the loss is `fused_grpo.loss`, its options `args.loss_config()`": """
        get_gamma_weights get_high_entropy_mask get_off_policy_mask epsilon_low aux_loss_enabled label_smoother""",
    "`sampler` draws the rows as they are needed": """
        get_train_dataloader get_eval_dataloader get_test_dataloader get_batch_samples get_total_train_batch_size
        set_initial_training_values num_examples data_collator""",
    "an evaluation samples and scores: there are no predictions": """
        evaluation_loop predict prediction_step compute_metrics preprocess_logits_for_metrics gather_function
        can_return_loss""",
    "no search of hyperparameters": """
        hyperparameter_search call_model_init model_init hp_name hp_search_backend hp_space objective
        compute_objective""",
    "FLOP are not counted; `num_tokens` is": "floating_point_ops store_flos current_flos",
    "`accelerator` has it; DeepSpeed and model parallelism are not supported": """
        create_accelerator_and_postprocess get_cp_size get_sp_size get_tp_size deepspeed is_deepspeed_enabled
        is_fsdp_enabled is_fsdp_xla_enabled is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled is_model_parallel
        is_distributed_loading_by_transformers place_model_on_device""",
    "`rewards` has it: `rewards.functions`, `rewards.names`, `rewards.weights`": """
        reward_funcs reward_func_names reward_processing_classes""",
    "`engine` samples": "vllm_generation generation_config continuous_batching_config eos_token_ids rollout_func",
    "no tools or environments": """
        tools environments environment_factories chat_template async_loop async_loop_thread async_loop_ready_event""",
    "no use for it": """
        commit_scheduler is_in_train model_preparation_time neftune_hook_handle push_in_progress""",
}


def reasons() -> dict[str, str]:
    """By name of a method or attribute, why it is not here."""
    return {name: why for why, names in ABSENT.items() for name in names.split()}
