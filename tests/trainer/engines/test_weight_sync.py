"""After every sync vLLM samples from the trainer's weights, whatever family and whether the head is tied."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.engines.checked_engine import WeightCheck
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import Rollouts, SamplingParams

pytestmark = pytest.mark.engine

SAMPLING = SamplingParams(n=4, max_tokens=8, seed=0)


class Served(NamedTuple):
    model: PreTrainedModel
    engine: VLLMEngine
    first: Rollouts
    difference: torch.Tensor  # of their log-probs from those of the model as it was then


@pytest.fixture(
    scope="module",
    params=[("qwen2", True), ("qwen2", False), ("llama", True), ("llama", False)],
    ids=["qwen2-tied", "qwen2-untied", "llama-tied", "llama-untied"],
)
def start(request, build_model, tokenizer, prompts, plain_logprobs, sampled_logprobs) -> Iterator[Callable[[], Served]]:
    family, tied = request.param
    kept = list[Served]()

    def start() -> Served:
        if not kept or kept[0].engine._llm is None:  # a test before has closed it
            model = build_model(family, tied=tied)
            engine = VLLMEngine(model, tokenizer, VLLMOptions(max_model_len=192, dtype=torch.float32))
            rollouts = engine.generate(prompts, SAMPLING)
            difference = (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs()
            kept[:] = [Served(model, engine, rollouts, difference)]
        return kept[0]

    yield start
    kept[0].engine.close()


@pytest.fixture
def served(start) -> Served:
    """A model and an engine that has been synced with it, in any state."""
    return start()


@torch.no_grad()
def train_a_little(model: PreTrainedModel, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def test_the_engine_starts_with_the_trainers_weights(served) -> None:
    assert served.difference.max() < 1e-4
    assert served.first.weight_version == 0


@pytest.mark.parametrize("version", range(1, 6))
def test_the_engine_follows_every_sync(served, prompts, plain_logprobs, sampled_logprobs, version) -> None:
    model, engine, *_ = served
    before = engine.generate(prompts, SAMPLING)
    train_a_little(model, seed=version)
    assert (sampled_logprobs(before) - plain_logprobs(model, before)).abs().max() > 0.05
    # Named parameters leave out a tied head, a state dict has it: the engine has to take both.
    engine.load_weights(model.named_parameters() if version % 2 else checkpoint_weights(model), version)
    after = engine.generate(prompts, SAMPLING)
    assert (sampled_logprobs(after) - plain_logprobs(model, after)).abs().max() < 1e-4
    assert after.weight_version == version


def test_a_forgotten_sync_is_noticed(served, prompts, plain_logprobs, sampled_logprobs) -> None:
    model, engine, *_ = served
    engine.load_weights(checkpoint_weights(model), version=6)
    train_a_little(model, seed=7)
    rollouts = engine.generate(prompts, SAMPLING)
    difference = (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    with pytest.raises(WeightSyncError, match="weight version 6"):
        WeightCheck(GRPOConfig(bf16=False), model, torch.device("cpu"))(mean, largest, engine=engine)


def test_weights_that_do_not_fit_are_refused_and_close_the_engine(served, prompts) -> None:
    with pytest.raises(WeightSyncError, match=r"weight version 9.*fix: pass checkpoint_weights"):
        served.engine.load_weights([("model.norm.weight", torch.zeros(3))], version=9)
    with pytest.raises(UnavailableError, match="closed"):
        served.engine.generate(prompts, SAMPLING)
