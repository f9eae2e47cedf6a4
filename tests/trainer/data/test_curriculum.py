"""The curriculum: what it draws, from what it has seen; on any number of ranks; across a checkpoint; refusals."""

import doctest
import itertools
import json
import math
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset

from fused_grpo.errors import CheckpointError, DataError, InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.data import prompt_sampler as curriculum
from fused_grpo.trainer.data.prompt_sampler import GROUPS, LEAST, CurriculumSampler, levels_of, prompt_sampler

RUN = Path(__file__).parents[1] / "curriculum_run.py"
EQUAL, UNEQUAL = [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]
ROWS = [{"prompt": f"{number}=", "difficulty": number % 5} for number in range(100)]


def make(kind="difficulty", rows=ROWS, *, size=8, seed=3, **options):
    return CurriculumSampler(rows, curriculum=kind, prompts_per_batch=size, seed=seed, shuffle=True, **options)


def taught(sampler, teaches, batches):
    """Rows that so many batches draw, where the groups of those for which `teaches` holds have unequal rewards."""
    drawn = Counter[int]()
    for _ in range(batches):
        sampler.next_batch()
        drawn.update(sampler.batch)
        sampler.update(sampler.batch, [UNEQUAL if teaches(row) else EQUAL for row in sampler.batch])
    return drawn


def share(drawn, chosen):
    return sum(count for row, count in drawn.items() if chosen(row)) / drawn.total()


def test_the_level_that_teaches_is_drawn_most_and_the_others_still_are():
    sampler = make()
    taught(sampler, lambda row: row % 5 == 2, 20)
    drawn = taught(sampler, lambda row: row % 5 == 2, 100)
    assert share(drawn, lambda row: row % 5 == 2) > 0.6  # a fifth of the rows
    assert all(share(drawn, lambda row, level=level: row % 5 == level) > 0.02 for level in range(5))


def test_it_follows_where_another_level_comes_to_teach():
    sampler = make()
    taught(sampler, lambda row: row % 5 == 0, 60)
    taught(sampler, lambda row: row % 5 == 4, 60)
    drawn = taught(sampler, lambda row: row % 5 == 4, 60)
    assert share(drawn, lambda row: row % 5 == 4) > 0.6
    assert share(drawn, lambda row: row % 5 == 0) < 0.2


def test_without_levels_each_prompt_counts_for_itself():
    sampler = make("unequal_rewards")
    taught(sampler, lambda row: row < 20, 25)
    drawn = taught(sampler, lambda row: row < 20, 100)
    assert share(drawn, lambda row: row < 20) > 0.45  # of a fifth of the rows
    assert share(drawn, lambda row: row >= 20) > 0.2


def test_the_weights_are_those_of_the_formula():
    sampler = make()
    assert sampler.weights().tolist() == [1.0] * 5
    sampler.update([0, 5, 1, 6], [UNEQUAL, EQUAL, EQUAL, EQUAL])
    assert sampler.weights().tolist() == [(0.25 + 1) / 3, 0.25 / 3, 0.25, 0.25, 0.25]
    sampler.update([0] * GROUPS, [EQUAL] * GROUPS)  # the rest leaves the window
    assert sampler.weights().tolist() == [LEAST] * 5
    sampler.next_batch()
    assert sampler.metrics()["curriculum/unequal_rewards"] == 0.0


def test_a_batch_reads_no_window_which_is_as_long_as_the_data():
    class Unread(deque):
        def __iter__(self):
            raise AssertionError("the whole window")

    sampler = make("unequal_rewards")
    taught(sampler, lambda row: row < 20, 30)
    sampler._window = Unread(sampler._window, maxlen=sampler._window.maxlen)
    taught(sampler, lambda row: row < 20, 5)
    assert 0.0 < sampler.metrics()["curriculum/unequal_rewards"] < 1.0


def test_a_group_that_was_not_scored_says_nothing():
    sampler, nothing = make(), math.nan
    sampler.update([0, 1, 2], [[nothing] * 4, [nothing, nothing, nothing, 1.0], [nothing, 1.0, 1.0, 1.0]])
    assert sampler.position()["groups"] == {"rows": [2], "unequal": [0]}
    sampler.update([3], [[0.1 + 0.2, 0.3, 0.3, 0.3]])  # equal but for rounding
    assert sampler.position()["groups"]["unequal"] == [0, 0]


def test_a_batch_repeats_no_prompt_before_it_has_them_all():
    sampler = make(size=30)
    for _ in range(20):
        sampler.next_batch()
        assert len(set(sampler.batch)) == 30
        sampler.update(sampler.batch, [UNEQUAL if row < 3 else EQUAL for row in sampler.batch])
    small = make("unequal_rewards", ROWS[:3], size=8)
    small.next_batch()
    assert sorted(Counter(small.batch).values()) == [2, 3, 3]


@pytest.mark.parametrize("repeats", [1, 2])
def test_any_number_of_ranks_draws_the_same(repeats):
    alone = make(size=8 // repeats)
    ranks = [make(size=2, rank=rank, world_size=4, repeats=repeats) for rank in range(4)]
    for _ in range(12):
        rows = [row for row in alone.next_batch() for _ in range(repeats)]
        assert list(itertools.chain.from_iterable(rank.next_batch() for rank in ranks)) == rows
        rewards = [UNEQUAL if row % 3 else EQUAL for row in alone.batch]
        for sampler in (alone, *ranks):
            sampler.update(alone.batch, rewards)


@pytest.mark.parametrize("kind", ["difficulty", "unequal_rewards"])
def test_it_goes_on_from_its_state_as_json(kind):
    whole, resumed = make(kind), make(kind)
    taught(whole, lambda row: row % 5 == 1, 30)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    ends = [taught(sampler, lambda row: row % 5 == 3, 30) for sampler in (whole, resumed)]
    assert ends[0] == ends[1]
    assert whole.state_dict() == resumed.state_dict()
    forgetful = make(kind)
    forgetful.used = whole.used
    assert taught(forgetful, lambda row: row % 5 == 3, 30) != taught(whole, lambda row: row % 5 == 3, 30)


def test_seeds_differ_and_the_rest_of_an_epoch_can_be_left_out():
    first, other = make(), make(seed=4)
    first.next_batch(), other.next_batch()
    assert first.batch != (before := other.batch)
    other.next_batch()  # of the same weights
    assert other.batch != before
    first.next_pass(1)
    assert first.used == 100


@pytest.mark.parametrize(
    "groups",
    [
        None,
        [],
        {"rows": [1]},
        {"rows": [1], "unequal": []},
        {"rows": [100], "unequal": [1]},
        {"rows": [-1], "unequal": [1]},
        {"rows": [1.0], "unequal": [1]},
        {"rows": [True], "unequal": [1]},
        {"rows": ["1"], "unequal": [1]},
        {"rows": [1], "unequal": [2]},
        {"rows": [1], "unequal": [None]},
        {"rows": 1, "unequal": 1},
        # More than the window has. More than prompts were used there may be: where the rest of an epoch was left out.
        {"rows": [1] * 1000, "unequal": [1] * 1000},
    ],
)
def test_a_state_that_no_run_leaves_is_refused(groups):
    sampler = make()
    taught(sampler, lambda row: row % 5 == 1, 2)
    state = {**sampler.state_dict(), "groups": groups}
    with pytest.raises(CheckpointError, match=r"^got .*fix: "):
        make().load_state_dict(state)


def test_another_curriculum_or_none_is_refused():
    plain = prompt_sampler(ROWS, prompts_per_batch=8, seed=3, shuffle=True)
    samplers = {None: plain, "difficulty": make(), "unequal_rewards": make("unequal_rewards")}
    for saved, here in itertools.permutations(samplers, 2):
        with pytest.raises(CheckpointError, match=f"curriculum={here}, want curriculum={saved!r}"):
            samplers[here].load_state_dict(samplers[saved].state_dict())


def test_levels_are_values_or_ranges_of_about_a_tenth():
    assert levels_of([{"difficulty": value} for value in (3, 1, 2.5, 1)], "difficulty") == [2, 0, 1, 0]
    many = [{"prompt": "p", "difficulty": number / 7} for number in range(1000)]
    for rows in (many, Dataset.from_list(many)):
        assert Counter(levels_of(rows, "difficulty")) == dict.fromkeys(range(10), 100)
    kinds = (np.int64, np.float32, torch.tensor, lambda value: np.array(float(value)))
    for kind in kinds:
        assert levels_of([{"difficulty": kind(value)} for value in (3, 1, 2, 1)], "difficulty") == [2, 0, 1, 0]
    tied = levels_of([{"difficulty": max(0, number - 900)} for number in range(1000)], "difficulty")
    assert Counter(tied) == {0: 901, 1: 99}
    assert doctest.testmod(curriculum).failed == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p"}], "None as difficulty of row 0 of train_dataset, want a column 'difficulty' of numbers"),
        (Dataset.from_list([{"prompt": "p"}]), "None as difficulty of row 0"),
        ([{"prompt": "p", "difficulty": 1}, {"prompt": "p", "difficulty": "hard"}], "'hard' as difficulty of row 1"),
        ([{"prompt": "p", "difficulty": math.nan}], "nan as difficulty of row 0"),
        ([{"prompt": "p", "difficulty": 10**400}], "10+ as difficulty of row 0"),
        ([{"prompt": "p", "difficulty": np.bool_(True)}], "True as difficulty of row 0"),
        ([{"prompt": "p", "difficulty": torch.ones(1)}], r"tensor\(\[1.\]\) as difficulty of row 0"),
        ([{"prompt": "p", "difficulty": 1}] * 3, "one level of difficulty in train_dataset, want several"),
        (IterableDataset.from_generator(lambda: iter(ROWS)), "with a stream as train_dataset, want one with a length"),
    ],
)
def test_rows_without_levels_are_refused(rows, message, make_trainer):
    with pytest.raises(DataError, match=f"^got curriculum='difficulty' .*{message}.*fix: "):
        make_trainer(dataset=rows, curriculum="difficulty")


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle_dataset": False},
        {"generate_ahead": True, "vllm_mode": "server"},
        {"num_generations": 1, "advantage_estimator": "reinforce_plus_plus"},
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(InputError, match=f"^got {name}={value} with curriculum='difficulty', want .*curriculum='off'"):
        GRPOConfig(curriculum="difficulty", **options)


def test_rewards_of_all_rounds_reach_it_and_those_of_evaluations_do_not(make_trainer):
    def reward(completions, prompts, **columns):
        return [float(len(text)) if prompt < "2" else 0.0 for text, prompt in zip(completions, prompts, strict=True)]

    options = {"per_device_train_batch_size": 8, "dynamic_sampling": 1, "max_steps": 8}
    rows = [{"prompt": f"{number}+1=", "difficulty": number} for number in range(4)] * 5
    trainer = make_trainer(reward, dataset=rows, eval_dataset=rows[:4], curriculum="difficulty", **options)
    trainer.train()
    groups = trainer.sampler.position()["groups"]
    assert len(groups["rows"]) == trainer.sampler.used == 2 * trainer.collector.generate_calls
    assert trainer.collector.generate_calls > 8  # some groups were replaced
    hard = [unequal for row, unequal in zip(*groups.values(), strict=True) if rows[row]["difficulty"] > 1]
    assert set(hard) == {0}
    assert sum(groups["unequal"]) > 0
    assert 0 <= trainer.results.metrics["curriculum/difficulty"] <= 3


@pytest.mark.parametrize("sequences", [2, 4])  # of each of two processes: half of a group, or a whole one
def test_the_sampler_of_each_rank_hears_the_groups_of_all(fork_server, make_model, tmp_path, sequences):
    make_model(vocab_size=512).save_pretrained(tmp_path / "model")
    fork_server.run(RUN, tmp_path / "model", tmp_path / "out", sequences, processes=2)
    ranks = [json.loads((tmp_path / "out" / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["batches"] == ranks[1]["batches"]
    expected = []
    for rows, *parts in zip(ranks[0]["batches"], *(rank["rewards"] for rank in ranks), strict=True):
        groups = [[*parts[0], *parts[1]]] if sequences == 2 else parts
        expected += [(row, int(max(group) > min(group))) for row, group in zip(rows, groups, strict=True)]
    assert {unequal for _, unequal in expected} == {0, 1}
    for rank in ranks:
        groups = rank["position"]["groups"]
        assert list(zip(groups["rows"], groups["unequal"], strict=True)) == expected


def test_without_rewards_there_is_no_curriculum(make_trainer):
    with pytest.raises(InputError, match="curriculum='unequal_rewards' without reward_funcs, want rewards that differ"):
        make_trainer(None, curriculum="unequal_rewards", teacher_model="self", distillation_coef=1.0)
