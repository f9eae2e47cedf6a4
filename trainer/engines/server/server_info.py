"""The configuration that a vLLM server reports, and whether a trainer can use such a server."""

from __future__ import annotations

import logging
from typing import NamedTuple

import httpx
import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.config.trl_fields import warn_once
from fused_grpo.trainer.engines.server.answers import Model, VLLMConfig
from fused_grpo.trainer.engines.server.replicas import Replica, RequestError
from fused_grpo.trainer.engines.server.served_model import ModelFacts
from fused_grpo.trainer.engines.weight_files import Tie

_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16, "torch.float32": torch.float32}

_log = logging.getLogger(__name__)


class ServerInfo(NamedTuple):
    """What a trainer needs to know about a server."""

    model_name: str
    max_model_len: int
    weight_transfer: object  # the backend of --weight-transfer-config
    dtype: torch.dtype | None  # what it computes in; None: one that a trainer does not cast to
    max_logprobs: int  # how many most likely tokens it lists; -1: all


async def server_info(
    client: httpx.AsyncClient, replica: Replica, *, max_model_len: int | None, tie: Tie | None, facts: ModelFacts
) -> ServerInfo:
    """Wait until a server is up, and ask it.

    Args:
        client: the connections.
        replica: the server.
        max_model_len: longest prompt plus completion that it must accept. None: its own limit.
        tie: the tied head of the trainer's model, where it has one.
        facts: of the trainer's model.

    Raises:
        InputError: a server with another model, or started with options that a trainer cannot use; names the option.
        RequestError: its responses are not vLLM's.
    """
    await replica.wait_until_ready(client)
    models = await replica.ask(client, "/v1/models", field="data", kind=list[Model])
    if not models:
        raise RequestError("no model in /v1/models")
    config, limit = await _in_development_mode(client, replica), models[0].max_model_len
    version = await replica.ask(client, "/version", field="version", kind=str)
    _log.info("%s: vLLM %s, %d tokens", replica.url, replica.redacted(version)[:100], limit)
    mode = replica.redacted(config.model_config.logprobs_mode)[:100]
    if mode != "processed_logprobs":
        raise InputError(
            f"got a server at {replica.url} with --logprobs-mode {mode}, want processed_logprobs, of the "
            "distribution that was sampled; fix: restart it with --logprobs-mode processed_logprobs"
        )
    if max_model_len is not None and limit < max_model_len:
        raise InputError(
            f"got a server at {replica.url} for {limit} tokens, want {max_model_len} (prompt and completion); "
            f"fix: restart it with --max-model-len {max_model_len}, or shorten either"
        )
    await check_model(client, replica, facts)
    if tie is not None and config.device_config.get("device") == "cpu":
        await _check_untied(client, replica, tie)
    model, backend = config.model_config, (config.weight_transfer_config or {}).get("backend")
    return ServerInfo(models[0].id, limit, backend, _DTYPES.get(str(model.dtype)), model.max_logprobs)


async def check_model(client: httpx.AsyncClient, replica: Replica, facts: ModelFacts) -> None:
    """Compare the model of a server with the trainer's; warn where the server does not say what it has.

    Raises:
        InputError: it is another model.
    """
    call = {"method": "get_model_inspection"}
    try:
        printed = await replica.ask(client, "/collective_rpc", call, field="results", kind=list[str])
    except RequestError as error:
        reason = replica.redacted(str(error))[:300]
        warn_once(f"{replica.url} does not say which model it has ({reason}): weights of another model would ruin it")
    else:
        facts.check(replica.url, "\n".join(printed))


async def _in_development_mode(client: httpx.AsyncClient, replica: Replica) -> VLLMConfig:
    try:
        return await replica.ask(client, "/server_info?config_format=json", field="vllm_config", kind=VLLMConfig)
    except RequestError as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise
        raise InputError(
            f"got a server at {replica.url} without /server_info and /collective_rpc, want them for weight sync; "
            "fix: restart it with the environment variable VLLM_SERVER_DEV_MODE=1"
        ) from error


async def _check_untied(client: httpx.AsyncClient, replica: Replica, tie: Tie) -> None:
    """Raise where vLLM's CPU build serves a tied head, which would be stale after every sync (see weight_files.py)."""
    try:
        call, kind = {"action": "checksum"}, dict[str, str]
        sums = await replica.ask(client, "/weight_checker", call, field="checksums", kind=kind)
    except RequestError as error:
        if error.status != httpx.codes.NOT_FOUND:  # of a vLLM that is too old for this route
            raise
        return
    # By worker, as "dp0:pp0:pcp0:tp0:model.norm.weight".
    if tie.head not in {name.rpartition(":")[2] for name in sums}:
        raise InputError(
            f"got a server at {replica.url} that ties {tie.head} to the embedding, want weights of its own: vLLM's CPU "
            "build never updates a tied head; fix: serve the folder that server_folder(model, tokenizer, DIR) writes"
        )
