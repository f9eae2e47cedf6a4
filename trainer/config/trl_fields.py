"""How the fields of TRL 1.16's `GRPOConfig` relate to ours (the same, different, or missing), and why.

`GRPOConfig` accepts every field of TRL's by name. A missing one may be passed at its default, which changes nothing;
any other value is refused with the reason below. The table in docs/from-trl.md is made from this file, and a test
compares it with the fields of TRL's own class. The missing arguments of `GRPOTrainer` are below the fields.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from fused_grpo.errors import UnsupportedError

DIFFERENT: dict[str, str] = {
    "output_dir": '"runs/grpo" by default; refused where it holds another run',
    "project": '"fused-grpo" by default',
    "resume_from_checkpoint": "True finds the newest complete checkpoint; exact, rollouts in progress included",
    "steps_per_generation": "a multiple of gradient_accumulation_steps; completions are not shuffled over the steps",
    "generation_batch_size": "a multiple of the effective batch; see steps_per_generation",
    "gradient_accumulation_steps": "losses are normalised over the whole step, so it changes memory and nothing else",
    "bf16": "None: on if there is a GPU; weights stay in fp32 under autocast",
    "optim": '"adamw_torch" and "adamw_torch_fused"; others through GRPOTrainer(optimizers=...)',
    "warmup_steps": "below 1 it is a share of all steps, as in transformers 5",
    "vllm_importance_sampling_mode": '"token_truncate" by default: the ratio of a long sequence goes to 0',
    "vllm_importance_sampling_correction": "of rollouts of vLLM, of a server or of an engine that you pass",
    "use_vllm": "None (default): True if vLLM is installed",
    "vllm_mode": '"server" calls plain vLLM servers (python -m vllm.entrypoints...), one or several',
    "vllm_server_host": "127.0.0.1 by default, and refused elsewhere without vllm_server_allow_remote",
    "vllm_server_base_url": "one URL, or a list for replicas",
    "vllm_max_model_length": "None: measured from the data, not the model's maximum",
    "min_p": "None means 0",
    "eval_strategy": '"steps" by default where there is an eval set; also before the first step and after the last',
    "eval_steps": "None: only before the first and after the last step",
    "num_generations_eval": "None: one greedy completion per prompt",
    "report_to": "through Accelerate's trackers",
    "logging_steps": "steps between two lines on the console; files and trackers have every step",
    "save_strategy": '"steps" or "no"; the last step is always saved',
    "hub_model_id": "the final model only, at the end",
    "push_to_hub": "the final model only, at the end",
    "log_completions": "on the console; rollouts.jsonl always has all of them",
}


class Missing(NamedTuple):
    """A field that only TRL has: its default there, and why it is missing here."""

    default: Any
    why: str


_MULTIMODAL = "text only"
_TOOLS = "no tools or environments; rollout_func can run an agent"
_TRANSFORMERS = "an option of transformers.Trainer's loop, which is not used"
_ENGINE = "vllm_engine_kwargs passes any option to vLLM"
_ACCELERATE = "set by `accelerate launch` and its configuration file"
_DEEPSPEED = "DDP or FSDP2 by `accelerate launch`; DeepSpeed is refused"
_PRECISION = "bf16 or fp32; weights stay in fp32"
_LOADER = "rows are read as they are needed, by one process"
_HUB = "push_to_hub uploads the final model, once, with the account that is logged in"
_FUSED = "the head is fused here already"
_LATER = "not built yet"
_TRACKIO = "configure trackio through its own environment variables"
_COMPILE = "compile the model before you pass it"

MISSING: dict[str, Missing] = {
    "router_aux_loss_coef": Missing(None, "the auxiliary loss of mixture-of-experts routers is " + _LATER),
    "cast_lm_head_to_fp32": Missing(False, "log-probs are computed in fp32 always, at no such cost"),
    "ds3_gather_for_generation": Missing(True, _DEEPSPEED),
    "pad_to_multiple_of": Missing("auto", "sequences are packed, not padded"),
    "cache_implementation": Missing(None, "set generation_kwargs={'cache_implementation': ...}"),
    "vllm_model_impl": Missing("vllm", _ENGINE + " (model_impl)"),
    "vllm_group_port": Missing(51216, "the port is chosen; weights go by shared memory or NCCL (vllm_weight_transfer)"),
    "vllm_tensor_parallel_size": Missing(1, "an engine in process has one device; a server may span several"),
    "max_tool_calling_iterations": Missing(None, _TOOLS),
    "log_multimodal": Missing(True, _MULTIMODAL),
    "log_unique_prompts": Missing(False, "the table shows the best and the worst of different prompts"),
    "log_completions_hub_repo": Missing(None, "rollouts.jsonl is a file to upload as you like"),
    "use_transformers_continuous_batching": Missing(False, "vLLM does that"),
    "transformers_continuous_batching_config": Missing(None, "vLLM does that"),
    "use_transformers_paged": Missing(False, "vLLM does that"),
    "vllm_importance_sampling_cap": Missing(None, "deprecated in TRL; set vllm_importance_sampling_clip_max"),
    "optim_args": Missing(None, "pass GRPOTrainer(optimizers=(yours, None))"),
    "optim_target_modules": Missing(None, "pass GRPOTrainer(optimizers=(yours, None))"),
    "average_tokens_across_devices": Missing(True, "always on"),
    "label_smoothing_factor": Missing(0.0, "a policy gradient has no labels"),
    "fp16": Missing(False, _PRECISION),
    "bf16_full_eval": Missing(False, _PRECISION),
    "fp16_full_eval": Missing(False, _PRECISION),
    "tf32": Missing(None, "call torch.set_float32_matmul_precision before"),
    "torch_compile": Missing(False, _COMPILE),
    "torch_compile_backend": Missing(None, _COMPILE),
    "torch_compile_mode": Missing(None, _COMPILE),
    "use_liger_kernel": Missing(False, _FUSED),
    "liger_kernel_config": Missing(None, _FUSED),
    "use_cache": Missing(False, "training needs no KV cache"),
    "neftune_noise_alpha": Missing(None, _TRANSFORMERS),
    "torch_empty_cache_steps": Missing(None, _TRANSFORMERS),
    "auto_find_batch_size": Missing(False, "another batch size would change the update"),
    "logging_strategy": Missing("steps", "every step is logged; logging_steps is for the console"),
    "logging_first_step": Missing(False, "the first step is always shown"),
    "log_on_each_node": Missing(True, "the first process alone logs"),
    "logging_nan_inf_filter": Missing(
        True, "a step whose loss is not finite stops the run, or is skipped (max_skipped_steps)"
    ),
    "include_num_input_tokens_seen": Missing("no", "num_tokens is logged"),
    "log_level": Missing("passive", "call logging.getLogger('fused_grpo').setLevel(...)"),
    "log_level_replica": Missing("warning", "call logging.getLogger('fused_grpo').setLevel(...)"),
    "disable_tqdm": Missing(None, "there is no bar to disable"),
    "trackio_space_id": Missing(None, _TRACKIO),
    "trackio_bucket_id": Missing(None, _TRACKIO),
    "trackio_static_space_id": Missing(None, _TRACKIO),
    "eval_delay": Missing(0, _TRANSFORMERS),
    "per_device_eval_batch_size": Missing(8, "an evaluation is one generate call; the engine batches it"),
    "prediction_loss_only": Missing(False, _TRANSFORMERS),
    "eval_on_start": Missing(False, "always on with an eval set"),
    "eval_do_concat_batches": Missing(True, _TRANSFORMERS),
    "eval_use_gather_object": Missing(False, _TRANSFORMERS),
    "eval_accumulation_steps": Missing(None, _TRANSFORMERS),
    "include_for_metrics": Missing([], _TRANSFORMERS),
    "batch_eval_metrics": Missing(False, _TRANSFORMERS),
    "save_on_each_node": Missing(False, "the first process alone writes"),
    "enable_jit_checkpoint": Missing(False, "always on: SIGTERM ends a run with a checkpoint after the current step"),
    "hub_token": Missing(None, _HUB),
    "hub_strategy": Missing("every_save", _HUB),
    "hub_always_push": Missing(False, _HUB),
    "hub_revision": Missing(None, _HUB),
    "load_best_model_at_end": Missing(False, _TRANSFORMERS),
    "metric_for_best_model": Missing(None, _TRANSFORMERS),
    "greater_is_better": Missing(None, _TRANSFORMERS),
    "ignore_data_skip": Missing(False, "a checkpoint holds the position in the data: no row is skipped"),
    "restore_callback_states_from_checkpoint": Missing(False, "there are no callbacks"),
    "full_determinism": Missing(False, "runs are deterministic where PyTorch's own kernels are"),
    "use_cpu": Missing(False, "hide the GPU with CUDA_VISIBLE_DEVICES="),
    "accelerator_config": Missing(None, _ACCELERATE),
    "parallelism_config": Missing(None, _ACCELERATE),
    "dataloader_drop_last": Missing(False, "the next epoch continues the last batch: no row is dropped"),
    "dataloader_num_workers": Missing(0, _LOADER),
    "dataloader_pin_memory": Missing(True, _LOADER),
    "dataloader_persistent_workers": Missing(False, _LOADER),
    "dataloader_prefetch_factor": Missing(None, _LOADER),
    "dataloader_multiprocessing_context": Missing(None, _LOADER),
    "dataloader_in_order": Missing(True, _LOADER),
    "remove_unused_columns": Missing(False, "all columns go to the rewards"),
    "label_names": Missing(None, _TRANSFORMERS),
    "train_sampling_strategy": Missing("random", "set shuffle_dataset"),
    "length_column_name": Missing("length", _TRANSFORMERS),
    "ddp_find_unused_parameters": Missing(None, _ACCELERATE),
    "ddp_bucket_cap_mb": Missing(None, _ACCELERATE),
    "ddp_broadcast_buffers": Missing(None, _ACCELERATE),
    "ddp_static_graph": Missing(None, _ACCELERATE),
    "ddp_backend": Missing(None, _ACCELERATE),
    "fsdp": Missing(None, _ACCELERATE),
    "fsdp_config": Missing(None, _ACCELERATE),
    "deepspeed": Missing(None, _DEEPSPEED),
    "debug": Missing("", _TRANSFORMERS),
    "skip_memory_metrics": Missing(True, "docs/trainer.md says what is logged"),
    "do_train": Missing(False, "your script decides"),
    "do_eval": Missing(False, "your script decides"),
    "do_predict": Missing(False, "your script decides"),
    "local_rank": Missing(-1, _ACCELERATE),
}


def refusing_unsupported(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that accepts TRL's missing fields at their defaults, and raises UnsupportedError otherwise."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in MISSING.keys() & options.keys():
            refuse_unless_default(name, options.pop(name))
        init(self, *args, **options)

    return checked


def refuse_unless_default(name: str, value: Any) -> None:
    """Check a value of a field that only TRL has.

    Raises:
        UnsupportedError: it is not TRL's default.
    """
    missing = MISSING[name]
    if value != missing.default:
        raise UnsupportedError(
            f"got {name}={value!r}, a field of TRL's that this trainer does not have: {missing.why}; "
            f"fix: leave it out (default {missing.default!r})"
        )


MISSING_ARGUMENTS = {
    "callbacks": "metrics are in metrics.jsonl and in trackers (report_to); checkpoints in save_steps",
    "tools": "rollout_func can run an agent",
    "environment_factory": "rollout_func can run an agent",
    "quantization_config": "load the quantized model yourself and pass it",
}


def refuse_trainer_arguments(arguments: dict[str, Any]) -> None:
    """Check the keyword arguments of `GRPOTrainer` that it does not have.

    Raises:
        UnsupportedError: an argument of TRL's trainer that is set.
        TypeError: an argument that TRL's trainer does not have either.
    """
    for name, value in arguments.items():
        if name not in MISSING_ARGUMENTS:
            raise TypeError(f"GRPOTrainer got an unexpected keyword argument {name!r}")
        if value:
            raise UnsupportedError(f"got {name}, which this trainer does not have; fix: {MISSING_ARGUMENTS[name]}")
