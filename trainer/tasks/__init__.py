"""Tasks: rows to train on, rows that are held out, and the reward of both, from one place (docs/tasks.md)."""

from fused_grpo.trainer.tasks.reasoning_gym import reasoning_gym_task
from fused_grpo.trainer.tasks.task import Task

__all__ = ["Task", "reasoning_gym_task"]
