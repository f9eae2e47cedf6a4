"""Tasks: rows to train on, rows that are held out, and the reward of both, from one place.

task            `Task`
named           the tasks of the command line by name; `fused-grpo tasks`
reasoning_gym   the generators of reasoning-gym as tasks (processes.py: what runs in processes of their own)
entries         entries of a generator as text and back, their difficulty, and the answer in a completion
"""

from fused_grpo.trainer.tasks.reasoning_gym import reasoning_gym_task
from fused_grpo.trainer.tasks.task import Task

__all__ = ["Task", "reasoning_gym_task"]
