"""Callbacks of transformers: the same events in the same order as under TRL's own trainer, and what they decide."""

import json
import os
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from fused_grpo.errors import InputError, WrongTypeError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):
    """Keeps (event, step) of every event, and the names in each log entry."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[set[str]] = []


def record(name):
    def event(self, args, state, control, **kwargs):
        self.events.append((name, state.global_step))
        assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= kwargs.keys()
        assert name == "on_init_end" or kwargs["optimizer"] is not None
        assert args.label_smoothing_factor == 0.0  # an option that only TRL has
        if name == "on_log":
            self.logs.append(set(kwargs["logs"]))

    return event


for event_name in EVENTS:
    setattr(Recorder, event_name, record(event_name))


def kind(names: set[str]) -> str:
    return "eval" if any(name.startswith("eval_") for name in names) else "end" if "train_loss" in names else "steps"


OPTIONS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "num_generations_eval": 4,
    "num_train_epochs": 2,
    "max_completion_length": 2,
    "logging_steps": 2,
    "use_vllm": False,
    "bf16": False,
    "report_to": "none",
    "gradient_checkpointing": False,
    "metric_for_best_model": "reward",
}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "epoch"}
BY_SHARES = {"eval_strategy": "steps", "eval_steps": 0.5, "save_steps": 0.4, "eval_on_start": True}
BY_EPOCHS = {"eval_strategy": "epoch", "save_strategy": "best", "logging_strategy": "epoch", "eval_delay": 1}


def rising(completions, trainer_state, **columns):
    """Which evaluation is the best does not depend on what was sampled."""
    return [float(trainer_state.global_step + place) for place, _ in enumerate(completions)]


@pytest.mark.filterwarnings("ignore")  # of TRL's, about versions
@pytest.mark.parametrize(
    "options",
    [BY_STEPS, {**BY_SHARES, "logging_first_step": True}, BY_EPOCHS, {**BY_EPOCHS, "greater_is_better": False}],
)
def test_events_entries_and_checkpoints_are_those_under_trl(make_model, tokenizer, tmp_path, options):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    rows = pytest.importorskip("datasets").Dataset.from_list([{"prompt": f"{a}+{b}="} for a in (1, 2) for b in (1, 2)])

    def run(trainer_class, config_class, **more):
        recorder = Recorder()
        trainer = trainer_class(
            model=make_model(),
            reward_funcs=rising,
            args=config_class(output_dir=str(tmp_path / trainer_class.__module__), **OPTIONS, **options, **more),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=tokenizer,
            callbacks=[recorder, PrinterCallback, EarlyStoppingCallback(early_stopping_patience=99)],
        )
        trainer.train()
        folders = {path.name for path in (tmp_path / trainer_class.__module__).glob("checkpoint-*")}
        entries = [(entry["step"], entry["epoch"]) for entry in trainer.state.log_history]
        return recorder.events, [kind(names) for names in recorder.logs], entries, folders

    assert run(GRPOTrainer, GRPOConfig) == run(trl.GRPOTrainer, trl.GRPOConfig, use_cpu=True)


def deciding(**decisions: tuple[str, int]) -> TrainerCallback:
    """Sets each decision in the event, and after the step, that is given for it."""

    class Decide(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for name, step in decisions.items():
                if state.global_step == step:
                    setattr(control, name, True)

    return Decide()


EVAL_ROWS = [{"prompt": "1+1="}, {"prompt": "2+2="}]


def test_what_a_callback_decides_is_done(make_trainer, tmp_path):
    recorder = Recorder()
    decisions = deciding(should_log=1, should_evaluate=2, should_save=3, should_training_stop=4)
    options = {"max_steps": 6, "eval_strategy": "no", "logging_strategy": "no"}
    trainer = make_trainer(eval_dataset=EVAL_ROWS, callbacks=[decisions, recorder], **options)
    result = trainer.train()
    events = [event for event in recorder.events if event[0] in ("on_log", "on_evaluate", "on_save")]
    # The evaluation and the end of the run are in the log too.
    assert events == [("on_log", 1), ("on_log", 2), ("on_evaluate", 2), ("on_save", 3), ("on_log", 4)]
    assert result.global_step == 4
    assert (result.eval_before, result.eval_after) == (None, None)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()


class WithoutModel(TrainerCallback):
    def on_save(self, args, state, control):
        return control


class WithoutLogs(TrainerCallback):
    def on_log(self, args, state, control, model, processing_class, optimizer, lr_scheduler, *, train_dataloader=None):
        return control


class NoCallback:
    def on_step_end(self, args, state, control, **kwargs):
        return control


@pytest.mark.parametrize("kind", [WithoutModel, WithoutLogs, NoCallback])
def test_a_callback_that_would_fail_at_its_event_is_refused_before(make_trainer, kind):
    trainer = make_trainer()
    with pytest.raises(InputError, match=rf"got a callback {kind.__name__} whose on_\w+ cannot .* want .*; fix:"):
        trainer.add_callback(kind())
    trainer.callback_handler.callbacks.append(kind())
    with pytest.raises(InputError, match=rf"got a callback {kind.__name__} whose on_\w+ cannot .* want .*; fix:"):
        trainer.train()
    with pytest.raises((InputError, WrongTypeError), match=rf"got .*{kind.__name__}.* want .*; fix:"):
        make_trainer(callbacks=[kind])


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_save", "on_train_end"])
def test_a_callback_that_returns_something_else_is_named_by_its_event(make_trainer, event):
    returns = type("Returns", (TrainerCallback,), {event: lambda *args, **kwargs: 0.5})
    decides = type("Decides", (TrainerCallback,), {event: lambda self, a, s, control, **kw: vars(control).update()})
    with pytest.raises(InputError, match=rf"got 0\.5 from the {event} of a callback, want None or .* \(in Returns\)"):
        make_trainer(callbacks=[returns, decides], save_steps=1).train()


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_log", "on_train_end"])
@pytest.mark.parametrize(("field", "value"), [("log_history", None), ("global_step", "3"), ("epoch", [0.5])])
def test_a_callback_that_spoils_the_state_is_named_by_its_event(make_trainer, event, field, value):
    def spoil(self, args, state, control, **kwargs):
        setattr(state, field, value)

    spoils = type("Spoils", (TrainerCallback,), {event: spoil})
    with pytest.raises(InputError, match=rf"got state\.{field}=.* from the {event} of a callback, want .*; fix: "):
        make_trainer(callbacks=[spoils], save_steps=1).train()


@pytest.mark.parametrize("saved", [6, 3])
def test_the_rest_of_an_epoch_is_left_out(make_trainer, saved):
    """An epoch is 16 rows / 4 rows of a batch * 2 iterations = 8 steps; three steps of the first one are made."""
    recorder = Recorder()
    options = {"per_device_train_batch_size": 16, "max_steps": -1, "num_iterations": 2, "num_train_epochs": 2}
    trainer = make_trainer(callbacks=[deciding(should_epoch_stop=3), recorder], save_steps=saved, **options)
    trainer.train()
    assert [step for name, step in recorder.events if name == "on_epoch_end"] == [3, 11]
    assert (trainer.step, trainer.state.epoch, trainer.sampler.used) == (11, 2.0, 32)
    resumed = make_trainer(save_steps=saved, overwrite_output_dir=False, **options)
    resumed.train(resume_from_checkpoint=trainer.output_dir / f"checkpoint-{saved}")
    assert (resumed.step, resumed.state.epoch, resumed.sampler.used) == (11, 2.0, 32)


@pytest.mark.parametrize("stop", [2, 4])
def test_an_epoch_left_out_inside_a_batch_leaves_the_next_one_whole(make_trainer, stop):
    """A batch of 12 prompts is for three steps; the second one has the last 4 of 16 rows, and 8 of the next epoch."""
    options = {"per_device_train_batch_size": 16, "steps_per_generation": 3, "max_steps": stop + 3, "save_steps": 1}
    trainer = make_trainer(callbacks=[deciding(should_epoch_stop=stop)], **options)
    trainer.train()
    assert (trainer.sampler.used, trainer.state.epoch) == (16 + 12, 1.75)
    rows = [trainer.dataset[trainer.sampler._number_at(16 + place)] for place in range(12)]
    drawn = [json.loads(line) for line in (trainer.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert [record["prompt"] for record in drawn[-48::4]] == [row["prompt"] for row in rows]
    for step in (stop, stop + 1):
        resumed = make_trainer(overwrite_output_dir=False, **options)
        resumed.train(resume_from_checkpoint=trainer.output_dir / f"checkpoint-{step}")
        assert (resumed.sampler.used, resumed.state.epoch) == (16 + 12, 1.75)


def test_early_stopping_ends_the_run_and_the_best_model_is_loaded(make_trainer):
    def worse_and_worse(completions, **_):
        return [-trainer.step if len(completions) == len(EVAL_ROWS) else 0.0 for _ in completions]

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 1, "max_steps": 5}
    best = {"metric_for_best_model": "reward", "load_best_model_at_end": True}
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make_trainer(worse_and_worse, eval_dataset=EVAL_ROWS, callbacks=[stopping], **options, **best)
    result = trainer.train()
    assert trainer.step == 3
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (-1.0, 1)
    saved = {name: load_file(trainer.output_dir / name / "model.safetensors") for name in ("checkpoint-1", "final")}
    assert all(torch.equal(value, saved["final"][name]) for name, value in saved["checkpoint-1"].items())
    assert not (trainer.output_dir / "checkpoint-2").exists()
    assert result.eval_after["reward"] == -3.0


def test_a_checkpoint_that_is_evaluated_once_it_is_saved_may_be_the_best(make_trainer):
    def worse_and_worse(completions, **_):
        return [-trainer.step if len(completions) == len(EVAL_ROWS) else 0.0 for _ in completions]

    options = {"eval_strategy": "epoch", "save_steps": 1, "save_total_limit": 1, "metric_for_best_model": "reward"}
    rows = [{"prompt": "1+1="}] * 2
    trainer = make_trainer(worse_and_worse, dataset=rows, eval_dataset=EVAL_ROWS, max_steps=4, **options)
    trainer.train()
    best = trainer.output_dir / "checkpoint-2"
    assert Path(trainer.state.best_model_checkpoint) == best
    assert best.is_dir()


def test_an_entry_is_the_mean_of_its_steps_and_the_last_one_has_the_time(make_trainer):
    trainer = make_trainer(max_steps=5, logging_steps=2)
    result = trainer.train()
    lines = [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]
    first, second, closing = trainer.state.log_history
    assert first["loss"] == pytest.approx(statistics.mean(line["loss"] for line in lines[:2]))
    assert second["reward"] == pytest.approx(statistics.mean(line["reward"] for line in lines[2:4]))
    assert second["grad_norm"] == lines[3]["grad_norm"]
    assert closing["rewards/digit_reward/mean"] == lines[4]["rewards/digit_reward/mean"]
    assert closing["train_loss"] == pytest.approx(statistics.mean(line["loss"] for line in lines))
    assert result.training_loss == result.metrics["train_loss"] == closing["train_loss"]
    assert closing["train_steps_per_second"] == pytest.approx(5 / closing["train_runtime"], rel=0.01)


class Counter(TrainerCallback, ExportableState):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_a_resumed_run_keeps_its_log_and_the_states_of_callbacks(make_trainer):
    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "callbacks": [Counter]}
    whole = make_trainer(**options)
    whole.train()
    resumed = make_trainer(**options, overwrite_output_dir=False, restore_callback_states_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=whole.output_dir / "checkpoint-2")
    assert [entry["step"] for entry in resumed.state.log_history] == [1, 2, 3, 4, 4]
    assert resumed.state.log_history[:2] == whole.state.log_history[:2]
    assert resumed.pop_callback(Counter).steps == 4


@pytest.mark.parametrize("passed_on", [lambda logs: logs, dict], ids=["the entry", "a copy"])
def test_what_a_script_logs_is_in_the_history_and_in_the_metrics(make_trainer, passed_on):
    class Adding(GRPOTrainer):
        def log(self, logs, start_time=None):
            logs = passed_on(logs)
            logs["added"] = 1.0
            super().log(logs, start_time)

    trainer = make_trainer(max_steps=1, logging_steps=1)
    trainer.__class__ = Adding
    trainer.train()
    lines = [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "added" in line] == [{"step": 1, "added": 1.0}] * 2
    assert all(entry["added"] == 1.0 for entry in trainer.state.log_history)


def test_an_entry_that_another_rank_asks_for_is_made_before_a_stop(make_trainer, monkeypatch):
    class Stops(TrainerCallback):
        def on_step_begin(self, args, state, control, **unused):
            trainer.stop.requested = True

    def agree(accelerator, control):
        control.should_log |= trainer.stop.requested

    monkeypatch.setattr("fused_grpo.trainer.loop.agree", agree)
    trainer = make_trainer(callbacks=[Stops], logging_strategy="no")
    with pytest.raises(SystemExit):
        trainer.train()
    assert [("loss" in entry, entry["step"]) for entry in trainer.state.log_history] == [(True, 1)]


@pytest.mark.parametrize("event", ["on_train_begin", "on_evaluate"])
def test_a_run_that_is_stopped_before_its_first_step_makes_one(make_trainer, event):
    """As transformers does, so that it has something to log and to report."""

    def stop(self, args, state, control, **unused):
        control.should_training_stop = True

    stops = type("Stops", (TrainerCallback,), {event: stop})
    result = make_trainer(callbacks=[stops], eval_dataset=[{"prompt": "1+1="}]).train()
    assert (result.steps, result.report.is_file()) == (1, True)


@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_that_goes_to_another_folder_moves_no_file(make_trainer, tmp_path, monkeypatch, event):
    monkeypatch.chdir(tmp_path)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    go = lambda self, args, state, control, **unused: os.chdir(elsewhere)  # noqa: E731
    goes = type("Goes", (TrainerCallback,), {event: go})
    options = {"max_steps": 2, "save_steps": 1, "eval_dataset": [{"prompt": "1+1="}], "eval_strategy": "steps"}
    make_trainer(output_dir="run", callbacks=[goes], **options).train()
    monkeypatch.chdir(tmp_path)
    more = {"resume_from_checkpoint": "run/checkpoint-2", "overwrite_output_dir": False, "max_steps": 3}
    assert make_trainer(output_dir="run", callbacks=[goes], **options | more).train().steps == 3
    assert not any(elsewhere.iterdir())


def saving(event):
    def save(self, args, state, control, **unused):
        self.trainer.save_checkpoint()

    return type("Saves", (TrainerCallback,), {event: save})


@pytest.mark.parametrize("event", ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"])
def test_a_step_that_is_being_made_is_not_saved_but_once_it_is_made(make_trainer, event):
    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    trainer = make_trainer(callbacks=[saves := saving(event)], **options)
    saves.trainer = trainer
    with pytest.raises(
        InputError, match=rf"got save_checkpoint\(\) in step 1, .*\({event}\).* want .*; fix: .*should_save"
    ):
        trainer.train()
    with pytest.raises(InputError, match="which has begun and not ended"):  # nor behind it
        trainer.save_checkpoint()
    decide = lambda self, args, state, control, **unused: setattr(control, "should_save", True)  # noqa: E731
    whole = make_trainer(callbacks=[type("Decides", (TrainerCallback,), {event: decide})], **options)
    whole.train()
    resumed = make_trainer(overwrite_output_dir=False, **options)
    resumed.train(resume_from_checkpoint=whole.output_dir / "checkpoint-1")
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_train_begin"])
def test_a_checkpoint_between_two_steps_may_be_saved_by_a_callback(make_trainer, event):
    trainer = make_trainer(callbacks=[saves := saving(event)], max_steps=2)
    saves.trainer = trainer
    trainer.train()
    first = trainer.output_dir / f"checkpoint-{int(event == 'on_step_end')}"
    resumed = make_trainer(overwrite_output_dir=False, max_steps=2)
    resumed.train(resume_from_checkpoint=first)
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))


def test_a_checkpoint_of_a_reward_function_is_refused(make_trainer):
    def saves(completions, **columns):
        return [float(len(str(trainer.save_checkpoint()))) for _ in completions]

    trainer = make_trainer(saves)
    with pytest.raises(InputError, match=r"got save_checkpoint\(\) in step 1, which has begun"):
        trainer.train()


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step"])
def test_an_evaluation_inside_a_step_samples_with_the_weights_of_now(make_trainer, served_engine, event):
    def evaluate(self, args, state, control, **unused):
        trainer.evaluate()
        served.append(all(map(torch.equal, trainer.model.parameters(), trainer.engine.model.parameters())))

    evaluates, served = type("Evaluates", (TrainerCallback,), {event: evaluate}), []
    options = {"eval_dataset": EVAL_ROWS, "eval_strategy": "no", "eval_at_ends": False, "engine": served_engine}
    trainer = make_trainer(callbacks=[evaluates], **options)
    trainer.train()
    assert served == [True] * 3


def test_what_a_callback_adds_to_an_evaluation_is_in_its_result(make_trainer):
    """As under transformers, where `on_evaluate` has the dict that `evaluate` returns."""

    def add(self, args, state, control, metrics, **unused):
        metrics["eval_added"] = 1.0

    trainer = make_trainer(callbacks=[type("Adds", (TrainerCallback,), {"on_evaluate": add})])
    assert trainer.evaluate(EVAL_ROWS)["eval_added"] == 1.0
