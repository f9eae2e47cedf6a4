"""What a script does with a trainer: pairs of optimizers, subclasses, callbacks, and changes once it is made."""

import errno
import math
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_runs import ROWS, at, model_of, places, trainer_in
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedules
from transformers import TrainerCallback

from fused_grpo.errors import CheckpointError, FusedGRPOError, InputError, UnsupportedError
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.logging.run_output import EQUAL_STEPS
from fused_grpo.trainer.models.optimizer import TRIED_STEPS, try_schedule


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01)


def constant(optimizer: Any) -> schedules.LambdaLR:
    return schedules.LambdaLR(optimizer, lambda step: 1.0)


PAIRS = {
    "None": (lambda model: None, "got NoneType as optimizers, want an optimizer and its schedule"),
    "an optimizer alone": (adamw, "got AdamW as optimizers"),
    "a tuple of one": (lambda model: (adamw(model),), "got AdamW as optimizers"),
    "a tuple of three": (lambda model: (adamw(model), None, None), "got AdamW, NoneType, NoneType as optimizers"),
    "classes": (lambda model: (AdamW, schedules.LambdaLR), "got AdamW, LambdaLR as optimizers"),
    "swapped": (lambda model: (constant(adamw(model)), adamw(model)), "got LambdaLR, AdamW as optimizers"),
    "a schedule of another": (lambda model: (adamw(model), constant(adamw(model))), "LambdaLR of another optimizer"),
    "a schedule alone": (lambda model: (None, constant(adamw(model))), "LambdaLR of another optimizer, whose learning"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_no_pair_of_an_optimizer_and_its_schedule_is_refused(tmp_path, name):
    make, message = PAIRS[name]
    model = model_of()
    with pytest.raises(FusedGRPOError, match=message):
        trainer_in(tmp_path, model, optimizers=make(model))


SCHEDULES = {
    "too short": (lambda one: schedules.OneCycleLR(one, 0.1, total_steps=3), "OneCycleLR .* in step 4 of 6"),
    "raises": (lambda one: schedules.LambdaLR(one, lambda step: 1 / (5 - step)), "ZeroDivisionError.* in step 5 of 6"),
    "not a number": (
        lambda one: schedules.LambdaLR(one, lambda step: math.nan if step > 2 else 1.0),
        "nan.* in step 4",
    ),
    "negative": (lambda one: schedules.LambdaLR(one, lambda step: 1.0 - step), "learning rates .-.* in step 3 of 6"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_fails_before_the_end_says_so_at_the_start(tmp_path, name):
    make, message = SCHEDULES[name]
    model = model_of()
    optimizer = adamw(model)
    with pytest.raises(InputError, match=message):
        trainer_in(tmp_path, model, optimizers=(optimizer, make(optimizer)), max_steps=6)


KINDS: dict[str, Any] = {
    "lambda": lambda one: schedules.LambdaLR(one, lambda step: 1 / (step + 1)),
    "one cycle": lambda one: schedules.OneCycleLR(one, 0.1, total_steps=50),
    "several": lambda one: schedules.SequentialLR(
        one, [schedules.ConstantLR(one, 0.1, 2), schedules.ExponentialLR(one, 0.5)], [3]
    ),
    "chained": lambda one: schedules.ChainedScheduler([schedules.ConstantLR(one, 0.1, 2), schedules.StepLR(one, 2)]),
    "cosine": lambda one: schedules.CosineAnnealingWarmRestarts(one, 3),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("name", KINDS)
def test_a_schedule_that_was_tried_is_as_it_was(name, kind):
    optimizers = [SGD(model_of().parameters(), lr=kind(0.01), momentum=0.5) for _ in range(2)]
    made = list(map(KINDS[name], optimizers))
    try_schedule(made[0], optimizers[0], 30)
    for _ in range(12):
        groups = [{key: value for key, value in one.param_groups[0].items() if key != "params"} for one in optimizers]
        assert groups[0] == groups[1]
        for one in made:
            one.step()


def test_not_all_steps_of_a_very_long_run_are_tried():
    steps = list[int]()
    optimizer = adamw(model_of())
    schedule = schedules.LambdaLR(optimizer, lambda step: steps.append(step) or 1.0)
    try_schedule(schedule, optimizer, 10**9)
    assert len(steps) <= TRIED_STEPS + 1


IGNORED = {
    "optim_args": ({"optim": "adamw_torch", "optim_args": "foo=1"}, "got optim_args='foo=1' with optim='adamw_torch'"),
    "target modules": ({"optim_target_modules": ["q_proj"]}, "got optim_target_modules=.'q_proj'.* does not read it"),
    "a warmup of none": ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "constant', which has neither"),
    "kwargs of none": ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"power": 2}}, "which has neither"),
    "a warmup without end": (
        {"lr_scheduler_type": "cosine", "warmup_steps": 9},
        "ends before the learning rate",
    ),
    "no best": ({"save_strategy": "best", "metric_for_best_model": "reward"}, "no eval_dataset.* no best checkpoint"),
    "a best of ends": (
        {"save_strategy": "best", "metric_for_best_model": "reward", "eval_dataset": ROWS[:1]},
        "an eval_dataset., so that there is no best checkpoint",
    ),
    "a best too late": (
        {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "reward"}
        | {"eval_dataset": ROWS[:1], "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 9},
        "eval_delay=9.* no best checkpoint",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_an_option_that_changes_nothing_in_this_run_is_said(tmp_path, caplog, name):
    options, message = IGNORED[name]
    trainer_in(tmp_path, **options)
    assert [record for record in caplog.records if re.search(message, record.getMessage())]


def test_options_that_are_read_are_not_said(tmp_path, caplog):
    trainer_in(tmp_path, lr_scheduler_type="cosine", warmup_steps=1, optim="adafactor")
    trainer_in(tmp_path, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0})
    best = {"save_strategy": "best", "metric_for_best_model": "reward", "eval_dataset": ROWS[:1]}
    trainer_in(tmp_path, **best, eval_steps=1)
    trainer_in(tmp_path, **best, eval_strategy="epoch", eval_delay=0.1)
    assert not [record for record in caplog.records if "got " in record.getMessage()]


def test_a_stream_gets_no_warning_of_an_option_that_is_not_set(tmp_path, caplog):
    from datasets import IterableDataset

    trainer_in(tmp_path, rows=IterableDataset.from_generator(lambda: iter(ROWS))).train()
    assert "accelerator_config" not in caplog.text


class Silent(TrainerCallback):
    pass


@pytest.mark.parametrize("given", [Silent(), Silent, (Silent() for _ in range(2)), (Silent, Silent()), None])
def test_callbacks_are_one_or_several_of_any_kind(tmp_path, given):
    wanted = 0 if given is None else 2 if isinstance(given, tuple) or hasattr(given, "send") else 1
    trainer = trainer_in(tmp_path, callbacks=given)
    assert sum(isinstance(one, Silent) for one in trainer.callback_handler.callbacks) == wanted


def subclass(**methods: Any) -> type[GRPOTrainer]:
    return type("Mine", (GRPOTrainer,), methods)


OVERRIDES: dict[str, Any] = {
    "log": lambda self, logs: None,
    "evaluate": lambda self, eval_dataset: None,
    "save_checkpoint": lambda self, model, trial: None,
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_that_the_loop_cannot_call_is_refused_at_the_start(tmp_path, name):
    with pytest.raises(InputError, match=rf"Mine.{name}\(.* cannot be called as this trainer does"):
        trainer_in(tmp_path, kind=subclass(**{name: OVERRIDES[name]}))
    trainer_in(tmp_path, kind=subclass(**{name: lambda self, *args, **kwargs: None}))


BEST = {"eval_dataset": ROWS[:1], "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}


@pytest.mark.parametrize("whole", [True, False], ids=["beside ours", "alone"])
def test_a_metric_of_an_overridden_evaluate_may_be_the_best(tmp_path, whole):
    values = {1: 1.0, 2: 3.0, 3: 2.0}

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        ours = GRPOTrainer.evaluate(self, *args, **kwargs) if whole else {}
        return ours | {"eval_mine": values[self.state.global_step]}

    trainer = trainer_in(tmp_path, kind=subclass(evaluate=evaluate), max_steps=3, metric_for_best_model="mine", **BEST)
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (3.0, 2)
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.mark.parametrize("returned", [None, {}, 1.0, {"eval_mine": "high"}, {"eval_other": 1.0}])
def test_an_evaluate_without_the_best_metric_is_named(tmp_path, returned):
    kind = subclass(evaluate=lambda self, *args, **kwargs: returned)
    trainer = trainer_in(tmp_path, kind=kind, metric_for_best_model="mine", **BEST)
    with pytest.raises(InputError, match="got metric_for_best_model='mine', want a metric of an evaluation"):
        trainer.train()


def test_train_inside_of_train_is_refused_and_another_trainer_is_not(tmp_path):
    other, trained = trainer_in(tmp_path / "other"), list[int]()
    trainer = trainer_in(
        tmp_path, callbacks=[at("on_step_end", lambda model, state: trained.append(other.train().steps))]
    )
    assert trainer.train().steps == 2
    assert trained == [2, 2]
    own = list[GRPOTrainer]()
    own.append(trainer_in(tmp_path, callbacks=[at("on_step_end", lambda model, state: own[0].train())]))
    with pytest.raises(InputError, match="inside of the same run, as of a callback that calls train"):
        own[0].train()
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_train_inside_that_is_refused_ends_nothing_of_the_run(tmp_path):
    before, own, seen = signal.getsignal(signal.SIGTERM), list[GRPOTrainer](), list[tuple[bool, bool]]()

    def train_again(model, state) -> None:
        with suppress(InputError):
            own[0].train()
        seen.append(((tmp_path / "run" / ".lock").exists(), own[0].engine_is_open))

    own.append(trainer_in(tmp_path, callbacks=[at("on_step_end", train_again)]))
    own[0].train()
    assert seen == [(True, True)] * 2
    assert signal.getsignal(signal.SIGTERM) is before


CHANGES: dict[str, Any] = {
    "all are frozen": lambda model: model.requires_grad_(False),
    "a part is trained that was not": lambda model: model.model.norm.requires_grad_(True),
    "another dtype": lambda model: model.half(),
    "one of another dtype": lambda model: model.lm_head.to(torch.bfloat16),
    "another size": lambda model: model.resize_token_embeddings(20),
    "another layer": lambda model: setattr(model, "lm_head", nn.Linear(16, 16, bias=False)),
    "one more": lambda model: setattr(model.model.norm, "bias", nn.Parameter(torch.zeros(16))),
}


@pytest.mark.parametrize("event", [None, "on_step_end", "on_step_begin"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_its_optimizer_was_not_made_for_is_not_trained(tmp_path, name, event):
    model = model_of()
    model.model.norm.requires_grad_(False)
    callbacks = [at(event, lambda model, state: CHANGES[name](model))] if event else []
    trainer = trainer_in(tmp_path, model, callbacks=callbacks)
    if not event:
        CHANGES[name](model)
    with pytest.raises(InputError, match=r"weights, .* that are not as they were when the trainer was made"):
        trainer.train()


BESIDE: dict[str, tuple[Any, str]] = {
    "a group more": (
        lambda trainer: trainer.optimizer.add_param_group({"params": []}),
        "got 2 groups of the optimizer",
    ),
    "merged": (lambda trainer: trainer.model.merge_adapter(), "got a PeftModel whose adapter is merged"),
    "disabled": (lambda trainer: trainer.model.disable_adapter_layers(), "got a PeftModel whose adapter is disabled"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_an_optimizer_or_adapter_that_a_callback_changes_is_named(tmp_path, name):
    change, said = BESIDE[name]
    model = get_peft_model(model_of(), LoraConfig(r=2, target_modules=["q_proj"]))
    own = list[GRPOTrainer]()
    own.append(trainer_in(tmp_path, model, callbacks=[at("on_step_end", lambda model, state: change(own[0]))]))
    with pytest.raises(InputError, match=said):
        own[0].train()


def test_other_values_and_fewer_trained_weights_are_the_users_choice(tmp_path):
    model = model_of()
    optimizer = adamw(model)  # of more than is trained at first
    model.model.norm.requires_grad_(False)
    trainer = trainer_in(tmp_path, model, optimizers=(optimizer, constant(optimizer)))
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
    model.model.norm.requires_grad_(True)
    model.lm_head.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "lm_head.weight" not in moved
    assert "model.norm.weight" in moved


def test_a_list_that_is_handed_out_cannot_be_changed_in_silence(tmp_path):
    for name, value in (("reward_funcs", places), ("reward_func_names", "more")):
        trainer = trainer_in(tmp_path)
        getattr(trainer, name).append(value)
        with pytest.raises(InputError, match="another function in the list of reward_funcs"):
            trainer.train()
    trainer = trainer_in(tmp_path)
    trainer.reward_funcs[0] = lambda completions, **columns: [0.0] * len(completions)
    with pytest.raises(InputError, match="another function in the list of reward_funcs"):
        trainer.train()


class Reward:
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return places(completions)


def _one_by_one(completions: list[str], **columns: Any) -> Any:
    yield from places(completions)


async def _one_by_one_later(completions: list[str], **columns: Any) -> Any:
    yield 1.0


UNUSABLE: dict[str, Any] = {
    "a class": (Reward, r"got the class Reward as a reward function.* fix: Reward\(\)"),
    "parameters without names": (lambda prompts, completions, /: [0.0], "with the parameters .prompts, completions, /"),
    "one without a name": (lambda completions, /, **columns: [0.0], "want some that are given by name"),
    "a generator": (_one_by_one, "got reward function '_one_by_one', which is a generator, want a list"),
    "an async generator": (_one_by_one_later, "'_one_by_one_later', which is a generator, want a list"),
    "any without names": (lambda *given: [0.0], "with the parameters .*given"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_reward_that_cannot_be_called_is_refused_at_the_start(tmp_path: Path, name: str):
    function, message = UNUSABLE[name]
    with pytest.raises(InputError, match=message):
        trainer_in(tmp_path, reward=function)


LEFT = {
    "autocast": lambda *given: torch.set_autocast_enabled("cpu", True),
    "no gradients": lambda *given: torch.set_grad_enabled(False),
}


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_substep_end", "on_step_end", "on_log"])
@pytest.mark.parametrize("name", LEFT)
def test_what_a_callback_leaves_of_the_process_changes_no_step(tmp_path, name, event):
    weights = list[dict[str, torch.Tensor]]()
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 1}
    try:
        for callbacks in ([], [at(event, LEFT[name])]):
            trainer = trainer_in(tmp_path, callbacks=callbacks, **options)
            trainer.train()
            weights.append(trainer.model.state_dict())
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_grad_enabled(True)
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_a_trainer_inside_of_autocast_is_refused_by_that_name(tmp_path):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match=r"inside torch.autocast\(\)"):
        trainer_in(tmp_path)
    trainer = trainer_in(tmp_path)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="fix: bf16=True"):
        trainer.train()
    assert trainer.train().steps == 2


@pytest.mark.parametrize("kind", ["hook", "detach"])
def test_steps_without_a_gradient_are_said(tmp_path, capsys, kind):
    model = model_of()
    if kind == "hook":
        for parameter in model.parameters():
            parameter.register_hook(torch.zeros_like)
    else:
        model.model.norm.register_forward_hook(lambda layer, given, states: states.detach() + 0 * layer.weight)
        model.lm_head.requires_grad_(False)
    trainer_in(tmp_path, model, max_steps=EQUAL_STEPS).train()
    assert "the gradient was 0, although rewards differ" in " ".join(capsys.readouterr().out.split())


def test_a_model_is_not_saved_to_the_place_of_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FusedGRPOError, match="file, which cannot be written"):
        trainer_in(tmp_path).save_model(tmp_path / "file")


WRITES = {
    "save_model": lambda trainer: trainer.save_model(),
    "save_state": lambda trainer: trainer.save_state(),
    "save_metrics": lambda trainer: trainer.save_metrics("train", {"reward": 1.0}),
    "create_model_card": lambda trainer: trainer.create_model_card(),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_output_dir_that_cannot_be_written_is_named(tmp_path, name):
    trainer = trainer_in(tmp_path)
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match=r"run, which cannot be written .File exists.; want a directory"):
        WRITES[name](trainer)


def test_a_disk_that_is_full_while_a_script_saves_is_named(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = trainer_in(tmp_path)
    monkeypatch.setattr(type(trainer.processing_class), "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"mine, which cannot be written .No space left on device"):
        trainer.save_model(tmp_path / "mine")


class Late(TrainerCallback):
    async def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Would be called after hours, and never run."""


class OneByOne(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        yield 1


@pytest.mark.parametrize("callback", [Late(), OneByOne(), Late])
def test_a_callback_that_would_never_run_is_refused_at_the_start(tmp_path, callback):
    with pytest.raises(InputError, match=r"whose on_\w+ cannot be called .it is a coroutine or a generator"):
        trainer_in(tmp_path, callbacks=[callback])


@pytest.mark.parametrize("place", ["reward", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "before"])
def test_gradients_that_are_left_on_the_model_are_no_part_of_a_step(tmp_path, place):
    model = model_of()

    def leave(*given: Any) -> None:
        with torch.enable_grad():
            model(input_ids=torch.tensor([[2, 3, 4]])).logits.square().sum().backward()

    def reward(completions: list[str], **columns: Any) -> list[float]:
        leave()
        return places(completions)

    options = {"max_steps": 3, "reward": reward if place == "reward" else places}
    trainer = trainer_in(tmp_path, model, callbacks=[at(place, leave)] if place.startswith("on_") else None, **options)
    if place == "before":
        leave()
    trainer.train()
    plain = trainer_in(tmp_path / "plain", max_steps=3)
    plain.train()
    assert all(torch.equal(value, plain.model.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("both", [True, False])
def test_a_pair_that_accelerate_has_prepared_is_taken(tmp_path, both):
    from accelerate import Accelerator

    model, accelerator = model_of(), Accelerator(cpu=True)
    optimizer = adamw(model)
    schedule = constant(optimizer)
    prepared = accelerator.prepare_optimizer(optimizer)
    trainer_in(tmp_path, model, optimizers=(prepared, accelerator.prepare_scheduler(schedule) if both else schedule))
