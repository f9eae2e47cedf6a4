"""Whole trainers that compute the same optimizer step from the same scored rollouts: ours and TRL's.

    step() -> None        packing or padding, forward, backward, clipping, AdamW, and the metrics of the step
    gradients -> dict     the gradient of each parameter in that step, after clipping

Each trainer is the real one, made by its public constructor, and runs its own code. Rollouts and advantages are given.
On TRL's side a step is `training_step` with the batch that `_generate_and_score_completions` would return, followed by
the code of transformers' loop.

On a machine without Triton TRL scores every position, prompts and padding included. With `trl(..., compact=True)` it
scores the completion tokens alone, as on a GPU; with `trl(..., fused=True)` it uses our ops.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.types import Sample, samples_from

PAD, EOS, GROUP = 0, 1, 4
LONGEST_PROMPT = 48


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The shape of a model and the rollouts of a step. Completions are uneven: the mean is 0.4 of the longest."""

    vocab: int
    hidden: int
    layers: int
    completions: int
    longest: int
    config: Mapping[str, Any] | None = None
    """The `model_type` of transformers and further fields of its configuration; None is a small Qwen2."""
    gradient_checkpointing: bool = False

    def model(self) -> PreTrainedModel:
        sizes: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
        }
        with torch.random.fork_rng(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.manual_seed(0)
            config = AutoConfig.for_model(**{"model_type": "qwen2", **sizes, **(self.config or {})})
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            return model

    def batch(self) -> list[Sample]:
        generator, count = torch.Generator().manual_seed(0), self.completions
        shares = torch.linspace(0.01, 1.0, count).pow(1.5)[torch.randperm(count, generator=generator)]

        def draw(length: int) -> list[int]:
            ids: list[int] = torch.randint(2, self.vocab, (length,), generator=generator).tolist()
            return ids

        prompts = [draw(8 + (LONGEST_PROMPT - 8) * group * GROUP // count) for group in range(count // GROUP)]
        completions = [[*draw(length - 1), EOS] for length in (shares * self.longest).ceil().long().tolist()]
        return samples_from(
            {
                "prompt_ids": [prompts[index // GROUP] for index in range(count)],
                "completion_ids": completions,
                "advantage": torch.randn(count, generator=generator).tolist(),
                "finish_reason": ["stop"] * count,
                "weight_version": [0] * count,
            }
        )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        vocabulary = {name: index for index, name in enumerate(["<pad>", "<eos>", *map(str, range(2, self.vocab))])}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset of both trainers, whose rollouts are given."""
        return [{"prompt": "2 3"}] * self.completions

    @property
    def options(self) -> dict[str, Any]:
        """Options of both trainers, whose names they share."""
        return {
            "per_device_train_batch_size": self.completions,
            "num_generations": GROUP,
            "max_completion_length": self.longest,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": self.gradient_checkpointing,
            "bf16": torch.cuda.is_available(),
            "loss_type": "dapo",
            "beta": 0.0,
            "max_steps": 1_000_000,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    step: Callable[[], object]
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of one step, as the optimizer gets them."""
        gradients: dict[str, Tensor] = {}

        def keep(*_: Any) -> None:
            named = self.model.named_parameters()
            gradients.update({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})

        handle = self.optimizer.register_step_pre_hook(keep)
        self.step()
        handle.remove()
        return gradients


def no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def no_rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` that is never called, because the rollouts are given."""
    raise NotImplementedError


def our_trainer(problem: Problem, reward: Any, *, learning_rate: float = 0.0, **given: Any) -> GRPOTrainer:
    output = str(Path(tempfile.mkdtemp()) / "run")
    args = GRPOConfig(output_dir=output, log_completions=False, learning_rate=learning_rate, **problem.options)
    return GRPOTrainer(problem.model(), reward, args, problem.rows, processing_class=problem.tokenizer(), **given)


def trl_trainer(problem: Problem, reward: Any, *, kind: Any = None, learning_rate: float = 0.0, **given: Any) -> Any:
    """TRL's GRPOTrainer, or `kind`, with its defaults and `Problem.options`: AdamW fused, no Liger layers."""
    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the versions of an engine that is not used
        import trl

        args = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            learning_rate=learning_rate,
            **problem.options,
        )
        rows = datasets.Dataset.from_list(problem.rows)
        kind = kind or trl.GRPOTrainer
        return kind(problem.model(), reward, args, rows, processing_class=problem.tokenizer(), **given)


def ours(problem: Problem, *, learning_rate: float, **given: Any) -> TrainingStep:
    """A `GRPOTrainer`, whose step is `Learner.learn`: everything between rewards and the next rollouts."""
    trainer = our_trainer(problem, no_reward, learning_rate=learning_rate, rollout_func=no_rollouts, **given)
    batch, learner = problem.batch(), trainer.learner
    return TrainingStep(step=lambda: learner.learn(batch), model=trainer.model, optimizer=learner.optimizer.optimizer)


def trl(problem: Problem, *, learning_rate: float, compact: bool = False, fused: bool = False) -> TrainingStep:
    """TRL's trainer; `compact`: it scores the completion tokens alone; `fused`: it uses our ops."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOTrainer as TheirTrainer

        from fused_grpo.integrations.trl import FusedGRPOTrainer

    inputs = padded(problem.batch())

    class GivenBatch(FusedGRPOTrainer if fused else TheirTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, rows: Any) -> dict[str, Tensor]:
            return {name: tensor.to(self.accelerator.device) for name, tensor in inputs.items()}

    trainer = trl_trainer(problem, no_reward, kind=GivenBatch, learning_rate=learning_rate)
    trainer.create_optimizer_and_scheduler(trainer.args.max_steps)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = 1
    if problem.gradient_checkpointing:  # as `train()` does
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    model.train()

    def step() -> None:
        with scoring_completions_alone() if compact else contextlib.nullcontext():
            trainer.training_step(model, None, None)
            trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm).item()
            optimizer.step()
            model.zero_grad()

    return TrainingStep(step=step, model=model, optimizer=optimizer.optimizer)


def liger(problem: Problem, *, learning_rate: float) -> TrainingStep:
    """Liger's GRPO loss over the hidden states of all completion positions, as TRL 1.15 called it, and AdamW."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    inputs, model = padded(problem.batch()), problem.model().train()
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    if problem.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    completions = (inputs["completion_ids"], inputs["completion_mask"], inputs["advantages"])

    def step() -> None:
        states = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden = states[:, -completions[0].shape[1] - 1 : -1]
        loss(hidden, model.get_output_embeddings().weight, *completions)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(step=step, model=model, optimizer=optimizer)


def padded(batch: list[Sample]) -> dict[str, Tensor]:
    """A batch in the format of TRL's generation: prompts padded on the left, completions on the right."""

    def pad(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
        tensors = [torch.tensor(row) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD, padding_side=side)
        ones = [torch.ones_like(row) for row in tensors]
        return ids, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)

    prompt_ids, prompt_mask = pad([sample.prompt_ids for sample in batch], "left")
    completion_ids, completion_mask = pad([sample.completion_ids for sample in batch], "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([sample.advantage for sample in batch]),
        "num_items_in_batch": completion_mask.sum(),
    }


@contextlib.contextmanager
def scoring_completions_alone() -> Iterator[None]:
    """Make TRL behave as on a device with Triton, where it scores completion tokens alone."""
    import trl.trainer.utils as module

    asked, module._use_triton = module._use_triton, lambda device: True
    try:
        yield
    finally:
        module._use_triton = asked
