"""Tile sizes per architecture. Tables, not an autotuner.

An autotuner would time kernels at the first step, pick differently on two runs (and so change the bits of a sum), and
retune whenever a length changes. A table is read in microseconds, gives the same bits every time, and can be checked:
`tests/kernels/test_compile.py` compiles each row of it for its architecture and refuses spilled registers.

What bounds the GEMM rows: the fp32 accumulator block_n x block_v / (threads) must leave registers for the epilogue, and
num_stages * (block_n + block_v) * block_d * bytes must fit shared memory: 163 KiB on sm_80, 99 KiB on sm_86, sm_89 and
sm_120, 227 KiB on sm_90 and sm_100, 64 KiB on gfx942. Where D or the strides are not multiples of 16 bytes, loads
through pointers pass through registers, hence smaller tiles there than with the tensor memory accelerator.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._device import architecture

# Said aloud at every launch: Triton 3.9 warns where it is left open, and 3.10 changes the default.
FUSED_MULTIPLY_ADD = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class GemmTile:
    """A program multiplies `block_n` rows of hidden with `block_v` rows of the head, `block_d` features at a time."""

    block_n: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    # Row tiles that sweep the same vocabulary slice together, so that both operands stay in L2.
    group_n: int = 16
    # Contiguous vocabulary slices at most: enough programs to fill the device when there are few rows.
    max_splits: int = 128
    # Of so many columns the epilogue takes a maximum and a sum at a time, adding up narrow blocks of them element by
    # element before threads share what they have.
    wide: int = 256
    narrow: int = 32
    # Operands come through tensor descriptors, not pointers.
    tma: bool = False

    def launch_options(self) -> dict[str, int]:
        """The keyword arguments of the launch, as the kernel names them."""
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_V": self.block_v,
            "BLOCK_D": self.block_d,
            "GROUP_N": self.group_n,
            "WIDE": self.wide,
            "NARROW": self.narrow,
            "TMA": self.tma,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            **FUSED_MULTIPLY_ADD,
        }


@dataclass(frozen=True)
class RowTile:
    """A program walks one row `block_v` logits at a time."""

    block_v: int
    num_warps: int

    def launch_options(self) -> dict[str, int]:
        """The keyword arguments of the launch, as the kernels name them."""
        return {"BLOCK_V": self.block_v, "num_warps": self.num_warps, **FUSED_MULTIPLY_ADD}


HALF: dict[str, GemmTile] = {
    "sm_80": GemmTile(128, 128, 32, num_warps=8, num_stages=4),
    "sm_86": GemmTile(128, 128, 32, num_warps=8, num_stages=3),
    "sm_89": GemmTile(128, 128, 32, num_warps=8, num_stages=3),
    "sm_90": GemmTile(128, 128, 32, num_warps=8, num_stages=4),
    "sm_100": GemmTile(128, 128, 64, num_warps=8, num_stages=3, narrow=256),
    "sm_120": GemmTile(128, 128, 32, num_warps=8, num_stages=3),
    "gfx942": GemmTile(128, 128, 64, num_warps=8, num_stages=2, wide=32),
    "interpreter": GemmTile(16, 32, 16, num_warps=1, num_stages=1, group_n=2, max_splits=4, narrow=16),
    "default": GemmTile(128, 128, 32, num_warps=8, num_stages=3),
}

# Rows start at multiples of 16 bytes: the tensor memory accelerator copies them where there is one, and elsewhere
# addresses take fewer registers, which leaves each of four warps room for whole rows of its quarter of a tile.
ALIGNED: dict[str, GemmTile] = {
    "sm_80": GemmTile(128, 128, 32, num_warps=4, num_stages=4, narrow=16),
    "sm_86": GemmTile(128, 128, 32, num_warps=4, num_stages=3, narrow=16),
    "sm_89": GemmTile(128, 128, 32, num_warps=4, num_stages=3, narrow=16),
    "sm_90": GemmTile(128, 256, 64, num_warps=8, num_stages=4, narrow=16, tma=True),
    # Tensor memory gives each thread a row: what splits it would go through shared memory.
    "sm_100": GemmTile(128, 256, 64, num_warps=8, num_stages=4, wide=128, narrow=256, tma=True),
    "sm_120": GemmTile(128, 128, 64, num_warps=8, num_stages=3, tma=True),
    "interpreter": GemmTile(16, 32, 16, num_warps=1, num_stages=1, group_n=2, max_splits=4, narrow=16, tma=True),
}

# fp32 multiplies on the plain FMA units (TF32 would lose 13 bits), where operands cost registers: small tiles, and the
# same ones everywhere, for they fit the smallest shared memory.
SINGLE: dict[str, GemmTile] = {
    "interpreter": HALF["interpreter"],
    "default": GemmTile(128, 64, 16, num_warps=8, num_stages=2),
}

ROW: dict[str, RowTile] = {
    "interpreter": RowTile(128, num_warps=1),
    # Of one warp: its largest logit is found without a barrier. 32 logits of each thread are on their way at a time.
    "default": RowTile(1024, num_warps=1),
}

# Of the loss kernel, two for each thread: with more of them, triton 3.6 spills.
TOKENS_PER_PROGRAM, LOSS_WARPS = 512, 8


@dataclass(frozen=True)
class TilesFrom:
    """From how large a head on log-probs without a gradient are faster by the vendor's GEMM and a pass over its tiles
    than by `logprob_forward`, whose GEMM is slower but leaves no logits."""

    rows: int
    hidden_size: int
    measured: bool
    """Or predicted: that a GEMM of Triton takes 4/3 of the vendor's time, and the pass reads 4 bytes for each logit."""


# 16-bit heads. What the vendor's GEMM is faster by, 2*D/3 FLOP per logit, has to pay for 4 bytes.
TILES_FROM: dict[str, TilesFrom] = {
    "sm_80": TilesFrom(rows=512, hidden_size=896, measured=False),
    "sm_90": TilesFrom(rows=512, hidden_size=1152, measured=False),
    "sm_100": TilesFrom(rows=512, hidden_size=1536, measured=False),
}


def prefers_tiles(hidden: Tensor) -> bool:
    """Whether log-probs of these hidden states [N, D] without a gradient should go by tiles of logits."""
    known = TILES_FROM.get(architecture(hidden.device))
    if known is None or hidden.dtype == torch.float32:
        return False
    return hidden.shape[0] >= known.rows and hidden.shape[1] >= known.hidden_size


def gemm_tile(device: torch.device, dtype: torch.dtype, *, aligned: bool) -> GemmTile:
    """The tile of `logprob_forward` for inputs of `dtype`, which are `aligned` if descriptors could carry them."""
    arch = architecture(device)
    if dtype == torch.float32:
        return SINGLE.get(arch, SINGLE["default"])
    if aligned and arch in ALIGNED:
        return ALIGNED[arch]
    return HALF.get(arch, HALF["default"])


def row_tile(device: torch.device) -> RowTile:
    """The tile of the passes over materialised logits."""
    return ROW.get(architecture(device), ROW["default"])
