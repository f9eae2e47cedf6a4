"""Ranges of the options of a run, and which go together; the loss and the sampler check their own."""

from __future__ import annotations

import math
from typing import Any

from fused_grpo.config import Ranges, check_ranges
from fused_grpo.errors import InputError
from fused_grpo.trainer.common.warnings import warn_once

# Timeouts of the standard library overflow a little above LONGEST; NumPy's seeds above LARGEST_SEED plus a rank.
LONGEST, LARGEST_SEED = 10**8, 2**31 - 1
RANGES: Ranges = (
    (
        "at least 1",
        lambda value: value >= 1,
        "per_device_train_batch_size gradient_accumulation_steps num_iterations log_completions_steps "
        "max_completion_length ref_model_sync_steps steps_per_generation generation_batch_size chunk_bytes "
        "max_tokens_per_micro_batch torch_empty_cache_steps ddp_bucket_cap_mb num_generations_eval "
        "num_completions_to_print vllm_max_model_length max_tool_calling_iterations max_concurrent_tools "
        "score_centering_topk vllm_full_sync_interval",
    ),
    (
        "a number of steps, or a share of all steps between 0 and 1",
        lambda value: 0 < value < 1 or (isinstance(value, int) and value >= 1),
        "logging_steps eval_steps save_steps",
    ),
    ("a finite number", math.isfinite, "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
    ("a finite number > 0", lambda value: 0 < value < math.inf, "num_train_epochs adam_epsilon repetition_penalty"),
    (
        "finite and >= 0",
        lambda value: 0 <= value < math.inf,
        "learning_rate router_aux_loss_coef distillation_coef warmup_steps weight_decay",
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        "dynamic_sampling generate_ahead reward_retries max_skipped_steps rollouts_kept_steps",
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
        "between 0 and 1, without both; fix: distillation_kind='forward_kl' for TRL's 0, 'reverse_kl' for its 1",
        lambda value: 0 < value < 1,
        "distillation_beta",
    ),
    (
        f"seconds, {LONGEST} at most, and > 0",
        lambda value: 0 < value <= LONGEST,
        "ddp_timeout reward_timeout tool_timeout vllm_server_timeout",
    ),
    (f"a number from 0 to {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED, "seed data_seed"),
    (
        "a schedule that depends on the number of the step alone",
        lambda value: value != "reduce_lr_on_plateau",
        "lr_scheduler_type",
    ),
)


def check_config(args: Any) -> None:
    """Check the range of every option, and that the options go together; InputError at the first that fails."""
    check_ranges(args, RANGES)
    of_batch = args.advantage_estimator == "reinforce_plus_plus" and not args.dynamic_sampling
    alone = of_batch or args.advantage_estimator == "remax"
    # What a completion learns from a teacher depends on no other.
    enough = args.num_generations >= (1 if alone or args.distillation_coef > 0 else 2)
    want(args, "num_generations", enough, "at least 2: an advantage compares a group's members")
    _check_optimizer(args)
    _check_together(args)


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
    """Check arguments of the trainer against its options. Warns of losses with another ratio than in their paper.

    Raises:
        InputError: `quantization_config` twice; `rollout_func` with score centering, ReMax or tools, evaluations
            without a dataset, `generate_ahead` with environments or with what cannot sample beside the trainer, or as
            `check_teacher`.
    """
    if quantization_config and "quantization_config" in (args.model_init_kwargs or {}):
        raise InputError(
            "got quantization_config twice, as an argument and in model_init_kwargs, want it once; fix: the argument"
        )
    check_teacher(args, teacher_model)
    if args.generate_ahead:
        _check_generate_ahead(args, rollout_func, rollout_engine, environment_factory)
    if rollout_func is not None and args.score_centering != "off":
        raise InputError(
            f"got score_centering={args.score_centering!r} with rollout_func, want an engine that returns log-probs of "
            "tokens that were not drawn; fix: score_centering='off', or leave rollout_func out"
        )
    if rollout_func is not None and args.advantage_estimator == "remax":
        raise InputError(
            "got advantage_estimator='remax' with rollout_func, want an engine that samples greedily when it is asked "
            "to; fix: another estimator, or a rollout_engine in place of the function"
        )
    if rollout_func is not None and (tools or environment_factory is not None):
        raise InputError(
            "got rollout_func with tools or environment_factory, want one way to play episodes; fix: call the tools in "
            "the function, with an env_mask, or leave it out"
        )
    if eval_dataset is None and (args.eval_on_start or args.eval_strategy in ("steps", "epoch")):
        raise InputError(
            f"got eval_strategy={args.eval_strategy!r} and eval_on_start={args.eval_on_start} without an eval_dataset, "
            "want one; fix: pass it, or leave both out"
        )
    _warn_of_unusual_losses(args)


def _check_generate_ahead(args: Any, rollout_func: Any, rollout_engine: Any, environment_factory: Any) -> None:
    """Raise InputError for what would be used by the trainer and by the sampling of a later batch at the same time."""
    got = f"got generate_ahead={args.generate_ahead} with"
    if rollout_func is not None:  # it would sample from the model while that is trained
        raise InputError(f"{got} rollout_func, want vLLM alone; fix: leave one of them out")
    if environment_factory is not None:  # its object is scored while the next batch is played
        raise InputError(f"{got} environment_factory, want one of them; fix: generate_ahead=0")
    if args.vllm_enable_sleep_mode:
        raise InputError(
            f"{got} vllm_enable_sleep_mode=True, want vLLM awake: it samples while the trainer learns; fix: leave "
            "one of them out"
        )
    own = getattr(rollout_engine, "has_own_weights", True) and getattr(rollout_engine, "samples_in_background", False)
    if rollout_engine is not None and not own:
        raise InputError(
            f"{got} a {type(rollout_engine).__name__}, want weights of its own, and `generate` and `load_weights` that "
            "may run in another thread than the trainer's; fix: samples_in_background = True where that is so, or "
            "generate_ahead=0"
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
    """Log a warning, once, where the level of the ratio is not that of the loss's paper."""
    sequence, loss = args.importance_sampling_level == "sequence", args.loss_type
    level = f"got importance_sampling_level={args.importance_sampling_level!r} with loss_type={loss!r}, "
    if sequence and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        warn_once(
            f"{level}which weights each sequence by its completion length; fix for GSPO as published: loss_type='grpo'"
        )
    if sequence and loss == "vespo":
        warn_once(f"{level}which weights whole sequences itself; fix: importance_sampling_level='token'")
    if not sequence and loss == "luspo":
        warn_once(f"{level}whose paper takes the ratio of a sequence; fix: importance_sampling_level='sequence'")
    if loss == "gmpo" and args.epsilon == 0.2 and args.epsilon_high is None:
        warn_once(
            "got loss_type='gmpo' with epsilon=0.2, which bounds a log-ratio there; fix for GMPO as published: "
            "epsilon=0.4"
        )
    if loss == "ipo" and args.epsilon == 0.2 and args.epsilon_high is None:
        warn_once(
            "got loss_type='ipo' with epsilon=0.2, which bounds a change of probability there; fix for IPO as "
            "published: epsilon=0.1, delta=1e4"
        )


def want(args: Any, name: str, holds: bool, wanted: str) -> None:
    """Raise InputError for an option that does not hold."""
    if not holds:
        raise InputError(f"got {name}={getattr(args, name)!r}, want {wanted}")


def _check_optimizer(args: Any) -> None:
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        return
    from transformers.training_args import OptimizerNames  # a second that most runs need not wait

    names = [name.value for name in OptimizerNames]
    want(args, "optim", args.optim in names, f"one of {', '.join(names)}")
    after_backward = "lomo" not in args.optim and not args.optim.endswith("layerwise")
    want(args, "optim", after_backward, "one that steps after the backward pass: a step is checked before it is made")
    schedule_free = args.optim.startswith("schedule_free")
    want(args, "optim", not schedule_free, "one that samples and saves the weights that it trains")


def _check_distillation(args: Any) -> None:
    if args.distillation_coef == 0:
        return
    with_teacher = f"with distillation_coef={args.distillation_coef}"
    if args.variance_report:
        raise InputError(f"got variance_report=True {with_teacher}, whose gradient it does not know; fix: leave it out")
    if args.entropy_coef > 0 or args.use_adaptive_entropy:
        raise InputError(
            f"got entropy_coef={args.entropy_coef} (use_adaptive_entropy={args.use_adaptive_entropy}) {with_teacher}, "
            "want no entropy bonus: distillation_kind='reverse_kl' contains one; fix: leave either out"
        )
    if args.sampling(seed=0).wants_support:
        raise InputError(
            f"got top_p={args.top_p}, top_k={args.top_k} and min_p={args.min_p} {with_teacher}, want a divergence and "
            "log-probs over the whole vocabulary; fix: leave them out, or sampling_support='off'"
        )


def _check_score_centering(args: Any) -> None:
    """The tokens that the correction sums over are those that were kept, or else the likely ones of them all."""
    kind, within_kept = args.score_centering, args.sampling(seed=0).wants_support
    if kind != "off" and args.distillation_coef > 0:
        raise InputError(
            f"got score_centering={kind!r} with distillation_coef={args.distillation_coef}, want one of them; fix: "
            "leave the other out"
        )
    cut = f"got score_centering={kind!r} with top_p={args.top_p}, top_k={args.top_k}, min_p={args.min_p} and "
    if kind == "kept" and not within_kept:
        raise InputError(
            f"{cut}sampling_support={args.sampling_support!r}, want truncated sampling with log-probs over the tokens "
            "that are kept; fix: a truncation and sampling_support='auto', or score_centering='topk'"
        )
    if kind == "topk" and within_kept:
        raise InputError(
            f"{cut}sampling_support={args.sampling_support!r}, want log-probs over the whole vocabulary; fix: "
            "score_centering='kept', or sampling_support='off'"
        )


def _check_best_model(args: Any) -> None:
    """A best model needs a metric, and checkpoints at evaluations: else the best one might not be saved."""
    if args.metric_for_best_model is None and (args.load_best_model_at_end or args.save_strategy == "best"):
        raise InputError(
            f"got load_best_model_at_end={args.load_best_model_at_end} and save_strategy={args.save_strategy!r} "
            "without metric_for_best_model, want the name of a metric of the evaluation, such as 'reward'; fix: set it"
        )
    if not args.load_best_model_at_end or args.save_strategy == "best":
        return
    steps = args.eval_strategy == "steps"
    # The quotient of two shares of all steps has a rounding error.
    times = args.save_steps / args.eval_steps if steps and (args.save_steps < 1) == (args.eval_steps < 1) else 0.5
    if args.eval_strategy != args.save_strategy or (steps and abs(times - round(times)) > 1e-9):
        raise InputError(
            f"got load_best_model_at_end=True with eval_strategy={args.eval_strategy!r} (eval_steps={args.eval_steps}) "
            f"and save_strategy={args.save_strategy!r} (save_steps={args.save_steps}), want an evaluation at each "
            "checkpoint; fix: the same strategy and a multiple of eval_steps, or save_strategy='best'"
        )


def _check_estimator(args: Any) -> None:
    """An estimator other than GRPO's has its own scale, and knows no order of scaling and adding rewards."""
    others = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
    for name, default in others.items() if args.advantage_estimator != "grpo" else ():
        if getattr(args, name) not in (default, "none" if args.advantage_estimator == "dr_grpo" else default):
            raise InputError(
                f"got {name}={getattr(args, name)!r} with advantage_estimator={args.advantage_estimator!r}, which has "
                "a formula of its own; fix: leave it out, or advantage_estimator='grpo'"
            )
    if args.advantage_estimator == "pkpo" and not 2 <= args.pkpo_k <= args.num_generations:
        raise InputError(
            f"got pkpo_k={args.pkpo_k} with num_generations={args.num_generations}, want a number from 2 to that; fix: "
            "more generations, or advantage_estimator='rloo' for the mean reward"
        )


def _check_curriculum(args: Any) -> None:
    if args.curriculum == "off":
        return
    others = (
        ("generate_ahead", 0, "the rewards of a batch before the next one is drawn"),
        ("shuffle_dataset", True, "an order that the rewards decide"),
        (
            "num_generations",
            max(2, args.num_generations),
            "at least 2: a curriculum is made from rewards that differ in a group",
        ),
    )
    for name, wanted, why in others:
        if (got := getattr(args, name)) != wanted:
            raise InputError(
                f"got {name}={got} with curriculum={args.curriculum!r}, want {why}; fix: {name}={wanted}, or "
                "curriculum='off'"
            )


def _check_batch_invariant(args: Any) -> None:
    """Each sequence is computed alone, in the precision of the sampler."""
    for name in ("share_prompts", "max_tokens_per_micro_batch", "tf32", "vllm_dtype") if args.batch_invariant else ():
        if (got := getattr(args, name)) not in (None, False, "auto"):
            raise InputError(
                f"got {name}={got!r} with batch_invariant=True, want each sequence computed alone, and trainer and "
                "sampler in one precision; fix: leave either out"
            )


def _check_together(args: Any) -> None:
    if "trust_remote_code" in (args.vllm_engine_kwargs or {}):
        raise InputError(
            "got trust_remote_code in vllm_engine_kwargs, want it in one place, for transformers and vLLM; "
            "fix: trust_remote_code=True as an option of its own"
        )
    if args.steps_per_generation is not None and args.generation_batch_size is not None:
        raise InputError(
            f"got steps_per_generation={args.steps_per_generation} and "
            f"generation_batch_size={args.generation_batch_size}, want one of the two; fix: leave one out"
        )
    if args.generation_batch_size is None:  # else it depends on the number of processes
        args.micro_batches_per_generation(1)
    in_process = args.vllm_mode == "colocate" and args.use_vllm is not False
    of_servers = ["vllm_adapter_sync"] if args.vllm_mode == "server" else []
    if args.vllm_adapter_sync and args.vllm_weight_transfer == "nccl":
        raise InputError(
            "got vllm_adapter_sync=True with vllm_weight_transfer='nccl', want one of the two: an adapter goes through "
            "files; fix: leave vllm_weight_transfer out"
        )
    if args.vllm_full_sync_interval > 1 and (
        args.vllm_mode != "server" or args.vllm_weight_transfer == "nccl" or args.vllm_adapter_sync
    ):
        raise InputError(
            f"got vllm_full_sync_interval={args.vllm_full_sync_interval} with vllm_mode={args.vllm_mode!r}, "
            f"vllm_weight_transfer={args.vllm_weight_transfer!r} and vllm_adapter_sync={args.vllm_adapter_sync}, want "
            "servers that get all weights through files; fix: leave vllm_full_sync_interval out, or the others"
        )
    for name in ("vllm_engine_kwargs", "vllm_enable_sleep_mode", "vllm_adapter_sync", "vllm_dtype"):
        if getattr(args, name) not in (None, False, {}, "auto") and not (in_process or name in of_servers):
            raise InputError(
                f"got {name}={getattr(args, name)!r} with vllm_mode={args.vllm_mode!r} and use_vllm={args.use_vllm}, "
                "want it with vLLM in the trainer's process; fix: leave it out, or set it where the server is started"
            )
    if args.router_replay and args.use_vllm is False:
        raise InputError(
            "got router_replay=True with use_vllm=False, want vLLM, which computes a model in another way than the "
            "trainer does; fix: leave either out"
        )
    _check_best_model(args)
    _check_estimator(args)
    _check_distillation(args)
    _check_score_centering(args)
    _check_curriculum(args)
    _check_batch_invariant(args)
    if args.sync_ref_model and args.beta == 0.0:
        raise InputError(
            "got sync_ref_model=True with beta=0, where there is no reference model; fix: beta > 0, or leave it out"
        )
    if args.vllm_mode == "server" and args.use_vllm is False:
        raise InputError("got vllm_mode='server' with use_vllm=False, want one or the other; fix: leave use_vllm out")
    if args.resume_from_checkpoint and args.overwrite_output_dir:
        raise InputError(
            "got resume_from_checkpoint and overwrite_output_dir, want one of the two: overwriting would remove "
            "the checkpoint"
        )
    if args.use_adaptive_entropy and not args.entropy_coef_min <= args.entropy_coef <= args.entropy_coef_max:
        raise InputError(
            f"got entropy_coef={args.entropy_coef} outside of [{args.entropy_coef_min}, {args.entropy_coef_max}], its "
            "bounds under use_adaptive_entropy; fix: move it or entropy_coef_min / entropy_coef_max"
        )
