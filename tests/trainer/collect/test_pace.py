"""How many batches are in flight where rollouts may be only so far from the policy; what is requested is kept."""

import math

import pytest
from clocked import read_log
from hypothesis import given
from hypothesis import strategies as st

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.batching.micro_batch_metrics import MISMATCH
from fused_grpo.trainer.checkpoint.training_state import check_numbers
from fused_grpo.trainer.collect.batch_queue import Pace

OPTIONS = {"vllm_mode": "server", "max_steps": 14, "overwrite_output_dir": False, "generate_ahead": 4}


def steady(moves: float) -> list[float]:
    return [moves] * 14


@pytest.fixture
def make_trainer(make_trainer, served_engine):
    """A run whose policy moves as `moves` say: rollouts of age n at a step are n times its number from the policy."""

    def make(moves: list[float], limit: float | None = 1.0, rounding: float = 0.0, **options):
        trainer = make_trainer(engine=served_engine, **{**OPTIONS, "generate_ahead_max_kl": limit, **options})
        learn = trainer.learner.learn

        def learning(*arguments, **named):
            batch, metrics = learn(*arguments, **named)
            version, step = trainer.buffer.weight_version, trainer.step - 1
            age = (step - version) // trainer.collector.steps_per_batch
            return batch, {**metrics, MISMATCH: rounding + (age * moves[step]) ** 2}

        trainer.learner.learn = learning
        return trainer

    return make


def lines(trainer, name: str = "metrics.jsonl") -> list[dict]:
    return read_log(trainer.output_dir / name)


def ages(trainer) -> list[int]:
    trainer.train()
    return [line["off_policy_steps"] for line in lines(trainer)]


# 1 nat is the limit: with 0.4 at a step, rollouts of 2 steps before are 0.64 off.
@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        (steady(0.0), [0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4]),
        (steady(0.2), [0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4]),
        (steady(0.4), [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
        (steady(0.9), [0] + [1] * 13),
        (steady(30.0), [0] + [1] * 13),
        ([0.1] * 8 + [0.9] * 6, [0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 1]),
    ],
)
def test_as_many_batches_are_in_flight_as_are_near_enough(make_trainer, moves, expected):
    assert ages(make_trainer(moves)) == expected


def test_an_engines_rounding_does_not_count(make_trainer):
    assert ages(make_trainer(steady(0.4), rounding=7.0)) == ages(make_trainer(steady(0.4)))


def test_without_a_limit_or_a_known_distance_nothing_changes(make_trainer):
    assert ages(make_trainer(steady(30.0), limit=None)) == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    assert ages(make_trainer(steady(math.nan))) == [0] + [1] * 13


@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 2}, {"num_iterations": 2}])
def test_steps_of_a_generation_count_as_one(make_trainer, options):
    trainer = make_trainer([0.4] * 28, max_steps=28 if options else 14, **options)
    off_policy = ages(trainer)
    steps = trainer.collector.steps_per_batch
    assert [age // steps for age in off_policy[::steps]] == [0, 1, 1, 1, *[2] * 10]


def test_every_prompt_is_sampled_once_and_in_order(make_trainer, tmp_path):
    moves = [0.1] * 4 + [0.9] * 4 + [0.1] * 6
    runs = [
        make_trainer(moves, limit, output_dir=str(tmp_path / name), **options)
        for name, limit, options in (("paced", 1.0, {}), ("whole", None, {}), ("none", 1.0, {"generate_ahead": 0}))
    ]
    off_policy = [ages(run) for run in runs]
    assert off_policy[0] != off_policy[1]
    assert off_policy[2] == [0] * 14
    prompts = [[row["prompt"] for row in lines(run, "rollouts.jsonl")] for run in runs]
    assert prompts[0] == prompts[1] == prompts[2]
    assert all(len(run.engine.calls) == 14 for run in runs)


def test_stopped_after_any_step_and_resumed_is_the_same_run(make_trainer):
    moves = [0.1] * 4 + [0.9] * 4 + [0.1] * 6
    whole = make_trainer(moves, save_steps=1, rounding=3.0)
    whole.train()
    expected = [lines(whole), lines(whole, "rollouts.jsonl")]
    for step in (12, 9, 7, 5, 3, 1):
        resumed = make_trainer(moves, rounding=3.0)
        resumed.train(resume_from_checkpoint=str(whole.output_dir / f"checkpoint-{step}"))
        assert [lines(resumed), lines(resumed, "rollouts.jsonl")] == expected, step


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(None, 1.0, [0, 1, 1, 1, 2]), (1.0, None, [0, 1, 2, 3, 4]), (1.0, 0.001, [1] * 5)]
)
def test_another_limit_holds_from_the_next_batch_on(make_trainer, before, after, expected):
    make_trainer([0.1] * 22, before, save_steps=9, max_steps=9).train()
    resumed = make_trainer([0.1] * 22, after, max_steps=22)
    resumed.train(resume_from_checkpoint=True)
    off_policy = [line["off_policy_steps"] for line in lines(resumed)]
    assert len(off_policy) == 22
    assert (off_policy[-5:] if after == 0.001 else off_policy[9:14]) == expected


def test_a_smaller_number_in_flight_is_kept_after_a_resume(make_trainer):
    whole = make_trainer(steady(0.0), save_steps=9)
    assert max(ages(whole)) == 4
    resumed = make_trainer(steady(0.0), generate_ahead=2)
    resumed.train(resume_from_checkpoint=str(whole.output_dir / "checkpoint-9"))
    assert max(line["off_policy_steps"] for line in lines(resumed)[9:]) == 2


@pytest.mark.parametrize(
    "pace", [[-1, 0.0], [1.5, 0.0], [1, "x"], [1], [1, 0.0, 2.0], {"allowed": 1}, [1, math.nan], 3]
)
def test_a_pace_that_no_run_has_saved_is_refused(make_trainer, pace):
    trainer = make_trainer(steady(0.0))
    here = {"collector": trainer.collector.state()[0]}
    saved = {**here, "eval_before": None, "eval_after": None, "unlogged": {}, "unshown": {}}
    check_numbers(saved, here, None)
    with pytest.raises(TypeError, match=r"content\.collector\.pace"):
        check_numbers({**saved, "collector": saved["collector"] | {"pace": pace}}, here, None)


@given(
    moves=st.floats(0, 3),
    rounding=st.floats(0, 1),
    limit=st.floats(1e-4, 10),
    most=st.integers(1, 8),
    steps=st.integers(1, 3),
)
def test_no_request_is_further_than_the_limit_once_the_way_is_known(moves, rounding, limit, most, steps):
    pace, versions, learned = Pace(most, limit, steps), [], []
    for generation in range(6 * most):
        version = versions.pop(0) if versions else generation
        versions += [generation] * (pace.batches - len(versions))
        learned.append(generation - version)
        way = learned[-1] * moves
        pace.learned_from((generation - version) * steps + steps - 1, rounding + way**2)
    nearest = math.sqrt(limit) / moves if moves else math.inf
    assert max(learned) <= max(1, min(most, nearest * (1 + 1e-6)))
    assert learned[-1] >= max(1, int(min(most, nearest * (1 - 1e-6))))


@pytest.mark.parametrize("limit", [0, -1.0, math.inf, math.nan])
def test_a_limit_that_means_nothing_is_refused(limit):
    with pytest.raises(InputError, match=r"got generate_ahead_max_kl=.*, want a finite number > 0"):
        GRPOConfig(generate_ahead_max_kl=limit)
