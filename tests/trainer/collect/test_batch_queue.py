"""Several batches in flight: how old they are, how many, in which order; time changes nothing, and none is lost."""

import dataclasses
import hashlib
import json
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from clocked import read_log
from transformers import TrainerCallback

from fused_grpo.errors import InputError, UnavailableError, WeightSyncError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, from_tensors
from fused_grpo.trainer.checkpoint.training_state import check_rollouts
from fused_grpo.trainer.collect import collector
from fused_grpo.trainer.collect.batch_queue import BatchQueue
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine

RUN = Path(__file__).parents[1] / "queue_run.py"
OPTIONS = {"vllm_mode": "server", "max_steps": 8, "overwrite_output_dir": False, "seed": 7}
FIRST_SEED = OPTIONS["seed"] * 1_000_003


@pytest.fixture
def make_trainer(make_trainer, served_engine, monkeypatch):
    """`pace` is "slow", an engine that has not sampled a batch before the next is requested, or "fast", one that has
    nothing to do when it is given weights."""

    def make(k: int = 0, pace: str = "", **options):
        trainer = make_trainer(engine=served_engine, **{**OPTIONS, "generate_ahead": k, **options})
        generate, learn = trainer.engine.generate, trainer.learner.learn
        take, wait, awaited = BatchQueue.take, BatchQueue.wait, list[Future]()

        def taking(queue):
            awaited[:] = [queue[0].samples]
            return take(queue)

        def waiting(queue):
            awaited[:] = [batch.samples for batch in queue]
            return wait(queue)

        def slow(prompt_ids, sampling):
            number = sampling.seed - FIRST_SEED
            # Where the trainer waits for it, there is none behind.
            while 0 < number > trainer.collector.generate_calls - 2 and all(map(Future.done, awaited)):
                time.sleep(0.001)
            return generate(prompt_ids, sampling)

        def after_sampling(*arguments, **named):
            trainer.collector.queue.wait()
            return learn(*arguments, **named)

        if pace == "slow":
            monkeypatch.setattr(BatchQueue, "take", taking)
            monkeypatch.setattr(BatchQueue, "wait", waiting)
            trainer.engine.generate = slow
        if pace == "fast":
            trainer.learner.learn = after_sampling
        return trainer

    return make


def lines(trainer, name: str = "metrics.jsonl") -> list[dict]:
    return read_log(trainer.output_dir / name)


def result(trainer) -> list:
    """All that a run leaves, without its times."""
    weights = hashlib.sha256(b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values()))
    return [lines(trainer), lines(trainer, "rollouts.jsonl"), weights.hexdigest()]


def trained(trainer, **options):
    trainer.train(**options)
    return trainer


@pytest.mark.parametrize("pace", ["slow", "fast"])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 20])
def test_a_batch_is_as_many_generations_old_as_the_option_says(make_trainer, k, pace):
    trainer, in_flight = make_trainer(k, pace if k > 1 else ""), list[int]()
    learn = trainer.learner.learn
    trainer.learner.learn = lambda *a, **n: (in_flight.append(len(trainer.collector.queue)), learn(*a, **n))[1]
    trainer.train()
    assert [line["weight_version"] for line in lines(trainer)] == [max(0, step - k) for step in range(8)]
    assert [line["off_policy_steps"] for line in lines(trainer)] == [min(step, k) for step in range(8)]
    assert in_flight == [min(k, 7 - step) for step in range(8)]
    seeds = [sampling.seed for _, sampling in trainer.engine.calls]
    assert seeds == [FIRST_SEED + number for number in range(8)]  # each once, in order


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 3, "pace": "slow"}, {"k": 2, "pace": "fast", "num_iterations": 2}])
def test_a_step_has_the_metrics_of_its_own_sync(make_trainer, options):
    trainer = make_trainer(**options)
    load = trainer.engine.load_weights

    def loading(weights, version):
        load(weights, version)
        trainer.engine.sync_metrics = {"weight_sync/bytes": version + 0.5}

    trainer.engine.load_weights, trainer.engine.weight_version = loading, -1
    trainer.train()
    assert [line["weight_sync/bytes"] - 0.5 for line in lines(trainer)] == [
        line["weight_version"] for line in lines(trainer)
    ]


def test_prompts_come_in_the_same_order_and_each_is_learned_from(make_trainer, tmp_path):
    prompts = {
        k: [
            row["prompt"]
            for row in lines(trained(make_trainer(k, output_dir=str(tmp_path / str(k)))), "rollouts.jsonl")
        ]
        for k in (0, 1, 4)
    }
    assert prompts[0] == prompts[1] == prompts[4]


def test_off_is_0_and_on_is_1(make_trainer, tmp_path):
    runs = {k: result(trained(make_trainer(k, output_dir=str(tmp_path / f"{k!r}")))) for k in (0, 1, False, True)}
    runs["nothing"] = result(trained(make_trainer(output_dir=str(tmp_path / "none"))))
    assert runs[0] == runs[False] == runs["nothing"]  # of which 0 and False are one key
    assert make_trainer(True).args.generate_ahead == 1
    assert runs[1] != runs[0]


@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 2, "num_iterations": 2}, {"dynamic_sampling": 2}])
def test_a_run_does_not_depend_on_who_is_faster(make_trainer, tmp_path, monkeypatch, options):
    """Weights of a slow engine are copies of what a fast one is sent from the policy itself."""
    copies, runs, copied = [], {}, collector.copied
    monkeypatch.setattr(collector, "copied", lambda *a, **n: (copies.append(pace), copied(*a, **n))[1])
    for pace in ("fast", "slow"):
        runs[pace] = result(trained(make_trainer(2, pace, output_dir=str(tmp_path / pace), **options)))
    assert runs["fast"] == runs["slow"]
    if not options:
        assert copies == ["slow"] * 5


def test_several_steps_of_a_generation_count_as_one(make_trainer):
    trainer = trained(make_trainer(2, "slow", steps_per_generation=2, max_steps=8))
    assert [line["weight_version"] for line in lines(trainer)] == [0, 0, 0, 0, 0, 0, 2, 2]
    assert [line["off_policy_steps"] for line in lines(trainer)] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert len(trainer.engine.calls) == 4


def test_an_evaluation_changes_nothing_of_what_is_sampled(make_trainer, tmp_path):
    evals = {"eval_dataset": [{"prompt": "1+1="}], "eval_strategy": "steps", "eval_steps": 1}
    plain = make_trainer(2, "fast", output_dir=str(tmp_path / "plain"))
    evaluated = make_trainer(2, "fast", output_dir=str(tmp_path / "evaluated"), **evals)
    assert result(trained(plain))[1:] == result(trained(evaluated))[1:]


def some_equal(completions, **columns) -> list[float]:
    return [float(len(text) > 3) for text in completions]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_further_rounds_are_drawn_from_the_queue_and_none_is_left(make_trainer, k):
    options = {"dynamic_sampling": 3, "per_device_train_batch_size": 8}
    trainer = trained(make_trainer(k, reward=some_equal, **options))
    steps = lines(trainer)
    rounds = [int(line["dynamic_sampling/rounds"]) for line in steps]
    assert max(rounds) > 1
    assert len(trainer.engine.calls) == sum(rounds)
    assert len(trainer.collector.queue) == 0
    assert all(0 <= line["off_policy_steps"] <= min(k, step) for step, line in enumerate(steps))
    assert max(line["off_policy_steps"] for line in steps) >= min(k, 2)
    versions = {(row["step"], row["weight_version"]) for row in lines(trainer, "rollouts.jsonl")}
    oldest = {step: min(version for at, version in versions if at == step) for step, _ in versions}
    assert all(oldest[line["step"]] >= line["weight_version"] for line in steps)
    assert len(versions) > len(oldest)  # some batches are of several versions


def cut_at(trainer, step: int):
    """Train until `step` steps are made and saved, and then be killed in the next."""
    learn = trainer.learner.learn
    trainer.learner.learn = lambda *a, **n: learn(*a, **n) if trainer.step < step else pytest.fail("killed")
    with pytest.raises(pytest.fail.Exception, match="killed"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [{}, {"steps_per_generation": 2}, {"dynamic_sampling": 2, "reward": some_equal, "per_device_train_batch_size": 8}],
    ids=["each step", "every second step", "dynamic sampling"],
)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_stopped_after_any_step_and_resumed_is_the_same_run(make_trainer, tmp_path, k, options):
    whole = make_trainer(k, save_steps=1, **options)
    trained(whole)
    expected = result(whole)
    for step in (7, 6, 4, 3, 1):
        resumed = make_trainer(k, **options)
        checkpoint = str(whole.output_dir / f"checkpoint-{step}")
        assert result(trained(resumed, resume_from_checkpoint=checkpoint)) == expected, step


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 0), (1, 4), (4, 2)])
def test_resumed_with_another_number_no_batch_is_older_than_it(make_trainer, tmp_path, before, after):
    whole = trained(make_trainer(before, output_dir=str(tmp_path / "whole")))
    cut_at(make_trainer(before, save_steps=1), 5)
    resumed = trained(make_trainer(after), resume_from_checkpoint=True)
    ages = [line["off_policy_steps"] for line in lines(resumed)]
    assert ages[:5] == [min(step, before) for step in range(5)]
    assert ages[5:] == ([1, 1, 2] if after > before else [min(step, after) for step in range(3)])
    prompts = [[row["prompt"] for row in lines(run, "rollouts.jsonl")] for run in (whole, resumed)]
    assert prompts[0] == prompts[1]


class StopsEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **objects):
        control.should_epoch_stop = state.global_step == 3


@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 2}], ids=["each step", "every second step"])
def test_an_epoch_that_is_left_ends_with_what_is_in_flight(make_trainer, tmp_path, options):
    """The prompts are those of a run without a queue, and a checkpoint remembers what was left out."""
    options |= {"callbacks": [StopsEpoch], "max_steps": -1, "num_train_epochs": 1.25, "save_steps": 5}
    prompts = {}
    for k in (0, 1, 3):
        whole = trained(make_trainer(k, output_dir=str(tmp_path / f"{k}"), **options))
        prompts[k] = [row["prompt"] for row in lines(whole, "rollouts.jsonl")]
        expected = result(whole)
        resumed = make_trainer(k, output_dir=str(tmp_path / f"{k}"), **options)
        resumed.train(resume_from_checkpoint=str(whole.output_dir / "checkpoint-5"))
        assert result(resumed) == expected
        assert lines(whole)[3]["off_policy_steps"] == 0
    assert prompts[0] == prompts[1] == prompts[3]


def test_a_failure_ends_the_run_when_its_batch_is_wanted_and_sampling_too(make_trainer):
    trainer = make_trainer(3)
    generate = trainer.engine.generate

    def failing(prompt_ids, sampling):
        if sampling.seed == FIRST_SEED + 4:
            raise UnavailableError("the server is gone")
        return generate(prompt_ids, sampling)

    trainer.engine.generate = failing
    with pytest.raises(UnavailableError, match="the server is gone"):
        trainer.train()
    assert trainer.step == len(trainer.engine.calls) == 4


def test_weights_that_are_not_taken_in_the_background_end_the_run(make_trainer):
    trainer = make_trainer(2, "slow")
    load = trainer.engine.load_weights

    def forgetful(named_weights, version):
        load(named_weights, version)
        trainer.engine.weight_version = version - (version == 2)

    trainer.engine.load_weights = forgetful
    with pytest.raises(WeightSyncError, match=r"got weight version 1 .* after a sync, want 2"):
        trainer.train()
    assert trainer.step == 4


def test_a_save_keeps_the_batches_in_front_of_one_that_failed(make_trainer, tmp_path):
    trainer = make_trainer(3, save_steps=1)
    generate = trainer.engine.generate
    trainer.engine.generate = lambda prompts, sampling: (
        generate(prompts, sampling) if sampling.seed < FIRST_SEED + 5 else pytest.fail("gone")
    )
    with pytest.raises(pytest.fail.Exception, match="gone"):
        trainer.train()
    assert trainer.step == 5
    resumed = make_trainer(3)
    newest = tmp_path / "run" / "checkpoint-3"  # which was saved when batches 3 and 4 were there, and 5 had failed
    trained(resumed, resume_from_checkpoint=str(newest))
    assert [sampling.seed - FIRST_SEED for _, sampling in resumed.engine.calls] == [5, 6, 7]
    assert [line["off_policy_steps"] for line in lines(resumed)] == [0, 1, 2, 3, 3, 2, 3, 3]


def test_a_resumed_run_samples_again_what_has_columns_for_the_rewards(make_trainer):
    """Which are in no checkpoint."""

    def reward(completions, bonus, **columns):
        return [len(text) + number for text, number in zip(completions, bonus, strict=True)]

    runs = [make_trainer(2, reward=reward, save_steps=3) for _ in range(2)]
    for trainer in runs:
        generate = trainer.engine.generate
        trainer.engine.generate = lambda *given, generate=generate: (
            lambda rollouts: dataclasses.replace(rollouts, extra={"bonus": [0.5] * len(rollouts.completion_ids)})
        )(generate(*given))
    whole, resumed = trained(runs[0]), runs[1]
    trained(resumed, resume_from_checkpoint=str(whole.output_dir / "checkpoint-3"))
    assert [sampling.seed - FIRST_SEED for _, sampling in resumed.engine.calls] == [3, 4, 5, 6, 7]
    assert lines(resumed)[-1]["step"] == 8


@pytest.mark.parametrize("change", [lambda samples: samples[1:], lambda samples: samples * 2])
def test_a_prefetched_batch_of_another_size_is_refused(make_trainer, change):
    trainer = make_trainer(1)
    trainer.collector.prefetch(trainer.engine, lambda name: nullcontext(), is_free=True)
    _, (table,) = trainer.collector.state()
    check_rollouts({"prefetched": table}, None, trainer.learner, step=0)
    changed = as_tensors(change(from_tensors(table)))
    with pytest.raises(ValueError, match=r"prefetched has \d samples, want 4"):
        check_rollouts({"prefetched": changed}, None, trainer.learner, step=0)


def test_a_run_after_an_interrupt_waits_for_what_is_still_sampled(make_trainer):
    class Interrupts(TrainerCallback):
        times = 0

        def on_step_end(self, args, state, control, **unused) -> None:
            assert started.wait(10)
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt

    trainer, started, ends = make_trainer(2, callbacks=[Interrupts], max_steps=3), threading.Event(), threading.Event()
    busy, met = [], []
    generate = trainer.engine.generate

    def sampling(*arguments):
        met.extend(busy)
        busy.append(1)
        if threading.current_thread() is not threading.main_thread():
            started.set()
            ends.wait(10)
        busy.pop()
        return generate(*arguments)

    trainer.engine.generate = sampling
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert busy
    threading.Timer(0.3, ends.set).start()
    trainer.train()
    assert not met


def test_a_run_that_has_ended_samples_nothing_more(make_trainer):
    trainer = make_trainer(3)
    trainer.learner.learn = lambda *a, **n: pytest.fail("no memory")
    generate, has_ended = trainer.engine.generate, threading.Event()

    def slow(*given):
        if trainer.engine.calls:  # all but the first batch, however long the trainer takes to fail
            has_ended.wait(60)
        return generate(*given)

    trainer.engine.generate = slow
    with pytest.raises(pytest.fail.Exception, match="no memory"):
        trainer.train()
    has_ended.set()
    trainer.collector.queue.wait()
    assert len(trainer.engine.calls) <= 2  # the first batch, and one that had begun


@pytest.mark.parametrize("k", [1, 2])
def test_ranks_that_share_a_server_never_sample_across_a_weight_sync(fork_server, tmp_path, k):
    outs = {}
    for pauses in ("", "0.02 0", "0 0.02"):
        out = tmp_path / (pauses or "none")
        fork_server.run(RUN, out, k, pauses, processes=2)
        outs[pauses] = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert outs[""] == outs["0.02 0"] == outs["0 0.02"]
    for rank in outs[""]:
        assert rank["versions"] == [max(0, step - k) for step in range(6)]
        assert rank["calls"] == 6
    assert outs[""][0]["weights"] == outs[""][1]["weights"]
    assert outs[""][0]["sync"] == outs[""][1]["sync"]  # also of the rank that sends nothing
    assert outs[""][0]["sync"]["weight_sync/bytes"] > 0


def test_a_rank_whose_engine_fails_stops_the_other_in_mid_queue(fork_server, tmp_path):
    ranks = fork_server.start_ranks(RUN, tmp_path / "out", 2, "0 0.01", 3, processes=2)
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    said = [json.loads((tmp_path / "out" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert said[0]["error"].startswith("PeerError: rank 1 of 2 failed while sampling")
    assert said[1]["error"] == "UnavailableError: out of order"
    assert [one["step"] for one in said] == [3, 3]


def test_an_engine_that_samples_with_the_model_is_refused(make_model, tokenizer):
    model, args = make_model(), GRPOConfig(generate_ahead=2)
    own = {"rollout_engine": TransformersEngine(model, tokenizer), "processing_class": tokenizer}
    message = "^got generate_ahead=2 with a TransformersEngine, want weights of its own.*fix: "
    with pytest.raises(InputError, match=message):
        GRPOTrainer(model, some_equal, args, [{"prompt": "1+1="}], **own)


def test_a_number_below_0_is_refused():
    with pytest.raises(InputError, match="got generate_ahead=-1, want at least 0"):
        GRPOConfig(generate_ahead=-1)


def test_a_copy_of_weights_is_their_own_and_is_freed_as_it_is_read(make_model):
    from fused_grpo.trainer.models.adapters import checkpoint_weights

    model = make_model()
    before = {name: weight.clone() for name, weight in checkpoint_weights(model)}
    copy = collector.copied(checkpoint_weights(model))
    for parameter in model.parameters():
        parameter.data.zero_()
    read = dict(copy)
    assert read.keys() == before.keys() == copy.shapes.keys()
    assert all(torch.equal(read[name], weight) for name, weight in before.items())
    assert list(collector.copied(checkpoint_weights(model), kept=False)) == []
