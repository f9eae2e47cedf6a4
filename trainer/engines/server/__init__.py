"""vLLM servers over HTTP, and the command that starts one: vLLM's own, with the options that a trainer needs.

A server outlives runs, and may have a GPU, a container or a machine of its own, so the user starts it. The trainer
starts one for itself where vLLM has to sample beside it and the user has none.

server_engine.py    the rollout engines: of merged weights, and of an adapter alone
replicas.py         requests to one or several servers: which URLs are allowed, failures, one deadline, what answers say
own_server.py       the process of a server of the trainer's own; serve_beside.py is what it runs
server_info.py      what a server reports, and whether a trainer can use it
weight_transfer.py  weights to servers: through files, all or what changed, or by NCCL
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fused_grpo.trainer.engines.vllm.start_vllm import write_checkpoint
from fused_grpo.trainer.engines.weight_files import Tie
from fused_grpo.trainer.models.adapters import checkpoint_weights


def server_command(
    model: str | Path, *, port: int = 8000, host: str = "127.0.0.1", options: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment variables of a server that a trainer can use.

    Args:
        model: a folder or hub id.
        options: further options of vLLM, such as ("--dtype", "float32", "--max-model-len", "4096").
    """
    # The module rather than the `vllm` script, which vLLM's CPU package does not install in a working order.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    # Log-probs of the distribution that tokens are sampled from, rather than of the model's untempered one.
    command += ["--host", host, "--port", str(port), "--logprobs-mode", "processed_logprobs", *options]
    return command, {"VLLM_SERVER_DEV_MODE": "1"}


def server_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write `model` so that a CPU server of it can follow training: the head has weights of its own, tied or not.

    vLLM's CPU build never repacks a tied head after a reload; see weight_files.py.
    """
    return write_checkpoint(checkpoint_weights(model), model, tokenizer, folder=Path(folder), tie=Tie.of(model))
