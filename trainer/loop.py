"""The GRPO loop: sync, generate, score, learn, log. Read `GRPOTrainer.train` first; everything else serves it.

What makes it this loop and not another:

- **One generation per effective batch.** The engine is asked once for everything that an optimizer step (times
  `num_iterations`) learns from, so it runs at its best batch size and gradient accumulation costs no generation.
- **No forward pass for old log-probs.** The rollouts come from the weights being trained, so the old log-probs of the
  first iteration are the current ones; the loss hands them out and later iterations use them.
- **The engine is checked by what it says.** Each sampled token comes with the sampler's log-prob; the loss measures the
  trainer's against it, and a step whose difference is beyond rounding stops before the optimizer moves.

It is not a subclass of transformers.Trainer: the loop is short, and what a trainer should borrow (devices, DDP, mixed
precision, schedulers, checkpoints of weights) it takes from Accelerate and transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, get_scheduler

from fused_grpo.errors import NonFiniteError
from fused_grpo.loss import GRPOLossOutput
from fused_grpo.trainer.advantages import group_advantages
from fused_grpo.trainer.batching import micro_batches
from fused_grpo.trainer.checkpoint import check_output_dir, prepare_output_dir, save_checkpoint
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.data import Row, check_rows, prompt_batches
from fused_grpo.trainer.formatting import short_number
from fused_grpo.trainer.metrics import merge_floats, merge_metrics
from fused_grpo.trainer.models import load_model, load_tokenizer, model_weights, takes_any_lengths, wants_bf16
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.rewards import check_reward_functions, reward_name
from fused_grpo.trainer.rollout import RolloutEngine, check_agreement, make_engine
from fused_grpo.trainer.rollout_metrics import mean_over_processes, rename_loss_metrics, rollout_metrics
from fused_grpo.trainer.run_output import Phases, RunOutput
from fused_grpo.trainer.scoring import ScoredRollouts, score
from fused_grpo.trainer.types import EffectiveBatch, MicroBatch, Rollouts, SamplingParams


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run went."""

    steps: int
    metrics: dict[str, Any]  # of the last step
    eval_before: dict[str, float] | None  # {"reward": ..., "rewards/<fn>/mean": ...}; None without an eval set
    eval_after: dict[str, float] | None
    checkpoint: Path
    report: Path


class GRPOTrainer:
    """Trains a causal language model with GRPO.

    Args:
        model: a path or hub id, or a causal LM of transformers (trained in place).
        reward_funcs: a function or several, each
            `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.
        args: the options of the run. None: `GRPOConfig()`.
        train_dataset: a `datasets.Dataset` or a list of dicts, with a "prompt" column of strings.
        eval_dataset: the same, for the greedy evaluation before, during and after training.
        processing_class: the tokenizer. None: the one that lies beside `model`.
        rollout_engine: anything that satisfies `RolloutEngine`, in place of the one that `args` asks for.

    Raises:
        InputError: options that do not go together.
        DataError: a dataset that cannot be used.
        CheckpointError: `args.output_dir` holds another run.
        UnavailableError: an engine that is not installed.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Any,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        eval_dataset: Any = None,
        processing_class: Any = None,
        rollout_engine: RolloutEngine | None = None,
    ) -> None:
        # Everything that can be wrong is looked at before anything is loaded, started or written.
        self.args = args = GRPOConfig() if args is None else args
        self.reward_funcs, self.reward_weights = check_reward_functions(reward_funcs, args.reward_weights)
        self.rows = check_rows(train_dataset, name="train_dataset")
        self.eval_rows = [] if eval_dataset is None else check_rows(eval_dataset, name="eval_dataset")
        # Without cpu=True, Accelerate on a machine without an accelerator lets every rank train by itself.
        on_cpu = not torch.accelerator.is_available()
        self.accelerator = Accelerator(mixed_precision="bf16" if wants_bf16(args) else "no", cpu=on_cpu)
        self.prompts_per_step = args.prompts_per_process(self.accelerator.num_processes)
        self.output_dir = Path(args.output_dir)
        self.task = "+".join(map(reward_name, self.reward_funcs))
        model = str(model) if isinstance(model, Path) else model
        self.model_path = model if isinstance(model, str) else None
        check_output_dir(self.output_dir, overwrite=args.overwrite_output_dir, keep=self.model_path)
        self.tokenizer = load_tokenizer(model, processing_class, trust_remote_code=args.trust_remote_code)
        self.model = load_model(model, trust_remote_code=args.trust_remote_code)
        self.max_steps = self._planned_steps()
        self._prepare()
        self.engine = self._make_engine() if rollout_engine is None else rollout_engine
        self.step = self.generate_calls = 0

    def train(self) -> TrainResult:
        """Run all steps. Metrics, rollouts, the report and a checkpoint are in `args.output_dir` afterwards.

        Raises:
            RewardError: a reward function raised, or returned something unusable.
            WeightSyncError: the engine does not serve the trainer's weights.
            NonFiniteError: the loss or a gradient is not finite.
            In all three cases the step that failed has updated nothing.
        """
        args, is_main = self.args, self.accelerator.is_main_process
        prompts = self._prompt_batches()
        metrics: dict[str, Any] = {}
        try:
            if is_main:
                prepare_output_dir(self.output_dir, overwrite=args.overwrite_output_dir, keep=self.model_path)
            self.output = RunOutput(args, self.max_steps, is_main=is_main, facts=self._facts())
            before = self.evaluate()
            while self.step < self.max_steps:
                phases = Phases()
                with phases("sync"):
                    self._sync_engine()
                with phases("generate"):
                    rows = next(prompts)
                    rollouts = self._generate(rows)
                with phases("reward"):
                    scored = score(rollouts, rows, self.reward_funcs, self.reward_weights, self.tokenizer)
                    advantages = self._advantages(scored.rewards)
                self.output.rollouts(self.step + 1, scored, advantages)
                with phases("train"):
                    packed = self._pack(scored.effective_batch(advantages))
                for _ in range(min(args.num_iterations, self.max_steps - self.step)):
                    with phases("train"):
                        packed, loss_metrics = self._optimizer_step(packed)
                    metrics = self._record(scored, loss_metrics, phases)
                    self.output.step(metrics, phases)
                    phases = Phases()
                    if self._due(args.eval_steps):
                        self.evaluate()
                    if self._due(args.save_steps):
                        self.save_model(f"checkpoint-{self.step}")
            return TrainResult(
                steps=self.step,
                metrics=metrics,
                eval_before=before,
                eval_after=self.evaluate(),
                checkpoint=self.save_model("final"),
                report=self.output.report(),
            )
        finally:
            self.engine.close()

    def evaluate(self) -> dict[str, float] | None:
        """Mean rewards of greedy completions on the eval set, logged as `eval/...`. None without an eval set."""
        if not self.eval_rows:
            return None
        self._sync_engine()
        greedy = SamplingParams(n=1, max_tokens=self.args.max_completion_length, temperature=0.0)
        rollouts = self.engine.generate(self._encode(self.eval_rows), greedy)
        scored = score(rollouts, self.eval_rows, self.reward_funcs, self.reward_weights, self.tokenizer)
        means = {
            f"rewards/{name}/mean": column
            for name, column in zip(scored.reward_names, scored.per_function.T, strict=True)
        }
        result = {name: values.nanmean().item() for name, values in ({"reward": scored.rewards} | means).items()}
        self.output.evaluation(self.step, result, len(self.eval_rows))
        return result

    def save_model(self, name: str) -> Path:
        """Write weights (safetensors) and tokenizer to `output_dir/name`, loadable by transformers and vLLM."""
        directory = self.output_dir / name
        weights = self._weights()
        if self.accelerator.is_main_process:
            state = {"step": self.step, "max_steps": self.max_steps, "seed": self.args.seed}
            save_checkpoint(
                directory, model=self.model, tokenizer=self.tokenizer, trainer_state=state, state_dict=weights
            )
        self.accelerator.wait_for_everyone()
        return directory

    def _sync_engine(self) -> None:
        """Hand the current weights to the engine, where it serves older ones."""
        if self.engine.weight_version != self.step:
            self.engine.load_weights(self._weights().items(), version=self.step)

    def _generate(self, rows: list[Row]) -> Rollouts:
        """The one `generate` call of an effective batch."""
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        seed = (self.args.seed * 1_000_003 + self.generate_calls) * world_size + rank
        self.generate_calls += 1
        return self.engine.generate(self._encode(rows), self.args.sampling(seed=seed))

    def _advantages(self, rewards: Tensor) -> Tensor:
        """This process' advantages [B]: groups never span processes, the scale of "batch" spans them all."""
        everyone = self.accelerator.gather(rewards.to(self.accelerator.device)).cpu()
        advantages = group_advantages(everyone, self.args.num_generations, scale=self.args.scale_rewards)
        return advantages.view(-1, len(rewards))[self.accelerator.process_index]

    def _pack(self, batch: EffectiveBatch) -> list[MicroBatch]:
        """Micro-batches, with the initial model's log-probs where there is a KL term."""
        packed = micro_batches(
            batch,
            self.args.per_device_train_batch_size,
            one_row=takes_any_lengths(self.model),
            device=self.accelerator.device,
        )
        if self.reference is None:
            return packed
        with self.accelerator.autocast():
            return [dataclasses.replace(batch, ref_logprobs=self.reference.logprobs(batch)) for batch in packed]

    def _optimizer_step(self, packed: list[MicroBatch]) -> tuple[list[MicroBatch], dict[str, float]]:
        """One update from all micro-batches. They come back with the old log-probs that a second iteration needs."""
        counts = self._counts(packed)
        self.policy.train()
        try:
            outputs = [self._backward(batch, counts, last=batch is packed[-1]) for batch in packed]
            mine = merge_metrics([{"loss": output.loss.detach(), **output.metrics} for output in outputs])
            # Of all processes, so that either every one of them goes on from here or none does.
            metrics = merge_floats(gather_object([mine]))
            grad_norm = float(self.accelerator.clip_grad_norm_(self.policy.parameters(), self.args.max_grad_norm))
            self._check_step(packed, metrics, grad_norm)
            metrics |= {"grad_norm": grad_norm, "learning_rate": self.scheduler.get_last_lr()[0]}
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        if packed[0].old_logprobs is None:
            packed = [
                dataclasses.replace(batch, old_logprobs=output.logprobs)
                for batch, output in zip(packed, outputs, strict=True)
            ]
        return packed, metrics

    def _counts(self, packed: list[MicroBatch]) -> dict[str, Tensor]:
        """The normalisers of the whole step, over all micro-batches and processes."""
        mine = [sum(len(batch.targets) for batch in packed), sum(len(batch.advantages) for batch in packed)]
        totals = torch.tensor(mine, dtype=torch.float64, device=self.accelerator.device)
        num_tokens, num_sequences = self.accelerator.reduce(totals, reduction="sum").unbind()
        return {"num_tokens": num_tokens, "num_sequences": num_sequences}

    def _backward(self, batch: MicroBatch, counts: dict[str, Tensor], *, last: bool) -> GRPOLossOutput:
        # DDP averages over processes what has to be a sum, and needs to reduce only once.
        with nullcontext() if last else self.accelerator.no_sync(self.policy):
            output: GRPOLossOutput = self.policy(batch, **counts)
            self.accelerator.backward(output.loss * self.accelerator.num_processes)
        return output

    def _check_step(self, packed: list[MicroBatch], metrics: dict[str, float], grad_norm: float) -> None:
        """Raise where this step must not happen: a stale engine, or numbers that are not finite."""
        on_policy = packed[0].old_logprobs is None
        if on_policy and self.args.sampling(seed=0).is_plain:
            check_agreement(
                metrics["sampling_difference_mean"],
                metrics["sampling_difference_max"],
                dtype=torch.bfloat16 if wants_bf16(self.args) else next(self.model.parameters()).dtype,
                engine=self.engine.name,
                version=self.engine.weight_version,
            )
        if not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"got loss {metrics['loss']} and gradient norm {grad_norm} in step {self.step + 1}; "
                "nothing was updated; fix: a lower learning_rate, or look at this step's rewards and log-probs"
            )

    def _record(self, scored: ScoredRollouts, loss_metrics: dict[str, float], phases: Phases) -> dict[str, Any]:
        """The metrics of a step, over all processes."""
        return {
            "step": self.step,
            **mean_over_processes(gather_object([rollout_metrics(scored)])),
            **rename_loss_metrics(loss_metrics),
            "step_time": sum(phases.seconds.values()),
            **{f"time/{name}": seconds for name, seconds in phases.seconds.items()},
            "generate_calls": self.generate_calls,
            "weight_version": scored.rollouts.weight_version,
            "rollout_engine": self.engine.name,
        }

    def _planned_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        prompts = len(self.rows) * self.args.num_train_epochs
        batches: int = math.ceil(prompts / (self.prompts_per_step * self.accelerator.num_processes))
        return batches * self.args.num_iterations

    def _prepare(self) -> None:
        """Wrap the policy, and make what belongs to it: reference, optimizer, schedule."""
        args = self.args
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = PolicyLoss(self.model, args.loss_config(), temperature=args.temperature, chunk_bytes=args.chunk_bytes)
        # A copy, because the model changes; made before it is wrapped, because wrappers do not copy.
        frozen = copy.deepcopy(policy).requires_grad_(False).eval() if args.beta > 0 else None
        self.reference = None if frozen is None else frozen.to(self.accelerator.device)
        optimizer = torch.optim.AdamW(
            (parameter for parameter in policy.parameters() if parameter.requires_grad),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.warmup_steps,
            num_training_steps=self.max_steps,
        )

    def _make_engine(self) -> RolloutEngine:
        args = self.args
        longest = max(map(len, self._encode(self.rows + self.eval_rows)))
        return make_engine(
            "auto" if args.use_vllm is None else "vllm" if args.use_vllm else "transformers",
            self.model,
            self.tokenizer,
            max_model_len=args.vllm_max_model_length or longest + args.max_completion_length,
            dtype=torch.bfloat16 if wants_bf16(args) else torch.float32,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            seed=args.seed,
            trust_remote_code=args.trust_remote_code,
        )

    def _prompt_batches(self) -> Iterator[list[Row]]:
        return prompt_batches(
            self.rows,
            self.prompts_per_step,
            seed=self.args.seed,
            shuffle=self.args.shuffle_dataset,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )

    def _facts(self) -> dict[str, str]:
        """What the console and the report say about the run beforehand."""
        args, processes = self.args, self.accelerator.num_processes
        prompts = self.prompts_per_step * processes
        name = self.model_path or type(self.model).__name__.removesuffix("ForCausalLM")
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {
            "task": self.task,
            "model": f"{name} ({short_number(parameters)})",
            "engine": self.engine.name,
            "batch": f"{prompts * args.num_generations} sequences = {prompts} prompts x {args.num_generations}, "
            f"in {args.gradient_accumulation_steps} micro-batch(es) on {processes} process(es)",
            "loss": f"{args.loss_type}, beta {args.beta}, learning rate {args.learning_rate}",
            "output": args.output_dir,
        }

    def _encode(self, rows: list[Row]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer([row["prompt"] for row in rows])["input_ids"]
        return ids

    def _weights(self) -> dict[str, Tensor]:
        return model_weights(self.accelerator.get_state_dict(self.policy))

    def _due(self, every: int | None) -> bool:
        """True at every so many steps, except at the last, which has its own."""
        return every is not None and self.step % every == 0 and self.step < self.max_steps
