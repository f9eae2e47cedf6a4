"""Whole trainers that turn the same scored rollouts into the same optimizer step: ours and TRL's.

    step() -> None        packing or padding, forward, backward, clipping, AdamW, and the metrics of the step
    gradients -> dict     what that step gave each parameter, after clipping

Each trainer is the real one, made through its public constructor, and steps through its own code. Only what comes
before is left out: rollouts and advantages are given. TRL's side is `training_step` with the batch that
`_generate_and_score_completions` would have returned, then what transformers' loop does after it.

On a machine without Triton TRL scores every position, prompts and padding as well. `trl(..., compact=True)` has it
score the completion tokens alone, as it does on a GPU; `trl(..., fused=True)` puts our ops under it.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.types import EffectiveBatch, Rollouts

PAD, EOS, GROUP = 0, 1, 4
LONGEST_PROMPT = 48


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model's shape and a step's rollouts. Completion lengths are uneven: their mean is 0.4 of the longest."""

    vocab: int
    hidden: int
    layers: int
    completions: int
    longest: int

    def model(self) -> PreTrainedModel:
        config = Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Qwen2ForCausalLM(config)

    def batch(self) -> EffectiveBatch:
        generator, count = torch.Generator().manual_seed(0), self.completions
        shares = torch.linspace(0.01, 1.0, count).pow(1.5)[torch.randperm(count, generator=generator)]

        def draw(length: int) -> list[int]:
            ids: list[int] = torch.randint(2, self.vocab, (length,), generator=generator).tolist()
            return ids

        prompts = [draw(8 + (LONGEST_PROMPT - 8) * group * GROUP // count) for group in range(count // GROUP)]
        completions = [[*draw(length - 1), EOS] for length in (shares * self.longest).ceil().long().tolist()]
        return EffectiveBatch(
            prompt_ids=[prompts[index // GROUP] for index in range(count)],
            completion_ids=completions,
            sampling_logprobs=None,
            advantages=torch.randn(count, generator=generator),
        )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        vocabulary = {name: index for index, name in enumerate(["<pad>", "<eos>", *map(str, range(2, self.vocab))])}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")

    @property
    def options(self) -> dict[str, Any]:
        """What both trainers are told, in the names that both have."""
        return {
            "num_generations": GROUP,
            "max_completion_length": self.longest,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "bf16": torch.cuda.is_available(),
            "beta": 0.0,
            "max_steps": 1_000_000,
        }


@dataclass(frozen=True, kw_only=True)
class Contender:
    step: Callable[[], None]
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer

    def gradients(self) -> dict[str, Tensor]:
        """Of one step, as the optimizer gets them."""
        found: dict[str, Tensor] = {}

        def keep(*_: Any) -> None:
            named = self.model.named_parameters()
            found.update({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})

        handle = self.optimizer.register_step_pre_hook(keep)
        self.step()
        handle.remove()
        return found


class GivenRollouts:
    """Satisfies RolloutEngine; never asked, because the rollouts are there."""

    name, weight_version = "given", 0

    def generate(self, prompt_ids: Any, sampling: Any) -> Rollouts:
        raise NotImplementedError

    def load_weights(self, named_weights: Any, version: int) -> None:
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing is awake."""

    def wake(self) -> None:
        """Nothing is asleep."""

    def close(self) -> None:
        """Nothing is open."""


def no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def ours(problem: Problem, *, loss_type: str, learning_rate: float, micro_batch: int) -> Contender:
    """`Learner.learn` of a `GRPOTrainer`: all that it does between rewards and the next rollouts."""
    args = GRPOConfig(
        output_dir=str(Path(tempfile.mkdtemp()) / "run"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=problem.completions // micro_batch,
        loss_type=loss_type,
        learning_rate=learning_rate,
        **problem.options,
    )
    model, batch = problem.model(), problem.batch()
    rows = [{"prompt": "2 3"}] * problem.completions
    trainer = GRPOTrainer(
        model, no_reward, args, rows, processing_class=problem.tokenizer(), rollout_engine=GivenRollouts()
    )

    def step() -> None:
        trainer.learner.learn(batch)

    return Contender(step=step, model=model, optimizer=trainer.learner.optimizer.optimizer)


def trl(
    problem: Problem,
    *,
    loss_type: str,
    learning_rate: float,
    micro_batch: int,
    compact: bool = False,
    fused: bool = False,
) -> Contender:
    """TRL's GRPOTrainer with its defaults, but for what `Problem.options` fixes: AdamW fused, no Liger layers.

    `fused`: with our ops under it.
    """
    import datasets
    import trl

    inputs = padded(problem.batch())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions of an engine that is not used
        from trl import GRPOTrainer as TheirTrainer

        from fused_grpo.integrations.trl import FusedGRPOTrainer

    class GivenBatch(FusedGRPOTrainer if fused else TheirTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, rows: Any) -> dict[str, Tensor]:
            return {name: tensor.to(self.accelerator.device) for name, tensor in inputs.items()}

    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=problem.completions // micro_batch,
        loss_type=loss_type,
        learning_rate=learning_rate,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        **problem.options,
    )
    rows = datasets.Dataset.from_list([{"prompt": "2 3"}] * problem.completions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GivenBatch(problem.model(), no_reward, args, rows, processing_class=problem.tokenizer())
    trainer.create_optimizer_and_scheduler(args.max_steps)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    model.train()

    def step() -> None:
        with scoring_completions_alone() if compact else warnings.catch_warnings():
            for _ in range(args.gradient_accumulation_steps):
                trainer.training_step(model, None, None)
            trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
            optimizer.step()
            model.zero_grad()

    return Contender(step=step, model=model, optimizer=optimizer.optimizer)


def padded(batch: EffectiveBatch) -> dict[str, Tensor]:
    """A batch as TRL's generation returns it: prompts padded on the left, completions on the right."""

    def pad(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
        tensors = [torch.tensor(row) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD, padding_side=side)
        ones = [torch.ones_like(row) for row in tensors]
        return ids, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)

    prompt_ids, prompt_mask = pad(batch.prompt_ids, "left")
    completion_ids, completion_mask = pad(batch.completion_ids, "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": batch.advantages,
        "num_items_in_batch": completion_mask.sum(),
    }


@contextmanager
def scoring_completions_alone() -> Iterator[None]:
    """Answer TRL's question whether this is a device with Triton, which it asks to decide just this."""
    import trl.trainer.utils as module

    asked, module._use_triton = module._use_triton, lambda device: True
    try:
        yield
    finally:
        module._use_triton = asked
