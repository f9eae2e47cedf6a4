"""Weights by NCCL, from the trainer's GPU to those of the servers, with vLLM's own code on both ends.

vLLM's side of the trainer (`vllm.distributed.weight_transfer`, from vLLM 0.28 on) does the work: it opens one NCCL
group of this process and every worker of every server, and broadcasts. It asks for three things, which are here: where
to meet, a source of weights, and a control plane that tells the servers what comes. vLLM's HTTP client is not taken for
that: it knows one server, no key, and would use the proxies of the environment.

Nothing can interrupt a broadcast whose peer is gone, so each runs in a thread of its own. When its time is up the sync
has failed, and the thread is left behind; the servers then hang in theirs, and have to be started again.

None of this has run on a GPU yet: tests call vLLM's classes with the communicator replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httpx
import torch
from torch import Tensor

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer.distributed.threads import in_thread
from fused_grpo.trainer.engines.server.facts import ServerFacts
from fused_grpo.trainer.engines.server.replicas import Json, Replica, Replicas, understood
from fused_grpo.trainer.engines.server.weight_transfer import WeightTransfer

_SECONDS_TO_PART = 10.0


def why_not(servers: Replicas, facts: Sequence[ServerFacts]) -> str | None:
    """What keeps weights from going by NCCL, or None."""
    for replica, server in zip(servers.all, facts, strict=True):
        if server.weight_transfer != "nccl":
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


class NCCLTransfer(WeightTransfer):
    """A WeightTransfer by broadcast. The group is opened by the first `send`.

    Args:
        servers: each was started with --weight-transfer-config '{"backend": "nccl"}'.
        device: the trainer's; weights that are elsewhere go over it one at a time.
    """

    name = "nccl"

    def __init__(self, servers: Replicas, *, device: torch.device) -> None:
        self._servers, self._device = servers, device
        self._group: tuple[Source, Any] | None = None  # what the last send that succeeded has left

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast them; see WeightTransfer.

        Errors:
            WeightSyncError: vLLM failed on either side, or took longer than the servers' timeout.
        """
        # A group in which a broadcast was not finished cannot be used again.
        group, self._group = self._group or (Source(self._device), None), None
        source, _ = group
        source.hold(weights)
        try:
            sender = in_thread(lambda: self._send(*group), name="weight-transfer").result(self._servers.timeout)
        except Exception as error:
            raise WeightSyncError(
                f"got {type(error).__name__} from vLLM's weight transfer by NCCL: {str(error) or 'its time was up'}; "
                f"want all workers of {self._servers} to take the weights; fix: look at the servers' logs, start them "
                "again, and raise vllm_server_timeout where it only needs longer"
            ) from error
        finally:
            source.hold(())
        self._group = source, sender

    def close(self) -> None:
        """Leave the group, on both sides; see WeightTransfer."""
        if self._group is None:
            return
        (_, sender), self._group = self._group, None

        async def part(client: httpx.AsyncClient) -> None:
            async with asyncio.timeout(_SECONDS_TO_PART):
                await self._servers.on_each(
                    lambda replica: replica.ask(client, "POST", "/shutdown_weight_transfer_engine")
                )

        with contextlib.suppress(UnavailableError):
            self._servers.run(part, doing="leaving the NCCL group")
        with contextlib.suppress(TimeoutError):
            in_thread(sender.shutdown, name="weight-transfer").result(_SECONDS_TO_PART)

    def _send(self, source: Source, sender: Any) -> Any:
        """What has sent; the next send needs it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # The optimizer's writes, on a stream that vLLM's knows nothing of.
            torch.cuda.synchronize()
        if sender is None:
            sender = self._meet(source)
        # Meeting may take longer than anybody waited for it. Then the source is empty, and the next send may be on.
        if source.holds:
            sender.send_weights()
        return sender

    def _meet(self, source: Source) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        control = ControlPlane(self._servers)
        address, port = _meeting_point(self._servers.all[0].url)
        info = NCCLTrainerInitInfo(
            master_address=address, master_port=port, world_size=1 + sum(control.workers), rank=0
        )
        return WeightTransferTrainerFactory.trainer_init(info, client=control, source=source)


class Source:
    """What vLLM calls a WeightSource: says what will come, then yields it, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: list[tuple[str, Tensor]] = []

    def hold(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """These are the weights from now on."""
        self._weights = [(name, weight.detach()) for name, weight in weights]

    @property
    def holds(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._weights)

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of each."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self._weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights:
            yield name, weight.to(self._device)


class ControlPlane:
    """What vLLM calls a VLLMWeightSyncClient, for all servers at once: the workers of one follow those of another."""

    def __init__(self, servers: Replicas) -> None:
        self._servers = servers
        self.workers = servers.run(self._world_sizes, doing="counting workers")

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        """Have the workers join the group, each at a rank of its own."""
        first = itertools.accumulate([init_info["rank_offset"], *self.workers])
        ranks = dict(zip([replica.url for replica in self._servers.all], first, strict=False))

        async def join(client: httpx.AsyncClient) -> None:
            await self._servers.on_each(
                lambda replica: replica.ask(
                    client,
                    "POST",
                    "/init_weight_transfer_engine",
                    {"init_info": {**init_info, "rank_offset": ranks[replica.url]}},
                )
            )

        self._servers.run(join, doing="opening an NCCL group")

    def start_weight_update(self) -> None:
        """Weights will come."""
        self._servers.post("/start_weight_update", doing="loading weights")

    def update_weights(self, update_info: Any) -> None:
        """These; returns when the broadcast is over."""
        self._servers.post("/update_weights", {"update_info": update_info}, doing="loading weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """That was all."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._servers.post("/finish_weight_update", body, doing="loading weights")

    async def _world_sizes(self, client: httpx.AsyncClient) -> list[int]:
        async def workers(replica: Replica) -> int:
            answer = await replica.ask(client, "GET", "/get_world_size")
            with understood("/get_world_size"):
                return int(answer["world_size"])

        return await self._servers.on_each(workers)


def _has_trainer_side() -> bool:
    try:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    except ImportError:
        return False
    return WeightTransferTrainerFactory is not None


def _meeting_point(server: str) -> tuple[str, int]:
    """An address of this machine that the server can reach, loopback where it is here too, and a free port."""
    url = httpx.URL(server)
    port = url.port or (443 if url.scheme == "https" else 80)
    # IPv4, as vLLM's side listens on.
    with socket.socket(socket.AF_INET) as connection:
        connection.settimeout(_SECONDS_TO_PART)
        connection.connect((url.host, port))
        address: str = connection.getsockname()[0]
    with socket.socket(socket.AF_INET) as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
