"""`vllm_dtype`: vLLM samples in another precision than the trainer's, and the check of its log-probs follows."""

import importlib
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_grpo.errors import InputError, UnsupportedError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.options import parse_train_options
from fused_grpo.trainer.engines.engine_choice import choose_engine, engine_name, sampling_dtype
from fused_grpo.trainer.models.adapters import checkpoint_weights

ROUNDED = {"vllm_dtype": "bfloat16", "bf16": False}


def rewards(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.fixture
def make_trainer(build_model, tokenizer, tmp_path) -> Iterator[Callable[..., GRPOTrainer]]:
    made: list[GRPOTrainer] = []

    def make(**options: Any) -> GRPOTrainer:
        shape: Any = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 8}
        shape |= {"max_steps": 2, "learning_rate": 1e-2, "log_completions": False, "save_strategy": "no"}
        args = GRPOConfig(str(tmp_path / "run"), **shape | ROUNDED | options)
        rows = [{"prompt": f"{a}+{a}="} for a in range(8)]
        for trainer in made:  # one vLLM at a time
            trainer.engine.close()
        made.append(GRPOTrainer(build_model(tied=True), rewards, args, rows, processing_class=tokenizer))
        return made[-1]

    yield make
    for trainer in made:
        trainer.engine.close()


def lines(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"bf16": False}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        (ROUNDED, torch.bfloat16),
        ({"bf16": True, "vllm_dtype": "float32"}, torch.float32),
        ({"bf16": False, "vllm_dtype": "float16"}, torch.float16),
    ],
)
def test_the_dtype_is_the_trainers_unless_the_option_says_another(options, dtype) -> None:
    assert sampling_dtype(GRPOConfig(**options)) == dtype


def test_it_is_an_option_of_the_command_line_too() -> None:
    assert parse_train_options(["--model", "m", "--vllm-dtype", "bfloat16"]).vllm_dtype == "bfloat16"
    with pytest.raises(InputError, match=r"vllm_dtype.*float16"):
        GRPOConfig(vllm_dtype="half")


@pytest.mark.parametrize("other", [{"use_vllm": False}, {"vllm_mode": "server"}])
def test_with_another_engine_it_is_refused(other) -> None:
    with pytest.raises(InputError, match=r"got vllm_dtype='float16' with .*fix: leave it out, or set it where the ser"):
        GRPOConfig(vllm_dtype="float16", **other)


def test_without_vllm_it_is_refused_before_a_model_is_loaded(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"with the engine 'transformers', want vLLM in process.*fix: use_vllm=True"):
        engine_name(GRPOConfig(**ROUNDED))


@pytest.mark.engine
def test_a_device_without_the_dtype_is_refused_at_the_start(make_trainer, monkeypatch) -> None:
    old = SimpleNamespace(supported_dtypes=[torch.float16, torch.float32], device_name="cuda", device_type="cuda")
    importlib.import_module("vllm.entrypoints.llm")  # asks the real one what it is
    monkeypatch.setattr("vllm.platforms.current_platform", old)
    with pytest.raises(UnsupportedError, match=r"got vllm_dtype='bfloat16', want .* on this cuda: float16, float32; f"):
        make_trainer()


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_arrive_rounded_at_every_sync(build_model, tokenizer, dtype) -> None:
    model = build_model(tied=True)
    args = GRPOConfig(vllm_max_model_length=32, bf16=False, vllm_dtype=dtype)
    engine = choose_engine("vllm", args, model, tokenizer)
    wanted = getattr(torch, dtype)
    assert engine._llm.llm_engine.model_config.dtype == wanted == engine.weight_dtype
    for version in range(2):
        (served,) = engine._llm.apply_model(lambda inner: {name: p.detach() for name, p in inner.named_parameters()})
        weights = model.state_dict()
        # Of linear layers vLLM's CPU build keeps a packed copy alone.
        for name in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"):
            rows = len(weights[name])  # vLLM pads the vocabulary
            assert torch.equal(served[name][:rows], weights[name].to(wanted)), (version, name)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
        engine.load_weights(checkpoint_weights(model, wanted), version=1)
    engine.close()


@pytest.mark.engine
def test_a_run_says_it_agrees_within_rounding_and_corrects_for_it(make_trainer, capfd) -> None:
    trainer = make_trainer()
    assert "trains in float32; vLLM samples in bfloat16" in " ".join(capfd.readouterr().out.split())
    trainer.train()
    differences = [line["sampling/sampling_logp_difference/mean"] for line in lines(trainer)]
    assert all(1e-4 < difference < 0.05 for difference in differences)
    ratios = [line["sampling/importance_sampling_ratio/max"] for line in lines(trainer)]
    assert all(1.0 < ratio < 1.5 for ratio in ratios)
    assert next(trainer.model.parameters()).dtype == torch.float32


@pytest.mark.engine
def test_weights_that_stay_behind_end_the_run_all_the_same(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(max_steps=4, learning_rate=3e-2)
    monkeypatch.setattr(trainer.engine._llm, "collective_rpc", lambda *_, **__: None)
    with pytest.raises(WeightSyncError, match=r"got a mean difference of .* want at most 0\.1 in bfloat16"):
        trainer.train()


@pytest.mark.engine
def test_a_resumed_run_goes_on_as_it_would_have(make_trainer) -> None:
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(**options)
    whole.train()
    last = lines(whole)[-1]
    resumed = make_trainer(resume_from_checkpoint=str(whole.output_dir / "checkpoint-2"), **options)
    resumed.train()
    names = ("step", "reward", "weight_version", "sampling/sampling_logp_difference/mean")
    assert {name: lines(resumed)[-1][name] for name in names} == {name: last[name] for name in names}
    assert lines(resumed)[-1]["step_time"] != last["step_time"]  # it was recomputed
