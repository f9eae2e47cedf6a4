"""pass@k against a count of all subsets, and in the result of an evaluation."""

import doctest
import itertools
import json
import math

import pytest
import torch

from fused_grpo.trainer.collect import scoring as module
from fused_grpo.trainer.collect.scoring import pass_rates

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(5)]


@pytest.mark.parametrize("n", range(1, 8))
def test_it_is_the_share_of_subsets_with_a_right_one(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
        rates = pass_rates(torch.tensor([True] * right + [False] * (n - right))[:, None].float(), n)
        assert rates.get(f"pass@{k}", share(subsets)) == pytest.approx(share(subsets), abs=1e-12)


def share(subsets):
    return sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize(
    ("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_k_are_powers_of_two_and_n(n, ks):
    assert list(pass_rates(torch.ones(n, 1), n)) == [f"pass@{k}" for k in ks]


def test_right_is_the_full_reward_of_the_first_function():
    nan = math.nan
    first = [[1.0, 0.99, 0.0, nan], [nan] * 4, [2.0, 1.0, 1.0, 1.0], [0.0] * 4]
    rewards = torch.stack([torch.tensor(first).flatten(), torch.ones(16)], 1)
    rates = pass_rates(rewards, 4)
    assert rates == pytest.approx({"pass@1": (0.25 + 1 + 0) / 3, "pass@2": (0.5 + 1 + 0) / 3, "pass@4": 2 / 3})
    assert all(math.isnan(rate) for rate in pass_rates(rewards[4:8], 4).values())
    assert doctest.testmod(module).failed == 0


def some_right(completion_ids, **columns):
    """1 for about half of the completions."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def test_an_evaluation_has_them_by_set_and_they_choose_the_best(make_trainer, tmp_path, capsys):
    options = {"num_generations_eval": 3, "metric_for_best_model": "hard_pass@3", "max_steps": 1}
    trainer = make_trainer(some_right, eval_dataset={"easy": ROWS, "hard": ROWS[:4]}, **options)
    result = trainer.evaluate()
    for name, n in (("easy", 5), ("hard", 4)):
        rates = [result[f"eval_{name}_pass@{k}"] for k in (1, 2, 3)]
        assert rates[0] == pytest.approx(result[f"eval_{name}_reward"])
        assert rates == sorted(rates)
        assert rates[2] * n == pytest.approx(round(rates[2] * n))  # of whole prompts
        assert 0 < rates[0] < rates[2]
    after = trainer.train().eval_after
    assert set(after) >= {"easy_pass@1", "hard_pass@3"}
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("eval/hard_pass@3") == after["hard_pass@3"] for line in logged)
    assert f"hard_pass@3 {after['hard_pass@3']:.3f} on 4 prompts" in " ".join(capsys.readouterr().out.split())


def test_a_single_greedy_completion_has_none(make_trainer):
    assert not any("pass@" in name for name in make_trainer(some_right).evaluate(ROWS))
