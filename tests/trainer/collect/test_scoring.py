"""From rollouts to what the loss sees: columns, conversations, and whole groups or none."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import column
from hypothesis import given
from hypothesis.strategies import lists, sampled_from

from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.collect.advantages import multi_objective_advantages
from fused_grpo.trainer.collect.collector import Collector
from fused_grpo.trainer.collect.scoring import RolloutFacts, Scored, score_rollouts, without_rewards
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.types import Rollouts, with_fields


class Digits:
    """A tokenizer whose token ids are the digits of the text."""

    def batch_decode(self, ids, *, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(map(str, completion)) for completion in ids]


def scored(functions, completion_ids, *, rows=None, **options) -> Scored:
    """Completions in groups of three, with their place as what the engine said about them."""
    groups, size = len(completion_ids) // 3, len(completion_ids)
    rollouts = Rollouts(
        prompt_ids=[[group] for group in range(groups)],
        completion_ids=completion_ids,
        sampling_logprobs=[[-1.0] * len(ids) for ids in completion_ids],
        finish_reasons=["stop"] * size,
        num_generations=3,
        weight_version=0,
        extra={"place": list(range(size))},
    )
    rows = [{"prompt": f"p{group}"} for group in range(groups)] if rows is None else rows
    return score_rollouts(rollouts.samples(), rows, Rewards(functions, **options), Digits())


def last_digit(completions):
    return [float(text[-1]) for text in completions]


def no_nine(completions):
    return [1 / (text[-1] != "9") for text in completions]


async def no_eight(completions):
    return [None if text[-1] == "8" else 1.0 / (text[-1] != "7") for text in completions]


def test_completions_that_no_function_scores_are_named_once(caplog):
    result = scored([no_eight], [[8], [1], [8], [2], [8], [3]], rows=[{"prompt": "p", "answer": n} for n in range(2)])
    assert column(result.samples, "reward").isnan().tolist() == [True, False, True, False, True, False]
    (record,) = caplog.records
    assert record.getMessage().startswith("All reward functions returned None for the following kwargs:")
    assert "'answer': 0" in record.getMessage()
    assert "Got 3 of 6" in record.getMessage()
    scored([no_eight, last_digit], [[8], [1], [8]])
    scored([no_nine], [[9], [1], [8]], failure="drop")
    assert not [record for record in caplog.records[1:] if "returned None" in record.getMessage()]


def with_advantages(result, advantages):
    return replace(result, samples=with_fields(result.samples, {"advantage": advantages}))


@given(digits=lists(sampled_from([1, 2, 3, 3, 4, 5, 6, 7, 8, 9]), min_size=12, max_size=12))
def test_a_partial_group_never_reaches_the_loss(digits):
    failing = {place // 3 for place, digit in enumerate(digits) if digit in (7, 9)}
    functions = [last_digit, no_nine, no_eight]
    result = scored(functions, [[digit] for digit in digits], failure="drop")
    rewards = torch.tensor(column(result.samples, "rewards"))
    advantages = multi_objective_advantages(rewards, torch.ones(3), GRPOConfig(scale_rewards="batch"), size=3)
    batch = [one for one in with_advantages(result, advantages.tolist()).samples if not one.dropped]
    kept = [place for place in range(12) if place // 3 not in failing]
    assert column(batch, "prompt_ids") == [[place // 3] for place in kept]
    assert column(batch, "completion_ids") == [[digits[place]] for place in kept]
    assert [sample.sampling_logprobs for sample in batch] == [[-1.0]] * len(kept)
    assert [sample.advantage for sample in batch] == advantages[kept].tolist()


@pytest.mark.parametrize(("aggregation", "kept"), [("sum_then_normalize", []), ("normalize_then_sum", [0, 1, 2])])
def test_groups_without_advantages_are_left_out_however_rewards_are_added(aggregation, kept):
    rewards = [(2, 0, 0), (1, 1, 0), (0, 0, 2), *[(1, 1, 1)] * 3]
    functions = [lambda place, one=one: [rewards[n][one] for n in place] for one in range(3)]
    given, weights = scored(functions, [[n] for n in range(6)]), SimpleNamespace(weights=torch.ones(3))
    args = GRPOConfig(multi_objective_aggregation=aggregation)
    collector = SimpleNamespace(args=args, group_part=3, has_greedy=False, rewards=weights)
    assert [one.extra["place"] for one in Collector._with_unequal_rewards(collector, given).samples] == kept


def test_reward_functions_get_the_engines_columns_and_messages():
    seen = {}

    def reward(prompts, completions, place, completion_ids):
        seen.update(prompts=prompts, completions=completions, place=place, ids=completion_ids)
        return [0.0] * 3

    prompt = [{"role": "user", "content": "hi"}]
    result = scored(reward, [[1, 2], [3], [4]], rows=[{"prompt": prompt}])
    assert seen["prompts"] == [prompt] * 3
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in ("12", "3", "4")]
    assert (seen["place"], seen["ids"]) == ([0, 1, 2], [[1, 2], [3], [4]])
    assert column(result.samples, "text") == ["12", "3", "4"]


def test_a_record_has_what_was_logged_and_is_json():
    def logs(completions, log_extra):
        log_extra("parsed", [object(), torch.tensor(2.5), None])
        return [1.0, 2.0, None]

    result = scored([logs, last_digit], [[1], [2], [3]], weights=[1.0, 10.0])
    records = json.loads(json.dumps(with_advantages(result, [0.5, 0.0, -0.5]).records()))
    assert [record["parsed"] for record in records[1:]] == [2.5, None]
    assert records[0]["parsed"].startswith("<object object")
    assert [record["reward"] for record in records] == [11.0, 22.0, 30.0]
    assert records[1]["rewards"] == {"logs": 2.0, "last_digit": 2.0}
    assert [record["advantage"] for record in records] == [0.5, 0.0, -0.5]
    assert result.seconds.keys() == {"logs", "last_digit"}


def test_what_is_logged_counts_by_the_completions_that_no_rank_drops():
    """Another rank has a part of the group, or the greedy completion of its prompt is dropped."""

    def logs(completions, completion_ids, log_metric):
        log_metric("first", float(completion_ids[0][0]))
        return [1 / (len(completions) == 3)] * len(completions)  # fails on the batch

    def logs_once(completions, log_metric):
        log_metric("once", 1.0)
        return [1.0] * len(completions)

    result = scored([logs, logs_once], [[group] for group in (1, 2, 4) for _ in range(3)], failure="drop")
    for dropped, mean in (([], 7 / 3), ([0], 3.0), ([0, 2], 2.0), ([0, 1, 2], math.nan)):
        samples = [without_rewards(one) if place // 3 in dropped else one for place, one in enumerate(result.samples)]
        counted = replace(result, samples=samples).counted()
        ((means, count),) = RolloutFacts.of(replace(result, samples=samples)).scored.logged
        assert counted.logged == RolloutFacts.of(counted).scored.logged
        assert means == pytest.approx({"first": mean, "once": 1.0 if count else math.nan}, nan_ok=True)
        assert count == 9 - 3 * len(dropped)
