"""Options that are set after `GRPOConfig` was made are checked as those that it was made with."""

import dataclasses
import logging

import pytest

from fused_grpo.errors import FusedGRPOError, WrongTypeError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.collect.start_checks import Start

NAMES = [entry.name for entry in dataclasses.fields(GRPOConfig)]
VALUES = [object(), -7, -0.5, "bogus", "", ["", 3], {"a": object()}, "{", True, None, float("nan"), 10**30]


def begin(args):
    """What the constructor of a trainer does first."""
    return Start(args=args, model="nowhere", reward_funcs=len, train_dataset=[])


def outcome(make):
    try:
        make()
    except FusedGRPOError as error:
        return type(error), str(error)
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__ + str(value)[:5].strip("{<"))
def test_an_option_set_afterwards_is_checked_as_one_that_is_given(value):
    differ = {}
    for name in NAMES:
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
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        my_scale: float = 0.5

    args, mine = GRPOConfig(), Mine()
    args.max_prompt_length, args.warmup_ratio, mine.something = 512, 0.1, 1
    with caplog.at_level(logging.WARNING):
        for one in (args, args, mine):
            begin(one)
    said = "got args with max_prompt_length, warmup_ratio, which are no options: nothing reads them"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_the_options_of_another_library_are_refused_by_their_name():
    transformers = pytest.importorskip("transformers")
    for args in (transformers.TrainingArguments("nowhere"), {"output_dir": "nowhere"}, "nowhere"):
        with pytest.raises(
            WrongTypeError, match=r"got args of type \S+, want the GRPOConfig of .*; fix: from fused_grpo"
        ):
            begin(args)
    assert begin(GRPOConfig()).args == GRPOConfig()


def test_options_of_saving_that_are_set_before_train_are_checked(make_trainer):
    trainer = make_trainer(max_steps=1)
    trainer.args.save_steps = 0
    with pytest.raises(FusedGRPOError, match="got save_steps=0, want a number of steps"):
        trainer.train()
