"""Engines that fail during a run: it ends with the cause, in time, and the step that failed has trained nothing.

Servers are processes of their own with vLLM's HTTP routes (trainer/engines/fake_vllm.py), with one fault each.
trainer/engines/test_vllm_server.py kills a real server.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_grpo.errors import FusedGRPOError, UnavailableError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

FAKE = Path(__file__).parents[1] / "trainer" / "engines" / "fake_vllm.py"


def tiny_model() -> Qwen2ForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=14, num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=1, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


@pytest.fixture
def make_trainer(tmp_path) -> Callable[..., GRPOTrainer]:
    def make(*, model: Any = None, rollout_engine: Any = None, **options: Any) -> GRPOTrainer:
        shape = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "max_steps": 3}
        args = GRPOConfig(str(tmp_path / "run"), log_completions=False, **{**shape, "learning_rate": 1e-2, **options})
        rows = [{"prompt": f"{a}+{a}="} for a in range(8)]
        model = tiny_model() if model is None else model
        return GRPOTrainer(model, digits, args, rows, processing_class=build_tokenizer(), rollout_engine=rollout_engine)

    return make


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isdigit() for letter in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def serve(fork_server) -> Iterator[Callable[..., str]]:
    """The URL of a server in a process of its own. `serve.process` is the last one, `serve.failed()` when it failed."""
    started = []

    def start(fault: Any = None, **attributes: Any) -> str:
        process = fork_server.start(FAKE, json.dumps(fault), json.dumps(attributes))
        started.append(process)
        start.process = process
        deadline = time.monotonic() + 60
        while "\n" not in process.output:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process.output.split()[0]

    start.failed = lambda: float(start.process.output.split()[1])
    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@contextlib.contextmanager
def ends(trainer: GRPOTrainer, error: type[FusedGRPOError], message: str, *, step: int = 0) -> Iterator[None]:
    """Around `train`: it raises this, and nothing of the step that failed stays."""
    learn, before = trainer.learner.learn, [copy_of(trainer)]
    trainer.learner.learn = lambda *a, **k: [learn(*a, **k), before.append(copy_of(trainer))][0]
    with pytest.raises(error, match=message):
        yield
    assert trainer.step == step
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[-1][name]), name


def copy_of(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


# What the server answers, and what the error says.
FAILURES = {
    "500": (500, "status 500 from /v1/completions"),
    "400": (400, "status 400 from /v1/completions"),
    "html": ("not json", "that is not JSON: '<html>"),
    "nested": ("nested", "that is not JSON"),
    "no-answer": ("no answer", "RemoteProtocolError"),
    "half": ("cut off", "RemoteProtocolError"),
    "killed": ("death", "want completions from"),
    "changed": ("new weights", "none of them up with the weights of"),
    "redirect": (307, r"status 307 .* \(its redirect to http://192.0.2.1/ is not followed\)"),
    "too-few": ("one too few", r"completions \[0, 1, 2\] where 4"),
}


@pytest.mark.parametrize(("answer", "message"), FAILURES.values(), ids=FAILURES)
def test_a_server_that_fails(make_trainer, serve, time_limit, answer, message) -> None:
    url = serve(answer, elsewhere="http://192.0.2.1/")
    trainer = make_trainer(vllm_mode="server", vllm_server_base_url=url, vllm_server_timeout=30)
    with time_limit(10) as clock:
        with ends(trainer, UnavailableError, rf"(?s)(?=.*{url}).*{message}"):
            trainer.train()
        clock.started = serve.failed()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"token_ids": []}, "got no tokens"),
        ({"token_ids": [3] * 9}, "got 9 tokens"),
        ({"token_ids": [3, 14]}, "got token id 14"),
        ({"token_logprobs": [-1.0, math.nan]}, "got log-prob nan"),
        ({"token_logprobs": [-1.0, 0.5]}, r"got log-prob 0\.5"),
    ],
    ids=["empty", "too-long", "token", "nan", "above-0"],
)
def test_an_answer_that_is_not_what_was_asked(make_trainer, serve, time_limit, answer, message) -> None:
    ids = answer.get("token_ids", [3, 4])
    answer = {"token_ids": ids, "logprobs": {"token_logprobs": answer.get("token_logprobs", [-1.0] * len(ids))}}
    trainer = make_trainer(vllm_mode="server", vllm_server_base_url=serve(answer), vllm_server_timeout=30)
    where = r"in completion 0 of prompt 0 \(token ids \[.*\]\) from the vllm-server engine"
    with time_limit(10) as clock:
        with ends(trainer, UnavailableError, rf"{message} {where}"):
            trainer.train()
        clock.started = serve.failed()


def test_a_server_that_hangs(make_trainer, serve, time_limit) -> None:
    url = serve("silence")
    trainer = make_trainer(vllm_mode="server", vllm_server_base_url=url, vllm_server_timeout=2)
    with time_limit(8) as clock:
        with ends(trainer, UnavailableError, "within 2 s"):
            trainer.train()
        clock.started = serve.failed()


def test_a_server_that_dies_between_two_steps(make_trainer, serve, time_limit) -> None:
    trainer = make_trainer(vllm_mode="server", vllm_server_base_url=(url := serve()), vllm_server_timeout=30)
    with time_limit(10) as clock, ends(trainer, WeightSyncError, rf"{url}", step=1):
        trainer.weight_check.check_step = lambda *_, **__: None  # the fake's log-probs are not the model's
        record = trainer._record
        trainer._record = lambda *a: [record(*a), serve.process.kill(), clock.start()]
        trainer.train()


def test_an_endless_answer_does_not_fill_the_memory(make_trainer, serve, time_limit) -> None:
    trainer = make_trainer(vllm_mode="server", vllm_server_base_url=(url := serve("endless")), vllm_server_timeout=30)
    with time_limit(20) as clock:
        with ends(trainer, UnavailableError, "more than"):
            trainer.train()
        clock.started = serve.failed()
    sent = httpx.get(f"{url}/sent", trust_env=False).json()
    assert 16 << 20 < sent["bytes"] < sent["answers"] * (32 << 20)


class Stale(TransformersEngine):
    """Samples from weights that are never replaced, and reports the new version."""

    def __init__(self) -> None:
        super().__init__(tiny_model(), build_tokenizer())


class StaleVersion(Stale):
    """Its rollouts have the old version."""

    def generate(self, *arguments: Any) -> Any:
        return replace(super().generate(*arguments), weight_version=0)


@pytest.mark.parametrize(
    ("engine", "message"),
    [(StaleVersion, "got completions of weight version 0"), (Stale, "got a max difference")],
    ids=["says-so", "does-not"],
)
def test_an_engine_of_the_users_with_stale_weights(make_trainer, time_limit, engine, message) -> None:
    trainer = make_trainer(rollout_engine=engine())
    with time_limit(10), ends(trainer, WeightSyncError, message, step=1):
        trainer.train()


def test_stale_weights_are_a_warning_where_the_run_says_so(make_trainer, caplog) -> None:
    trainer = make_trainer(rollout_engine=Stale(), logprob_mismatch="warn")
    trainer.train()
    assert trainer.step == 3
    assert caplog.text.count("got a max difference") == 1


def test_a_difference_to_the_trainers_own_model_is_a_warning(make_trainer, monkeypatch, caplog) -> None:
    sampled = TransformersEngine.generate

    def rounded(self: TransformersEngine, *arguments: Any) -> Any:
        rollouts = sampled(self, *arguments)
        return replace(rollouts, sampling_logprobs=[[p - 0.01 for p in row] for row in rollouts.sampling_logprobs])

    monkeypatch.setattr(TransformersEngine, "generate", rounded)
    trainer = make_trainer(use_vllm=False)
    trainer.train()
    assert trainer.step == 3
    assert caplog.text.count("got a max difference") == 1
    with pytest.raises(WeightSyncError, match="got a max difference"):
        make_trainer(use_vllm=False, logprob_mismatch="fail", overwrite_output_dir=True).train()


@pytest.mark.engine
def test_vllm_in_process_evaluates_after_training(make_trainer) -> None:
    trainer = make_trainer(use_vllm=True, max_steps=1)
    trainer.train()
    first = trainer.engine
    for _ in range(2):
        assert trainer.evaluate([{"prompt": "1+2="}])["eval_reward"] >= 0
    assert trainer.engine is not first
    assert trainer.engine.weight_version == 1
    trainer.end()


@pytest.mark.engine
def test_vllm_in_process_that_fails_or_does_not_take_the_weights(make_trainer, monkeypatch, time_limit) -> None:
    model = tiny_model()
    trainer = make_trainer(model=model, use_vllm=True)
    assert isinstance(trainer.engine, VLLMEngine)
    llm, called = trainer.engine._llm, []
    # vLLM reports success for every sync, and has loaded the first alone.
    monkeypatch.setattr(llm, "collective_rpc", lambda *a, **k: called.append(a))
    with (
        time_limit(20) as clock,
        ends(trainer, WeightSyncError, "got a max difference .* vllm engine .* weight version 1", step=1),
    ):
        record = trainer._record
        trainer._record = lambda *a: [record(*a), clock.start()]
        trainer.train()
    assert called == [("reload_weights",)]


@pytest.mark.engine
def test_vllm_in_process_that_raises(make_trainer, monkeypatch, time_limit) -> None:
    trainer = make_trainer(use_vllm=True)
    executor = trainer.engine._llm.llm_engine.engine_core.engine_core.model_executor

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(executor, "execute_model", fail)
    with (
        time_limit(20),
        ends(trainer, UnavailableError, "RuntimeError from vLLM while sampling.*out of memory"),
    ):
        trainer.train()
