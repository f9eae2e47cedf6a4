"""vLLM servers that have the base model, and are sent the adapter alone; docs/lora.md has each step.

The weight version of a sync is the adapter's name there, and requests name it as their model: a server that was
restarted since does not know it, and cannot sample from its base by mistake. No request is in flight during a sync, so
older adapters are unloaded then.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import httpx

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.served_adapter import ServedAdapter, check_precision
from fused_grpo.trainer.engines.server.replicas import NoRouteError, Replica, RequestError
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.engines.server.server_info import Model, ServerInfo, VLLMConfig, environment
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.weight_stream import WeightStream

_PREFIX, _UPDATING = "fused-grpo-adapter-", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class VLLMServerAdapterEngine(VLLMServerEngine):
    """A VLLMServerEngine whose servers have the base of the trainer's PeftModel.

    `load_weights` takes the adapter, as `adapter_stream` gives it.

    Args:
        model: the trainer's PeftModel. All other arguments are those of VLLMServerEngine, except those of transfers.

    Raises:
        InputError: a server that was started without LoRA or for a lower rank, or has merged weights of another run.
        UnsupportedError: an adapter that vLLM has no layers for; fp32 on a GPU.
    """

    takes_adapter = True
    _prefix = _PREFIX

    def __init__(self, model: Any, tokenizer: Any, *, weights_directory: str | None = None, **options: Any) -> None:
        self._adapter, self._directory = ServedAdapter(model), weights_directory
        super().__init__(base_model(model), tokenizer, weight_transfer="files", full_sync_interval=1, **options)

    async def _check(self, client: httpx.AsyncClient, replica: Replica) -> ServerInfo:
        info = await super()._check(client, replica)
        await _check_lora(client, replica, info.config, rank=self._adapter.rank)
        return info

    def _transfer_weights(self, weights: WeightStream, server_version: str) -> None:
        with self._adapter.folder(weights, directory=self._directory) as folder:
            load = partial(_load, name=server_version, path=str(folder))
            self._replicas.each(load, doing="loading the adapter")


async def _load(client: httpx.AsyncClient, replica: Replica, *, name: str, path: str) -> None:
    """Have a server load an adapter, and unload the others that were sent by this engine or an earlier one."""
    load = {"lora_name": name, "lora_path": path}
    await replica.request(client, "POST", "/v1/load_lora_adapter", load, is_json=False)
    listed = await replica.ask(client, "/v1/models", field="data", kind=list[Model])
    names = {model.id for model in listed if model.id.startswith(_PREFIX)}
    if name not in names:
        raise RequestError("no adapter of this sync in /v1/models, though it was loaded")
    for old in names - {name}:
        with suppress(NoRouteError):  # it is unloaded
            await replica.request(client, "POST", "/v1/unload_lora_adapter", {"lora_name": old}, is_json=False)


async def _check_lora(client: httpx.AsyncClient, replica: Replica, config: VLLMConfig, *, rank: int) -> None:
    """InputError, or UnsupportedError, for a server that cannot serve an adapter of that rank on the trainer's base."""
    engine, device = f"a server at {replica.url}", config.device_config.get("device")
    check_precision(config.model_config.dtype, device, engine=engine, fix="restart it with --dtype bfloat16")
    variables, version = await environment(client, replica), "default"
    with suppress(NoRouteError):
        version = await replica.ask(client, "/weight_info", field="weight_version", kind=str)
    api_servers = (config.parallel_config or {}).get("_api_process_count", 1)
    most = 0 if config.lora_config is None else config.lora_config.max_lora_rank
    reasons = {
        "without --enable-lora": config.lora_config is None,
        f"with --max-lora-rank {most}": most < rank,
        f"without {_UPDATING}=True": variables is not None and variables.get(_UPDATING) is not True,
        "with several API servers, of which one knows the adapter": api_servers != 1,
        "that another run has sent merged weights": version != "default" and not version.startswith(_PREFIX),
    }
    if wrong := [name for name, holds in reasons.items() if holds]:
        raise InputError(
            f"got {engine} {wrong[0]}, want one that loads adapters of rank {rank} on the trainer's base, for "
            f"vllm_adapter_sync; fix: restart it with --enable-lora --max-lora-rank {rank} (or more), without "
            f"--api-server-count, and with the environment variable {_UPDATING}=True; or vllm_adapter_sync=False"
        )
