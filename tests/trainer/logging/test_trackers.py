"""Trackers: every step reaches them, nothing private does, and one that is missing is known at once."""

import json
import math
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.run_output import RunOutput, StepMetrics, tracker_arguments


class Memory(GeneralTracker):
    """Keeps what it is told."""

    name, requires_logging_directory = "memory", False

    def __init__(self) -> None:
        super().__init__()
        self.config, self.records, self.begun, self.finished = {}, [], 0, 0

    @property
    def tracker(self):
        return self

    def start(self):
        self.begun += 1

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **kwargs):
        self.records.append((step, values))

    def finish(self):
        self.finished += 1


def accelerator_for(args):
    return Accelerator(cpu=True, **tracker_arguments(args))


def test_a_tracker_gets_options_without_secrets_and_each_number_of_a_step(tmp_path):
    memory = Memory()
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[memory], generation_kwargs={"api_key": "secret-value"})
    output = RunOutput(args, 9, is_main=True, facts={"task": "sums"}, accelerator=accelerator_for(args))
    assert memory.config["task"] == "sums"
    assert memory.config["learning_rate"] == 1e-6
    assert "secret-value" not in str(memory.config)
    assert {type(value) for value in memory.config.values()} <= {bool, int, float, str}
    output.write({"step": 3, "reward": 0.5, "kl": math.nan, "rollout_engine": "vllm"})
    assert memory.records == [(3, {"train/reward": 0.5})]
    output.close()
    assert memory.finished == 1


def test_the_output_of_a_run_reaches_its_trackers_with_a_quiet_console(tmp_path):
    memory = Memory()
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[memory], logging_steps=100)
    output = RunOutput(args, 9, is_main=True, facts={}, accelerator=accelerator_for(args))
    output.evaluation(0, {"eval_reward": 0.25, "eval_loss": 2.0}, {"reward": 0.25}, 4)
    for step in (1, 2):
        output.step({"step": step, "reward": 0.5}, StepMetrics())
    output.evaluation(2, {"eval_hard_reward": 0.5}, {"hard_reward": 0.5}, 4)
    output.evaluation(2, {"test_reward": 0.75}, {"reward": 0.75}, 4, prefix="test")
    output.write({"step": 2, "mine": 1.0, "eval_mine": 2.0})
    output.track({"step": 2, "train_runtime": 9.0, "train_loss": 0.5})
    steps = [(0, {"eval/reward": 0.25, "eval/loss": 2.0}), (1, {"train/reward": 0.5}), (2, {"train/reward": 0.5})]
    ends = [{"eval/hard_reward": 0.5}, {"test/reward": 0.75}, {"train/mine": 1.0, "eval/mine": 2.0}]
    closing = {"train/train_runtime": 9.0, "train/train_loss": 0.5}
    assert memory.records == [*steps, *((2, numbers) for numbers in [*ends, closing])]
    output.close()
    output.close()
    assert memory.finished == 1


class Broken(Memory):
    """Raises in one of its methods, from the second call on where that is `log`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def fail(self, where):
        if where == self.where:
            raise ConnectionError("the service is\x1b[31m gone")

    def store_init_configuration(self, values):
        super().store_init_configuration(values)
        self.fail("store_init_configuration")

    def log(self, values, step=None, **kwargs):
        if self.records:
            self.fail("log")
        super().log(values, step)

    def finish(self):
        super().finish()
        self.fail("finish")


@pytest.mark.parametrize("where", ["log", "finish"])
def test_a_tracker_that_fails_later_ends_no_run(make_trainer, tmp_path, capsys, where):
    broken, other = Broken(where), Memory()
    trainer = make_trainer(report_to=[broken, other])
    for steps in (3, 3):  # the second one in a folder that the first has unlocked
        assert trainer.train().steps == steps
    text = capsys.readouterr().out
    assert text.count("warning: the tracker memory raised ConnectionError (the service is\\x1b[31m gone)") == 2
    assert (len(broken.records), len(other.records)) == (1, 8) if where == "log" else (8, 8)
    assert other.finished == 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 3


def test_a_tracker_that_does_not_begin_ends_the_run_before_its_first_step(make_trainer, tmp_path):
    first, broken = Memory(), Broken("store_init_configuration")
    with pytest.raises(UnavailableError, match=r"got ConnectionError when beginning .* gone.*; fix: .*'none'"):
        make_trainer(report_to=[first, broken]).train()
    assert (first.finished, broken.finished) == (1, 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tracker", "options", "variables", "project", "name"),
    [
        ("wandb", {}, {}, "fused-grpo", {"name": "run"}),
        ("wandb", {}, {"WANDB_PROJECT": "theirs", "WANDB_NAME": "first"}, "theirs", None),
        ("wandb", {"project": "mine", "run_name": "a/b"}, {"WANDB_PROJECT": "theirs"}, "mine", {"name": "a/b"}),
        ("swanlab", {}, {"SWANLAB_PROJECT": "theirs", "SWANLAB_EXP_NAME": "first"}, "theirs", None),
        ("comet_ml", {}, {"COMET_PROJECT_NAME": "theirs"}, "theirs", None),
        ("trackio", {}, {"WANDB_PROJECT": "of another"}, "fused-grpo", {"name": "run"}),
    ],
)
def test_the_variables_of_a_tracker_count_where_no_option_is_set(
    monkeypatch, tmp_path, tracker, options, variables, project, name
):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    begun = []
    accelerator = SimpleNamespace(trackers=[], log_with=[tracker], init_trackers=lambda *given: begun.append(given))
    args = GRPOConfig(output_dir=str(tmp_path / "run"), report_to=[tracker], **options)
    RunOutput(args, 1, is_main=True, facts={}, accelerator=accelerator)
    ((given, _, arguments),) = begun
    assert (given, arguments.get(tracker)) == (project, name)


@pytest.mark.parametrize(
    ("tracker", "module", "option"),
    [
        ("wandb", {"run": "theirs"}, {"reinit": False}),
        ("wandb", {"run": None}, {}),
        ("mlflow", {"active_run": lambda: "theirs"}, {"nested_run": True}),
        ("mlflow", {"active_run": lambda: None, "run": "its function of that name"}, {}),
    ],
)
def test_a_run_that_the_script_has_begun_is_gone_on_with(monkeypatch, tmp_path, tracker, module, option):
    monkeypatch.setitem(sys.modules, tracker, SimpleNamespace(**module))
    begun = []
    accelerator = SimpleNamespace(trackers=[], log_with=[tracker], init_trackers=lambda *given: begun.append(given))
    RunOutput(GRPOConfig(str(tmp_path), report_to=[tracker]), 1, is_main=True, facts={}, accelerator=accelerator)
    ((_, _, arguments),) = begun
    assert {key: arguments[tracker].get(key) for key in ("reinit", "nested_run") if key in arguments[tracker]} == option


def test_trackers_and_files_have_all_that_an_evaluation_measured(make_trainer, tmp_path):
    memory, rows = Memory(), {"hard": [{"prompt": "1+1="}], "easy": [{"prompt": "1="}]}
    trainer = make_trainer(report_to=[memory], max_steps=1, eval_dataset=rows, num_generations_eval=2)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "eval_easy_loss" in entry)
    finite = {name for name, value in entry.items() if name.startswith("eval_") and value is not None}
    assert {"eval_easy_completions/mean_length", "eval_easy_pass@1", "eval_easy_runtime"} < finite
    tracked = next(values for _, values in memory.records if "eval/easy_loss" in values)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (written, _) = [line for line in lines if "eval/easy_loss" in line]
    assert {f"eval/{name.removeprefix('eval_')}": entry[name] for name in finite} == tracked
    assert {name: value for name, value in written.items() if value is not None} == {**tracked, "step": 0}


def test_the_run_of_wandb_stays_open_and_its_own_step_may_be_larger(tmp_path):
    run, other = Mock(), Memory()
    both = [SimpleNamespace(name="wandb", tracker=run), other]
    accelerator = SimpleNamespace(trackers=[], log_with=["wandb"], init_trackers=lambda *_: None)
    accelerator.init_trackers = lambda *_: accelerator.trackers.extend(both)
    args = GRPOConfig(str(tmp_path), report_to=["wandb", other])
    output = RunOutput(args, 1, is_main=True, facts={}, accelerator=accelerator)
    output.write({"step": 1, "reward": 0.5})
    output.close()
    output.evaluation(1, {"eval_reward": 0.25}, {"reward": 0.25}, 4)  # of a script, behind `train`
    given = [{"train/reward": 0.5, "train/global_step": 1}, {"eval/reward": 0.25, "train/global_step": 1}]
    assert [call.args for call in run.log.call_args_list] == [(values,) for values in given]
    assert not run.log.call_args.kwargs
    assert not run.finish.called
    assert len(other.records) == 2


def test_what_is_logged_behind_train_reaches_trackers_which_end_again(make_trainer):
    memory = Memory()
    trainer = make_trainer(report_to=[memory], max_steps=1, eval_dataset=[{"prompt": "a"}])
    trainer.train()
    assert (memory.begun, memory.finished) == (1, 1)
    trainer.evaluate()
    trainer.log({"mine": 2.0})
    (before, (_, last)) = memory.records[-2:]
    assert "eval/reward" in before[1]
    assert last == {"train/mine": 2.0}
    assert (memory.begun, memory.finished) == (2, 1)
    trainer.train()
    assert (memory.begun, memory.finished) == (3, 3)
    trainer.evaluate()
    trainer.end()
    trainer.end()
    assert (memory.begun, memory.finished) == (4, 4)


@pytest.mark.parametrize(
    ("name", "start"), [("mlflow", {"run_id": "7", "nested_run": True}), ("trackio", {"resume": "allow"})]
)
def test_the_run_of_a_service_that_has_ended_goes_on(tmp_path, name, start):
    memory = Memory()
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[memory])
    output = RunOutput(args, 1, is_main=True, facts={}, accelerator=accelerator_for(args))
    memory.name, memory.init_kwargs = name, {}
    memory.active_run = SimpleNamespace(info=SimpleNamespace(run_id="7"))
    output.close()
    output.write({"step": 1, "reward": 0.5})
    assert start.items() <= (vars(memory) | memory.init_kwargs).items()
    assert memory.records == [(1, {"train/reward": 0.5})]


def test_numbers_of_numpy_and_torch_reach_trackers_and_text_is_named(tmp_path, caplog):
    memory = Memory()
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[memory])
    output = RunOutput(args, 1, is_main=True, facts={}, accelerator=accelerator_for(args))
    numbers = {"a": np.float32(0.5), "b": np.int64(2), "c": torch.tensor(1.5), "d": torch.tensor(3)}
    output.write({"step": 1, **numbers, "words": "mine", "rollout_engine": "vllm"})
    assert memory.records == [(1, {"train/a": 0.5, "train/b": 2, "train/c": 1.5, "train/d": 3})]
    (warning,) = caplog.messages
    assert re.match("got 'words', which is no number, for the trackers: they get numbers alone; fix: ", warning)


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, "text", None, [1.0]])
def test_what_is_no_number_of_fp64_is_left_out(tmp_path, value):
    memory = Memory()
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[memory])
    output = RunOutput(args, 1, is_main=True, facts={}, accelerator=accelerator_for(args))
    output.write({"step": 1, "mine": value, 5: 1})
    assert memory.records == [(1, {"train/5": 1})]


def test_a_second_run_does_not_log_to_the_trackers_of_the_first(tmp_path):
    memory = Memory()
    args = GRPOConfig(output_dir=str(tmp_path), report_to=[memory])
    accelerator = accelerator_for(args)
    for run in (1, 2):
        output = RunOutput(args, 1, is_main=True, facts={}, accelerator=accelerator)
        output.write({"step": 1, "run": run})
        output.close()
    assert memory.records == [(1, {"train/run": 1}), (1, {"train/run": 2})]
    assert memory.finished == 2


def test_no_tracker_is_no_argument_and_no_work(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path))
    assert tracker_arguments(args) == {}
    output = RunOutput(args, 1, is_main=True, facts={}, accelerator=Accelerator(cpu=True))
    output.step({"step": 1, "reward": 0.5}, StepMetrics())
    output.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [("clearml", r"not installed; fix: pip install clearml"), ("comet_ml", "pip install comet-ml"),
     ("tensorbord", r"got report_to='tensorbord', want one or several of .*tensorboard, .*wandb")],
)  # fmt: skip
def test_a_tracker_that_is_missing_or_unknown_is_named_before_the_run(name, message, monkeypatch):
    monkeypatch.setattr("fused_grpo.trainer.logging.run_output.get_available_trackers", list)
    with pytest.raises(UnavailableError, match=message):
        tracker_arguments(GRPOConfig(report_to=name))


def test_tensorboard_has_the_points_of_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = GRPOConfig(output_dir=str(tmp_path / "run"), report_to="tensorboard", reward_weights=[1.0])
    output = RunOutput(args, 2, is_main=True, facts={"task": "sums"}, accelerator=accelerator_for(args))
    for step in (1, 2):
        output.step({"step": step, "reward": step / 2}, StepMetrics())
    output.close()
    output.evaluation(2, {"eval_reward": 0.25}, {"reward": 0.25}, 4)
    output.close()
    written = EventAccumulator(str(tmp_path / "run" / "trackers" / args.project)).Reload()
    assert [(event.step, event.value) for event in written.Scalars("train/reward")] == [(1, 0.5), (2, 1.0)]
    assert [(event.step, event.value) for event in written.Scalars("eval/reward")] == [(2, 0.25)]
