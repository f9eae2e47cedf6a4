"""Only what changed since the last sync: what the trainer writes, and vLLM's workers make weights of.

Of each weight the elements whose bits changed are sent, with their places, or all of it where that is smaller:

    counts   [blocks]   int16   changed elements in each block of 256
    values   [changed]          in the weight's dtype
    places   [changed]  uint8   within the block, ascending

A worker keeps a copy of all weights and the digest of that copy; docs/scaling-out.md has what is checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

_BLOCK = 256
_CHANGES = "changes of "  # before the name of a weight, which has no spaces
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(name: str, old: Tensor | None, new: Tensor) -> tuple[int, str, Tensor]:
    """How many elements changed, and what makes `new` of `old`, under a name of its own: on the CPU, contiguous.

    `old` None, or of another shape or dtype: all of them.
    """
    if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        return new.numel(), name, new
    bits, blocks = _bits(new), _blocks(new)
    changed = bits != _bits(old)
    count = int(changed.count_nonzero())
    # Before the places are made: they take 8 bytes each, several times.
    if 2 * blocks + (new.itemsize + 1) * count >= new.nbytes:
        return count, name, new
    places = changed.nonzero()[:, 0]
    counts = torch.bincount(places // _BLOCK, minlength=blocks).to(torch.int16)
    parts = (counts.view(torch.uint8), bits[places].view(torch.uint8), (places % _BLOCK).to(torch.uint8))
    return count, _CHANGES + name, torch.cat(parts)


def apply_changes(weights: dict[str, Tensor], name: str, sent: Tensor) -> None:
    """Bring `weights` up to date, in place, with one tensor of a file; any exception where it does not fit."""
    if not name.startswith(_CHANGES):
        weights[name] = sent
        return
    bits = _bits(weights[name.removeprefix(_CHANGES)])
    blocks = _blocks(bits)
    changed = (len(sent) - 2 * blocks) // (1 + bits.itemsize)
    counts, values, places = sent.split([2 * blocks, changed * bits.itemsize, changed])
    # Cloned, because the bytes of a wider number have to begin at a multiple of its size.
    starts = _BLOCK * torch.arange(blocks).repeat_interleave(counts.clone().view(torch.int16).long())
    bits[starts + places] = values.clone().view(bits.dtype)


def digest(weights: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and all bits, in any order. CRC-32 of CRC-32: one flipped bit always changes it."""

    def checksum(name: str) -> bytes:
        weight = weights[name]
        header = zlib.crc32(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        return zlib.crc32(_bits(weight).view(torch.uint8).numpy().data, header).to_bytes(4, "big")

    with ThreadPoolExecutor() as threads:  # zlib runs outside of Python's lock
        return f"{zlib.crc32(b''.join(threads.map(checksum, sorted(weights)))):08x}"


class WeightReceiver:
    """A worker extension of vLLM (`--worker-extension-cls`), which makes it a part of each worker's class."""

    _received_weights: tuple[str, dict[str, Tensor]] = ("", {})  # of the last call, with their digest

    def load_changed_weights(self, folder: str, base: str, wanted: str) -> dict[str, str]:
        """Load weights with the digest `wanted`: the files in `folder` are changes of those with `base`; "": all.

        The result has the digest of what this worker has now, and if that is not `wanted`, the reason.
        """
        held, weights = self._received_weights
        self._received_weights = ("", {})
        if base and held != base:
            return {"digest": held, "reason": "a worker without the weights of the last sync"}
        weights = weights if base else {}
        try:
            for file in sorted(file for file in Path(folder).iterdir() if file.suffix == ".safetensors"):
                # Not mapped: a file that is removed meanwhile from a network's folder would kill this process.
                for name, sent in load(file.read_bytes()).items():
                    apply_changes(weights, name, sent)
            held = digest(weights)
        except Exception as error:  # of any type: a flipped bit may be anywhere
            return {"digest": "", "reason": f"files that do not fit ({type(error).__name__}: {error})"}
        if held != wanted:
            return {"digest": held, "reason": "other bits than were sent"}
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(weights.items()))
        self._received_weights = (held, weights)
        return {"digest": held}


RECEIVER = f"{WeightReceiver.__module__}.{WeightReceiver.__qualname__}"


def _bits(weight: Tensor) -> Tensor:
    """[n]: its elements as integers, in the same memory."""
    return weight.view(-1).view(_INTEGERS[weight.itemsize])


def _blocks(weight: Tensor) -> int:
    return -(-weight.numel() // _BLOCK)
