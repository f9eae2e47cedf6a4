"""An engine that needs only transformers: `model.generate` on the trainer's own model.

It samples with the tensors that the optimizer updates, so weights are never copied and never stale. All sequences of a
call are in one batch, with one KV cache, unless `max_sequences` bounds it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import logits_process as library

from fused_grpo.errors import FusedGRPOError, InputError, UnsupportedError
from fused_grpo.integrations.model_modes import as_it_was, replaced
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.sampling import SEED_BITS, Completion, prepared, rollouts_of, stop_token_ids
from fused_grpo.trainer.models.adapters import base_model, is_adapted, model_inputs, with_virtual_places
from fused_grpo.trainer.models.weight_stream import is_sharded
from fused_grpo.trainer.types import FinishReason, ListedTokens, Rollouts, SamplingParams

_BEAMS = (
    "got num_beams above 1 in generation_kwargs: the completions of a beam search are no samples of the policy, and a "
    "gradient that takes them for such is biased, as in TRL; fix: leave it out where you do not want that"
)

# What else of a generation config decides which tokens are sampled, beside SamplingParams and the ends.
_DECIDING = {"bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"}
_DECIDING |= {"exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale"}
_DECIDING |= {"min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams", "sequence_bias", "stop_strings"}
_DECIDING |= {"suppress_tokens", "typical_p", "watermarking_config"}


class TransformersEngine(RolloutEngine):
    """A RolloutEngine on the trainer's own model.

    Args:
        model: the trainer's causal LM, not a copy; or a PeftModel around it, with its virtual tokens if it has some.
        seed: the seed of calls without `sampling.seed`.
        cache_implementation: kind of the KV cache, as in GenerationConfig.
        max_sequences: how many are decoded at a time, which bounds the KV cache. None: all of a call.

    Raises:
        InputError: `max_sequences` below 1.
        UnsupportedError: a model that FSDP2 has sharded.
    """

    name = "transformers"
    has_own_weights = can_sleep = False
    why_no_support = "it needs a model whose `generate` calls logits processors, and no beams"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        cache_implementation: str | None = None,
        max_sequences: int | None = None,
    ) -> None:
        if max_sequences is not None and max_sequences < 1:
            raise InputError(f"got max_sequences={max_sequences}, want at least 1, or None for all of a call")
        if any(map(is_sharded, model.parameters())):
            raise UnsupportedError(
                "got a model that is sharded across ranks, want a whole one: every token would gather all of it; "
                "fix: install vLLM, or launch with DDP"
            )
        self.weight_version = 0
        self._cache_implementation = cache_implementation
        self._max_sequences = max_sequences
        self._given, self._model, self._is_adapted = model, base_model(model), is_adapted(model)
        self._stop_ids = stop_token_ids(self._model.generation_config, tokenizer)
        self._seeds = random.Random(seed)

    @torch.no_grad()
    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        """Sample `sampling.n` completions for each prompt; see RolloutEngine. InputError: unusable options."""
        prompts, seed = prepared(prompt_ids, sampling, self._seeds, engine=self.name)
        rows = [prompt for prompt in prompts for _ in range(sampling.num_sampled)]
        # One generator for all rows of a call: on another rank the same numbers would go to other prompts.
        sampler = _Sampler(sampling, seed=seed + sampling.first_prompt, device=self._model.device)
        stop_ids = sorted({*self._stop_ids, *sampling.extra.get("stop_token_ids", [])})
        at_once = self._max_sequences or max(1, len(rows))
        completions: list[Completion] = []
        try:
            for start in range(0, len(rows), at_once):
                completions += self._run(rows[start : start + at_once], sampler, sampling, stop_ids)
        except (TypeError, ValueError, ImportError, AssertionError) as error:
            cache = self._cache_implementation
            given = sampling.extra | ({} if cache is None else {"cache_implementation": cache})
            if not given or isinstance(error, FusedGRPOError):
                raise
            raise InputError(
                f"got {given} for generate() of transformers, want values that it takes; fix: generation_kwargs or "
                f"cache_implementation ({type(error).__name__}: {error})"
            ) from error
        return rollouts_of(prompts, completions, sampling, weight_version=self.weight_version)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Store the version: the engine's weights are the trainer's."""
        self.weight_version = version

    def close(self) -> None:
        """Do nothing: the model is the trainer's."""

    def _run(
        self, prompts: list[list[int]], sampler: _Sampler, sampling: SamplingParams, stop_ids: list[int]
    ) -> list[Completion]:
        """A completion for each row."""
        if self._is_adapted:
            prompts = with_virtual_places(prompts, self._given)
        width, device = max(map(len, prompts)), self._model.device
        # Padded with the row's own first token: attention masks it, and a repetition penalty counts it already.
        input_ids = torch.tensor([prompt[:1] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        attention_mask = torch.tensor(masks, device=device)
        inputs = {"input_ids": input_ids}
        if self._is_adapted:
            # Processors are given the tokens, the model their embeddings if there are some: `generate` takes both.
            inputs |= model_inputs(self._given, input_ids, attention_mask.cumsum(1) - 1)
        beams = sampling.extra.get("num_beams", 1)
        if type(beams) is not int or beams < 1:
            raise ValueError(f"num_beams={beams}")
        options: dict[str, Any] = {"cache_implementation": self._cache_implementation, **sampling.extra}
        options.pop("stop_token_ids", None)
        # The sampler samples; among beams transformers does, by default with top_k=50.
        options["do_sample"] = beams > 1 and sampling.temperature > 0
        if options["do_sample"]:
            options["top_k"] = 0
        ends = {"max_new_tokens": sampling.max_tokens, "eos_token_id": stop_ids or None, "pad_token_id": 0}
        config = GenerationConfig(**ends, **options)
        # The model's own top_k, penalties and the like are ignored: as with vLLM, SamplingParams alone decides.
        if ignored := sorted(_DECIDING.intersection(self._model.generation_config.to_diff_dict()) - options.keys()):
            warn_once(
                f"got {', '.join(ignored)} in the model's generation_config, which samples without it, as vLLM does; "
                "TRL's trainer would use it; fix: generation_kwargs, or leave it out"
            )
        # Nothing is compiled: a growing KV cache would be, for several lengths.
        # The sampler draws from a generator of its own. Beams seed torch's, which has to be put back.
        kept = as_it_was(self._given, generators=beams > 1 or not self.samples_in_background)
        with kept, replaced(self._model, "generation_config", GenerationConfig()):
            self._given.eval()
            if beams > 1:
                warn_once(_BEAMS)
                torch.manual_seed(sampler.seeds.getrandbits(SEED_BITS))
            returned = self._model.generate(
                **inputs,
                attention_mask=attention_mask,
                generation_config=config,
                logits_processor=LogitsProcessorList(sampler.shaping if beams > 1 else [sampler]),
            )
        # With beams, or where a model's own `generate` calls no logits processor, log-probs are not known.
        sampled = sampler.take() or [(tokens, None, None) for tokens in returned[:, input_ids.shape[1] :].tolist()]
        return [_completion(*each, stop_ids) for each in sampled]


class _Sampler:
    """A logits processor that samples: it stores token and log-prob, and returns scores that allow that token only.

    It has a random generator of its own, and stores B log-probs a step, not the [B, V] scores of `output_scores`.
    """

    def __init__(self, sampling: SamplingParams, *, seed: int, device: torch.device) -> None:
        self._sampling, self.seeds = sampling, random.Random(seed)
        # The library's own processors, in vLLM's order. Two of them refuse a whole number, and NumPy's.
        penalty, temperature = float(sampling.repetition_penalty), float(sampling.temperature)
        processors: tuple[tuple[Any, Any, bool], ...] = (
            (library.RepetitionPenaltyLogitsProcessor, penalty, penalty != 1.0),
            (library.TemperatureLogitsWarper, temperature, temperature not in (0.0, 1.0)),
            (library.MinPLogitsWarper, sampling.min_p, sampling.min_p > 0),
            (library.TopKLogitsWarper, sampling.top_k, sampling.top_k > 0),
            (library.TopPLogitsWarper, sampling.top_p, sampling.top_p < 1.0),
        )
        self.shaping = [kind(value) for kind, value, applies in processors if applies]
        self._generator = torch.Generator(device).manual_seed(seed)
        self._tokens, self._logprobs = list[Tensor](), list[Tensor]()
        self._listed = SupportRecorder(sampling.top_k_listed) if sampling.wants_ids else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for shape in self.shaping:
            scores = shape(input_ids, scores)
        logprobs = scores.float().log_softmax(dim=-1)
        if self._listed is not None:
            self._listed.add(scores, logprobs if self._sampling.wants_logprobs else None)
        if self._sampling.temperature == 0:
            tokens = logprobs.argmax(dim=-1, keepdim=True)
        else:
            # A row of NaN gets any token: its log-prob, NaN too, is refused by checked_engine.py, which names the
            # prompt. `multinomial` would raise for the whole batch, and on a GPU end the process.
            tokens = torch.multinomial(logprobs.exp().nan_to_num(nan=1.0), 1, generator=self._generator)
        self._tokens.append(tokens)
        self._logprobs.append(logprobs.gather(1, tokens))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def take(self) -> list[tuple[list[int], list[float] | None, ListedTokens | None]]:
        """Tokens, log-probs and listed tokens of each row since the last call, also those after its end."""
        if not self._tokens:
            return []
        tokens, logprobs = torch.cat(self._tokens, dim=1).tolist(), torch.cat(self._logprobs, dim=1).tolist()
        listed = [None] * len(tokens) if self._listed is None else self._listed.take()
        self._tokens, self._logprobs = [], []
        return list(zip(tokens, logprobs, listed, strict=True))


class SupportRecorder:
    """Collects the supports of a batch of B sequences, step by step; with `top` so many of the most likely tokens."""

    def __init__(self, top: int = 0) -> None:
        self._ids, self._sizes, self._logprobs, self._top = list[Tensor](), list[Tensor](), list[Tensor](), top

    def add(self, scores: Tensor, logprobs: Tensor | None = None) -> None:
        """The scores [B, V] of a step, -inf where a token was left out, and their log-probs [B, V] where those are
        wanted."""
        kept = scores > -torch.inf
        if logprobs is None:
            kept &= ~kept.all(dim=1, keepdim=True)
        elif self._top:
            likely = logprobs.topk(min(self._top, logprobs.shape[1])).indices
            kept &= torch.zeros_like(kept).scatter_(1, likely, True)
        self._ids.append(kept.nonzero()[:, 1].to("cpu", torch.int32))
        self._sizes.append(kept.sum(dim=1).to("cpu", torch.int32))
        if logprobs is not None:
            self._logprobs.append(logprobs[kept].cpu())

    def take(self) -> list[ListedTokens]:
        """Those of each sequence since the last call."""
        sizes = torch.stack(self._sizes)  # [T, B]
        sequences = torch.arange(sizes.shape[1]).repeat(len(sizes)).repeat_interleave(sizes.flatten())
        order, counts = sequences.argsort(stable=True), sizes.sum(0).tolist()
        ids, logprobs = torch.cat(self._ids)[order].split(counts), [None] * len(counts)
        if self._logprobs:
            logprobs = torch.cat(self._logprobs)[order].split(counts)
        self._ids, self._sizes, self._logprobs = [], [], []
        each = zip(ids, sizes.T.contiguous(), logprobs, strict=True)
        return [ListedTokens(*one, is_top_k=self._top > 0) for one in each]


def _completion(
    tokens: list[int], logprobs: list[float] | None, listed: ListedTokens | None, stop_ids: list[int]
) -> Completion:
    """A row up to its end of sequence."""
    length = next((index + 1 for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
    reason: FinishReason = "stop" if tokens[length - 1] in stop_ids else "length"
    own = None if logprobs is None else logprobs[:length]
    return Completion(tokens[:length], own, reason, None if listed is None else listed.first(length))
