"""Models that vLLM in process runs in a way of their own: mixtures of experts, and those that it has no code for."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from fused_grpo.errors import UnsupportedError, WeightSyncError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.engines.vllm.inprocess import _completion
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import SamplingParams

pytestmark = pytest.mark.engine

SAMPLING = SamplingParams(n=4, max_tokens=6, seed=5)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS = {"num_key_value_heads": 1, "num_experts_per_tok": 2}


@pytest.fixture
def build(tokenizer) -> Callable[..., Any]:
    def build(name: str, **options: Any) -> Any:
        config = getattr(transformers, f"{name}Config")(**SIZES | {"vocab_size": len(tokenizer)} | options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()

    return build


@pytest.fixture
def start(tokenizer) -> Iterator[Callable[..., Any]]:
    engines = []

    def start(model: Any, **options: Any) -> Any:
        engines.append(choose_engine("vllm", GRPOConfig(vllm_max_model_length=128, **options), model, tokenizer))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def check(prompts, plain_logprobs, sampled_logprobs) -> Callable[..., None]:
    """The trainer's log-probs at the start and after each of two syncs."""

    def check(engine: Any, model: Any) -> None:
        for version in range(3):
            rollouts = engine.generate(prompts[:5], SAMPLING)
            torch.testing.assert_close(sampled_logprobs(rollouts), plain_logprobs(model, rollouts), atol=1e-4, rtol=0)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.05 * torch.randn_like(weight))
            engine.load_weights(checkpoint_weights(model), version=version + 1)

    return check


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Mixtral", {"num_local_experts": 4, "intermediate_size": 48}),  # which vLLM pads to 64
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32}),
        ("GraniteMoe", {"num_local_experts": 4}),
    ],
)
def test_experts_follow_every_sync(build, start, check, name, options) -> None:
    model = build(name, **EXPERTS, **options)
    check(start(model), model)


def test_an_adapter_on_experts_follows_every_sync_merged(build, start, check) -> None:
    model = build("Qwen3Moe", **EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=32)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    lora = {"target_modules": ["q_proj"], "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(**lora, target_parameters=experts))
    check(start(model), model)
    attention = get_peft_model(model.unload(), LoraConfig(**lora))
    with pytest.raises(
        UnsupportedError, match=r"experts with vllm_adapter_sync on a CPU.*fix: vllm_adapter_sync=False"
    ):
        start(attention, vllm_adapter_sync=True)


def test_experts_that_vllm_does_not_load_are_refused_at_the_start(build, start) -> None:
    model = build("GptOss", **EXPERTS, num_local_experts=4, head_dim=32)
    with pytest.raises(UnsupportedError, match=r"experts vLLM's CPU build cannot load.*want.*fix: use_vllm=False"):
        start(model)


@pytest.mark.parametrize(("name", "impl"), [("Qwen2", "transformers"), ("GPTNeoX", "vllm")])
def test_a_model_that_vllm_runs_with_the_code_of_transformers_still_trains(build, start, check, name, impl) -> None:
    heads = {"num_key_value_heads": 1} if name == "Qwen2" else {}
    model = build(name, **heads)
    check(start(model, vllm_model_impl=impl), model)
    build(name, **heads)(torch.tensor([[3, 4]])).logits.sum().backward()


def test_weights_without_a_place_in_vllm_are_refused_with_the_other_engine(build, start) -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "tie_word_embeddings", "eos_token_id")}
    with pytest.raises(WeightSyncError, match=r"weight version 0.*lm_head.*use_vllm=False where vLLM cannot load"):
        start(build("Bloom", **sizes, n_layer=2, n_head=2))


@pytest.mark.parametrize(("given", "kept"), [(np.uint8, torch.uint8), (np.uint16, torch.int16)])
def test_vllms_output_has_the_experts_of_tokens(given, kept) -> None:
    from vllm.outputs import CompletionOutput

    array = np.arange(20, dtype=given).reshape(5, 2, 2)
    output = CompletionOutput(
        0, "", [4, 1], None, [{4: SimpleNamespace(logprob=-1.0)}, {1: SimpleNamespace(logprob=-2.0)}]
    )
    output.finish_reason = "stop"
    assert _completion(output, False).routed_experts is None
    output.routed_experts = array
    experts = _completion(output, False).routed_experts
    assert experts.dtype == kept
    assert torch.equal(experts, torch.from_numpy(array.astype(np.int16)).to(kept))
