"""vLLM behind OpenAI-compatible servers (`vllm serve`): replicas of the user's, or one of the trainer's own.

A server gets token ids and returns token ids with log-probs, one request per prompt so that each has a seed of its own;
the same seeds give the completions of the in-process engine. In a run over several processes each samples its own
prompts, and the first one alone sends the weights. See also docs/engines.md.

**An adapter alone** (docs/lora.md) is sent to servers that have the base model. The weight version of a sync is its
name there, and requests name it as their model: a server that was restarted since does not know it, and cannot sample
from its base by mistake. No request is in flight during a sync, so older adapters are unloaded then.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import random
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, cast

import httpx
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fused_grpo.errors import InputError, UnavailableError, WeightSyncError, shown
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.sampling import (
    Completion,
    as_experts,
    listed_support,
    rollouts_of,
    stop_token_ids,
    vllm_requests,
)
from fused_grpo.trainer.engines.server.own_server import OwnServer
from fused_grpo.trainer.engines.server.replicas import Choice, Json, NoRouteError, Replica, Replicas, RequestError
from fused_grpo.trainer.engines.server.server_info import (
    Model,
    ModelFacts,
    ServerInfo,
    VLLMConfig,
    Wanted,
    environment,
    server_info,
)
from fused_grpo.trainer.engines.server.weight_transfer import TransferName, choose_transfer
from fused_grpo.trainer.engines.turns import ConcurrentSession
from fused_grpo.trainer.engines.weight_files import ServedAdapter, Tie, check_precision
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.weight_stream import WeightStream, finish
from fused_grpo.trainer.types import FinishReason, Rollouts, SamplingParams

_log = logging.getLogger(__name__)
_RESET_ATTEMPTS = 20
_PREFIX, _UPDATING = "fused-grpo-adapter-", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16, "torch.float32": torch.float32}


class VLLMServerEngine(RolloutEngine):
    """A RolloutEngine over vLLM servers.

    The servers have their own initial weights: `load_weights` comes before the first `generate`.

    Args:
        model: the trainer's causal LM, which the servers serve an architecture of.
        base_urls: the servers, as "http://127.0.0.1:8000".
        timeout: seconds in which each call (start, generate, load_weights) ends, with a result or an error. None: no
            limit.
        max_model_len: longest prompt plus completion that the servers must accept. None: their own limit.
        seed: the seed of calls without `sampling.seed`.
        allow_remote: allow URLs that are not on this machine.
        api_key: the servers' --api-key. vLLM protects completions with it, but not weight sync.
        weight_transfer: the way of the weights: "files", "nccl" (experimental), or "auto"; see choose_transfer.
        full_sync_interval: syncs from one that sends all weights to the next; those between send what changed.
        weights_directory: the parent of the weight files, which the servers can read too. None: shared memory.
        max_concurrency: the number of prompts that are sampled at a time.
        support: the sampling of which supports or the most likely tokens are wanted. None: neither.
        batch_invariant: want servers that were started with VLLM_BATCH_INVARIANT=1.
        routed_experts: want servers that were started with --enable-return-routed-experts.
        own: a server that this process has started, in the place of `base_urls`. It is this rank's alone, which sends
            it the weights, and ends with the engine.

    Raises:
        InputError: URLs that cannot be used, or a server that was started with options that do not fit.
        UnsupportedError: score centering that needs more log-probs than a server lists.
        UnavailableError: a server that does not respond in time, or a weight transfer that cannot run here.
    """

    name = "vllm-server"
    samples_in_background = first_rank_sends = True
    _prefix = ""  # of the weight versions on the servers
    why_no_support = "it needs top_k of 1 to 1024, and servers with --max-logprobs of 1.5 * top_k + 8 at least"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base_urls: Sequence[str] = (),
        timeout: float | None = 240.0,
        max_model_len: int | None = None,
        seed: int = 0,
        allow_remote: bool = False,
        api_key: str | None = None,
        weight_transfer: TransferName = "auto",
        full_sync_interval: int = 1,
        weights_directory: str | None = None,
        max_concurrency: int = 256,
        support: SamplingParams | None = None,
        batch_invariant: bool = False,
        routed_experts: bool = False,
        own: OwnServer | None = None,
    ) -> None:
        self._own, self.first_rank_sends = own, own is None
        # Each rank begins with another server: a rank with fewer prompts than servers would leave the last ones idle.
        first = torch.distributed.get_rank() % max(1, len(base_urls)) if torch.distributed.is_initialized() else 0
        urls = [*base_urls[first:], *base_urls[:first]]
        self._replicas = Replicas(
            urls, allow_remote=allow_remote, api_key=api_key, max_concurrency=max_concurrency, timeout=timeout, own=own
        )
        self._tie = None if self.takes_adapter else Tie.of(model)
        self._stop_ids = stop_token_ids(model.generation_config, tokenizer)
        self._closed, self._group = False, None
        self.weight_version, self._server_version = -1, ""
        self.sync_metrics = dict[str, float]()
        self._wanted = Wanted(
            facts=ModelFacts(model),
            tie=self._tie,
            max_model_len=max_model_len,
            support=support,
            batch_invariant=batch_invariant,
            routed_experts=routed_experts,
            changes=full_sync_interval > 1,
        )
        infos = self._replicas.each(self._ready, doing="getting ready")
        self._model_name = infos[0].model
        configs = [info.config for info in infos]
        served = [config.model_config for config in configs]
        max_listed = min((one.max_logprobs for one in served if one.max_logprobs >= 0), default=-1)
        self._options = partial(
            vllm_requests,
            seeds=random.Random(seed),
            engine=self.name,
            max_model_len=min(info.max_model_len for info in infos),
            max_listed=max_listed,
            vocab_size=self._wanted.facts.vocab_size,
        )
        self.weight_dtype = _DTYPES.get(str(served[0].dtype)) if len({one.dtype for one in served}) == 1 else None
        self._transfer = choose_transfer(
            weight_transfer,
            self._replicas,
            configs,
            directory=weights_directory,
            full_sync_interval=full_sync_interval,
        )

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams, *, out: dict[Replica, str] | None = None
    ) -> Rollouts:
        """Sample `sampling.n` completions for each prompt, spread over the servers; see RolloutEngine.

        `out` are servers that are not asked any more, and why, in all calls that are given it.

        Raises:
            InputError: as `prepared`.
            WeightSyncError: no weights were loaded since the engine was made, or since a sync that failed.
            UnavailableError: the engine is closed, or the servers did not return what was asked for.
        """
        self._check_open()
        if self.weight_version < 0:
            raise WeightSyncError(
                f"got generate before weights were loaded into {self._replicas}, want the trainer's first; "
                "fix: load_weights(...), and after one that failed restart the server"
            )
        prompts, options = self._options(prompt_ids, sampling)
        bodies = [self._body(*each, sampling) for each in zip(prompts, options, strict=True)]
        read = partial(_completions, top=sampling.top_k_listed)
        groups = self._replicas.complete(bodies, weight_version=self._server_version, read=read, out=out)
        return rollouts_of(prompts, [*chain(*groups)], sampling, weight_version=self.weight_version)

    def turn_session(self, sampling: SamplingParams) -> AbstractContextManager[ConcurrentSession]:
        """A batch of turns that come one after the other, each a request; see engines/turns.py."""
        return nullcontext(ConcurrentSession(partial(self.generate, out={}), sampling))

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load these weights (checkpoint names, full tensors, any float dtype) into all servers; see RolloutEngine.

        With a process group, every rank calls this; the first one's weights are sent, and all ranks succeed or raise.
        None of them samples meanwhile. The first call is made by the main thread.

        Raises:
            WeightSyncError: not every server has loaded them, or the engine is closed; `generate` needs another sync.
        """
        self.weight_version = -1
        distributed = self.first_rank_sends and torch.distributed.is_initialized()
        if distributed:
            # Of its own: with `generate_ahead` this is a thread, while the trainer is in collectives of its group.
            self._group = self._group or torch.distributed.new_group(backend="gloo")
            torch.distributed.barrier(self._group)
        failure: Exception | None = None
        if not distributed or torch.distributed.get_rank() == 0:
            try:
                self._send(named_weights if self._tie is None else self._tie.undo(named_weights), version)
            except Exception as error:  # of any type: the other ranks wait for the outcome
                failure = error
        finish(named_weights)  # on the other ranks, which send nothing, all of them
        outcome: list[Any] = [failure and f"{failure}", self._server_version, self.sync_metrics]
        if distributed:
            torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        problem, self._server_version, self.sync_metrics = outcome
        if problem is not None:
            raise WeightSyncError(
                f"got weight version {version} not on every server: {problem}; want all of them to load what the "
                "trainer sends; fix: the same architecture in server and trainer, and a restart of a server that "
                "refused; through files also the same machine and user, and space for the weights in shared memory"
            ) from failure
        self.weight_version = version

    def close(self) -> None:
        """Disconnect. The user's servers keep running; one of the trainer's own ends."""
        self._closed = True
        self._transfer.close()
        if self._own is not None:
            self._own.close()

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights into all servers, which have a version afterwards that is unique to this sync."""
        self._check_open()  # on the first rank, whose error all ranks raise
        server_version = f"{self._prefix}{uuid.uuid4().hex}:{version}"
        self._replicas.each(self._compare, doing="comparing models")
        stream = WeightStream.of(weights)
        if not self.sync_metrics:
            _log.info("a sync sends %.3f MB to %s", stream.nbytes / 1e6, self._replicas)
        self._transfer_weights(stream, server_version)
        self.sync_metrics = {"weight_sync/bytes": float(stream.nbytes), **self._transfer.metrics}
        self._replicas.each(partial(_finish_sync, server_version=server_version), doing="setting the weight version")
        self._server_version = server_version

    async def _ready(self, client: httpx.AsyncClient, replica: Replica) -> ServerInfo:
        await replica.wait_until_ready(client)
        return await self._check(client, replica)

    async def _compare(self, client: httpx.AsyncClient, replica: Replica) -> None:
        """Before the first sync, and of a server that was restarted since: perhaps with other options."""
        if not await replica.has_weight_version(client, self._server_version):
            await self._check(client, replica)

    async def _check(self, client: httpx.AsyncClient, replica: Replica) -> ServerInfo:
        return await server_info(client, replica, self._wanted)

    def _transfer_weights(self, weights: WeightStream, server_version: str) -> None:
        self._transfer.send(weights)

    def _body(self, prompt: list[int], options: Json, sampling: SamplingParams) -> Json:
        regex = sampling.structured_outputs_regex
        return {
            **options,
            "model": self._server_version if self.takes_adapter else self._model_name,
            "prompt": prompt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stop_token_ids": sorted({*self._stop_ids, *sampling.extra.get("stop_token_ids", [])}),
            **({} if regex is None else {"structured_outputs": {"regex": regex}}),
        }

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(
                "got a call on a closed vllm-server engine, want an open one; fix: make a new engine"
            )


async def _finish_sync(client: httpx.AsyncClient, replica: Replica, *, server_version: str) -> None:
    """Drop keys and values of the old weights, and set the version of the new ones."""
    for _ in range(_RESET_ATTEMPTS):  # vLLM refuses while a request uses the cache
        if await replica.request(client, "POST", "/reset_prefix_cache") != {"success": False}:
            break
        await asyncio.sleep(0.1)
    else:
        raise RequestError("success=false from /reset_prefix_cache: it is still sampling for another client")
    with suppress(NoRouteError):
        await replica.request(client, "POST", "/update_weight_version", {"new_version": server_version})


def _completions(body: Json, choices: list[Choice], *, top: int = 0) -> list[Completion]:
    """The completions of one prompt: as many as were asked for, in the order of their index."""
    choices = sorted(choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if indices != list(range(body["n"])):
        raise RequestError(f"completions {indices} where {body['n']} were asked for")
    return [_completion(choice, listed=body["logprobs"] > 0, top=top) for choice in choices]


def _completion(choice: Choice, *, listed: bool, top: int) -> Completion:
    if choice.finish_reason not in ("stop", "length"):
        raise RequestError(f"a completion that ended with {choice.finish_reason!r}", retry=True)
    # Values and lengths are checked with those of all engines, in checked_engine.py.
    support = listed_support(map(_by_id, choice.logprobs.top_logprobs or []), top) if listed else None
    reason = cast(FinishReason, choice.finish_reason)
    experts = None if choice.routed_experts is None else as_experts(_array(choice.routed_experts))
    return Completion(choice.token_ids, choice.logprobs.token_logprobs, reason, support, experts)


def _array(encoded: str) -> Any:
    """The array of whole numbers of an .npy file in base64."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
        if array.dtype.kind not in "ui" or array.ndim != 3:
            raise ValueError(f"numbers of type {array.dtype} and shape {array.shape}")
    except Exception as error:  # of several types, all about this text
        raise RequestError(f"routed_experts that are no array of expert ids ({shown(error, 200)})") from None
    return array


def _by_id(step: dict[str, float]) -> dict[int, float]:
    """The log-probs of one token, under "token_id:5" in the answer."""
    names = [name.removeprefix("token_id:") for name in step]
    if wrong := [name for name in names if not (name.isascii() and name.isdecimal() and len(name) < 10)]:
        raise RequestError(f"kept tokens called {wrong[0][:50]!r}, want token ids")
    return dict(zip(map(int, names), step.values(), strict=True))


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
