"""Episodes: completions of several turns, in which the model calls tools and reads their answers (docs/agents.md)."""

from fused_grpo.trainer.episodes.isolated_tools import isolated_tool

__all__ = ["isolated_tool"]
