"""Generation beside training: one generation behind, never more; corrected for; and as restartable as anything else."""

import os
import signal
import threading
import time

import pytest
import torch
from clocked import read_log

from fused_grpo.errors import CheckpointError, UnavailableError
from fused_grpo.trainer.data import prompt_sampler

PREFETCH = {"generate_ahead": True, "vllm_mode": "server", "max_steps": 6}


@pytest.fixture
def make_trainer(make_trainer, served_engine):
    return lambda **options: make_trainer(engine=served_engine, **options)


def lines(trainer, name: str = "metrics.jsonl") -> list[dict]:
    return read_log(trainer.output_dir / name)


def test_rollouts_are_one_generation_old_and_none_is_made_for_nothing(make_trainer):
    trainer = make_trainer(**PREFETCH)
    trainer.train()
    assert [line["weight_version"] for line in lines(trainer)] == [0, 0, 1, 2, 3, 4]
    assert [line["off_policy_steps"] for line in lines(trainer)] == [0, 1, 1, 1, 1, 1]
    assert len(trainer.engine.calls) == 6


def test_the_engine_samples_while_the_optimizer_is_at_work(make_trainer):
    trainer, threads, started = make_trainer(**PREFETCH), [], threading.Event()
    generate, learn = trainer.engine.generate, trainer.learner.learn

    def generating(*arguments):
        threads.append(threading.current_thread().name.split("_")[0])
        started.set()
        return generate(*arguments)

    def learning(*arguments, **options):
        assert trainer.step == 5 or started.wait(10)  # the last step has nothing to wait for
        started.clear()
        return learn(*arguments, **options)

    trainer.engine.generate, trainer.learner.learn = generating, learning
    trainer.train()
    assert threads == ["MainThread"] + ["prefetch"] * 5


def test_the_gradient_is_weighed_by_how_far_the_policy_has_moved(make_trainer):
    """Of the second step: rho, of current to sampling weights, times the on-policy gradient."""
    norms = {}
    for correction in (True, False):
        trainer = make_trainer(**PREFETCH | {"max_steps": 2}, vllm_importance_sampling_correction=correction)
        norms[correction] = trainer.train().metrics
    assert norms[True]["sampling/sampling_logp_difference/max"] > 1e-4
    assert norms[True]["grad_norm"] != pytest.approx(norms[False]["grad_norm"], rel=1e-6)


RESUMED = {"each step": {}, "every second step": {"steps_per_generation": 2}, "of a queue": {"generate_ahead": 4}}
RESUMED |= {f"{name}, remax": {**options, "advantage_estimator": "remax"} for name, options in RESUMED.items()}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_stopped_and_resumed_is_the_same_run(make_trainer, tmp_path, options):
    options = PREFETCH | {"overwrite_output_dir": False, "lr_scheduler_type": "constant", **options}
    whole = make_trainer(output_dir=str(tmp_path / "whole"), save_steps=3, **options)
    whole.train()
    # A run that ends has nothing prefetched: cut it where it goes on.
    cut = make_trainer(output_dir=str(tmp_path / "cut"), save_steps=3, **options)
    learn = cut.learner.learn
    cut.learner.learn = lambda *a, **k: learn(*a, **k) if cut.step < 4 else pytest.fail("killed")
    with pytest.raises(pytest.fail.Exception, match="killed"):
        cut.train()
    resumed = make_trainer(output_dir=str(tmp_path / "cut"), save_steps=3, **options)
    resumed.train(resume_from_checkpoint=True)
    assert lines(whole) == lines(resumed)
    assert lines(whole, "rollouts.jsonl") == lines(resumed, "rollouts.jsonl")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_an_error_of_the_engine_ends_the_run_when_its_rollouts_are_wanted(make_trainer):
    trainer = make_trainer(**PREFETCH)
    generate = trainer.engine.generate

    def failing(*arguments):
        if len(trainer.engine.calls) == 2:
            raise UnavailableError("the server is gone")
        return generate(*arguments)

    trainer.engine.generate = failing
    with pytest.raises(UnavailableError, match="the server is gone"):
        trainer.train()
    assert trainer.step == 2
    assert trainer.engine.closed


@pytest.fixture
def stuck(make_trainer):
    """A trainer whose engine fails, or hangs, at its third batch; then one that resumes it."""

    def make(happens):
        trainer = make_trainer(overwrite_output_dir=False, **PREFETCH)
        generate = trainer.engine.generate
        trainer.engine.generate = lambda *a: happens() if len(trainer.engine.calls) == 2 else generate(*a)
        return trainer

    return make


def assert_same_requests(make_trainer, tmp_path):
    """A resumed run asks for what one that was not stopped asks for, with the same seeds."""
    resumed = make_trainer(overwrite_output_dir=False, **PREFETCH)
    resumed.train(resume_from_checkpoint=True)
    whole = make_trainer(output_dir=str(tmp_path / "whole"), **PREFETCH)
    whole.train()
    assert resumed.engine.calls == whole.engine.calls[2:]
    keys = ("step", "prompt", "completion")
    assert [[[row[key] for key in keys] for row in lines(run, "rollouts.jsonl")] for run in (resumed, whole)] == [
        [[row[key] for key in keys] for row in lines(whole, "rollouts.jsonl")]
    ] * 2


def test_a_save_succeeds_where_the_engine_has_failed_meanwhile(stuck, make_trainer, tmp_path):
    def fail():
        raise UnavailableError("the server is gone")

    trainer = stuck(fail)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 2
    with pytest.raises(UnavailableError, match="the server is gone"):
        trainer.train()
    assert_same_requests(make_trainer, tmp_path)


def test_sigterm_does_not_wait_for_an_engine_that_hangs(stuck, make_trainer, tmp_path):
    released = threading.Event()

    def hang():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not released.wait(30)

    trainer = stuck(hang)
    started = time.monotonic()
    with pytest.raises(SystemExit):
        trainer.train()
    assert time.monotonic() - started < 20
    released.set()
    assert_same_requests(make_trainer, tmp_path)


def test_a_run_that_does_not_save_reads_no_rows_to_compare(make_trainer, monkeypatch):
    monkeypatch.setattr(prompt_sampler, "fingerprint", lambda dataset: pytest.fail("read the dataset"))
    make_trainer(**PREFETCH, save_strategy="no").train()


def test_a_run_behind_one_that_could_not_begin_prefetches(make_trainer):
    trainer = make_trainer(**PREFETCH)
    with pytest.raises(CheckpointError):
        trainer.train(resume_from_checkpoint="no checkpoint")
    assert trainer.train().steps == 6
