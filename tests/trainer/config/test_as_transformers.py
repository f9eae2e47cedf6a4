"""What callbacks of transformers read from the options."""

import copy
import dataclasses
import inspect
import json
import pickle

import pytest
from transformers import IntervalStrategy, TrainingArguments

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import check_options


def test_options_of_trl_are_readable_and_others_are_not():
    args = GRPOConfig()
    assert (args.disable_tqdm, args.label_smoothing_factor, args.include_for_metrics) == (None, 0.0, [])
    args.include_for_metrics.append("inputs")
    assert GRPOConfig().include_for_metrics == []
    with pytest.raises(AttributeError, match="'GRPOConfig' object has no attribute 'learning_rat'"):
        _ = args.learning_rat
    assert copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == args


def test_options_as_json_have_no_secrets():
    args = GRPOConfig(generation_kwargs={"api_key": "secret-value"}, reward_weights=[1.0])
    assert json.loads(args.to_json_string()) == args.to_dict()
    assert args.to_dict()["learning_rate"] == 1e-6
    assert "secret-value" not in args.to_json_string() + str(args.to_sanitized_dict())
    assert args.to_sanitized_dict()["reward_weights"] == "[1.0]"


def test_intervals_are_completed_as_in_transformers():
    args = GRPOConfig(eval_strategy=IntervalStrategy.STEPS, logging_steps=0.25, save_steps=3.0)
    assert (args.eval_strategy, args.eval_steps, args.save_steps) == ("steps", 0.25, 3)
    assert type(args.eval_strategy) is str
    assert GRPOConfig(metric_for_best_model="reward").greater_is_better
    assert not GRPOConfig(metric_for_best_model="eval_loss").greater_is_better


@pytest.mark.parametrize(("strategy", "evaluates"), [("steps", True), ("epoch", True), ("no", False), (None, False)])
def test_a_script_reads_in_do_eval_whether_there_are_evaluations(strategy, evaluates, caplog):
    warn_once.cache_clear()
    args = GRPOConfig(eval_strategy=strategy)
    assert args.do_eval is evaluates
    check_options(args)  # as a trainer does
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_steps": 1.5}, "got save_steps=1.5, want a number of steps, or a share"),
        ({"logging_steps": 0}, "got logging_steps=0, want a number of steps, or a share"),
        ({"save_strategy": "best"}, "got metric_for_best_model=None with .*'best', want"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "reward"}, "want an evaluation at each checkpoint"),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "reward", "eval_strategy": "steps"}
            | {"eval_steps": 0.2, "save_steps": 0.5},
            "want an evaluation at each checkpoint",
        ),
    ],
)
def test_intervals_that_cannot_be_kept_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        GRPOConfig(**options)


def own(args):
    """What transformers' arguments have beside fields: scripts and callbacks read it."""
    fields = {entry.name for entry in dataclasses.fields(args)}
    return [name for name in dir(type(args)) if not name.startswith("_") and name not in fields]


def test_scripts_find_all_that_transformers_arguments_have(tmp_path):
    transformers_args, ours = (kind(output_dir=str(tmp_path), use_cpu=True) for kind in (TrainingArguments, GRPOConfig))
    names = [
        name for name in own(transformers_args) if not isinstance(getattr(type(transformers_args), name), str | bool)
    ]
    assert {"device", "n_gpu", "parallel_mode", "get_process_log_level", "main_process_first"} <= set(names)
    for name in names:
        value = getattr(transformers_args, name)
        assert hasattr(ours, name), name
        if callable(value):
            parameters = [inspect.signature(method).parameters for method in (getattr(ours, name), value)]
            assert parameters[0] == parameters[1], name
        elif name in ("device", "n_gpu", "parallel_mode", "eval_batch_size", "train_batch_size", "world_size"):
            assert getattr(ours, name) == value, name
    assert ours.distributed_state.num_processes == 1
    assert ours.get_process_log_level() == transformers_args.get_process_log_level()
    with ours.main_process_first(desc="read the data"):
        pass


@pytest.mark.parametrize("name", [name for name in dir(TrainingArguments) if name.startswith("set_")])
def test_setters_of_transformers_set_the_same_options(name, tmp_path):
    given = {"set_lr_scheduler": {"name": "cosine"}, "set_push_to_hub": {"model_id": "me/mine"}}.get(name, {})
    transformers_args, ours = (kind(output_dir=str(tmp_path)) for kind in (TrainingArguments, GRPOConfig))
    before = copy.copy(vars(transformers_args))
    assert getattr(ours, name)(**given) is ours
    getattr(transformers_args, name)(**given)
    changed = {key: value for key, value in vars(transformers_args).items() if value != before.get(key, "absent")}
    assert {key: getattr(ours, key) for key in changed} == changed
    check_options(ours)
