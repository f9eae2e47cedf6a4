"""The arguments that reward functions get from the trainer, and how their values become advantages."""

import json
import math
import traceback

import pytest
import torch
from batches import column
from transformers import TrainerCallback

from fused_grpo.errors import InputError, RewardError


def lines(trainer, name: str) -> list[dict]:
    return [json.loads(line) for line in (trainer.output_dir / name).read_text().splitlines()]


def by_length(completions, **columns):
    return [float(len(text)) for text in completions]


def first_digit(completions, **columns):
    return [float(next((c for c in text if c.isdigit()), "0")) for text in completions]


def test_every_completion_comes_with_the_columns_of_its_own_prompt(make_trainer):
    seen = []

    def reward(**columns):
        seen.append(columns)
        return by_length(columns["completions"])

    trainer = make_trainer(reward, per_device_train_batch_size=8, max_steps=1)
    recorded, generate = [], trainer.engine.generate
    trainer.engine.generate = lambda *arguments: recorded.append(generate(*arguments)) or recorded[-1]
    trainer.train()
    (columns,), (rollouts,) = seen, recorded
    ours = {"trainer_state", "log_extra", "log_metric"}
    assert columns.keys() == {"prompts", "completions", "completion_ids", "answer"} | ours
    decode = trainer.processing_class.decode
    assert columns["prompts"] == [decode(rollouts.prompt_ids[index // 4]) for index in range(8)]
    assert len(set(columns["prompts"])) == 2
    sums = [sum(map(int, prompt.rstrip("=").split("+"))) for prompt in columns["prompts"]]
    assert columns["answer"] == list(map(str, sums))
    assert columns["completion_ids"] == rollouts.completion_ids
    # With the end-of-sequence token in the ids and without it in the text.
    assert columns["completions"] == [decode(ids[:-1]) for ids in rollouts.completion_ids]


def test_an_advantage_belongs_to_the_completion_that_earned_it(make_trainer):
    trainer = make_trainer(by_length, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1)
    learned, learn = [], trainer.learner.learn
    trainer.learner.learn = lambda batch, **options: learned.append(batch) or learn(batch, **options)
    trainer.train()
    (batch,), records = learned, lines(trainer, "rollouts.jsonl")
    assert [record["reward"] for record in records] == [len(ids) - 1 for ids in column(batch, "completion_ids")]
    groups = torch.tensor([float(len(ids)) for ids in column(batch, "completion_ids")]).view(2, 4)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(column(batch, "advantage").view(2, 4), expected)
    assert [record["advantage"] for record in records] == column(batch, "advantage").tolist()


def test_weights_and_names_keep_the_order_of_the_functions(make_trainer):
    trainer = make_trainer([first_digit, by_length], reward_weights=[2.0, -0.5], max_steps=1)
    metrics = trainer.train().metrics
    for record in lines(trainer, "rollouts.jsonl"):
        digit, length = first_digit([record["completion"]])[0], len(record["completion"])
        assert record["rewards"] == {"first_digit": digit, "by_length": length}
        assert record["reward"] == 2 * digit - 0.5 * length
    digit, length = (metrics[f"rewards/{name}/mean"] for name in ("first_digit", "by_length"))
    assert digit != length
    assert metrics["reward"] == pytest.approx(2 * digit - 0.5 * length)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_a_script_makes_no_number_is_refused(make_trainer, weight):
    callback = TrainerCallback()
    callback.on_step_end = lambda *_, **__: trainer.reward_weights[1:].fill_(weight) and None
    trainer = make_trainer([first_digit, by_length], callbacks=[callback])
    with pytest.raises(InputError, match=rf"got reward_weights=\[1.0, {weight}\], want finite numbers; fix: 0"):
        trainer.train()
    assert trainer.step == 1


@pytest.mark.parametrize("num_generations", [4, 6])
def test_groups_without_a_difference_are_counted(make_trainer, num_generations):
    def reward(completions, **_):
        constant = [0.1] * (2 * num_generations)
        return constant + [float(index) for index in range(num_generations)] + [0.7] * num_generations

    batch = 4 * num_generations
    trainer = make_trainer(reward, per_device_train_batch_size=batch, num_generations=num_generations, max_steps=1)
    metrics = trainer.train().metrics
    assert metrics["frac_reward_zero_std"] == metrics["groups_with_equal_rewards"] == 0.75
    spread = torch.arange(float(num_generations)).std().item()
    assert metrics["reward_std_within_groups"] == pytest.approx(spread / 4)
    assert metrics["reward_std"] == pytest.approx(torch.tensor(reward([])).std().item())


@pytest.mark.parametrize("num_generations", [2, 4])
def test_what_a_failing_reward_drops_is_not_learned_from(make_trainer, num_generations):
    def fails_on_first(completions, prompts, log_metric):
        log_metric("asked", len(completions))
        if len(completions) > num_generations or prompts[0] == first:
            raise ConnectionError("gone")
        return by_length(completions)

    options = {"per_device_train_batch_size": 8, "num_generations": num_generations, "max_steps": 1}
    trainer = make_trainer(fails_on_first, reward_failure="drop", shuffle_dataset=False, **options)
    first, decode = "0+0=", trainer.processing_class.decode
    learned, learn = [], trainer.learner.learn
    trainer.learner.learn = lambda batch, **options: learned.append(batch) or learn(batch, **options)
    metrics = trainer.train().metrics
    (batch,) = learned
    assert len(batch) == 8 - num_generations
    assert first not in {decode(ids) for ids in column(batch, "prompt_ids")}
    assert metrics["rewards/dropped"] == num_generations / 8
    dropped = [record for record in lines(trainer, "rollouts.jsonl") if record.get("dropped")]
    assert [record["prompt"] for record in dropped] == [first] * num_generations


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_batch_of_which_nothing_is_left_ends_the_run(make_trainer, rounds):
    def always(completions, **columns):
        raise ConnectionError("gone")

    trainer = make_trainer(always, reward_failure="drop", dynamic_sampling=rounds)
    with pytest.raises(RewardError, match=r"every group of the batch was dropped.*'always' raised ConnectionError"):
        trainer.train()
    assert trainer.step == 0


def shouts(completions):
    raise ValueError("\x1b[31m\u202e" + "y" * 10_000_000)


def test_what_a_run_prints_of_an_exception_is_harmless_and_short(make_trainer):
    with pytest.raises(RewardError) as caught:
        make_trainer(shouts, max_steps=1).train()
    printed = "".join(traceback.format_exception(caught.value))
    assert "ValueError: \\x1b[31m\\u202eyyy" in printed
    assert "in shouts" in printed
    assert not {"\x1b", "\u202e"} & set(printed)
    assert len(printed) < 30_000
