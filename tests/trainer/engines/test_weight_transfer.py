"""Weights for servers: through files or by NCCL."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from live_bytes import LiveBytes
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM

from fused_grpo.errors import InputError, UnavailableError, WeightSyncError
from fused_grpo.trainer.engines.server import weight_transfer
from fused_grpo.trainer.engines.server.replicas import Replica, Replicas
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.engines.server.weight_transfer import FileTransfer, NCCLTransfer
from fused_grpo.trainer.models import weight_stream
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.models.weight_stream import WeightStream


@pytest.fixture(scope="module")
def model(build_model):
    return build_model("llama", tied=False)


@pytest.fixture
def connect(servers, model, tokenizer) -> Callable[..., VLLMServerEngine]:
    urls = [server.url for server in servers]
    return lambda **options: VLLMServerEngine(model, tokenizer, base_urls=urls, timeout=20, **options)


def test_nccl_that_cannot_run_here_is_refused_with_the_reason(connect, servers) -> None:
    with pytest.raises(UnavailableError, match=rf"'nccl' and a server at {servers[0].url} that was started without it"):
        connect(weight_transfer="nccl")
    for server in servers:
        server.transfer = "nccl"
    with pytest.raises(UnavailableError, match=r"'nccl' and a trainer without a CUDA device, want .* fix:"):
        connect(weight_transfer="nccl")


def test_an_unknown_transfer_is_refused_with_the_choices(connect) -> None:
    with pytest.raises(InputError, match=r"weight transfer 'pigeon', want one of \('auto', 'files', 'nccl'\); fix:"):
        connect(weight_transfer="pigeon")


def test_only_its_name_chooses_nccl(connect, servers, model, monkeypatch, caplog) -> None:
    monkeypatch.setattr(weight_transfer, "why_not_nccl", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for server in servers:
        server.transfer = "nccl"
    engine = connect(weight_transfer="auto")
    engine.load_weights(checkpoint_weights(model), version=0)
    assert servers[0].weights.keys() == dict(checkpoint_weights(model)).keys()
    assert isinstance(engine._transfer, FileTransfer)
    assert "experimental" not in caplog.text
    assert isinstance(connect(weight_transfer="nccl")._transfer, NCCLTransfer)
    assert "NCCL, which is experimental" in caplog.text


def test_a_server_that_only_ipv6_reaches_is_no_member_of_a_group(servers) -> None:
    started_for_it = [SimpleNamespace(weight_transfer_config={"backend": "nccl"})]
    assert weight_transfer.why_not_nccl(Replicas([servers[0].url]), started_for_it) == "a trainer without a CUDA device"
    port = servers[0].server_port
    assert "no IPv4 connection" in weight_transfer.why_not_nccl(Replicas([f"http://[::1]:{port}"]), started_for_it)


class Communicator:
    """Replaces vLLM's, which needs GPUs."""

    closed = False

    def __init__(self) -> None:
        self.buckets: list[Any] = []  # by numpy, which LiveBytes does not see

    def broadcast(self, bucket: torch.Tensor, src: int, stream: None) -> None:
        assert src == 0
        self.buckets.append(bucket.numpy().copy())

    def destroy(self) -> None:
        self.closed = True


@pytest.fixture
def wire(servers, monkeypatch) -> SimpleNamespace:
    """A broadcast that is a list; servers read it as vLLM's workers do."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    wire = SimpleNamespace(communicator=Communicator(), met=[])
    monkeypatch.setattr(nccl_common, "trainer_init", lambda place: wire.met.append(place) or wire.communicator)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: [Mock()] * count, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", Mock)  # in vLLM 0.28
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_stream", Mock())  # as the next two, in vLLM 0.33
    monkeypatch.setattr(torch, "Event", Mock())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)

    def received(update: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What vLLM's workers make of the last broadcasts."""
        named = zip(*(update[key] for key in ("names", "dtype_names", "shapes")), strict=True)
        shapes = [(name, (shape, getattr(torch, dtype))) for name, dtype, shape in named]
        sent = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes}
        count = len(list(WeightStream(sent, ()).buckets()))
        buckets, unpacked = iter(wire.communicator.buckets[-count:]), {}
        packed_tensor.packed_nccl_broadcast_consumer(
            iter(shapes),
            SimpleNamespace(broadcast=lambda bucket, src: bucket.copy_(torch.from_numpy(next(buckets)))),
            src=0,
            post_unpack_func=unpacked.update,
            buffer_size_bytes=weight_transfer.BUCKET_BYTES,
            device="cpu",
        )
        assert next(buckets, None) is None
        return unpacked

    for server in servers:
        server.wire, server.transfer = received, "nccl"
    return wire


@pytest.fixture
def by_nccl(connect, servers, wire, monkeypatch) -> VLLMServerEngine:
    """An engine that was made where NCCL can run."""
    monkeypatch.setattr(weight_transfer, "why_not_nccl", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    engine = connect(weight_transfer="nccl")
    assert isinstance(engine._transfer, NCCLTransfer)
    engine._transfer = NCCLTransfer(engine._replicas, device=torch.device("cpu"))
    return engine


@pytest.mark.engine
def test_nccl_opens_one_group_of_all_workers_and_sends_every_weight(by_nccl, servers, wire, model) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    for version in (0, 1):
        weights = [(name, weight + version) for name, weight in checkpoint_weights(model)]
        by_nccl.load_weights(iter(weights), version=version)
        for server in servers:
            assert server.weights.keys() == dict(weights).keys()
            assert all(torch.equal(server.weights[name], weight) for name, weight in weights)
            assert server.weight_version.endswith(f":{version}")
    assert [place["world_size"] for place in wire.met] == [5]
    # What vLLM's workers make of what they were sent.
    calls = [dict(server.calls) for server in servers]
    joined = [NCCLWeightTransferInitInfo(**call["/init_weight_transfer_engine"]["init_info"]) for call in calls]
    assert [(info.rank_offset, info.world_size, info.packed) for info in joined] == [(1, 5, True), (3, 5, True)]
    assert {info.packed_buffer_size_bytes for info in joined} == {weight_transfer.BUCKET_BYTES}
    assert {(info.master_address, info.master_port) for info in joined} == {("127.0.0.1", wire.met[0]["master_port"])}
    update = NCCLWeightTransferUpdateInfo(**calls[1]["/update_weights"]["update_info"])
    assert update.names == [name for name, _ in weights]
    assert set(update.dtype_names) == {"float32"}


@pytest.mark.engine
def test_nccl_is_left_on_both_sides(by_nccl, servers, wire, model) -> None:
    by_nccl.close()
    assert "/shutdown_weight_transfer_engine" not in dict(servers[0].calls)
    by_nccl._closed = False
    by_nccl.load_weights(checkpoint_weights(model), version=0)
    by_nccl.close()
    assert wire.communicator.closed
    assert all("/shutdown_weight_transfer_engine" in dict(server.calls) for server in servers)


@pytest.mark.engine
def test_after_nccl_failed_on_a_server_the_next_sync_opens_a_new_group(by_nccl, servers, wire, model) -> None:
    servers[1].refuses_weights = True
    with pytest.raises(WeightSyncError, match=rf"weight transfer by NCCL: got status 500 .* at {servers[1].url}"):
        by_nccl.load_weights(checkpoint_weights(model), version=0)
    servers[1].refuses_weights = False
    by_nccl.load_weights(checkpoint_weights(model), version=0)
    assert len(wire.met) == 2


def test_a_broadcast_that_hangs_ends_at_the_timeout(servers, monkeypatch) -> None:
    transfer = NCCLTransfer(Replicas([servers[0].url], timeout=0.3), device=torch.device("cpu"))
    monkeypatch.setattr(transfer, "_send", lambda *_: servers[0].released.wait(30))
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"got TimeoutError .*its time was up; .*fix:"):
        transfer.send([("norm", torch.ones(1))])
    assert time.monotonic() - start < 15


def test_a_server_that_hangs_is_left_all_the_same(monkeypatch) -> None:
    """With no limit of time for calls there was a TypeError."""
    transfer = NCCLTransfer(Replicas(["http://127.0.0.1:9"], timeout=None), device=torch.device("cpu"))
    transfer._group = communicator = Communicator()
    monkeypatch.setattr(weight_transfer, "_CLOSE_SECONDS", 0.02)
    monkeypatch.setattr(Replica, "request", lambda *_: asyncio.sleep(30))
    transfer.close()
    assert communicator.closed


@pytest.mark.engine
def test_a_server_that_refuses_to_join_ends_the_sync_at_once(by_nccl, servers, wire, model, monkeypatch) -> None:
    """vLLM's own side would wait for it until the timeout."""
    from vllm.distributed.weight_transfer import nccl_common

    never = threading.Event()
    monkeypatch.setattr(nccl_common, "trainer_init", lambda _: never.wait(30))
    servers[1].refuses_to_join = True
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=rf"got status 500 .* at {servers[1].url}"):
        by_nccl.load_weights(checkpoint_weights(model), version=0)
    never.set()
    assert time.monotonic() - start < 15


def test_a_sync_that_timed_out_sends_nothing_later(monkeypatch) -> None:
    transfer = NCCLTransfer(Replicas(["http://127.0.0.1:9"], timeout=0.2), device=torch.device("cpu"))
    met, sent = threading.Event(), []
    waits = iter([lambda: met.wait(30), lambda: None])
    monkeypatch.setattr(transfer, "_meet", lambda: (Mock(), next(waits)())[0])
    monkeypatch.setattr(transfer, "_update", lambda weights, group: sent.append(group))
    with pytest.raises(WeightSyncError, match="its time was up"):
        transfer.send([("norm", torch.ones(1))])
    late = next(thread for thread in threading.enumerate() if thread.name == "weight-transfer")
    transfer.send([("norm", torch.ones(1))])
    met.set()
    late.join(30)
    transfer.send([("norm", torch.ones(1))])
    assert len(sent) == 2
    assert sent[0] is sent[1]


@pytest.mark.engine
def test_vllm_has_the_routes_that_a_sync_calls() -> None:
    import vllm

    if Version(vllm.__version__) < Version("0.32"):
        pytest.skip("an older vLLM has them elsewhere, but for two that a sync can do without")
    from vllm.entrypoints.rl.online.api_router import router

    routes = {route.path for route in router.routes}
    weights = {"start_weight_update", "update_weights", "finish_weight_update", "init_weight_transfer_engine"}
    checks = {"get_world_size", "weight_info", "update_weight_version", "weight_checker"}
    assert {f"/{name}" for name in {*weights, *checks, "shutdown_weight_transfer_engine"}} <= routes


def adapted(model) -> Any:
    """LoRA on all layers; the embedding and the head are the largest weights, as in published models."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.fixture
def wide() -> LlamaForCausalLM:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def in_this_thread(work: Callable[[], Any], name: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(work())
    return future


@pytest.fixture(params=["files", pytest.param("nccl", marks=pytest.mark.engine)])
def connected(request, connect, servers, monkeypatch) -> VLLMServerEngine:
    """An engine that sends 16 KiB at a time, from the test's own thread; its servers compute in bf16."""
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 16 << 10)
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 16 << 10)
    monkeypatch.setattr(weight_transfer, "in_thread", in_this_thread)
    for server in servers:
        server.dtype = "torch.bfloat16"
    return connect() if request.param == "files" else request.getfixturevalue("by_nccl")


@pytest.mark.parametrize("kind", ["whole", "merged"])
@pytest.mark.parametrize("sent_as", [torch.bfloat16, None])
def test_a_sync_holds_one_weight_and_one_bucket_besides_the_model(connected, servers, wide, kind, sent_as) -> None:
    model = wide if kind == "whole" else adapted(wide)
    expected = dict(checkpoint_weights(model))
    largest = max(weight.nbytes for weight in model.parameters())
    with LiveBytes(model.parameters()) as live:
        connected.load_weights(checkpoint_weights(model, sent_as), version=0)
    assert live.most <= largest + (16 << 10)
    assert live.most > 0 or (type(connected._transfer), kind, sent_as) == (FileTransfer, "whole", None)
    assert live.now < 1 << 10
    for server in servers:
        assert server.weights.keys() == expected.keys()
        for name, weight in expected.items():
            dtype = sent_as if sent_as and weight.ndim > 1 else torch.float32
            assert server.weights[name].dtype == dtype
            assert torch.equal(server.weights[name], weight.to(dtype)), name


def test_servers_are_asked_for_their_dtype(connect, servers) -> None:
    assert connect().weight_dtype is None
    servers[0].dtype = servers[1].dtype = "torch.bfloat16"
    assert connect().weight_dtype == torch.bfloat16
    servers[1].dtype = "torch.float32"
    assert connect().weight_dtype is None
