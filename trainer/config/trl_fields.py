"""The fields of TRL 1.16's `GRPOConfig` that have no effect here, and why.

`GRPOConfig` has every field of TRL's, so that parsers and callbacks find them. One that has no effect here is in
MISSING: its default changes nothing, other values that change nothing are accepted with a warning that has the reason,
and all others are refused with it. A test compares them with the fields of TRL's own class. The missing arguments of
`GRPOTrainer` are below the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from fused_grpo.errors import FusedGRPOError, InputError, UnsupportedError
from fused_grpo.trainer.common.warnings import warn_once

Config = TypeVar("Config")


class Missing(NamedTuple):
    """A field that only TRL has: its default there, and why it has no effect here.

    `accepts` is True for values other than the default that change nothing either; `kind` is the field's type where
    that is not the default's. `error` is raised for the others.
    """

    default: Any
    why: str
    accepts: Callable[[Any], bool] = lambda value: False
    kind: Any = None
    error: type[FusedGRPOError] = UnsupportedError


def _any(value: Any) -> bool:
    return True


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, bool | str | list | tuple | dict) and not value)


def _only_loads_data(value: Any) -> bool:
    """Whether an `accelerator_config` asks for nothing that changes a step: how rows are loaded does not."""
    settings = value.to_dict() if callable(getattr(value, "to_dict", None)) else value
    if not isinstance(settings, Mapping):
        return _empty(settings)
    loading = {"dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"}
    return all(name in loading or not setting for name, setting in settings.items())


_TOOLS = "agents are not supported yet: no tools or environments, and all tokens of a completion are the model's"
_PREDICTIONS = "an evaluation logs rewards and keeps no predictions"
_ACCELERATE = "set by `accelerate launch` and its configuration file"
_DEEPSPEED = "DDP or FSDP2 by `accelerate launch`; DeepSpeed is refused"
_LOADER = "rows are read as they are needed, by one process"
_HUB = "push_to_hub uploads the final model, once, with the account that is logged in"
_COMPILE = "compile the model before you pass it"

MISSING: dict[str, Missing] = {
    "cast_lm_head_to_fp32": Missing(
        False, "logits are summed and kept in fp32 always; in bf16 runs their factors are in bf16", _any
    ),
    "ds3_gather_for_generation": Missing(True, _DEEPSPEED, _any),
    "pad_to_multiple_of": Missing("auto", "sequences are packed, not padded", _any, str | None),
    "vllm_group_port": Missing(
        51216,
        "a free port is chosen; weights go by shared memory, by NCCL only where vllm_weight_transfer says so",
        _any,
    ),
    "vllm_tensor_parallel_size": Missing(1, "an engine in process has one device; a server may span several"),
    "max_tool_calling_iterations": Missing(None, _TOOLS, _any, int | None),
    "log_multimodal": Missing(True, "text only", _any),
    "log_unique_prompts": Missing(False, "the table shows the best and the worst of different prompts", _any),
    "log_completions_hub_repo": Missing(None, "rollouts.jsonl is a file to upload as you like"),
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "use_transformers_paged"), Missing(False, "vLLM does that")
    ),
    "transformers_continuous_batching_config": Missing(None, "vLLM does that", _any),
    "average_tokens_across_devices": Missing(
        True, "as in TRL's own loss, the tokens of all processes are counted", _any
    ),
    "label_smoothing_factor": Missing(0.0, "a policy gradient has no labels"),
    **dict.fromkeys(("fp16", "bf16_full_eval", "fp16_full_eval"), Missing(False, "bf16 or fp32; weights stay in fp32")),
    "torch_compile": Missing(False, _COMPILE),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), Missing(None, _COMPILE)),
    "use_liger_kernel": Missing(
        False, "the head is fused already; for Liger's layers set model_init_kwargs={'use_kernels': True}", _any
    ),
    "liger_kernel_config": Missing(None, "the head is fused here already", _any),
    "use_cache": Missing(False, "training needs no KV cache, and sampling has its own", _any),
    "neftune_noise_alpha": Missing(None, "noise in the embeddings would be in the log-probs too", kind=float | None),
    # TRL refuses it too, with a ValueError.
    "auto_find_batch_size": Missing(False, "another batch size would change the update", error=InputError),
    "log_on_each_node": Missing(True, "the first process alone logs", _any),
    "logging_nan_inf_filter": Missing(
        True, "a step whose loss is not finite stops the run, or is skipped (max_skipped_steps)", _any
    ),
    "include_num_input_tokens_seen": Missing("no", "num_tokens is logged", _any),
    "disable_tqdm": Missing(None, "there is no bar to disable", _any, bool | None),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        Missing(None, "configure trackio through its own environment variables"),
    ),
    "per_device_eval_batch_size": Missing(8, "an evaluation is one generate call; the engine batches it", _any),
    **dict.fromkeys(
        ("prediction_loss_only", "eval_use_gather_object", "batch_eval_metrics"), Missing(False, _PREDICTIONS, _any)
    ),
    "eval_do_concat_batches": Missing(True, _PREDICTIONS, _any),
    "eval_accumulation_steps": Missing(None, _PREDICTIONS, _any, int | None),
    "include_for_metrics": Missing([], _PREDICTIONS, _any, list[str]),
    "save_on_each_node": Missing(False, "the first process alone writes"),
    "enable_jit_checkpoint": Missing(
        False, "always on: SIGTERM ends a run with a checkpoint after the current step", _any
    ),
    **dict.fromkeys(("hub_token", "hub_revision"), Missing(None, _HUB)),
    "hub_strategy": Missing("every_save", _HUB),
    "hub_always_push": Missing(False, _HUB),
    "ignore_data_skip": Missing(False, "a checkpoint holds the position in the data: no row is skipped"),
    "accelerator_config": Missing(None, _ACCELERATE, _only_loads_data),
    "parallelism_config": Missing(None, _ACCELERATE),
    "dataloader_drop_last": Missing(False, "the next epoch continues the last batch: no row is dropped"),
    "dataloader_num_workers": Missing(0, _LOADER, _any),
    **dict.fromkeys(("dataloader_pin_memory", "dataloader_in_order"), Missing(True, _LOADER, _any)),
    "dataloader_persistent_workers": Missing(False, _LOADER, _any),
    "dataloader_prefetch_factor": Missing(None, _LOADER, _any, int | None),
    "dataloader_multiprocessing_context": Missing(None, _LOADER, _any),
    "remove_unused_columns": Missing(False, "the model gets the prompt alone; all columns go to the rewards", _any),
    "label_names": Missing(None, "a policy gradient has no labels", _any, list[str] | None),
    "train_sampling_strategy": Missing("random", "set shuffle_dataset"),
    "length_column_name": Missing("length", "rows are not grouped by length", _any),
    **dict.fromkeys(("fsdp", "fsdp_config"), Missing(None, _ACCELERATE, _empty)),
    "deepspeed": Missing(None, _DEEPSPEED, _empty),
    "debug": Missing("", "an option of transformers.Trainer's loop, which is not used", _empty),
    "skip_memory_metrics": Missing(True, "memory is not logged; docs/trainer.md says what is", _any),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), Missing(False, "your script decides", _any)),
    "local_rank": Missing(-1, "set by the launcher's environment", _any),
}


def with_trl_fields(cls: type[Config]) -> type[Config]:
    """A class that `dataclass` is about to make, with the fields that only TRL has: parsers and callbacks read them."""
    for name, missing in MISSING.items():
        from_default = str | None if missing.default is None else type(missing.default)
        cls.__annotations__[name] = missing.kind or from_default
        listed = isinstance(missing.default, list)
        setattr(cls, name, dataclasses.field(default_factory=list) if listed else missing.default)
    return cls


def refuse_unless_harmless(name: str, value: Any) -> None:
    """Raise where a value of a field that only TRL has would change the run; report any other value, once."""
    missing = MISSING[name]
    if value == missing.default:
        return
    if not missing.accepts(value):
        raise missing.error(
            f"got {name}={value!r}, a field of TRL's that this trainer does not have: {missing.why}; "
            f"fix: leave it out (default {missing.default!r})"
        )
    warn_once(f"got {name}={repr(value)[:200]}, which changes nothing here: {missing.why}")


MISSING_ARGUMENTS = {
    "tools": f"leave it out: {_TOOLS}",
    "environment_factory": f"leave it out: {_TOOLS}",
    "quantization_config": "load the quantized model yourself and pass it as `model`",
}
