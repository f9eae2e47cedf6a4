"""vLLM in this process with a LoRA adapter beside the base model: a sync loads the adapter alone.

The base model is frozen, so it is loaded once. After that a sync writes the adapter (megabytes, to shared memory) and
vLLM loads it in place of the last one; the file is removed before the next `generate`. Measured on a CPU in fp32, with
a model of two layers: vLLM takes 2 ms to load it, and log-probs are within 2e-5 of the trainer's. The price is in
sampling: every layer multiplies with A and B too, which merged weights (VLLMEngine, the default) avoid.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from fused_grpo.errors import InputError, UnsupportedError, WeightSyncError
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine
from fused_grpo.trainer.engines.vllm.preserved_state import preserved_state
from fused_grpo.trainer.engines.vllm.start_vllm import check_installed
from fused_grpo.trainer.engines.weight_files import temporary_folder
from fused_grpo.trainer.models.adapters import ADAPTER_FILE, adapter_weights, base_model, base_weights

# Warns that an adapter's own tokenizer is ignored: this one has none.
_NAME = "policy"


class VLLMAdapterEngine(VLLMEngine):
    """A VLLMEngine with the weights of the base model, and the adapter of the PeftModel that is trained.

    `load_weights` loads the adapter that the model has at that moment; `named_weights` is not read.

    Args:
        model: the trainer's PeftModel.
        tokenizer: its tokenizer.
        engine_options: as in VLLMEngine.
        options: all other arguments of VLLMEngine.

    Raises:
        UnsupportedError: an adapter that vLLM has no layers for: DoRA, biases, trained copies of modules, and
            adapters on parameters (experts), on the head or on the embedding; fp32 on a GPU.
        InputError: a rank above the largest that vLLM has.
    """

    # Level 1 keeps the base model in the CPU's memory. Level 2 would discard it, and it is sent once.
    _sleep_level = 1
    _has_base = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        dtype: str | torch.dtype,
        engine_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_installed()
        self._adapted = model
        self._config = model.peft_config[model.active_adapters[0]]
        _check_servable(model, self._config)
        if next(model.parameters()).device.type != "cpu" and str(dtype).endswith("float32"):
            raise UnsupportedError(
                "got a vllm engine in float32 on a GPU with vllm_adapter_sync, want 16 bits, all that vLLM's kernels "
                "for adapters take there; fix: bf16=True, or vllm_adapter_sync=False, which serves merged weights"
            )
        lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": _rank_of_engine(self._config)}
        super().__init__(
            base_model(model), tokenizer, dtype=dtype, engine_options={**lora, **(engine_options or {})}, **options
        )

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the adapter into the engine; after the start, the base model too. See RolloutEngine.

        Raises:
            WeightSyncError: the engine sleeps; or vLLM refused the weights, and is closed.
            UnavailableError: the engine is closed.
        """
        if not self._has_base or self._asleep:
            super().load_weights(base_weights(self._adapted, self.weight_dtype), version)
            self._has_base = True
        self.weight_version = -1
        engine = self._engine()
        try:
            self._load_adapter(engine)
        except Exception as error:
            self.close()
            raise WeightSyncError(
                f"got {type(error).__name__} from vLLM while loading the adapter of version {version}, and closed the "
                f"engine: {error}; want an adapter that vLLM can serve; fix: vllm_adapter_sync=False"
            ) from error
        # Keys and values of the old adapter are wrong for the new one: to vLLM both have one name.
        engine.reset_prefix_cache()
        self.weight_version = version

    def _load_adapter(self, engine: Any) -> None:
        weights = {name: weight.detach().contiguous() for name, weight in adapter_weights(self._adapted).items()}
        size = sum(weight.nbytes for weight in weights.values())
        with temporary_folder(size) as folder, preserved_state():
            save_file(weights, folder / ADAPTER_FILE)
            self._config.save_pretrained(str(folder))
            engine.llm_engine.add_lora(self._request(folder, load_inplace=True))
        self._lora_request = self._request(folder)

    def _request(self, folder: Path, *, load_inplace: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(_NAME, 1, str(folder), load_inplace=load_inplace)


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
    for name, holds in reasons.items():
        if holds:
            raise UnsupportedError(
                f"got {name} with vllm_adapter_sync, want what vLLM serves: low-rank updates of the linear layers "
                "inside; fix: vllm_adapter_sync=False, which serves merged weights"
            )


def _rank_of_engine(config: Any) -> int:
    """The smallest of vLLM's ranks that holds the adapter's."""
    from vllm.config.lora import MaxLoRARanks

    largest = max([config.r, *config.rank_pattern.values()])
    ranks = [rank for rank in sorted(get_args(MaxLoRARanks)) if rank >= largest]
    if not ranks:
        raise InputError(f"got an adapter of rank {largest}, want at most {max(get_args(MaxLoRARanks))} in vLLM")
    return int(ranks[0])
