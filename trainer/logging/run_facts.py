"""What is said of a run beforehand: on the console, in the report and to trackers."""

from __future__ import annotations

from typing import Any

from torch import nn

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.formatting import short_number


def run_facts(
    args: GRPOConfig, model: nn.Module, *, name: str, rewards: list[str], engine: str, prompts: int, processes: int
) -> dict[str, Any]:
    """What will be done to what: `prompts` in each batch of each of the `processes`, to the model of this name."""
    prompts *= processes
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "task": "+".join(rewards),
        "model": f"{name} ({short_number(parameters)})",
        "engine": engine,
        "batch": f"{prompts * args.num_generations} sequences = {prompts} prompts x {args.num_generations}, "
        f"in {args.micro_batches_per_generation(processes)} micro-batch(es) on {processes} process(es)",
        "loss": f"{args.loss_type}, beta {args.beta}, learning rate {args.learning_rate}",
        "output": args.output_dir,
    }
