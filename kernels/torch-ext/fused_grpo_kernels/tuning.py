"""Tile sizes per architecture. Tables, not an autotuner.

An autotuner would time kernels at the first step, select different tiles in two runs (which changes the bits of a sum),
and tune again for every new length. A table is read in microseconds, gives the same bits every time, and can be
checked: `tests/kernels/test_compile.py` compiles each row of it for its architecture and rejects spilled registers.

The GEMM tiles are bounded: the fp32 accumulator block_n x block_v / (threads) must leave registers for the epilogue,
and num_stages * (block_n + block_v) * block_d * bytes must fit shared memory: 163 KiB on sm_80, 99 KiB on sm_86, sm_89
and sm_120, 227 KiB on sm_90 and sm_100, 64 KiB on sm_75 and gfx942. Where D or the strides are not multiples of 16
bytes, loads through pointers pass through registers, hence smaller tiles there than with the tensor memory accelerator.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._device import architecture

# Passed explicitly to every launch: without it Triton 3.9 warns, and 3.10 changes the default.
FUSED_MULTIPLY_ADD = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class GemmTile:
    """A program multiplies `block_n` rows of hidden with `block_v` rows of the head, `block_d` features at a time."""

    block_n: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    # Row tiles that visit the same vocabulary slice at the same time, so that both operands stay in L2.
    group_n: int = 16
    # The largest number of contiguous vocabulary slices: enough programs to fill the device with few rows.
    max_splits: int = 128
    # The epilogue takes a maximum and a sum of `wide` columns at a time. It adds blocks of `narrow` columns element by
    # element before it reduces across threads.
    wide: int = 256
    narrow: int = 32
    # Operands are read through tensor descriptors, not pointers.
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


@dataclass(frozen=True)
class EntryTile:
    """A program takes `block_e` kept tokens at a time, `block_d` features of each."""

    block_e: int
    block_d: int
    num_warps: int

    def launch_options(self) -> dict[str, int]:
        """The keyword arguments of the launch, as the kernels name them."""
        return {
            "BLOCK_E": self.block_e,
            "BLOCK_D": self.block_d,
            "num_warps": self.num_warps,
            **FUSED_MULTIPLY_ADD,
        }


HALF: dict[str, GemmTile] = {
    # Triton multiplies by FMA units there, whose operands take registers.
    "sm_75": GemmTile(64, 64, 16, num_warps=8, num_stages=2),
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

# For rows that start at multiples of 16 bytes. The tensor memory accelerator copies them where there is one. Elsewhere
# addresses take fewer registers, so each of four warps can hold whole rows of its quarter of a tile.
ALIGNED: dict[str, GemmTile] = {
    "sm_80": GemmTile(128, 128, 32, num_warps=4, num_stages=4, narrow=16),
    "sm_86": GemmTile(128, 128, 32, num_warps=4, num_stages=3, narrow=16),
    "sm_89": GemmTile(128, 128, 32, num_warps=4, num_stages=3, narrow=16),
    "sm_90": GemmTile(128, 256, 64, num_warps=8, num_stages=4, narrow=16, tma=True),
    # In tensor memory each thread has a row; a split of the row would go through shared memory.
    "sm_100": GemmTile(128, 256, 64, num_warps=8, num_stages=4, wide=128, narrow=256, tma=True),
    "sm_120": GemmTile(128, 128, 64, num_warps=8, num_stages=3, tma=True),
    "interpreter": GemmTile(16, 32, 16, num_warps=1, num_stages=1, group_n=2, max_splits=4, narrow=16, tma=True),
}

# Of the kernel that writes softmax weights: with an epilogue that stores, blocks of `wide` columns must leave registers
# for it. It has many rows, so short splits cost little, and fill the last wave of programs.
WEIGHTS: dict[str, GemmTile] = {
    "sm_90": GemmTile(128, 256, 64, num_warps=8, num_stages=4, max_splits=256, wide=64, narrow=16, tma=True),
    "interpreter": GemmTile(16, 32, 16, num_warps=1, num_stages=1, group_n=2, max_splits=4, wide=16, narrow=16),
}

# fp32 products use the FMA units (TF32 would lose 13 bits), whose operands take registers. The tiles are small, and
# they fit the smallest shared memory, so they are the same for all architectures but one, which spills registers.
SINGLE: dict[str, GemmTile] = {
    "sm_75": HALF["sm_75"],
    "interpreter": HALF["interpreter"],
    "default": GemmTile(128, 64, 16, num_warps=8, num_stages=2),
}

ROW: dict[str, RowTile] = {
    "interpreter": RowTile(128, num_warps=1),
    # Measured on an H200: three times as fast as the default with 64 rows, and 50 % faster with 512.
    "sm_90": RowTile(4096, num_warps=8),
    # One warp finds its largest logit without a barrier. Each thread has 32 loads in flight.
    "default": RowTile(1024, num_warps=1),
}

# Rows of the head are gathered from memory: each program has 4 KiB of 16-bit rows in flight.
ENTRY: dict[str, EntryTile] = {
    "interpreter": EntryTile(8, 32, num_warps=1),
    "default": EntryTile(8, 256, num_warps=4),
}

# For passes over the rows of two tiles, with sums of several kinds: eight warps have registers for them, and agree on
# the largest logits once for eight logits of each thread.
PAIR: dict[str, RowTile] = {
    "interpreter": ROW["interpreter"],
    "default": RowTile(2048, num_warps=8),
}

# Two tokens per thread of the loss kernel: with more, triton 3.6 spills registers.
TOKENS_PER_PROGRAM, LOSS_WARPS = 512, 8


@dataclass(frozen=True)
class TilesFrom:
    """From this size on, log-probs without a gradient are faster by the vendor's GEMM and a pass over its tiles than by
    `logprob_forward`, whose GEMM is slower but writes no logits."""

    rows: int
    hidden_size: int


# For 16-bit heads. Predicted, not measured: a GEMM of Triton takes 4/3 of the vendor's time. So the gain of the
# vendor's, 2*D/3 FLOP per logit, must exceed the cost of the pass, which reads 4 bytes per logit.
TILES_FROM: dict[str, TilesFrom] = {
    "sm_75": TilesFrom(rows=1, hidden_size=1),  # the vendor's GEMM alone has tensor cores
    "sm_80": TilesFrom(rows=256, hidden_size=896),
    "sm_100": TilesFrom(rows=512, hidden_size=1536),
}


def prefers_tiles(hidden: Tensor) -> bool:
    """Whether log-probs of these hidden states [N, D] without a gradient should be computed by tiles of logits."""
    thresholds = TILES_FROM.get(architecture(hidden.device))
    if thresholds is None or hidden.dtype == torch.float32:
        return False
    return hidden.shape[0] >= thresholds.rows and hidden.shape[1] >= thresholds.hidden_size


# A product of so many FLOP takes 1.5 ms on an H200, which hides that this kernel has seven launches instead of one.
WEIGHTS_FROM: dict[str, int] = {"sm_90": 2**40, "interpreter": 2**17}


def prefers_softmax_weights(hidden: Tensor, weight: Tensor, rows: int) -> bool:
    """Whether softmax weights of so many rows of hidden [N, D], and weight [V, D], should be computed without logits.

    On an H200 the GEMM of Triton is as fast as the vendor's, and the weights need neither a pass of their own nor four
    bytes per logit. Other architectures have not been measured. The answer does not depend on where memory starts.
    """
    arch, (V, D) = architecture(hidden.device), weight.shape
    if arch not in WEIGHTS or (arch != "interpreter" and hidden.dtype != torch.bfloat16):
        return False
    # A descriptor needs rows at multiples of 16 bytes. A weight of another dtype is cast, which makes them adjacent.
    row, column = weight.stride() if weight.dtype == hidden.dtype else (D, 1)
    described = arch == "interpreter" or (column == 1 and row % 8 == 0 and D % 8 == 0)
    return described and 2 * rows * D * V >= WEIGHTS_FROM[arch]


def is_aligned(matrix: Tensor) -> bool:
    """Whether a tensor descriptor can describe this matrix."""
    row, column = matrix.stride()
    aligned = matrix.data_ptr() % 16 == 0 and row * matrix.element_size() % 16 == 0
    return matrix.element_size() == 2 and matrix.numel() > 0 and column == 1 and row >= matrix.shape[1] and aligned


def gemm_tile(device: torch.device, dtype: torch.dtype, *, aligned: bool) -> GemmTile:
    """The tile of `logprob_forward` for inputs of `dtype`; `aligned` if tensor descriptors can describe them."""
    arch = architecture(device)
    if dtype == torch.float32:
        return SINGLE.get(arch, SINGLE["default"])
    if aligned and arch in ALIGNED:
        return ALIGNED[arch]
    return HALF.get(arch, HALF["default"])


def weights_tile(device: torch.device) -> GemmTile | None:
    """The tile of `softmax_weights_forward`, where there is one."""
    return WEIGHTS.get(architecture(device))


def row_tile(device: torch.device) -> RowTile:
    """The tile of the passes over materialised logits."""
    return ROW.get(architecture(device), ROW["default"])


def entry_tile(device: torch.device) -> EntryTile:
    """The tile of the passes over kept tokens."""
    return ENTRY.get(architecture(device), ENTRY["default"])


def pair_tile(device: torch.device) -> RowTile:
    """The tile of passes over the logits of two models."""
    return PAIR.get(architecture(device), PAIR["default"])
