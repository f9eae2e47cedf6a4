"""What a vLLM server says about itself, and whether a trainer can use a server that was started like that."""

from __future__ import annotations

import logging
from typing import NamedTuple

import httpx

from fused_grpo.errors import InputError
from fused_grpo.trainer.rollout.replicas import Replica, RequestError, understood
from fused_grpo.trainer.rollout.weights import Tie

_log = logging.getLogger(__name__)


class ServerFacts(NamedTuple):
    """What a server says about itself."""

    version: str
    model_name: str
    max_model_len: int
    logprobs_mode: str
    on_cpu: bool
    dtype: str  # of the weights, as "bfloat16"
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
        return ServerFacts(
            version=str(version["version"]),
            model_name=str(model["id"]),
            max_model_len=int(model["max_model_len"]),
            logprobs_mode=config["model_config"]["logprobs_mode"],
            on_cpu=config["device_config"]["device"] == "cpu",
            dtype=str(config["model_config"]["dtype"]).removeprefix("torch."),
            weight_transfer=transfer.get("backend"),
        )


async def check_untied(client: httpx.AsyncClient, replica: Replica, tie: Tie) -> None:
    """Raise where vLLM's CPU build serves a tied head: it would stay behind at every sync. See weights.py."""
    if not any(name.endswith(f":{tie.head}") for name in await checksums(client, replica)):
        raise InputError(
            f"got a server at {replica.url} that ties {tie.head} to the embedding, want weights of its own: vLLM's CPU "
            "build never updates a tied head; fix: serve the folder that server_folder(model, tokenizer, DIR) writes"
        )


async def checksums(client: httpx.AsyncClient, replica: Replica) -> dict[str, str]:
    """The sha256 of each weight that the server has, by worker and name, as "dp0:pp0:pcp0:tp0:model.norm.weight"."""
    answer = await replica.ask(client, "POST", "/weight_checker", {"action": "checksum"})
    with understood("/weight_checker"):
        return {str(name): str(digest) for name, digest in answer["checksums"].items()}
