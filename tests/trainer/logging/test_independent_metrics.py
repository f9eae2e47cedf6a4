"""Every logged number is what docs/trainer.md says of it: compared with an implementation of the definitions alone."""

import json
import math
import time
from dataclasses import replace
from itertools import chain
from typing import Any

import independent_metrics as independent
import pytest
import torch
from batches import batch_of
from transformers import TrainerCallback

from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.collect.scoring import RolloutFacts, Scored, rollout_metrics
from fused_grpo.trainer.logging.console import Console
from fused_grpo.trainer.types import ListedTokens


def digits(prompt: list[int], ids: list[int]) -> float | None:
    """Of few values, so that groups are equal now and then; None for some."""
    return None if sum(ids) % 5 == 0 else float(sum(ids) % 2)


def by_length(prompt: list[int], ids: list[int]) -> float | None:
    return len(ids) / 2


def nothing_for_most(prompt: list[int], ids: list[int]) -> float | None:
    return float(sum(ids) % 3) if sum(ids) % 4 == 0 else None


def equal(prompt: list[int], ids: list[int]) -> float | None:
    return 0.1


def by_prompt(prompt: list[int], ids: list[int]) -> float | None:
    """The same for a group, and others for other groups."""
    return prompt[0] / 2


SCORES = {one.__name__: one for one in (digits, by_length, nothing_for_most, equal, by_prompt)}


def encode(prompt: str) -> list[int]:
    """As the tokenizer of these tests."""
    return ["0123456789+-*=abcdef".index(letter) + 2 for letter in prompt]


def reward(name: str, fails: Any = None) -> Any:
    """The reward function of that name; it raises where `fails` says so of a prompt."""

    def function(prompts, completion_ids, log_metric, **columns):
        if fails is not None and any(map(fails, prompts)):
            raise ConnectionError("no answer")
        values = list(map(SCORES[name], map(encode, prompts), completion_ids))
        numbers = [value for value in values if value is not None]
        log_metric("known_mean", sum(numbers) / len(numbers) if numbers else math.nan)
        return values

    function.__name__ = name
    return function


def watched(trainer: Any, broken: Any = None) -> list[Any]:
    """The completions of each call of its engine; some are cut, and `broken` prompts get log-probs of NaN."""
    calls, generate, decode = [], trainer.engine.generate, trainer.processing_class.decode

    def watch(prompt_ids, sampling):
        rollouts = generate(prompt_ids, sampling)
        if sampling.temperature == 0 and trainer.args.advantage_estimator == "remax":
            for group, ids in zip(calls[-1], rollouts.completion_ids, strict=True):
                for one in group:
                    one.greedy_ids = ids
            return rollouts
        groups = []
        for place, prompt in enumerate(prompt_ids):
            own = range(place * sampling.n, (place + 1) * sampling.n)
            failed = broken is not None and broken(decode(prompt))
            for number in own:
                ids = rollouts.completion_ids[number]
                if len(ids) == sampling.max_tokens:
                    rollouts.finish_reasons[number] = "length"
                if failed:
                    rollouts.sampling_logprobs[number][0] = math.nan
            groups.append(
                [
                    independent.Completion(
                        list(prompt),
                        rollouts.completion_ids[number],
                        rollouts.finish_reasons[number] == "stop",
                        failed=failed,
                        dropped=failed,
                    )
                    for number in own
                ]
            )
        calls.append(groups)
        return rollouts

    trainer.engine.generate = watch
    return calls


def scored(calls: Any, names: list[str], weights: list[float], fails: Any, decode: Any) -> None:
    """Give completions their rewards, and drop groups, as the functions of these names do."""
    for group in (group for groups in calls for group in groups):
        for one in group:
            one.rewards = [SCORES[name](one.prompt, one.ids) for name in names]
            one.dropped |= fails is not None and fails(decode(one.prompt))
            if one.greedy_ids is not None:
                greedy_rewards = [SCORES[name](one.prompt, one.greedy_ids) for name in names]
                total = independent.total(
                    independent.Completion(one.prompt, one.greedy_ids, True, greedy_rewards), weights
                )
                one.greedy = math.nan if total is None else total


def per_step(calls: Any, weights: list[float], args: Any) -> list[Any]:
    """The rounds of each generated batch."""
    batches, place = [], 0
    while place < len(calls):
        _, count = independent.kept_of(calls[place:], weights, len(calls[place]), args.dynamic_sampling)
        count = count if args.dynamic_sampling else 1
        batches.append(calls[place : place + count])
        place += count
    return batches


def known_mean(rounds: Any, names: list[str]) -> float | None:
    """What `reward` logs in rounds; where a function fails for a prompt, it is called once for each group."""
    calls = []
    for groups in rounds:
        sound = [group for group in groups if not group[0].failed]
        kept = [group for group in sound if not group[0].dropped]
        parts = kept if len(kept) < len(sound) else [list(chain(*sound))]
        scores = [[one.rewards[place] for one in part] for place in range(len(names)) for part in parts]
        numbers = [[value for value in values if value is not None] for values in scores]
        calls.append(([independent.mean(values) for values in numbers if values], sum(map(len, kept))))
    mean = independent.logged_mean(calls)
    return None if math.isnan(mean) else mean


def records(trainer: Any) -> list[dict[str, Any]]:
    lines = (trainer.output_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def assert_same(actual: Any, expected: dict[str, float], what: Any) -> None:
    for name, value in expected.items():
        assert name in actual, f"{name} of {what}"
        got = actual[name]
        is_nothing = got is None or math.isnan(got)
        assert is_nothing == math.isnan(value), f"{name} of {what}: got {got}, want {value}"
        assert is_nothing or got == pytest.approx(value, rel=2e-5, abs=2e-6), f"{name} of {what}"


def second(prompt: str) -> bool:
    return prompt[0] == "2"


def odd(prompt: str) -> bool:
    return prompt[2] == "1"


BATCHES: dict[str, dict[str, Any]] = {
    "one function": {},
    "two functions": {"rewards": ["digits", "by_length"], "reward_weights": [2.0, -0.5]},
    "nothing for most": {"rewards": ["nothing_for_most"], "num_generations": 8, "per_device_train_batch_size": 16},
    "by the batch": {"scale_rewards": "batch"},
    "normalised, and equal in groups": {
        "rewards": ["by_prompt", "equal"],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "normalised": {"rewards": ["digits", "nothing_for_most"], "multi_objective_aggregation": "normalize_then_sum"},
    "equal batches": {"rewards": ["equal"], "scale_rewards": "batch"},
    "whitened": {"advantage_estimator": "reinforce_plus_plus"},
    "whitened in groups": {"advantage_estimator": "reinforce_plus_plus_baseline", "rewards": ["by_prompt"]},
    "a reward drops": {"reward_failure": "drop", "fails": second},
    "the engine drops": {"rollout_failure": "drop", "broken": odd},
    "both drop": {"rollout_failure": "drop", "broken": odd, "reward_failure": "drop", "fails": second},
    "rounds": {"dynamic_sampling": 3},
    "rounds in vain": {"dynamic_sampling": 1, "rewards": ["equal"]},
    "rounds and drops": {
        **{"dynamic_sampling": 2, "rollout_failure": "drop", "broken": odd},
        **{"reward_failure": "drop", "fails": second},
    },
    "against greedy ones": {"advantage_estimator": "remax", "rewards": ["by_length"]},
    "against greedy ones, some dropped": {
        **{"advantage_estimator": "remax", "rewards": ["by_length"], "rollout_failure": "drop", "broken": odd},
        **{"reward_failure": "drop", "fails": second},
    },
    "rounds against greedy ones": {"advantage_estimator": "remax", "dynamic_sampling": 2, "rewards": ["digits"]},
    "prefetched": {"generate_ahead": 2, "dynamic_sampling": 2, "max_steps": 4},
    "several steps": {"steps_per_generation": 2, "num_iterations": 2, "logging_steps": 3},
}


@pytest.mark.parametrize("name", BATCHES)
def test_metrics_of_a_generated_batch_are_their_definitions(make_trainer, served_engine, name):
    options = {"per_device_train_batch_size": 16, "max_steps": 3, "num_generations": 4} | BATCHES[name]
    options |= {"engine": served_engine} if "generate_ahead" in options else {}
    names, fails, broken = (
        options.pop(key, other) for key, other in (("rewards", ["digits"]), ("fails", None), ("broken", None))
    )
    trainer = make_trainer([reward(one, fails) for one in names], shuffle_dataset=True, **options)
    args, weights = trainer.args, options.get("reward_weights") or [1.0] * len(names)
    calls = watched(trainer, broken)
    trainer.train()
    scored(calls, names, weights, fails, trainer.processing_class.decode)
    batches, tokens = per_step(calls, weights, args), 0
    uses = args.num_iterations * args.optimizer_steps_per_generation(1)
    lines = records(trainer)
    assert len(batches) == -(-len(lines) // uses)
    for number, rounds in enumerate(batches):
        tokens += independent.tokens_of(rounds)
        expected = independent.of_batch(rounds, names, weights, args) | {"num_tokens": tokens}
        mean_of_numbers = pytest.approx(known_mean(rounds, names), nan_ok=True)
        for step in range(number * uses, min((number + 1) * uses, len(lines))):
            assert_same(lines[step], expected, f"step {step + 1}")
            assert lines[step]["known_mean"] == mean_of_numbers, f"step {step + 1}"
            drops = {one for one in lines[step] if one.endswith("/dropped") or one.startswith("dynamic_sampling/")}
            assert drops <= expected.keys()


OF_BATCHES = ("reward", "frac_", "groups_", "completions/", "num_tokens", "time/reward/", "known_mean", "dynamic_")
LATEST = ("grad_norm", "learning_rate", "num_tokens", "weight_version", "generate_calls", "skipped_steps")


@pytest.fixture
def shown(monkeypatch) -> dict[int, dict[str, Any]]:
    """What the console is given for its lines, by step."""
    lines = dict[int, Any]()
    monkeypatch.setattr(Console, "step", lambda _, step, metrics: lines.update({step: metrics}))
    return lines


WINDOWS: dict[str, dict[str, Any]] = {
    "each step": {"logging_steps": 1},
    "three steps": {"logging_steps": 3},
    "of four steps of a batch": {"logging_steps": 3, "steps_per_generation": 2, "num_iterations": 2},
    "resumed": {"logging_steps": 3, "steps_per_generation": 2, "num_iterations": 2, "save_steps": 4},
    "resumed after a skipped step": {
        "logging_steps": 3,
        "save_steps": 1,
        "max_skipped_steps": 9,
        "broken_steps": (4, 6),
    },
}


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.fixture
def seven_steps(make_trainer, monkeypatch) -> Any:
    """A trainer that has made seven steps; with `save_steps` in two runs, of which the second resumes after step 4."""

    def run(*, broken_steps: tuple[int, ...] = (), **options: Any) -> Any:
        parts = (False, True) if "save_steps" in options else (None,)
        for resumes in parts:
            trainer = make_trainer([reward("digits")], **options, overwrite_output_dir=not resumes)
            learn, learner = trainer.learner.learn, trainer.learner

            def learn_some(batch, learn=learn, learner=learner, **given):
                is_broken = learner.step + 1 in broken_steps
                return learn([replace(one, advantage=math.inf) for one in batch] if is_broken else batch, **given)

            monkeypatch.setattr(learner, "learn", learn_some)
            if resumes is False:
                trainer.add_callback(StopsAfter(4))
            trainer.train(resume_from_checkpoint=resumes or None)
        return trainer

    return run


@pytest.mark.parametrize("name", WINDOWS)
def test_an_entry_and_a_line_are_of_the_steps_since_the_last_one(seven_steps, shown, name):
    options = {"per_device_train_batch_size": 8, "max_steps": 7, "dynamic_sampling": 1} | WINDOWS[name]
    trainer, size = seven_steps(**options), options["logging_steps"]
    steps, uses = records(trainer), trainer.args.num_iterations * trainer.args.optimizer_steps_per_generation(1)
    numbered = [{**record, "generation": (record["step"] - 1) // uses} for record in steps]
    wanted = independent.windows(numbered, size, latest=LATEST, once=lambda one: one.startswith(OF_BATCHES))
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["step"] for entry in entries] == [*range(size, 7, size), 7]
    firsts = {1, 5} if "save_steps" in options else {1}  # compiles
    for expected, entry in zip(wanted, entries, strict=True):
        line, step = shown[entry["step"]], entry["step"]
        for key in expected.keys() - {"step", "epoch", "generation", "rollout_engine"}:
            assert entry[key] == pytest.approx(expected[key]), f"{key} of the entry of step {step}"
            assert key == "step_time" or line[key] == entry[key], f"{key} of the line of step {step}"
        window = [record for record in steps if (record["step"] - 1) // size == (step - 1) // size]
        warm = [record["step_time"] for record in window if record["step"] not in firsts]
        assert line["step_time"] == (pytest.approx(independent.mean(warm)) if warm else None)


def test_kept_tokens_of_a_completion_are_those_of_its_own_tokens():
    listed = ListedTokens.of([[1, 2, 3], [], [4, 5, 6, 7, 8]])  # the second one is a tool's
    (sample,) = batch_of(
        **{"prompt_ids": [[1]], "completion_ids": [[2, 9, 4]], "completion_mask": [[True, False, True]]},
        **{"listed_tokens": [listed], "row": [{"prompt": "p"}]},
    )
    scored = Scored(samples=[sample], weight_version=0, reward_names=[])
    metrics = rollout_metrics([RolloutFacts.of(scored)], GRPOConfig(num_generations=2), torch.ones(0), evaluated=True)
    assert scored.records()[0]["kept_tokens"] == metrics["sampling/kept_tokens/mean"] == 4.0


def test_the_difficulty_of_a_batch_is_that_of_all_prompts_that_were_drawn(make_trainer):
    rows = [{"prompt": f"{a}+{b}=", "difficulty": a} for a in range(4) for b in range(4)]
    options = {"curriculum": "difficulty", "dynamic_sampling": 2, "per_device_train_batch_size": 8, "max_steps": 3}
    options["num_generations"] = 2
    trainer = make_trainer([reward("digits")], dataset=rows, **options)
    calls = watched(trainer)
    trainer.train()
    scored(calls, ["digits"], [1.0], None, trainer.processing_class.decode)
    batches = per_step(calls, [1.0], trainer.args)
    assert max(map(len, batches)) > 1
    for rounds, record in zip(batches, records(trainer), strict=True):
        drawn = [group[0].prompt[0] - 2 for groups in rounds for group in groups]
        assert record["curriculum/difficulty"] == pytest.approx(independent.mean(drawn))


def test_step_time_has_what_lies_between_the_phases(make_trainer, monkeypatch):
    trainer = make_trainer([reward("digits")], max_steps=2)
    monkeypatch.setattr(trainer.engine, "wake", lambda: time.sleep(0.1))
    trainer.train()
    for record in records(trainer):
        phases = [value for name, value in record.items() if name.startswith("time/") and name.count("/") == 1]
        assert record["step_time"] >= sum(phases) + 0.1


@pytest.mark.parametrize("options", [{}, {"num_generations_eval": 4}, {"reward_failure": "drop"}], ids=str)
def test_metrics_of_an_evaluation_are_their_definitions(make_trainer, options):
    sets = {"easy": [{"prompt": f"{a}+1="} for a in range(5)], "hard": [{"prompt": f"{a}*9="} for a in range(3)]}
    names, weights, fails = ["digits", "by_length"], [1.0, 0.5], second if "reward_failure" in options else None
    trainer = make_trainer([reward(name, fails) for name in names], reward_weights=weights, **options)
    calls = watched(trainer)
    metrics = trainer.evaluate(sets)
    scored(calls, names, weights, fails, trainer.processing_class.decode)
    for groups, name in zip(calls, sets, strict=True):
        expected = independent.of_batch([groups], names, weights, trainer.args, evaluated=True)
        expected["num_tokens"] = 0
        if (n := trainer.args.num_generations_eval) is not None:
            right = [sum((one.rewards[0] or 0.0) >= 1.0 for one in group) for group in groups]
            rated = [
                c for c, group in zip(right, groups, strict=True) if any(one.rewards[0] is not None for one in group)
            ]
            for k in (1, 2, 4):
                misses = [math.comb(n - c, k) / math.comb(n, k) for c in rated]
                expected[f"pass@{k}"] = 1 - independent.mean(misses)
        assert_same(metrics, {f"eval_{name}_{key}": value for key, value in expected.items()}, name)
