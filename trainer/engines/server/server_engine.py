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
import logging
import os
import random
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, WeightSyncError
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.sampling import rollouts_of, stop_token_ids, vllm_requests
from fused_grpo.trainer.engines.server.own_server import OwnServer
from fused_grpo.trainer.engines.server.replicas import (
    Json,
    NoRouteError,
    Replica,
    Replicas,
    RequestError,
    asked_again,
)
from fused_grpo.trainer.engines.server.server_info import ADAPTER_PREFIX, ModelFacts, VLLMConfig, Wanted, server_info
from fused_grpo.trainer.engines.server.weight_transfer import TransferName, choose_transfer, load_adapter
from fused_grpo.trainer.engines.turns import ConcurrentSession
from fused_grpo.trainer.engines.weight_files import ServedAdapter, Tie
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.weight_stream import WeightStream
from fused_grpo.trainer.types import Rollouts, SamplingParams

_log = logging.getLogger(__name__)
_RESET_ATTEMPTS = 20
_ADVICE = (
    "; want all of them to load what the trainer sends; fix: the same architecture in server and trainer, and a "
    "restart of a server that refused; through files also the same machine and user, and space in shared memory"
)
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
    _adapter: ServedAdapter | None = None  # of a VLLMServerAdapterEngine
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
            adapter_rank=self._adapter.rank if self._adapter else None,
        )
        limits, configs = zip(*self._replicas.each(self._ready, doing="getting ready"), strict=True)
        served = [config.model_config for config in configs]
        max_listed = min((one.max_logprobs for one in served if one.max_logprobs >= 0), default=-1)
        self._options = partial(
            vllm_requests,
            seeds=random.Random(seed),
            engine=self.name,
            max_model_len=min(limits),
            max_listed=max_listed,
            vocab_size=self._wanted.facts.vocab_size,
        )
        self.weight_dtype = _DTYPES.get(str(served[0].dtype)) if len({one.dtype for one in served}) == 1 else None
        self._transfer = choose_transfer(
            weight_transfer,
            self._replicas,
            configs,
            directory=weights_directory and os.path.abspath(weights_directory),  # servers have another folder
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
        version, top = self._server_version, sampling.top_k_listed
        completions = self._replicas.complete(bodies, weight_version=version, top=top, out=out)
        return rollouts_of(prompts, completions, sampling, weight_version=self.weight_version)

    def turn_session(self, sampling: SamplingParams) -> AbstractContextManager[ConcurrentSession]:
        """A batch of turns that come one after the other, each a request; see engines/turns.py."""
        return nullcontext(ConcurrentSession(partial(self.generate, out={}), sampling))

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load these weights (checkpoint names, full tensors, any float dtype) into all servers; see RolloutEngine.

        With a process group, every rank calls this; the first one's weights are sent, and all ranks succeed or raise.
        None of them samples meanwhile. The first call is made by the main thread. WeightSyncError where not every
        server has loaded them, or the engine is closed; `generate` needs another sync then.
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
        if isinstance(named_weights, WeightStream):
            named_weights.finish()  # on the other ranks, which send nothing, all of them
        advice = "" if isinstance(failure, InputError | UnsupportedError) else _ADVICE  # those have their own
        outcome: list[Any] = [failure and f"{failure}{advice}", self._server_version, self.sync_metrics]
        if distributed:
            torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        problem, self._server_version, self.sync_metrics = outcome
        if problem is not None:
            raise WeightSyncError(f"got weight version {version} not on every server: {problem}") from failure
        self.weight_version = version

    def wake(self) -> None:
        """Connect to the user's servers again, where `train` has closed the engine that a script has passed."""
        self._closed = self._closed and self._own is not None

    def close(self) -> None:
        """Disconnect. The user's servers keep running; one of the trainer's own ends."""
        self._closed = True
        self._transfer.close()
        if self._own is not None:
            self._own.close()

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights into all servers, which have a version afterwards that is unique to this sync."""
        self._check_open()  # on the first rank, whose error all ranks raise
        prefix = ADAPTER_PREFIX if self.takes_adapter else ""
        server_version = f"{prefix}{uuid.uuid4().hex}:{version}"
        self._replicas.each(self._compare, doing="comparing models")
        stream = WeightStream.of(weights)
        if not self.sync_metrics:
            _log.info("a sync sends %.3f MB to %s", stream.nbytes / 1e6, self._replicas)
        begun = f"{server_version}:begun"  # of no weights: another trainer finds that its own version is gone
        self._replicas.each(partial(_set_version, version=begun), doing="beginning a sync")
        self._transfer_weights(stream, server_version)
        self.sync_metrics = {"weight_sync/bytes": float(stream.nbytes), **self._transfer.metrics}
        finish = partial(_finish_sync, begun=begun, server_version=server_version)
        self._replicas.each(finish, doing="setting the weight version")
        self._server_version = server_version

    async def _ready(self, client: httpx.AsyncClient, replica: Replica) -> tuple[int, VLLMConfig]:
        await replica.wait_until_ready(client)
        return await server_info(client, replica, self._wanted)

    async def _compare(self, client: httpx.AsyncClient, replica: Replica) -> None:
        """Before the first sync, and of a server that was restarted since: perhaps with other options."""
        if not await replica.has_weight_version(client, self._server_version):
            await server_info(client, replica, self._wanted)

    def _transfer_weights(self, weights: WeightStream, server_version: str) -> None:
        self._transfer.send(weights)

    def _body(self, prompt: list[int], options: Json, sampling: SamplingParams) -> Json:
        regex, ends = sampling.structured_outputs_regex, [] if sampling.extra.get("ignore_eos") else self._stop_ids
        return {
            **options,
            # Else what it serves: it has another name on each server that was started with another path.
            **({"model": self._server_version} if self.takes_adapter else {}),
            "prompt": prompt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stop_token_ids": sorted({*ends, *sampling.extra.get("stop_token_ids", [])}),
            **({} if regex is None else {"structured_outputs": {"regex": regex}}),
        }

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(
                "got a call on a closed vllm-server engine, want an open one; fix: make a new engine"
            )


async def _finish_sync(client: httpx.AsyncClient, replica: Replica, *, begun: str, server_version: str) -> None:
    """Drop keys and values of the old weights, and set the version of the new ones."""
    reset = partial(replica.request, client, "POST", "/reset_prefix_cache")
    for _ in range(_RESET_ATTEMPTS):  # vLLM refuses while a request uses the cache
        if await asked_again(reset) != {"success": False}:
            break
        await asyncio.sleep(0.1)
    else:
        raise RequestError("success=false from /reset_prefix_cache: it is still sampling for another client")
    if not await replica.has_weight_version(client, begun):
        others = "it was restarted, another trainer uses it too, or several servers are behind this address"
        raise RequestError(f"other weights than were sent: {others}")
    await _set_version(client, replica, version=server_version)


async def _set_version(client: httpx.AsyncClient, replica: Replica, *, version: str) -> None:
    body = {"new_version": version}
    with suppress(NoRouteError):
        await asked_again(partial(replica.request, client, "POST", "/update_weight_version", body))


class VLLMServerAdapterEngine(VLLMServerEngine):
    """A VLLMServerEngine whose servers have the base of the trainer's PeftModel, `model`.

    `load_weights` takes the adapter, as `adapter_stream` gives it, through files.

    Raises:
        InputError: a server that was started without LoRA or for a lower rank, or has merged weights of another run.
        UnsupportedError: an adapter that vLLM has no layers for; fp32 on a GPU.
    """

    takes_adapter = True
    _adapter: ServedAdapter

    def __init__(self, model: Any, tokenizer: Any, *, weights_directory: str | None = None, **options: Any) -> None:
        self._adapter, self._directory = ServedAdapter(model), weights_directory and os.path.abspath(weights_directory)
        super().__init__(base_model(model), tokenizer, weight_transfer="files", full_sync_interval=1, **options)

    def _transfer_weights(self, weights: WeightStream, server_version: str) -> None:
        with self._adapter.folder(weights, directory=self._directory) as folder:
            load = partial(load_adapter, name=server_version, path=str(folder))
            self._replicas.each(load, doing="loading the adapter")
