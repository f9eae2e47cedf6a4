"""The sweep over chunk sizes, at a size that asks nothing of a machine."""

from __future__ import annotations

import json

import pytest
import torch

from fused_grpo.bench import chunk_sizes
from fused_grpo.bench.work import Work

MIB = 2**20


@pytest.mark.parametrize(("kind", "direction"), [("loss", "trainable"), ("loss", "frozen"), ("logprobs", "no_grad")])
def test_every_size_is_measured_beside_a_prediction(tmp_path, kind, direction):
    output = tmp_path / "sizes.json"
    options = ["--head", "tiny", "--tokens", "96", "--kind", kind, "--direction", direction, "--rounds", "2"]
    chunk_sizes.main([*options, "--mib", "0.3", "16", "--output", str(output)])
    result = json.loads(output.read_text())
    assert result["work"]["kind"] == kind
    assert result["environment"]["torch"] == torch.__version__
    small, large = result["sizes"]
    assert (small["chunk_bytes"], large["chunk_bytes"]) == (int(0.3 * MIB), 16 * MIB)
    for one in (small, large):
        assert len(one["seconds"]) == 2
        assert 1 <= one["at_least"] <= one["at_most"]
        assert one["of_products"] > 0
    assert small["at_most"] > large["at_most"] or kind == "logprobs", "more sweeps"
    assert small["peak_bytes"] < large["peak_bytes"]


def test_sweeps_and_their_bytes_are_those_of_the_plan():
    work = Work(kind="loss", head="Qwen3-8B", tokens=8192, dtype="bfloat16")
    assert chunk_sizes.sweeps(work, "cuda", 256 * MIB) == 22  # of 384 rows, three tiles of 128: 441 would fit
    assert chunk_sizes.sweeps(work, "cuda", 1024 * MIB) == 5
    assert chunk_sizes.bytes_of_a_sweep(work) == 4096 * 151936 * (2 * 2 + 8)
    frozen = Work(kind="loss", head="Qwen3-8B", tokens=8192, dtype="bfloat16", direction="frozen")
    assert chunk_sizes.bytes_of_a_sweep(frozen) == 4096 * 151936 * 2 * 2
    tall = Work(kind="logprobs", head="Qwen3-8B", tokens=8192, dtype="bfloat16")
    assert chunk_sizes.sweeps(tall, "cuda", 256 * MIB) == 1
