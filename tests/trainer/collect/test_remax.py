"""ReMax: a greedy completion of each prompt is scored, is the baseline of its group, and takes no other part."""

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import column
from numerics import logprobs_of

from fused_grpo.errors import InputError, RewardError, UnavailableError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.collect.plan import batch_table
from fused_grpo.trainer.config.checks import check_arguments
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine


@pytest.fixture
def make_trainer(make_trainer, served_engine):
    class Engine(served_engine):
        """Greedy completions do not depend on the seed."""

        def generate(self, prompt_ids, sampling):
            rollouts = super().generate(prompt_ids, sampling if sampling.temperature else replace(sampling, seed=99))
            self.calls[-1] = len(prompt_ids), sampling
            return rollouts

    return lambda *reward, engine=Engine, **options: make_trainer(*reward, engine=engine, **options)


REMAX = {"advantage_estimator": "remax"}
THREE = {**REMAX, "per_device_train_batch_size": 12, "max_steps": 1, "shuffle_dataset": False}  # prompts 0+0=, ...


def lines(trainer, name: str = "rollouts.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.output_dir / name).read_text().splitlines()]


def rollouts_of(trainer) -> list[Any]:
    """What its engine returns from now on."""
    recorded, generate = [], trainer.engine.generate
    trainer.engine.generate = lambda *given: recorded.append(generate(*given)) or recorded[-1]
    return recorded


def batches_of(trainer) -> list[Any]:
    """What it learns from from now on."""
    batches, learn = [], trainer.learner.learn
    trainer.learner.learn = lambda batch, **options: batches.append(batch) or learn(batch, **options)
    return batches


def by_length(prompts, completions, sampled, greedy):
    """Rewards by prompt and member of its group: a batch of 3 prompts has 12 sampled completions and 3 greedy ones."""
    table = greedy if len(completions) in (1, 3) else sampled
    return [table(prompt, place % 4) for place, prompt in enumerate(prompts)]


def test_the_reward_of_the_greedy_completion_is_subtracted(make_trainer):
    trainer = make_trainer(**THREE | {"max_steps": 2})
    recorded, learned, reward = rollouts_of(trainer), batches_of(trainer), trainer.rewards.functions[0]
    trainer.train()
    asked = [(prompts, params.n, params.temperature) for prompts, params in trainer.engine.calls]
    assert asked == [(3, 4, 1.0), (3, 1, 0.0)] * 2
    for sampled, greedy, batch in zip(recorded[::2], recorded[1::2], learned, strict=True):
        assert greedy.prompt_ids == sampled.prompt_ids
        own, base = (
            reward(completions=trainer.processing_class.batch_decode(rollouts.completion_ids, skip_special_tokens=True))
            for rollouts in (sampled, greedy)
        )
        expected = torch.tensor([r - base[place // 4] for place, r in enumerate(own)])
        torch.testing.assert_close(torch.as_tensor(column(batch, "advantage")), expected, rtol=0, atol=1e-7)
        assert (expected.abs() > 0.1).sum() > 6
        assert column(batch, "completion_ids") == sampled.completion_ids


def test_greedy_completions_change_nothing_but_the_advantages(make_trainer, tmp_path):
    names = ("reward", "rewards/digit_reward/mean", "completions/mean_length", "num_tokens", "generate_calls")
    names += ("completion_tokens", "reward_std_within_groups", "completions/max_length")
    runs = {}
    for estimator in ("remax", "rloo"):
        options = THREE | {"advantage_estimator": estimator, "output_dir": str(tmp_path / estimator)}
        runs[estimator] = make_trainer(**options)
        metrics = runs[estimator].train().metrics
        runs[estimator].metrics_of_run = {name: metrics[name] for name in names}
        assert ("remax/greedy_reward" in metrics) is (estimator == "remax")
    remax, rloo = runs["remax"], runs["rloo"]
    assert remax.metrics_of_run == rloo.metrics_of_run
    records = lines(remax)
    own = {"greedy_completion", "greedy_reward"}
    assert records[0].keys() - lines(rloo)[0].keys() == own
    assert [record["completion"] for record in records] == [record["completion"] for record in lines(rloo)]
    for record in records:
        assert record["advantage"] == pytest.approx(record["reward"] - record["greedy_reward"])
    greedy = [record["greedy_reward"] for record in records]
    assert lines(remax, "metrics.jsonl")[0]["remax/greedy_reward"] == pytest.approx(sum(greedy) / 12)
    assert len({record["greedy_completion"] for record in records}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.9, "sampling_support": "require"},
        {"top_p": 0.9, "score_centering": "kept"},
        {"score_centering": "topk", "temperature": 1.5, "num_generations": 1},
    ],
    ids=str,
)
def test_the_baseline_is_what_an_evaluation_of_the_same_prompts_gives(make_trainer, options):
    rows = [{"prompt": f"{a}+1="} for a in range(4)]
    sizes = {"per_device_train_batch_size": 16 if "num_generations" not in options else 4, "max_steps": 1}
    trainer = make_trainer(engine=TransformersEngine, dataset=rows, eval_dataset=rows, **REMAX, **sizes, **options)
    before = trainer.evaluate()
    result = trainer.train()
    assert result.metrics["remax/greedy_reward"] == pytest.approx(before["eval_reward"], abs=1e-6)
    assert result.metrics["remax/greedy_reward"] != pytest.approx(result.metrics["reward"], abs=1e-3)
    assert "eval_remax/greedy_reward" not in before


def test_a_prompt_with_one_completion_learns_and_is_not_called_equal(make_trainer):
    trainer = make_trainer(**REMAX, num_generations=1, per_device_train_batch_size=8)
    learned, before = batches_of(trainer), copy.deepcopy(trainer.model)
    metrics = trainer.train().metrics
    every = [sample for batch in learned for sample in batch]

    def weighted(model):
        """What learning increases."""
        return sum(one.advantage * sum(logprobs_of(model, one.prompt_ids, one.completion_ids, 1.0)) for one in every)

    assert weighted(trainer.model) > weighted(before) + 1.0
    zero = sum(sample.advantage == 0 for sample in learned[-1]) / 8
    assert metrics["groups_with_equal_rewards"] == metrics["frac_reward_zero_std"] == zero < 1


def test_a_greedy_completion_without_a_reward_gives_advantages_of_0(make_trainer, caplog):
    def reward(prompts, completions, **columns):
        unscored = {"0+1="}
        return by_length(prompts, completions, lambda p, i: float(i), lambda p, i: None if p in unscored else 0.5)

    trainer = make_trainer(reward, **THREE)
    metrics = trainer.train().metrics
    advantages = [record["advantage"] for record in lines(trainer)]
    assert advantages == [-0.5, 0.5, 1.5, 2.5, 0.0, 0.0, 0.0, 0.0, -0.5, 0.5, 1.5, 2.5]
    assert metrics["remax/greedy_reward"] == 0.5
    assert (metrics["reward"], "rewards/dropped" in metrics) == (1.5, False)
    assert caplog.text.count("returned None") == 1
    assert "Such a completion is greedy, and no baseline for the others of its prompt: their" in caplog.text
    assert "Got 1 of 3" in caplog.text


def test_what_the_functions_log_of_greedy_completions_is_not_in_the_log(make_trainer):
    def reward(prompts, completions, log_metric, log_extra, **columns):
        log_metric("count", float(len(completions)))
        log_extra("count", [len(completions)] * len(completions))
        return [float(len(text)) for text in completions]

    trainer = make_trainer(reward, **THREE)
    assert trainer.train().metrics["count"] == 12.0
    assert [record["count"] for record in lines(trainer)] == [12] * 12


def test_a_group_whose_greedy_completion_the_engine_fails_for_is_dropped(make_trainer):
    trainer = make_trainer(**THREE, rollout_failure="drop")
    learned, generate = batches_of(trainer), trainer.engine.generate

    def faulty(prompt_ids, sampling):
        rollouts = generate(prompt_ids, sampling)
        if sampling.temperature == 0:
            rollouts.sampling_logprobs[1][0] = math.nan
        return rollouts

    trainer.engine.generate = faulty
    metrics = trainer.train().metrics
    assert len(learned[0]) == 8
    assert (metrics["rollouts/dropped"], metrics["rewards/dropped"]) == (4.0, pytest.approx(1 / 3))
    records = lines(trainer)
    assert [place for place, record in enumerate(records) if record.get("dropped")] == [4, 5, 6, 7]
    assert "got log-prob nan in completion 0 of prompt 1" in records[4]["failure"]


@pytest.mark.parametrize("dynamic", [0, 2])
def test_a_group_whose_greedy_completion_cannot_be_scored_is_dropped(make_trainer, dynamic):
    def reward(prompts, completions, **columns):
        if len(completions) in (1, 3) and "0+1=" in prompts:
            raise ValueError("no")
        return [float(place % 4 + len(text)) for place, text in enumerate(completions)]

    trainer = make_trainer(reward, **THREE, reward_failure="drop", dynamic_sampling=dynamic)
    learned = batches_of(trainer)
    metrics = trainer.train().metrics
    prompts = [trainer.processing_class.decode(sample.prompt_ids) for sample in learned[0]]
    assert len(prompts) == (12 if dynamic else 8)
    assert "0+1=" not in prompts
    if not dynamic:
        rewards = [record["reward"] for record in lines(trainer)]
        assert [reward is None for reward in rewards] == [False] * 4 + [True] * 4 + [False] * 4
        assert metrics["reward"] == pytest.approx(sum(reward for reward in rewards if reward is not None) / 8)


def test_a_batch_without_a_baseline_ends_the_run_with_the_reason(make_trainer):
    def reward(completions, **columns):
        if len(completions) in (1, 3):
            raise ValueError("no greed")
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"every group of the batch was dropped.*no greed"):
        make_trainer(reward, **THREE, reward_failure="drop").train()
    trainer = make_trainer(**THREE)
    generate = trainer.engine.generate
    trainer.engine.generate = lambda ids, sampling: generate(ids if sampling.temperature else ids[1:], sampling)
    with pytest.raises(UnavailableError, match="got 2 completions"):
        trainer.train()


def test_dynamic_sampling_keeps_groups_unlike_their_greedy_completion(make_trainer):
    """Rewards of 1 for all; greedy completions of prompts that begin with 0 have 1 too, and those of 3 none."""

    def reward(prompts, completions, **columns):
        base = {"0": 1.0, "1": 0.0, "2": 0.5, "3": None}
        return by_length(prompts, completions, lambda p, i: 1.0, lambda p, i: base[p[0]])

    rows = [{"prompt": f"{first}+{second}="} for second in range(4) for first in (0, 1, 3)]
    trainer = make_trainer(reward, dataset=rows, **THREE, dynamic_sampling=8)
    learned = batches_of(trainer)
    metrics = trainer.train().metrics
    assert [(sample.row["prompt"][0], sample.advantage) for sample in learned[0]] == [("1", 1.0)] * 12
    assert metrics["dynamic_sampling/rounds"] == 3.0
    assert (metrics["remax/greedy_reward"], metrics["groups_with_equal_rewards"]) == (0.0, 0.0)


def test_dynamic_sampling_keeps_no_group_where_none_has_a_baseline(make_trainer):
    """Although their rewards differ: the first batch has no baseline at all, that of the next one is known."""

    def reward(prompts, completions, **columns):
        return by_length(prompts, completions, lambda p, i: float(i), lambda p, i: 0.5 if p[0] == "1" else None)

    rows = [{"prompt": f"{first}+{second}="} for first in (0, 1) for second in range(3)]
    trainer = make_trainer(reward, dataset=rows, **THREE, dynamic_sampling=1)
    learned = batches_of(trainer)
    assert trainer.train().metrics["dynamic_sampling/rounds"] == 2.0
    assert [(sample.row["prompt"][0], sample.advantage) for sample in learned[0][:2]] == [("1", -0.5), ("1", 0.5)]


def test_the_seconds_of_a_reward_function_are_those_of_both_calls(make_trainer, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("fused_grpo.trainer.rewards.reward_functions.time.perf_counter", lambda: float(next(clock)))
    assert make_trainer(**THREE).train().metrics["time/reward/digit_reward"] == 2.0


PREFETCH = {"generate_ahead": True, "vllm_mode": "server", "max_steps": 4, "save_steps": 2}


def test_prefetched_samples_of_another_estimator_are_sampled_again(make_trainer, tmp_path):
    """A checkpoint of RLOO has no greedy completions: the batch is asked for again, with its seed."""
    options = {"overwrite_output_dir": False, "shuffle_dataset": False, **PREFETCH}
    cut = make_trainer(advantage_estimator="rloo", **options)
    learn = cut.learner.learn
    cut.learner.learn = lambda *a, **k: learn(*a, **k) if cut.step < 2 else pytest.fail("killed")
    with pytest.raises(pytest.fail.Exception, match="killed"):
        cut.train()
    resumed = make_trainer(**REMAX, **options)
    resumed.train(resume_from_checkpoint=True)
    seeds = [sampling.seed for _, sampling in resumed.engine.calls]
    assert seeds[:2] == [cut.engine.calls[2][1].seed] * 2
    assert all("greedy_reward" in record for record in lines(resumed)[8:])
    back = make_trainer(advantage_estimator="rloo", output_dir=str(tmp_path / "back"), **options)
    assert back.train().steps == 4


def test_a_dry_run_names_the_greedy_completions():
    args = GRPOConfig(per_device_train_batch_size=8, num_generations=2, **REMAX)
    shown = batch_table(args, processes=2, prompts=None)
    assert "a greedy completion of each of 8 prompts as baseline (advantage_estimator)" in shown
    assert "greedy" not in batch_table(GRPOConfig(num_generations=2), processes=1, prompts=None)


def test_what_it_does_not_go_with_is_refused(make_trainer):
    given = {"eval_dataset": None, "teacher_model": None, "rollout_func": lambda prompts, trainer: None}
    with pytest.raises(InputError, match="got advantage_estimator='remax' with rollout_func, want an engine that samp"):
        check_arguments(GRPOConfig(**REMAX), **given)
    with pytest.raises(InputError, match="got scale_rewards='batch' with advantage_estimator='remax'"):
        GRPOConfig(**REMAX, scale_rewards="batch")
    with pytest.raises(InputError, match=r"advantage_estimator='remax' without reward_funcs.* fix: advantage"):
        make_trainer(None, teacher_model="self", distillation_coef=1.0, **REMAX)
    make_trainer(teacher_model="self", distillation_coef=1.0, **REMAX)
