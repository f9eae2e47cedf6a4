"""A folder that stands for the hub: tiny models and data sets under names that a script for TRL gives to
`from_pretrained` and `load_dataset`, which read a path where there is one.

`library` is TRL's trainer or ours. Cases with TRL's are marked `full`: they show that the case itself is right.
"""

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fused_grpo import trainer as fused_grpo_trainer

POLICY, REWARD_MODEL = "Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/Qwen2-0.5B-Reward"
OTHER_REWARD_MODEL, MOE = "trl-lib/Other-Reward", "Qwen/Qwen3-30B-A3B"
PLAIN, CONVERSATIONS, NO_TEST_SPLIT = "trl-lib/tldr", "trl-lib/DeepMath-103K", "trl-lib/ultrafeedback-prompt"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if thinking %}<think>{% endif %}{% endif %}"
)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def make_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def save(model_class: type[PreTrainedModel], config: Any, folder: Path, letters: str) -> None:
    """A model with large random weights: tokens differ in probability, and completions in length."""
    tokenizer = make_tokenizer(letters)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        for parameter in model.parameters():
            parameter.data.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory) -> Path:
    """The models and data sets, made once."""
    folder = tmp_path_factory.mktemp("hub")
    letters = "".join(map(chr, range(32, 127))) + "\n"
    sizes = {**SIZES, "vocab_size": len(letters) + 2}
    save(Qwen2ForCausalLM, Qwen2Config(**sizes), folder / POLICY, letters)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    save(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **experts), folder / MOE, letters)
    for name, kept in ((REWARD_MODEL, letters), (OTHER_REWARD_MODEL, letters[::-2])):
        config = Qwen2Config(**{**sizes, "vocab_size": len(kept) + 2}, num_labels=1)
        save(Qwen2ForSequenceClassification, config, folder / name, kept)
    sums = [(a, b) for a in range(5) for b in range(5)]
    rows = [{"prompt": f"What is {a} + {b}?", "solution": f"${a + b}$"} for a, b in sums]
    write_splits(folder / PLAIN, rows)
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    write_splits(folder / CONVERSATIONS, chats)
    write_splits(folder / NO_TEST_SPLIT, chats)
    (folder / NO_TEST_SPLIT / "test.jsonl").unlink()
    return folder


def write_splits(folder: Path, rows: list[dict[str, Any]]) -> None:
    """17 rows to train on and 2 to evaluate."""
    folder.mkdir(parents=True)
    for split, part in (("train", rows[:17]), ("test", rows[17:19])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


@pytest.fixture
def hub(shelf: Path, tmp_path: Path, tmp_path_factory, monkeypatch) -> Path:
    """The working directory of a script: `Qwen/...` and `trl-lib/...` are there."""
    import datasets

    for name in ("Qwen", "trl-lib"):
        (tmp_path / name).symlink_to(shelf / name)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trl() -> types.ModuleType:
    """TRL, imported without vLLM, which takes longer than all of these tests."""
    import trl
    from trl import import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        assert trl.GRPOTrainer
        assert trl.GRPOConfig
    return trl


@pytest.fixture(params=["fused_grpo.trainer", pytest.param("trl", marks=pytest.mark.full)])
def library(request, trl: types.ModuleType, monkeypatch) -> types.ModuleType:
    """Where a script imports `GRPOConfig` and `GRPOTrainer` from."""
    # A process has one state, which TRL's configuration makes anew; ours takes the mixed precision that it finds.
    AcceleratorState._reset_state()
    if request.param != "trl":
        return fused_grpo_trainer
    # Its bf16 by default is for GPUs; on a CPU it wants `use_cpu`.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    return trl


@pytest.fixture
def make(library: types.ModuleType, hub: Path) -> Callable[..., Any]:
    """A trainer, as TRL's own tests make theirs: a group of three in a step, and a rate that moves everything."""

    def make(
        reward_funcs: Any = REWARD_MODEL,
        *,
        model: Any = POLICY,
        data: str = PLAIN,
        arguments: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        from datasets import load_dataset

        defaults = {
            "output_dir": "run",
            "learning_rate": 0.1,
            "per_device_train_batch_size": 3,
            "num_generations": 3,
            "max_completion_length": 8,
            "max_steps": 4,
            "use_vllm": False,
            "report_to": "none",
        }
        args = library.GRPOConfig(**{**defaults, **options})
        given = {"train_dataset": load_dataset(data, split="train"), **(arguments or {})}
        return library.GRPOTrainer(model=model, reward_funcs=reward_funcs, args=args, **given)

    return make
