"""What causal LMs of transformers do to their logits, read from their config.

Between the hidden states that leave the backbone and the logits that a loss sees there is more than the head's weight:
Gemma caps, Cohere multiplies, Granite divides. Each family has a name of its own for it, and two use the same name for
opposite things, so this is a table: of transformers 5.19, every `*ForCausalLM` and `*ForConditionalGeneration` there.

    softcap * tanh(x / softcap)   final_logit_softcapping  Gemma 2, 3, 3n, 4, VaultGemma, NanoChat, Muse Glimmer
                                  logits_soft_cap          RecurrentGemma
                                  output_logit_soft_cap    xLSTM
    x * scale                     logit_scale              Cohere, Cohere 2, Cohere 2 MoE, Cohere Compass
                                  lm_head_multiplier       Falcon-H1
                                  output_multiplier        Muse Glimmer, before it caps
                                  logits_scaling           HyperCLOVA X
    x / scale                     logits_scaling           Granite, GraniteMoE, their shared, hybrid and SWA variants
    h / scale, before the head    logits_scaling           MiniCPM3
                                  logits_mup_width_multiplier  Inkling

A name in a config is no proof. MPT's config has a `logit_scale` that its forward never reads, and most multimodal
models take their head's output for logits, whatever the config of their text model says (PaliGemma 2 around Gemma 2,
Aya Vision around Cohere 2, LLaVA around Granite). So whoever can should compare with what the model does, as
`return_logprobs` does at every call.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from fused_grpo.errors import UnsupportedError

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)
_NEVER_READS_ITS_LOGIT_SCALE = ("mpt",)

# What these divide are hidden states, on their way into the head.
_DIVISORS_BEFORE_THE_HEAD = {"minicpm3": "logits_scaling", "inkling_text": "logits_mup_width_multiplier"}

# Multimodal models that do to their logits what the config of their text model says. The others do nothing.
_HEEDS_ITS_TEXT_CONFIG = (
    "cohere_compass",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "granite4_vision",
    "hyperclovax_vision_v2",
    "inkling_mm_model",
    "muse_glimmer",
)


class LogitTransform(TypedDict):
    """Logits are softcap(logit_scale * x), softcap(x) = c * tanh(x / c). Keyword arguments of `linear_logprobs`."""

    logit_scale: float
    softcap: float | None


def head_transform(config: Any) -> LogitTransform:
    """What a model does to the output of its head, x = h.w + b with h as it comes to the head.

    Args:
        config: of the whole model: `model.config`.
    """
    text = config.get_text_config()
    if text is not config and config.model_type not in _HEEDS_ITS_TEXT_CONFIG:
        return {"logit_scale": 1.0, "softcap": None}
    scale = 1.0
    if text.model_type not in _NEVER_READS_ITS_LOGIT_SCALE:
        for name in _MULTIPLIERS:
            scale *= _number(text, name)
    if text.model_type in _MULTIPLIES_BY_LOGITS_SCALING:
        scale *= _number(text, "logits_scaling")
    elif text.model_type not in _DIVISORS_BEFORE_THE_HEAD:
        scale /= _number(text, "logits_scaling")
    softcaps = [value for name in _SOFTCAPS if (value := getattr(text, name, None)) is not None]
    return {"logit_scale": scale, "softcap": softcaps[0] if softcaps else None}


def logit_transform(config: Any) -> LogitTransform:
    """What a model does between the last hidden state h of its backbone and its logits, x = h.w.

    For who runs the backbone and applies the head's weight. Who stands where the head stands wants `head_transform`.

    Raises:
        UnsupportedError: the model leaves out columns of its head, which no scale or cap can say.
    """
    text, transform = config.get_text_config(), head_transform(config)
    used = getattr(text, "unpadded_vocab_size", None)
    if used is not None and used < text.vocab_size:
        raise UnsupportedError(
            f"got a head of {text.vocab_size} rows of which the model uses {used}, want all in use; fix: "
            f"model.resize_token_embeddings({used})"
        )
    if text.model_type in _DIVISORS_BEFORE_THE_HEAD:
        transform["logit_scale"] /= _number(text, _DIVISORS_BEFORE_THE_HEAD[text.model_type])
    return transform


def transformed(x: Tensor, transform: LogitTransform) -> Tensor:
    """The logits: softcap(logit_scale * x)."""
    scaled, cap = x * transform["logit_scale"], transform["softcap"]
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else value
