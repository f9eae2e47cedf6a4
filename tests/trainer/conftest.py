"""A tiny model, a character tokenizer, and an engine whose completions are written down beforehand."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from numerics import logprobs_of_all
from torch import Tensor
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fused_grpo.trainer import GRPOConfig, GRPOTrainer, learner
from fused_grpo.trainer import self_check as measuring
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.self_check import Measured, self_check
from fused_grpo.trainer.types import Rollouts, SamplingParams

MEASURED: dict[tuple[bytes, str, str], Measured] = {}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+-*=abcdef"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def make_model(tokenizer) -> Callable[..., PreTrainedModel]:
    def make(seed: int = 0, **options: Any) -> PreTrainedModel:
        shape = {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        config = Qwen2Config(**{**shape, **options})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(config)
            for parameter in model.parameters():  # peaked enough that tokens differ in probability
                parameter.data.mul_(3)
        return model

    return make


@pytest.fixture
def in_4bit(tmp_path: Path) -> Callable[..., PreTrainedModel]:
    """A model as bitsandbytes quantises it, in training mode; `options` of `BitsAndBytesConfig`."""

    def quantized(model: PreTrainedModel, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
        model.save_pretrained(tmp_path / "whole")
        config = BitsAndBytesConfig(**{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} | options)
        options = {"quantization_config": config, "dtype": dtype}
        return type(model).from_pretrained(tmp_path / "whole", **options).train()

    return quantized


class ScriptedEngine(RolloutEngine):
    """Satisfies RolloutEngine. Completions depend on the seed alone; their log-probs on the model as it is now."""

    name = "scripted"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.weight_version, self.calls, self.closed = 0, [], False

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        self.calls.append((len(prompt_ids), sampling))
        generator = torch.Generator().manual_seed(sampling.seed or 0)
        lengths = torch.randint(1, sampling.max_tokens + 1, (len(prompt_ids) * sampling.n,), generator=generator)
        completions = [
            [*torch.randint(2, len(self.tokenizer), (n - 1,), generator=generator).tolist(), 1]
            for n in lengths.tolist()
        ]
        prompts = [list(ids) for ids in prompt_ids]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=completions,
            sampling_logprobs=self.logprobs(
                [(prompts[i // sampling.n], ids) for i, ids in enumerate(completions)], sampling.temperature or 1.0
            ),
            finish_reasons=["stop"] * len(completions),
            num_generations=sampling.n,
            weight_version=self.weight_version,
        )

    def logprobs(self, pairs: list[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """Of each prompt's completion."""
        return logprobs_of_all(self.model, pairs, temperature)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert dict(named_weights).keys() == self.model.state_dict().keys()
        self.weight_version = version

    def close(self) -> None:
        self.closed = True


class ServedEngine(ScriptedEngine):
    """With weights of its own, as a server has them: what the trainer does meanwhile does not reach it."""

    samples_in_background = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(copy.deepcopy(model), tokenizer)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.model.load_state_dict(dict(named_weights))
        self.weight_version = version


@pytest.fixture
def served_engine() -> type[ScriptedEngine]:
    return ServedEngine


def digit_reward(completions: list[str], **columns: Any) -> list[float]:
    """The share of digits: differs between completions."""
    return [sum(character.isdigit() for character in text) / (len(text) + 1) for text in completions]


def self_check_once(policy: PolicyLoss) -> Measured:
    """The same for a plain model with the same weights and settings: measuring takes as long as several steps."""
    model, layers = policy.model, list(policy.modules())
    changed = ("forward", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks")
    if type(model) is not Qwen2ForCausalLM or any(vars(layer).get(name) for layer in layers for name in changed):
        return self_check(policy)
    weights = hashlib.sha256(b"".join(value.float().numpy().tobytes() for value in model.state_dict().values()))
    rates = [value for layer in layers for value in vars(layer).values() if isinstance(value, float)]
    settings = policy.loss_config, policy.temperature, policy.chunk_bytes, policy.router_aux_loss_coef, policy.routing
    settings += (measuring.has_dropout(model),)  # which a test may have answer otherwise
    key = weights.digest(), f"{model.dtype} {rates} {settings}", model.config.to_json_string(use_diff=False)
    if key not in MEASURED:
        MEASURED[key] = self_check(policy)
    return MEASURED[key]


@pytest.fixture
def make_trainer(make_model, tokenizer, tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def make(
        reward: Any = digit_reward,
        *,
        engine: type = ScriptedEngine,
        dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Any = None,
        model_seed: int = 0,
        **options: Any,
    ) -> GRPOTrainer:
        arguments = {name: options.pop(name) for name in ("teacher_model", "peft_config") if name in options}
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "overwrite_output_dir": True,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 3,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "log_completions": False,
            # A checkpoint takes longer than the steps of most tests.
            "save_strategy": "steps" if "save_steps" in options else "no",
        }
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
        model = make_model(model_seed)
        if "optimizers" in options:
            arguments["optimizers"] = options.pop("optimizers")(model)
        with mock.patch.object(learner, "self_check", self_check_once):
            return GRPOTrainer(
                model,
                reward,
                GRPOConfig(**{**defaults, **options}),
                rows if dataset is None else dataset,
                eval_dataset=eval_dataset,
                callbacks=callbacks,
                processing_class=tokenizer,
                rollout_engine=engine(model, tokenizer),
                **arguments,
            )

    return make
