"""How the servers of an engine come to have the trainer's weights: through files, or by NCCL; and whether they have.

    files   safetensors in shared memory, which every server reads: one machine, or a folder that both can read
    nccl    a broadcast from GPU to GPU through vLLM's own weight transfer; see nccl_transfer.py

Either one only moves weights. What makes them a version is the same around both, in engine.py: no server samples
from old keys and values, each has the tag of this sync and is asked for it again, and `SentValues` compares what it
holds with what it was sent. The last word has the step: its log-probs have to be the trainer's (agreement.py).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import httpx
import torch
from torch import Tensor

from fused_grpo.trainer.engines.server.facts import checksums
from fused_grpo.trainer.engines.server.replicas import Replica, Replicas, RequestError
from fused_grpo.trainer.engines.weight_files import published

TransferName = Literal["auto", "files", "nccl"]

# Servers hash all their weights for one check, a second or so for each GiB.
_COMPARED_BYTES = 256 << 20

_log = logging.getLogger(__name__)


class WeightTransfer(Protocol):
    """Moves weights from the trainer to every server. One process of the trainer has one."""

    name: str

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Have all servers load these (checkpoint names, full tensors). Raises where one has not, in bounded time."""
        ...

    def close(self) -> None:
        """Give back what `send` opened. The servers stay up."""
        ...


class FileTransfer(WeightTransfer):
    """Through safetensors files that are removed as soon as they are read.

    Args:
        servers: they and the trainer can read one folder.
        directory: where the files go. None: shared memory.
    """

    name = "files"

    def __init__(self, servers: Replicas, *, directory: str | None = None) -> None:
        self._servers, self._directory = servers, directory

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write, have them read, remove; see WeightTransfer.

        Errors:
            UnavailableError: a server refused, or did not answer in time.
        """
        with published(weights, directory=self._directory) as folder:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._servers.post("/collective_rpc", call, doing="loading weights")

    def close(self) -> None:
        """Nothing is open between two syncs."""


class SentValues:
    """Compares the weights that a server holds with those that it was sent, by sha256.

    Not every weight can be compared: vLLM fuses, shards and repacks some. Those that were equal on every worker after
    the first sync have to be equal after every other, and after the first at least one has to be. A server that has no
    checksums, or none under a name that it was sent, is warned of.

    Args:
        dtype: what the servers keep weights in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sent: dict[str, str] = {}
        self._comparable: dict[str, set[str]] = {}  # by URL

    @classmethod
    def of(cls, model: torch.nn.Module, dtype: torch.dtype) -> SentValues | None:
        """None where the model is too large to be compared at every sync."""
        kept = cls(dtype)
        weights = sum(parameter.numel() for parameter in model.parameters())
        return kept if weights * dtype.itemsize <= _COMPARED_BYTES else None

    def noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`weights`, while their checksums are taken."""
        self._sent = {}
        for name, weight in weights:
            # As vLLM takes them: of the bytes, in the server's dtype.
            values = weight.detach().to("cpu", self._dtype).contiguous().view(-1).view(torch.uint8)
            self._sent[name] = hashlib.sha256(values.numpy().data).hexdigest()
            yield name, weight

    async def check(self, client: httpx.AsyncClient, replica: Replica) -> None:
        """Raise where a server holds other values than it was last sent.

        Errors:
            RequestError: it does; names a weight.
        """
        held = await checksums(client, replica)
        if held is None:
            return
        first = replica.url not in self._comparable
        known = self._comparable.get(replica.url, held.keys() & self._sent.keys())
        if first and not known:
            _log.warning("%s has no weight of a name that it was sent; their values are not compared", replica.url)
        equal = {name for name in known if held.get(name) == {self._sent.get(name)}}
        if (first and known and not equal) or (not first and equal != known):
            raise RequestError(f"other values of {min(known - equal)} than it was sent")
        self._comparable[replica.url] = equal
