"""What a subclass or a script puts in the place of a part of the trainer: it counts, or it is refused by name."""

import re

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

from fused_grpo.errors import InputError, MissingAttributeError, UnsupportedError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.config.trl_names import _TRAINER_NAMES, HOOKS, REASONS, check_replaced
from fused_grpo.trainer.loop import _MOVES
from fused_grpo.trainer.transformers_face import TransformersFace, _Part

METHODS = sorted(name for name in vars(Trainer) if not name.startswith("__"))


def made_by(kind):
    """A trainer of that class, up to where it checks the class."""
    return kind(model="nowhere", reward_funcs=len, args=GRPOConfig(output_dir="nowhere"), train_dataset=[])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_transformers_in_a_subclass_counts_or_is_refused(name):
    kind = type("Mine", (GRPOTrainer,), {name: lambda self, *given, **named: None})
    if name in HOOKS:
        check_replaced(object.__new__(kind), {}, {})
        return
    with pytest.raises(UnsupportedError, match=rf"^got Mine\.{name} \(.*\).*; fix: leave them out"):
        made_by(kind)


@pytest.mark.parametrize(
    "name", ["_finish", "_learn", "_card", "beta", "epsilon_high", "_logs", "environments", "step"]
)
def test_a_name_of_the_trainers_own_in_a_subclass_is_refused(name):
    with pytest.raises(UnsupportedError, match=rf"got Mine\.{name} \(a name of transformers' or this trainer's own\)"):
        made_by(type("Mine", (GRPOTrainer,), {name: 1.0}))


def test_a_mixin_is_read_as_a_subclass_and_all_names_are_said_at_once():
    class Mixin:
        def compute_loss(self, model, inputs):
            return 0.0

        def create_optimizer(self):
            return None

    class Mine(Mixin, GRPOTrainer):
        def helper(self):
            return None

    said = r"got Mixin\.compute_loss \(the loss is .*\); Mixin\.create_optimizer \(pass `optimizers=.*\): this trainer"
    with pytest.raises(UnsupportedError, match=said):
        made_by(Mine)


@pytest.mark.parametrize("kind", [GRPOTrainer, TransformersFace])
def test_what_is_put_into_the_class_itself_is_refused(monkeypatch, kind):
    monkeypatch.setattr(kind, "_get_per_token_logps", lambda self, *given: None, raising=False)
    monkeypatch.setattr(kind, "save_model", lambda self, *given: None)
    with pytest.raises(UnsupportedError, match=r"save_model \(the files of") as caught:
        made_by(GRPOTrainer)
    assert f"{kind.__name__}._get_per_token_logps (the loss is that of" in str(caught.value)


def test_hooks_and_names_of_ones_own_run(make_trainer):
    class Mine(GRPOTrainer):
        calls = ()

        def evaluate(self, *given, **named):
            self.calls = (*self.calls, "evaluate")
            return super().evaluate(*given, **named)

        def save_checkpoint(self):
            self.calls = (*self.calls, "save")
            return super().save_checkpoint()

    trainer = make_trainer(max_steps=2, save_steps=1, eval_dataset=[{"prompt": "1+1="}], eval_on_start=True)
    trainer.__class__ = Mine
    trainer.my_scale = 0.5
    trainer.train()
    assert {"evaluate", "save"} == set(trainer.calls)


@pytest.mark.parametrize("name", ["compute_loss", "generation_config", "data_collator", "mask_truncated_completions"])
def test_an_attribute_that_nothing_would_read_is_refused(make_trainer, tmp_path, name):
    trainer = make_trainer(max_steps=1)
    setattr(trainer, name, print)
    with pytest.raises(UnsupportedError, match=rf"got {name} \({re.escape(REASONS[name])}\)"):
        trainer.train()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    delattr(trainer, name)
    assert trainer.train().steps == 1


def test_a_name_of_trl_that_is_read_is_an_option_or_has_its_reason(make_trainer):
    trainer = make_trainer(max_steps=1, top_entropy_quantile=0.5)
    names = {name for name in (*REASONS, *METHODS) if name not in dir(trainer)}
    options = {name for name in names if hasattr(trainer, name)}
    assert {name: getattr(trainer, name) for name in options} == {name: getattr(trainer.args, name) for name in options}
    assert {"top_entropy_quantile", "mask_truncated_completions", "vllm_mode"} <= options
    for name in sorted(names - options):
        why = REASONS.get(name, "a name of transformers' or this trainer's own")
        with pytest.raises(MissingAttributeError, match=f"got trainer.{name}, .*{re.escape(why)}; fix: "):
            getattr(trainer, name)
    assert {"generation_config", "_metrics", "predict", "compute_loss"} <= names - options


def test_any_other_name_that_is_read_is_an_ordinary_error(make_trainer):
    with pytest.raises(AttributeError, match="'GRPOTrainer' object has no attribute 'modle'") as caught:
        _ = make_trainer(max_steps=1).modle
    assert not isinstance(caught.value, UnsupportedError)
    with pytest.raises(AttributeError, match="no attribute 'args'"):
        _ = object.__new__(GRPOTrainer).args


def test_no_part_of_a_trainer_can_be_set_to_something_else(make_trainer):
    trainer = make_trainer(max_steps=1)
    parts = vars(trainer).keys() - {"engine", "eval_dataset"}
    assert {"rewards", "sampler", "learner", "ref_model", "tools", "processing_class", "stop", "lock"} <= parts
    made = trainer._made
    for name in sorted(parts):
        before = getattr(trainer, name)
        setattr(trainer, name, ["something else"])
        with pytest.raises(UnsupportedError, match=rf"^got {name} \("):
            check_replaced(trainer, made, _MOVES)
        setattr(trainer, name, before)
    assert trainer.train().steps == 1


def test_what_a_subclass_sets_before_its_super_call_is_kept_or_refused(make_trainer, monkeypatch):
    early = {"mine": object()}

    class Mine(GRPOTrainer):
        def __init__(self, *arguments, **options):
            vars(self).update(early)
            super().__init__(*arguments, **options)

    monkeypatch.setitem(make_trainer.__globals__, "GRPOTrainer", Mine)
    trainer = make_trainer(max_steps=1)
    assert trainer.mine is early["mine"]
    own = [name for name in vars(trainer) if name not in (*early, *_TRAINER_NAMES, "_made")]
    assert {"results", "facts", "buffer", "learner"} <= set(own)
    early |= dict.fromkeys(own, "of a subclass")
    with pytest.raises(UnsupportedError, match="set before super") as refused:
        make_trainer(max_steps=1)
    assert f"got {', '.join(own)} set before super().__init__()" in str(refused.value)


def test_a_part_that_is_set_is_called_what_the_script_calls_it(make_trainer):
    trainer = make_trainer(max_steps=1)
    names = [name for name, part in vars(TransformersFace).items() if isinstance(part, _Part)]
    assert {"reward_weights", "epsilon_low", "lr_scheduler", "model"} <= set(names)
    for name in names:
        with pytest.raises(InputError, match=f"got another value for {name} of a trainer"):
            setattr(trainer, name, None)


@pytest.mark.parametrize("name", ["temperature", "beta", "learning_rate", "max_completion_length", "num_generations"])
def test_an_option_that_a_callback_changes_in_a_run_is_refused(make_trainer, name):
    class Anneals(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            setattr(args, name, 2 * getattr(args, name) + 1)

    trainer = make_trainer(max_steps=3, save_steps=1, callbacks=[Anneals])
    with pytest.raises(InputError, match=rf"got args with {name}=.*, want {name}=.*; fix: a new GRPOTrainer"):
        trainer.train()
    assert trainer.step == 1


def test_an_option_inside_of_a_mapping_that_a_callback_changes_is_refused(make_trainer):
    class Cools(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            args.generation_kwargs["min_new_tokens"] = 2

    trainer = make_trainer(max_steps=3, generation_kwargs={"min_new_tokens": 1}, callbacks=[Cools])
    with pytest.raises(InputError, match=r"got args with generation_kwargs=\{'min_new_tokens': 2\}, want "):
        trainer.train()
    assert trainer.step == 1


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_number_of_a_long_array_that_a_callback_changes_is_refused(make_trainer, make):
    class Changes(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            args.chat_template_kwargs["weights"][1000] = 1.0

    trainer = make_trainer(max_steps=3, chat_template_kwargs={"weights": make(2000)}, callbacks=[Changes])
    with pytest.raises(InputError, match=r"got args with chat_template_kwargs=\{'weights': "):
        trainer.train()
    assert trainer.step == 1


def test_what_a_run_shows_and_saves_may_change_in_a_callback(make_trainer, tmp_path):
    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            args.save_total_limit, control.should_save = 1, True

    make_trainer(max_steps=3, save_strategy="no", callbacks=[Saves]).train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
