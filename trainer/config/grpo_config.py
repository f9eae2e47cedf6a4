"""`GRPOConfig`: the options of a run. Names, defaults and meanings are TRL's; the field docstrings are the `--help`.

docs/trainer.md says at which point of a step which of them counts. A field that only TRL has is read by the parsers of
TRL's scripts, and refused with the reason where it would change the run: `trl_fields.json` has them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from fused_grpo.config import BOUNDED, Correction, GRPOLossConfig, LossOptions, check_option_types, take_plain_numbers
from fused_grpo.errors import FusedGRPOError, WrongTypeError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.checks import check_config
from fused_grpo.trainer.config.derived_options import OVERRIDDEN, DerivedOptions, complete_intervals, normalise
from fused_grpo.trainer.config.trl_fields import (
    MISSING,
    OPTIONS_HELP,
    READ,
    TRAINER_ARGUMENTS,
    refuse_unless_harmless,
    refusing_others,
    with_help,
    with_trl_fields,
)
from fused_grpo.trainer.types import SamplingParams

# HfArgumentParser of transformers has one type per option, that of its text: of a union, the second member but None.
# So some annotations have another order or another type when they are read than they have for a type checker.
if TYPE_CHECKING:
    JSONObject = dict[str, Any] | None
    PathOrTrue = str | bool | None
    Scale = str | bool
else:
    JSONObject = dict[str, Any] | str | None
    PathOrTrue = str | None
    Scale = str

PYTHON_TYPES: dict[str, Any] = {
    "resume_from_checkpoint": bool | str | None,
    "scale_rewards": Literal["group", "batch", "none"],
}


@refusing_others(TRAINER_ARGUMENTS, OPTIONS_HELP)
@with_help
@dataclass
@with_trl_fields
class GRPOConfig(LossOptions, DerivedOptions):
    """Options of a GRPO run.

    Raises:
        InputError: a value out of its range, or options that do not go together.
        UnsupportedError: an option of TRL's that this trainer does not have, set to something else than its default.
    """

    output_dir: str = "runs/grpo"
    """Directory of metrics, rollouts, report and checkpoints. Another run in it is moved to former-run-<n> there."""
    _: KW_ONLY
    overwrite_output_dir: bool = False
    """Remove the files of an earlier run in `output_dir` first."""
    resume_from_checkpoint: PathOrTrue = None
    """Resume from the newest complete checkpoint in `output_dir` (True), or from this one (a path)."""
    run_name: str | None = None
    """Name of the run in trackers. None is the name of `output_dir`."""
    seed: int = 42
    """Random seed of sampling and dropout, and of the prompt order unless `data_seed` is set."""
    data_seed: int | None = None
    """Random seed of the prompt order. None is `seed`."""
    full_determinism: bool = False
    """Use deterministic algorithms of PyTorch alone, and fail where there is none. It may be slower."""
    use_cpu: bool = False
    """Train on the CPU although there is an accelerator."""

    max_steps: int = -1
    """Number of optimizer steps. -1 makes `num_train_epochs` passes over the prompts."""
    num_train_epochs: float = 3.0
    """Number of passes over the prompts where `max_steps` is -1."""
    per_device_train_batch_size: int = 8
    """Number of sequences (not prompts) in a micro-batch of one process."""
    gradient_accumulation_steps: int = 1
    """Number of micro-batches per optimizer step: a larger step in the same memory."""
    num_generations: int = 8
    """Number of completions per prompt, the size of a group. It must divide the sequences of a generated batch."""
    num_iterations: int = 1
    """Number of passes over each generated batch. Beyond 1 the ratio leaves 1 and clipping has an effect."""
    steps_per_generation: int | None = None
    """Number of micro-batches per generation, rounded up to a multiple of `gradient_accumulation_steps`. None is that
    many."""
    generation_batch_size: int | None = None
    """Number of sequences per generation, over all processes. Excludes `steps_per_generation`."""
    max_tokens_per_micro_batch: int | None = None
    """Number of tokens, prompts included, that limits a micro-batch instead of `per_device_train_batch_size`."""
    share_prompts: bool | None = None
    """Compute a prompt once for its completions in a micro-batch, kept apart by a mask; loss and gradients stay the
    same. None: where the model allows it and it costs less. True raises where the model does not; False never."""
    dynamic_sampling: int = 0
    """Number of further generations for groups whose rewards are all equal (DAPO). 0 keeps such groups."""
    curriculum: Literal["off", "difficulty", "unequal_rewards"] = "off"
    """Draw prompts more often whose groups have unequal rewards: those of their level of the column "difficulty", or
    each prompt's own ("unequal_rewards"). "off" draws each prompt once in an epoch."""

    skip_zero_advantages: bool = True
    """Leave completions with advantage 0 out of the forward pass where they have no gradient (beta=0, no teacher, no
    entropy term). Loss and gradients stay the same; metrics such as `entropy` are of the others. False keeps all."""
    generate_ahead: int = 0
    """Number k of batches that vLLM samples during training: rollouts are up to k generations old. True is 1. With
    vllm_mode="colocate" each process starts a vLLM server beside itself for it."""
    generate_ahead_max_kl: float | None = None
    """Have fewer batches in flight, but 1, where rollouts would be further from the policy that learns from them. In
    nats per token: `sampling/mismatch_kl`, above that of rollouts on policy. None: always `generate_ahead`."""

    model_init_kwargs: JSONObject = None
    """Arguments of `from_pretrained`, for the model and for reward models that are paths or hub ids."""
    router_aux_loss_coef: float | None = None
    """Weight of the auxiliary loss of mixture-of-experts routers. None is the model's own; 0 is none."""
    router_replay: bool = False
    """Train a mixture of experts with the experts that vLLM sampled each token with, whatever rounding chooses (R3)."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights, in transformers and in the engine."""
    disable_dropout: bool = False
    """Set every dropout of the policy to 0."""
    bf16: bool | None = None
    """Use mixed precision. None uses it where there is a GPU."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, to save memory."""
    gradient_checkpointing_kwargs: JSONObject = None
    """Arguments of `torch.utils.checkpoint`, which None leaves non-reentrant; every_n_layers and offload."""
    activation_checkpointing: bool | None = None
    """Another name of gradient_checkpointing, as transformers has it from 5.24 on."""
    activation_checkpointing_kwargs: JSONObject = None
    """Another name of gradient_checkpointing_kwargs."""
    tf32: bool | None = None
    """Allow TF32 in fp32 matrix products of the backbone. None leaves PyTorch's setting."""
    torch_empty_cache_steps: int | None = None
    """Number of optimizer steps after which the device's memory cache is emptied. None never does."""
    batch_invariant: bool = False
    """Compute each sequence alone, so that the others of a batch do not change the bits of its log-probs, and sample
    with vLLM's VLLM_BATCH_INVARIANT=1 (docs/batch-invariance.md). It is slower."""
    chunk_bytes: int | None = None
    """Bytes of a chunk of logits. None is 96 MiB on a CPU, and on a GPU up to 4096 rows within 1/48 of its memory."""

    ddp_timeout: int = 1800
    """Number of seconds that processes wait for each other before they fail."""
    ddp_backend: str | None = None
    """Backend of the process group: "nccl", "gloo", ... None is that of the device."""
    ddp_find_unused_parameters: bool | None = None
    """Let DDP look for parameters without a gradient. None is False."""
    ddp_bucket_cap_mb: int | None = None
    """Size of DDP's buckets of gradients, in MB. None is DDP's."""
    ddp_broadcast_buffers: bool | None = None
    """Broadcast buffers at each forward pass of DDP. None is DDP's."""
    ddp_static_graph: bool | None = None
    """Tell DDP that the graph is the same in each step. None is DDP's."""
    max_skipped_steps: int = 0
    """Number of consecutive steps that may be skipped because their loss or gradient is not finite."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: str = "linear"
    """Name of a scheduler of transformers: "linear", "cosine", "constant", "constant_with_warmup", ..."""
    lr_scheduler_kwargs: JSONObject = None
    """Further arguments of the scheduler."""
    warmup_steps: float = 0
    """Number of optimizer steps in which the learning rate rises from 0; below 1, a share of all steps."""
    optim: str = "adamw_torch_fused"
    """Name of an optimizer of transformers: "adamw_torch_fused", "adafactor", "adamw_bnb_8bit", ... One of your own:
    `GRPOTrainer(optimizers=(yours, None))`."""
    optim_args: str | None = None
    """Further arguments of some optimizers, as "name=value,name=value"."""
    optim_target_modules: list[str] | str | None = None
    """Modules that low-rank optimizers (GaLore, APOLLO) project: names, a regular expression, or "all-linear"."""
    weight_decay: float = 0.0
    """Weight decay, for all parameters but biases and norms, which transformers finds by name."""
    adam_beta1: float = 0.9
    """First beta of AdamW."""
    adam_beta2: float = 0.999
    """Second beta of AdamW."""
    adam_epsilon: float = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: float | None = 1.0
    """Greatest global gradient norm; gradients above it are scaled down. 0 or None leaves them as they are."""

    sync_ref_model: bool = False
    """Update the reference model from the policy during training."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the reference model at each update."""
    ref_model_sync_steps: int = 512
    """Number of optimizer steps between two updates of the reference model."""
    distillation_coef: float = 0.0
    """Weight of the divergence of the policy from `teacher_model`, over the whole vocabulary and for every token."""
    distillation_kind: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence from the teacher (docs/divergence.md)."""
    distillation_beta: float = 0.5
    """Weight of the teacher in the mixture of "jsd"."""
    teacher_model_init_kwargs: JSONObject = None
    """Arguments of `from_pretrained`, for a teacher that is a path or hub id."""
    use_adaptive_entropy: bool = False
    """Move `entropy_coef` by `entropy_coef_delta` after each step, towards `entropy_target` (Skywork-OR1)."""
    entropy_coef_min: float = 0.0
    """Lower bound of the adaptive `entropy_coef`."""
    entropy_coef_max: float = 1.0
    """Upper bound of the adaptive `entropy_coef`."""
    entropy_coef_delta: float = 0.005
    """Change of the adaptive `entropy_coef` per step."""
    entropy_target: float = 0.2
    """Mean entropy per token, in nats, above which there is no bonus."""
    mask_truncated_completions: bool = False
    """Mask completions that were cut at the length limit."""
    vllm_importance_sampling_correction: bool = True
    """Correct for the difference between vLLM's log-probs and the trainer's."""
    vllm_importance_sampling_mode: Correction = "token_truncate"
    """Kind of the correction: "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", or "icepop":
    "token_mask" with bounds of 0.5 and 5."""
    vllm_importance_sampling_clip_max: float | None = 3.0
    """Upper bound of the correction."""
    vllm_importance_sampling_clip_min: float | None = None
    """Lower bound of the correction."""
    vllm_importance_sampling_cap: float | None = None
    """Deprecated name of `vllm_importance_sampling_clip_max`, which it replaces."""

    scale_rewards: Scale = "group"
    """Divisor of advantages: the standard deviation of the "group" (True), of the "batch", or "none" (False)."""
    advantage_estimator: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "maxrl",
        "opo",
        "gpg",
        "pkpo",
        "remax",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ] = "grpo"
    """Formula of advantages (docs/loss.md): that of GRPO, with `scale_rewards`, or another one with a scale of its
    own. "reinforce_plus_plus" compares with the whole batch, "remax" with a greedy completion that is sampled for it,
    the others with the group."""
    variance_report: bool = False
    """Log how many completions and prompts the gradient of a step comes from, effectively (gradient/effective_...)."""
    pkpo_k: int = 4
    """Number k of "pkpo", which maximises pass@k, from 2 to `num_generations`; 1 would be "rloo"."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With several rewards: advantages of their weighted sum, or the sum of each one's advantages (GDPO)."""
    reward_weights: list[float] | None = None
    """One weight per reward function. None weights all by 1."""
    reward_failure: Literal["fail", "retry", "drop"] = "fail"
    """Reaction to a reward function that fails: "fail" ends the run, "retry" calls again, "drop" drops its groups."""
    reward_timeout: float | None = None
    """Number of seconds that one call of a reward function may take. None sets no limit."""
    reward_retries: int = 2
    """Number of further calls where `reward_failure` is "retry"."""
    rollout_failure: Literal["fail", "retry", "drop"] = "fail"
    """Reaction to a completion that cannot be used (a NaN log-prob, no tokens, ...): "fail" ends the run, "retry"
    samples its prompt again, twice at most, "drop" drops its group."""
    max_tool_calling_iterations: int | None = None
    """Number of turns in which the model may call tools, in an episode. None sets no limit."""
    tool_timeout: float = 60.0
    """Number of seconds that one call of a tool may take; then the model reads that it took longer."""
    max_concurrent_tools: int | None = None
    """Number of calls of tools at the same time, on each process, over all episodes. None sets no limit."""
    logprob_mismatch: Literal["fail", "warn"] | None = None
    """Reaction to log-probs of sampler and trainer that differ by more than rounding: an error, or one warning. None:
    an error, and a warning where the trainer's own model samples, which has no other weights, or of later turns of a
    `rollout_func`."""
    max_logprob_difference: float | None = None
    """Greatest such difference, in nats: of a token in fp32 on a CPU, of the mean elsewhere. None: by dtype and device
    (docs/engines.md)."""

    temperature: float = 1.0
    """Sampling temperature; the log-probs of training use it too."""
    top_p: float | None = 1.0
    """Probability mass of nucleus sampling; None is 1."""
    top_k: int | None = 0
    """Number of the most likely tokens to sample from. 0 or None is all."""
    min_p: float | None = None
    """Smallest probability of a token relative to the most likely one. None is 0."""
    sampling_support: Literal["auto", "require", "off"] = "auto"
    """With `top_p`, `top_k` or `min_p`: log-probs over the tokens that the sampler kept, its support (DeepSeek-V3.2's
    Keep Sampling Mask), where the engine returns them ("auto") or else an error ("require"). "off": over the whole
    vocabulary, so that the sampled and the trained distribution differ."""
    score_centering_topk: int = 128
    """Number of the most likely tokens whose log-probs the sampler returns with `score_centering="topk"`."""
    repetition_penalty: float = 1.0
    """Penalty of tokens that occurred before. 1 is none."""
    max_completion_length: int = 512
    """Greatest number of tokens of a completion."""
    generation_kwargs: JSONObject = None
    """Sampling parameters of the engine. `top_p`, `top_k`, `min_p`, `repetition_penalty` there replace the options."""
    cache_implementation: str | None = None
    """Kind of the KV cache of transformers ("static", ...). vLLM has its own."""
    chat_template_kwargs: JSONObject = None
    """Arguments of `apply_chat_template`, for prompts that are conversations."""

    use_vllm: bool | None = None
    """Sample with vLLM (True), with transformers (False), or with vLLM where it is installed (None)."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """Place of vLLM: in the trainer's process ("colocate"), or one or more running servers ("server")."""
    vllm_server_base_url: list[str] | str | None = None
    """URL of the server, with scheme and port; several for replicas. None is made from host and port."""
    vllm_server_host: str = "127.0.0.1"
    """Host of the server."""
    vllm_server_port: int = 8000
    """Port of the server."""
    vllm_server_timeout: float = 240.0
    """Number of seconds to wait for a server to start, and for each answer."""
    vllm_server_allow_remote: bool = False
    """Allow a server on another machine. Everybody who can reach its development mode controls it."""
    vllm_weight_transfer: Literal["auto", "files", "nccl"] = "auto"
    """Transport of weights to servers. "auto" is files. "nccl" is experimental: it has not run on a GPU yet."""
    vllm_full_sync_interval: int = 1
    """Weight syncs to servers from one that sends all weights to the next. Those between send the elements that
    changed, to servers with our worker extension (docs/scaling-out.md). 1 sends all each time."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of the GPU's memory for vLLM."""
    vllm_max_model_length: int | None = None
    """Greatest length of prompt plus completion, in tokens. None is measured from the data."""
    vllm_enable_sleep_mode: bool = False
    """Free vLLM's GPU memory during training (colocate)."""
    vllm_model_impl: Literal["vllm", "transformers"] = "vllm"
    """Implementation of the model in vLLM in process: vLLM's own where there is one, or that of transformers."""
    vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of vLLM in process, whatever trains: weights are rounded on their way to it. "auto" is bfloat16 where
    `bf16` trains, and else float32. A server has its own --dtype."""
    vllm_adapter_sync: bool = False
    """Send only the adapter to vLLM, which has the base model. False sends merged weights."""
    vllm_structured_outputs_regex: str | None = None
    """Regular expression that completions match."""
    vllm_engine_kwargs: JSONObject = None
    """Further arguments of `vllm.LLM` (colocate)."""

    shuffle_dataset: bool = True
    """Draw prompts in a random order that the seed decides."""
    long_prompts: Literal["drop", "fail"] = "drop"
    """Reaction to prompts without room for a completion in `vllm_max_model_length`: they are left out, or an error."""
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    """Time of evaluations: every `eval_steps` and after the last step ("steps"), after each "epoch", or never ("no").
    None is "no" with `eval_at_ends`."""
    eval_at_ends: bool | None = None
    """Evaluate before the first and after the last step, and every `eval_steps` if that is set. None: yes, if
    `eval_strategy` is None."""
    eval_steps: float | None = None
    """Number of steps between two evaluations; below 1, a share of all steps. None with "steps" is `logging_steps`."""
    eval_delay: float = 0
    """Number of steps (with "epoch": epochs) before the first evaluation that `eval_strategy` makes."""
    eval_on_start: bool = False
    """Evaluate before the first step, whatever `eval_strategy` is."""
    num_generations_eval: int | None = None
    """Number n of completions per prompt in an evaluation, sampled as in training, for the mean and pass@k, k = 1, 2,
    4, ..., n. None is one, greedy."""
    logging_strategy: Literal["no", "steps", "epoch"] = "steps"
    """Time of the entries of `trainer.state.log_history`: every `logging_steps`, each "epoch", or never ("no")."""
    logging_first_step: bool = False
    """Make an entry for the first step too."""
    logging_steps: float = 10
    """Number of steps between two entries of `trainer.state.log_history` and two lines on the console; below 1, a share
    of all steps. `metrics.jsonl` and trackers have every step."""
    log_level: Literal["passive", "detail", "debug", "info", "warning", "error", "critical"] = "passive"
    """Level of the messages of fused_grpo and transformers on the first process. "passive" leaves it."""
    log_level_replica: Literal["passive", "detail", "debug", "info", "warning", "error", "critical"] = "warning"
    """The same on all other processes."""
    log_completions: bool = False
    """Show a table of completions every `log_completions_steps`."""
    log_completions_steps: int = 25
    """Number of steps between two tables of completions."""
    num_completions_to_print: int | None = None
    """Number of rows of that table. None is 4; 0 shows none."""
    rollouts_kept_steps: int = 1000
    """Number of steps in a block of completions, those of the first process: rollouts.jsonl has the newest block,
    rollouts-old.jsonl the one before, and older ones are removed. 0 keeps all."""
    report_to: list[str] = field(default_factory=list)
    """Names of trackers that get the metrics through Accelerate: tensorboard, wandb, trackio, ..."""
    project: str = "fused-grpo"
    """Name of the project in trackers."""

    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """Time of checkpoints: every `save_steps` and after the last step ("steps"), after each "epoch", or after each
    evaluation that is the "best" so far. "no" saves only the final model, which the others save too."""
    save_steps: float = 500
    """Number of steps between two checkpoints; below 1, a share of all steps."""
    save_total_limit: int | None = None
    """Number of checkpoints to keep, the newest ones. 0 or None keeps all."""
    save_only_model: bool = False
    """Leave the training state (two thirds of a checkpoint) out; such a checkpoint cannot be resumed from."""
    load_best_model_at_end: bool = False
    """Load the checkpoint with the best `metric_for_best_model` after the last step."""
    metric_for_best_model: str | None = None
    """Name of a metric of the evaluation, such as "reward"; early stopping needs it too."""
    greater_is_better: bool | None = None
    """Whether the best value of that metric is the greatest. None: yes, unless its name ends with "loss"."""
    restore_callback_states_from_checkpoint: bool = False
    """Restore the states of callbacks from the checkpoint that the run resumes from."""
    push_to_hub: bool = False
    """Upload the final model to the Hugging Face hub."""
    hub_model_id: str | None = None
    """Name of the repository on the hub. None is the name of `output_dir`, in your account."""
    hub_private_repo: bool | None = None
    """Make the repository private where it is new."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def runs_remote_code(self) -> bool:
        """`trust_remote_code`, or its value in `model_init_kwargs`, as TRL's scripts set it."""
        return bool((self.model_init_kwargs or {}).get("trust_remote_code", self.trust_remote_code))

    def loss_config(self, *, corrected: bool = True) -> GRPOLossConfig:
        """The options of the loss; `corrected`: the engine samples with log-probs of its own."""
        options = {entry.name: getattr(self, entry.name) for entry in fields(LossOptions)}
        if self.delta is not None and self.loss_type not in BOUNDED:
            warn_once(
                f"got delta={self.delta} with loss_type={self.loss_type!r}, which does not use it; fix: delta=None"
            )
            options["delta"] = None
        options |= {name: getattr(self, ours) for name, ours in CORRECTION.items()}
        if not (corrected and self.vllm_importance_sampling_correction):
            options["sampling_correction"] = None
        try:
            return GRPOLossConfig(**options, max_completion_length=self.max_completion_length)
        except FusedGRPOError as error:  # under the names that were given
            pattern = re.compile(rf"\b({'|'.join(CORRECTION)})\b")
            raise type(error)(pattern.sub(lambda match: CORRECTION[match[0]], str(error))) from None

    def sampling(self, *, seed: int, n: int | None = None, temperature: float | None = None) -> SamplingParams:
        """The sampling parameters; `n` and `temperature` replace those of training."""
        # What scripts for TRL say again in `generation_kwargs`, or what does not reach a completion.
        repeated = {"do_sample": True, "use_cache": True, "num_return_sequences": 1, "temperature": self.temperature}
        repeated |= dict.fromkeys(("max_new_tokens", "max_tokens"), self.max_completion_length)
        return SamplingParams(
            n=self.num_generations if n is None else n,
            max_tokens=self.max_completion_length,
            temperature=self.temperature if temperature is None else temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            sampling_support=self.sampling_support,
            score_centering=self.score_centering,
            score_centering_topk=self.score_centering_topk,
            routed_experts=self.router_replay,
            seed=seed,
            structured_outputs_regex=self.vllm_structured_outputs_regex,
            extra={
                name: value
                for name, value in (self.generation_kwargs or {}).items()
                if value is not None and name not in (*OVERRIDDEN, "pad_token_id", "bos_token_id")
                if name not in repeated or repeated[name] != value  # of other names it may be an array
            },
        )


# The options of the correction, by their names in the loss.
CORRECTION = {
    "sampling_correction": "vllm_importance_sampling_mode",
    "sampling_clip_max": "vllm_importance_sampling_clip_max",
    "sampling_clip_min": "vllm_importance_sampling_clip_min",
}
MAPPINGS = [name for name, kind in GRPOConfig.__annotations__.items() if kind == "JSONObject"]


def check_options(args: Any) -> None:
    """Bring the options into the form that has their type, and check them. A trainer does so again: they may be set.

    Raises as `GRPOConfig` does; WrongTypeError for anything else than one.
    """
    kind = type(args)
    if not isinstance(args, GRPOConfig):
        raise WrongTypeError(
            f"got args of the type {kind.__module__}.{kind.__qualname__}, want options of this trainer; fix: from "
            "fused_grpo.trainer import GRPOConfig, which has TRL's"
        )
    normalise(args, MAPPINGS)
    take_plain_numbers(args)
    check_option_types(args, but=("report_to", *(MISSING.keys() - READ)), other=PYTHON_TYPES)
    for name in MISSING:
        refuse_unless_harmless(name, getattr(args, name), uploads=args.push_to_hub)
    complete_intervals(args)
    check_config(args)
    args.loss_config(corrected=args.use_vllm is not False)
    others = sorted(name for name in vars(args).keys() - kind.__dataclass_fields__.keys() if not name.startswith("_"))
    if others and kind is GRPOConfig:
        warn_once(f"got args with {', '.join(others)}, which are no options: nothing reads them")


def changed_options(args: Any, cls: type, *, but: Collection[str]) -> dict[str, Any]:
    """The options of a class, `but` some, that are not at their defaults."""
    values, default = {entry.name: getattr(args, entry.name) for entry in own_fields(cls)}, cls()
    return {name: value for name, value in values.items() if value != getattr(default, name) and name not in but}


def own_fields(cls: type) -> list[Field[Any]]:
    """The fields of a class of options without those that have no effect here."""
    return [entry for entry in fields(cls) if entry.name not in MISSING]
