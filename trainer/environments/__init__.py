"""What other projects have to play or to solve, for this trainer (docs/environments.md). Their packages are optional.

textarena    games for one player
openenv      the environment behind a server
verifiers    the rows and rewards of a taskset
packages     imports such a package, or says how to install it
"""

from fused_grpo.trainer.environments.openenv import openenv_environment
from fused_grpo.trainer.environments.textarena import textarena_environment
from fused_grpo.trainer.environments.verifiers import verifiers_task

__all__ = ["openenv_environment", "textarena_environment", "verifiers_task"]
