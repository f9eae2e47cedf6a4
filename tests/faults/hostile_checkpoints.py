"""Ways to spoil a checkpoint, each from a random generator: what `test_hostile_checkpoints.py` loads by the thousand.

A way takes a directory, a copy of a checkpoint, and changes one thing in it. `seal` afterwards makes the manifest fit
again, as an attacker could.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shlex
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 2**53 + 1,
    lambda: 10**400,
    lambda: 1e308,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: "x" * 2000,
    lambda: "../../../etc/passwd",
    lambda: "\ud800\0",
    list,
    dict,
    lambda: [[[]]],
    lambda: {"a": {"b": [1, None]}},
)
NUMBERS = (-1, 0, 1, 2**31, 2**62, -(2**62))


def replace(path: Path, content: bytes) -> None:
    """A file of its own: those of a copy are links to the checkpoint that all copies share."""
    path.unlink()
    path.write_bytes(content)


def damage(directory: Path, draw: random.Random) -> None:
    """What disks, interrupted copies and people do to files."""
    path = draw.choice(sorted(directory.iterdir()))
    content = bytearray(path.read_bytes())
    match draw.randrange(7):
        case 0:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case 1:
            del content[draw.randrange(len(content)) :]
        case 2:
            content += draw.randbytes(draw.randint(1, 100))
        case 3:
            return path.unlink()
        case 4:
            path.unlink()
            return path.mkdir()
        case 5:
            path.unlink()
            return path.symlink_to("/etc/passwd")
        case 6:
            start = draw.randrange(len(content))
            content[start : start + 64] = bytes(len(content[start : start + 64]))
            content += b"\0"  # where it was zeros before
    return replace(path, bytes(content))


def change_json(content: Any, draw: random.Random) -> Any:
    """The same with one value replaced, removed, added or renamed, anywhere in it."""
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return draw.choice(VALUES)() if place is content else content
        key = draw.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.8:
            place = place[key]
            continue
        match draw.randrange(4):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[draw.choice(("", "step", "__class__", "../x", "x" * 300))] = place[key]
            case _:
                place[key] = draw.choice(VALUES)()
        return content


def change_state(directory: Path, draw: random.Random, names: tuple[str, ...]) -> None:
    path = directory / draw.choice(names)
    if draw.random() < 0.1:
        text = draw.choice((b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", b"1e999", b"null", b"[1]", b'"x"'))
        return replace(path, text)
    return replace(path, json.dumps(change_json(json.loads(path.read_bytes()), draw)).encode())


def change_manifest(directory: Path, draw: random.Random) -> None:
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    if draw.random() < 0.3:
        name = draw.choice(
            ("/etc/passwd", "../../x", "a/../../../x", "", ".", "x" * 5000, "a\0b", "\ud800", "missing.json")
        )
        manifest["files"][name] = {"size": draw.choice(NUMBERS), "sha256": "0" * 64}
        return replace(path, json.dumps(manifest).encode())
    return change_state(directory, draw, ("manifest.json",))


def change_tensors(directory: Path, draw: random.Random) -> None:
    """Another name, shape, type or value in one of the safetensors files; or another header."""
    path = draw.choice(sorted(directory.glob("*.safetensors")))
    if draw.random() < 0.25:
        return change_header(path, draw)
    tensors = change_one(load_file(path), draw)
    path.unlink()
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def change_one(tensors: dict[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    """The same with one tensor gone, renamed, or of another shape, type or content."""
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    numbers = (0, 1, 255) if tensor.dtype == torch.uint8 else NUMBERS
    match draw.randrange(6):
        case 0:
            return tensors
        case 1:
            name = draw.choice(("x", "buffer.9.advantages", "ahead.numbers", "", "a" * 1000))
        case 2:
            tensor = draw.choice((tensor[None], tensor.flatten()[:-1], tensor.new_zeros(0), tensor.new_zeros(())))
        case 3:
            tensor = tensor.to(draw.choice((torch.int8, torch.float64, torch.bfloat16, torch.bool)))
        case 4:
            tensor = torch.full_like(tensor, draw.choice(numbers))
        case 5:
            tensor = tensor.clone()
            tensor.view(-1)[draw.randrange(max(tensor.numel(), 1)) :][:1] = draw.choice(numbers)
    return tensors | {name: tensor}


def change_header(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, rest = content[8 : 8 + length], content[8 + length :]
    if draw.random() < 0.3:
        return replace(path, struct.pack("<Q", draw.choice((0, 2, 2**40, 2**63, length + 1))) + header + rest)
    changed = json.dumps(change_json(json.loads(header), draw)).encode()
    return replace(path, struct.pack("<Q", len(changed)) + changed + rest)


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {shlex.quote(str(self.canary))}",))


def add_payload(directory: Path, draw: random.Random, canary: Path) -> str:
    """Something that runs where it is loaded; what the error has to name."""
    names = (
        "pytorch_model.bin",
        "optimizer.pt",
        "state.PKL",
        "scheduler.pth",
        "more/rng_state.pickle",
        "x.ckpt",
        "a.npy",
    )
    codes = ("modeling_qwen2.py", "more/__init__.py", "native.so")
    name = draw.choice((*names, *codes, "config.json"))
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    if name in names:
        path.write_bytes(pickle.dumps(Payload(canary)))
    elif name in codes:
        path.write_text(f"open({str(canary)!r}, 'w')")
    else:
        auto_map = draw.choice(
            ({"AutoModelForCausalLM": "modeling.Model"}, {"AutoTokenizer": [None, "a.B"]}, "a.B", [["a.B"]])
        )
        replace(path, json.dumps({**json.loads(path.read_bytes()), "auto_map": auto_map}).encode())
    return name
