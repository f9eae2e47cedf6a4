"""What changed since the last sync: how it is sent, what is made of it, and that no wrong bit is ever loaded."""

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from safetensors.torch import load, save, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fused_grpo.errors import InputError, WeightSyncError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.engines import changed_weights
from fused_grpo.trainer.engines.changed_weights import RECEIVER, WeightReceiver, apply_changes, changes, digest
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.engines.weight_files import Tie
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.models.weight_stream import WeightStream

BYTES, CHANGED = "weight_sync/bytes", "weight_sync/changed_fraction"


class Worker(WeightReceiver):
    """vLLM's worker, as far as the extension uses it."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.before: Callable[[Path], None] = lambda folder: None  # of each load: what happens on the way

    def load_changed_weights(self, folder: str, **kwargs: str) -> dict[str, str]:
        self.before(Path(folder))
        return super().load_changed_weights(folder, **kwargs)

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = {name: weight.clone() for name, weight in weights_iterator}

    @property
    def held(self) -> dict[str, torch.Tensor]:
        return self._received_weights[1]


@pytest.fixture
def servers(servers) -> list[Any]:
    for server in servers:
        server.workers, server.dtype = [Worker(), Worker()], "torch.bfloat16"
        server.parallel_config = {"worker_extension_cls": RECEIVER}
    return servers


@pytest.fixture
def workers(servers) -> list[Worker]:
    return [worker for server in servers for worker in server.workers]


@pytest.fixture
def model(build_model) -> Any:
    return build_model("llama", tied=True)


@pytest.fixture
def connect(servers, model, tokenizer) -> Callable[..., VLLMServerEngine]:
    urls = [server.url for server in servers]

    def make(model: Any = model, **options: Any) -> VLLMServerEngine:
        options = {"full_sync_interval": 100, "timeout": 20, **options}
        return VLLMServerEngine(model, tokenizer, base_urls=urls, **options)

    return make


@torch.no_grad()
def train_a_little(model: Any, *, seed: int = 0, share: float = 0.03) -> None:
    """Change some elements of each weight, and all of the norms a little."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < share
        parameter[chosen] *= -1.5
        parameter += 1e-3 * (parameter.ndim == 1)


def sent(model: Any, dtype: torch.dtype | None = torch.bfloat16) -> WeightStream:
    return checkpoint_weights(model, dtype)


def expected(model: Any) -> dict[str, torch.Tensor]:
    tie, stream = Tie.of(model), sent(model)
    return dict(stream if tie is None else tie.undo(stream))


def as_bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().view(-1).view(torch.uint8)


def same_bits(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    if {name: (one.dtype, one.shape) for name, one in weights.items()} != {
        name: (one.dtype, one.shape) for name, one in others.items()
    }:
        return False
    return all(torch.equal(as_bytes(weight), as_bytes(others[name])) for name, weight in weights.items())


def mixture(tokenizer: Any) -> Qwen3MoeForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_several_syncs_of_changes_make_the_bits_of_one_that_sends_all(connect, workers, model, tokenizer, kind) -> None:
    model = mixture(tokenizer) if kind == "experts" else model
    engine = connect(model)
    for version in range(4):
        engine.load_weights(sent(model), version)
        for worker in workers:
            assert same_bits(worker.loaded, expected(model))
        total = sum(weight.nbytes for weight in expected(model).values())
        assert engine.sync_metrics[BYTES] == total if version == 0 else engine.sync_metrics[BYTES] < 0.15 * total
        train_a_little(model, seed=version)
    assert {weight.dtype for weight in workers[0].loaded.values()} == {torch.bfloat16, torch.float32}
    assert any("experts.3." in name for name in workers[0].loaded) == (kind == "experts")


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_one_sync_of_so_many_sends_all(connect, servers, model, interval) -> None:
    engine, all_sent = connect(full_sync_interval=interval), []
    total = sum(weight.nbytes for weight in expected(model).values())
    for version in range(7):
        engine.load_weights(sent(model), version)
        all_sent.append(engine.sync_metrics[BYTES] == total)
        train_a_little(model, seed=version)
    assert all_sent == [version % interval == 0 for version in range(7)]
    assert bool(servers[0].weights) == (interval == 1)  # by the route that needs no extension


def test_metrics_have_the_share_that_changed_and_the_bytes_of_the_files(connect, workers, model) -> None:
    engine, sizes = connect(), list[int]()
    workers[0].before = lambda folder: sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
    for version in range(3):
        before, name = expected(model), "model.layers.0.mlp.up_proj.weight"
        if version == 2:
            with torch.no_grad():
                model.get_parameter(name).view(-1)[:5] += 1.0
        engine.load_weights(sent(model), version)
    total = sum(weight.numel() for weight in before.values())
    assert engine.sync_metrics[CHANGED] == 5 / total
    assert engine.sync_metrics[BYTES] == 5 * 3 + 2 * before[name].numel() / 256
    assert 0 < sizes[2] - engine.sync_metrics[BYTES] < 300  # the header
    assert sizes[1] < 100  # nothing has changed


def test_the_trainer_keeps_one_copy_of_what_it_sends(connect, model) -> None:
    engine, total = connect(), sum(weight.nbytes for weight in expected(model).values())
    largest = max(weight.nbytes for weight in expected(model).values())
    with LiveBytes(model.parameters()) as live:
        for version in range(3):
            engine.load_weights(sent(model), version)
            assert total <= live.now <= total + 1024
            with torch.no_grad():
                model.model.norm.weight += 1.0
        assert live.most < total + 3 * largest
        engine.close()
    assert live.now < 1024


def test_changes_larger_than_the_weight_are_not_sent() -> None:
    old = torch.zeros(4096, dtype=torch.bfloat16)
    for changed, is_dense in ((2700, False), (2800, True)):
        new = old.clone()
        new[:changed] = 1
        with LiveBytes([old, new]) as live:
            count, name, part = changes("name", old, new)
        assert (count, name == "name", part.nbytes) == (changed, is_dense, min(8192, 3 * changed + 32))
        assert (live.most < 2 * new.numel()) == is_dense  # which elements changed, but no number for each


def test_a_zero_of_another_sign_has_changed_and_the_same_nan_has_not() -> None:
    old, new = (torch.tensor([zero, torch.nan, 1.0] * 100) for zero in (0.0, -0.0))
    weights = {"name": old.clone()}
    count, name, part = changes("name", old, new)
    apply_changes(weights, name, part)
    assert (count, same_bits(weights, {"name": new})) == (100, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (255,), (257, 3)])
def test_bits_of_any_dtype_and_shape_arrive(dtype, shape) -> None:
    old = torch.randn(shape).to(dtype)
    new = old.clone()
    as_bytes(new)[::41] ^= 0x80
    weights = {"name": old.clone()}
    count, name, part = changes("name", old, new)
    assert count == (as_bytes(old) != as_bytes(new)).view(-1, old.itemsize).any(1).sum()
    apply_changes(weights, name, part)
    assert same_bits(weights, {"name": new})


def test_no_flipped_bit_of_a_file_is_ever_loaded(tmp_path, monkeypatch) -> None:
    """Whichever bit of it: of the header's length, of names, dtypes and places, of counts and values."""
    worker = Worker()
    old = {"w": torch.randn(12, 25).bfloat16(), "norm": torch.ones(3)}
    new = {"w": old["w"].clone(), "norm": torch.zeros(3)}
    new["w"].view(-1)[[3, 17, 255, 299]] = 7.0
    parts = [changes(name, old[name], new[name])[1:] for name in old]
    (tmp_path / "0.safetensors").touch()
    content, base, wanted = save(dict(parts)), digest(old), digest(new)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        monkeypatch.setattr(changed_weights, "load", lambda content, flipped=flipped: load(bytes(flipped)))
        worker._received_weights = (base, copy.deepcopy(old))
        worker.loaded = {}
        answer = worker.load_changed_weights(str(tmp_path), base=base, wanted=wanted)
        assert (answer["digest"] == wanted) == bool(worker.loaded), bit
        # A bit of the header may not matter: its order, or a name of nothing.
        assert not worker.loaded or same_bits(worker.loaded, new), bit
        assert worker.loaded or not worker.held
    monkeypatch.setattr(changed_weights, "load", lambda _: load(content))
    worker._received_weights = (base, old)
    assert worker.load_changed_weights(str(tmp_path), base=base, wanted=wanted) == {"digest": wanted}


def test_a_file_that_is_cut_off_while_it_is_read_does_not_kill_the_worker(tmp_path, monkeypatch) -> None:
    """Bytes of a mapped file that has become shorter are no exception: the kernel ends the process."""
    worker, weights, file = Worker(), {"v": torch.ones(8192), "w": torch.randn(64, 64)}, tmp_path / "0.safetensors"
    save_file(weights, file)

    def cut(held: dict[str, torch.Tensor], name: str, part: torch.Tensor) -> None:
        os.truncate(file, 0)
        apply_changes(held, name, part)

    monkeypatch.setattr(changed_weights, "apply_changes", cut)
    assert worker.load_changed_weights(str(tmp_path), base="", wanted=digest(weights)) == {"digest": digest(weights)}
    assert same_bits(worker.held, weights)


def test_a_digest_knows_every_bit_every_name_every_shape_and_every_dtype() -> None:
    weights = {"a": torch.randn(2, 3).bfloat16(), "b": torch.randn(2)}
    first = digest(weights)
    assert digest(dict(reversed(weights.items()))) == first
    seen = {first}
    for weight in weights.values():
        content = as_bytes(weight)
        for place in range(len(content)):
            for bit in range(8):
                content[place] ^= 1 << bit
                seen.add(digest(weights))
                content[place] ^= 1 << bit
    seen |= {digest({"a": weights["a"], "c": weights["b"]}), digest(weights | {"a": weights["a"].view(3, 2)})}
    seen |= {digest(weights | {"a": weights["a"].view(6)}), digest(weights | {"a": weights["a"].view(torch.int16)})}
    assert len(seen) == 1 + 8 * (12 + 8) + 4
    assert digest(weights) == first


def test_a_weight_that_is_not_sent_any_more_is_kept_on_neither_side(connect, workers, model) -> None:
    engine, tie = connect(), Tie.of(model)
    engine.load_weights(sent(model), version=0)
    rest = {name: weight for name, weight in sent(model) if name != "model.norm.weight"}
    for version in (1, 2):
        engine.load_weights(WeightStream.of(rest.items()), version)
        for worker in workers:
            assert same_bits(worker.loaded, dict(tie.undo(rest.items())))
            assert worker.held.keys() == worker.loaded.keys()
    assert engine.sync_metrics[BYTES] == 0


def flipped_file(worker: Worker, folder: Path) -> None:
    with next(folder.iterdir()).open("r+b") as file:  # in its place: other workers read it
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


def flipped_copy(worker: Worker, folder: Path) -> None:
    if worker.held:
        as_bytes(worker.held["model.layers.0.mlp.up_proj.weight"])[0] ^= 1


def lost_file(worker: Worker, folder: Path) -> None:
    next(folder.iterdir()).unlink()


@pytest.mark.parametrize("fault", [flipped_file, flipped_copy, lost_file])
def test_a_wrong_bit_costs_one_sync_of_all_and_one_warning(connect, servers, workers, model, caplog, fault) -> None:
    engine, faults = connect(), [False, True, False]
    for version, is_wrong in enumerate(faults):

        def once(folder: Path) -> None:
            workers[3].before = lambda folder: None
            fault(workers[3], folder)

        workers[3].before = once if is_wrong else workers[3].before
        engine.load_weights(sent(model), version)
        assert all(same_bits(worker.loaded, expected(model)) for worker in workers)
        total = sum(weight.nbytes for weight in expected(model).values())
        assert (engine.sync_metrics[BYTES] >= total) == (version < 2)
        train_a_little(model, seed=version)
    (line,) = [record for record in caplog.records if "in the place of what changed" in record.message]
    assert line.levelno == logging.WARNING
    assert any(f"at {server.url}; all weights" in line.message for server in servers)  # they read the same files


def test_bits_that_stay_wrong_are_no_sync_and_the_next_one_sends_all(connect, servers, workers, model) -> None:
    engine = connect()
    engine.load_weights(sent(model), version=0)
    workers[1].before = lambda folder: flipped_file(workers[1], folder)
    train_a_little(model)
    message = rf"got other bits than were sent at {servers[0].url}, though all weights were sent, want .* fix:"
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(sent(model), version=1)
    assert engine.weight_version == -1
    workers[1].before = lambda folder: None
    engine.load_weights(sent(model), version=1)
    assert engine.sync_metrics[BYTES] == sum(weight.nbytes for weight in expected(model).values())
    assert all(same_bits(worker.loaded, expected(model)) for worker in workers)


@pytest.mark.parametrize("who", ["server", "trainer"])
def test_after_a_restart_all_weights_are_sent(connect, servers, workers, model, caplog, who) -> None:
    engine = connect()
    engine.load_weights(sent(model), version=0)
    train_a_little(model)
    if who == "server":  # one of its workers
        servers[1].workers[1] = Worker()
    else:
        engine = connect()
    engine.load_weights(sent(model), version=1)
    assert all(same_bits(worker.loaded, expected(model)) for server in servers for worker in server.workers)
    assert ("a worker without the weights of the last sync" in caplog.text) == (who == "server")


def test_a_sync_that_one_server_lost_is_followed_by_one_of_all_weights(connect, servers, workers, model) -> None:
    engine = connect()
    engine.load_weights(sent(model), version=0)
    train_a_little(model)
    servers[1].mutate = lambda path, answer: {"results": []} if path == "/collective_rpc" else answer
    with pytest.raises(WeightSyncError, match=rf"got no worker at {servers[1].url}"):
        engine.load_weights(sent(model), version=1)
    servers[1].mutate = lambda path, answer: answer
    train_a_little(model, seed=1)
    engine.load_weights(sent(model), version=1)
    assert engine.sync_metrics[BYTES] == sum(weight.nbytes for weight in expected(model).values())
    assert all(same_bits(worker.loaded, expected(model)) for worker in workers)


def test_a_worker_that_does_not_see_the_folder_says_so(connect, servers, workers, model) -> None:
    def unseen(folder: str, **kwargs: str) -> dict[str, str]:
        return Worker().load_changed_weights(f"{folder}-of-this-machine", **kwargs)

    workers[2].load_changed_weights = unseen
    message = r"got files that do not fit \(FileNotFoundError: .*-of-this-machine'\) at (\S+), though all weights were"
    with pytest.raises(WeightSyncError, match=message) as error:
        connect().load_weights(sent(model), version=0)
    assert f" at {servers[1].url}," in str(error.value)


def test_what_cannot_take_changes_is_refused_at_the_start(connect, servers, model, tokenizer) -> None:
    options = {"vllm_mode": "server", "vllm_server_base_url": servers[0].url, "vllm_full_sync_interval": 5}
    assert choose_engine("server", GRPOConfig(**options), model, tokenizer)._transfer._interval == 5
    with pytest.raises(InputError, match=r"interval above 1 and weights by NCCL, want files, .*fix:"):
        connect(weight_transfer="nccl")
    engine = connect()
    for extension in ("somebody.Else", ""):
        servers[1].parallel_config = {"worker_extension_cls": extension}
        with pytest.raises(
            InputError, match=rf"{servers[1].url} without our .*fix: .*--worker-extension-cls {RECEIVER}"
        ):
            connect()
        connect(full_sync_interval=1)
        # So it is after a restart.
        with pytest.raises(WeightSyncError, match=f"{servers[1].url} without our worker extension"):
            engine.load_weights(sent(model), version=1)
    # vLLM would return what the workers of its first engine say.
    servers[1].parallel_config = {"worker_extension_cls": RECEIVER, "data_parallel_size": 2}
    with pytest.raises(InputError, match=rf"{servers[1].url} with --data-parallel-size above 1, .*fix: .*several serv"):
        connect()
    connect(full_sync_interval=1)
    wrong = ({"vllm_mode": "colocate"}, {"vllm_weight_transfer": "nccl"}, {"vllm_adapter_sync": True})
    for change in wrong:
        with pytest.raises(InputError, match=r"vllm_full_sync_interval=5 with .*, want servers that .* fix:"):
            GRPOConfig(**options | change)
    with pytest.raises(InputError, match="vllm_full_sync_interval=0, want at least 1"):
        GRPOConfig(vllm_full_sync_interval=0)


def test_the_name_that_servers_are_started_with_is_that_of_the_extension() -> None:
    module, _, name = RECEIVER.rpartition(".")
    assert module == changed_weights.__name__
    assert getattr(changed_weights, name) is WeightReceiver
