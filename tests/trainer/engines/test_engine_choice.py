"""The engine is named once, from the options and what is installed, and everything else depends on that name."""

import importlib.util
import logging
import sys
from contextlib import ExitStack
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.collect.start_checks import Start, check_services
from fused_grpo.trainer.engines import engine_choice
from fused_grpo.trainer.engines.engine_choice import choose_engine, engine_name
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.engines.vllm import inprocess
from fused_grpo.trainer.engines.vllm.start_vllm import check_dtype, check_vllm_arguments, start_vllm
from fused_grpo.trainer.models.weight_stream import WeightStream

ROWS = [{"prompt": f"{a}+{a}="} for a in range(4)]


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))


def stream() -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(ROWS))


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "transformers"),
        ({"use_vllm": False}, "transformers"),
        ({"use_vllm": True}, "vllm"),
        ({"vllm_mode": "server"}, "server"),
    ],
)
@pytest.mark.usefixtures("without_vllm")
def test_the_engine_is_the_one_that_the_options_ask_for(options, name) -> None:
    assert engine_name(GRPOConfig(**options)) == name


def test_a_vllm_that_cannot_be_imported_is_what_the_error_names(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnavailableError, match=r"got no vllm.platforms that can be imported \(No module"):
        check_dtype(torch.float32)
    with pytest.raises(UnavailableError, match="at its start: import of vllm halted"), ExitStack() as resources:
        start_vllm("folder", options={}, on_cpu=True, resources=resources)


def raising(error: Exception) -> Any:
    def load(name: str) -> Any:
        raise error

    return load


@pytest.mark.parametrize(
    ("device", "attributes", "message"),
    [
        (
            "cpu",
            {"__getattr__": raising(ImportError("libcuda.so"))},
            r"got no vllm that can be imported \(libcuda.so\)",
        ),
        (
            "cuda",
            {"__getattr__": raising(RuntimeError("no nms"))},
            r"got no vllm that can be imported \(no nms\), want",
        ),
        ("cpu", {}, r"can be imported \(module 'vllm' has no attribute 'LLM'\), want .*fix: pip install 'fused-grpo"),
        ("", {}, "got a build of vllm that finds no device.* on this machine, want .*fix: a machine with a GPU"),
    ],
)
def test_a_vllm_that_cannot_run_is_refused_before_models(monkeypatch, device, attributes, message) -> None:
    vllm, platforms = ModuleType("vllm"), SimpleNamespace(current_platform=SimpleNamespace(device_type=device))
    vars(vllm).update(attributes, __spec__=ModuleSpec("vllm", None))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    args = GRPOConfig(use_vllm=True, vllm_max_model_length=8)
    with pytest.raises(UnavailableError, match=message):
        check_services(Start(args=args, model="no model", train_dataset=ROWS, reward_funcs=lengths))


@pytest.mark.parametrize(("error", "raised"), [(KeyboardInterrupt, KeyboardInterrupt), (ValueError, WeightSyncError)])
def test_an_engine_whose_weights_are_half_loaded_is_closed(error, raised) -> None:
    engine, closed = inprocess.VLLMEngine.__new__(inprocess.VLLMEngine), list[bool]()

    def interrupted(method: str, **options: Any) -> None:
        raise error

    llm = SimpleNamespace(collective_rpc=interrupted)
    vars(engine).update(_asleep=False, _tie=None, _on_cpu=False, _llm=llm, _close=lambda: closed.append(True))
    with pytest.raises(raised):
        engine.load_weights([], version=1)
    assert closed


@pytest.mark.engine
def test_without_an_option_vllm_is_chosen_where_it_is_installed() -> None:
    assert engine_name(GRPOConfig()) == "vllm"


@pytest.mark.engine
@pytest.mark.parametrize(("most", "wanted"), [(3, "max_logprobs in vllm_engine_kwargs=22"), (22, None), (-1, None)])
def test_score_centering_has_vllm_list_as_many_tokens_as_it_needs(
    build_model, tokenizer, monkeypatch, most, wanted
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(inprocess, "start_vllm", lambda *_, options, **__: started.append(options) or 1 / 0)
    model = build_model(tied=False)
    vocab = model.config.vocab_size
    args = GRPOConfig(score_centering="topk", score_centering_topk=22, vllm_max_model_length=64)
    with pytest.raises(ZeroDivisionError):
        choose_engine("vllm", args, model, tokenizer)
    assert started.pop()["max_logprobs"] == min(22, vocab)
    args.vllm_engine_kwargs = {"max_logprobs": most}
    with pytest.raises(UnsupportedError if wanted else ZeroDivisionError, match=wanted):
        choose_engine("vllm", args, model, tokenizer)
    assert len(started) == (0 if wanted else 1)


@pytest.mark.parametrize("rows", [lambda: ROWS, stream])
@pytest.mark.usefixtures("without_vllm")
def test_without_vllm_a_run_samples_from_its_own_model_and_needs_no_other(
    build_model, tokenizer, tmp_path, caplog, rows
) -> None:
    shape = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "max_steps": 1}
    args = GRPOConfig(str(tmp_path / "run"), log_completions=False, **shape)
    with caplog.at_level(logging.INFO, logger="fused_grpo.trainer.engines"):
        trainer = GRPOTrainer(build_model(tied=False), lengths, args, rows(), processing_class=tokenizer)
    assert isinstance(trainer.engine, TransformersEngine)
    assert "rollout engine: transformers" in caplog.text
    assert trainer.learner.loss_config == args.loss_config(corrected=False) != args.loss_config(corrected=True)
    assert trainer.train().steps == 1


def test_options_of_one_engine_reach_it(build_model, tokenizer, monkeypatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(engine_choice, "VLLMEngine", lambda model, tokenizer, options: given.update(vars(options)))
    monkeypatch.setattr(engine_choice, "TransformersEngine", lambda *_, **options: given.update(options))
    monkeypatch.setattr(engine_choice, "check_installed", lambda: None)
    args = GRPOConfig(vllm_model_impl="transformers", cache_implementation="static", vllm_max_model_length=64)
    for name in ("vllm", "transformers"):
        choose_engine(name, args, build_model(), tokenizer)
    assert given["needed"] == {"model_impl": "transformers"}
    assert given["cache_implementation"] == "static"


CONTRADICTIONS = [
    ({"router_replay": True}, {"enable_return_routed_experts": False}, "want True with router_replay=True"),
    ({"router_replay": True}, {"enable_return_routed_experts": None}, "want True with router_replay=True"),
    ({"vllm_adapter_sync": True}, {"enable_lora": False}, "want True with vllm_adapter_sync=True"),
    ({"vllm_model_impl": "transformers"}, {"model_impl": "vllm"}, "want 'transformers' with vllm_model_impl"),
    ({}, {"seed": 1}, "want only what the engine leaves open"),
    ({}, {"gpu_memory_utilization": 0.5}, "want only what the engine leaves open"),
    ({}, {"max_model_len": 64}, r" \(vllm_engine_kwargs of a run\), want only"),
    ({}, {"tensor_parallel_size": 2}, "want 1: an engine"),
]


@pytest.mark.parametrize(("options", "given", "message"), CONTRADICTIONS)
def test_an_argument_of_vllm_that_an_option_contradicts_is_refused(options, given, message) -> None:
    args = GRPOConfig(use_vllm=True, vllm_engine_kwargs=given, **options)
    with pytest.raises((InputError, UnsupportedError), match=f"^got .*{next(iter(given))}.*{message}.*; fix: "):
        engine_name(args)


def test_an_argument_of_vllm_may_be_more_than_an_option_needs() -> None:
    kwargs = {"enable_return_routed_experts": True, "max_lora_rank": 64}
    assert engine_name(GRPOConfig(use_vllm=True, router_replay=True, vllm_engine_kwargs=kwargs)) == "vllm"
    inprocess.check_engine_options(kwargs, {"max_lora_rank": 16})
    with pytest.raises(InputError, match=r"got max_lora_rank=64 in vllm_engine_kwargs, want 128 with vllm_adapter"):
        inprocess.check_engine_options(kwargs, {"max_lora_rank": 128})


@pytest.mark.parametrize("name", ["port", "uds", "max-model-len", "trust-remote-code", "max_num", "max_num_sequences"])
def test_what_is_no_argument_of_vllm_is_refused(monkeypatch, name) -> None:
    fields = [(argument, object, None) for argument in ("max_num_seqs", "max_model_len", "trust_remote_code")]
    arguments = SimpleNamespace(EngineArgs=make_dataclass("EngineArgs", fields))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", arguments)
    check_vllm_arguments({"max_num_seqs": 4})
    with pytest.raises(InputError, match=f"^got {name} in vllm_engine_kwargs, want arguments of vllm.LLM.*; fix: "):
        check_vllm_arguments({"max_num_seqs": 4, name: 1})


@pytest.mark.usefixtures("without_vllm")
def test_asking_for_vllm_where_it_is_missing_names_the_command(build_model, tokenizer) -> None:
    with pytest.raises(UnavailableError, match=r"fix: pip install 'fused-grpo\[vllm"):
        choose_engine("vllm", GRPOConfig(), build_model(), tokenizer)


def test_a_stream_whose_longest_prompt_an_engine_needs_is_refused(build_model, tokenizer, tmp_path) -> None:
    args = GRPOConfig(str(tmp_path), vllm_mode="server", max_steps=1)
    with pytest.raises(InputError, match=r"without random access; fix: set vllm_max_model_length"):
        GRPOTrainer(build_model(), lengths, args, stream(), processing_class=tokenizer)


@pytest.mark.engine
def test_a_rank_whose_disk_is_full_takes_part_in_the_gathers_of_others(build_model, tokenizer, monkeypatch) -> None:
    model = build_model(tied=False)
    weights = WeightStream(model.state_dict(), model.named_parameters(), is_gathered=True)
    monkeypatch.setattr(engine_choice, "checkpoint_weights", lambda *_: weights)
    monkeypatch.setattr(engine_choice, "write_checkpoint", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        choose_engine("vllm", GRPOConfig(generate_ahead=1, vllm_max_model_length=32), model, tokenizer)
    assert not list(weights)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("engine", ["vllm", "server"])
def test_a_bias_of_lora_on_layers_without_one_is_refused_before_vllm(make_model, tokenizer, engine):
    model = get_peft_model(make_model(), LoraConfig(lora_bias=True, target_modules=["q_proj", "o_proj"]))
    with pytest.raises(UnsupportedError, match=r"^got lora_bias=True on \S*layers\.0\.self_attn\.o_proj, .*; fix: "):
        choose_engine(engine, GRPOConfig(vllm_max_model_length=32), model, tokenizer)
