"""Bases whose linear layers are in 4 bits (bitsandbytes), on which LoRA is trained: QLoRA, arXiv:2305.14314.

A layer holds 4-bit codes and a scale for each block of them, and computes with the weight W that they stand for, which
is made in every pass and dropped. The codes never change.

bitsandbytes is imported only where a model has such layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from packaging import version
from torch import nn
from transformers.pytorch_utils import Conv1D

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError

_CODES = ("quant_method", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_skip_modules")
_OLDEST = version.parse("0.48.1")
QUANTIZATION = "quantization_config"  # transformers' name of it, in configs and as an argument


def quantization_of(*sources: Any) -> dict[str, Any]:
    """The first `quantization_config`, of any method, of configs of a model and options; empty where there is none."""
    for source in sources:
        quantization = source.get(QUANTIZATION) if isinstance(source, Mapping) else getattr(source, QUANTIZATION, None)
        if quantization:
            return dict(quantization if isinstance(quantization, Mapping) else quantization.to_dict())
    return {}


def codes_identity(config: Any) -> dict[str, Any] | None:
    """What makes a model's codes of its weights, as JSON; None where it is not quantised."""
    quantization = quantization_of(config)
    return {name: quantization.get(name) for name in _CODES} if quantization else None


def check_quantization(quantization: Mapping[str, Any], *, has_adapter: bool, is_sharded: bool) -> None:
    """Before a base is loaded that bitsandbytes quantises; what others quantise, transformers may dequantise to train.

    Raises:
        InputError: no adapter, so that norms, embedding and head would be trained around frozen layers.
        UnsupportedError: 8 bits; FSDP, whose shards would be of codes.
        UnavailableError: bitsandbytes is not installed, too old, or cannot be imported.
    """
    if quantization.get("load_in_8bit"):
        raise UnsupportedError(
            "got a model in 8 bits, want 4: bitsandbytes rounds the activations of 8-bit layers, by the other tokens "
            "of a batch too, so no engine has the log-probs of the trainer; fix: load_in_4bit=True"
        )
    if not quantization.get("load_in_4bit"):
        return
    if not has_adapter:
        raise InputError(
            "got a model quantised by bitsandbytes and no adapter, want LoRA on it: its layers take no gradients; fix: "
            "peft_config=LoraConfig(...), or the model without quantization_config"
        )
    if is_sharded:
        raise UnsupportedError(
            "got a model quantised by bitsandbytes under FSDP, want whole codes on every rank; fix: launch with DDP"
        )
    try:
        import bitsandbytes
    except Exception as error:  # missing, or built for another torch
        installed: Any = f"{type(error).__name__}: {error}"
    else:
        installed = version.parse(bitsandbytes.__version__)
        if installed >= _OLDEST:
            return
    raise UnavailableError(
        f"got a model in 4 bits, and of bitsandbytes {installed}; want version {_OLDEST} or later; fix: pip install -U "
        "'fused-grpo[bnb]'"
    )


def is_4bit(layer: Any) -> bool:
    """True for a linear layer of bitsandbytes in 4 bits, and for an adapter around one."""
    return is_codes(getattr(layer, "weight", None))


def is_codes(parameter: Any) -> bool:
    """True for the weight of a layer in 4 bits, two codes a number."""
    return getattr(parameter, "quant_state", None) is not None


def layers_in_4bit(model: nn.Module) -> dict[str, Any]:
    """Those of a model, with or without adapters, by their own names in it."""
    layers = model.named_modules()
    return {name: layer for name, layer in layers if is_4bit(layer) and not hasattr(layer, "base_layer")}


def keep_exact(model: nn.Module) -> None:
    """Keep bitsandbytes from computing with other weights outside of training than inside, in place.

    On a CPU with AVX512-BF16 its first pass without gradients packs codes for a kernel of its own, for good: scales are
    rounded to bf16, and the layer has no gradient from then on. InputError where that has happened. And its
    gradients have W in the dtype that was quantised: in one no narrower than its products, as what is merged is.
    """
    for name, layer in layers_in_4bit(model).items():
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise InputError(
                f"got a model whose {name} bitsandbytes has packed for inference on this CPU, want the scales that it "
                "had: they have been rounded; fix: load it again, and leave it in training mode until it is passed"
            )
        layer.support_avx512bf16_for_cpu = False
        state = layer.weight.quant_state
        state.dtype = torch.promote_types(state.dtype, layer.compute_dtype or state.dtype)


def check_biases(model: nn.Module) -> None:
    """InputError for trained biases that bitsandbytes would round to another compute dtype, in place, in each pass."""
    biases = [(layer.bias, layer.compute_dtype) for layer in layers_in_4bit(model).values() if layer.bias is not None]
    if any(bias.requires_grad and compute not in (None, bias.dtype) for bias, compute in biases):
        raise InputError(
            "got trained biases of layers in 4 bits with another compute dtype, to which bitsandbytes rounds them, "
            "want them exact; fix: bias='none' in LoraConfig (lora_bias is exact), or bnb_4bit_compute_dtype='float32'"
        )


def check_layout(model: nn.Module) -> None:
    """UnsupportedError for layers that vLLM cannot load: GPT-2's Conv1D in 4 bits, LoRA's bias where there is none."""
    for name, layer in model.named_modules():
        if any(getattr(layer, "lora_bias", {}).values()) and layer.get_base_layer().bias is None:
            raise UnsupportedError(
                f"got lora_bias=True on {name}, which has no bias that it is merged into, with a vLLM engine; fix: "
                "use_vllm=False, or lora_bias=False"
            )
    for name, layer in layers_in_4bit(model).items():
        if issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D):
            raise UnsupportedError(
                f"got {name} in 4 bits, a Conv1D that bitsandbytes has transposed, with a vLLM engine, which loads "
                "the layout of a checkpoint, want linear layers; fix: use_vllm=False, or no quantization_config"
            )


def dequantized(layer: Any, *, device: torch.device | str | None = None) -> Any:
    """A plain linear layer with the weight that a 4-bit one computes with; any other layer itself.

    On the "meta" device it has its shape alone.
    """
    if not is_4bit(layer):
        return layer
    codes, state = layer.weight.data, layer.weight.quant_state
    outputs, inputs = state.shape
    plain = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=state.dtype)
    if device != "meta":
        from bitsandbytes.functional import dequantize_4bit

        plain.weight = nn.Parameter(dequantize_4bit(codes, state), requires_grad=False)
    plain.bias = copy.deepcopy(layer.bias)  # PEFT adds to it in place where it merges
    return plain
