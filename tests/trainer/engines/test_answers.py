"""Answers of any shape: an error of ours that names the server, or a result that all checks have passed, in time."""

import copy
import json
import re
import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_grpo.errors import FusedGRPOError
from fused_grpo.trainer.engines.checked_engine import checked_generate, checked_load_weights
from fused_grpo.trainer.engines.server import replicas, server_engine
from fused_grpo.trainer.engines.server.replicas import Choice, Logprobs, parsed
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.engines.server.server_info import Model, ModelConfig
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import SamplingParams

# Nothing that a server must not say is missing: "\x00raw" stands for bytes that are no JSON.
WRONG = [
    *(None, True, False, 0, 5, -1, 44, 1 << 31, 1 << 63, 10**400, -0.0, 0.5, 1e308, -1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "\ud800",
        "token_id:5",
        "9" * 5000,
        "\x00raw",
        [],
        {},
        [[]],
        [5],
        [None],
        ["x"],
        [True],
        [1e400],
        {"a": 5},
    ),
    *({"token_id:99999999999999999999": 0.0}, {"token_id:-1": 0.0}, {"5": 1e308}, {"token_id:²": -1.0}, [{}] * 3),
]
ROUTES = ["/health", "/version", "/v1/models", "/server_info?config_format=json", "/weight_info", "/reset_prefix_cache"]
ROUTES += ["/update_weight_version", "/weight_checker", "/collective_rpc", *["/v1/completions"] * 6]
PROMPTS, VOCABULARY = [[4, 3], [5, 3]], 44
EXAMPLES = 40
SAMPLING = SamplingParams(n=2, max_tokens=8, seed=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    for (server,) in runpy.run_path(str(Path(__file__).with_name("fake_vllm.py")))["serving"](1):
        yield server


@pytest.fixture(scope="module")
def converse(server, build_model, tokenizer) -> Callable[..., Any]:
    """A whole conversation: start, weights, completions."""
    model = build_model("llama", tied=True)

    def run(sampling: SamplingParams) -> Any:
        engine = VLLMServerEngine(model, tokenizer, base_urls=[server.url], timeout=5.0)
        checked_load_weights(engine, checkpoint_weights(model), version=0)
        return checked_generate(engine, PROMPTS, sampling, vocab_size=VOCABULARY)

    return run


@st.composite
def changes(draw: Callable[..., Any]) -> Callable[[Any], bytes]:
    """A change of an answer: one place is something else, is gone or is there twice; or it is cut off."""
    steps, wrong = draw(st.lists(st.integers(0, 7), max_size=7)), draw(st.sampled_from(WRONG))
    kind, cut = draw(st.sampled_from(["other", "other", "other", "gone", "twice", "cut"])), draw(st.floats(0, 1))

    def change(answer: Any) -> bytes:
        answer = at = [copy.deepcopy(answer)]
        key: Any = 0
        for step in steps:
            if not isinstance(at[key], dict | list) or not at[key]:
                break
            at = at[key]
            key = step % len(at) if isinstance(at, list) else sorted(at)[step % len(at)]
        if kind == "gone":
            del at[key]
        elif kind == "twice" and isinstance(at, list):
            at.append(at[key])
        elif kind != "cut":
            at[key] = wrong
        text = json.dumps(answer)[1:-1].encode()
        return b"\xff{" if wrong == "\x00raw" else text[: int(len(text) * cut)] if kind == "cut" else text

    return change


@pytest.mark.parametrize(
    "sampling", [SAMPLING, replace(SAMPLING, top_k=5, sampling_support="auto")], ids=["all", "kept"]
)
def test_answers_of_any_shape_end_in_an_error_of_ours_or_in_a_result(server, converse, monkeypatch, sampling) -> None:
    monkeypatch.setattr(replicas, "_PAUSES", (0.0,))
    monkeypatch.setattr(replicas, "_HEALTH_INTERVAL", 0.01)
    monkeypatch.setattr(server_engine, "_RESET_ATTEMPTS", 2)
    outcomes = []

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(route=st.sampled_from(ROUTES), change=changes())
    def once(route: str, change: Callable[[Any], bytes]) -> None:
        server.mutate = lambda path, answer: change(answer) if path == route else answer
        start = time.monotonic()
        try:
            samples = converse(sampling)
        except FusedGRPOError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("result")
            assert all(type(token) is int and token < VOCABULARY for one in samples for token in one.completion_ids)
        assert time.monotonic() - start < 7

    once()
    server.mutate = lambda path, answer: json.dumps(answer).encode()
    samples = converse(sampling)
    assert samples
    assert all(sample.completion_ids for sample in samples)
    errors = [outcome for outcome in outcomes if outcome != "result"]
    assert errors
    assert [error for error in errors if not re.search(rf"{server.url}|vllm-server engine|max_model_len", error)] == []


def test_an_answer_is_compared_all_the_way_down() -> None:
    logprobs = {"token_logprobs": [-1], "top_logprobs": [{"token_id:3": -1.5}]}
    answer = {"index": 0, "token_ids": [3], "finish_reason": "stop", "text": 5, "logprobs": logprobs}
    (choice,) = parsed(list[Choice], [answer], "it")
    assert choice == Choice(0, [3], Logprobs([-1.0], [{"token_id:3": -1.5}]), "stop")
    assert type(choice.logprobs.token_logprobs[0]) is float
    assert parsed(ModelConfig, {"logprobs_mode": "raw"}, "it") == ModelConfig("raw", None, 0)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Model, {"id": "m"}, "it is without max_model_len"),
        (Model, {"id": "m", "max_model_len": True}, r"it\.max_model_len is bool, want int"),
        (Model, {"id": "\ud800", "max_model_len": 1}, "surrogates not allowed"),
        (Logprobs, {"token_logprobs": [-1.0, None]}, r"it\.token_logprobs\[1\] is NoneType, want float"),
        (Logprobs, {"token_logprobs": [10**400]}, r"it\.token_logprobs\[0\] is int, want float"),
        (
            Logprobs,
            {"token_logprobs": [], "top_logprobs": [{"a": "b"}]},
            r"top_logprobs\[0\]\['a'\] is str, want float",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(kind, value, message) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(kind, value, "it")


def test_a_list_of_a_million_tokens_takes_no_second() -> None:
    start = time.thread_time()  # not of what else the machine does
    parsed(Logprobs, {"token_logprobs": [-0.5] * 1_000_000}, "it")
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize(
    "listed", [{"token_id:4": 1e308}, {"token_id:4": 10**200}, {"5": 0.0, "token_id:4": 0.0}, {"²": 0.0}]
)
def test_a_list_of_kept_tokens_that_vllm_cannot_send_is_an_error_of_ours(server, converse, listed) -> None:
    def change(path: str, answer: Any) -> Any:
        for choice in answer.get("choices", []):
            choice["logprobs"]["top_logprobs"] = [listed] * 2
        return answer

    server.mutate = change
    with pytest.raises(FusedGRPOError, match=r"vllm-server engine|kept tokens called '²', want token ids at http"):
        converse(replace(SAMPLING, top_k=5, sampling_support="auto"))
    server.mutate = lambda path, answer: answer


def test_no_model_is_an_error_before_the_first_weights(server, converse) -> None:
    server.mutate = lambda path, answer: {"data": []} if path == "/v1/models" else answer
    with pytest.raises(FusedGRPOError, match=f"got no model in /v1/models at {server.url}"):
        converse(SAMPLING)
    server.mutate = lambda path, answer: answer
