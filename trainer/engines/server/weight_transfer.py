"""Moves weights from the trainer to the servers: through files, all of them or what changed, or by NCCL.

    files     safetensors in shared memory, which every server reads: one machine, or a folder that both can read
    changes   files of what changed since the last sync, to servers with our worker extension (changed_weights.py)
    nccl      experimental: a broadcast from GPU to GPU through vLLM's own weight transfer (docs/engines.md)

server_engine.py does the rest of a sync, the same for all: it resets prefix caches and sets the weight version.

**NCCL.** vLLM's trainer side (`TrainerWeightTransferEngine`) is not used: it supports one server and no API key, it
would use the proxies of the environment, its interface changes from release to release, and it keeps two buckets of
1 GiB in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import logging
import socket
import threading
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import httpx
import torch
from torch import Tensor

from fused_grpo.errors import InputError, UnavailableError, WeightSyncError, shown
from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.engines.changed_weights import changes, digest
from fused_grpo.trainer.engines.server.replicas import (
    FailedError,
    NoRouteError,
    Replica,
    Replicas,
    RequestError,
    asked_again,
)
from fused_grpo.trainer.engines.server.server_info import ADAPTER_PREFIX, Model, VLLMConfig
from fused_grpo.trainer.engines.weight_files import temporary_weight_files
from fused_grpo.trainer.models.weight_stream import BUCKET_BYTES, WeightStream

TransferName = Literal["auto", "files", "nccl"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0


def choose_transfer(
    wanted: TransferName,
    servers: Replicas,
    configs: Sequence[VLLMConfig],
    *,
    directory: str | None = None,
    full_sync_interval: int = 1,
) -> FileTransfer | ChangeTransfer | NCCLTransfer:
    """The transfer called `wanted`. "auto" is files: NCCL is experimental, and is chosen by its name alone.

    With a `full_sync_interval` above 1 files have what changed, and one sync of so many sends all.

    InputError: an unknown name, or changes by NCCL.
    UnavailableError: nccl was asked for and cannot run; names the reason.
    """
    if wanted not in get_args(TransferName):
        raise InputError(f"got weight transfer {wanted!r}, want one of {get_args(TransferName)}; fix: choose one")
    if full_sync_interval > 1:
        if wanted == "nccl":
            raise InputError(
                "got vllm_full_sync_interval above 1 and weights by NCCL, want files, which have what changed; fix: "
                "leave vllm_weight_transfer out, or vllm_full_sync_interval=1"
            )
        return ChangeTransfer(servers, interval=full_sync_interval, directory=directory)
    if wanted != "nccl":
        return FileTransfer(servers, directory=directory)
    if reason := why_not_nccl(servers, configs):
        raise UnavailableError(
            f"got vllm_weight_transfer='nccl' and {reason}, want GPUs on both sides and servers started with "
            """--weight-transfer-config '{"backend": "nccl"}'; fix: that, or vllm_weight_transfer='files'"""
        )
    _log.warning("weights go to the servers by NCCL, which is experimental: it has not run on a GPU yet")
    return NCCLTransfer(servers, device=torch.device("cuda", torch.cuda.current_device()))


def why_not_nccl(servers: Replicas, configs: Sequence[VLLMConfig]) -> str | None:
    """The reason why weights cannot go by NCCL, or None."""
    for replica, config in zip(servers.all, configs, strict=True):
        if (config.weight_transfer_config or {}).get("backend") != "nccl":
            return f"a server at {replica.url} that was started without it"
    try:
        _meeting_point(servers.all[0].url)
    except OSError:
        return f"no IPv4 connection to {servers.all[0].url}, and vLLM's groups know no other"
    if not torch.cuda.is_available():
        return "a trainer without a CUDA device"
    if importlib.util.find_spec("vllm") is None:
        return "no vLLM beside the trainer"
    return None


class FileTransfer:
    """Sends weights through safetensors files that are removed as soon as they are read.

    Their folder is made in `directory`, which the trainer and the servers can read. None: in shared memory.
    """

    def __init__(self, servers: Replicas, *, directory: str | None = None) -> None:
        self._servers, self._directory = servers, directory
        self.metrics: dict[str, float] = {}  # of the last send, where it does not send all weights

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Have all servers load these weights (checkpoint names, full tensors); UnavailableError where one does not."""
        with temporary_weight_files(weights, directory=self._directory) as folder:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

            async def load(client: httpx.AsyncClient, replica: Replica) -> None:
                ask = functools.partial(replica.request, client, "POST", "/collective_rpc", call)
                await asked_again(ask, but=FailedError)  # the same weights, however often they are loaded

            self._servers.each(load, doing="loading weights")

    def close(self) -> None:
        """Do nothing: no file is left between two syncs."""


class ChangeTransfer(FileTransfer):
    """Sends the elements whose bits changed since the last `send`, and all of them in one of `interval` sends.

    All are sent too where not every worker has the weights of the last one, or where one does not have the right bits
    afterwards. The weights of the last send stay in the CPU's memory, in the dtype that they are sent in.
    """

    def __init__(self, servers: Replicas, *, interval: int, directory: str | None = None) -> None:
        super().__init__(servers, directory=directory)
        self._interval = interval
        self._weights: dict[str, Tensor] = {}
        self._base = ""  # the digest of what all workers have; "": they have to get all
        self._changes_sent = 0  # since all were

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Have all servers load these weights (checkpoint names, full tensors).

        UnavailableError: a server does not respond; WeightSyncError: it does not get the bits that were sent.
        """
        base, self._base = self._base, ""
        held, self._weights = self._weights, {}
        files, changed = dict[str, Tensor](), 0
        for name, weight in weights:
            new = weight.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            count, key, part = changes(name, held.pop(name, None), new)
            files |= {key: part} if count else {}
            self._weights[name], changed = new, changed + count
            del weight  # before the next is made
        total = sum(weight.numel() for weight in self._weights.values())
        self.metrics = {"weight_sync/bytes": 0.0, "weight_sync/changed_fraction": changed / max(1, total)}
        wanted, self._changes_sent = digest(self._weights), self._changes_sent + 1
        if base and self._changes_sent < self._interval:
            problem = self._loaded(files, base, wanted)
            if problem is None:
                self._base = wanted
                return
            _log.warning("got %s; all weights are sent in the place of what changed", problem)
        files.clear()
        if problem := self._loaded(self._weights, "", wanted):
            raise WeightSyncError(
                f"got {problem}, though all weights were sent, want the trainer's bits; fix: the folder and the "
                "memory that they go through, and the same fused-grpo on both sides"
            )
        self._base, self._changes_sent = wanted, 0

    def close(self) -> None:
        """Free the weights of the last send."""
        self._weights, self._base = {}, ""

    def _loaded(self, files: Mapping[str, Tensor], base: str, wanted: str) -> str | None:
        """Have all workers load what makes `wanted` of `base`; what is wrong with what one of them has then."""
        self.metrics["weight_sync/bytes"] += sum(part.nbytes for part in files.values())

        async def load(client: httpx.AsyncClient, replica: Replica) -> str | None:
            path, kind = "/collective_rpc", list[dict[str, str]]
            ask = functools.partial(replica.ask, client, path, call, field="results", kind=kind)
            # Of a request whose answer was lost the worker has the bits, or says that it lacks their base.
            workers = await asked_again(ask, but=FailedError) or [{"reason": "no worker"}]
            wrong = next((worker for worker in workers if worker.get("digest") != wanted), None)
            return None if wrong is None else shown(replica.redacted(f"{wrong.get('reason')} at {replica.url}"))

        with temporary_weight_files(files.items(), directory=self._directory) as folder:
            kwargs = {"folder": str(folder), "base": base, "wanted": wanted}
            call = {"method": "load_changed_weights", "kwargs": kwargs}
            problems = self._servers.each(load, doing="loading weights")
        return next(filter(None, problems), None)


class NCCLTransfer:
    """Sends weights by broadcast, to servers that were started for it. The first `send` opens the group.

    `device` is the trainer's; weights on another device are copied to it one at a time.
    """

    def __init__(self, servers: Replicas, *, device: torch.device) -> None:
        self._servers, self._device = servers, device
        self.metrics: dict[str, float] = {}
        self._group: Any = None  # vLLM's communicator, after a send that succeeded

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Have all servers load these weights (checkpoint names, full tensors); WeightSyncError where vLLM fails."""
        # A group whose broadcast did not finish cannot be used again.
        group, self._group = self._group, None
        stream, is_over = WeightStream.of(weights), threading.Event()
        try:
            sent = in_thread(lambda: self._send(stream, group, is_over), name="weight-transfer")
            self._group = sent.result(self._servers.timeout)
        except Exception as error:
            raise WeightSyncError(
                f"got {type(error).__name__} from vLLM's weight transfer by NCCL: {str(error) or 'its time was up'}; "
                f"want all workers of {self._servers} to take the weights; fix: look at the servers' logs, start them "
                "again, and raise vllm_server_timeout where it only needs longer"
            ) from error
        finally:
            is_over.set()

    def close(self) -> None:
        """Leave the group, on both sides. The servers keep running."""
        if self._group is None:
            return
        group, self._group = self._group, None

        async def leave(client: httpx.AsyncClient, replica: Replica) -> None:
            with contextlib.suppress(TimeoutError):  # this one is not the limit of `each`, of which there may be none
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await replica.request(client, "POST", "/shutdown_weight_transfer_engine")

        with contextlib.suppress(UnavailableError):
            self._servers.each(leave, doing="leaving the NCCL group")
        with contextlib.suppress(TimeoutError):
            in_thread(group.destroy, name="weight-transfer").result(_CLOSE_SECONDS)

    def _send(self, weights: WeightStream, group: Any, is_over: threading.Event) -> Any:
        """Send the weights; the group, for the next time."""
        self._take_device()
        group = group or self._meet()
        # Meeting may take longer than the timeout. Then the sync has failed.
        if not is_over.is_set():
            self._update(weights, group)
        return group

    def _meet(self) -> Any:
        """A group of this process, rank 0, and all workers: those of one server follow those of another."""
        workers = self._servers.each(
            lambda client, replica: replica.ask(client, "/get_world_size", field="world_size", kind=int),
            doing="counting workers",
        )
        first = dict(zip(self._servers.all, itertools.accumulate([1, *workers]), strict=False))
        address, port = _meeting_point(self._servers.all[0].url)
        place: dict[str, Any] = {"master_address": address, "master_port": port, "world_size": 1 + sum(workers)}
        cut = {"packed": True, "packed_buffer_size_bytes": BUCKET_BYTES, "packed_num_buffers": 2}

        def open_group() -> Any:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init

            self._take_device()
            return trainer_init(place)

        def join(client: httpx.AsyncClient, replica: Replica) -> Awaitable[object]:
            info = {**place, **cut, "rank_offset": first[replica]}
            return replica.request(client, "POST", "/init_weight_transfer_engine", {"init_info": info})

        # Only when all have come is the group open, and a server that refuses never comes: its error ends the sync.
        opened = in_thread(open_group, name="weight-transfer")
        self._servers.each(join, doing="opening an NCCL group")
        return opened.result()

    def _take_device(self) -> None:
        """Make the trainer's device this thread's. Its current stream waits for all that the trainer has computed."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize()

    def _update(self, weights: WeightStream, group: Any) -> None:
        """One update of all servers, which receive while this process sends."""
        shapes = weights.shapes.items()
        update = {
            "names": [name for name, _ in shapes],
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in shapes],
            "shapes": [list(weight.shape) for _, weight in shapes],
        }
        self._servers.post("/start_weight_update")
        call = functools.partial(self._servers.post, "/update_weights", {"update_info": update})
        receiving = in_thread(call, name="weight-transfer")
        # The stream on which the buckets are filled: vLLM's own choice need not wait for it.
        stream = torch.cuda.current_stream() if self._device.type == "cuda" else None
        for sizes in weights.buckets():
            bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            for place in bucket.split(sizes):
                place.copy_(next(weights)[1].contiguous().view(-1).view(torch.uint8))
            group.broadcast(bucket, src=0, stream=stream)
            del bucket, place  # to be written over, in the order of the stream, by the next
        receiving.result()
        self._servers.post("/finish_weight_update")


async def load_adapter(client: httpx.AsyncClient, replica: Replica, *, name: str, path: str) -> None:
    """Have a server load an adapter, and unload the others that were sent by this engine or an earlier one."""

    async def post(path: str, body: dict[str, str]) -> None:
        ask = functools.partial(replica.request, client, "POST", path, body, is_json=False)
        await asked_again(ask, but=FailedError)

    refusal = RequestError("no adapter of this sync in /v1/models, though it was loaded")
    try:
        await post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    except RequestError as error:  # as of one that is loaded: the answer of an earlier request was lost
        refusal = error
    listed = await replica.ask(client, "/v1/models", field="data", kind=list[Model])
    names = {model.id for model in listed if model.id.startswith(ADAPTER_PREFIX)}
    if name not in names:
        raise refusal
    for old in names - {name}:
        with contextlib.suppress(NoRouteError):  # it is unloaded
            await post("/v1/unload_lora_adapter", {"lora_name": old})


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
