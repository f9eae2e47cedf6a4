"""Answers that are lost between the trainer and a server, as behind a proxy: what may be asked again is."""

import asyncio
from typing import Any

import httpx
import pytest

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer.engines.server import replicas
from fused_grpo.trainer.engines.server.replicas import Replica
from fused_grpo.trainer.types import SamplingParams

pytestmark = pytest.mark.usefixtures("short_pauses")
PROMPTS = [[prompt, 3] for prompt in range(4, 24)]
SAMPLING = SamplingParams(n=3, max_tokens=8, seed=0)
EXPECTED = [[prompt, index] for prompt, _ in PROMPTS for index in range(SAMPLING.n)]
OF_SYNCS = ["reload_weights", "/reset_prefix_cache", "/update_weight_version"]


@pytest.fixture(scope="module")
def model(build_model):
    return build_model("llama", tied=True)


@pytest.mark.parametrize("path", ["/v1/models", "/server_info?config_format=json", "/version", "/weight_info"])
def test_what_is_only_read_is_asked_for_again(connect, servers, monkeypatch, path) -> None:
    faults, get = iter([503, 429]), servers[0].get
    monkeypatch.setattr(servers[0], "get", lambda asked: next(faults, get(asked)) if asked == path else get(asked))
    assert connect(1).generate(PROMPTS[:1], SAMPLING).completion_ids == EXPECTED[: SAMPLING.n]
    assert next(faults, None) is None


@pytest.mark.parametrize("asked", ["get_model_inspection", "/weight_checker", *OF_SYNCS])
@pytest.mark.parametrize("fault", [503, None])
def test_what_a_start_and_a_sync_ask_is_asked_again(connect, servers, monkeypatch, caplog, asked, fault) -> None:
    faults, post = iter([fault, fault]), servers[0].post

    def lost(path: str, body: dict[str, Any]) -> Any:
        answer = post(path, body)
        return next(faults, answer) if asked in (path, body.get("method")) else answer

    monkeypatch.setattr(servers[0], "post", lost)
    servers[0].model = "Qwen2ForCausalLM()"
    assert connect(1).generate(PROMPTS[:1], SAMPLING).completion_ids == EXPECTED[: SAMPLING.n]
    assert next(faults, "none left") == "none left"
    assert "does not say which model" not in caplog.text


def test_what_vllm_itself_cannot_load_is_not_sent_again(connect, servers) -> None:
    """It may say less the second time: the first one has left a layer half loaded."""
    servers[0].refuses_weights = True
    with pytest.raises(WeightSyncError, match="status 500 from /collective_rpc"):
        connect(1)
    assert [body["method"] for path, body in servers[0].calls if path == "/collective_rpc"].count("reload_weights") == 1


@pytest.mark.parametrize(("asked", "paused"), [("7", 7.0), ("9" * 400, 60.0), ("0", 0.01), ("soon", 0.01)])
def test_a_busy_server_is_asked_again_when_it_says(monkeypatch, asked, paused) -> None:
    pauses, busy = list[float](), httpx.Response(503, headers={"Retry-After": asked}, stream=httpx.ByteStream(b""))
    answers = iter([busy, httpx.Response(200, stream=httpx.ByteStream(b'{"version": "1"}'))])

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda request: next(answers))) as client:
            return await Replica("http://server", None).ask(client, "/version", field="version", kind=str)

    monkeypatch.setattr(replicas.asyncio, "sleep", sleep)
    assert (asyncio.run(ask()), pauses) == ("1", [paused])


def test_a_server_that_does_not_say_its_version_has_no_other_weights(connect, servers, monkeypatch) -> None:
    """Which reads as another trainer, or a restart, and is neither."""
    engine, get, is_down = connect(1), servers[0].get, False
    monkeypatch.setattr(servers[0], "get", lambda asked: 503 if is_down and asked == "/weight_info" else get(asked))
    assert engine.generate(PROMPTS, SAMPLING).completion_ids == EXPECTED
    is_down = True
    with pytest.raises(UnavailableError, match=r"with the weights of the last sync: status 503 from /weight_info"):
        engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(
        WeightSyncError, match=r"got weight version 1 not on every server: got status 503 from /weight_"
    ):
        engine.load_weights([], version=1)
