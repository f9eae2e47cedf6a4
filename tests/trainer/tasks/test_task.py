"""The interval of a held-out mean, and the process that scores the answers of a generator."""

import doctest
import math

import pytest

from fused_grpo.trainer.tasks import reasoning_gym, task


def test_the_example_of_the_interval_gives_what_it_shows():
    result = doctest.testmod(task)
    assert (result.failed, result.attempted) == (0, 1)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.93])
def test_the_interval_covers_the_share_in_95_of_100_samples(share):
    count = 180
    chances = [math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)]
    ends = [task.interval(k / count, count) for k in range(count + 1)]
    covered = sum(chance for chance, (low, high) in zip(chances, ends, strict=True) if low <= share <= high)
    assert 0.92 < covered < 0.98  # a binomial has steps


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_interval_of_all_or_none_is_within_its_range(mean):
    low, high = task.interval(mean, 20)
    assert 0 <= low < high <= 1
    assert low <= mean <= high


SLOW_TO_IMPORT = """
import time
time.sleep(1.5)

class Dataset:
    def score_answer(self, answer, entry):
        return answer == entry["answer"]

def create_dataset(name):
    return Dataset()
"""


def test_the_import_of_a_verifier_is_not_in_the_time_of_an_answer(tmp_path, monkeypatch, limited):
    (tmp_path / "reasoning_gym.py").write_text(SLOW_TO_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    limited(reasoning_gym.SCORER, 1.0)
    reward = reasoning_gym._reward("sums", '["sums", {}]', lambda text, right: text)
    row = {"answer": ["2"] * 2, "entry": ['{"answer": "2"}'] * 2}
    assert reward(completions=["2", "3"], **row) == [1.0, 0.0]
