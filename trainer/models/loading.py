"""Load a model and a tokenizer, and find out how the model runs: precision, packing, dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.logging import is_progress_bar_enabled

from fused_grpo.errors import DataError, FusedGRPOError, InputError, WrongTypeError
from fused_grpo.integrations.model_modes import disable_dropout as disable_dropout
from fused_grpo.integrations.model_modes import has_dropout as has_dropout
from fused_grpo.integrations.model_modes import uncompiled as uncompiled
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.trl_fields import warn_once
from fused_grpo.trainer.logging.console import progress

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Around what reads a model's files: an error in one line that names them."""
    try:
        yield
    except (FusedGRPOError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of the network, the hub, a file
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"got {what} cannot be loaded: {first}; want a folder with a model in it, or the name of one on the hub; "
            "fix: the path or the name, or a network and a login where it is on the hub"
        ) from error


def wants_bf16(args: GRPOConfig) -> bool:
    """The option `bf16`; by default, True where a GPU trains."""
    return torch.cuda.is_available() and not args.use_cpu if args.bf16 is None else args.bf16


def takes_any_lengths(model: PreTrainedModel) -> bool:
    """True where attention is a variable-length kernel, which takes packed sequences without a mask."""
    return "flash" in str(model.config._attn_implementation)


def attention_cost(model: PreTrainedModel) -> float:
    """Cost of attention to one token, relative to that of a token in the rest of a layer: 4 D to 24 D^2 FLOP."""
    head: Any = model.get_output_embeddings()
    return 1.0 / (6.0 * int(head.weight.shape[1]))


def tokenizer_for(model: str | Path | PreTrainedModel, processing_class: Any, args: GRPOConfig) -> Any:
    """The given tokenizer, or that of a model, which is given or a path or hub id.

    Raises:
        InputError: as `load_tokenizer`.
    """
    options = _loading_options(args)
    of_both = {name: options[name] for name in ("trust_remote_code", "revision") if name in options}
    return load_tokenizer(str(model) if isinstance(model, Path) else model, processing_class, **of_both)


def model_for(
    model: str | Path | PreTrainedModel, args: GRPOConfig, accelerator: Accelerator, *, pad_token_id: int
) -> Any:
    """`load_on_rank`. As in TRL, the model's configurations get the tokenizer's padding token."""
    loaded = load_on_rank(model, accelerator, **_loading_options(args))
    for config in (loaded.config.get_text_config(), loaded.generation_config):
        if config is not None:
            config.pad_token_id = pad_token_id
    return loaded


def load_on_rank(model: str | Path | PreTrainedModel, accelerator: Accelerator, **options: Any) -> PreTrainedModel:
    """The given model, or the one of a path or hub id, by `load_model`.

    It is loaded straight to the rank's device; under FSDP to the CPU, from where its shards go to the device. What
    `fsdp_cpu_ram_efficient_loading` does is in transformers and Accelerate.
    """
    in_memory_first = accelerator.distributed_type == DistributedType.FSDP or accelerator.device.type == "cpu"
    if isinstance(model, str | Path) and not in_memory_first:
        options = {"device_map": {"": accelerator.device}, **options}
    return load_model(str(model) if isinstance(model, Path) else model, **options)


def _loading_options(args: GRPOConfig) -> dict[str, Any]:
    return {**(args.model_init_kwargs or {}), "trust_remote_code": args.runs_remote_code}


def load_model(
    model: str | PreTrainedModel, *, trust_remote_code: bool, given: str = "model_init_kwargs", **options: Any
) -> PreTrainedModel:
    """The module itself, or a model from a path or hub id, in fp32 unless `options` of `from_pretrained` differ.

    Logs a warning, once, where there are options for a module; `given` is their name in the config.
    """
    if not isinstance(model, str):
        if options:
            warn_once(
                f"got {given} {sorted(options)} with a {type(model).__name__}, which is loaded already: they "
                "change nothing; fix: pass its path or hub id"
            )
        return uncompiled(model)
    arguments = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, **options}
    downloads = not Path(model).exists() and not _is_cached(model)
    # transformers draws bars of its own unless they are turned off, and the hub does while it downloads.
    words = f"{'downloading and ' * downloads}loading {model}"
    with loading(f"model {model!r}"), progress(words, bars=downloads or is_progress_bar_enabled()):
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, **arguments)
    return loaded


def _is_cached(model: str) -> bool:
    """Whether weights of that hub id are in the hub's cache."""
    files = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    try:
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in files)
    except HFValidationError:  # no hub id: loading it raises its own error
        return True


def load_tokenizer(
    model: str | PreTrainedModel, processing_class: Any, *, trust_remote_code: bool, revision: str | None = None
) -> Any:
    """The given tokenizer, or the one saved with the model; with a padding token.

    Raises:
        InputError: there is no tokenizer with the model, or it has no end-of-sequence token.
        WrongTypeError: `processing_class` is no tokenizer.
    """
    if processing_class is None:
        source = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        if not source:
            raise InputError("got a model without a path and no tokenizer; fix: pass processing_class=<tokenizer>")
        processing_class = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    if not hasattr(processing_class, "eos_token_id"):
        raise WrongTypeError(
            f"got a {type(processing_class).__name__} as processing_class, want a tokenizer of transformers; fix: "
            "AutoTokenizer.from_pretrained(...)"
        )
    if processing_class.eos_token_id is None:
        raise InputError("got a tokenizer without an eos_token, want one: completions could not end")
    if processing_class.pad_token_id is None:
        processing_class.pad_token = processing_class.eos_token
    return processing_class


def model_weights(policy_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the causal LM from that of `PolicyLoss`."""
    return {name.removeprefix("model."): tensor for name, tensor in policy_state.items()}
