"""The configuration that a vLLM server reports, and whether a trainer can use such a server."""

from __future__ import annotations

import logging
from typing import NamedTuple

import httpx
import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.server.replicas import Json, Replica, RequestError, parsing
from fused_grpo.trainer.engines.weight_files import Tie

_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16, "torch.float32": torch.float32}

_log = logging.getLogger(__name__)


class ServerInfo(NamedTuple):
    """What a trainer needs to know about a server."""

    model_name: str
    max_model_len: int
    weight_transfer: str | None  # the backend of --weight-transfer-config
    dtype: torch.dtype | None  # what it computes in; None: one that a trainer does not cast to
    max_logprobs: int  # how many most likely tokens it lists; -1: all


async def server_info(
    client: httpx.AsyncClient, replica: Replica, *, max_model_len: int | None, tie: Tie | None
) -> ServerInfo:
    """Ask a server that is up.

    Args:
        client: the connections.
        replica: the server.
        max_model_len: longest prompt plus completion that it must accept. None: its own limit.
        tie: the tied head of the trainer's model, where it has one.

    Raises:
        InputError: a server that was started with options that a trainer cannot use; names the option.
        RequestError: its responses are not vLLM's.
    """
    models = await replica.request(client, "GET", "/v1/models")
    info = await _in_development_mode(client, replica)
    version = await replica.request(client, "GET", "/version")
    with parsing("/v1/models, /server_info or /version"):
        config, model = info["vllm_config"], models["data"][0]
        name, limit, mode = str(model["id"]), int(model["max_model_len"]), config["model_config"]["logprobs_mode"]
        mode = replica.redacted(str(mode))[:100]
        transfer = (config.get("weight_transfer_config") or {}).get("backend")
        dtype = _DTYPES.get(str(config["model_config"].get("dtype")))
        max_logprobs = int(config["model_config"].get("max_logprobs", 0))
        on_cpu = config["device_config"]["device"] == "cpu"
        _log.info("%s: vLLM %s, %d tokens", replica.url, replica.redacted(str(version["version"]))[:100], limit)
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
    if tie is not None and on_cpu:
        await _check_untied(client, replica, tie)
    return ServerInfo(name, limit, transfer, dtype, max_logprobs)


async def _in_development_mode(client: httpx.AsyncClient, replica: Replica) -> Json:
    try:
        return await replica.request(client, "GET", "/server_info?config_format=json")
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
        answer = await replica.request(client, "POST", "/weight_checker", {"action": "checksum"})
    except RequestError as error:
        if error.status != httpx.codes.NOT_FOUND:  # of a vLLM that is too old for this route
            raise
        return
    with parsing("/weight_checker"):
        # By worker, as "dp0:pp0:pcp0:tp0:model.norm.weight".
        names = {str(name).rpartition(":")[2] for name in answer["checksums"]}
    if tie.head not in names:
        raise InputError(
            f"got a server at {replica.url} that ties {tie.head} to the embedding, want weights of its own: vLLM's CPU "
            "build never updates a tied head; fix: serve the folder that server_folder(model, tokenizer, DIR) writes"
        )
