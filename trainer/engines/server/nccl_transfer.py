"""Sends weights by NCCL, from the trainer's GPU to those of the servers, with vLLM's own code on both ends.

vLLM's trainer side (`vllm.distributed.weight_transfer`, from vLLM 0.28 on) opens one NCCL group of this process and
every worker of every server, and broadcasts. It needs an address to meet at, a source of weights, and a client that
announces each update to the servers. vLLM's own HTTP client is not used for the last: it supports one server, no API
key, and it would use the proxies of the environment.

Weights are packed into buckets, one broadcast each. vLLM's trainer side keeps all weights of a bucket until they are
joined, and has two buckets of 1 GiB in flight; `_sender_class` copies each weight into its bucket as soon as it is
made. So one weight and one bucket are on the GPU besides the model.

A broadcast cannot be interrupted when the other side is gone, so each runs in a thread. After the timeout the sync has
failed and the thread is abandoned; the servers then hang in their broadcast, and have to be restarted.

This has not run on a GPU yet: tests call vLLM's classes with the communicator replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import math
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httpx
import torch
from torch import Tensor

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer.distributed.threads import in_thread
from fused_grpo.trainer.engines.server.replicas import Json, Replica, Replicas, parsing
from fused_grpo.trainer.engines.server.server_info import ServerInfo
from fused_grpo.trainer.models.weight_stream import BUCKET_BYTES, WeightStream

_CLOSE_SECONDS = 10.0


def why_not_nccl(servers: Replicas, infos: Sequence[ServerInfo]) -> str | None:
    """The reason why weights cannot go by NCCL, or None."""
    for replica, info in zip(servers.all, infos, strict=True):
        if info.weight_transfer != "nccl":
            return f"a server at {replica.url} that was started without it"
    try:
        _meeting_point(servers.all[0].url)
    except OSError:
        return f"no IPv4 connection to {servers.all[0].url}, and vLLM's groups know no other"
    if not torch.cuda.is_available():
        return "a trainer without a CUDA device"
    if importlib.util.find_spec("vllm") is None or not _has_trainer_side():
        return "no vLLM >= 0.28 beside the trainer"
    return None


class NCCLTransfer:
    """Sends weights by broadcast. The first `send` opens the group.

    Args:
        servers: each was started with --weight-transfer-config '{"backend": "nccl"}'.
        device: the trainer's; weights on another device are copied to it one at a time.
    """

    name = "nccl"

    def __init__(self, servers: Replicas, *, device: torch.device) -> None:
        self._servers, self._device = servers, device
        self._group: tuple[Source, Any] | None = None  # source and sender, after a send that succeeded

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Have all servers load these weights (checkpoint names, full tensors).

        Raises:
            WeightSyncError: vLLM failed on either side, or took longer than the servers' timeout.
        """
        # A group whose broadcast did not finish cannot be used again.
        (source, sender), self._group = self._group or (Source(self._device), None), None
        source.weights = WeightStream.of(weights)
        try:
            sent = in_thread(lambda: self._send(source, sender), name="weight-transfer")
            self._group = source, sent.result(self._servers.timeout)
        except Exception as error:
            raise WeightSyncError(
                f"got {type(error).__name__} from vLLM's weight transfer by NCCL: {str(error) or 'its time was up'}; "
                f"want all workers of {self._servers} to take the weights; fix: look at the servers' logs, start them "
                "again, and raise vllm_server_timeout where it only needs longer"
            ) from error
        finally:
            source.weights = None

    def close(self) -> None:
        """Leave the group, on both sides. The servers keep running."""
        if self._group is None:
            return
        (_, sender), self._group = self._group, None

        async def leave(client: httpx.AsyncClient) -> None:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._servers.on_each(
                    lambda replica: replica.request(client, "POST", "/shutdown_weight_transfer_engine")
                )

        with contextlib.suppress(UnavailableError):
            self._servers.run(leave, doing="leaving the NCCL group")
        with contextlib.suppress(TimeoutError):
            in_thread(sender.shutdown, name="weight-transfer").result(_CLOSE_SECONDS)

    def _send(self, source: Source, sender: Any) -> Any:
        """Broadcast the source's weights; vLLM's sender, for the next time."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # vLLM's stream does not wait for the optimizer's.
            torch.cuda.synchronize()
        if sender is None:
            sender = self._meet(source)
        # Meeting may take longer than the timeout. Then the sync has failed, and the source is empty.
        if source.weights is not None:
            sender.send_weights()
        return sender

    def _meet(self, source: Source) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        client = SyncClient(self._servers)
        address, port = _meeting_point(self._servers.all[0].url)
        world_size = 1 + sum(client.workers)
        place: dict[str, Any] = {"master_address": address, "master_port": port}
        info = NCCLTrainerInitInfo(**place, world_size=world_size, rank=0, packed_buffer_size_bytes=BUCKET_BYTES)
        return _sender_class().trainer_init(info, client=client, source=source)


class Source:
    """The weights of one sync, as vLLM's WeightSource: their metadata, then the tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weights: WeightStream | None = None

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of each."""
        from vllm.distributed.weight_transfer import ParamMeta

        assert self.weights is not None
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self.weights is not None
        return map(self._on_device, self.weights)

    def _on_device(self, named: tuple[str, Tensor]) -> tuple[str, Tensor]:
        return named[0], named[1].to(self.device)


class SyncClient:
    """vLLM's VLLMWeightSyncClient for several servers: the ranks of one server's workers follow those of another."""

    def __init__(self, servers: Replicas) -> None:
        self._servers = servers
        self.workers = servers.run(self._world_sizes, doing="counting workers")

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        """Have all workers join the group, each with its own rank."""
        first = itertools.accumulate([init_info["rank_offset"], *self.workers])
        ranks = dict(zip(self._servers.all, first, strict=False))

        async def join(client: httpx.AsyncClient) -> None:
            def ask(replica: Replica) -> Any:
                info = {**init_info, "rank_offset": ranks[replica]}
                return replica.request(client, "POST", "/init_weight_transfer_engine", {"init_info": info})

            await self._servers.on_each(ask)

        self._servers.run(join, doing="opening an NCCL group")

    def start_weight_update(self) -> None:
        """Announce an update."""
        self._servers.post("/start_weight_update", doing="loading weights")

    def update_weights(self, update_info: Any) -> None:
        """Receive these weights; returns when the broadcast is over."""
        self._servers.post("/update_weights", {"update_info": update_info}, doing="loading weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._servers.post("/finish_weight_update", body, doing="loading weights")

    async def _world_sizes(self, client: httpx.AsyncClient) -> list[int]:
        async def world_size(replica: Replica) -> int:
            answer = await replica.request(client, "GET", "/get_world_size")
            with parsing("/get_world_size"):
                return int(answer["world_size"])

        return await self._servers.on_each(world_size)


def _sender_class() -> Any:
    """vLLM's trainer side, with its own order and cut of buckets and less memory."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    class Sender(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
        def _broadcast(self, source: Source, meta: Sequence[Any]) -> None:
            weights = iter(source)
            for sizes in _buckets([math.prod(each.shape) * each.dtype.itemsize for each in meta]):
                bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=source.device)
                for place in bucket.split(sizes):
                    place.copy_(next(weights)[1].contiguous().view(-1).view(torch.uint8))
                self.model_update_group.broadcast(bucket, src=0)
                del bucket, place  # to be written over, in the order of the stream, by the next

    return Sender


def _buckets(sizes: Iterable[int]) -> Iterator[list[int]]:
    """Sizes of weights in bytes, cut as vLLM's workers cut them: a bucket ends with the weight that overfills it."""
    bucket: list[int] = []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) > BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _has_trainer_side() -> bool:
    try:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    except ImportError:
        return False
    return WeightTransferTrainerFactory is not None


def _meeting_point(server: str) -> tuple[str, int]:
    """An address of this machine that the server can reach (loopback where both are on it), and a free port."""
    url = httpx.URL(server)
    port = url.port or (443 if url.scheme == "https" else 80)
    # IPv4, as vLLM's side listens on.
    with socket.socket(socket.AF_INET) as connection:
        connection.settimeout(_CLOSE_SECONDS)
        connection.connect((url.host, port))
        address: str = connection.getsockname()[0]
    with socket.socket(socket.AF_INET) as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
