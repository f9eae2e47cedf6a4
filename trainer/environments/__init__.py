"""What other projects have to play or to solve (docs/environments.md); their packages are optional."""

from fused_grpo.trainer.environments.openenv import openenv_environment
from fused_grpo.trainer.environments.textarena import textarena_environment
from fused_grpo.trainer.environments.verifiers import verifiers_task

__all__ = ["openenv_environment", "textarena_environment", "verifiers_task"]
