"""Getting a model, a tokenizer and a precision from what the user gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fused_grpo.errors import InputError
from fused_grpo.trainer.config import GRPOConfig


def wants_bf16(args: GRPOConfig) -> bool:
    """Mixed precision as asked for; by itself, where there is a GPU."""
    return torch.cuda.is_available() if args.bf16 is None else args.bf16


def takes_any_lengths(model: PreTrainedModel) -> bool:
    """Whether the model's attention is a variable-length kernel, which takes packed sequences without a mask."""
    return "flash" in str(model.config._attn_implementation)


def load_model(model: str | PreTrainedModel, *, trust_remote_code: bool) -> PreTrainedModel:
    """The module itself, or fp32 weights from a path or hub id."""
    if isinstance(model, PreTrainedModel):
        return model
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    return loaded


def load_tokenizer(model: str | PreTrainedModel, processing_class: Any, *, trust_remote_code: bool) -> Any:
    """The tokenizer given, or the one beside the model, able to pad."""
    if processing_class is None:
        source = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        if not source:
            raise InputError("got a model without a path and no tokenizer; fix: pass processing_class=<tokenizer>")
        processing_class = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if processing_class.eos_token_id is None:
        raise InputError("got a tokenizer without an eos_token, want one: completions could not end")
    if processing_class.pad_token_id is None:
        processing_class.pad_token = processing_class.eos_token
    return processing_class


def model_weights(policy_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The causal LM's own state dict from that of the `PolicyLoss` around it."""
    return {name.removeprefix("model."): tensor for name, tensor in policy_state.items()}
