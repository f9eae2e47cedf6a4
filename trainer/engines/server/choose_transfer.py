"""Which way the weights go to servers: through files, or by NCCL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import get_args

import torch

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.engines.server.facts import ServerFacts
from fused_grpo.trainer.engines.server.nccl_transfer import NCCLTransfer, why_not
from fused_grpo.trainer.engines.server.replicas import Replicas
from fused_grpo.trainer.engines.server.urls import is_this_machine
from fused_grpo.trainer.engines.server.weight_transfer import FileTransfer, TransferName, WeightTransfer

_log = logging.getLogger(__name__)


def choose_transfer(
    wanted: TransferName, servers: Replicas, facts: Sequence[ServerFacts], *, directory: str | None = None
) -> WeightTransfer:
    """The transfer called `wanted`; "auto" is nccl where servers were started for it and it can run, files otherwise.

    A group with another machine opens a port there that asks for no password, so "auto" makes none.

    Errors:
        InputError: an unknown name.
        UnavailableError: nccl was asked for and cannot run; says why.
    """
    if wanted not in get_args(TransferName):
        raise InputError(f"got weight transfer {wanted!r}, want one of {get_args(TransferName)}; fix: choose one")
    if wanted != "files":
        reason = why_not(servers, facts)
        if reason is None and wanted == "auto" and not all(is_this_machine(replica.url) for replica in servers.all):
            reason = "a server that is not on this machine"
            _log.warning("got %s: weights go by NCCL only where vllm_weight_transfer='nccl' says so", reason)
        if reason is None:
            _log.info("weights go to the servers by NCCL")
            return NCCLTransfer(servers, device=torch.device("cuda", torch.cuda.current_device()))
        if wanted == "nccl":
            raise UnavailableError(
                f"got vllm_weight_transfer='nccl' and {reason}, want GPUs on both sides and servers started with "
                """--weight-transfer-config '{"backend": "nccl"}'; fix: that, or vllm_weight_transfer='files'"""
            )
    return FileTransfer(servers, directory=directory)
