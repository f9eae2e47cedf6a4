"""`metric_for_best_model` that no evaluation has is an error before anything is loaded."""

import logging
from typing import Any

import pytest
from small_runs import ROWS, trainer_in

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.collect.best_metric import check_best_metric
from fused_grpo.trainer.common.warnings import warn_once

SETS = {"easy": ROWS[:2], "hard": ROWS[2:4]}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


def plain(completions: list[Any]) -> list[float]:
    """Cannot log a metric."""
    return [float(index) for index in range(len(completions))]


def logs(completions: list[Any], log_metric: Any) -> list[float]:
    log_metric("solved", 1.0)
    return plain(completions)


@pytest.fixture
def make(tmp_path):
    warn_once.cache_clear()

    def trainer(best: str, sets: Any = ROWS[:2], reward: Any = plain, **options: Any) -> GRPOTrainer:
        options = EVALUATED | options
        return trainer_in(tmp_path, reward=reward, eval_dataset=sets, metric_for_best_model=best, **options)

    return trainer


NAMES = "eval_easy_reward eval_hard_reward eval_easy_rewards/{0}/mean eval_hard_rewards/{0}/mean"
NAMES_OF_ONE = "eval_reward eval_rewards/{0}/mean"
REFUSED = {
    "no set": ("reward", SETS, plain),
    "no set, eval_": ("eval_loss", SETS, plain),
    "no set of a logged one": ("solved", SETS, logs),
    "another set": ("eval_other_reward", SETS, plain),
    "another function": ("eval_hard_rewards/other/mean", SETS, plain),
    "a typo": ("rewrad", ROWS[:2], plain),
    "a set where there are no names": ("eval_hard_reward", ROWS[:2], plain),
    "of training": ("eval_clip_ratio/region_mean", ROWS[:2], plain),
    "pass rates that are not measured": ("pass@1", ROWS[:2], plain),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_metric_that_no_evaluation_can_have_is_refused_at_the_start(make, name, tmp_path):
    best, sets, reward = REFUSED[name]
    with pytest.raises(InputError, match=f"got metric_for_best_model='{best}' with .*want .*; fix: one of ") as caught:
        make(best, sets, reward)
    fix = str(caught.value).partition("one of ")[2]
    assert fix.split(", ") == (NAMES if sets is SETS else NAMES_OF_ONE).format(reward.__name__).split()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sets", [ROWS[:2], SETS], ids=["one", "named"])
def test_each_metric_of_an_evaluation_may_be_named(make, sets):
    best = "eval_reward" if sets is not SETS else "eval_hard_reward"
    trainer = make(best, sets, num_generations_eval=2)
    for name in trainer.evaluate():
        if name != "epoch":
            make(name, sets, num_generations_eval=2)
            make(name.removeprefix("eval_"), sets, num_generations_eval=2)


def test_a_logged_metric_may_be_the_best(make, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make("hard_solved", SETS, logs, max_steps=1)
    trainer.train()
    assert trainer.state.best_metric == 1.0
    assert "got metric_for_best_model='hard_solved' with the eval sets 'easy', 'hard', which" in caplog.text


@pytest.mark.parametrize("name", ["eval", "eval_hard", "reward"])
def test_a_set_may_be_called_as_a_part_of_a_metric(make, name):
    for best in (f"eval_{name}_reward", f"{name}_reward"):
        trainer = make(best, {name: ROWS[:2]}, max_steps=1)
        trainer.train()
        assert trainer.state.best_metric == 0.5


@pytest.mark.parametrize("method", ["evaluate", "log"])
def test_a_metric_of_a_subclass_may_be_the_best(make, method, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, method, lambda self, *args, **kwargs: None)
    make("mine", SETS)


def test_a_run_that_evaluates_nothing_is_not_refused(make, caplog):
    make("reward", SETS, eval_strategy="no", eval_steps=None)
    assert "got metric_for_best_model='reward'" in caplog.text


def test_sets_that_a_script_names_later_are_checked_in_train(make):
    trainer = make("reward")
    trainer.eval_dataset = SETS
    with pytest.raises(InputError, match="got metric_for_best_model='reward' with the eval sets 'easy', 'hard'"):
        trainer.train()


def test_the_first_evaluation_names_metrics_of_its_own_sets():
    metrics = {"eval_hard_loss": 0.0, "eval_hard_reward": 1.0, "eval_hard_reward_std": 0.0}
    with pytest.raises(InputError, match=r"fix: metric_for_best_model='eval_hard_reward', greater"):
        check_best_metric("reward", metrics)
