"""vLLM in the trainer's process: the state of the process is restored, and nothing is left behind."""

import copy
import gc
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Plain

import numpy as np
import pytest
import torch

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, WeightSyncError
from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.engines.sampling import VLLM_EXTRAS, vllm_requests
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions
from fused_grpo.trainer.engines.vllm.start_vllm import config_folder
from fused_grpo.trainer.types import SamplingParams, Turn

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
SAMPLING = SamplingParams(n=2, max_tokens=4, seed=0)
OPTIONS = VLLMOptions(max_model_len=64, dtype=torch.float32)


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder))
    return folder / "fused-grpo"


@pytest.fixture
def model(build_model):
    return build_model("qwen2", tied=True)


def process_state() -> dict[str, object]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "cpus": os.sched_getaffinity(0),
        "excepthook": sys.excepthook,
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "tf32": torch.backends.cuda.matmul.fp32_precision,
        "frozen objects": gc.get_freeze_count(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.fixture
def engine(model, tokenizer) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(model, tokenizer, OPTIONS)
    yield engine
    engine.close()


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32")
def test_the_process_is_as_it_was_after_start_sampling_sync_and_close(model, tokenizer, prompts) -> None:
    torch.manual_seed(5)
    gc.unfreeze()  # what the suite has frozen
    before = process_state()
    engine = VLLMEngine(model, tokenizer, OPTIONS)
    assert process_state() == before
    engine.generate(prompts[:2], SAMPLING)
    engine.load_weights(model.named_parameters(), version=1)
    assert process_state() == before
    engine.close()
    assert process_state() == before
    assert not torch.distributed.is_initialized()


def test_closing_twice_is_fine_and_leaves_no_temporary_file(temporary_folder, model, tokenizer, prompts) -> None:
    engine = VLLMEngine(model, tokenizer, OPTIONS)
    engine.close()
    engine.close()
    assert list(temporary_folder.iterdir()) == []
    with pytest.raises(UnavailableError, match="closed"):
        engine.generate(prompts[:1], SAMPLING)


def test_a_start_that_fails_half_way_leaves_nothing(temporary_folder, model, tokenizer) -> None:
    given = {"kv_cache_memory_bytes": 1, "hf_token": "hf_secret"}
    with pytest.raises(UnavailableError, match=r"at its start.*'hf_token': '<redacted>'.*fix:") as caught:
        VLLMEngine(model, tokenizer, replace(OPTIONS, engine_options=given))
    assert "hf_secret" not in str(caught.value)
    assert list(temporary_folder.iterdir()) == []
    assert not torch.distributed.is_initialized()
    VLLMEngine(model, tokenizer, OPTIONS).close()


def test_what_vllm_compiles_is_found_again_for_the_same_model(cache, build_model, tokenizer) -> None:
    keys = []
    for _ in range(2):
        engine = VLLMEngine(build_model("qwen2"), tokenizer, OPTIONS)
        keys.append(engine._llm.llm_engine.model_config.compute_hash())
        engine.close()
    assert keys[0] == keys[1]
    assert [len(list(folder.glob("config.json"))) for folder in cache.iterdir()] == [1]


def test_another_config_or_tokenizer_has_another_folder(cache, build_model, tokenizer) -> None:
    models = [(build_model("qwen2", tied=True), untie) for untie in (False, True, False)]
    folders = [config_folder(model, tokenizer, untie=untie) for model, untie in models]
    assert (folders[0] == folders[2], len(set(folders))) == (True, 2)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = {"default": "{{ messages }}", "in a folder": "{{ messages[0] }}"}
    folders.append(config_folder(models[0][0], tokenizer, untie=False))
    tokenizer.chat_template["in a folder"] = "{{ messages[1] }}"
    folders.append(config_folder(models[0][0], tokenizer, untie=False))
    assert len(set(folders)) == 4
    assert sorted(map(str, cache.iterdir())) == sorted(set(folders))


def test_a_cache_that_cannot_be_written_is_said(cache, model, tokenizer) -> None:
    cache.write_text("a file")
    with pytest.raises(UnavailableError, match="fix: set VLLM_CACHE_ROOT"):
        config_folder(model, tokenizer, untie=True)


def test_a_user_without_a_home_is_told_the_variable_of_the_cache(monkeypatch, model, tokenizer) -> None:
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a number that is no user's, in a container
    with pytest.raises(UnavailableError, match="fix: set VLLM_CACHE_ROOT"):
        config_folder(model, tokenizer, untie=True)


def test_a_second_engine_at_the_same_time_is_refused(engine, model, tokenizer) -> None:
    with pytest.raises(UnavailableError, match=r"second vllm engine.*close\(\).*end\(\)"):
        VLLMEngine(model, tokenizer, OPTIONS)


def test_an_engine_that_is_starting_is_one_already(model, tokenizer, monkeypatch) -> None:
    second = partial(VLLMEngine, model, tokenizer, OPTIONS)
    starting = iter([second, second])
    monkeypatch.setattr(VLLMEngine, "_start", lambda *arguments: in_thread(next(starting)).result())
    for _ in range(2):  # the first has ended without an engine
        with pytest.raises(UnavailableError, match="second vllm engine"):
            second()


def test_a_prompt_without_room_is_refused_instead_of_cut_short(engine) -> None:
    with pytest.raises(InputError, match=r"prompt 0 of 61 tokens and max_tokens=4.*max_model_len=64"):
        engine.generate([[3] * 61], SAMPLING)
    assert len(engine.generate([[3] * 60], SAMPLING).completion_ids) == 2


def test_a_call_that_vllm_fails_closes_the_engine_and_leaves_no_requests(engine, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._llm.llm_engine.engine_core.engine_core.model_executor, "execute_model", fail)
    with pytest.raises(UnavailableError, match=r"RuntimeError from vLLM while sampling.*out of memory.*fix:"):
        engine.generate([[3, 4]], SAMPLING)
    with pytest.raises(UnavailableError, match="on a closed vllm engine"):
        engine.generate([[3, 4]], SAMPLING)


def test_a_slept_engine_has_no_weights_until_the_next_sync(engine, model, monkeypatch) -> None:
    # vLLM's CPU build cannot sleep: this is our side of it, the order of calls.
    calls: list[object] = []
    monkeypatch.setattr(engine, "_can_sleep", True)
    monkeypatch.setattr(engine._llm, "sleep", lambda level: calls.append(level))
    monkeypatch.setattr(engine._llm, "wake_up", lambda: calls.append("wake"))
    engine.sleep()
    engine.sleep()
    with pytest.raises(WeightSyncError, match=r"fix: wake\(\) before"):
        engine.load_weights(model.named_parameters(), version=1)
    engine.wake()
    with pytest.raises(WeightSyncError, match=r"fix: wake\(\), then load_weights"):
        engine.generate([[3, 4]], SAMPLING)
    engine.load_weights(model.named_parameters(), version=1)
    assert engine.generate([[3, 4]], SAMPLING).weight_version == 1
    assert calls == [2, "wake"]


def test_completions_stop_at_a_string(engine, tokenizer) -> None:
    rollouts = engine.generate([[3, 4], [5]], replace(SAMPLING, n=16, max_tokens=40, extra={"stop": ["5"]}))
    five = tokenizer.convert_tokens_to_ids("5")
    assert five in {completion[-1] for completion in rollouts.completion_ids}
    assert not any(five in completion[:-1] for completion in rollouts.completion_ids)


def test_an_option_whose_value_vllm_refuses_is_an_error_of_the_option(engine) -> None:
    with pytest.raises(InputError, match=r"that vLLM refuses: .*min_p.*fix:"):
        engine.generate([[3, 4]], replace(SAMPLING, min_p=2.0))
    assert len(engine.generate([[3, 4]], SAMPLING).completion_ids) == 2


def test_options_mean_the_same_in_process_and_on_a_server() -> None:
    from vllm import SamplingParams as Request

    values = {"allowed_token_ids": [3], "bad_words": ["a"], "ignore_eos": True, "logit_bias": {"5": -300, "6": 1}}
    values |= {"min_tokens": 2, "stop": ["."], "stop_token_ids": [9], "thinking_token_budget": 5}
    values |= {"frequency_penalty": 0.5, "presence_penalty": 0.5}
    assert values.keys() == VLLM_EXTRAS
    for extra in [{}, *({name: value} for name, value in values.items())]:
        sampling = replace(SAMPLING, top_k=5, extra=extra)
        limits = {"engine": "vllm", "max_model_len": 64, "max_listed": 0, "vocab_size": 64}
        _, options = vllm_requests([[6]], sampling, random.Random(0), **limits)
        (here,) = VLLMEngine._requests(Plain(_has_mask=False), options, sampling)
        body = VLLMServerEngine._body(Plain(takes_adapter=False, _stop_ids=[1, 7]), [6], options[0], sampling)
        sent = {name: value for name, value in json.loads(json.dumps(body)).items() if name in {*options[0], *values}}
        there = Request.from_optional(**sent, detokenize=here.detokenize)  # as vLLM's CompletionRequest does
        for request in (here, there):
            request.update_from_generation_config({"eos_token_id": [1, 7]}, 1)
            request.stop_token_ids = sorted({request._eos_token_id, *request.stop_token_ids} - {None})
            request._eos_token_id = None
        assert here == there, extra


def test_options_that_the_engine_decides_are_refused(model, tokenizer) -> None:
    with pytest.raises(InputError, match="load_format"):
        VLLMEngine(model, tokenizer, replace(OPTIONS, engine_options={"load_format": "auto"}))
    with pytest.raises(UnsupportedError, match="tensor_parallel_size=2"):
        VLLMEngine(model, tokenizer, replace(OPTIONS, engine_options={"tensor_parallel_size": 2}))
    with pytest.raises(UnsupportedError, match=r"speculative_config on a CPU, want .*fix: leave speculative_config"):
        VLLMEngine(model, tokenizer, replace(OPTIONS, engine_options={"speculative_config": {"method": "ngram"}}))


def test_a_run_says_nothing_on_the_console_and_leaves_no_process(fork_server) -> None:
    assert fork_server.run(HERE / "scripted_run.py", stage="trainer", teardown=True).splitlines() == [
        "vllm imported before the engine: False",
        "listens on: 127.0.0.1",
        "children: 0",
    ]


def test_the_trainers_process_group_survives_the_engine(fork_server) -> None:
    ranks = fork_server.start_ranks(HERE / "scripted_run.py", "--distributed", stage="vllm", teardown=True)
    for rank in ranks:
        assert rank.wait() == 0, rank.output
        assert "ranks that answer: 2" in rank.output


def test_turns_that_come_later_are_sampled_with_those_under_way(model, tokenizer) -> None:
    """A turn's seed decides what it says, not what was sampled beside it; each ends at its own limit."""
    engine = VLLMEngine(model, tokenizer, replace(OPTIONS, max_sequences=4))
    try:
        sampling = SamplingParams(n=4, max_tokens=12, seed=0)
        batch = [Turn(number, [5, 6, 7 + number], 4 + 2 * number, 100 + number) for number in range(4)]
        alone = {}
        for turn in batch:
            with engine.turn_session(sampling) as session:
                session.add(turn)
                while session.has_work:
                    alone |= dict(session.step())
        beside, waiting = {}, list(batch)
        with engine.turn_session(sampling) as session:
            session.add(waiting.pop(0))
            while session.has_work or waiting:
                if waiting:
                    session.add(waiting.pop(0))  # one more at each step of the engine
                beside |= dict(session.step())
        for turn in batch:
            one, other = alone[turn.episode], beside[turn.episode]
            assert one.token_ids == other.token_ids
            assert len(one.token_ids) == turn.max_tokens or one.finish_reason == "stop"
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        with pytest.raises(InputError, match=r"prompt 0 of .* tokens"), engine.turn_session(sampling) as session:
            session.add(Turn(0, [5] * 64, 4, 0))
        with pytest.raises(UnavailableError, match="closed"), engine.turn_session(sampling):
            pass  # an error in a session leaves no requests behind
    finally:
        engine.close()
