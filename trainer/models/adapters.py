"""LoRA by PEFT: what the trainer has to know about a model whose base is frozen and whose adapter is trained.

PEFT puts the adapter inside the base model's own layers, so backbone and loss run as they are. What differs is handled
here, at five places:

- the head may carry an adapter, or be a trained copy of itself: the loss takes the weight that comes out of it;
- the reference is the same model with its adapter off, or with a frozen copy of the one it came with: no second model;
- an engine gets W + (alpha / r) B A under the names of the base model's checkpoint, one matrix at a time, worked out on
  a copy of the layer: nothing is added to the frozen weights that would have to be subtracted again, with its rounding;
- a checkpoint holds the adapter alone, as PEFT writes it;
- resuming puts the adapter back bit for bit. The base comes from whoever made the trainer.

PEFT is needed where an adapter is asked for and nowhere else; whether a model has one is seen without it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fused_grpo.trainer.config.grpo_config import GRPOConfig

ADAPTER_FILE = "adapter_model.safetensors"
REFERENCE = "ref"  # TRL's name for the frozen copy of an adapter that the model came with

# They are the base's. By default PEFT would ask the hub whether they have grown.
_SAVE_EMBEDDINGS = False
# Initialisations that leave the base as it is. The others move a part of it into the adapter, and then the model
# without its adapter is no longer the one that was given.
_KEEPS_BASE = (True, False, "gaussian", "orthogonal")
# Options of LoraConfig whose adapters are not low-rank updates of single linear layers or embeddings.
_NOT_OFFERED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)


def adapt(model: Any, peft_config: Any, args: GRPOConfig, accelerator: Accelerator) -> Any:
    """The model with the adapter to train; the model itself where neither it nor `peft_config` has one.

    Args:
        model: a causal LM of transformers, which is changed in place; or a PeftModel.
        peft_config: a `peft.LoraConfig`. None: `model` has its adapter, or none.
        args: of the run. `seed` is that of the adapter's first values; with `beta` above 0, a frozen copy is kept of an
            adapter that comes with the model.
        accelerator: says how the run is spread over processes.

    Raises:
        InputError: a PeftModel and a `peft_config`, an adapter that is not trained, one on tied embeddings, or a
            reference that would have to follow it.
        UnsupportedError: another kind of adapter than LoRA, or LoRA with an option that is not offered.
        UnavailableError: PEFT is not installed.
    """
    if peft_config is None and not is_adapted(model):
        return model
    peft = _peft()
    if args.sync_ref_model:
        raise InputError(
            "got sync_ref_model=True with an adapter, want a reference that stays: it is the base itself, not a second "
            "model that could be moved; fix: leave sync_ref_model out"
        )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise UnsupportedError(
            "got an adapter under FSDP or DeepSpeed, want whole weights in every process: the base takes no gradients "
            "and no optimizer state; fix: launch with DDP"
        )
    if is_adapted(model):
        _check_given(model, peft_config, peft)
        if args.beta > 0:
            _keep_reference(model)
    else:
        _check_config(peft_config, peft)
        with torch.random.fork_rng():
            torch.manual_seed(args.seed)
            model = peft.get_peft_model(model, peft_config)
    _check_tie(base_model(model))
    return model


def is_adapted(model: Any) -> bool:
    """Whether there is an adapter in the layers of a model: of a PeftModel, or of the base inside one."""
    return hasattr(model, "peft_config")


def base_model(model: Any) -> Any:
    """The causal LM of transformers, adapter layers and all."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_weight(head: Any) -> Tensor:
    """The weight [V, D] that a head multiplies with: its own, or with an active adapter W + (alpha / r) B A.

    The sum is made anew under autograd each time, in the precision of the weights also under autocast: the weight that
    an engine is given. It takes one more [V, D] matrix, and its gradient another.
    """
    weight: Tensor = head.weight
    if not hasattr(head, "lora_A") or head.disable_adapters:
        return weight
    with torch.autocast(weight.device.type, enabled=False):
        for name in head.active_adapters:
            if name in head.lora_A:
                weight = (weight + head.get_delta_weight(name)).to(weight.dtype)
    return weight


def check_head(head: Any) -> None:
    """Raise UnsupportedError where the adapter of a head is more than a sum of weights."""
    if not hasattr(head, "lora_A"):
        return
    name = head.active_adapters[0]
    drops = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in head.lora_dropout.values())
    if drops or head.lora_variant.get(name) is not None or head.lora_bias[name]:
        raise UnsupportedError(
            "got an adapter with dropout, a bias or DoRA on the head, want W + (alpha / r) B A: the loss takes the "
            "head as one matrix; fix: plain LoRA there, modules_to_save=['lm_head'], or leave the head out of "
            "target_modules"
        )


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """In here, the model is the reference: its adapter off, or the frozen copy of the one that it came with."""
    if REFERENCE not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    trained = _trained(model)
    model.set_adapter(REFERENCE, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(trained)


@torch.no_grad()
def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model, its adapter included, under the name that the base model's checkpoint has for it.

    Equals
        copy.deepcopy(model).merge_and_unload().state_dict().items(), in another order

    Weights without an adapter are the model's own tensors; the others are made one at a time, as they are asked for.

    Raises:
        UnsupportedError: a quantized layer with an adapter.
    """
    yield from _named_weights(model, _merged)


@torch.no_grad()
def base_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of the frozen base, as if there were no adapter; names as in `merged_weights`."""
    yield from _named_weights(model, lambda layer: layer.get_base_layer())


class AdapterFiles:
    """Writes the adapter of a PeftModel; what `save_checkpoint` takes for a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def save_pretrained(self, save_directory: str, *, state_dict: dict[str, Tensor] | None = None) -> None:
        """PEFT's own files, of the trained adapter alone; `state_dict` has the PeftModel's weights by name."""
        self.model.save_pretrained(
            save_directory,
            selected_adapters=[_trained(self.model)],
            state_dict=state_dict,
            save_embedding_layers=_SAVE_EMBEDDINGS,
        )


def files_of(model: Any) -> Any:
    """What writes a checkpoint's model: the model itself, or its adapter alone."""
    return AdapterFiles(model) if is_adapted(model) else model


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """The trained adapter's tensors, under the names of its file."""
    weights: dict[str, Tensor] = _peft().get_peft_model_state_dict(
        model, adapter_name=_trained(model), save_embedding_layers=_SAVE_EMBEDDINGS
    )
    return weights


def adapter_path(model: Any, directory: Path) -> Path:
    """Where PEFT puts the trained adapter's tensors."""
    name = _trained(model)
    return directory / ("" if name == "default" else name) / ADAPTER_FILE


def load_adapter(model: Any, weights: dict[str, Tensor]) -> None:
    """Put what `read_adapter` has read into the model, bit for bit."""
    _peft().set_peft_model_state_dict(model, weights, adapter_name=_trained(model))


def adapter_identity(model: Any) -> dict[str, Any] | None:
    """What has to be as it was for an adapter to mean what it meant, as JSON; None without one."""
    if not is_adapted(model):
        return None
    config = model.peft_config[_trained(model)]
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    modules = {name: getattr(config, name) for name in ("target_modules", "modules_to_save")}
    lists = {name: sorted(value) if isinstance(value, set | list) else value for name, value in modules.items()}
    return {**{name: getattr(config, name) for name in names}, **lists}


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UnavailableError(
            "got an adapter to train, want peft installed; fix: pip install 'fused-grpo[peft]'"
        ) from error
    return peft


def _trained(model: Any) -> str:
    """The name of the adapter that is trained."""
    name: str = model.active_adapters[0]
    return name


def _check_config(config: Any, peft: Any) -> None:
    if not isinstance(config, peft.LoraConfig):
        raise UnsupportedError(
            f"got a {type(config).__name__} as peft_config, want a peft.LoraConfig: the trainer knows how to merge and "
            "save that kind; fix: pass one"
        )
    _check_options(config)
    if config.init_lora_weights not in _KEEPS_BASE:
        raise UnsupportedError(
            f"got init_lora_weights={config.init_lora_weights!r}, which needs data or changes the base, want one of "
            f"{_KEEPS_BASE}; fix: make the PeftModel yourself and pass it as the model"
        )


def _check_given(model: Any, config: Any, peft: Any) -> None:
    """A model that came with an adapter."""
    if config is not None or not isinstance(model, peft.PeftModel):
        raise InputError(
            f"got a {type(model).__name__} that has an adapter{' and a peft_config' if config is not None else ''}, "
            "want a PeftModel alone, or a plain model and a peft_config; fix: merge_and_unload() the adapter first, or "
            "leave the peft_config out"
        )
    if len(model.active_adapters) != 1:
        raise InputError(f"got active adapters {model.active_adapters}, want one; fix: model.set_adapter(<its name>)")
    given = model.peft_config[_trained(model)]
    if not isinstance(given, peft.LoraConfig):
        raise UnsupportedError(f"got a PeftModel with a {type(given).__name__}, want LoRA; fix: merge_and_unload() it")
    _check_options(given)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            "got a PeftModel that is frozen, want its adapter trained; fix: load it with is_trainable=True"
        )


def _check_options(config: Any) -> None:
    for name in _NOT_OFFERED:
        if getattr(config, name, None):
            raise UnsupportedError(
                f"got LoraConfig({name}=...), which this trainer does not merge or save; fix: leave it out"
            )


def _check_tie(base: Any) -> None:
    """Where one tensor is embedding and head, an adapter on either would make them two."""
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if base.config.get_text_config().tie_word_embeddings and any(_carries(end) for end in ends):
        raise InputError(
            "got an adapter on a head or an embedding that are tied, want it on neither: merged, the two would "
            "differ, and no engine would serve that; fix: leave them out of target_modules and modules_to_save, or "
            "untie them before"
        )


def _carries(layer: Any) -> bool:
    """Whether PEFT has wrapped this layer: with an adapter, or to train a copy of it."""
    return hasattr(layer, "base_layer") or hasattr(layer, "original_module")


def _keep_reference(model: Any) -> None:
    """A frozen copy of the adapter as it is now."""
    peft, trained = _peft(), _trained(model)
    if REFERENCE not in model.peft_config:
        model.add_adapter(REFERENCE, model.peft_config[trained])
    peft.set_peft_model_state_dict(model, adapter_weights(model), adapter_name=REFERENCE)
    model.set_adapter(trained)


def _named_weights(model: Any, plain: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights by checkpoint name; `plain` makes an ordinary layer of one with an adapter."""
    from transformers.core_model_loading import revert_weight_conversion

    base = base_model(model)
    layers = {name: layer for name, layer in base.named_modules() if _carries(layer)}
    inside = tuple(f"{name}." for name in layers)
    outside = {name: weight for name, weight in base.state_dict().items() if not name.startswith(inside)}
    yield from revert_weight_conversion(base, outside).items()
    for prefix, layer in layers.items():
        weights = {f"{prefix}.{name}": weight for name, weight in plain(layer).state_dict().items()}
        yield from revert_weight_conversion(base, weights).items()


def _merged(layer: Any) -> nn.Module:
    """What PEFT's own merging makes of a layer; made of a copy, so that the layer stays as it is."""
    active: str = layer.active_adapters[0]
    if hasattr(layer, "modules_to_save"):
        trained: nn.Module = layer.modules_to_save[active]
        return trained
    if not layer.get_base_layer().weight.is_floating_point():
        raise UnsupportedError(
            "got an adapter on a quantized layer, which cannot be merged without rounding; fix: use_vllm=False, where "
            "the model itself samples"
        )
    merged = copy.deepcopy(layer)
    merged.merge(adapter_names=[active])
    plain: nn.Module = merged.get_base_layer()
    return plain
