"""Twelve steps beside TRL's trainer with tools: the same conversations, the same parameters and metrics.

Both call `model.generate`, which says what a script says; what tools answer, how it becomes tokens, and what the loss
makes of them is each trainer's own. The chat template is TRL's of Qwen2.5, whose calls it can read.
"""

import re
import tempfile
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import trl_runs
from talkers import END, call, talking_model, talking_tokenizer
from transformers import PreTrainedTokenizerFast

from fused_grpo.trainer import GRPOConfig, GRPOTrainer

pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")

PARAMETERS, METRICS = 5e-6, 1e-4
COMPARED = ("loss", "grad_norm", "reward", "completions/", "tools/", "num_tokens", "clip_ratio", "entropy", "kl")
ALIKE = ("grpo", "cispo")  # to the others, which always run
LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "another template": {
        "template": "qwen3.jinja"
    },  # which TRL replaces by one that renders earlier turns as they were
}


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Bytes, but each long line that all prompts begin with is one token: to read a thousand bytes takes longer than
    the rest of a step."""
    tokenizer = talking_tokenizer(template)
    read = [{"role": "user", "content": ""}]
    lines = tokenizer.apply_chat_template(read, tools=[multiply, add], tokenize=False).splitlines()
    assert tokenizer.add_tokens([line for line in lines if len(line) > 30]) > 3
    return tokenizer


def say(read: str, row: int) -> str:
    """Two turns, three, a call that fails, none at all, one that cannot be read."""
    a = int(re.search(r"(\d+) \* 7", read)[1])
    answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", read, re.DOTALL)
    if len(answers) == 1 and answers[0] == str(a + 1):
        return call("multiply", a=int(answers[0]), b=7)
    if answers:
        return f"So {answers[-1]}."[:40]
    return (
        call("multiply", a=a, b=7),
        call("add", a=a, b=1),
        call("multiply", a=a, c=7),
        f"I think {a}.",
        "<tool_call>\n{name: multiply}\n</tool_call>",
    )[row % 5]


def generate(tokenizer: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    texts = [tokenizer.decode([token for token in row if token != 0]) for row in input_ids.tolist()]
    said = [tokenizer(say(text, row) + END)["input_ids"] for row, text in enumerate(texts)]
    width = max(map(len, said))
    return torch.cat([input_ids, torch.tensor([ids + [0] * (width - len(ids)) for ids in said])], dim=1)


def score(completions: list[Any], **_: Any) -> list[float]:
    """Turns, and the digits of the last one."""
    return [len(messages) + sum(map(str.isdigit, messages[-1]["content"])) / 10 for messages in completions]


def trained(trainer_class: Any, config_class: Any, template: str, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    tokenizer = tokenizer_of(template)
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            **{
                "output_dir": folder,
                "per_device_train_batch_size": 10,
                "num_generations": 5,
                "max_completion_length": 300,
                "max_steps": 12,
                **trl_runs.PLAIN,
                **options,
            }
        )
        rows = [{"prompt": [{"role": "user", "content": f"{a} * 7?"}]} for a in range(3, 9)]
        named = {"processing_class": tokenizer, "tools": [multiply, add]}
        trainer = trainer_class(talking_model(tokenizer), score, args, datasets.Dataset.from_list(rows), **named)
        with patch.object(trainer.model, "generate", side_effect=partial(generate, tokenizer)):
            trainer.train()
    return dict(trainer.model.named_parameters()), trainer.state.log_history


@pytest.mark.parametrize(
    "options", [pytest.param(LOSSES[name], id=name, marks=[pytest.mark.full] * (name in ALIKE)) for name in LOSSES]
)
def test_twelve_steps_with_tools_are_those_of_trl(trl: types.ModuleType, options: dict[str, Any]) -> None:
    name = options.get("template", "qwen2_5.jinja")
    options = {key: value for key, value in options.items() if key != "template"}
    template = (Path(trl.__file__).parent / "chat_templates" / name).read_text(encoding="utf-8")
    trl_weights, trl_log = trained(trl.GRPOTrainer, trl.GRPOConfig, template, use_vllm=False, **options)
    ours = {"use_vllm": False, "skip_zero_advantages": False, **options}
    our_weights, our_log = trained(GRPOTrainer, GRPOConfig, template, **ours)
    far = max((our_weights[name] - value).abs().max().item() for name, value in trl_weights.items())
    assert far <= PARAMETERS
    assert any(
        (value - dict(talking_model(tokenizer_of(template)).named_parameters())[name]).any()
        for name, value in our_weights.items()
    )
    for entry, other in zip(our_log[:12], trl_log[:12], strict=True):
        for name in (name for name in other if name.startswith(COMPARED)):
            assert entry[name] == pytest.approx(other[name], rel=METRICS, abs=METRICS, nan_ok=True), name
    assert trl_log[0]["tools/call_frequency"] > 0.6
    assert trl_log[0]["tools/failure_frequency"] > 0.1
