"""Options that a script sets on its `args`, and fields that a subclass of a script's adds."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainingArguments

from fused_grpo.config import option_types
from fused_grpo.errors import FusedGRPOError, InputError, UnavailableError, WrongTypeError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.options import TrainOptions
from fused_grpo.trainer.collect.start_checks import Start
from fused_grpo.trainer.config.trl_fields import MISSING

# Further names of other options, under which these are refused.
ALIASES = {"activation_checkpointing", "activation_checkpointing_kwargs", "vllm_importance_sampling_cap"}
NAMES = [name for name in option_types(GRPOConfig) if name not in ALIASES | MISSING.keys()]


VALUES = [object(), -7, -0.5, "bogus", "", ["", 3], {"a": object()}, "{", True, None, float("nan"), 10**30]


class Unusable:
    """What no option can be."""


def begin(args: GRPOConfig) -> Start:
    """What the constructor of a trainer does first."""
    return Start(args=args, model="nowhere", reward_funcs=len, train_dataset=[])


def outcome(make: Callable[[], object]) -> tuple[type, str] | None:
    try:
        make()
    except FusedGRPOError as error:
        return type(error), str(error)
    return None


def refused(call: Callable[[], object], name: str) -> str:
    """The error that the call raises, where it is one of ours that names the option; else an empty text."""
    try:
        call()
    except FusedGRPOError as error:
        return str(error) if re.search(rf"\b{name}=", str(error)) else ""
    return ""


def test_every_option_that_is_set_before_the_trainer_is_made_is_checked():
    def made(name: str) -> Callable[[], object]:
        args = GRPOConfig()
        setattr(args, name, Unusable())
        return lambda: GRPOTrainer("no-model", args=args)

    assert [name for name in NAMES if not refused(made(name), name)] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__ + str(value)[:5].strip("{<"))
def test_an_option_set_afterwards_is_checked_as_one_that_is_given(value):
    differ = {}
    for name in option_types(GRPOConfig):
        args = GRPOConfig()
        setattr(args, name, value)
        given, afterwards = (
            outcome(lambda name=name: GRPOConfig(**{name: value})),
            outcome(lambda args=args: begin(args)),
        )
        if given != afterwards:
            differ[name] = given, afterwards
    assert differ == {}


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("model_init_kwargs", '{"dtype": "float32"}', {"dtype": "float32"}),
        ("model_init_kwargs", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ("teacher_model_init_kwargs", {"torch_dtype": "auto", "revision": "a"}, {"dtype": "auto", "revision": "a"}),
        ("report_to", "tensorboard", ["tensorboard"]),
        ("report_to", "none", []),
        ("report_to", None, []),
        ("scale_rewards", False, "none"),
        ("save_steps", 3.0, 3),
    ],
)
def test_an_option_set_afterwards_takes_the_form_of_one_that_is_given(name, value, becomes):
    args = GRPOConfig()
    setattr(args, name, value)
    begin(args)
    assert getattr(args, name) == becomes == getattr(GRPOConfig(**{name: value}), name)


def test_what_is_no_option_is_said_once_and_own_fields_are_none(caplog):
    @dataclass
    class Mine(GRPOConfig):
        my_scale: float = 0.5

    args, extended_args = GRPOConfig(), Mine()
    args.max_prompt_length, args.warmup_ratio, extended_args.something = 512, 0.1, 1
    with caplog.at_level(logging.WARNING):
        for one in (args, args, extended_args):
            begin(one)
    said = "got args with max_prompt_length, warmup_ratio, which are no options: nothing reads them"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_every_option_that_is_set_before_training_is_checked(make_trainer, tmp_path):
    trainer, wrong = make_trainer(), []
    for name in NAMES:
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, Unusable())
        if not refused(trainer.train, name):
            wrong.append(name)
        setattr(trainer.args, name, before)
    assert wrong == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_strategy": "steps"}, "got eval_strategy='steps' .*, want an eval_dataset"),
        ({"eval_on_start": True}, "eval_on_start=True, want an eval_dataset"),
        ({"logging_steps": 0}, "got logging_steps=0, want a number of steps"),
        ({"save_strategy": "best"}, "got metric_for_best_model=None .* and save_strategy='best'"),
        ({"log_completions_steps": 0}, "got log_completions_steps=0, want at least 1"),
        ({"report_to": ["tensorboard"]}, r"got args with report_to=\['tensorboard'\], want report_to=\[\]"),
        ({"eval_delay": float("nan")}, "got eval_delay=nan, want at least 0, and finite"),
    ],
)
def test_what_is_set_before_training_has_to_go_together(make_trainer, options, message):
    trainer = make_trainer()
    for name, value in options.items():
        setattr(trainer.args, name, value)
    with pytest.raises(InputError, match=message):
        trainer.train()


def test_an_upload_that_is_asked_for_late_needs_a_login_too(make_trainer, monkeypatch):
    monkeypatch.setattr("fused_grpo.trainer.logging.model_card.get_token", lambda: None)
    trainer = make_trainer()
    trainer.args.push_to_hub = True
    with pytest.raises(UnavailableError, match="without a login to the hub"):
        trainer.train()


def test_what_is_set_gets_the_form_of_its_type(make_trainer, tmp_path):
    trainer = make_trainer(eval_dataset=[{"prompt": "1+1="}])
    args = trainer.args
    args.output_dir, args.report_to, args.eval_strategy, args.save_steps = Path(args.output_dir), "none", "steps", 2.0
    assert trainer.train().steps == 3
    assert (args.output_dir, args.report_to, args.eval_steps, args.save_steps) == (str(tmp_path / "run"), [], 10, 2)


@pytest.mark.parametrize("args", [{"output_dir": "x"}, "x", TrainingArguments, GRPOConfig])
def test_what_are_no_options_are_refused(args):
    with pytest.raises(WrongTypeError, match=f"got args of the type .*{type(args).__name__}, want .*; fix: from"):
        GRPOTrainer("no-model", args=args)


def test_the_options_of_a_second_trainer_are_no_news(make_trainer, caplog):
    first = make_trainer()
    first.start.args.learning_rate = 1e-3  # the same
    first.train()
    GRPOConfig(**vars(first.args))
    assert "which changes nothing here" not in caplog.text


@dataclass
class WithFields(GRPOConfig):
    """As scripts have them: text that is empty, a function, an array, an annotation that this module does not know."""

    note: str = ""
    names: list[str] = field(default_factory=lambda: [""])
    shape: tuple[int, str] = (1, "a")
    function: Callable[[], None] | None = len
    weights: Any = field(default_factory=lambda: np.ones(2))
    later: "OnlyForTypeCheckers | None" = None  # noqa: F821
    stage: int = 0


def test_the_fields_of_a_subclass_may_be_anything(make_trainer, tmp_path):
    trainer = make_trainer()
    given = WithFields(**{name: getattr(trainer.args, name) for name in NAMES})
    trainer.start.args = given
    given.stage = 1
    assert trainer.train().steps == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["shape"] == [1, "a"]
    with pytest.raises(InputError, match="got max_steps='3', want int"):
        WithFields(max_steps="3")


@pytest.mark.parametrize("given", ["~/runs/mine", Path("~/runs/mine")])
def test_an_output_directory_may_be_in_the_home_directory(monkeypatch, tmp_path, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = GRPOConfig(given, resume_from_checkpoint="~/runs/before")
    assert args.output_dir == str(tmp_path / "runs" / "mine")
    assert args.resume_from_checkpoint == str(tmp_path / "runs" / "before")
    assert GRPOConfig(**args.to_dict()) == args  # where it is "~" again


def test_paths_of_a_yaml_file_may_be_in_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    given = dict.fromkeys(("model", "teacher_model", "dataset", "eval_dataset", "environment_factory"), "~/x")
    options = TrainOptions(**given, reward_funcs=["accuracy", "~/x.py:f"], tools=["~/x.py:f"], distillation_coef=1.0)
    assert {getattr(options, name) for name in given} == {"/home/a/x"}
    assert (options.reward_funcs, options.tools) == (["accuracy", "/home/a/x.py:f"], ["/home/a/x.py:f"])


@pytest.mark.parametrize("name", ["a\0b", "a\udce9"])
def test_an_output_directory_in_which_no_weights_can_be_saved_is_refused(name):
    with pytest.raises(InputError, match=r"got output_dir=.*, want a path of UTF-8 text"):
        GRPOConfig(name)


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_a_folder_that_safetensors_would_name_differently_is_refused(monkeypatch, encoding):
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: encoding)
    with pytest.raises(InputError, match=r"got output_dir='läufe', want a path of UTF-8 text.*PYTHONUTF8=1"):
        GRPOConfig("läufe")
    assert GRPOConfig("runs").output_dir == "runs"
