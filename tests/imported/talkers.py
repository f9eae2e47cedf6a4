"""For tests of episodes: a tokenizer of bytes with a chat template, and engines that say what a script says."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numerics import logprobs_of
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_grpo.bench.trainers.calling_model import END, byte_tokenizer
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.turns import ConcurrentSession
from fused_grpo.trainer.types import Rollouts, SamplingParams

# Hermes' form of calls. The last turn of the model is written differently where it is the last, as in Qwen3.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<answer>{{ message.content }}</answer>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


# Of the descriptions of tools that a prompt begins with, each is one token.
DESCRIBING = ('{"type": "function", "function": {"name": "', '", "description": "', '"type": "integer"')
DESCRIBING += ('"parameters": {"type": "object", "properties": {', '"return": {', '"required": [')


def talking_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(DESCRIBING))
    tokenizer.chat_template = template
    return tokenizer


def talking_model(tokenizer: PreTrainedTokenizerFast, **sizes: Any) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **sizes,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


def call(name: str, /, **arguments: Any) -> str:
    """What a model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Talker(RolloutEngine):
    """An engine that says what `say` makes of all that the model reads; log-probs are those of the model as it is."""

    name = "talker"

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast, say: Callable[[str, int], str]) -> None:
        self.model, self.tokenizer, self.say = model, tokenizer, say
        self.weight_version, self.calls = 0, list[int]()

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        self.calls.append(len(prompt_ids) * sampling.n)
        prompts = [list(ids) for ids in prompt_ids]
        said = [
            self.tokenizer(self.say(self.tokenizer.decode(ids), place * sampling.n + member) + END)["input_ids"]
            for place, ids in enumerate(prompts)
            for member in range(sampling.n)
        ]
        ids = [tokens[: sampling.max_tokens] for tokens in said]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=ids,
            sampling_logprobs=[
                self.logprobs(prompts[place // sampling.n], tokens, sampling.temperature or 1.0)
                for place, tokens in enumerate(ids)
            ],
            finish_reasons=["stop" if tokens[-1] == self.tokenizer.eos_token_id else "length" for tokens in ids],
            num_generations=sampling.n,
            weight_version=self.weight_version,
        )

    def logprobs(self, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
        return logprobs_of(self.model, prompt, completion, temperature)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        list(named_weights)
        self.weight_version = version

    def close(self) -> None:
        pass


class ConcurrentTalker(Talker):
    """With weights of its own, and concurrent calls, as servers have them."""

    samples_in_background = True

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast, say: Callable[[str, int], str]) -> None:
        super().__init__(copy.deepcopy(model), tokenizer, say)

    @contextmanager
    def turn_session(self, sampling: SamplingParams) -> Iterator[ConcurrentSession]:
        yield ConcurrentSession(self.generate, sampling)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.model.load_state_dict(dict(named_weights))
        self.weight_version = version
