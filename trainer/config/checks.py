"""Ranges of the options of a run, and which go together; the loss and the sampler check their own."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

from fused_grpo.config import Ranges, check_ranges, option_types
from fused_grpo.errors import InputError
from fused_grpo.trainer.common.threads import LONGEST
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.trl_fields import MISSING

LARGEST_SEED = 2**31 - 1  # NumPy's overflow above it plus a rank
RANGES: Ranges = (
    (
        "at least 1",
        lambda value: value >= 1,
        "per_device_train_batch_size gradient_accumulation_steps num_iterations log_completions_steps "
        "max_completion_length ref_model_sync_steps steps_per_generation generation_batch_size chunk_bytes "
        "max_tokens_per_micro_batch torch_empty_cache_steps ddp_bucket_cap_mb num_generations_eval "
        "vllm_max_model_length max_tool_calling_iterations max_concurrent_tools "
        "score_centering_topk vllm_full_sync_interval per_device_eval_batch_size",
    ),
    (
        "a number of steps, or a share of all steps between 0 and 1",
        lambda value: 0 < value < 1 or (isinstance(value, int) and value >= 1),
        "logging_steps eval_steps save_steps",
    ),
    ("a finite number", math.isfinite, "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
    (
        "a finite number > 0",
        lambda value: 0 < value < math.inf,
        "num_train_epochs adam_epsilon repetition_penalty generate_ahead_max_kl",
    ),
    (
        "at least 0, and finite",
        lambda value: 0 <= value < math.inf,
        "learning_rate router_aux_loss_coef distillation_coef warmup_steps weight_decay dynamic_sampling eval_delay "
        "generate_ahead reward_retries max_skipped_steps rollouts_kept_steps num_completions_to_print "
        "dataloader_num_workers",
    ),
    ("> 0", lambda value: value > 0, "max_logprob_difference"),
    ("in [0, 1)", lambda value: 0 <= value < 1, "adam_beta1 adam_beta2"),
    ("in [0, 1]", lambda value: 0 <= value <= 1, "min_p ref_model_mixup_alpha"),
    ("in (0, 1]", lambda value: 0 < value <= 1, "top_p vllm_gpu_memory_utilization"),
    ("a number of steps > 0, or -1 for epochs", lambda value: value == -1 or value > 0, "max_steps"),
    ("at least 0; 0 does not clip", lambda value: value >= 0, "max_grad_norm"),
    ("at least 0; 0 keeps all", lambda value: value >= 0, "save_total_limit"),
    ("at least 0; 0 means all tokens", lambda value: value >= 0, "top_k"),
    ("> 0: greedy samples give a group no differences", lambda value: 0 < value < math.inf, "temperature"),
    (
        f"seconds, {LONGEST} at most, and > 0",
        lambda value: 0 < value <= LONGEST,
        "ddp_timeout reward_timeout tool_timeout vllm_server_timeout",
    ),
    (f"a number from 0 to {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED, "seed data_seed"),
)


def want(args: Any, names: str, holds: bool, wanted: str) -> None:
    """Raise InputError for what does not hold: an option, and others that it does not go with, or trainer arguments."""
    if not holds:
        first, *others = (f"{name}={getattr(args, name)!r}" if hasattr(args, name) else name for name in names.split())
        *most, last = others or [""]
        given = f" with {', '.join(most)}{' and ' * bool(most)}{last}" if others else ""
        raise InputError(f"got {first}{given}, want {wanted}")


def check_config(args: Any) -> None:
    """Check the range of every option, and that the options go together; InputError at the first that fails."""
    cls: Any = type(args)
    may_be_empty = {*MISSING, "system_prompt"}
    for name in option_types(cls):
        value = getattr(args, name)
        is_empty = value == "" or (isinstance(value, list) and "" in value)
        want(args, name, not is_empty or name in may_be_empty, "text that is not empty; fix: leave it out")
    is_text = not re.search("[\0\ud800-\udfff]", args.output_dir)
    is_text &= args.output_dir.isascii() or sys.getfilesystemencoding() == "utf-8"
    fix = "a path of UTF-8 text, as safetensors writes to; fix: another name, or PYTHONUTF8=1 in an old locale"
    want(args, "output_dir", is_text, fix)
    check_ranges(args, RANGES)
    _check_batch(args)
    _check_optimizer(args)
    _check_engine(args)
    _check_best_model(args)
    _check_estimator(args)
    _check_terms(args)
    _check_curriculum(args)
    resumes_here = not (args.resume_from_checkpoint and args.overwrite_output_dir)
    wanted = "one of the two: overwriting would remove the checkpoint; fix: leave one out"
    want(args, "resume_from_checkpoint overwrite_output_dir", resumes_here, wanted)


def check_arguments(
    args: Any,
    *,
    rollout_func: Any,
    eval_dataset: Any,
    teacher_model: Any,
    tools: Any = None,
    environment_factory: Any = None,
    quantization_config: Any = None,
    rollout_engine: Any = None,
) -> None:
    """Check arguments of the trainer against its options; InputError for what does not go together.

    Warns of losses with another ratio than in their paper.
    """
    if quantization_config and "quantization_config" in (args.model_init_kwargs or {}):
        raise InputError(
            "got quantization_config twice, as an argument and in model_init_kwargs, want it once; fix: the argument"
        )
    check_teacher(args, teacher_model)
    if args.generate_ahead:
        _check_generate_ahead(args, rollout_func, rollout_engine, environment_factory)
    if rollout_func is not None:
        wanted = "an engine with log-probs of tokens that were not drawn; fix: score_centering='off', or such an engine"
        want(args, "score_centering rollout_func", args.score_centering == "off", wanted)
        wanted = "an engine that samples greedily when it is asked to; fix: another estimator, or a rollout_engine"
        want(args, "advantage_estimator rollout_func", args.advantage_estimator != "remax", wanted)
        wanted = "one way to play episodes; fix: call the tools in the function, with an env_mask, or leave it out"
        want(args, "rollout_func tools", not tools, wanted)
        want(args, "rollout_func environment_factory", environment_factory is None, wanted)
    check_evaluates(args, eval_dataset)
    _warn_of_unusual_losses(args)


def check_evaluates(args: Any, eval_dataset: Any) -> None:
    """Raise InputError for evaluations without a set."""
    evaluates = args.eval_on_start or args.eval_strategy in ("steps", "epoch")
    wanted = "an eval_dataset, which is missing; fix: pass it, or leave both out"
    want(args, "eval_strategy eval_on_start", eval_dataset is not None or not evaluates, wanted)


def warn_of_no_best(args: Any, *, has_sets: bool, last: float) -> None:
    """Log a warning, once, where no evaluation will say which checkpoint is the best.

    `last` is the end of the run, in steps or, with `eval_strategy="epoch"`, in epochs.
    """
    between = args.eval_strategy != "no" or (args.eval_at_ends and args.eval_steps is not None)
    if not (args.load_best_model_at_end or args.save_strategy == "best") or (
        has_sets and between and args.eval_delay <= last
    ):
        return
    warn_once(
        f"got save_strategy={args.save_strategy!r} and load_best_model_at_end={args.load_best_model_at_end} in a run "
        f"that evaluates nothing before its end at {last:g} (eval_strategy={args.eval_strategy!r}, eval_delay="
        f"{args.eval_delay:g}, {'an' if has_sets else 'no'} eval_dataset), so that there is no best checkpoint; fix: "
        "an eval_dataset, and eval_strategy='steps' with eval_steps"
    )


def _check_generate_ahead(args: Any, rollout_func: Any, rollout_engine: Any, environment_factory: Any) -> None:
    """Raise InputError for what would be used by the trainer and by the sampling of a later batch at the same time."""
    # It would sample from the model while that is trained.
    want(args, "generate_ahead rollout_func", rollout_func is None, "vLLM alone; fix: leave one of them out")
    # Its object is scored while the next batch is played.
    want(args, "generate_ahead environment_factory", environment_factory is None, "one of them; fix: generate_ahead=0")
    wanted = "vLLM awake: it samples while the trainer learns; fix: leave one of them out"
    want(args, "generate_ahead vllm_enable_sleep_mode", not args.vllm_enable_sleep_mode, wanted)
    own = getattr(rollout_engine, "has_own_weights", True) and getattr(rollout_engine, "samples_in_background", False)
    if rollout_engine is not None and not own:
        raise InputError(
            f"got generate_ahead={args.generate_ahead} with a {type(rollout_engine).__name__}, want weights of its "
            "own, and `generate` and `load_weights` that may run in another thread than the trainer's; fix: "
            "samples_in_background = True where that is so, or generate_ahead=0"
        )


def check_teacher(args: Any, teacher_model: Any) -> None:
    """Raise InputError for a teacher whose divergence has no weight, or a weight without a teacher."""
    if args.distillation_coef > 0 and teacher_model is None:
        raise InputError(
            f"got distillation_coef={args.distillation_coef} without a teacher_model, want one to distil from; fix: a "
            "path, a hub id, a model, or 'self' for the reference model"
        )
    if args.distillation_coef == 0 and teacher_model is not None:
        raise InputError(
            "got a teacher_model with distillation_coef=0, where it has no effect, want a weight > 0; fix: "
            "distillation_coef=1.0, or leave the teacher out"
        )


def _warn_of_unusual_losses(args: Any) -> None:
    """Log a warning, once, where the level of the ratio or its bound is not that of the loss's paper."""
    is_default = args.epsilon == 0.2 and args.epsilon_high is None
    match args.loss_type, args.importance_sampling_level:
        case "bnpo" | "dr_grpo" | "dapo" | "cispo", "sequence":
            why = "which weights each sequence by its completion length; fix for GSPO as published: loss_type='grpo'"
        case "vespo", "sequence":
            why = "which weights whole sequences itself; fix: importance_sampling_level='token'"
        case "luspo", "token":
            why = "whose paper takes the ratio of a sequence; fix: importance_sampling_level='sequence'"
        case "gmpo", _ if is_default:
            why = "whose epsilon bounds a log-ratio there; fix for GMPO as published: epsilon=0.4"
        case "ipo", _ if is_default:
            why = "whose epsilon bounds a change of probability there; fix for IPO as published: epsilon=0.1, delta=1e4"
        case _:
            return
    level = f"importance_sampling_level={args.importance_sampling_level!r}"
    warn_once(f"got {level} and epsilon={args.epsilon} with loss_type={args.loss_type!r}, {why}")


def _check_batch(args: Any) -> None:
    has_batch_baseline = args.advantage_estimator == "reinforce_plus_plus" and not args.dynamic_sampling
    needs_no_group = has_batch_baseline or args.advantage_estimator == "remax"
    # What a completion learns from a teacher depends on no other.
    enough = args.num_generations >= (1 if needs_no_group or args.distillation_coef > 0 else 2)
    want(args, "num_generations", enough, "at least 2: an advantage compares a group's members")
    both = args.steps_per_generation is not None and args.generation_batch_size is not None
    want(args, "steps_per_generation generation_batch_size", not both, "one of the two; fix: leave one out")
    if args.generation_batch_size is None:  # else it depends on the number of processes
        args.micro_batches_per_generation(1)
    for name in ("share_prompts", "max_tokens_per_micro_batch", "tf32", "vllm_dtype") if args.batch_invariant else ():
        wanted = "each sequence computed alone, and trainer and sampler in one precision; fix: leave either out"
        want(args, f"{name} batch_invariant", getattr(args, name) in (None, False, "auto"), wanted)


def _check_optimizer(args: Any) -> None:
    by_step = args.lr_scheduler_type != "reduce_lr_on_plateau"
    want(args, "lr_scheduler_type", by_step, "a schedule that depends on the number of the step alone")
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        return
    from transformers.training_args import OptimizerNames  # a second that most runs need not wait

    names = [name.value for name in OptimizerNames]
    want(args, "optim", args.optim in names, f"one of {', '.join(names)}")
    after_backward = "lomo" not in args.optim and not args.optim.endswith("layerwise")
    want(args, "optim", after_backward, "one that steps after the backward pass: a step is checked before it is made")
    schedule_free = args.optim.startswith("schedule_free")
    want(args, "optim", not schedule_free, "one that samples and saves the weights that it trains")


def _check_engine(args: Any) -> None:
    if "trust_remote_code" in (args.vllm_engine_kwargs or {}):
        raise InputError(
            "got trust_remote_code in vllm_engine_kwargs, want it in one place, for transformers and vLLM; "
            "fix: trust_remote_code=True as an option of its own"
        )
    by_nccl, by_server = args.vllm_weight_transfer == "nccl", args.vllm_mode == "server"
    wanted = "one of the two: an adapter goes through files; fix: leave vllm_weight_transfer out"
    want(args, "vllm_adapter_sync vllm_weight_transfer", not (args.vllm_adapter_sync and by_nccl), wanted)
    can_send_changes = by_server and not by_nccl and not args.vllm_adapter_sync
    wanted = "servers that get all weights through files; fix: leave vllm_full_sync_interval out, or the others"
    names = "vllm_full_sync_interval vllm_mode vllm_weight_transfer vllm_adapter_sync"
    want(args, names, can_send_changes or args.vllm_full_sync_interval == 1, wanted)
    in_process = not by_server and args.use_vllm is not False
    for name in ("vllm_engine_kwargs", "vllm_enable_sleep_mode", "vllm_adapter_sync", "vllm_dtype"):
        has_effect = in_process or (by_server and name == "vllm_adapter_sync")
        wanted = "it with vLLM in the trainer's process; fix: leave it out, or set it where the server is started"
        want(args, f"{name} vllm_mode use_vllm", has_effect or getattr(args, name) in (None, False, {}, "auto"), wanted)
    has_vllm = args.use_vllm is not False
    want(args, "vllm_mode use_vllm", has_vllm or not by_server, "one or the other; fix: leave use_vllm out")


def _check_best_model(args: Any) -> None:
    """A best model needs a metric, and checkpoints at evaluations: else the best one might not be saved."""
    needs_metric = args.load_best_model_at_end or args.save_strategy == "best"
    wanted = "the name of a metric of the evaluation, such as 'reward'; fix: set it"
    has_metric = args.metric_for_best_model is not None
    want(args, "metric_for_best_model load_best_model_at_end save_strategy", has_metric or not needs_metric, wanted)
    if not args.load_best_model_at_end or args.save_strategy == "best":
        return
    steps = args.eval_strategy == "steps"
    # The quotient of two shares of all steps has a rounding error.
    times = args.save_steps / args.eval_steps if steps and (args.save_steps < 1) == (args.eval_steps < 1) else 0.5
    saves_evaluated = args.eval_strategy == args.save_strategy and (not steps or abs(times - round(times)) <= 1e-9)
    wanted = (
        "an evaluation at each checkpoint; fix: one strategy, with a multiple of eval_steps, or save_strategy='best'"
    )
    names = "load_best_model_at_end eval_strategy eval_steps save_strategy save_steps"
    want(args, names, saves_evaluated, wanted)


def _check_estimator(args: Any) -> None:
    """An estimator other than GRPO's has its own scale, and knows no order of scaling and adding rewards."""
    if args.advantage_estimator != "grpo":
        scales = ("group", "none") if args.advantage_estimator == "dr_grpo" else ("group",)
        wanted = "the default: that has a formula of its own; fix: leave it out, or advantage_estimator='grpo'"
        want(args, "scale_rewards advantage_estimator", args.scale_rewards in scales, wanted)
        adds_first = args.multi_objective_aggregation == "sum_then_normalize"
        want(args, "multi_objective_aggregation advantage_estimator", adds_first, wanted)
    if args.advantage_estimator == "pkpo":
        wanted = "a number from 2 to that; fix: more generations, or advantage_estimator='rloo' for the mean reward"
        want(args, "pkpo_k num_generations", 2 <= args.pkpo_k <= args.num_generations, wanted)


def _check_terms(args: Any) -> None:
    """Terms of the loss beside the policy's: of a reference, of entropy, of a teacher, of score centering."""
    wanted = "beta > 0, for there is no reference model without; fix: that, or leave sync_ref_model out"
    want(args, "sync_ref_model beta", args.beta != 0.0 or not args.sync_ref_model, wanted)
    if args.use_adaptive_entropy:
        is_within = args.entropy_coef_min <= args.entropy_coef <= args.entropy_coef_max
        wanted = "it within these bounds of use_adaptive_entropy; fix: move it or a bound"
        want(args, "entropy_coef entropy_coef_min entropy_coef_max", is_within, wanted)
    wanted = "between 0 and 1, without both; fix: distillation_kind='forward_kl' for TRL's 0, 'reverse_kl' for its 1"
    want(args, "distillation_beta", 0 < args.distillation_beta < 1, wanted)
    kind, within_kept = args.score_centering, args.sampling(seed=0).wants_support
    if args.distillation_coef > 0:
        wanted = "no report, which does not know the gradient of the divergence; fix: leave variance_report out"
        want(args, "distillation_coef variance_report", not args.variance_report, wanted)
        wanted = "no entropy bonus: distillation_kind='reverse_kl' contains one; fix: leave either out"
        want(args, "distillation_coef entropy_coef", args.entropy_coef <= 0, wanted)
        want(args, "distillation_coef use_adaptive_entropy", not args.use_adaptive_entropy, wanted)
        wanted = "log-probs over the whole vocabulary; fix: leave the latter out, or sampling_support='off'"
        want(args, "distillation_coef top_p top_k min_p", not within_kept, wanted)
        want(args, "score_centering distillation_coef", kind == "off", "one of them; fix: leave the other out")
    names = "score_centering top_p top_k min_p sampling_support"
    wanted = (
        "truncated sampling with log-probs over the kept tokens; fix: a truncation and sampling_support='auto', or "
    )
    want(args, names, within_kept or kind != "kept", f"{wanted}score_centering='topk'")
    wanted = "log-probs over the whole vocabulary; fix: score_centering='kept', or sampling_support='off'"
    want(args, names, not within_kept or kind != "topk", wanted)


def _check_curriculum(args: Any) -> None:
    if args.curriculum == "off":
        return
    wanted = "the rewards of a batch before the next one is drawn; fix: generate_ahead=0, or curriculum='off'"
    want(args, "generate_ahead curriculum", args.generate_ahead == 0, wanted)
    wanted = "an order that the rewards decide; fix: shuffle_dataset=True, or curriculum='off'"
    want(args, "shuffle_dataset curriculum", args.shuffle_dataset, wanted)
    wanted = "at least 2, whose rewards differ; fix: num_generations=2, or curriculum='off'"
    want(args, "num_generations curriculum", args.num_generations >= 2, wanted)
