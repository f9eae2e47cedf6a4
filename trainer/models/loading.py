"""Load a model and a tokenizer; precision, and dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, is_compiled_module
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.logging import is_progress_bar_enabled

from fused_grpo.errors import InputError, WrongTypeError
from fused_grpo.integrations.model_head import to_head
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.trl_fields import warn_once
from fused_grpo.trainer.logging.progress import progress
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.virtual_tokens import model_inputs

if TYPE_CHECKING:
    from accelerate import Accelerator


def wants_bf16(args: GRPOConfig) -> bool:
    """The option `bf16`; by default, True where a GPU trains."""
    return torch.cuda.is_available() and not args.use_cpu if args.bf16 is None else args.bf16


def warn_of_rounding(model: nn.Module, learning_rate: float) -> None:
    """Log a warning, once, where trained weights have 16 bits: most steps are below their distance to the next one."""
    for dtype in {weight.dtype for weight in model.parameters() if weight.requires_grad} - {torch.float32}:
        # The next number is between |w| eps / 2 and |w| eps away; AdamW moves a weight by about the learning rate.
        least = 4 * learning_rate / torch.finfo(dtype).eps
        if dtype.itemsize == 2:
            warn_once(
                f"got trained weights in {dtype}, want float32: a step of learning_rate={learning_rate} is lost in "
                f"rounding for those above {least:.1g}, which is most of them; fix: model.float(), or no dtype in "
                "model_init_kwargs; bf16=True computes in bf16 all the same"
            )


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
        given_model: PreTrainedModel = uncompiled(model)
        return given_model
    arguments = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, **options}
    downloads = not Path(model).exists() and not _is_cached(model)
    # transformers draws bars of its own unless they are turned off, and the hub does while it downloads.
    with progress(f"{'downloading and ' * downloads}loading {model}", bars=downloads or is_progress_bar_enabled()):
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, **arguments)
    return loaded


def uncompiled(model: Any) -> Any:
    """The model without the wrappers of torch.compile, which are in the names of its weights.

    What was compiled stays so, in place and with the same options: a layer as it was, and of a whole model its
    backbone, since the loss takes the place of its head.

    Raises:
        InputError: a model in DataParallel or DistributedDataParallel.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(
            f"got a {type(model).__name__}, want the model inside, which is wrapped here; fix: pass model.module, and "
            "start a process for each GPU with `accelerate launch`"
        )
    if not isinstance(model, nn.Module):
        return model
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if child is not model and is_compiled_module(child):
                setattr(layer, name, _compiled_in_place(child))
    if is_compiled_module(model):
        return _compiled_in_place(model)
    if model._compiled_call_impl is not None:
        warn_once(
            f"got a {type(model).__name__} after its compile(), which is about a call with its head, whose place the "
            "loss takes; fix: torch.compile(model), or compile() its backbone"
        )
    return model


def _compiled_in_place(wrapper: Any) -> Any:
    inner = wrapper._orig_mod
    backbone = base_model(inner).base_model if hasattr(inner, "get_output_embeddings") else inner
    backbone._compiled_call_impl = wrapper.dynamo_ctx(backbone._call_impl)
    return inner


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


@torch.no_grad()
def has_dropout(model: Any) -> bool:
    """True if a forward pass in training mode is random: its log-probs then differ from the sampler's.

    This is measured on a few tokens, because rates may be in layers, functions, configs, routers and adapters.
    """
    # The output of LoRA is 0 at first, whatever its dropout.
    if any(".lora_dropout." in name and getattr(layer, "p", 0.0) > 0 for name, layer in model.named_modules()):
        return True
    embedding: Any = model.get_input_embeddings().weight
    row = torch.arange(28, device=embedding.device)[None]
    inputs = model_inputs(model, row % len(embedding), row)

    def states(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return to_head(base_model(model), **inputs)[0].float()

    with as_it_was(model):
        model.train()
        first, other, again = states(0), states(1), states(0)
    # Sums in no fixed order, on a GPU, differ with the same seed, too.
    difference, noise = ((first - later).norm() / first.norm() for later in (other, again))
    return bool(difference > 0 and difference > min(10 * float(noise), 1e-2))


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout rates to 0, also those that a layer gives to a function, and the noise of routers."""
    for layer in model.modules():
        for name, value in list(vars(layer).items()):
            is_rate = "drop" in name or "jitter" in name or (name == "p" and isinstance(layer, _DropoutNd))
            if is_rate and isinstance(value, float):
                setattr(layer, name, 0.0)


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """A context in which compiled layers run eagerly: other shapes would be compiled, too."""
    compiled = [(layer, layer._compiled_call_impl) for layer in model.modules() if layer._compiled_call_impl]
    try:
        for layer, _ in compiled:
            layer._compiled_call_impl = None
        yield
    finally:
        for layer, call in compiled:
            layer._compiled_call_impl = call


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """A context that restores the modes of all layers and the states of torch's random generators; nothing compiles."""
    modes = [(layer, layer.training) for layer in model.modules()]
    devices = {weight.device for weight in model.parameters() if weight.device.type == "cuda"}
    with torch.random.fork_rng(devices), eagerly(model):
        try:
            yield
        finally:
            for layer, mode in modes:
                layer.training = mode
