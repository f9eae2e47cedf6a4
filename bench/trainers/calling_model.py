"""A tiny model that calls a tool in each of its turns, so that benchmarks of episodes need no script in its place.

    newline  ->  "thought 0, "  ->  "thought 1, "  ->  ...  ->  "<tool_call>...</tool_call>"  ->  "<|im_end|>"

The next token follows from the last one alone, whatever stands before it: attention and MLP add nothing to the
embedding of a token, and the head's row of the token that follows it points in its direction. Every engine samples such
a model like any other. It never stops calling, so an episode ends where the calls of the run are limited.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from fused_grpo.bench.trainers.training_step import EOS, Problem
from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.episodes.conversation import Template
from fused_grpo.trainer.episodes.play import EpisodeEngine, Rules
from fused_grpo.trainer.types import Rollouts, SamplingParams

START, END = "<|im_start|>", "<|im_end|>"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "GRPO"}}\n</tool_call>'
SHARP = 60.0  # logit of the token that follows; all others are far below


@dataclass(frozen=True, kw_only=True)
class Calling(Problem):
    """Completions of `calls` turns that a tool answers, and of one that has no answer any more."""

    turn_tokens: int
    calls: int

    @property
    def said(self) -> list[str]:
        """The tokens of a turn, without the one that ends it."""
        return [*(f"thought {number}, " for number in range(self.turn_tokens - 2)), CALL]

    def model(self) -> PreTrainedModel:
        model: Any = super().model()
        tokenizer: Any = self.tokenizer()
        chain = tokenizer("\n" + "".join(self.said) + END)["input_ids"]  # prompts end with the newline
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.zero_()
            for token, following in pairwise(chain):
                state = embedding[token] / embedding[token].pow(2).mean().sqrt()  # what the last norm makes of it
                head[following] += SHARP * state / self.hidden
        calling_model: PreTrainedModel = model
        return calling_model

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Bytes, and each of the model's words as one token."""
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in self.said])
        tokenizer.chat_template = chat_template()
        return tokenizer

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt": question(number)} for number in range(self.completions)]

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"max_tool_calling_iterations": self.calls, "use_vllm": False}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and for the beginning and the end of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", END, START, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=END, additional_special_tokens=[START]
    )


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number}?"}]


def chat_template() -> str:
    """Qwen2.5's, from TRL's files: TRL reads the calls of templates that it knows."""
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        raise UnavailableError("got no trl, want the chat templates in it; fix: pip install 'fused-grpo[bench]'")
    return (Path(trl.origin).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")


class Lookup:
    """A tool that takes `seconds`."""

    seconds = 0.0

    def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        time.sleep(self.seconds)
        return f"{word} is here."


class AsyncLookup(Lookup):
    """The same as a coroutine."""

    async def look_up(self, word: str) -> str:  # type: ignore[override]
        """Look a word up.

        Args:
            word: The word.
        """
        await asyncio.sleep(self.seconds)
        return f"{word} is here."


def vllm_engine(problem: Problem, *, sequences: int) -> Any:
    """vLLM in this process, which has one at a time."""
    from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions

    model: Any = problem.model()
    model = model.to(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    options = VLLMOptions(max_model_len=2048, dtype=model.dtype, max_sequences=sequences)
    return VLLMEngine(model, problem.tokenizer(), options)


def player(engine: Any, problem: Calling, tool: Lookup, number: int) -> Callable[[], Rollouts]:
    """Plays so many episodes, of different prompts."""
    template = Template(problem.tokenizer(), None, stop_ids=[EOS])
    rules = Rules(
        template=template, tools=[tool.look_up], environments=None, max_turns=problem.calls, timeout=60.0, slots=None
    )
    rows = [(place, {"prompt": question(place)}) for place in range(number)]
    prompts = [template.encode(question(place), rules.tools) for place in range(number)]
    sampling = SamplingParams(n=1, max_tokens=problem.longest, seed=0)
    return lambda: EpisodeEngine(engine, rules, most=None, batch="0").generate(prompts, sampling, rows=rows)


class Gate(TrainerCallback):
    """Calls a function at the beginning of each step: `SteppedTrainer` waits in it."""

    def __init__(self, wait: Callable[..., Any]) -> None:
        self._wait = wait

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._wait([], None)


def with_tool(make: Callable[..., Any], tool: Lookup, seen: set[tuple[int, ...]], **given: Any) -> Callable[..., Any]:
    """What `SteppedTrainer` makes a trainer with: one that plays episodes of its own. `seen` gets their completions.

    Args:
        make: `our_trainer` or `trl_trainer`; `given` are further arguments of it.
    """

    def score(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.update(map(tuple, completion_ids))
        return [float(place % 2) for place in range(len(completion_ids))]  # so that all of them have an advantage

    def made(problem: Problem, reward: Any, *, rollout_func: Callable[..., Any]) -> Any:
        trainer = make(problem, score, tools=[tool.look_up], **given)
        trainer.add_callback(Gate(rollout_func))
        return trainer

    return made
