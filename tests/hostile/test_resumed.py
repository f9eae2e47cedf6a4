"""A run that is resumed with another model, tokenizer, rewards or schedule says so, and which of the two counts."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from small_runs import model_of, places, trainer_in

from fused_grpo.trainer.checkpoint.checkpoint import sha256_of
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

WARNING = "with other options"
SAVES = {"save_strategy": "steps", "save_steps": 1}
KINDS = ["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt"]


def scores(completions: list[str], **columns: Any) -> list[float]:
    return [2.0 * reward for reward in places(completions)]


class Weighted:
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return places(completions)


def tokenizer_with(**options: Any) -> Any:
    tokenizer = build_tokenizer()
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_more_tokens() -> Any:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["x"])
    return tokenizer


# Of a resumed run: what it is given instead, and what is said.
CHANGES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "activation": (lambda: {"model": model_of(hidden_act="gelu")}, "model.config.hidden_act: 'silu' in the checkpoint"),
    "norm": (
        lambda: {"model": model_of(rms_norm_eps=0.01)},
        "model.config.rms_norm_eps: 1e-06 in the checkpoint, 0.01",
    ),
    "window": (
        lambda: {"model": model_of(use_sliding_window=True, sliding_window=2, max_window_layers=0)},
        "model.config.layer_types: ",
    ),
    "rotary base": (
        lambda: {"model": model_of(rope_parameters={"rope_type": "default", "rope_theta": 500.0})},
        "model.config.rope_parameters: ",
    ),
    "end of sequence": (lambda: {"processing_class": tokenizer_with(eos_token="+")}, "processing_class: "),
    "template": (lambda: {"processing_class": tokenizer_with(chat_template="{{ 1 }}")}, "processing_class: "),
    "vocabulary": (lambda: {"processing_class": with_more_tokens()}, "processing_class: "),
    "reward": (lambda: {"reward": scores}, "reward_funcs: 'places (sha256"),
    "one more reward": (lambda: {"reward": [places, scores]}, "reward_funcs: "),
    "an object as reward": (lambda: {"reward": Weighted()}, "now; the new one counts: from the next step on"),
}


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Callable[..., Any]:
    """The trainer of a run with these options, which ran once for all tests and has checkpoints of all its steps."""
    made: dict[str, Any] = {}

    def run(name: str, **options: Any) -> Any:
        if name not in made:
            made[name] = trainer_in(tmp_path_factory.mktemp("first"), **SAVES, **options)
            made[name].train()
        return made[name]

    return run


def warnings_of(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"])], ids=["whole", "adapter"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_as_in_the_checkpoint_is_said(first, tmp_path, caplog, name, adapter):
    change, said = CHANGES[name]
    before = first("whole" if adapter is None else "adapter", peft_config=copy.deepcopy(adapter))
    resumed = trainer_in(tmp_path, **SAVES, **{"peft_config": copy.deepcopy(adapter)} | change())
    resumed.train(resume_from_checkpoint=before.output_dir / "checkpoint-1")
    (warning,) = warnings_of(caplog)
    assert said in warning


@pytest.mark.parametrize("by_path", [False, True])
def test_the_same_run_says_nothing(first, tmp_path, caplog, by_path):
    """A model that is loaded, and one by its path, have configs that differ in what loading sets."""
    model_of().save_pretrained(tmp_path / "model")
    given = str(tmp_path / "model") if by_path else model_of()
    resumed = trainer_in(tmp_path, given, **SAVES)
    resumed.train(resume_from_checkpoint=first("whole", peft_config=None).output_dir / "checkpoint-1")
    assert warnings_of(caplog) == []


def test_a_checkpoint_that_does_not_name_them_is_resumed(tmp_path, caplog):
    """Of an earlier version."""
    trainer_in(tmp_path, **SAVES).train()
    folder = tmp_path / "run" / "checkpoint-1"
    content = json.loads((folder / "training.json").read_text())
    named = [name for name in content["options"] if name.startswith(("model.config.", "processing_", "reward_funcs"))]
    assert len(named) > 10
    content["options"] = {name: value for name, value in content["options"].items() if name not in named}
    (folder / "training.json").write_text(json.dumps(content))
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / "training.json"
    manifest["files"]["training.json"] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    trainer_in(tmp_path, **SAVES).train(resume_from_checkpoint=folder)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_longer_run_the_next_step_has_the_longer_schedules_rate(tmp_path, kind):
    """The last step of the shorter one may have a rate of 0."""
    options = {**SAVES, "lr_scheduler_type": kind, "warmup_steps": 0.3}
    trainer_in(tmp_path, max_steps=2, **options).train()
    resumed = trainer_in(tmp_path, max_steps=5, **options)
    resumed.train(resume_from_checkpoint=True)
    whole = trainer_in(tmp_path / "whole", max_steps=5, **options)
    whole.train()
    rates = [[entry["learning_rate"] for entry in one.state.log_history[-4:-1]] for one in (resumed, whole)]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_another_schedule_goes_on_as_if_it_had_been_so(first, tmp_path, before, after):
    cut, whole = (first(kind, lr_scheduler_type=kind, max_steps=3) for kind in (before, after))
    resumed = trainer_in(tmp_path, lr_scheduler_type=after, max_steps=3, **SAVES)
    resumed.train(resume_from_checkpoint=cut.output_dir / "checkpoint-1")
    rates = [[entry["learning_rate"] for entry in one.state.log_history[-3:-1]] for one in (resumed, whole)]
    assert rates[0] == pytest.approx(rates[1])
    assert torch.isfinite(next(resumed.model.parameters())).all()
