"""Small causal LMs of transformers with random weights, and what their own logits say about a batch."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numerics
import pytest
import torch
from torch import Tensor

VOCAB_SIZE = 61
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,  # logits of several units: caps bend them, and probabilities differ
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of_transformers(name: str) -> Any:
    """A class, where the version that is installed has it."""
    import transformers

    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


@pytest.fixture(scope="module")
def ours() -> ModuleType:
    """The integration of TRL. vLLM is hidden from TRL: importing it takes longer than all these tests."""
    from trl import import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        import fused_grpo.integrations.trl as module
    return module


class Scores(NamedTuple):
    log_probs: Tensor
    entropy: Tensor


@pytest.fixture
def assert_as_exact() -> Callable[..., None]:
    return numerics.assert_as_exact


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    def make(name: str = "Qwen2", config: str | None = None, **options: Any) -> Any:
        """A model in fp32, by the names of its class ("...ForCausalLM" if there is nothing more) and its config's."""
        import transformers

        torch.manual_seed(0)
        model_class = of_transformers(name if hasattr(transformers, name) else f"{name}ForCausalLM")
        config_class = of_transformers(config or f"{name}Config")
        if "text_config" in options:
            options["text_config"] = SIZES | options["text_config"]
        else:
            options = SIZES | options
        model = model_class(config_class(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # biases are 0 and norms 1, and neither would be missed
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def model(make_model) -> Any:
    return make_model("Qwen2")


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Three sequences, the second padded at its end; prompts, padding and tokens in the middle have no label."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB_SIZE, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    labels[2, 5:7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture
def by_logits() -> Callable[..., Scores]:
    def score(model: Any, batch: dict[str, Tensor], temperature: float | Tensor = 1.0) -> Scores:
        """Through full logits, in the precision of the model."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        log_probs = (model(**inputs, use_cache=False).logits[:, :-1] / temperature).log_softmax(-1)
        labels = batch["labels"][:, 1:]
        label_logprobs = log_probs.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Scores(*(torch.where(labels != -100, x, 0.0) for x in (label_logprobs, entropy)))

    return score
