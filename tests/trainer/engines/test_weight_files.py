"""Weights for an engine: their checkpoint names, a tied head, and files that are removed after use."""

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.abandoned import remove_abandoned
from fused_grpo.trainer.engines.server import server_folder
from fused_grpo.trainer.engines.server.weight_transfer import ChangeTransfer, FileTransfer
from fused_grpo.trainer.engines.vllm import start_vllm
from fused_grpo.trainer.engines.vllm.start_vllm import write_checkpoint
from fused_grpo.trainer.engines.weight_files import (
    ServedAdapter,
    Tie,
    temporary_folder,
    temporary_weight_files,
    write_weights,
)
from fused_grpo.trainer.models import weight_stream
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.models.weight_stream import WeightStream


@pytest.mark.parametrize("source", ["named_parameters", "state_dict"])
def test_an_untied_head_gets_the_embedding_exactly_once(build_model, source) -> None:
    model = build_model("llama", tied=True)
    named = model.named_parameters() if source == "named_parameters" else model.state_dict().items()
    untied = list(Tie.of(model).undo(named))
    heads = [weight for name, weight in untied if name == "lm_head.weight"]
    assert len(heads) == 1
    assert torch.equal(heads[0], model.model.embed_tokens.weight)
    assert sorted(name for name, _ in untied) == sorted(model.state_dict())


def test_a_model_with_its_own_head_has_no_tie(build_model) -> None:
    assert Tie.of(build_model("llama", tied=False)) is None


def test_checkpoint_weights_are_those_that_save_pretrained_writes(build_model, tmp_path) -> None:
    model = build_model("qwen2", tied=False)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    given = dict(checkpoint_weights(model))
    assert given.keys() == saved.keys()
    assert all(torch.equal(given[name], saved[name]) for name in saved)


@pytest.mark.parametrize("blocked", ["config.json", "model-00000.safetensors"])
def test_a_folder_that_cannot_be_written_is_an_error_with_its_size(build_model, tokenizer, tmp_path, blocked) -> None:
    (tmp_path / blocked).mkdir()
    with pytest.raises(UnavailableError, match=rf"directory.*, want 0.00 GB in {tmp_path}; fix: space there"):
        server_folder(build_model("qwen2", tied=True), tokenizer, tmp_path)


def test_views_ties_and_strides_arrive_unchanged_and_the_files_are_removed(tmp_path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    given = {"a": matrix, "tied": matrix, "row": matrix[1], "transposed": matrix.T, "half": matrix.bfloat16()}
    with temporary_weight_files(given.items(), directory=str(tmp_path)) as folder:
        loaded = load_file(folder / "model-00000.safetensors")
    assert loaded.keys() == given.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in given.items())
    assert list(tmp_path.iterdir()) == []


def test_thousands_of_small_weights_are_each_compared_once(tmp_path, monkeypatch) -> None:
    looks, storage = [], torch.Tensor.untyped_storage
    monkeypatch.setattr(torch.Tensor, "untyped_storage", lambda tensor: looks.append(1) or storage(tensor))
    calls = []
    for count in (100, 200):
        looks.clear()
        folder = tmp_path / str(count)
        folder.mkdir()
        write_weights([(f"w{number}", torch.zeros(2)) for number in range(count)], folder)
        calls.append(len(looks))
    assert calls[1] <= 2 * calls[0]


def test_many_weights_go_into_several_files_and_none_is_lost(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weight_stream, "BUCKET_BYTES", 90)
    given = {f"layer.{index}": torch.full((10 + 5 * index,), float(index)) for index in range(6)}
    with temporary_weight_files(given.items(), directory=str(tmp_path)) as folder:
        files = [load_file(file) for file in folder.iterdir()]
    loaded = {name: weight for file in files for name, weight in file.items()}
    assert len(files) == 4  # of 40 and 60, 80 and 100, 120 and 140 bytes: one that overfills a file ends it
    assert all(torch.equal(loaded[name], weight) for name, weight in given.items())


def usage(free: int) -> Any:
    return shutil._ntuple_diskusage(free, 0, free)


def to_server(weights: WeightStream) -> None:
    FileTransfer(mock.Mock()).send(weights)


def to_server_as_changes(weights: WeightStream) -> None:
    ChangeTransfer(mock.Mock(), interval=2).send(weights)


def adapter_alone(weights: WeightStream) -> None:
    with object.__new__(ServedAdapter).folder(weights):
        pass


def to_start_from(weights: WeightStream) -> None:
    with temporary_folder(weights.nbytes) as folder:
        write_checkpoint(weights, mock.Mock(), mock.Mock(), folder=folder)


WAYS = [to_server, to_server_as_changes, adapter_alone, to_start_from]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("filled", ["before", "meanwhile"])
def test_a_place_without_room_for_the_weights_is_said_with_its_size(tmp_path, monkeypatch, way, filled) -> None:
    """As /dev/shm in a container and a small disk; or what other processes fill while the files are written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0 if filled == "before" else 1 << 30))
    monkeypatch.setattr(start_vllm, "save_config", lambda *_, **__: None)
    full = mock.Mock(side_effect=SafetensorError("I/O error: No space left on device (os error 28)"))
    monkeypatch.setattr(weight_files, "save_file", full)
    weights = WeightStream.of({"weight": torch.zeros(10_000_000)}.items())
    with pytest.raises(UnavailableError, match=r"got .*want 0\.04 GB in .*; fix: .*--shm-size.*TMPDIR"):
        way(weights)
    assert full.called == (filled == "meanwhile")


@pytest.mark.parametrize(("free", "place"), [(1 << 30, "/dev/shm"), (64 << 10, None)])
def test_a_shared_memory_that_is_too_small_is_not_used(tmp_path, monkeypatch, free, place) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free if str(path) == "/dev/shm" else 1 << 30))
    with temporary_weight_files([("weight", torch.zeros(32 << 10))]) as folder:
        assert folder.parent == Path(place or tmp_path)


def test_files_are_removed_after_an_error_too(tmp_path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        temporary_weight_files([("weight", torch.zeros(2))], directory=str(tmp_path)),
    ):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_removed_is_left_to_the_next_process(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", mock.Mock(side_effect=PermissionError))
        with pytest.raises(PermissionError), temporary_folder(0, directory=str(tmp_path)):
            pass
    assert len(list(tmp_path.iterdir())) == 1
    remove_abandoned.__wrapped__(str(tmp_path))  # of none whose lock is held
    assert list(tmp_path.iterdir()) == []
    with temporary_folder(0, directory=str(tmp_path)) as folder:
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12's, for any process with threads
def test_a_fork_that_ends_inside_leaves_the_folder(tmp_path) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(0, directory=str(tmp_path)))
        if (child := os.fork()) == 0:
            try:
                stack.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert folder.is_dir()
