"""A resumed run with other options says which of them count, and refuses what cannot be continued."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.checkpoint.resume import RULES, restore, rule_of

LR = "learning_rate: 0.001 in the checkpoint, 0.5 now; the checkpoint's counts: it is in the state of the optimizer"


@pytest.fixture
def saved(make_trainer):
    """A checkpoint between two batches; with `steps_per_generation` in the middle of one."""

    def save(**options):
        trainer = make_trainer(max_steps=3, save_steps=3, **options)
        trainer.train()
        return trainer.output_dir / "checkpoint-3"

    return save


@pytest.fixture
def resumed(make_trainer, caplog):
    """Resumes in another trainer: its learner, and the lines that were logged."""

    def resume(checkpoint, **options):
        trainer = make_trainer(**{"max_steps": 3, "save_steps": 3, "overwrite_output_dir": False, **options})
        with caplog.at_level(logging.WARNING):
            restore(checkpoint, trainer.learner, trainer.collector)
        return trainer.learner, [line.strip() for line in caplog.text.splitlines()]

    return resume


def test_every_option_has_a_rule_with_a_reason():
    args, names = GRPOConfig(), {field.name for field in dataclasses.fields(GRPOConfig)}
    assert not RULES.keys() - names
    for name in names:
        rule = rule_of(name, args, mid_batch=True)
        assert rule.wins in ("checkpoint", "new", "refused", "none")
        assert rule.why


def test_what_is_loaded_is_the_checkpoints_and_the_rest_is_new(saved, resumed):
    learner, said = resumed(saved(), learning_rate=0.5, weight_decay=0.1, adam_beta1=0.5, epsilon=0.3, save_steps=1)
    assert any(LR in line for line in said)
    for name in ("weight_decay: 0.0", "adam_beta1: 0.9"):
        assert any(line.startswith(name) and "the checkpoint's counts" in line for line in said)
    for name in ("epsilon: 0.2 in the checkpoint, 0.3 now; the new one counts: from the next step on", "save_steps: 3"):
        assert any(line.startswith(name) for line in said)
    group = learner.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], *group["betas"], learner.args.epsilon) == (1e-3, 0.0, 0.9, 0.999, 0.3)
    assert not any(line.startswith(("resume_from", "overwrite", "output_dir")) for line in said)


def test_nothing_is_said_where_nothing_has_changed(saved, resumed):
    assert resumed(saved())[1] == []


@pytest.mark.parametrize("options", [{"num_iterations": 3}, {"loss_type": "grpo"}, {"beta": 0.1}, {"seed": 1}])
def test_what_cannot_be_continued_is_refused(saved, resumed, options):
    (name,) = options
    with pytest.raises(CheckpointError, match=rf"got {name}=.* want {name}=.*fix: "):
        resumed(saved(), **options)


def test_another_temperature_is_refused_in_the_middle_of_a_batch_alone(saved, resumed):
    with pytest.raises(CheckpointError, match=r"got temperature=0\.5 .* want temperature=1\.0"):
        resumed(saved(steps_per_generation=2), steps_per_generation=2, temperature=0.5)
    assert any(line.startswith("temperature: 1.0") for line in resumed(saved(), temperature=0.5)[1])


def test_an_adaptive_coefficient_goes_on_and_a_fixed_one_is_the_new_runs(saved, resumed):
    adaptive = {"use_adaptive_entropy": True, "entropy_target": 5.0}
    learner, said = resumed(saved(**adaptive), **adaptive, entropy_coef=0.5)
    assert learner.entropy.coefficient == pytest.approx(0.015)
    assert any(line.startswith("entropy_coef") and "the checkpoint's counts" in line for line in said)
    assert resumed(saved(entropy_coef=0.1), entropy_coef=0.2)[0].entropy.coefficient == 0.2
