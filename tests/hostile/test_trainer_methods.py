"""The methods that transformers' Trainer has too: its call forms bind, and what they ask for in vain is an error."""

import inspect

import pytest
from small_runs import trainer_in
from transformers import Trainer

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer import GRPOTrainer

SHARED = [
    name
    for name, method in vars(Trainer).items()
    if inspect.isfunction(method) and not name.startswith("_") and inspect.isfunction(getattr(GRPOTrainer, name, None))
]


@pytest.mark.parametrize("name", SHARED)
def test_a_call_with_the_arguments_of_transformers_binds(name):
    signature = inspect.signature(getattr(Trainer, name))
    fixed = [one for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    ours = inspect.signature(getattr(GRPOTrainer, name))
    for one in fixed[1:]:
        ours.bind_partial(None, **{one.name: one.default})
    if name != "create_model_card":  # which has TRL's arguments in TRL's order
        bound = ours.bind_partial(*[one.name for one in fixed]).arguments
        assert all(place == value for place, value in bound.items())


def test_the_walk_has_methods_that_scripts_call():
    assert {"train", "evaluate", "save_model", "push_to_hub", "log", "create_model_card"} <= set(SHARED)


def test_arguments_without_an_effect_are_taken(tmp_path):
    trainer = trainer_in(tmp_path, max_steps=1)
    trainer.train(resume_from_checkpoint=False, trial=None, ignore_keys_for_eval=["logits"])
    trainer.create_model_card(language=None, finetuned_from=None)
    assert trainer.state.global_step == 1


CALLS = {
    "train": (lambda trainer: trainer.train(trial={"learning_rate": 1.0}), r"train\(trial=.*want trial=None"),
    "create_model_card": (
        lambda trainer: trainer.create_model_card(license="mit"),
        r"want .*leave license out",
    ),
    "push_to_hub": (lambda trainer: trainer.push_to_hub(language="en"), "language='en'.*want model_name, dataset_name"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_would_change_something_are_refused(tmp_path, name):
    call, message = CALLS[name]
    trainer = trainer_in(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        call(trainer)
    assert not (tmp_path / "run").exists()
