"""`GRPOConfig`: what a run does. TRL's names, defaults and meaning; the field docstrings are the command line's help.

One dial sets the rest: `per_device_train_batch_size * gradient_accumulation_steps * processes` is the effective batch,
in sequences: what one optimizer step learns from. `steps_per_generation` micro-batches of it are generated in one go,
`num_generations` completions for each of their prompts, and gone through `num_iterations` times.

A field of TRL's that is missing here is refused by name, with the reason: `trl_fields.py` has the whole list, and which
of these mean something else than there.
"""

from __future__ import annotations

import json
import os
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import InputError
from fused_grpo.option_types import check_option_types
from fused_grpo.trainer.config.checks import check_config
from fused_grpo.trainer.config.trl_fields import refusing_unsupported
from fused_grpo.trainer.types import SamplingParams

DICTS = (
    "model_init_kwargs",
    "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "vllm_engine_kwargs",
)


@dataclass
class GRPOConfig:
    """Options of a GRPO run.

    Raises:
        InputError: a value out of its range, or options that do not go together.
        UnsupportedError: an option of TRL's that this trainer does not have, set to something else than its default.
    """

    output_dir: str = "runs/grpo"
    """Where metrics, rollouts, the report and checkpoints go. Must not hold another run."""
    _: KW_ONLY
    overwrite_output_dir: bool = False
    """Replace what an earlier run left in `output_dir`."""
    resume_from_checkpoint: bool | str | None = None
    """Go on from the newest whole checkpoint in `output_dir` (True), or from this one (a path)."""
    run_name: str | None = None
    """What trackers call the run. None: the name of `output_dir`."""
    seed: int = 42
    """Of sampling, of dropout, and of the prompt order unless `data_seed` is set."""
    data_seed: int | None = None
    """Of the prompt order. None: `seed`."""

    max_steps: int = -1
    """Optimizer steps. -1: `num_train_epochs` passes over the prompts."""
    num_train_epochs: float = 3.0
    """Passes over the prompts where `max_steps` is -1."""
    per_device_train_batch_size: int = 8
    """Sequences (not prompts) in a micro-batch of one process."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step. Changes memory and nothing else: the update is the same."""
    num_generations: int = 8
    """Completions per prompt, the size of a group. Must divide the effective batch."""
    num_iterations: int = 1
    """Passes over each generated batch. Beyond 1 the ratio leaves 1 and clipping begins to act."""
    steps_per_generation: int | None = None
    """Micro-batches that are generated at a time, a multiple of `gradient_accumulation_steps`. None: one such."""
    generation_batch_size: int | None = None
    """The same in sequences over all processes. Set one of the two at most."""
    max_tokens_per_micro_batch: int | None = None
    """Cut micro-batches by tokens, prompts included, rather than `per_device_train_batch_size` sequences at a time."""
    dynamic_sampling: int = 0
    """Generate up to so many times more for groups whose rewards are all equal (DAPO). 0: keep them."""

    generate_ahead: bool = False
    """Sample the next batch while learning from this one (vllm_mode="server"): rollouts are one generation old."""

    model_init_kwargs: dict[str, Any] | None = None
    """Arguments of `AutoModelForCausalLM.from_pretrained`, where the model is a path or hub id."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights. Passed to transformers and to the engine."""
    disable_dropout: bool = False
    """Set every dropout of the policy to 0."""
    bf16: bool | None = None
    """Mixed precision. None: where there is a GPU."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, to save memory."""
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """Arguments of `torch.utils.checkpoint`. None: non-reentrant."""
    chunk_bytes: int | None = None
    """Budget for the one chunk of logits that exists at a time, in bytes. None: 256 MiB (96 MiB on a CPU)."""

    ddp_timeout: int = 1800
    """Seconds that the processes of a run wait for one of them before they give up."""
    max_skipped_steps: int = 0
    """Steps in a row that may be passed over because their loss or gradient is not finite. 0: none."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: str = "linear"
    """A scheduler name of transformers: "linear", "cosine", "constant", "constant_with_warmup", ..."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Further arguments of that scheduler."""
    warmup_steps: float = 0
    """Optimizer steps over which the learning rate rises from 0; below 1, a share of all steps."""
    optim: str = "adamw_torch_fused"
    """"adamw_torch" or "adamw_torch_fused". Any other optimizer: `GRPOTrainer(optimizers=(yours, None))`."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, of matrices: not of biases and norms."""
    adam_beta1: float = 0.9
    """AdamW's first beta."""
    adam_beta2: float = 0.999
    """AdamW's second beta."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    loss_type: str = "dapo"
    """"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo": the table is in docs/loss.md."""
    importance_sampling_level: str = "token"
    """The ratio is of each "token", or one for the "sequence" (GSPO)."""
    epsilon: float = 0.2
    """Lower clip of the ratio."""
    epsilon_high: float | None = None
    """Upper clip of the ratio. None: epsilon."""
    delta: float | None = None
    """Upper bound of the ratio in the unclipped branch (two-sided clipping)."""
    sapo_temperature_pos: float = 1.0
    """"sapo": the temperature of its gate where the advantage is positive."""
    sapo_temperature_neg: float = 1.05
    """"sapo": the temperature of its gate elsewhere."""
    vespo_k_pos: float = 2.0
    """"vespo": the power of the sequence's weight where the advantage is not negative."""
    vespo_lambda_pos: float = 3.0
    """"vespo": the decay of the sequence's weight where the advantage is not negative."""
    vespo_k_neg: float = 3.0
    """"vespo": the power of the sequence's weight where the advantage is negative."""
    vespo_lambda_neg: float = 2.0
    """"vespo": the decay of the sequence's weight where the advantage is negative."""
    beta: float = 0.0
    """Weight of the KL term against the initial model. 0 keeps no reference model."""
    kl_estimator: str = "k3"
    """"k1", "k2" or "k3"."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the ratio, so that it stays unbiased off policy."""
    sync_ref_model: bool = False
    """Let the reference follow the policy."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the reference at each such sync."""
    ref_model_sync_steps: int = 512
    """Optimizer steps between two such syncs."""
    top_entropy_quantile: float = 1.0
    """Learn from this share of a step's tokens, those of highest entropy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    use_adaptive_entropy: bool = False
    """Move `entropy_coef` by `entropy_coef_delta` after each step, towards `entropy_target` (Skywork-OR1)."""
    entropy_coef_min: float = 0.0
    """Its lower bound."""
    entropy_coef_max: float = 1.0
    """Its upper bound."""
    entropy_coef_delta: float = 0.005
    """Its step."""
    entropy_target: float = 0.2
    """Mean entropy per token, in nats, above which there is no bonus."""
    off_policy_mask_threshold: float | None = None
    """Leave out sequences with a negative advantage that the policy has moved away from by more than this (nats)."""
    mask_truncated_completions: bool = False
    """Learn nothing from completions that did not end by themselves."""
    vllm_importance_sampling_correction: bool = True
    """Correct for the difference between vLLM's log-probs and the trainer's."""
    vllm_importance_sampling_mode: str = "token_truncate"
    """"token_truncate", "token_mask", "sequence_truncate" or "sequence_mask"."""
    vllm_importance_sampling_clip_max: float | None = 3.0
    """Upper bound of that correction."""
    vllm_importance_sampling_clip_min: float | None = None
    """Lower bound of that correction."""

    scale_rewards: Literal["group", "batch", "none"] | bool = "group"
    """Divide advantages by the standard deviation of the group (or True), of the batch, or not at all (or False)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With several rewards: advantages of their weighted sum, or the sum of each one's advantages (GDPO)."""
    reward_weights: list[float] | None = None
    """One weight per reward function. None: all 1."""
    reward_failure: Literal["fail", "retry", "drop"] = "fail"
    """Where a reward function raises, hangs or returns nonsense: end the run, call it again, or drop its groups."""
    reward_timeout: float | None = None
    """Seconds that one call of a reward function may take. None: any."""
    reward_retries: int = 2
    """Further calls where `reward_failure` is "retry"."""

    temperature: float = 1.0
    """Sampling temperature; the log-probs that are trained on use it too."""
    top_p: float = 1.0
    """Nucleus sampling. Below 1, sampled and trained distributions differ."""
    top_k: int = 0
    """Sample from the k most likely tokens. 0: all."""
    min_p: float | None = None
    """Smallest probability of a token relative to the likeliest one. None: 0."""
    repetition_penalty: float = 1.0
    """Penalty of tokens that were seen already. 1: none."""
    max_completion_length: int = 512
    """Tokens per completion, at most."""
    generation_kwargs: dict[str, Any] | None = None
    """Further sampling parameters of the engine."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of `apply_chat_template`, for prompts that are conversations."""

    use_vllm: bool | None = None
    """Sample with vLLM (True), with transformers (False), or with vLLM where it is installed (None)."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """vLLM in the trainer's process, or one or more servers that run already."""
    vllm_server_base_url: str | list[str] | None = None
    """Where the server is, with scheme and port; several, for replicas. None: made from host and port."""
    vllm_server_host: str = "127.0.0.1"
    """Host of the server."""
    vllm_server_port: int = 8000
    """Port of the server."""
    vllm_server_timeout: float = 240.0
    """Seconds to wait for a server: to be up, and to answer."""
    vllm_server_allow_remote: bool = False
    """Call a server that is not on this machine. Whoever can reach it in development mode controls it."""
    vllm_weight_transfer: Literal["auto", "files", "nccl"] = "auto"
    """How weights reach servers. "auto": nccl where they were started for it and it can run, files otherwise."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of the GPU's memory that vLLM may take."""
    vllm_max_model_length: int | None = None
    """Longest prompt plus completion, in tokens. None: the longest prompt of the data and `max_completion_length`."""
    vllm_enable_sleep_mode: bool = False
    """Give the GPU's memory back while training (colocate)."""
    vllm_adapter_sync: bool = False
    """With an adapter: hand it alone to vLLM in process, beside the base. False: merged weights."""
    vllm_structured_outputs_regex: str | None = None
    """Completions match this."""
    vllm_engine_kwargs: dict[str, Any] | None = None
    """Further arguments of `vllm.LLM` (colocate)."""

    shuffle_dataset: bool = True
    """Draw prompts in a random order that the seed decides."""
    eval_strategy: Literal["no", "steps"] = "steps"
    """"steps": evaluate every `eval_steps`, and before the first and after the last; "no": never."""
    eval_steps: float | None = None
    """Optimizer steps between two evaluations. None: only before and after."""
    num_generations_eval: int | None = None
    """Completions per prompt in an evaluation, sampled as in training. None: one, greedy."""
    logging_steps: int = 10
    """Steps between two lines on the console. `metrics.jsonl` and trackers have every step."""
    log_completions: bool = False
    """Show a table of completions now and then."""
    log_completions_steps: int = 25
    """Steps between two such tables."""
    num_completions_to_print: int | None = None
    """Rows of that table. None: 4."""
    report_to: list[str] = field(default_factory=list)
    """Trackers that get the metrics through Accelerate: tensorboard, wandb, trackio, ... none by default."""
    project: str = "fused-grpo"
    """What trackers call the project."""

    save_strategy: Literal["no", "steps"] = "steps"
    """"steps": a checkpoint every `save_steps`; "no": only the final model."""
    save_steps: int = 500
    """Steps between two checkpoints. The last step is always saved."""
    save_total_limit: int | None = None
    """Keep that many checkpoints, the newest. None: all."""
    save_only_model: bool = False
    """Leave out what a run needs to resume: two thirds of a checkpoint."""
    push_to_hub: bool = False
    """Upload the final model."""
    hub_model_id: str | None = None
    """Where to. None: the name of `output_dir`, in your account."""
    hub_private_repo: bool | None = None
    """Whether that repository is made private."""

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        self.report_to = _listed(self.report_to)
        for name in ("output_dir", "resume_from_checkpoint"):
            if isinstance(getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(getattr(self, name)))
        for name in DICTS:
            setattr(self, name, _mapping(name, getattr(self, name)))
        check_option_types(self, but=("report_to",))
        check_config(self)
        self.loss_config()

    def loss_config(self, *, corrected: bool = True) -> GRPOLossConfig:
        """The loss part of these options; `corrected`: the engine samples with log-probs of its own."""
        same = (
            "loss_type",
            "importance_sampling_level",
            "epsilon",
            "epsilon_high",
            "delta",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
            "beta",
            "kl_estimator",
            "use_bias_correction_kl",
            "off_policy_mask_threshold",
            "top_entropy_quantile",
            "entropy_coef",
            "max_completion_length",
        )
        return GRPOLossConfig(
            **{name: getattr(self, name) for name in same},
            sampling_correction=self.vllm_importance_sampling_mode
            if corrected and self.vllm_importance_sampling_correction
            else None,
            sampling_clip_max=self.vllm_importance_sampling_clip_max,
            sampling_clip_min=self.vllm_importance_sampling_clip_min,
        )

    def sampling(self, *, seed: int, n: int | None = None, temperature: float | None = None) -> SamplingParams:
        """How completions are drawn; `n` and `temperature` in place of those of training."""
        return SamplingParams(
            n=self.num_generations if n is None else n,
            max_tokens=self.max_completion_length,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            structured_outputs_regex=self.vllm_structured_outputs_regex,
            extra=self.generation_kwargs or {},
        )

    def micro_batches_per_generation(self, num_processes: int) -> int:
        """`steps_per_generation`, however it was said.

        Raises:
            InputError: `generation_batch_size` is no multiple of a micro-batch of all processes.
        """
        if self.generation_batch_size is None:
            return self.steps_per_generation or self.gradient_accumulation_steps
        everyone = self.per_device_train_batch_size * num_processes
        if self.generation_batch_size % (everyone * self.gradient_accumulation_steps):
            raise InputError(
                f"got generation_batch_size={self.generation_batch_size}, want a multiple of the effective batch: "
                f"{everyone * self.gradient_accumulation_steps} sequences on {num_processes} process(es)"
            )
        return self.generation_batch_size // everyone

    def steps_per_rollout(self, num_processes: int) -> int:
        """Optimizer steps that one generated batch is cut into; each is made `num_iterations` times."""
        return self.micro_batches_per_generation(num_processes) // self.gradient_accumulation_steps

    def prompts_per_process(self, num_processes: int) -> int:
        """Prompts that each process generates for at a time.

        Raises:
            InputError: the effective batch does not divide into whole groups on each process.
        """
        mine = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if mine % self.num_generations:
            lower, upper = mine // self.num_generations, -(-mine // self.num_generations)
            options = " or ".join(str(prompts * self.num_generations) for prompts in sorted({lower, upper}) if prompts)
            raise InputError(
                f"got an effective batch of {self.per_device_train_batch_size} (per_device_train_batch_size) * "
                f"{self.gradient_accumulation_steps} (gradient_accumulation_steps) = {mine} sequences on each of "
                f"{num_processes} process(es), want a multiple of num_generations={self.num_generations}; "
                f"fix: make the product {options}"
            )
        return mine // self.num_generations * self.steps_per_rollout(num_processes)


def _listed(names: str | list[str] | None) -> list[str]:
    """`report_to` as TRL takes it: a name, several, or "none"."""
    if not isinstance(names, str | list | tuple | None):
        raise InputError(f"got report_to={names!r}, want the names of trackers")
    listed = [names] if isinstance(names, str) else names or []
    return [name for name in listed if name != "none"]


def _mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A mapping, or the JSON of one, which TRL takes as well."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"got {name}={value[:200]!r}, which is not JSON ({error}); want a mapping") from error
    if not isinstance(parsed, dict):
        raise InputError(f"got {name}={value!r}, want a mapping")
    return parsed


GRPOConfig.__init__ = refusing_unsupported(GRPOConfig.__init__)  # type: ignore[method-assign]
