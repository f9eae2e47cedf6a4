"""What TRL's trainer does that ours does not: behaviour with the size of its effect.

The tables in docs/from-trl.md are made from this file and from trainer/config/trl_fields.json and trl_names.json, by
trl_table.py.
"""

from __future__ import annotations

from typing import NamedTuple

# A size that somebody has yet to measure; the house rules find it in a page.
UNMEASURED = "TO" + "DO-JUDGE"
NO_NUMBERS = "none"

# Fields with the same name and another default or meaning.
DIFFERENT: dict[str, str] = {
    "output_dir": '"runs/grpo" by default; another run in it is moved to former-run-<n> there',
    "project": '"fused-grpo" by default',
    "resume_from_checkpoint": "True finds the newest complete checkpoint",
    "model_init_kwargs": "trust_remote_code in it is used for tokenizer and engine too",
    "delta": "dropped with a warning where the loss has no unclipped branch (TRL: no warning)",
    "steps_per_generation": "rounded up to a multiple of gradient_accumulation_steps; not shuffled",
    "generation_batch_size": "rounded up to a multiple of the effective batch; see steps_per_generation",
    "gradient_accumulation_steps": "losses are normalised over the whole step",
    "router_aux_loss_coef": "of each micro-batch, as there; under accumulation those hold other sequences",
    "bf16": "None: on if there is a GPU; weights stay in fp32 under autocast",
    "optim": "all but those that step inside the backward pass (LOMO, layer-wise) and schedule-free ones",
    "warmup_steps": "below 1 it is a share of all steps, as in transformers 5",
    "vllm_importance_sampling_mode": '"token_truncate" by default: the ratio of a long sequence goes to 0',
    "vllm_importance_sampling_correction": "of rollouts of vLLM, of a server or of an engine that you pass",
    "use_vllm": "None (default): True if vLLM is installed",
    "vllm_mode": '"server" calls plain vLLM servers (`vllm serve`), one or several',
    "vllm_server_host": "127.0.0.1 by default, and refused elsewhere without vllm_server_allow_remote",
    "vllm_server_base_url": "one URL, or a list for replicas",
    "vllm_max_model_length": "None: measured from the data, not the model's maximum",
    "vllm_model_impl": '"vllm" leaves the choice to vLLM',
    "generation_kwargs": "beams with a warning",
    "num_train_epochs": "rounded up to whole generated batches",
    "lr_scheduler_type": "no `reduce_lr_on_plateau`",
    "shuffle_dataset": "another order of the seed",
    "eval_strategy": '"no", and by default also before the first and after the last step (eval_at_ends)',
    "eval_steps": "with eval_at_ends: None is at the ends alone",
    "num_generations_eval": "None: one greedy completion per prompt",
    "report_to": "through Accelerate's trackers, with transformers' names (train/loss, eval/reward)",
    "logging_steps": "means in state.log_history and on the console; files and trackers have every step",
    "save_strategy": "the trained model is in output_dir/final too",
    "metric_for_best_model": 'no default: name a metric of the evaluation, "reward"',
    "hub_model_id": "the final model only, at the end",
    "push_to_hub": "the final model only, at the end",
    "log_completions": "on the console; rollouts.jsonl has those of each step (rollouts_kept_steps)",
}


class Behaviour(NamedTuple):
    """One thing that TRL does in another way, and what that changes."""

    trl: str
    here: str
    size: str


# Sizes are those of ten steps of both trainers in fp32, from the same weights and rollouts; the run moves parameters by
# 5.2e-3. Where nothing else differs, parameters agree to 1.5e-7 and metrics to 1.4e-5.
BEHAVIOURS = [
    Behaviour(
        '"bnpo" is normalised by each micro-batch',
        "by the whole optimizer step",
        "with an accumulation of 2: parameters 3.1e-3, loss 0.19",
    ),
    Behaviour(
        "a generated batch that several optimizer steps use is shuffled; they have one mean number of tokens",
        "groups stay whole; each has its own number",
        "2 steps per generation: parameters 6.3e-3, loss 0.30; 4 steps: 6.5e-3, 0.96",
    ),
    Behaviour(
        "`top_entropy_quantile` is taken of each micro-batch",
        "of the whole optimizer step",
        "0.3 with an accumulation of 2: parameters 6.2e-3, loss 0.089",
    ),
    Behaviour(
        "the entropy bonus is the mean of each micro-batch",
        "the mean of the whole optimizer step",
        "0.1 with an accumulation of 2: parameters 8.3e-5",
    ),
    Behaviour(
        "`policy_loss`, `entropy`, `kl`, clip ratios are means over micro-batches, and count masked sequences",
        "of the step, without these",
        "with an accumulation of 2: `policy_loss` 0.15",
    ),
    Behaviour(
        "log-probs of truncated sampling (`top_p`, `top_k`, `min_p`) are over the whole vocabulary",
        'over those that were kept (`sampling_support`; "off" is TRL\'s way)',
        "the ratio to the sampler, on policy: 1 here, there the kept probability, such as 0.80",
    ),
    Behaviour(
        "the router loss counts the prompts of masked completions (`mask_truncated_completions`)",
        "they are not in the batch",
        "parameters (they move by 9e-3) 3e-5 to 1.3e-4 at a coefficient of 0.001",
    ),
    Behaviour(
        "an epoch leaves out the prompts that fill no batch",
        "the next epoch goes on with them",
        "17 prompts, 3 epochs, 2 prompts a step: 24 steps there, 26 here",
    ),
    Behaviour(
        "virtual tokens of prompt tuning are before a prompt's padding: log-probs depend on the batch",
        "they are in front of the sequence",
        "prompts of 1 to 4 tokens: parameters 2.5e-3; of one length: 1.9e-9",
    ),
    Behaviour(
        "`eval_` metrics are means over batches, of all sets under one name; `eval_kl`, `eval_entropy`, clip ratios",
        "of the whole set, by name; `eval_loss` of one on-policy step; none of the others",
        "evaluations only",
    ),
    Behaviour("old log-probs cost another forward pass with vLLM", "on policy they are those of the step", "none"),
    Behaviour(
        "the trainer is a subclass of `transformers.Trainer`",
        "its loop is its own, on Accelerate; a subclass that overrides what it does not call is refused",
        "none",
    ),
    Behaviour(
        "some options count that are changed in `trainer.args` after the trainer is made, and so does another dataset",
        "both are refused by name, but for options of logging (not `report_to`), evaluation and saving",
        "an error",
    ),
    Behaviour(
        "`entropy` and the metrics of the sampler are of all completions",
        "without those of advantage 0 where these have no gradient, unless `skip_zero_advantages=False`",
        "metrics only",
    ),
    Behaviour(
        '`vllm_mode="server"` needs `trl vllm-serve`',
        "it needs a plain vLLM server with `VLLM_SERVER_DEV_MODE=1` ([scaling out](scaling-out.md))",
        "none",
    ),
    Behaviour(
        "a second run in an `output_dir` writes over the first",
        "the first one's files are moved to `former-run-<n>` there (`overwrite_output_dir` removes them)",
        "none",
    ),
    Behaviour(
        "LoRA on `lm_head` is an error",
        "it is trained",
        "none",
    ),
    Behaviour(
        "resuming loses the rollouts in progress", "a resumed run is exact and keeps them", "one generated batch"
    ),
]

# Of the fields in DIFFERENT, those that change the numbers of a run. None of the others does.
SIZES = {
    "bf16": "on a GPU: rounding to bf16",
    "generation_batch_size": "as `steps_per_generation`",
    "gradient_accumulation_steps": "above, for bnpo, quantile and entropy; other losses 1.2e-7",
    "num_generations_eval": "evaluations only",
    "num_train_epochs": "a part of a batch",
    "shuffle_dataset": "other samples",
    "optim": "none where it is accepted",
    "router_aux_loss_coef": "0.001, two micro-batches: parameters (they move by 9e-3) 2e-4 to 4e-4; of one: 1.2e-7",
    "steps_per_generation": "above; where it is rounded: other samples",
    "use_vllm": "another sampler",
    "vllm_importance_sampling_mode": "vLLM's log-probs against the trainer's: none if they agree",
}
