"""What is said of a run: beforehand, on the console and in the report, and afterwards, in the model's card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fused_grpo.trainer.adapters import base_model, is_adapted
from fused_grpo.trainer.formatting import short_number
from fused_grpo.trainer.model_card import CardFacts

if TYPE_CHECKING:
    from fused_grpo.trainer.loop import GRPOTrainer


def run_facts(trainer: GRPOTrainer) -> dict[str, str]:
    """What will be done to what."""
    args, processes = trainer.args, trainer.accelerator.num_processes
    prompts = trainer.prompts_per_process * processes
    name = trainer.model_path or type(base_model(trainer.model)).__name__.removesuffix("ForCausalLM")
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {
        "task": "+".join(trainer.rewards.names),
        "model": f"{name} ({short_number(parameters)})",
        "engine": trainer.engine.name,
        "batch": f"{prompts * args.num_generations} sequences = {prompts} prompts x {args.num_generations}, "
        f"in {args.micro_batches_per_generation(processes)} micro-batch(es) on {processes} process(es)",
        "loss": f"{args.loss_type}, beta {args.beta}, learning rate {args.learning_rate}",
        "output": args.output_dir,
    }


def card_facts(trainer: GRPOTrainer, metrics: Mapping[str, Any], eval_after: Mapping[str, float] | None) -> CardFacts:
    """What was done; `metrics` are those of the last step."""
    return CardFacts(
        name=trainer.args.hub_model_id or trainer.output_dir.name,
        rewards=trainer.rewards.names,
        steps=trainer.step,
        metrics=metrics,
        base_model=trainer.model_path,
        eval_before=trainer.eval_before,
        eval_after=eval_after,
        adapter=is_adapted(trainer.model),
    )
