"""A real vLLM server in processes of its own: sampling, weight sync, training, kill -9 and restart.

Each test starts a server where the one before has killed it. In this order two are enough: a start takes seconds.
"""

import copy
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numerics import logprobs_of
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fused_grpo.errors import InputError, UnavailableError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.checkpoint.checkpoint import newest_checkpoint, verify_checkpoint
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.sampling import stop_token_ids
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.engines.server.weight_transfer import ChangeTransfer
from fused_grpo.trainer.engines.vllm.inprocess import VLLMEngine, VLLMOptions
from fused_grpo.trainer.episodes.conversation import Template
from fused_grpo.trainer.episodes.play import EpisodeEngine, Rules
from fused_grpo.trainer.logging.run_log import read_metrics
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.recipes import calculator
from fused_grpo.trainer.recipes.arithmetic import PAD, tokenizer_of
from fused_grpo.trainer.types import Rollouts, SamplingParams

pytestmark = pytest.mark.engine

SAMPLING = SamplingParams(n=4, max_tokens=8, seed=0)
LONG = SamplingParams(n=128, max_tokens=150, seed=0, extra={"ignore_eos": True})
SUMS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
QUESTIONS = [{"prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(16)]


@pytest.fixture
def model(build_model):
    return build_model("qwen2", tied=True)


@pytest.fixture(scope="module")
def connect(server, build_model, tokenizer) -> Callable[..., VLLMServerEngine]:
    def connect(**options: Any) -> VLLMServerEngine:
        if server.process is None:  # a test before has killed it
            server.start()
        model = build_model("qwen2", tied=True)
        return VLLMServerEngine(model, tokenizer, base_urls=[server.url], timeout=500.0, **options)

    return connect


@pytest.fixture
def synced(connect, model) -> VLLMServerEngine:
    engine = connect()
    engine.load_weights(checkpoint_weights(model), version=0)
    return engine


@pytest.fixture(scope="module")
def inside(build_model, tokenizer) -> Iterator[VLLMEngine]:
    """An engine in this process, with the weights that a synced server has."""
    options = VLLMOptions(max_model_len=192, dtype=torch.float32)
    engine = VLLMEngine(build_model("qwen2", tied=True), tokenizer, options)
    yield engine
    engine.close()


@torch.no_grad()
def train_a_little(model, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def test_the_server_follows_every_sync(
    connect, model, prompts, plain_logprobs, sampled_logprobs, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(weight_files, "_SHARED_MEMORY", str(tmp_path))  # in the real one are those of other runs
    engine = connect()
    for version in range(3):
        engine.load_weights(checkpoint_weights(model), version)
        rollouts = engine.generate(prompts, SAMPLING)
        assert rollouts.weight_version == version
        assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() < 1e-3
        train_a_little(model, seed=version)
        assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() > 0.05
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_sent_changes_has_all_the_weights(
    connect, model, prompts, plain_logprobs, sampled_logprobs
) -> None:
    full, engine = connect(), connect(full_sync_interval=3)
    total, sent = 0, []
    for version in range(4):
        engine.load_weights(checkpoint_weights(model), version)
        rollouts = engine.generate(prompts, SAMPLING)
        assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() < 1e-3
        sent.append(engine.sync_metrics["weight_sync/bytes"])
        if version == 2:
            full.load_weights(checkpoint_weights(model), version)
            total = full.sync_metrics["weight_sync/bytes"]
            assert full.generate(prompts, SAMPLING) == rollouts
        change_a_few(model, seed=version)
        assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() > 0.05
    assert [size == total for size in sent] == [True, False, False, True]
    assert max(sent[1:3]) < 0.2 * total


@torch.no_grad()
def change_a_few(model, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < 0.02
        parameter[chosen] += 0.2


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {}, "whose Qwen2ForCausalLM has other biases, want the LlamaForCausalLM"),
        ("qwen2", {"vocab_size": 60}, "has 44 tokens in the vocabulary, not 60"),
        (
            "qwen2",
            {"num_hidden_layers": 1, "intermediate_size": 96},
            "has 2 layers, not 1; 128 inputs of down_proj, not 96",
        ),
        ("qwen2", {"num_attention_heads": 1, "head_dim": 64}, "has 2 attention heads, not 1"),
        ("qwen2", {"num_key_value_heads": 2}, "has 1 heads of keys and values, not 2"),
    ],
)
def test_another_model_than_the_servers_is_refused_before_it_gets_a_weight(
    server, synced, build_model, tokenizer, prompts, family, sizes, message
) -> None:
    before = synced.generate(prompts[:2], SAMPLING)
    config = build_model(family, tied=True).config
    config.update(sizes)
    with pytest.raises(InputError, match=rf"got a server at {server.url} .*{message}.*fix: start it with the model"):
        VLLMServerEngine(AutoModelForCausalLM.from_config(config), tokenizer, base_urls=[server.url], timeout=500.0)
    assert synced.generate(prompts[:2], SAMPLING) == before


def test_the_same_seeds_draw_what_the_engine_in_process_draws(synced, inside, prompts) -> None:
    for sampling in (SAMPLING, replace(SAMPLING, temperature=0.0), replace(SAMPLING, top_k=5, seed=3)):
        there, here = synced.generate(prompts, sampling), inside.generate(prompts, sampling)
        assert there.completion_ids == here.completion_ids
        assert there.finish_reasons == here.finish_reasons


@pytest.mark.parametrize("kind", ["synced", "inside"])
def test_completions_match_the_expression_and_say_how_likely_they_were(
    kind, request, model, tokenizer, prompts, plain_logits
) -> None:
    rollouts = request.getfixturevalue(kind).generate(prompts, replace(SAMPLING, structured_outputs_regex="[a-f]{3}"))
    letters = tokenizer.convert_tokens_to_ids(list("abcdef"))
    for index, completion in enumerate(rollouts.completion_ids):
        assert set(completion[:3]) <= set(letters)
        assert completion[3:] in ([1], [7])
        allowed = plain_logits(model, rollouts, index)[0][letters].log_softmax(-1)
        expected = allowed[letters.index(completion[0])].item()
        assert rollouts.sampling_logprobs[index][0] == pytest.approx(expected, abs=1e-3)


def double(n: int) -> int:
    """Double a number.

    Args:
        n: The number.
    """
    return 2 * n


@pytest.fixture(scope="module")
def calling(tokenizer) -> PreTrainedTokenizerFast:
    """Other texts for the server's tokens. Six of them are whole calls, so that an untrained model calls."""
    calls = [f'<tool_call>{{"name": "double", "arguments": {{"n": {n}}}}}</tool_call>' for n in range(6)]
    parts = ['<tool_call>{"name": "', '", "arguments": {"', '": "', '"}}</tool_call>']
    tokens = [PAD, calculator.END, *calculator.ROLES, "?", "_", "<|stop|>", *calls, *parts]
    tokens += "abcdefglmnorstuw0123456789"
    assert len(tokens) == len(tokenizer)
    return tokenizer_of(
        tokens,
        "|".join([*map(re.escape, calls + parts), r"[\s\S]"]),
        eos_token=calculator.END,
        additional_special_tokens=[*calculator.ROLES, "<|stop|>"],
        clean_up_tokenization_spaces=False,
        chat_template=calculator.TEMPLATE,
    )


def test_turns_of_episodes_are_those_that_the_engine_in_process_samples(
    synced, inside, model, calling, plain_logprobs, sampled_logprobs
) -> None:
    template = Template(calling, None, stop_ids=stop_token_ids(model.generation_config, calling))
    rules = Rules(template=template, tools=[double], environments=None, max_turns=None, timeout=60.0, slots=None)
    prompts = [template.encode(row["prompt"], rules.tools) for row in QUESTIONS]

    def play(engine: Any, **options: Any) -> Rollouts:
        sampling = SamplingParams(n=1, max_tokens=96, seed=1, **options)
        player = EpisodeEngine(engine, rules, most=None, batch="0")
        return player.generate(prompts, sampling, rows=list(enumerate(QUESTIONS)))

    for options in ({"temperature": 0.7, "top_k": 20}, {}):
        there, here = play(synced, **options), play(inside, **options)
        assert there.completion_ids == here.completion_ids
        assert [one.messages for one in there.episodes] == [one.messages for one in here.episodes]
        assert max(one.turns for one in there.episodes) > 2
    for ids, mask, episode in zip(there.completion_ids, there.completion_masks, there.episodes, strict=True):
        parts = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
        read = [calling.decode([token for token, _ in part]) for is_own, part in parts if not is_own]
        told = [list(turn) for role, turn in groupby(episode.messages, key=itemgetter("role")) if role == "tool"]
        answers = ["".join(f"<|tool|>{one['content']}<|end|>" for one in turn) for turn in told]
        assert read == [f"{answer}<|assistant|>" for answer in answers]
    # Each turn was sampled from all that stands before it.
    own = torch.tensor([*chain(*there.completion_masks)])
    assert (sampled_logprobs(there) - plain_logprobs(model, there))[own].abs().max() < 1e-3
    assert not sampled_logprobs(there)[~own].any()


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isalpha() for letter in text) / (len(text) + 1) for text in completions]


def messages(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def make_trainer(build_model, tokenizer, server, runs) -> Callable[..., GRPOTrainer]:
    def make(
        name: str,
        reward: Any = letters,
        rows: Any = SUMS,
        tokenizer: Any = tokenizer,
        tools: Any = None,
        **options: Any,
    ) -> GRPOTrainer:
        defaults = {
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_server_timeout": 500.0,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 5,
            "save_steps": 2,
            "learning_rate": 1e-3,
        }
        if server.process is None:
            server.start()
        args = GRPOConfig(str(runs / name), **{**defaults, **options})
        model = build_model("qwen2", tied=True)
        return GRPOTrainer(model, reward, args, rows, processing_class=tokenizer, tools=tools)

    return make


def test_a_run_with_a_tool_is_trained_on_turns_of_the_server(make_trainer, calling) -> None:
    """Or the log-prob check of a turn ends it before an update."""
    options = {"max_completion_length": 64, "max_steps": 2, "save_strategy": "no", "logprob_mismatch": "fail"}
    trainer = make_trainer("tool", messages, QUESTIONS, calling, tools=[double], **options)
    before = trainer.model.get_input_embeddings().weight.clone()
    metrics = trainer.train().metrics
    assert metrics["rollout_engine"] == "vllm-server"
    assert not torch.equal(before, trainer.model.get_input_embeddings().weight)
    assert max(sample.episode.turns for sample in trainer.scored.samples) > 1
    for turn in (1, 2):
        assert metrics[f"sampling/sampling_logp_difference/turn_{turn}/max"] < 1e-3


def test_batches_in_flight_are_of_the_weights_that_they_say(make_trainer) -> None:
    """The policy has moved on, twice, when the server takes them."""
    trainer = make_trainer("queue", generate_ahead=2, learning_rate=1e-2, max_steps=6, save_strategy="no")
    learn, policies, batches = trainer.learner.learn, list[Any](), list[Any]()

    def learning(*arguments: Any, **options: Any) -> Any:
        policies.append(copy.deepcopy(trainer.model))
        batches.append(trainer.scored.samples)
        return learn(*arguments, **options)

    trainer.learner.learn = learning
    trainer.train()
    assert [batch[0].weight_version for batch in batches] == [0, 0, 0, 1, 2, 3]

    def difference(version: int, sample: Any) -> float:
        expected = logprobs_of(policies[version], sample.prompt_ids, sample.completion_ids, 1.0)
        return max(abs(p - q) for p, q in zip(expected, sample.sampling_logprobs, strict=True))

    for step, batch in enumerate(batches):
        version = batch[0].weight_version
        assert max(difference(version, sample) for sample in batch) < 1e-3
        assert step == version or max(difference(version + 1, sample) for sample in batch) > 1e-2


@pytest.fixture(scope="module")
def whole(make_trainer) -> GRPOTrainer:
    """A run that nothing has disturbed."""
    trainer = make_trainer("whole")
    metrics = trainer.train().metrics
    assert metrics["rollout_engine"] == "vllm-server"
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-3
    return trainer


def test_a_run_that_sends_changes_and_resumes_makes_the_same_steps(make_trainer, whole) -> None:
    killed = make_trainer("changes", vllm_full_sync_interval=2)
    record = killed._record

    def recording(*arguments: Any) -> None:
        record(*arguments)
        if killed.step == 3:
            raise KeyboardInterrupt

    killed._record = recording
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = make_trainer("changes", vllm_full_sync_interval=2, resume_from_checkpoint=True)
    assert resumed.train().steps == 5
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    lines, others = (read_metrics(trainer.output_dir / "metrics.jsonl") for trainer in (resumed, whole))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]
    assert {line["weight_sync/bytes"] for line in others} == {lines[0]["weight_sync/bytes"]}
    assert [line["weight_sync/changed_fraction"] > 0.5 for line in lines] == [True] * 5  # nearly all bits of fp32


def test_a_receiver_that_loads_nothing_ends_the_run_at_the_next_step(make_trainer, monkeypatch) -> None:
    """It is believed what it says; what it samples with is not."""
    loaded = ChangeTransfer._loaded
    monkeypatch.setattr(ChangeTransfer, "_loaded", lambda *sent: None if sent[2] else loaded(*sent))
    trainer = make_trainer("deaf", vllm_full_sync_interval=9, learning_rate=1e-2, save_strategy="no")
    with pytest.raises(WeightSyncError, match="vllm-server engine and the trainer's at weight version 1"):
        trainer.train()
    assert trainer.step == 1


@pytest.fixture(scope="module")
def cut(make_trainer, connect, build_model, server) -> SimpleNamespace:
    """A run whose server was killed, what it raised and when, and an engine of that server with its weights."""
    engine, trainer = connect(), make_trainer("cut")
    engine.load_weights(checkpoint_weights(build_model("qwen2", tied=True)), version=0)
    record = trainer._record

    def recording(*arguments: Any) -> None:
        record(*arguments)
        if trainer.step == 3:
            server.kill()

    trainer._record = recording
    start = time.monotonic()
    # Found out while sampling, or while weights are handed over.
    with pytest.raises((UnavailableError, WeightSyncError)) as raised:
        trainer.train()
    return SimpleNamespace(error=raised, seconds=time.monotonic() - start, engine=engine)


def test_a_server_that_dies_ends_the_run_in_time(cut, server, runs) -> None:
    cut.error.match(server.url)
    assert cut.seconds < 60
    verify_checkpoint(newest_checkpoint(runs / "cut"))


def test_a_server_started_again_needs_a_sync_before_it_is_sampled_from(
    cut, connect, model, prompts, plain_logprobs, sampled_logprobs
) -> None:
    new = connect()
    assert new.weight_version == -1
    with pytest.raises(UnavailableError, match="none of them up with the weights of the last sync"):
        cut.engine.generate(prompts, SAMPLING)
    new.load_weights(checkpoint_weights(model), version=5)
    rollouts = new.generate(prompts, SAMPLING)
    assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() < 1e-3


def test_the_run_goes_on_with_the_new_server_to_the_same_end(cut, make_trainer, whole) -> None:
    resumed = make_trainer("cut", resume_from_checkpoint=True)
    assert resumed.train().steps == 5
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_server_killed_while_sampling_is_an_error_in_time(connect, server, model, prompts) -> None:
    engine = connect()
    engine.load_weights(checkpoint_weights(model), version=6)
    killer = threading.Timer(0.5, server.kill)
    killer.start()
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=rf"at {server.url}, want completions from {server.url}; fix:"):
        engine.generate(prompts[:4], LONG)
    killer.join()
    assert 0.4 < time.monotonic() - start < 20


@pytest.mark.full
def test_the_command_that_is_documented_starts_a_server_that_follows(
    spawned_server, model, tokenizer, prompts, plain_logprobs, sampled_logprobs
) -> None:
    engine = VLLMServerEngine(model, tokenizer, base_urls=[spawned_server.url], timeout=500.0)
    engine.load_weights(checkpoint_weights(model), version=0)
    rollouts = engine.generate(prompts, SAMPLING)
    assert (sampled_logprobs(rollouts) - plain_logprobs(model, rollouts)).abs().max() < 1e-3
