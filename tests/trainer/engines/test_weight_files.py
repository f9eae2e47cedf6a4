"""Weights handed over as files: whole, in shared memory where they fit, and gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.weight_files import published


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def test_views_ties_and_strides_arrive_as_they_are(tmp_path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    weights = {"a": matrix, "tied": matrix, "row": matrix[1], "turned": matrix.T, "half": matrix.bfloat16()}
    with published(weights.items(), directory=str(tmp_path)) as folder:
        found = read(folder)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert list(tmp_path.iterdir()) == []


def test_many_weights_go_into_several_files_and_none_is_lost(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weight_files, "_SHARD_BYTES", 90)
    weights = {f"layer.{index}": torch.full((10 + 5 * index,), float(index)) for index in range(6)}
    with published(weights.items(), directory=str(tmp_path)) as folder:
        assert len(list(folder.iterdir())) == 6
        found = read(folder)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(("free", "place"), [(1 << 30, "/dev/shm"), (64 << 10, None)])
def test_a_shared_memory_too_small_is_left_alone(tmp_path, monkeypatch, free, place) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    with published([("weight", torch.zeros(32 << 10))]) as folder:
        assert folder.parent == Path(place or tmp_path)


def test_files_are_gone_after_an_error_too(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), published([("weight", torch.zeros(2))], directory=str(tmp_path)):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
