"""What callbacks of transformers read from the options."""

import copy
import json
import pickle

import pytest
from transformers import IntervalStrategy

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig


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
