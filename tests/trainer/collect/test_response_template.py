"""Completions of conversations, parsed by the tokenizer's response template as TRL parses them."""

import pytest
from batches import column
from transformers import PreTrainedTokenizerFast

from fused_grpo.trainer.collect.scoring import score_rollouts
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.types import Rollouts

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|a|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool>",
            "close_pattern": "</tool>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}
TEXTS = [
    "<think>hm</think> 42<eos>",
    "42",
    "<think>cut off",
    '1<tool>{"name": "f"}</tool><eos>',
    '<tool>{"name": "f", "arguments": {"a": 1}}</tool>',
    '<tool>{"name": 3}</tool>',
    "<tool>{nonsense</tool>2<eos>",
    "<tool>[1]</tool>",
    "<eos>",
    "a<eos>b<eos>",
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<|a|>", *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=["<|a|>"]
    )
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<|a|>"
    made.response_template = TEMPLATE
    if not hasattr(made, "parse_response"):
        pytest.skip("transformers has no response templates")
    return made


def handed_out(tokenizer, texts, *, prompt=None, header="hi<|a|>"):
    """The completions that a reward function gets, and those that are logged."""
    seen = []
    rollouts = Rollouts(
        prompt_ids=[tokenizer(header)["input_ids"]],
        completion_ids=[tokenizer(text)["input_ids"] for text in texts],
        sampling_logprobs=None,
        finish_reasons=["stop"] * len(texts),
        num_generations=len(texts),
        weight_version=0,
    )
    rewards = Rewards(lambda completions: seen.extend(completions) or [0.0] * len(texts))
    row = {"prompt": [{"role": "user", "content": "hi"}] if prompt is None else prompt}
    return seen, column(score_rollouts(rollouts.samples(), [row], rewards, tokenizer).samples, "text")


@pytest.mark.parametrize("header", ["hi<|a|>", "hi<|a|><think>"])
@pytest.mark.parametrize("end", ["<eos>", r"<\|a\|>"])
def test_messages_are_those_of_trl(tokenizer, header, end):
    parse_response = pytest.importorskip("trl.chat_template_utils", reason="TRL is not installed").parse_response
    fields = {**TEMPLATE["fields"], "content": {"close_pattern": end, "content": "text"}}
    tokenizer.response_template = {**TEMPLATE, "fields": fields}
    seen, logged = handed_out(tokenizer, TEXTS, header=header)
    prefix = tokenizer(header)["input_ids"]
    assert seen == [[parse_response(tokenizer, tokenizer(text)["input_ids"], prefix=prefix)] for text in TEXTS]
    assert logged == [text.replace("<eos>", "") for text in TEXTS]


def test_the_reasoning_is_a_field_of_its_own(tokenizer):
    ((message,),), _ = handed_out(tokenizer, TEXTS[:1])
    assert message == {"role": "assistant", "reasoning_content": "hm", "content": "42"}


def test_plain_prompts_and_tokenizers_without_template_have_the_whole_text(tokenizer):
    assert handed_out(tokenizer, TEXTS[:1], prompt="hi")[0] == ["<think>hm</think> 42"]
    tokenizer.response_template = None
    whole = {"role": "assistant", "content": "<think>hm</think> 42"}
    assert handed_out(tokenizer, TEXTS[:1])[0] == [[whole]]


@pytest.mark.parametrize("text", ["<tool>" + "[" * 30_000, ""])
def test_what_a_model_writes_never_ends_a_run(tokenizer, text):
    assert handed_out(tokenizer, [text, "42"])[0] == [[{"role": "assistant", "content": part}] for part in (text, "42")]


def test_a_template_that_parses_nothing_is_reported_once(tokenizer, caplog):
    warn_once.cache_clear()
    tokenizer.response_template = {"fields": {}}
    for _ in range(2):
        assert handed_out(tokenizer, ["42"])[0] == [[{"role": "assistant", "content": "42"}]]
    (record,) = caplog.records
    assert "response template parses no completion of a batch" in record.getMessage()
