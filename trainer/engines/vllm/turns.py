"""Turns of episodes in vLLM's own loop: one that is added is decoded with those that are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.engines.sampling import Completion
from fused_grpo.trainer.types import Turn


@contextmanager
def sampling_errors() -> Iterator[None]:
    """Turn what vLLM raises while it samples into an UnavailableError."""
    try:
        yield
    except Exception as error:
        raise UnavailableError(
            f"got {type(error).__name__} from vLLM while sampling, and closed the engine: {error}; want a model "
            "and sampling options that vLLM can run here; fix: change engine_options or generation_kwargs, or take "
            "the transformers engine"
        ) from error


class VLLMTurns:
    """A TurnSession on an `LLM` in this process, which has no other requests.

    `request` makes vLLM's sampling options of a turn, `completion` reads an output, with the most likely tokens or not.
    """

    is_together, pending = False, ()

    def __init__(
        self, llm: Any, request: Callable[[Turn], Any], completion: Callable[[Any, bool], Completion], lora: Any
    ) -> None:
        self._engine, self._counter, self._lora = llm.llm_engine, llm.request_counter, lora
        self._request, self._completion, self._sampled = request, completion, dict[str, tuple[int, bool]]()

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, turn: Turn) -> None:
        from vllm.sampling_params import RequestOutputKind

        params, name, prompt = self._request(turn), str(next(self._counter)), list(turn.prompt_ids)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._sampled[name] = turn.episode, bool(params.logprobs)
        with sampling_errors():
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=self._lora)

    def step(self) -> list[tuple[int, Completion]]:
        """A token of each turn that is under way."""
        with sampling_errors():
            outputs = [output for output in self._engine.step() if output.finished]
        told = [(*self._sampled.pop(output.request_id), output.outputs[0]) for output in outputs]
        return [(episode, self._completion(output, listed)) for episode, listed, output in told]
