"""What `evaluate` takes and returns, and where its numbers go."""

import json
import re
import traceback

import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict

from fused_grpo.errors import DataError, InputError
from fused_grpo.trainer.collect.best_metric import check_best_metric
from fused_grpo.trainer.learner import Learner

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(5)]


def of_answer(completions, answer, **columns):
    """Depends on the row alone: the mean says which rows there were."""
    return [float(text) for text in answer]


@pytest.fixture
def trainer(make_trainer):
    return make_trainer(of_answer, max_steps=2)


def test_the_result_has_trls_names(trainer):
    result = trainer.evaluate(ROWS[:3])
    assert result["eval_reward"] == result["eval_rewards/of_answer/mean"] == 2.0
    assert result["eval_reward_std"] == result["eval_rewards/of_answer/std"] == 1.0
    assert result["eval_frac_reward_zero_std"] == 1.0  # of single completions, as in TRL
    assert result["eval_num_tokens"] == result["epoch"] == 0
    assert 1 <= result["eval_completions/mean_length"] <= 6
    assert result.keys() >= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert result["eval_loss"] == 0.0  # of single completions without a KL term
    assert trainer.evaluate(ROWS[:1], metric_key_prefix="test")["test_reward"] == 1.0


def of_tokens(completion_ids, **columns):
    return [sum(ids) % 7 for ids in completion_ids]


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.5},
        {"entropy_coef": 0.2, "top_entropy_quantile": 0.5},
        {"kl_cov_ratio": 0.2},
        {"loss_type": "dr_grpo"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_eval_loss_is_the_loss_of_a_step_with_the_completions(make_trainer, monkeypatch, options):
    trainer = make_trainer(of_tokens, max_steps=2, num_generations_eval=3, learning_rate=0.1, **options)
    trainer.train()
    learner, seen = trainer.learner, []
    monkeypatch.setattr(learner, "evaluate", lambda batch: seen.append(batch) or Learner.evaluate(learner, batch))
    result = trainer.evaluate(ROWS)
    assert not any(parameter.grad is not None for parameter in trainer.model.parameters())
    _, metrics = learner.learn(seen[0])
    assert result["eval_loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-6)
    assert len(seen[0]) == 3 * len(ROWS)
    assert abs(metrics["loss"]) > 1e-4


def never(completions, **columns):
    return [None for _ in completions]


def test_the_mean_of_nothing_is_none_in_every_entry(make_trainer):
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward", "max_steps": 1}
    trainer = make_trainer([never], eval_dataset=ROWS, num_generations_eval=2, **options)
    trainer.train()
    entries = trainer.state.log_history
    assert [entry["eval_reward"] for entry in entries if "eval_reward" in entry] == [None]
    assert not [name for entry in entries for name, value in entry.items() if value != value]
    assert (trainer.evaluate()["eval_rewards/never/std"], trainer.state.best_metric) == (None, None)


@pytest.mark.parametrize("kind", ["list", "Dataset", "stream"])
def test_a_set_may_be_of_any_kind(trainer, kind):
    dataset = ROWS if kind == "list" else Dataset.from_list(ROWS)
    trainer.eval_dataset = dataset.to_iterable_dataset() if kind == "stream" else dataset
    for _ in range(2):  # a stream starts again
        assert trainer.evaluate()["eval_reward"] == 3.0


@pytest.mark.parametrize("kind", [dict, DatasetDict, IterableDatasetDict])
def test_sets_with_names_have_results_of_their_own(trainer, kind):
    sets = {"low": Dataset.from_list(ROWS[:2]), "high": Dataset.from_list(ROWS[3:])}
    if kind is IterableDatasetDict:
        sets = {name: dataset.to_iterable_dataset() for name, dataset in sets.items()}
    trainer.eval_dataset = kind(sets)
    result = trainer.evaluate()
    assert (result["eval_low_reward"], result["eval_high_reward"]) == (1.5, 4.5)
    assert trainer.evaluate("high")["eval_reward"] == 4.5
    with pytest.raises(DataError, match=r"got eval_dataset='hihg', want the name of an eval set: \['low', 'high'\]"):
        trainer.evaluate("hihg")


def test_what_a_run_logs_has_the_names_of_the_sets(trainer):
    trainer.eval_dataset = {"low": ROWS[:2], "high": ROWS[3:]}
    after = trainer.train().eval_after
    assert after["low_reward"] == after["low_rewards/of_answer/mean"] == 1.5
    records = [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]
    high = [record["eval/high_reward"] for record in records if "eval/high_reward" in record]
    assert high == [4.5, 4.5]  # before and after


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"got no eval_dataset, want one to evaluate; fix:"),
        ({}, r"got eval_dataset with the names \[\], want"),
        ({"low": [{"text": "1+1="}]}, r"got eval_dataset\['low'\] without a 'prompt' column"),
        ([], "got an empty eval_dataset"),
    ],
)
def test_what_is_no_eval_set_is_refused(trainer, given, message):
    with pytest.raises(DataError, match=message):
        trainer.evaluate(given)


def test_a_metric_to_choose_by_that_no_evaluation_has_is_refused(trainer):
    metrics = trainer.evaluate(ROWS)
    for name in ("reward", "eval_reward", "eval_loss", None):
        check_best_metric(name, metrics)
    with pytest.raises(InputError, match=r"got metric_for_best_model='eval_accuracy', .*; fix: .*'eval_reward'"):
        check_best_metric("eval_accuracy", metrics)


class Torn(list):
    """Rows that raise what others wrote when they are read."""

    def __iter__(self):
        yield from ()
        raise OSError("\x1b[2J" * 10_000)


def test_the_cause_of_an_error_is_as_harmless_and_bounded_as_the_error(trainer, make_trainer):
    for use in (trainer.evaluate, lambda rows: make_trainer(dataset=rows)):
        with pytest.raises(DataError, match="got OSError when reading row 0 of") as raised:
            use(Torn(ROWS))
        printed = "".join(traceback.format_exception(raised.value))
        assert "OSError: \\x1b[2J" in printed
        assert "\x1b" not in printed
        assert len(printed) < 20_000


def test_metrics_of_an_evaluation_in_which_nothing_was_scored_are_printed(make_trainer, capsys):
    trainer = make_trainer(lambda completions, **columns: [None] * len(completions))
    metrics = trainer.evaluate([{"prompt": "1+1="}])
    trainer.log_metrics("eval", metrics)
    assert metrics["eval_reward"] is None
    assert re.search(r"\*\*\* eval metrics \*\*\*(.|\n)* eval_reward += +None\n", capsys.readouterr().out)
