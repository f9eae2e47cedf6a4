"""Sizes of the measurements of timings.py: on a GPU, and tiny ones for a CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_grpo.bench.gpu.clock import Roofline
from fused_grpo.bench.heads.suites import FLOOR
from fused_grpo.bench.heads.work import HEADS, Gradients, Kind, Work

GIB = 2**30
OURS = "fused-grpo"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of all measurements."""

    device: str
    dtype: str
    heads: tuple[str, ...]
    square: int
    """Rows and columns of the matrices of the product that is a ceiling."""
    copied: int
    """Bytes of the copy that is a ceiling."""
    columns: int | None
    """Limit of the vocabulary for interpreted kernels; None for all of it."""
    rows: tuple[int, ...]
    """Rows of a chunk, for the products."""
    chunk: int
    """Rows of a chunk, for the passes."""
    kernel_tokens: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]
    """Rows and columns of tiles of logits: those of the ops, and some that stay in the L2 cache."""
    gemm_tiles: tuple[dict[str, int], ...]
    """Changes of the tile of the kernel without logits that are tried."""
    row_tiles: tuple[tuple[int, int], ...]
    """Columns and warps of the tiles of a row that are tried."""
    tile_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    few: tuple[int, ...]
    """Tokens of works that are so small that launches count, beside the peers."""
    usual: int
    """Tokens of the works that are measured at one size."""
    budgets: tuple[float, ...]
    """Sizes of a chunk, in GiB."""
    peers: tuple[str, ...]
    patience: float
    """Seconds of preparations after which a peer is left out."""

    def tensor(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A random tensor."""
        return torch.randn(size, device=self.device).to(dtype or getattr(torch, self.dtype))

    def work(self, kind: Kind, gradients: Gradients, name: str, tokens: int) -> Work:
        options: dict[str, Any] = {"dtype": self.dtype, "sequences": 16, "gradients": gradients}
        return Work(kind=kind, head=name, tokens=tokens, **options)

    def head(self, name: str) -> tuple[int, int]:
        """(D, V)"""
        shape = HEADS[name]
        return shape.hidden, min(shape.vocab, self.columns or shape.vocab)

    @functools.cached_property
    def roofline(self) -> Roofline:
        return Roofline.of(self.device_name)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"


FULL = Scale(
    device="cuda",
    dtype="bfloat16",
    heads=("Qwen3-8B", "Qwen3-0.6B"),
    square=8192,
    copied=4 * GIB,
    columns=None,
    rows=(432, 1024, 2048, 4096),
    chunk=4096,
    kernel_tokens=(1, 64, 512, 2048, 8192),
    tiles=((8192, 8192), (8192, 1024), (8192, 512), (4096, 2048), (4096, 1024)),
    gemm_tiles=(
        {},
        {"num_stages": 3},
        {"group_n": 8},
        {"group_n": 32},
        {"narrow": 32},
        {"narrow": 256},
        {"block_d": 128, "num_stages": 2},
        {"block_d": 32, "num_stages": 8},
        {"block_n": 256, "block_v": 128},
        {"block_n": 256, "block_v": 128, "num_stages": 3},
        {"block_v": 128, "num_warps": 4},
        {"block_v": 128, "num_warps": 8, "num_stages": 6},
        {"block_n": 64, "num_warps": 4},
        {"max_splits": 256},
    ),
    row_tiles=((1024, 1), (2048, 1), (1024, 2), (2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8)),
    tile_tokens=(64, 512, 4096),
    tokens=(64, 256, 1024, 4096, 8192, 16384, 65536),
    few=(1024, 256, 64),
    usual=8192,
    budgets=(0.25, 0.5, 1.0, 1.25, 2.5),
    patience=40.0,
    peers=(FLOOR, OURS, "TRL", "Liger GRPO", "CCE", "verl", "full logits", "Liger FSLCE", "full logits, compiled"),
)
TINY = Scale(
    device="cpu",
    dtype="float32",
    heads=("tiny",),
    square=64,
    copied=2**20,
    columns=300,
    rows=(8,),
    chunk=2,
    kernel_tokens=(1,),
    tiles=((8, 100),),
    gemm_tiles=({}, {"group_n": 1}, {"block_n": 24}),
    row_tiles=((64, 1),),
    tile_tokens=(2,),
    tokens=(64,),
    few=(),
    usual=64,
    budgets=(1e-4,),
    patience=300.0,
    peers=(FLOOR, OURS, "TRL", "full logits"),
)
