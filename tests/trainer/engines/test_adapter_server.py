"""Servers that are sent the adapter alone: what goes over the wire, what fails, what is cleaned up; and a real one."""

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines import rollout_func, weight_files
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.engines.server.server_engine import VLLMServerAdapterEngine, VLLMServerEngine
from fused_grpo.trainer.models.adapters import adapter_stream, adapter_weights, checkpoint_weights, load_adapter
from fused_grpo.trainer.types import SamplingParams

PROMPTS = [[prompt, 3] for prompt in range(4, 24)]
SAMPLING = SamplingParams(n=3, max_tokens=8, seed=0)
LORA = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
SUMS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]


@pytest.fixture
def make_model(build_model) -> Callable[..., PeftModel]:
    def make(**options: Any) -> PeftModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return get_peft_model(build_model("qwen2", tied=True), LoraConfig(**LORA | options))

    return make


@pytest.fixture
def model(make_model) -> PeftModel:
    return make_model()


@pytest.fixture
def servers(servers) -> list[Any]:
    for server in servers:
        server.lora_config, server.environment = {"max_lora_rank": 8}, {UPDATING: True}
    return servers


@pytest.fixture
def connect(servers, model, tokenizer) -> Callable[..., VLLMServerAdapterEngine]:
    def make(model: Any = model, **options: Any) -> VLLMServerAdapterEngine:
        return VLLMServerAdapterEngine(model, tokenizer, base_urls=[one.url for one in servers], timeout=20, **options)

    return make


def train_a_little(model: PeftModel) -> None:
    load_adapter(model, {name: weight + 0.1 for name, weight in adapter_weights(model).items()})


def is_served(server: Any, model: PeftModel) -> bool:
    (adapter,) = server.adapters.values()
    expected = adapter_weights(model)
    return adapter.keys() == expected.keys() and all(torch.equal(adapter[name], expected[name]) for name in expected)


def test_a_sync_sends_every_server_the_adapter_and_nothing_else(connect, servers, model, tmp_path) -> None:
    engine = connect(weights_directory=str(tmp_path))
    for version in range(3):
        engine.load_weights(adapter_stream(model), version)
        for server in servers:
            # The one before is unloaded.
            assert list(server.adapters) == [server.weight_version]
            assert is_served(server, model)
            assert server.folder.parent == tmp_path
            assert not server.weights
            assert server.calls[-2][0] == "/reset_prefix_cache"
        rollouts = engine.generate(PROMPTS, SAMPLING)
        assert rollouts.weight_version == version
        assert {body["model"] for server in servers for body in server.seen} == {servers[0].weight_version}
        assert servers[0].weight_version.endswith(f":{version}")
        train_a_little(model)
        assert not is_served(servers[0], model)
        for server in servers:
            server.seen.clear()
    assert not list(tmp_path.iterdir())


def test_adapters_of_a_run_that_was_killed_are_unloaded_and_no_others(connect, servers, model) -> None:
    connect().load_weights(adapter_stream(model), version=7)
    (killed,) = servers[0].adapters
    servers[0].adapters["somebody's"] = {}
    resumed = connect()
    resumed.load_weights(adapter_stream(model), version=5)
    assert killed not in servers[0].adapters
    assert len(servers[0].adapters) == 2
    assert "somebody's" in servers[0].adapters
    assert [body for path, body in servers[0].calls if "unload" in path] == [{"lora_name": killed}]


def restart(server: Any) -> None:
    server.adapters, server.weight_version = {}, "default"


def test_a_server_without_the_adapter_samples_nothing_until_a_sync(connect, servers, model, caplog) -> None:
    engine = connect()
    engine.load_weights(adapter_stream(model), version=0)
    restart(servers[1])
    rollouts = engine.generate(PROMPTS, SAMPLING)
    assert rollouts.completion_ids == [[prompt, index] for prompt, _ in PROMPTS for index in range(SAMPLING.n)]
    assert (servers[0].served, servers[1].served) == (len(PROMPTS), 0)
    assert f"{servers[1].url} is down or has other weights" in caplog.text
    engine.load_weights(adapter_stream(model), version=1)
    engine.generate(PROMPTS, SAMPLING)
    assert servers[1].served > 0
    for server in servers:
        restart(server)
    with pytest.raises(UnavailableError, match=r"none of them up with the weights of the last sync: status 404"):
        engine.generate(PROMPTS, SAMPLING)


def test_an_adapter_that_one_server_refuses_is_no_sync(connect, servers, model) -> None:
    engine = connect()
    engine.load_weights(adapter_stream(model), version=0)
    servers[1].refuses_weights = True
    with pytest.raises(WeightSyncError, match=rf"got status 500 from /v1/load_lora_adapter.* at {servers[1].url}"):
        engine.load_weights(adapter_stream(model), version=1)
    with pytest.raises(WeightSyncError, match="before weights were loaded"):
        engine.generate(PROMPTS, SAMPLING)
    servers[1].refuses_weights = False
    engine.load_weights(adapter_stream(model), version=1)
    assert [len(server.adapters) for server in servers] == [1, 1]
    assert not servers[1].folder.exists()


@pytest.mark.parametrize("fault", [502, None])
def test_an_adapter_is_sent_again_where_the_answer_was_lost(connect, servers, model, monkeypatch, fault) -> None:
    engine, faults, post = connect(), {"load": [fault], "unload": [fault]}, servers[0].post

    def lost(path: str, body: dict[str, Any]) -> Any:
        answer, errors = post(path, body), faults.get(path.removeprefix("/v1/").removesuffix("_lora_adapter"))
        return errors.pop() if errors else answer

    monkeypatch.setattr(servers[0], "post", lost)
    for version in range(2):
        engine.load_weights(adapter_stream(model), version)
    assert not any(faults.values())
    assert [name.rpartition(":")[2] for name in servers[0].adapters] == ["1"]
    assert engine.generate(PROMPTS, SAMPLING).weight_version == 1


def test_a_server_that_says_it_loaded_and_did_not_is_no_sync(connect, servers, model) -> None:
    engine = connect()
    servers[1].mutate = lambda path, answer: {"data": answer["data"][:1]} if path == "/v1/models" else answer
    with pytest.raises(WeightSyncError, match="no adapter of this sync in /v1/models"):
        engine.load_weights(adapter_stream(model), version=0)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"lora_config": None}, "without --enable-lora"),
        ({"lora_config": {"max_lora_rank": 4}}, "with --max-lora-rank 4, want .* rank 8"),
        ({"environment": {UPDATING: False}}, f"without {UPDATING}=True"),
        ({"parallel_config": {"_api_process_count": 2}}, "with several API servers"),
        ({"weight_version": "0f:3"}, "that another run has sent merged weights"),
    ],
)
def test_a_server_that_cannot_serve_the_adapter_is_refused(connect, servers, model, attributes, message) -> None:
    engine = connect()
    vars(servers[1]).update(attributes)
    with pytest.raises(
        InputError, match=rf"got a server at {servers[1].url} {message}.*--max-lora-rank 8 .*{UPDATING}"
    ):
        connect()
    # As it may be after a restart.
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(adapter_stream(model), version=0)
    assert not servers[0].adapters


def test_the_largest_rank_of_a_layer_is_the_one_that_counts(connect, make_model) -> None:
    with pytest.raises(InputError, match=r"with --max-lora-rank 8, want .* rank 16 .*fix: .*--max-lora-rank 16"):
        connect(make_model(rank_pattern={"q_proj": 16}))


def test_fp32_on_a_gpu_is_refused_and_on_a_cpu_it_is_not(connect, servers) -> None:
    servers[1].dtype = "torch.float32"
    connect()
    servers[1].device = "cuda"
    with pytest.raises(UnsupportedError, match=rf"{servers[1].url} in float32 on a GPU .*fix: .*--dtype bfloat16"):
        connect()
    servers[1].dtype = "torch.bfloat16"
    connect()


@pytest.mark.parametrize("option", [{"use_dora": True}, {"init_lora_weights": "pissa_niter_4"}])
def test_dora_and_a_moved_base_are_refused_first(make_model, tokenizer, option) -> None:
    ((name, value),) = option.items()
    with pytest.raises(UnsupportedError, match=rf"{name}={value!r} with vllm_adapter_sync"):
        VLLMServerAdapterEngine(make_model(**option), tokenizer, base_urls=["http://127.0.0.1:9"])


def test_a_vllm_that_says_neither_version_nor_environment_is_tried(connect, servers, model) -> None:
    for server in servers:
        server.old, server.environment = True, None
    engine = connect()
    engine.load_weights(adapter_stream(model), version=0)
    assert engine.generate(PROMPTS, SAMPLING).weight_version == 0


def test_a_tied_head_on_a_cpu_is_served_as_it_is(connect, servers, model, tokenizer) -> None:
    for server in servers:
        server.tied = True
    with pytest.raises(InputError, match="that ties lm_head"):
        VLLMServerEngine(model.get_base_model(), tokenizer, base_urls=[servers[0].url], timeout=20)
    connect()


def test_options_choose_the_adapter_alone_or_merged_weights(servers, model, tokenizer, build_model) -> None:
    options = {"vllm_mode": "server", "vllm_server_base_url": servers[0].url, "vllm_max_model_length": 32}
    for sync, kind in ((True, VLLMServerAdapterEngine), (False, VLLMServerEngine)):
        engine = choose_engine("server", GRPOConfig(vllm_adapter_sync=sync, **options), model, tokenizer)
        assert type(engine) is kind
        assert engine.takes_adapter == sync
        assert rollout_func.FunctionEngine(lambda *_: {}, None, inner=engine).takes_adapter == sync
    with pytest.raises(InputError, match=r"with the engine 'server' and a Qwen2ForCausalLM, want .* an adapter"):
        choose_engine("server", GRPOConfig(vllm_adapter_sync=True, **options), build_model(), tokenizer)
    with pytest.raises(InputError, match=r"vllm_adapter_sync=True with vllm_weight_transfer='nccl', .*fix:"):
        GRPOConfig(vllm_adapter_sync=True, vllm_weight_transfer="nccl", **options)
    with pytest.raises(InputError, match="got vllm_adapter_sync=True with vllm_mode='colocate' and use_vllm=False"):
        GRPOConfig(vllm_adapter_sync=True, use_vllm=False)


def test_a_sync_of_smollm2_sends_less_than_two_percent_of_its_weights() -> None:
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(**LORA))
    layer = 2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)  # q and o, k and v, the three of the MLP
    for dtype in (torch.bfloat16, torch.float32):
        sent, full = adapter_stream(model, dtype), checkpoint_weights(model, dtype)
        assert sent.nbytes == dtype.itemsize * 8 * 30 * layer
        assert sent.nbytes < 0.02 * sum(weight.nbytes for name, weight in full.shapes.items() if "lm_head" not in name)


def test_what_a_sync_sends_is_counted_and_logged_once(connect, servers, model, tokenizer, caplog) -> None:
    for server in servers:
        server.dtype = "torch.bfloat16"
    engine = connect()
    merging = VLLMServerEngine(model.get_base_model(), tokenizer, base_urls=[servers[0].url], timeout=20)
    with caplog.at_level(logging.INFO, logger="fused_grpo.trainer.engines.server"):
        for version in range(2):
            engine.load_weights(adapter_stream(model, engine.weight_dtype), version)
        merging.load_weights(checkpoint_weights(model, merging.weight_dtype), version=0)
    (adapter,) = servers[1].adapters.values()
    assert {weight.dtype for weight in adapter.values()} == {torch.bfloat16}
    assert engine.sync_metrics["weight_sync/bytes"] == sum(2 * math.prod(weight.shape) for weight in adapter.values())
    assert merging.sync_metrics["weight_sync/bytes"] == sum(weight.nbytes for weight in servers[0].weights.values())
    lines = [record.message for record in caplog.records if "a sync sends" in record.message]
    assert [f"{engine.sync_metrics['weight_sync/bytes'] / 1e6:.3f} MB" in lines[0], len(lines)] == [True, 2]


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isalpha() for letter in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def make_trainer(build_model, tokenizer, tmp_path) -> Callable[..., GRPOTrainer]:
    def make(name: str, url: str, reward: Any = letters, **options: Any) -> GRPOTrainer:
        shape = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
        server = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 500.0}
        args = GRPOConfig(
            str(tmp_path / name),
            **{**shape, **server, "vllm_adapter_sync": True, "learning_rate": 1e-2, "max_steps": 5, **options},
        )
        config = LoraConfig(**LORA)
        return GRPOTrainer(
            build_model("qwen2", tied=True), reward, args, SUMS, processing_class=tokenizer, peft_config=config
        )

    return make


def by_index(completions: list[str], **columns: Any) -> list[float]:
    return [float(index % 4) for index in range(len(completions))]


def test_batches_in_flight_are_sampled_with_the_adapter_of_their_version(make_trainer, servers, monkeypatch) -> None:
    """The policy has moved on when the server takes it."""
    servers[0].max_model_len = 192
    options = {"generate_ahead": 2, "logprob_mismatch": "warn", "save_strategy": "no", "max_steps": 6}
    trainer = make_trainer("queue", servers[0].url, by_index, **options)
    learn, policies, loaded = trainer.learner.learn, list[Any](), dict[int, Any]()
    complete = servers[0].complete

    def learning(*arguments: Any, **given: Any) -> Any:
        policies.append({name: weight.clone() for name, weight in adapter_weights(trainer.model).items()})
        return learn(*arguments, **given)

    def completing(body: dict[str, Any]) -> Any:
        loaded[int(body["model"].rpartition(":")[2])] = servers[0].adapters[body["model"]]
        return complete(body)

    trainer.learner.learn = learning
    monkeypatch.setattr(servers[0], "complete", completing)
    trainer.train()
    assert list(loaded) == [0, 1, 2, 3]
    for version, adapter in loaded.items():
        assert all(torch.equal(adapter[name], weight) for name, weight in policies[version].items())
        assert not all(torch.equal(adapter[name], weight) for name, weight in policies[version + 1].items())
    assert not servers[0].weights


@pytest.mark.engine
def test_a_real_server_follows_the_adapter(
    lora_server, model, tokenizer, prompts, plain_logprobs, sampled_logprobs, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(weight_files, "_SHARED_MEMORY", str(tmp_path))  # in the real one are those of other runs
    engine = VLLMServerAdapterEngine(model, tokenizer, base_urls=[lora_server.url], timeout=500.0)
    sampling = SamplingParams(n=4, max_tokens=8, seed=0)
    for version in range(3):
        engine.load_weights(adapter_stream(model, engine.weight_dtype), version)
        rollouts = engine.generate(prompts, sampling)
        assert rollouts.weight_version == version
        assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() < 1e-3
        train_a_little(model)
        assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() > 0.05
    assert not list(tmp_path.iterdir())
    _, adapter = (one["id"] for one in httpx.get(f"{lora_server.url}/v1/models").json()["data"])
    httpx.post(f"{lora_server.url}/v1/unload_lora_adapter", json={"lora_name": adapter}).raise_for_status()
    with pytest.raises(UnavailableError, match=rf"status 404 .*{adapter}.* does not exist"):
        engine.generate(prompts, sampling)


@pytest.mark.engine
@pytest.mark.parametrize("prefetched", [0, 2])
def test_a_run_with_a_real_server_agrees_at_each_step_and_resumes(make_trainer, lora_server, prefetched) -> None:
    options = {"save_steps": 1, "lr_scheduler_type": "constant", "generate_ahead": prefetched}
    whole = make_trainer("whole", lora_server.url, **options)
    start = {name: weight.clone() for name, weight in adapter_weights(whole.model).items()}
    whole.train()
    lines = [json.loads(line) for line in (whole.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["weight_version"] for line in lines] == [max(0, step - prefetched) for step in range(5)]
    # Of a batch that was prefetched the policy has moved on.
    assert prefetched or max(line["sampling/sampling_logp_difference/max"] for line in lines) < 1e-3
    resumed = make_trainer("cut", lora_server.url, resume_from_checkpoint=f"{whole.output_dir}/checkpoint-3", **options)
    resumed.train()
    for name, weight in adapter_weights(whole.model).items():
        assert torch.equal(adapter_weights(resumed.model)[name], weight)
        assert (weight - start[name]).abs().max() > 1e-3
