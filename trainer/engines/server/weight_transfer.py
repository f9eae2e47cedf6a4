"""Moves weights from the trainer to the servers: through files, or by NCCL.

    files   safetensors in shared memory, which every server reads: one machine, or a folder that both can read
    nccl    experimental: a broadcast from GPU to GPU through vLLM's own weight transfer; see nccl_transfer.py

server_engine.py does the rest of a sync, the same for both: it resets prefix caches and sets the weight version.
weight_check.py compares log-probs at the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.engines.server.nccl_transfer import NCCLTransfer, why_not_nccl
from fused_grpo.trainer.engines.server.replicas import Replicas
from fused_grpo.trainer.engines.server.server_info import ServerInfo
from fused_grpo.trainer.engines.weight_files import temporary_weight_files

TransferName = Literal["auto", "files", "nccl"]

_log = logging.getLogger(__name__)


class FileTransfer:
    """Sends weights through safetensors files that are removed as soon as they are read.

    Args:
        servers: they and the trainer can read one folder.
        directory: the parent of that folder. None: shared memory.
    """

    name = "files"

    def __init__(self, servers: Replicas, *, directory: str | None = None) -> None:
        self._servers, self._directory = servers, directory

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Have all servers load these weights (checkpoint names, full tensors).

        Raises:
            UnavailableError: a server refused them, or did not respond in time.
        """
        with temporary_weight_files(weights, directory=self._directory) as folder:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._servers.post("/collective_rpc", call, doing="loading weights")

    def close(self) -> None:
        """Do nothing: no file is left between two syncs."""


def choose_transfer(
    wanted: TransferName, servers: Replicas, infos: Sequence[ServerInfo], *, directory: str | None = None
) -> FileTransfer | NCCLTransfer:
    """The transfer called `wanted`. "auto" is files: NCCL is experimental, and is chosen by its name alone.

    Raises:
        InputError: an unknown name.
        UnavailableError: nccl was asked for and cannot run; names the reason.
    """
    if wanted not in get_args(TransferName):
        raise InputError(f"got weight transfer {wanted!r}, want one of {get_args(TransferName)}; fix: choose one")
    if wanted != "nccl":
        return FileTransfer(servers, directory=directory)
    if reason := why_not_nccl(servers, infos):
        raise UnavailableError(
            f"got vllm_weight_transfer='nccl' and {reason}, want GPUs on both sides and servers started with "
            """--weight-transfer-config '{"backend": "nccl"}'; fix: that, or vllm_weight_transfer='files'"""
        )
    _log.warning("weights go to the servers by NCCL, which is experimental: it has not run on a GPU yet")
    return NCCLTransfer(servers, device=torch.device("cuda", torch.cuda.current_device()))
