"""The transforms that causal LMs of transformers apply to their logits, read from their config.

Between the hidden states of the backbone and the logits of a loss there is more than the head's weight: Gemma caps,
Cohere multiplies, Granite divides. Each family has its own option name, and two families use one name for opposite
operations. This table covers every `*ForCausalLM` and `*ForConditionalGeneration` of transformers 5.3 to 5.24:

    softcap * tanh(x / softcap)   final_logit_softcapping  Gemma 2, 3, 3n, 4, VaultGemma, NanoChat, Beam, Muse Glimmer,
                                                           Muse Spark, Mistral Large 4, Inkling 2, PaliGemma 2 (5.23)
                                  logits_soft_cap          RecurrentGemma
                                  output_logit_soft_cap    xLSTM
    x * scale                     logit_scale              Cohere, Cohere 2, Cohere 2 MoE, Cohere Compass
                                  lm_head_multiplier       Falcon-H1
                                  output_multiplier        Muse Glimmer and Muse Spark, before they cap
                                  logits_scaling           HyperCLOVA X
    x / scale                     logits_scaling           Granite, GraniteMoE, their variants, Docling
    h / scale, before the head    logits_scaling           MiniCPM3
                                  logits_mup_width_multiplier  Inkling

An option in a config is no proof. MPT's config has a `logit_scale` that its forward never reads. Most multimodal models
use the output of their head as logits and ignore the options of their text config (Aya Vision around Cohere 2, LLaVA
around Granite, PaliGemma 2 around Gemma 2 before 5.23). So callers should compare with the model itself where they can,
as `return_logprobs` does at every call.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any, TypedDict

import torch
from torch import Tensor

from fused_grpo._maths.statistics import compute_dtype
from fused_grpo.errors import InputError, UnsupportedError

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)
_NEVER_READS_ITS_LOGIT_SCALE = ("mpt",)

# These options divide hidden states, before the head.
_DIVISORS_BEFORE_THE_HEAD = {"minicpm3": "logits_scaling", "inkling_text": "logits_mup_width_multiplier"}

# Multimodal models that apply the options of their text config to their logits. The others apply nothing.
_HEEDS_ITS_TEXT_CONFIG = (
    "cohere_compass",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "granite4_vision",
    "granite_docling",
    "hyperclovax_vision_v2",
    "inkling2",
    "inkling2_loop",
    "inkling_mm_model",
    "mistral_large4",
    "muse_glimmer",
    "muse_spark",
)
_HEEDS_IT_SINCE = {"paligemma": (5, 23)}  # of transformers

_CUTS_COLUMNS = ("inkling_text",)


class ScaleAndCap(TypedDict):
    """Logits are softcap(logit_scale * x), softcap(x) = c * tanh(x / c). Keyword arguments of `linear_logprobs`."""

    logit_scale: float
    softcap: float | None


def head_transform(config: Any) -> ScaleAndCap:
    """The transform of the output of a head, x = h.w + b, where h is the input of the head.

    Args:
        config: of the whole model: `model.config`.
    """
    text = config.get_text_config()
    if text is not config and not heeds_its_text_config(config.model_type):
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


def heeds_its_text_config(model_type: str) -> bool:
    """Whether a multimodal model applies the options of its text config to its logits."""
    if (since := _HEEDS_IT_SINCE.get(model_type)) is None:
        return model_type in _HEEDS_ITS_TEXT_CONFIG
    from packaging.version import Version  # on which transformers depends; torch does not

    return Version(importlib.metadata.version("transformers")).release[:2] >= since


def logit_transform(config: Any) -> ScaleAndCap:
    """The transform from x = h.w to logits, where h is the last hidden state of the backbone.

    It is for callers that run the backbone and apply the head's weight. `head_transform` is for code that replaces the
    head module. Of an Inkling with a width multiplier of 8, whose hidden states are divided by it before the head, the
    scale here is 1 / 8, and there 1.

    Raises:
        InputError: no config of transformers.
        UnsupportedError: the model leaves out columns of its head, which no scale or cap can express.
    """
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"got a {type(config).__name__}, want the config of a model of transformers; fix: model.config"
        )
    text, transform = config.get_text_config(), head_transform(config)
    used = getattr(text, "unpadded_vocab_size", None)
    if text.model_type in _CUTS_COLUMNS and used is not None and used < text.vocab_size:
        raise UnsupportedError(
            f"got a head of {text.vocab_size} rows of which the model uses {used}, want all in use; fix: "
            f"model.resize_token_embeddings({used})"
        )
    if text.model_type in _DIVISORS_BEFORE_THE_HEAD:
        transform["logit_scale"] /= _number(text, _DIVISORS_BEFORE_THE_HEAD[text.model_type])
    return transform


def transformed(x: Tensor, transform: ScaleAndCap) -> Tensor:
    """The logits: softcap(logit_scale * x)."""
    scaled, cap = x * transform["logit_scale"], transform["softcap"]
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


def mismatch(x: Tensor, logits: Tensor, transform: ScaleAndCap) -> str:
    """How `logits` are others than the transform makes of `x`, for an error; nothing where they are the same."""
    want = transformed(x.to(compute_dtype(x)), transform)
    if logits.shape != want.shape:
        return f"logits {tuple(want.shape)} to {tuple(logits.shape)}"
    close = is_close(x, logits, want)
    if bool(close.all()):
        return ""
    at = int((~close).flatten().nonzero()[0])
    value, got, wanted = (z.flatten()[at].item() for z in (x, logits, want))
    return f"a logit of {value:.6g} to {got:.6g}, want {wanted:.6g}"


def is_close(x: Tensor, logits: Tensor, want: Tensor) -> Tensor:
    """Which logits are `want` but for a few roundings; some operations may be in fp32 where the rest is in fp64."""
    eps = max(torch.finfo(dtype).eps for dtype in (x.dtype, torch.float32))
    return torch.isclose(logits.detach().to(want), want, rtol=8 * eps, atol=1e-6)


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else value
