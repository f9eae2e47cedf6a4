"""What a vLLM server says about itself, and whether a trainer can use a server that was started like that."""

from __future__ import annotations

import logging
from typing import NamedTuple

import httpx
import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.server.replicas import Replica, RequestError, understood
from fused_grpo.trainer.engines.weights import Tie

_log = logging.getLogger(__name__)


class ServerFacts(NamedTuple):
    """What a server says about itself."""

    version: str
    model_name: str
    max_model_len: int
    logprobs_mode: str
    on_cpu: bool
    dtype: torch.dtype  # of the weights
    weight_transfer: str | None  # the backend of --weight-transfer-config

    def check(self, url: str, *, max_model_len: int | None) -> None:
        """Raise InputError where a trainer cannot use a server that was started like this."""
        _log.info("%s: vLLM %s, %d tokens", url, self.version, self.max_model_len)
        if self.logprobs_mode != "processed_logprobs":
            raise InputError(
                f"got a server at {url} with --logprobs-mode {self.logprobs_mode}, want processed_logprobs, of the "
                "distribution that was sampled; fix: restart it with --logprobs-mode processed_logprobs"
            )
        if max_model_len is not None and self.max_model_len < max_model_len:
            raise InputError(
                f"got a server at {url} for {self.max_model_len} tokens, want {max_model_len} (prompt and completion); "
                f"fix: restart it with --max-model-len {max_model_len}, or shorten either"
            )


async def facts_of(client: httpx.AsyncClient, replica: Replica) -> ServerFacts:
    """Ask a server that is up.

    Errors:
        InputError: it is not in development mode.
        RequestError: it does not answer as vLLM does.
    """
    models = await replica.ask(client, "GET", "/v1/models")
    try:
        info = await replica.ask(client, "GET", "/server_info?config_format=json")
    except RequestError as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise
        raise InputError(
            f"got a server at {replica.url} without /server_info and /collective_rpc, want them for weight sync; "
            "fix: restart it with the environment variable VLLM_SERVER_DEV_MODE=1"
        ) from error
    version = await replica.ask(client, "GET", "/version")
    with understood("/v1/models, /server_info or /version"):
        config, model = info["vllm_config"], models["data"][0]
        transfer = config.get("weight_transfer_config") or {}
        dtype = getattr(torch, str(config["model_config"]["dtype"]).removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{dtype} is no dtype")
        return ServerFacts(
            version=replica.quoted(version["version"], length=100),
            model_name=str(model["id"]),
            max_model_len=int(model["max_model_len"]),
            logprobs_mode=replica.quoted(config["model_config"]["logprobs_mode"], length=100),
            on_cpu=config["device_config"]["device"] == "cpu",
            dtype=dtype,
            weight_transfer=transfer.get("backend"),
        )


async def check_untied(client: httpx.AsyncClient, replica: Replica, tie: Tie) -> None:
    """Raise where vLLM's CPU build serves a tied head: it would stay behind at every sync. See weights.py."""
    held = await checksums(client, replica)
    if held is not None and tie.head not in held:
        raise InputError(
            f"got a server at {replica.url} that ties {tie.head} to the embedding, want weights of its own: vLLM's CPU "
            "build never updates a tied head; fix: serve the folder that server_folder(model, tokenizer, DIR) writes"
        )


async def checksums(client: httpx.AsyncClient, replica: Replica) -> dict[str, set[str]] | None:
    """The sha256 sums of each weight that the server has: one where all its workers hold the same.

    None where it is too old to tell, which is logged once.
    """
    if not replica.has_checksums:
        return None
    try:
        answer = await replica.ask(client, "POST", "/weight_checker", {"action": "checksum"})
    except RequestError as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise
        replica.has_checksums = False
        _log.warning("%s has no /weight_checker; the values of its weights are not compared", replica.url)
        return None
    held: dict[str, set[str]] = {}
    with understood("/weight_checker"):
        for name, digest in answer["checksums"].items():  # by worker, as "dp0:pp0:pcp0:tp0:model.norm.weight"
            held.setdefault(name.rpartition(":")[2], set()).add(str(digest))
    if not held:
        raise RequestError("no checksum of any weight from /weight_checker")
    return held
