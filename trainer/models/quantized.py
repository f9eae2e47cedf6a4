"""Base models in 4 bits (bitsandbytes), on which LoRA is trained: QLoRA, arXiv:2305.14314.

A layer holds 4-bit codes and a scale for each block of them, and computes with the weight W that they stand for, which
is made in every pass and dropped. So the policy is W + (alpha / r) B A with that W, exactly, and so is what an engine
gets that computes in 16 or 32 bits: merging rounds nothing to 4 bits again. The codes never change.

An engine that has the base in 4 bits too reads the trainer's own codes from a folder, and takes the adapter alone.

bitsandbytes is imported only where a model has such layers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError

QUANTIZATION = "quantization_config"  # transformers' name of it, in configs and as an argument


def quantization_of(*sources: Any) -> dict[str, Any]:
    """The first `quantization_config`, of any method, of configs of a model and options; empty where there is none."""
    for source in sources:
        found = source.get(QUANTIZATION) if isinstance(source, Mapping) else getattr(source, QUANTIZATION, None)
        if found:
            return dict(found if isinstance(found, Mapping) else found.to_dict())
    return {}


def check_quantization(quantization: Mapping[str, Any], *, has_adapter: bool, is_sharded: bool) -> None:
    """Before a base is loaded that bitsandbytes quantises; what others quantise, transformers may dequantise to train.

    Raises:
        InputError: no adapter, so that norms, embedding and head would be trained around frozen layers.
        UnsupportedError: FSDP, whose shards would be of codes.
        UnavailableError: bitsandbytes is not installed.
    """
    if not (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
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
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnavailableError(
            "got a model in 4 or 8 bits, want bitsandbytes installed; fix: pip install 'fused-grpo[bnb]'"
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


def number_in_4bit(model: nn.Module) -> int:
    """How many weights are in 4 bits."""
    return sum(math.prod(layer.weight.quant_state.shape) for layer in layers_in_4bit(model).values())


def keep_exact(model: nn.Module) -> None:
    """Keep bitsandbytes from computing with other weights outside of training than inside, in place.

    On a CPU with AVX512-BF16 its first pass without gradients packs codes for a kernel of its own, for good: scales are
    rounded to bf16, and the layer has no gradient from then on. InputError where that has happened.
    """
    for name, layer in layers_in_4bit(model).items():
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise InputError(
                f"got a model whose {name} bitsandbytes has packed for inference on this CPU, want the scales that it "
                "had: they have been rounded; fix: load it again, and leave it in training mode until it is passed"
            )
        layer.support_avx512bf16_for_cpu = False


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
    plain.bias = layer.bias
    return plain
