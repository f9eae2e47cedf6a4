"""vLLM behind plain OpenAI servers that the user started: one or several replicas, on this machine by default.

Nothing of ours runs in the server. It is asked for completions of token ids, with token ids and log-probs back, one
request per prompt so that each has a seed of its own; with the same seeds it draws what the in-process engine draws.
New weights go over through the routes that VLLM_SERVER_DEV_MODE=1 opens (weight_transfer.py). `replicas` has what can
go wrong in between, `vllm_serve` how to start a server, docs/engines.md the whole story.

In a run over several processes each of them samples its own prompts; the first one alone moves the weights.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import httpx
import torch
from torch import Tensor

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer.engines.engine import RolloutEngine
from fused_grpo.trainer.engines.sampling import (
    SEED_BITS,
    VLLM_EXTRAS,
    check_extra,
    check_prompts,
    prompt_seeds,
    stop_token_ids,
)
from fused_grpo.trainer.engines.server.choose_transfer import choose_transfer
from fused_grpo.trainer.engines.server.facts import ServerFacts, check_untied, facts_of
from fused_grpo.trainer.engines.server.replicas import Json, Replica, Replicas, RequestError
from fused_grpo.trainer.engines.server.weight_transfer import SentValues, TransferName
from fused_grpo.trainer.engines.weights import Tie
from fused_grpo.trainer.types import FinishReason, Rollouts, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_RESET_ATTEMPTS = 20


class VLLMServerEngine(RolloutEngine):
    """A RolloutEngine over vLLM servers.

    Sampling log-probs are those of the distribution after temperature and truncation; with temperature 0, of the
    untempered one. The servers have their own initial weights: `load_weights` comes before the first `generate`.

    Args:
        model: the trainer's causal LM, which the servers serve an architecture of.
        tokenizer: its tokenizer.
        base_urls: of the servers, as "http://127.0.0.1:8000".
        timeout: seconds in which each call (start, generate, load_weights) ends, with a result or an error.
        max_model_len: longest prompt plus completion that the servers must take. None: as much as they take.
        seed: of the calls whose sampling brings no seed.
        allow_remote: take URLs that are not on this machine.
        api_key: what the servers' --api-key says. vLLM guards completions with it, but not weight sync.
        weight_transfer: how weights go over: "files", "nccl" (GPUs), or "auto"; see choose_transfer.
        weights_directory: of the files, a folder that the servers can read too. None: shared memory.
        max_concurrency: prompts that the servers work on at a time.

    Errors:
        InputError: URLs that cannot be used, or a server that was started with options that do not fit.
        UnavailableError: a server that does not answer in time, or a weight transfer that cannot run here.
    """

    name = "vllm-server"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base_urls: Sequence[str],
        timeout: float = 240.0,
        max_model_len: int | None = None,
        seed: int = 0,
        allow_remote: bool = False,
        api_key: str | None = None,
        weight_transfer: TransferName = "auto",
        weights_directory: str | None = None,
        max_concurrency: int = 256,
    ) -> None:
        self._replicas = Replicas(
            base_urls, allow_remote=allow_remote, api_key=api_key, max_concurrency=max_concurrency, timeout=timeout
        )
        self._tie = Tie.of(model)
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._seeds = random.Random(seed)
        self._closed = False
        self.weight_version, self._tag = -1, ""
        facts = self._replicas.run(lambda client: self._meet(client, max_model_len), doing="getting ready")
        self._max_model_len = min(server.max_model_len for server in facts)
        self._model_name = facts[0].model_name
        self._transfer = choose_transfer(weight_transfer, self._replicas, facts, directory=weights_directory)
        self._values = SentValues.of(model, facts[0].dtype)

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        """`sampling.n` completions for each prompt, spread over the servers; see RolloutEngine.

        Errors:
            InputError: an empty prompt, one that leaves no room for `sampling.max_tokens`, or refused options.
            WeightSyncError: no weights were loaded since the engine was made, or since a sync that failed.
            UnavailableError: the engine is closed, or the servers did not answer, or not with what was asked.
        """
        self._check_open()
        if self.weight_version < 0:
            raise WeightSyncError(
                f"got generate before weights were loaded into {self._replicas}, want the trainer's first; "
                "fix: load_weights(...), and after one that failed restart the server"
            )
        check_prompts(prompt_ids, max_tokens=sampling.max_tokens, max_model_len=self._max_model_len)
        check_extra(sampling, allowed=VLLM_EXTRAS, engine=self.name)
        prompts = [list(prompt) for prompt in prompt_ids]
        seed = self._seeds.getrandbits(SEED_BITS) if sampling.seed is None else sampling.seed
        bodies = [
            self._request(prompt, sampling, seed=prompt_seed)
            for prompt, prompt_seed in zip(prompts, prompt_seeds(seed, len(prompts)), strict=True)
        ]
        groups = self._replicas.run(
            lambda client: self._replicas.complete(client, bodies, tag=self._tag, read=_completions),
            doing=f"completing {len(prompts)} prompts",
        )
        # Greedy completions of one prompt are equal, and vLLM makes one of them only.
        repeats = sampling.n if sampling.temperature == 0 else 1
        completions = [completion for group in groups for completion in group * repeats]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=[completion.token_ids for completion in completions],
            sampling_logprobs=[completion.logprobs for completion in completions],
            finish_reasons=[completion.finish_reason for completion in completions],
            num_generations=sampling.n,
            weight_version=self.weight_version,
        )

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Bring all servers to these weights (checkpoint names, full tensors, any float dtype); see RolloutEngine.

        With a process group, every rank calls this; the first one's weights are taken.

        Errors:
            WeightSyncError: not every server has taken them, or the engine is closed. None is sampled from until a sync
                succeeds.
        """
        self.weight_version, self._tag = -1, f"{uuid.uuid4().hex}:{version}"
        weights = named_weights if self._tie is None else self._tie.undo(named_weights)
        self._tag = _by_first_rank(lambda: self._publish(weights, self._tag), version=version)
        self.weight_version = version

    def close(self) -> None:
        """Leave the servers, which are the user's and stay up."""
        self._closed = True
        self._transfer.close()

    async def _meet(self, client: httpx.AsyncClient, max_model_len: int | None) -> list[ServerFacts]:
        async def meet(replica: Replica) -> ServerFacts:
            await self._replicas.wait_until_ready(client, replica)
            facts = await facts_of(client, replica)
            facts.check(replica.url, max_model_len=max_model_len)
            if self._tie is not None and facts.on_cpu:
                await check_untied(client, replica, self._tie)
            return facts

        return await self._replicas.on_each(meet)

    def _publish(self, weights: Iterable[tuple[str, Tensor]], tag: str) -> str:
        self._check_open()  # here, where the other ranks hear of it
        self._transfer.send(weights if self._values is None else self._values.noted(weights))
        self._replicas.run(lambda client: self._commit(client, tag), doing="checking the new weights")
        return tag

    async def _commit(self, client: httpx.AsyncClient, tag: str) -> None:
        """Make what was sent a version, on every server: nothing of the old one is left, and it says so itself."""

        async def commit(replica: Replica) -> None:
            await _forget_prefixes(client, replica)
            if await replica.tag(client) is not None:
                await replica.ask(client, "POST", "/update_weight_version", {"new_version": tag})
                if (found := await replica.tag(client)) != tag:
                    raise RequestError(f"weight version {found!r} after it was set to {tag!r}")
            if self._values is not None:
                await self._values.check(client, replica)

        await self._replicas.on_each(commit)

    def _request(self, prompt: list[int], sampling: SamplingParams, *, seed: int) -> Json:
        regex = sampling.structured_outputs_regex
        body = {
            "model": self._model_name,
            "prompt": prompt,
            "n": sampling.n if sampling.temperature > 0 else 1,
            "max_tokens": sampling.max_tokens,
            # All of them, since the server takes what is missing from the model's generation config.
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **sampling.extra,
            "stop_token_ids": sorted({*self._stop_ids, *sampling.extra.get("stop_token_ids", [])}),
        }
        return body if regex is None else {**body, "structured_outputs": {"regex": regex}}

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(
                "got a call on a closed vllm-server engine, want an open one; fix: make a new engine"
            )


class Completion(NamedTuple):
    """One completion as the server reports it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


async def _forget_prefixes(client: httpx.AsyncClient, replica: Replica) -> None:
    """Keys and values of the old weights are wrong for the new ones. Blocks in use cannot go; requests end soon."""
    for _ in range(_RESET_ATTEMPTS):
        if (await replica.ask(client, "POST", "/reset_prefix_cache")).get("success", True):
            return
        await asyncio.sleep(0.1)
    raise RequestError("success=false from /reset_prefix_cache: it is still sampling for somebody else")


def _completions(body: Json, answer: Json) -> list[Completion]:
    """The completions of one prompt: as many as were asked for, each checked to be whole."""
    choices = sorted(answer.get("choices", []), key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(body["n"])):
        raise RequestError(f"completions {[choice['index'] for choice in choices]} where {body['n']} were asked for")
    return [_completion(choice) for choice in choices]


def _completion(choice: Json) -> Completion:
    token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if choice["finish_reason"] not in ("stop", "length"):
        raise RequestError(f"a completion that ended with {choice['finish_reason']!r}", retry=True)
    if not token_ids or logprobs is None or len(logprobs) != len(token_ids):
        raise RequestError(f"{len(token_ids or [])} token ids with {len(logprobs or [])} log-probs")
    if not {*map(type, token_ids), *map(type, logprobs)} <= {int, float}:
        raise RequestError("token ids or log-probs that are no numbers")
    return Completion(token_ids, logprobs, choice["finish_reason"])


def _by_first_rank(action: Callable[[], str], *, version: int) -> str:
    """What `action` returns on the first rank, everywhere; where it fails, the same error on all ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    outcome: list[str | None] = [None, None]
    cause: Exception | None = None
    if not distributed or torch.distributed.get_rank() == 0:
        try:
            outcome = [action(), None]
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            outcome, cause = [None, f"{error}"], error
    if distributed:
        torch.distributed.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if result is None:
        raise WeightSyncError(
            f"got weight version {version} not on every server: {failure}; want all of them to take what the trainer "
            "sends; fix: the same architecture in server and trainer, and a restart of a server that refused; through "
            "files also the same machine and user, and space for the weights in shared memory"
        ) from cause
    return result
