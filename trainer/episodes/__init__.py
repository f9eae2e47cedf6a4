"""Episodes: completions of several turns, in which the model calls tools and reads their answers (docs/agents.md)."""

from fused_grpo.trainer.rewards.isolation import isolated_tool

__all__ = ["isolated_tool"]
