"""Rollout engines: they sample completions from the trainer's weights.

protocol.py               the protocol that every engine follows
engine_choice.py          the engine for the options of a run
vllm/                     vLLM in the trainer's process
server/                   vLLM servers over HTTP
transformers_generate.py  `model.generate` on the trainer's own model
rollout_func.py           a `rollout_func` of the user
checked_engine.py         the trainer calls engines through this module, which checks what they return
weight_check.py           checks that engine and trainer have the same weights
sampling.py               prompts, stop tokens, seeds and sampling options, the same for all engines
weight_files.py           files of weights for other processes, and tied heads
"""

from __future__ import annotations

from fused_grpo.trainer.engines.protocol import RolloutEngine
from fused_grpo.trainer.engines.weight_check import check_same_weights

__all__ = ["RolloutEngine", "check_same_weights"]
