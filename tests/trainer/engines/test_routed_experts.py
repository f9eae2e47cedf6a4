"""Experts of tokens as vLLM returns them: in process, of a real engine where --full allows it, and of servers."""

import base64
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.engines.server import replicas
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import SamplingParams

PROMPTS = [[prompt, 3] for prompt in range(4, 8)]
SAMPLING = SamplingParams(n=3, max_tokens=8, seed=0)
RUN = Path(__file__).parents[1] / "routed_run.py"


def experts_of(prompt: int, index: int) -> np.ndarray:
    """Of a completion of the fake server: two tokens of the prompt, and the first of two."""
    return np.full((3, 2, 2), prompt, np.uint16) + np.array([0, index], np.uint16)


def encoded(array: np.ndarray, **options) -> str:
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def connect(servers, build_model, tokenizer, monkeypatch):
    model = build_model("llama", tied=True)
    monkeypatch.setattr(replicas, "_PAUSES", (0.0, 0.01, 0.03))

    def connect(returned=experts_of, *, flag: bool | None = True, routed_experts: bool = True) -> VLLMServerEngine:
        def mutate(path: str, answer: dict) -> dict:
            for choice in answer.get("choices", ()):
                made = returned(choice["token_ids"][0], choice["index"])
                choice["routed_experts"] = encoded(made) if isinstance(made, np.ndarray) else made
            if "vllm_config" in answer and flag is not None:
                answer["vllm_config"]["aux_output_config"] = {"enable_return_routed_experts": flag, "max_bytes": None}
            return answer

        servers[0].mutate = mutate
        urls = [servers[0].url]
        engine = VLLMServerEngine(model, tokenizer, base_urls=urls, timeout=20, routed_experts=routed_experts)
        engine.load_weights(checkpoint_weights(model), version=0)
        return engine

    return connect


def test_a_server_returns_experts_with_each_completion(connect) -> None:
    rollouts = connect().generate(PROMPTS, SAMPLING)
    expected = [experts_of(prompt, index) for prompt, _ in PROMPTS for index in range(3)]
    for experts, own in zip(rollouts.routed_experts, expected, strict=True):
        assert experts.dtype == torch.int16  # torch computes with no 16 bits without a sign
        assert torch.equal(experts, torch.from_numpy(own.astype(np.int16)))
    assert [sample.routed_experts for sample in rollouts.samples()] == rollouts.routed_experts


def test_a_completion_without_experts_leaves_all_without(connect) -> None:
    engine = connect(lambda prompt, index: None if (prompt, index) == (5, 1) else experts_of(prompt, index))
    assert engine.generate(PROMPTS, SAMPLING).routed_experts is None
    assert engine.generate(PROMPTS[2:], SAMPLING).routed_experts is not None


@pytest.mark.parametrize("flag", [False, None])
def test_a_server_without_the_option_is_refused_at_the_start(connect, flag) -> None:
    with pytest.raises(InputError, match=r"returns no experts .* --enable-return-routed-experts \(vLLM 0.32"):
        connect(flag=flag)
    assert connect(lambda *_: None, flag=flag, routed_experts=False).generate(PROMPTS, SAMPLING).routed_experts is None


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "%%",
        encoded(np.zeros((2, 2, 2))),
        encoded(np.array([{}]), allow_pickle=True),
        encoded(np.zeros(3, "u1"))[:99],
        encoded(np.zeros(3, "u1")),
    ],
)
def test_what_is_no_array_of_ids_is_refused(connect, wrong) -> None:
    with pytest.raises(UnavailableError, match=r"routed_experts that are no array of expert ids .*fix:"):
        connect(lambda *_: wrong).generate(PROMPTS[:1], SAMPLING)


def test_a_configuration_with_other_names_is_sampled_with(connect, monkeypatch) -> None:
    other = lambda config: SimpleNamespace(vocab_size=config.vocab_size, num_layers=2)  # noqa: E731
    monkeypatch.setattr(LlamaConfig, "get_text_config", other)
    assert connect(lambda *_: None, routed_experts=False).generate(PROMPTS[:1], SAMPLING).completion_ids


def test_an_answer_may_be_as_long_as_its_experts(connect, monkeypatch) -> None:
    monkeypatch.setattr(replicas, "_RESPONSE_BYTES", 4096)
    monkeypatch.setattr(replicas, "_TOKEN_BYTES", 0)
    monkeypatch.setattr(replicas, "_EXPERT_BYTES", 48)
    long = np.zeros((10, 2, 8), np.uint16)
    assert connect(lambda *_: long).generate(PROMPTS[:1], SAMPLING).routed_experts[0].shape == long.shape
    with pytest.raises(UnavailableError, match="more than"):
        connect(lambda *_: np.zeros((100, 2, 8), np.uint16)).generate(PROMPTS[:1], SAMPLING)


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_engine_and_the_trainer_agree_on_its_experts(fork_server, tmp_path, dtype) -> None:
    """vLLM's model runner V2 on a CPU, with kernels that Triton interprets: routers, ids and layers are its own."""
    process = fork_server.start(RUN, tmp_path, dtype, env={"TRITON_INTERPRET": "1"}, stage="torch")
    assert process.wait(timeout=300) == 0, process.output
