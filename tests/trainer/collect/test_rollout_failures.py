"""`rollout_failure`: what becomes of completions that cannot be used, and that all other groups are left alone."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import column

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, from_tensors
from fused_grpo.trainer.engines.checked_engine import checked_generate
from fused_grpo.trainer.types import Rollouts, Sample, SamplingParams, with_fields

SAMPLING = SamplingParams(n=2, max_tokens=3, seed=5)
PROMPTS = [[6, 5, 7], [4, 5], [8]]


class Engine:
    """Completions that tell of prompt and seed. The first `faulty` calls have a NaN in prompt [4, 5]."""

    name, weight_version = "mine", 4

    def __init__(self, faulty: int) -> None:
        self.faulty, self.calls = faulty, []

    def generate(self, prompt_ids: Any, sampling: SamplingParams) -> Rollouts:
        self.calls.append((list(prompt_ids), sampling.seed))
        rows = [ids for ids in prompt_ids for _ in range(2)]
        logprobs = [[-0.5] for _ in rows]
        if len(self.calls) <= self.faulty:
            logprobs[rows.index([4, 5]) + 1] = [math.nan]
        return Rollouts(
            prompt_ids=list(prompt_ids),
            completion_ids=[[len(self.calls) + len(ids)] for ids in rows],
            sampling_logprobs=logprobs,
            finish_reasons=["stop"] * len(rows),
            num_generations=2,
            weight_version=4,
            extra={"call": [len(self.calls)] * len(rows)},
        )


def ask(engine: Engine, failure: str) -> list[Sample]:
    return checked_generate(engine, PROMPTS, SAMPLING, vocab_size=20, failure=failure)  # type: ignore[arg-type]


def failed(samples: list[Sample]) -> list[int]:
    return [place for place, sample in enumerate(samples) if sample.failure is not None]


def test_retry_samples_the_prompt_with_other_seeds_and_keeps_all_others(caplog) -> None:
    engine = Engine(faulty=2)
    rollouts = ask(engine, "retry")
    assert [prompts for prompts, _ in engine.calls] == [PROMPTS, [[4, 5]], [[4, 5]]]
    assert len({seed for _, seed in engine.calls}) == 3
    assert column(rollouts, "completion_ids") == [[4], [4], [5], [5], [2], [2]]
    assert column(rollouts, "extra") == [{"call": call} for call in (1, 1, 3, 3, 1, 1)]
    assert (column(rollouts, "sampling_logprobs"), column(rollouts, "failure")) == ([[-0.5]] * 6, None)
    assert caplog.text.count("got log-prob nan in completion 1 of prompt 1") == 2
    again = Engine(faulty=2)
    ask(again, "retry")
    assert again.calls == engine.calls


def test_an_engine_that_takes_options_out_is_asked_with_all_of_them_again() -> None:
    class Takes(Engine):
        def generate(self, prompt_ids: Any, sampling: SamplingParams) -> Rollouts:
            assert sampling.extra.pop("stop").pop() == "."
            return super().generate(prompt_ids, sampling)

    sampling, engine = replace(SAMPLING, extra={"stop": ["."]}), Takes(faulty=2)
    checked_generate(engine, PROMPTS, sampling, vocab_size=20, failure="retry")  # type: ignore[arg-type]
    assert (len(engine.calls), sampling.extra) == (3, {"stop": ["."]})


def test_retry_is_bounded_and_fail_does_not_ask_again() -> None:
    for failure, calls in {"retry": 3, "fail": 1}.items():
        engine = Engine(faulty=9)
        with pytest.raises(UnavailableError, match=r"got log-prob nan in completion 1 of prompt 1 .*rollout_failure="):
            ask(engine, failure)
        assert len(engine.calls) == calls


def test_drop_empties_the_completion_and_changes_nothing_else() -> None:
    sound, rollouts = ask(Engine(faulty=0), "drop"), ask(Engine(faulty=1), "drop")
    assert failed(rollouts) == [2, 3]
    emptied = [*column(sound[:3], "completion_ids"), [], *column(sound[4:], "completion_ids")]
    assert (column(rollouts, "completion_ids"), rollouts[3].sampling_logprobs) == (emptied, [])
    empty = {"completion_ids": [], "sampling_logprobs": [], "finish_reason": "length"}
    marked, wanted = (
        with_fields(rollouts, {"failure": [None] * 6}),
        [*sound[:3], replace(sound[3], **empty), *sound[4:]],
    )
    assert repr(marked) == repr(wanted)  # their rewards are NaN
    assert failed(from_tensors(as_tensors(rollouts))) == [2, 3]


def nan_for(trainer: Any, prompts: set[str], calls: range = range(1, 99)) -> None:
    """Plant a NaN in the log-probs of the second completion of these prompts."""
    generate, decode = trainer.engine.generate, trainer.processing_class.decode

    def faulty(prompt_ids: Any, sampling: Any) -> Rollouts:
        rollouts = generate(prompt_ids, sampling)
        for place, ids in enumerate(prompt_ids):
            if decode(ids) in prompts and len(trainer.engine.calls) in calls:
                rollouts.sampling_logprobs[place * sampling.n + 1][0] = math.nan
        return rollouts

    trainer.engine.generate = faulty


def learned_by(trainer: Any) -> list[Any]:
    batches, learn = [], trainer.learner.learn
    trainer.learner.learn = lambda batch, **options: batches.append(batch) or learn(batch, **options)
    return batches


def test_a_dropped_group_reaches_neither_rewards_nor_loss(make_trainer):
    asked: list[str] = []

    def reward(prompts, completions, log_extra, **columns):
        asked.extend(prompts)
        log_extra("length", [len(text) for text in completions])
        return [float(len(text)) for text in completions]

    options = {"per_device_train_batch_size": 12, "max_steps": 1, "shuffle_dataset": False}
    sound, faulty = make_trainer(reward, **options), make_trainer(reward, rollout_failure="drop", **options)
    nan_for(faulty, {"0+1="})
    sound_batches, faulty_batches = learned_by(sound), learned_by(faulty)
    sound.train()
    asked.clear()
    metrics = faulty.train().metrics
    (whole,), (batch,) = sound_batches, faulty_batches
    kept = [0, 1, 2, 3, 8, 9, 10, 11]
    expected = [whole[place] for place in kept]
    for name in ("prompt_ids", "completion_ids", "sampling_logprobs"):
        assert column(batch, name) == column(expected, name)
    assert torch.equal(column(batch, "advantage"), column(expected, "advantage"))
    assert asked == ["0+0="] * 4 + ["0+2="] * 4
    assert (metrics["rollouts/dropped"], metrics["rewards/dropped"]) == (4.0, pytest.approx(1 / 3))
    lengths = [len(sample.completion_ids) for sample in batch]
    assert metrics["completions/min_length"] == min(lengths)
    records = [json.loads(line) for line in (faulty.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert [place for place, record in enumerate(records) if record.get("dropped")] == [4, 5, 6, 7]
    assert "got log-prob nan in completion 1" in records[5]["failure"]
    assert [record["length"] for record in records][4:8] == [None] * 4


def test_a_run_without_a_fault_is_the_same_under_every_policy(make_trainer):
    weights = []
    for policy in ("fail", "retry", "drop"):
        trainer = make_trainer(rollout_failure=policy, max_steps=2)
        trainer.train()
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())


def test_retry_goes_on_where_fail_ends_the_run(make_trainer):
    trainer = make_trainer(rollout_failure="retry", max_steps=2)
    nan_for(trainer, {f"{a}+{b}=" for a in range(4) for b in range(4)}, calls=range(1, 2))
    assert "rollouts/dropped" not in trainer.train().metrics
    assert len(trainer.engine.calls) == 3


def test_dynamic_sampling_replaces_a_dropped_group_and_counts_it(make_trainer):
    trainer = make_trainer(
        rollout_failure="drop", dynamic_sampling=4, per_device_train_batch_size=8, max_steps=1, shuffle_dataset=False
    )
    nan_for(trainer, {"0+1="})
    batches = learned_by(trainer)
    metrics = trainer.train().metrics
    assert len(batches[0]) == 8
    assert metrics["rollouts/dropped"] == 4.0
    assert "0+1=" not in {trainer.processing_class.decode(sample.prompt_ids) for sample in batches[0]}


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_batch_with_nothing_left_ends_the_run_with_the_engines_reason(make_trainer, rounds):
    trainer = make_trainer(rollout_failure="drop", dynamic_sampling=rounds)
    nan_for(trainer, {f"{a}+{b}=" for a in range(4) for b in range(4)})
    with pytest.raises(
        UnavailableError, match=r"every group of the batch was dropped.*got log-prob nan in completion 1"
    ):
        trainer.train()
    assert trainer.step == 0


def test_an_evaluation_counts_what_it_drops(make_trainer):
    rows = [{"prompt": f"{a}+3=", "answer": "x"} for a in range(3)]
    trainer = make_trainer(eval_dataset=rows, rollout_failure="drop", num_generations_eval=2)
    nan_for(trainer, {"1+3="})
    metrics = trainer.evaluate()
    assert metrics["eval_rollouts/dropped"] == 2.0
    assert math.isfinite(metrics["eval_reward"])
