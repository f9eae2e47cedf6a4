"""`GRPOConfig`: what a run does. TRL's names, defaults and meaning; the field docstrings are the command line's help.

One dial sets the rest: `per_device_train_batch_size * gradient_accumulation_steps * processes` is the effective batch,
in sequences. It is generated in one go, `num_generations` for each of its prompts, and makes one optimizer step (times
`num_iterations`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import InputError
from fused_grpo.trainer.types import SamplingParams


@dataclass(kw_only=True)
class GRPOConfig:
    """Options of a GRPO run.

    Raises:
        InputError: a value out of its range.
        UnsupportedError: a loss variant that this version does not have yet.
    """

    output_dir: str = "runs/grpo"
    """Where metrics, rollouts, the report and checkpoints go. Must not hold another run."""
    overwrite_output_dir: bool = False
    """Replace what an earlier run left in `output_dir`."""
    seed: int = 42
    """Of the prompt order and of sampling."""

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
    """Optimizer steps on each generated batch. Beyond 1 the ratio leaves 1 and clipping begins to act."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: str = "linear"
    """A scheduler name of transformers: "linear", "cosine", "constant", "constant_with_warmup", ..."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: float = 0.9
    """AdamW's first beta."""
    adam_beta2: float = 0.999
    """AdamW's second beta."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, to save memory."""
    bf16: bool | None = None
    """Mixed precision. None: where there is a GPU."""

    loss_type: str = "dapo"
    """"dapo" (mean over the step's tokens) or "grpo" (mean over each sequence, then over sequences)."""
    epsilon: float = 0.2
    """Lower clip of the ratio."""
    epsilon_high: float | None = None
    """Upper clip of the ratio. None: epsilon."""
    beta: float = 0.0
    """Weight of the KL term against the initial model. 0 keeps no reference model."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the ratio, so that it stays unbiased off policy."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not at all."""
    reward_weights: list[float] | None = None
    """One weight per reward function. None: all 1."""
    chunk_bytes: int | None = None
    """Budget for the one chunk of logits that exists at a time, in bytes. None: 256 MiB."""

    temperature: float = 1.0
    """Sampling temperature; the log-probs that are trained on use it too."""
    top_p: float = 1.0
    """Nucleus sampling. Below 1, sampled and trained distributions differ."""
    top_k: int = 0
    """Sample from the k most likely tokens. 0: all."""
    min_p: float = 0.0
    """Smallest probability of a token relative to the likeliest one."""
    repetition_penalty: float = 1.0
    """Penalty of tokens that were seen already. 1: none."""
    max_completion_length: int = 512
    """Tokens per completion, at most."""

    use_vllm: bool | None = None
    """Sample with vLLM (True), with transformers (False), or with vLLM where it is installed (None)."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of the GPU's memory that vLLM may take."""
    vllm_max_model_length: int | None = None
    """Longest prompt plus completion, in tokens. None: the longest prompt of the data and `max_completion_length`."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights. Passed to transformers and to the engine."""

    shuffle_dataset: bool = True
    """Draw prompts in a random order that `seed` decides."""
    eval_steps: int | None = None
    """Evaluate every so many steps, besides before the first and after the last. None: only those two."""
    logging_steps: int = 1
    """Steps between two lines on the console. `metrics.jsonl` has every step."""
    log_completions: bool = True
    """Show a table of completions now and then."""
    log_completions_steps: int = 25
    """Steps between two such tables."""
    num_completions_to_print: int = 4
    """Rows of that table."""
    save_steps: int = 500
    """Steps between two checkpoints. The last step is always saved."""

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "logging_steps"):
            self._want(name, getattr(self, name) >= 1, "at least 1")
        self._want("num_generations", self.num_generations >= 2, "at least 2: an advantage compares a group's members")
        self._want("max_steps", self.max_steps == -1 or self.max_steps > 0, "a number of steps > 0, or -1 for epochs")
        self._want("num_train_epochs", self.num_train_epochs > 0, "> 0")
        self._want("learning_rate", 0 <= self.learning_rate < math.inf, "finite and >= 0")
        self._want("max_grad_norm", self.max_grad_norm > 0, "> 0")
        self._want("temperature", 0 < self.temperature < math.inf, "> 0: greedy samples give a group no differences")
        self._want("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._want("top_k", self.top_k >= 0, "at least 0; 0 means all tokens")
        self._want("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._want("repetition_penalty", self.repetition_penalty > 0, "> 0")
        self._want("warmup_steps", self.warmup_steps >= 0, "at least 0")
        self._want("weight_decay", self.weight_decay >= 0, "at least 0")
        self._want("adam_beta1", 0 <= self.adam_beta1 < 1, "in [0, 1)")
        self._want("adam_beta2", 0 <= self.adam_beta2 < 1, "in [0, 1)")
        self._want("adam_epsilon", self.adam_epsilon > 0, "> 0")
        self._want("chunk_bytes", self.chunk_bytes is None or self.chunk_bytes > 0, "bytes > 0, or None for 256 MiB")
        self._want("vllm_gpu_memory_utilization", 0 < self.vllm_gpu_memory_utilization <= 1, "in (0, 1]")
        self._want("max_completion_length", self.max_completion_length >= 1, "at least 1")
        self._want("scale_rewards", self.scale_rewards in ("group", "batch", "none"), "'group', 'batch' or 'none'")
        self._want("eval_steps", self.eval_steps is None or self.eval_steps >= 1, "at least 1, or None")
        for name in ("save_steps", "log_completions_steps"):
            self._want(name, getattr(self, name) >= 1, "at least 1")
        self.loss_config()

    def _want(self, name: str, holds: bool, want: str) -> None:
        if not holds:
            raise InputError(f"got {name}={getattr(self, name)!r}, want {want}")

    def loss_config(self) -> GRPOLossConfig:
        """The loss part of these options."""
        return GRPOLossConfig(
            loss_type=self.loss_type,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            sampling_correction=None,
            max_completion_length=self.max_completion_length,
        )

    def sampling(self, *, seed: int) -> SamplingParams:
        """How training completions are drawn."""
        return SamplingParams(
            n=self.num_generations,
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
        )

    def prompts_per_process(self, num_processes: int) -> int:
        """Prompts that each process generates for per step.

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
        return mine // self.num_generations
