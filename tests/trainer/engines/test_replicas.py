"""The server engine with servers that fail: no completion is counted twice or stale, and no call hangs."""

import asyncio
import signal
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, WeightSyncError
from fused_grpo.trainer.engines.server import replicas
from fused_grpo.trainer.engines.server.replicas import Replicas
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import SamplingParams

pytestmark = pytest.mark.usefixtures("short_pauses")
PROMPTS = [[prompt, 3] for prompt in range(4, 24)]
SAMPLING = SamplingParams(n=3, max_tokens=8, seed=0)
KEY = "sk-secret"
EXPECTED = [[prompt, index] for prompt, _ in PROMPTS for index in range(SAMPLING.n)]


@pytest.fixture(scope="module")
def model(build_model):
    return build_model("llama", tied=True)


def test_prompts_are_spread_over_replicas_each_with_its_own_seed(connect, servers) -> None:
    rollouts = connect().generate(PROMPTS, SAMPLING)
    assert rollouts.completion_ids == EXPECTED
    assert rollouts.sampling_logprobs[:2] == [[-0.5, -1.0], [-0.5, -2.0]]
    assert sum(server.served for server in servers) == len(PROMPTS)
    assert min(server.served for server in servers) >= 5
    assert len({body["seed"] for server in servers for body in server.seen}) == len(PROMPTS)


@pytest.mark.parametrize(("rank", "busy"), [(0, 0), (1, 1), (2, 0), (7, 1)])
def test_each_rank_begins_with_another_server(connect, servers, model, monkeypatch, rank, busy) -> None:
    """Or ranks with one prompt each would all wait for the first one."""
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.is_initialized", lambda: True)
        patch.setattr("torch.distributed.get_rank", lambda: rank)
        engine = connect(synced=False)
    engine.load_weights(checkpoint_weights(model), version=0)
    engine.generate(PROMPTS[:1], SAMPLING)
    assert [server.served for server in servers] == [int(busy == 0), int(busy == 1)]


def test_a_request_sets_all_options_that_a_server_takes_from_the_model(connect, servers) -> None:
    sampling = SamplingParams(
        n=2, max_tokens=8, temperature=0.7, top_p=0.9, structured_outputs_regex="a+", extra={"stop": ["."]}
    )
    connect(1).generate(PROMPTS[:1], sampling)
    sent = servers[0].seen[0]
    assert sent["stop_token_ids"] == [1, 7]
    assert sent["structured_outputs"] == {"regex": "a+"}
    given = {"n": 2, "temperature": 0.7, "top_p": 0.9, "stop": ["."]}
    defaults = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert (given | defaults).items() <= sent.items()


def test_a_server_that_lists_too_few_tokens_is_not_asked_for_supports(connect, servers) -> None:
    truncated = replace(SAMPLING, top_k=20, sampling_support="auto")
    servers[0].max_logprobs, servers[1].max_logprobs = -1, 29
    assert connect(2).generate(PROMPTS[:1], truncated).listed_tokens is None
    rollouts = connect(1).generate(PROMPTS[:1], truncated)
    assert servers[0].seen[-1]["logprobs"] == 30
    assert [one.ids.tolist() for one in rollouts.listed_tokens] == rollouts.completion_ids


def test_score_centering_is_refused_of_a_server_that_lists_too_few_tokens(connect, servers) -> None:
    likely = replace(SAMPLING, score_centering="topk", score_centering_topk=30)
    servers[0].max_logprobs, servers[1].max_logprobs = 30, 29
    with pytest.raises(UnsupportedError, match=r"a vllm-server engine that lists .* 29 .*fix: --max-logprobs=30, or"):
        connect(2, support=likely)
    connect(1, support=likely).generate(PROMPTS[:1], likely)
    assert servers[0].seen[-1]["logprobs"] == 30


@pytest.mark.parametrize("fault", ["no answer", "cut off", 500, 503, 429, 408, {"finish_reason": "abort"}])
def test_a_request_that_fails_is_asked_again_and_counted_once(connect, servers, fault) -> None:
    engine = connect()
    servers[0].faults = iter([fault] * 3)
    rollouts = engine.generate(PROMPTS, SAMPLING)
    assert rollouts.completion_ids == EXPECTED
    assert sum(server.served for server in servers) == len(PROMPTS) + 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("one too few", r"completions \[0, 1\] where 3 were asked for"),
        ("one twice", r"completions \[0, 0, 1\] where 3 were asked for"),
        (400, "status 400 from /v1/completions"),
        (413, "status 413 from .*; a proxy before it takes no body of that size"),
        ("not finite", r"status 400 .*'; it has log-probs that are not finite"),
        ({"finish_reason": "length"}, "a completion that ended for its length after 2 of 8 tokens"),
        ("not json", "an answer from /v1/completions that is not JSON: '<html>"),
        ("json of another kind", r"an answer from /v1/completions that vLLM does not give .*it is list, want dict"),
        ("nothing", r"that vLLM does not give .*choices is NoneType, want list"),
        ({"index": None}, r"that vLLM does not give .*choices\[2\]\.index is NoneType, want int"),
        ({"token_ids": 5}, r"choices\[2\]\.token_ids is int, want list"),
        ("gzip", "an answer from /v1/completions with Content-Encoding 'gzip', though identity was asked for"),
        ("two gzips", "Content-Encoding 'gzip, gzip'"),
        ("unknown encoding", "Content-Encoding 'br'"),
        ("error in gzip", "Content-Encoding 'gzip'"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_refused_at_once(connect, servers, fault, message) -> None:
    engine = connect(1)
    servers[0].faults = iter([fault] * 99)
    with pytest.raises(UnavailableError, match=rf"got .*{message}.* at {servers[0].url}, want .*fix:"):
        engine.generate(PROMPTS[:1], SAMPLING)
    assert servers[0].served == 1
    assert servers[0].encodings == {"identity"}


def test_another_replica_serves_when_one_goes_down(connect, servers, caplog) -> None:
    engine = connect()
    servers[0].stop()
    assert engine.generate(PROMPTS, SAMPLING).completion_ids == EXPECTED
    assert servers[1].served == len(PROMPTS)
    assert f"{servers[0].url} is down" in caplog.text
    with pytest.raises(WeightSyncError, match=f"ConnectError.* at {servers[0].url}"):
        engine.load_weights([("model.norm.weight", torch.zeros(64))], version=1)


def test_no_replica_left_is_an_error_that_comes_soon(connect, servers) -> None:
    engine = connect()
    for server in servers:
        server.stop()
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=rf"want completions from {servers[0].url}, {servers[1].url}; fix:"):
        engine.generate(PROMPTS, SAMPLING)
    assert time.monotonic() - start < 15


def test_a_server_that_hangs_is_an_error_at_the_deadline(connect, servers) -> None:
    engine = connect(1, timeout=1.0)
    servers[0].faults = iter(["silence"] * 99)
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=rf"no end of completing 20 prompts within 1 s \({servers[0].url}.*fix:"):
        engine.generate(PROMPTS, SAMPLING)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(("before", "problem"), [(None, "no answer from /v1/completions"), (500, "status 500 .*")])
def test_at_the_deadline_a_server_that_answers_is_not_named(connect, servers, before, problem) -> None:
    engine = connect(timeout=2.0)
    servers[1].faults = iter([500])  # which passes
    assert engine.generate(PROMPTS, SAMPLING).completion_ids == EXPECTED
    servers[0].faults = iter([before, *["silence"] * 99][before is None :])
    with pytest.raises(UnavailableError, match=rf"within 2 s \({servers[0].url}: {problem}\), want") as raised:
        engine.generate(PROMPTS, SAMPLING)
    assert servers[1].url not in str(raised.value)


def test_a_server_that_never_comes_up_is_said_and_an_error_at_the_deadline(model, tokenizer, caplog) -> None:
    with pytest.raises(
        UnavailableError, match=r"no end of getting ready within 1 s .*ConnectError.*fix: start the server"
    ):
        VLLMServerEngine(model, tokenizer, base_urls=["http://127.0.0.1:9"], timeout=1.0)
    assert caplog.text.count("waiting for http://127.0.0.1:9, which is not up: ConnectError ([Errno 111] ") == 1


def test_ctrl_c_ends_the_requests_too(connect, servers) -> None:
    """In a notebook the process goes on."""
    engine = connect(1, max_concurrency=2)
    ctrl_c = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    servers[0].faults = (each() or "silence" for each in (bool, ctrl_c.start))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SAMPLING)
    signal.signal(signal.SIGINT, before)
    servers[0].released.set()
    assert engine.generate(PROMPTS[:1], SAMPLING).completion_ids == EXPECTED[: SAMPLING.n]
    assert servers[0].served == 3


def test_servers_may_call_their_model_by_names_of_their_own(connect, servers) -> None:
    servers[1].name = "/another/path"
    connect().generate(PROMPTS, SAMPLING)
    assert min(server.served for server in servers) >= 5


def test_completions_of_a_server_restarted_since_sync_are_sampled_again(connect, servers) -> None:
    engine = connect()
    servers[0].weight_version = "default"
    assert engine.generate(PROMPTS, SAMPLING).completion_ids == EXPECTED
    assert sorted(body["prompt"] for body in servers[1].seen) == PROMPTS
    servers[1].weight_version = "default"
    with pytest.raises(UnavailableError, match="none of them up with the weights of the last sync"):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("then", [500, None], ids=["then it fails", "then it goes on"])
def test_completions_sampled_while_weights_changed_are_sampled_again(connect, servers, then) -> None:
    engine = connect(max_concurrency=4)
    servers[0].faults = iter([None, "new weights", None, *[then] * 99])
    assert engine.generate(PROMPTS, SAMPLING).completion_ids == EXPECTED
    assert servers[0].served >= 3
    assert sorted(body["prompt"] for body in servers[1].seen) == PROMPTS


def test_a_server_that_fails_is_out_for_this_generation_alone(connect, servers, caplog) -> None:
    engine = connect(max_concurrency=1)
    servers[0].faults = iter([500] * 3)
    for served in ([3, 4], [7, 4]):
        assert engine.generate(PROMPTS[:4], SAMPLING).completion_ids == EXPECTED[: 4 * SAMPLING.n]
        assert [server.served for server in servers] == served
    assert caplog.text.count(f"{servers[0].url} is down or has other weights; sampling without it: status 500") == 1


def test_every_server_that_failed_is_named_with_its_reason(connect, servers) -> None:
    engine = connect()
    servers[0].faults, servers[1].faults = iter([500] * 99), iter(["no answer"] * 99)
    whys = [f"status 500.* at {servers[0].url}", f"RemoteProtocolError.* at {servers[1].url}"]
    with pytest.raises(
        UnavailableError, match=rf"none of them up .* last sync: {'; '.join(whys)}, want completions from "
    ):
        engine.generate(PROMPTS[:1], SAMPLING)
    assert [server.served for server in servers] == [3, 3]


def test_a_fault_that_passes_is_waited_for_with_a_growing_pause(connect, servers, monkeypatch) -> None:
    engine, sleep, pauses = connect(1), asyncio.sleep, []
    servers[0].faults = iter([500, "cut off"])
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pauses.append(seconds) or sleep(0))
    assert engine.generate(PROMPTS[:1], SAMPLING).completion_ids == EXPECTED[: SAMPLING.n]
    assert (servers[0].served, pauses) == (3, [0.01, 0.03])


def test_a_server_without_the_newer_routes_is_synced_and_sampled_from(connect, servers) -> None:
    servers[0].old = True
    assert connect(1).generate(PROMPTS, SAMPLING).completion_ids == EXPECTED


def test_every_server_reads_every_weight_and_the_files_are_gone_afterwards(connect, servers, model) -> None:
    connect().load_weights(model.named_parameters(), version=3)
    expected = model.state_dict()
    for server in servers:
        assert server.weights.keys() == expected.keys()
        assert all(torch.equal(server.weights[name], expected[name]) for name in expected)
        assert server.weight_version.endswith(":3")
        assert server.folder.name.startswith("fused-grpo-weights-")
        assert not server.folder.exists()


def test_a_sync_that_one_server_refuses_is_an_error_and_no_rollouts_follow(connect, servers, model) -> None:
    engine = connect()
    servers[1].refuses_weights = True
    with pytest.raises(WeightSyncError, match=f"version 4 not on every server: .*500 .* at {servers[1].url}"):
        engine.load_weights(checkpoint_weights(model), version=4)
    assert not servers[1].folder.exists()
    with pytest.raises(WeightSyncError, match="generate before weights were loaded"):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("is_late", [False, True], ids=["it fails halfway", "it goes on"])
def test_weights_that_another_trainer_is_sending_are_no_ones(connect, servers, model, is_late) -> None:
    """Its version comes when all are there, and until then the one before would be a lie."""
    engine, other = connect(1), connect(1, synced=False)
    servers[0].refuses_weights = not is_late
    post = servers[0].post

    def reset(path: str, body: dict[str, Any]) -> Any:
        if path == "/reset_prefix_cache":
            with pytest.raises(UnavailableError, match="other weights than those of the last sync"):
                engine.generate(PROMPTS, SAMPLING)
        return post(path, body)

    servers[0].post = reset
    with nullcontext() if is_late else pytest.raises(WeightSyncError):
        other.load_weights(checkpoint_weights(model), version=0)
    with pytest.raises(UnavailableError, match="other weights than those of the last sync"):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("version", ["default", "another trainer's"])
def test_a_sync_during_which_a_server_got_other_weights_is_none(connect, servers, model, version) -> None:
    engine, post = connect(), servers[1].post

    def replaced(path: str, body: dict[str, Any]) -> Any:
        answer = post(path, body)
        if body.get("method") == "reload_weights":
            servers[1].weight_version = version
        return answer

    servers[1].post = replaced
    with pytest.raises(WeightSyncError, match=f"version 1 .*got other weights than were sent: .* at {servers[1].url}"):
        engine.load_weights(checkpoint_weights(model), version=1)
    assert servers[1].weight_version == version


def test_a_new_engine_needs_weights_first(connect) -> None:
    engine = connect(synced=False)
    assert engine.weight_version == -1
    with pytest.raises(WeightSyncError, match=r"fix: load_weights"):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs, want processed_logprobs"),
        (
            {"is_vllm": False},
            "as that of `trl vllm-serve` is, want vLLM's own; fix: restart it as docs/engines.md says",
        ),
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"watermark_config": {"algorithm": "gumbel"}}, "with --watermark-config, want .*fix: restart it without it"),
        ({"speculative_config": {"method": "ngram"}}, "with --speculative-config on a CPU, .*fix: restart it"),
        ({"tied": True}, r"ties lm_head.weight to the embedding.*server_folder"),
        ({"max_model_len": 9}, "for 9 tokens, want 60 .*--max-model-len 60"),
        ({"model": "LlamaForCausalLM(\n  (0-7): 8 x LlamaDecoderLayer(\n"}, "has 8 layers, not 2"),
    ],
)
def test_a_server_started_with_options_that_do_not_fit_is_refused(connect, servers, model, options, message) -> None:
    engine, message = connect(max_model_len=60), rf"got a server at {servers[0].url} .*{message}"
    vars(servers[0]).update(options | {"weight_version": "default"})
    with pytest.raises((InputError, UnsupportedError), match=message):
        connect(max_model_len=60)
    # A restart is noticed at the next sync, before anything is sent.
    before = len(servers[1].calls)
    with pytest.raises(WeightSyncError, match=f"version 4 not on every server: {message}") as error:
        engine.load_weights(checkpoint_weights(model), version=4)
    assert str(error.value).count("fix: ") == 1  # the refusal's own
    assert not any(path == "/collective_rpc" for path, _ in servers[1].calls[before:])


def test_a_server_that_reports_what_vllm_does_not_is_refused(connect, servers) -> None:
    servers[0].max_model_len = "many"
    with pytest.raises(UnavailableError, match=rf"that vLLM does not give \(ValueError: .*\) at {servers[0].url}"):
        connect()


def test_a_server_for_shorter_sequences_is_refused(connect) -> None:
    with pytest.raises(InputError, match=r"for 64 tokens, want 65 .*--max-model-len 65"):
        connect(max_model_len=65)
    with pytest.raises(InputError, match="prompt 0 of 2 tokens and max_tokens=63"):
        connect(max_model_len=64).generate(PROMPTS, SamplingParams(n=1, max_tokens=63))


def test_the_other_servers_may_end_what_they_do_when_one_fails(monkeypatch) -> None:
    # A connection that is cut before its first step leaves a warning behind.
    answered = list[str]()

    async def work(_: Any, replica: replicas.Replica) -> None:
        await asyncio.sleep(0.0 if replica is fleet.all[1] else hold)
        if replica is fleet.all[1]:
            raise replicas.RequestError("refused")
        answered.append(replica.url)

    fleet, hold = Replicas(["http://localhost:1", "http://localhost:2"]), 0.05
    with pytest.raises(UnavailableError, match="refused at http://localhost:2"):
        fleet.each(work, doing="a test")
    assert answered == ["http://localhost:1"]

    monkeypatch.setattr(replicas, "_GRACE", 0.05)
    hold, start = 60.0, time.monotonic()
    with pytest.raises(UnavailableError, match="refused at http://localhost:2"):
        fleet.each(work, doing="a test")
    assert time.monotonic() - start < 30
    assert len(answered) == 1


@pytest.mark.parametrize("urls", [[], ["http://localhost:8000", "http://localhost:8000/v1"]])
def test_no_server_and_one_server_twice_are_refused(urls) -> None:
    with pytest.raises(InputError, match="want one URL or several different ones; fix:"):
        Replicas(urls)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (500, r"on order: Bearer \.\.\."),
        ("not json", r"It works! Bearer \.\.\."),
        ("long page", r"--Bearer \.\.\.'"),
        ({"finish_reason": KEY}, r"ended with '\.\.\.'"),
    ],
    ids=["error", "page", "long page", "reason"],
)
def test_the_key_is_sent_to_the_server_and_shown_nowhere(connect, servers, caplog, monkeypatch, fault, said) -> None:
    monkeypatch.setattr(replicas, "_PAUSES", (0.0,))
    engine = connect(1, api_key=KEY)
    servers[0].faults = iter([fault] * 9)
    with caplog.at_level("DEBUG"), pytest.raises(UnavailableError, match=said) as raised:
        engine.generate(PROMPTS[:1], SAMPLING)
    assert "sk-" not in "".join(traceback.format_exception(raised.value)) + f"{caplog.text}{vars(engine)}"


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        (None, "VLLMServerEngine has an api_key for a server with --api-key"),
        ("sk-other", "its --api-key is not the api_key of this VLLMServerEngine"),
    ],
)
def test_a_server_with_a_key_says_which_is_wanted_and_serves_with_it(connect, servers, key, advice) -> None:
    servers[0].api_key = KEY
    with pytest.raises(UnavailableError, match=rf"status 401 from /v1/models: .*; {advice} at {servers[0].url}"):
        connect(1, api_key=key)
    engine = connect(1, api_key=KEY)
    assert engine.generate(PROMPTS, SAMPLING).completion_ids == EXPECTED
    servers[0].api_key = "sk-of-a-restart"
    with pytest.raises(UnavailableError, match=r"status 401 from /v1/completions: .* is not the api_key of this"):
        engine.generate(PROMPTS, SAMPLING)


def test_it_works_where_an_event_loop_runs_already(connect) -> None:
    async def cell() -> list[list[int]]:
        return connect().generate(PROMPTS, SAMPLING).completion_ids

    assert asyncio.run(cell()) == EXPECTED


def test_a_closed_engine_refuses_and_leaves_the_server_running(connect, servers) -> None:
    engine = connect()
    engine.close()
    engine.close()
    with pytest.raises(UnavailableError, match="closed vllm-server engine"):
        engine.generate(PROMPTS, SAMPLING)
    assert connect().generate(PROMPTS, SAMPLING).completion_ids == EXPECTED


def test_an_engine_that_a_run_has_closed_samples_once_it_is_woken(connect, servers) -> None:
    engine = connect()
    engine.close()
    engine.wake()
    engine.load_weights({"a": torch.ones(2)}.items(), version=7)
    assert engine.generate(PROMPTS, SAMPLING).completion_ids == EXPECTED
    assert {server.weight_version.rpartition(":")[2] for server in servers} == {str(engine.weight_version)} == {"7"}
