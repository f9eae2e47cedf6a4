"""An adapter that vLLM serves beside its base model, in process or on servers: which it can, and the files it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer.engines.weight_files import temporary_folder
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, base_model
from fused_grpo.trainer.models.weight_stream import WeightStream


class ServedAdapter:
    """The trained adapter of a PeftModel; UnsupportedError for one that vLLM has no layers for.

    `rank` is the largest of its layers'.
    """

    def __init__(self, model: Any) -> None:
        self._config = model.peft_config[model.active_adapters[0]]
        _check_servable(model, self._config)
        self.rank = max([self._config.r, *self._config.rank_pattern.values()])

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


def _check_servable(model: Any, config: Any) -> None:
    base = base_model(model)
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
