"""LoRA, prompt tuning and P-tuning by PEFT: a frozen base model and a trained adapter (docs/lora.md).

**Virtual tokens** (prompt tuning, P-tuning) are trained embeddings of n tokens before every sequence:

    inputs_embeds = cat(prompt [n, D], embed(tokens) [T, D])

Rows of token ids have n places in front of each sequence, so that positions, attention and the places of predictors
count them; whatever runs the model puts the trained embeddings there. (PEFT has them before the padding on the left, so
with prompts of different lengths its log-probs depend on the other rows.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from fused_grpo.errors import InputError, UnsupportedError, WrongTypeError
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.packages import installed
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.quantized import check_biases, dequantized, is_4bit, keep_exact, quantization_of
from fused_grpo.trainer.models.weight_stream import (
    Part,
    WeightStream,
    checkpoint_stream,
    gathered,
    is_sharded,
    narrowing,
)

ADAPTER_FILE = "adapter_model.safetensors"
ENCODER_FILE = "prompt_encoder.safetensors"  # beside PEFT's file, which has what the encoder returns, not its weights
REFERENCE = "ref"  # TRL's name for the frozen copy of an adapter that the model came with
_WITH_COPY = WeakSet[Any]()  # the models that have that copy, and not an adapter of the user's that is called so

_KEEPS_BASE = (True, False, "gaussian", "orthogonal")  # other initialisations move a part of the base into the adapter
_ZERO_AT_FIRST = ("lora_B", "lora_embedding_A")  # factors of an update: of linear layers and experts, of embeddings
# Options of LoraConfig whose adapters are not low-rank updates of single matrices or stacks of them.
_UNSUPPORTED = ["alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"]
_UNSUPPORTED += ["trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"]

_peft = partial(installed, "peft", extra="peft")


def adapt(
    model: Any, peft_config: Any, args: GRPOConfig, accelerator: Accelerator, *, keep_reference: bool = False
) -> Any:
    """The model with the adapter to train, or the model itself if it has no adapter and `peft_config` is None.

    Args:
        model: a causal LM of transformers, which is changed in place; or a PeftModel.
        peft_config: a `LoraConfig`, `PromptTuningConfig` or `PromptEncoderConfig`; None for a model with its own.
        args: `seed` is that of the adapter's initial values; with `beta` > 0, an adapter that comes with the model gets
            a frozen copy as the reference, unless it changes nothing yet.
        keep_reference: whether there is a reference for another reason than `beta`.

    Raises:
        InputError: a PeftModel and a `peft_config`; an adapter that is frozen, merged, on tied embeddings, called
            "ref" beside a reference, or not all that is trained; a config that PEFT refuses; prompt tuning without its
            task type; a quantised model without an adapter, or trained biases that it rounds.
        UnsupportedError: another kind of adapter, an option of LoraConfig, `sync_ref_model`, virtual tokens under FSDP.
        UnavailableError: PEFT is not installed.
    """
    if peft_config is None and not is_adapted(model):
        if quantization_of(model.config):  # by others than bitsandbytes: those may have made plain weights of it
            raise InputError(
                "got a quantised model and no adapter, want LoRA on it: its layers take no gradients; fix: "
                "peft_config=LoraConfig(...), or a model that is not quantised"
            )
        return model
    if args.sync_ref_model:
        raise UnsupportedError(
            "got sync_ref_model=True with an adapter, want a reference that stays: it is the base itself, not a second "
            "model that could be moved; fix: leave sync_ref_model out"
        )
    keep_exact(model)
    keep_reference = keep_reference or args.beta > 0
    if is_adapted(model):
        check_adapter(model, peft_config)
        # As rank 0 finds: under FSDP2 it may be the only one that has read the weights.
        if keep_reference and (
            REFERENCE in model.peft_config or not broadcast_object_list([_equals_base(model, _peft())])[0]
        ):
            _keep_reference(model)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(args.seed)
            model = with_adapter(model, peft_config).train(model.training)
    check_biases(model)
    if keep_reference and (bias := getattr(model.peft_config[_trained(model)], "bias", "none")) != "none":
        raise UnsupportedError(
            f"got LoraConfig(bias={bias!r}), which trains biases of the base, and a reference, which is the base, want "
            "it to stay; fix: bias='none', or neither beta nor teacher_model='self'"
        )
    _check_trained(model)
    _check_tie(base_model(model))
    if is_prompt_tuned(model) and accelerator.distributed_type == DistributedType.FSDP:
        raise UnsupportedError("got virtual tokens under FSDP, want them whole in each process; fix: DDP, or LoRA")
    return model


def with_adapter(model: Any, config: Any) -> Any:
    """A PeftModel around a model, with an adapter of a copy of the config; raises what `adapt` says of that."""
    _check_config(config, peft := _peft())
    if getattr(config, "init_lora_weights", True) not in _KEEPS_BASE:
        raise UnsupportedError(
            f"got init_lora_weights={config.init_lora_weights!r}, which needs data or changes the base, want one of "
            f"{_KEEPS_BASE}; fix: make the PeftModel yourself and pass it as the model"
        )
    try:
        return peft.get_peft_model(model, copy.deepcopy(config))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise InputError(
            f"got a {type(config).__name__} that PEFT refuses for a {type(model).__name__} ({reason}), want one that "
            "fits; fix: what it names"
        ) from error


def is_adapted(model: Any) -> bool:
    """True for a PeftModel and for the base model inside one."""
    return hasattr(model, "peft_config")


def base_model(model: Any) -> Any:
    """The causal LM of transformers, with the adapter in its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_prompt_tuned(model: Any) -> bool:
    """True for a PeftModel with virtual tokens."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def num_virtual_tokens(model: Any) -> int:
    """How many virtual tokens every sequence begins with now: n, or 0."""
    enabled = is_prompt_tuned(model) and model.has_active_enabled_adapter
    return int(model.active_peft_config.num_virtual_tokens) if enabled else 0


def with_virtual_places(prompts: Sequence[list[int]], model: Any) -> list[list[int]]:
    """Prompts with n more tokens in front: repetitions of the first one, which a penalty counts already."""
    count = num_virtual_tokens(model)
    return [prompt[:1] * count + prompt for prompt in prompts]


def model_inputs(model: Any, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
    """`input_ids` [R, L] or, where there are virtual tokens, `inputs_embeds` [R, L, D] with theirs at positions 0..n-1.

    `position_ids` [R, L] are -1 where there is padding on the left, whose embeddings attention does not see.
    """
    count = num_virtual_tokens(model)
    if not count:
        return {"input_ids": input_ids}
    embeddings: Tensor = model.get_input_embeddings()(input_ids)
    prompt = model.get_prompt(batch_size=1)[0].to(embeddings.dtype)  # [n, D]
    virtual = position_ids < count
    return {"inputs_embeds": embeddings.index_put((virtual,), prompt[position_ids[virtual]])}


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """Within this context the model is the reference: its adapter is disabled, or replaced by the frozen copy."""
    has_copy = REFERENCE in model.peft_config
    with _as_before(model), nullcontext() if has_copy else model.disable_adapter():
        if has_copy:
            model.set_adapter(REFERENCE)
        yield


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Afterwards the same is active and trained: PEFT trains all of what it makes active, frozen factors too."""
    active, trained = _trained(model), {name for name, weight in model.named_parameters() if weight.requires_grad}
    try:
        yield
    finally:
        model.set_adapter(active)
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in trained)


def checkpoint_weights(model: Any, dtype: torch.dtype | None = None) -> WeightStream:
    """Every weight under the name that `save_pretrained` of the base model gives it, with the adapter merged.

    It is made when it is read; a layer that is merged takes three matrices of its size. Weights that FSDP2 has sharded
    are gathered on the device: every rank has to read all of them. Equals, but for memory and order,
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
        safetensors.torch.load_file(folder / "model.safetensors").items()

    Args:
        model: the causal LM of transformers, or a PeftModel around one.
        dtype: of the engine that is sent the weights; they are cast to it as by `narrowing`. None: they are not.

    UnsupportedError for virtual tokens and for layers that are quantised, but not in 4 bits by bitsandbytes, when they
    are read.
    """
    return _named_weights(model, _merged, dtype)


def _refuse(what: str) -> tuple[str, Tensor]:
    raise UnsupportedError(
        f"got a model with {what}, for an engine with weights of its own; fix: use_vllm=False, where the model itself "
        "samples"
    )


def base_weights(model: Any, dtype: torch.dtype | None = None) -> WeightStream:
    """As `checkpoint_weights`, of the frozen base; of 4-bit layers what they compute with."""
    return _named_weights(model, lambda layer: dequantized(_base_layer(layer)), dtype)


def base_codes(model: Any, dtype: torch.dtype) -> WeightStream:
    """The weights of the frozen base as bitsandbytes has them, 4-bit codes and scales, as a checkpoint of its has."""
    return _named_weights(model, _base_layer, dtype, as_shaped=_base_layer)


def saver_of(model: Any) -> Any:
    """An object whose `save_pretrained` writes a checkpoint: the model, or its trained adapter alone."""
    if not is_adapted(model):
        return model

    def save_pretrained(directory: str, **options: Any) -> None:
        model.save_pretrained(directory, selected_adapters=[_trained(model)], save_embedding_layers=False, **options)
        if _has_encoder(model):
            save_file(adapter_weights(model), adapter_path(model, Path(directory)))

    return SimpleNamespace(save_pretrained=save_pretrained)


def trained_state(model: Any) -> dict[str, Tensor]:
    """The part of a PeftModel's state dict that `save_pretrained` writes of the trained adapter; shards gathered."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}  # biases of the base
    adapter, state = f".{_trained(model)}.", model.state_dict()
    return {name: gathered(state[name]) for name in state if adapter in f"{name}." or name in trained}


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """The full tensors of the trained adapter, under the names of its file. A collective under FSDP2."""
    return {name: gathered(weight) for name, weight in adapter_tensors(model).items()}


def adapter_tensors(model: Any) -> dict[str, Any]:
    """The tensors of the trained adapter, under the names of its file; under FSDP2 sharded, as they are."""
    if _has_encoder(model):
        return dict(model.prompt_encoder[_trained(model)].state_dict())
    # Embeddings are the base's: by default PEFT asks the hub whether they have been resized.
    return dict(_peft().get_peft_model_state_dict(model, adapter_name=_trained(model), save_embedding_layers=False))


def adapter_stream(model: Any, dtype: torch.dtype | None = None) -> WeightStream:
    """`adapter_weights` for an engine of that dtype, which serves them beside the base; cast as by `narrowing`."""
    narrow = narrowing(base_model(model), dtype)
    return WeightStream.of((name, narrow(name, weight)) for name, weight in adapter_weights(model).items())


def adapter_path(model: Any, directory: Path) -> Path:
    """The file with the tensors of the trained adapter."""
    name = _trained(model)
    return directory / ("" if name == "default" else name) / (ENCODER_FILE if _has_encoder(model) else ADAPTER_FILE)


def load_adapter(model: Any, weights: dict[str, Tensor]) -> None:
    """Load the tensors that `read_adapter` returned into the model. A collective under FSDP2."""
    if _has_encoder(model):
        model.prompt_encoder[_trained(model)].load_state_dict(weights)
    elif any(map(is_sharded, (own := adapter_tensors(model)).values())):
        for name, shard in own.items():
            whole = weights[name].to(shard.device)
            shard.copy_(distribute_tensor(whole, shard.device_mesh, shard.placements))
    else:
        _peft().set_peft_model_state_dict(model, weights, adapter_name=_trained(model))


def adapter_identity(model: Any) -> dict[str, Any] | None:
    """The options that a resumed run must share, as JSON; None without an adapter."""
    if not is_adapted(model):
        return None
    config = model.peft_config[_trained(model)]
    if config.is_prompt_learning:
        return {"peft_type": config.peft_type.value, "num_virtual_tokens": config.num_virtual_tokens}
    names = ["r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"]
    names += ["target_modules", "modules_to_save", "target_parameters"]
    return {name: sorted(value) if isinstance(value := getattr(config, name), set | list) else value for name in names}


def _has_encoder(model: Any) -> bool:
    """True where a network makes the embeddings of virtual tokens (P-tuning)."""
    return isinstance(model.peft_config[_trained(model)], _peft().PromptEncoderConfig)


def _trained(model: Any) -> str:
    """The name of the adapter that is trained."""
    return str(model.active_adapters[0])


def _check_config(config: Any, peft: Any, *, given: bool = False) -> None:
    kind = type(config).__name__
    if not isinstance(config, peft.PeftConfig):
        raise WrongTypeError(f"got a {kind} as peft_config, want a configuration of PEFT; fix: peft.LoraConfig(...)")
    if type(config) in (peft.PromptTuningConfig, peft.PromptEncoderConfig):
        if config.task_type != peft.TaskType.CAUSAL_LM:
            raise InputError(
                f"got a {kind} with task_type={config.task_type!r}, want TaskType.CAUSAL_LM: without it PEFT's model "
                f"leaves the virtual tokens out; fix: {kind}(task_type='CAUSAL_LM', ...)"
            )
        return
    if config.peft_type != peft.PeftType.LORA:  # AdaLoRA's is a LoraConfig, too
        where, fix = ("in the PeftModel", "merge_and_unload() it") if given else ("as peft_config", "pass one")
        raise UnsupportedError(
            f"got a {kind} {where}, want LoRA, prompt tuning or P-tuning: packed sequences have no KV cache for a "
            f"prefix, and other kinds are not merged or saved here; fix: {fix}"
        )
    if name := next((name for name in _UNSUPPORTED if getattr(config, name, None)), None):
        raise UnsupportedError(f"got LoraConfig({name}=...), which is not merged or saved here; fix: leave it out")


def check_adapter(model: Any, config: Any = None) -> None:
    """InputError for a model with an adapter that cannot be trained as it is, or together with a `peft_config`."""
    if config is not None or not isinstance(model, (peft := _peft()).PeftModel):
        raise InputError(
            f"got a {type(model).__name__} that has an adapter{' and a peft_config' if config is not None else ''}, "
            "want a PeftModel alone, or a plain model and a peft_config; fix: merge_and_unload() or no peft_config; of "
            "add_adapter() or an adapter's hub id, PeftModel.from_pretrained(base, adapter, is_trainable=True)"
        )
    if len(model.active_adapters) != 1:
        raise InputError(f"got active adapters {model.active_adapters}, want one; fix: model.set_adapter(<its name>)")
    name, layers = _trained(model), list(model.modules())
    _check_config(model.peft_config[name], peft, given=True)
    power = 0.5 if getattr(model.peft_config[name], "use_rslora", False) else 1.0
    lora = [layer for layer in layers if name in getattr(layer, "lora_alpha", ())]
    own = [(layer.scaling[name] * layer.r[name] ** power, layer.lora_alpha[name]) for layer in lora]
    wrong = {
        "merged, want it beside the base: merged, it has no gradients; fix: load it again, or unmerge_adapter(), which "
        "rounds a base in 4 bits": any(getattr(layer, "merged", False) for layer in layers),
        "disabled, want it in the forward pass; fix: enable_adapter_layers()": any(
            getattr(layer, "_disable_adapters", False) for layer in layers
        ),
        "scaled by set_scale() or scale_layer(), want what its config says, which alone is saved; fix: lora_alpha in "
        "its config, or set_scale(<its name>, 1.0)": any(abs(now - alpha) > 1e-6 * abs(alpha) for now, alpha in own),
    }
    if problem := next(filter(wrong.get, wrong), None):
        raise InputError(f"got a PeftModel whose adapter is {problem}")


def _check_trained(model: Any) -> None:
    """What is trained is what the adapter's file has: anything else would be lost with the process."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise InputError(
            "got a PeftModel that is frozen, want it trained; fix: load with is_trainable=True or inference_mode=False"
        )
    lora = (layer for layer in model.modules() if _trained(model) in getattr(layer, "lora_alpha", ()))
    if not all(0 < abs(layer.scaling[_trained(model)]) < float("inf") for layer in lora):
        raise InputError("got a lora_alpha of 0 or NaN, with which an adapter learns nothing; fix: lora_alpha=r, or 2r")
    infixes = [f".{adapter}." for adapter in model.peft_config]
    beside = [name for name in names if not any(map(f"{name}.".__contains__, infixes))]
    saved = {weight.data_ptr() for weight in adapter_tensors(model).values()} if beside else set()  # biases
    lost = [name for name in beside if model.get_parameter(name).data_ptr() not in saved]
    if lost:
        raise InputError(
            f"got {len(lost)} trained parameter(s) of the base beside its adapter, such as {lost[0]}, which the "
            "adapter's file would not have, want the adapter trained alone; fix: modules_to_save=[...] in its config, "
            "or requires_grad_(False)"
        )


def _check_tie(base: Any) -> None:
    """Refuse an adapter on a tied head or embedding: merged, the two would differ."""
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if base.config.get_text_config().tie_word_embeddings and any(map(_is_wrapped, ends)):
        raise InputError(
            "got an adapter on a head or an embedding that are tied, want it on neither: merged, the two would "
            "differ; fix: leave them out of target_modules and modules_to_save, or untie them before"
        )


def _is_wrapped(layer: Any) -> bool:
    """True for a layer with an adapter, and for one with a trained copy (`modules_to_save`)."""
    return hasattr(layer, "base_layer") or hasattr(layer, "original_module")


def _equals_base(model: Any, peft: Any) -> bool:
    """True for LoRA as PEFT makes it, whose updates are zero: the base is its reference, and no copy is needed."""
    config = model.peft_config[_trained(model)]
    if not isinstance(config, peft.LoraConfig) or config.use_dora or config.modules_to_save or config.bias != "none":
        return False
    factors = [weight for name, weight in adapter_weights(model).items() if any(map(name.__contains__, _ZERO_AT_FIRST))]
    return not any(bool(factor.any()) for factor in factors)


def _keep_reference(model: Any) -> None:
    """Add a frozen copy of the adapter, or make the one of a trainer before anew."""
    trained = _trained(model)
    if REFERENCE in model.peft_config and model not in _WITH_COPY:
        raise InputError(
            f"got a PeftModel with an adapter {REFERENCE!r}, and a reference, which is a frozen copy of that name, "
            f"want another name for it; fix: model.delete_adapter({REFERENCE!r}), or another adapter_name for it"
        )
    config = copy.copy(model.peft_config[trained])
    config.init_lora_weights = False  # "pissa" and others would move one more part of the base into the copy
    with _as_before(model):
        if REFERENCE not in model.peft_config:
            model.add_adapter(REFERENCE, config)
        if is_prompt_tuned(model):
            model.prompt_encoder[REFERENCE].load_state_dict(model.prompt_encoder[trained].state_dict())
        else:
            _peft().set_peft_model_state_dict(model, adapter_weights(model), adapter_name=REFERENCE)
    _WITH_COPY.add(model)


def _named_weights(
    model: Any,
    unwrapped: Callable[[Any], Any],
    dtype: torch.dtype | None,
    *,
    as_shaped: Callable[[Any], Any] = lambda layer: dequantized(_base_layer(layer), device="meta"),
) -> WeightStream:
    """Weights by checkpoint name; `unwrapped` makes a plain layer of one that PEFT has wrapped or that is in 4 bits.

    What it makes has the sizes of the state dict of what `as_shaped` makes.
    """
    base, refused = base_model(model), None
    if is_prompt_tuned(model):
        refused = "virtual tokens, which are no weights of its base"
    elif quantization_of(base.config) and not any(map(is_4bit, base.modules())):
        refused = "layers that are quantised otherwise than in 4 bits by bitsandbytes"
    if refused:  # when it is read, as one weight: an engine that samples from the model itself reads nothing
        return WeightStream({"refused": torch.empty(0, device="meta")}, map(_refuse, [refused]))
    layers: dict[str, Any] = {}
    for name, layer in base.named_modules():
        # Two adapted parameters of one layer are two wrappers, one in the other: the outermost stands for both.
        if (_is_wrapped(layer) or is_4bit(layer)) and not name.startswith(tuple(f"{outer}." for outer in layers)):
            layers[name] = layer
    inside, narrow = tuple(f"{name}." for name in layers), narrowing(base, dtype)

    @torch.no_grad()
    def plain(prefix: str, layer: Any) -> dict[str, Tensor]:
        return {f"{prefix}.{name}": gathered(weight) for name, weight in unwrapped(layer).state_dict().items()}

    def alone(name: str, weight: Tensor) -> dict[str, Tensor]:
        return {name: gathered(narrow(name, weight.detach()))}

    # The parameters themselves: a DTensor's shard, of whatever is tied to it too.
    state: dict[str, Tensor] = base.state_dict(keep_vars=True)
    parts = [
        Part.like({name: weight}, partial(alone, name, weight))
        for name, weight in state.items()
        if not name.startswith(inside)
    ]
    for prefix, layer in layers.items():
        weights = {f"{prefix}.{name}": weight for name, weight in as_shaped(layer).state_dict().items()}
        parts.append(Part.like(weights, partial(plain, prefix, layer)))
    return checkpoint_stream(base, parts, dtype=dtype)


def _base_layer(layer: Any) -> Any:
    """The base model's own layer."""
    if hasattr(layer, "modules_to_save"):
        return layer.original_module
    return layer.get_base_layer() if hasattr(layer, "base_layer") else layer


def _merged(layer: Any) -> Any:
    """A copy of a layer, merged by PEFT; or the trained copy of the layer."""
    base = _base_layer(layer)
    if hasattr(layer, "modules_to_save"):
        return layer.modules_to_save[layer.active_adapters[0]]
    plain = dequantized(base)
    if not hasattr(layer, "active_adapters"):
        return plain
    # What stands in a copy for the layer's own: full tensors for shards (of one process, a shard is that tensor), a
    # plain layer for one in 4 bits.
    shards = filter(is_sharded, layer.parameters())
    instead: dict[int, Any] = {id(weight): nn.Parameter(gathered(weight.detach()).clone()) for weight in shards}
    instead |= {} if plain is base else {id(base): plain}
    merged = copy.deepcopy(layer, instead)
    # PEFT's own merge of a layer in 4 bits would quantise the sum.
    merge = type(merged).merge if plain is base else _peft().tuners.lora.Linear.merge
    while hasattr(merged, "base_layer"):
        merge(merged, adapter_names=layer.active_adapters[:1])
        merged = merged.base_layer
    return merged
