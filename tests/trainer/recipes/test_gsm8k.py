"""The recipe gsm8k with vLLM on this CPU and a tiny model: prompts are as long as its own, completions are short."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_grpo.trainer.cli.main import main

pytestmark = pytest.mark.engine

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}="

REWARD = """
def digits(completions, **columns):
    return [float(sum(character.isdigit() for character in completion[0]["content"])) for completion in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one token per character, and questions that make prompts of 200 to 400 tokens."""
    path = tmp_path_factory.mktemp("model")
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "chat_template": CHAT}
    PreTrainedTokenizerFast(tokenizer_object=characters, **names).save_pretrained(path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(vocabulary), num_key_value_heads=1, eos_token_id=1, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)
    (path / "rewards.py").write_text(REWARD)
    source = random.Random(0)
    for name in ("train", "test"):
        numbers = [[source.randint(1, 99) for _ in range(source.randint(30, 90))] for _ in range(64)]
        rows = [{"question": " + ".join(map(str, row))[:300], "answer": f"#### {sum(row)}"} for row in numbers]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(model: Path, run: Path, *options: str) -> list[dict[str, Any]]:
    """The log of two steps of 32 prompts with 2 completions each; an evaluation has 50 prompts."""
    data = ["--dataset", str(model / "train.jsonl"), "--eval-dataset", str(model / "test.jsonl"), "--eval-limit", "50"]
    shape = ["--num-generations", "2", "--gradient-accumulation-steps", "8", "--max-completion-length", "8"]
    learning = ["--reward-funcs", f"{model / 'rewards.py'}:digits", "--learning-rate", "1e-3", "--warmup-steps", "0"]
    ends = ["--max-steps", "2", "--save-steps", "1", "--eval-steps", "1", "--output-dir", str(run)]
    main(["train", "--config", "gsm8k", "--model", str(model), *data, *shape, *learning, *ends, *options])
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_recipe_trains_and_resumes_with_vllm_on_prompts_of_its_length(model, tmp_path) -> None:
    steps = [entry for entry in train(model, tmp_path / "whole") if "loss" in entry]
    for entry in steps:
        assert entry["rollout_engine"] == "vllm"
        assert entry["sampling/sampling_logp_difference/max"] < 1e-4
        assert entry["grad_norm"] > 0
    # The prompts of one step, each counted for two completions.
    assert (steps[0]["num_tokens"] - steps[0]["completion_tokens"]) / 2 > 4096
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for later in ("checkpoint-2", "final"):
        shutil.rmtree(tmp_path / "resumed" / later)
    train(model, tmp_path / "resumed", "--resume")
    whole, resumed = ((tmp_path / run / "final" / "model.safetensors").read_bytes() for run in ("whole", "resumed"))
    assert whole == resumed
