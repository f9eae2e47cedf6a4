"""A run that was moved, or copied to another machine; and what is known of a checkpoint before anything is loaded."""

import shutil

import pytest

from fused_grpo.errors import CheckpointError

BEST = {"metric_for_best_model": "reward", "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_steps": 1, "save_total_limit": 1, "overwrite_output_dir": False}


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_the_best_checkpoint_of_a_run_that_was_moved_stays_the_best(make_trainer, tmp_path, move):
    def worse_and_worse(completions, **_):
        return [-trainer.step if len(completions) == 2 else 0.0 for _ in completions]

    options = BEST | SAVED | {"eval_dataset": [{"prompt": "1+1="}, {"prompt": "2+2="}]}
    trainer = make_trainer(worse_and_worse, max_steps=2, **options)
    trainer.train()
    moved = move(tmp_path / "run", tmp_path / "moved")
    trainer = make_trainer(worse_and_worse, max_steps=3, output_dir=str(moved), **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-1")
    weights = [(tmp_path / "moved" / name / "model.safetensors").read_bytes() for name in ("checkpoint-1", "final")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("saved", "options", "message"),
    [
        ({"save_only_model": True}, {}, "a checkpoint of a model alone"),
        ({}, {"max_steps": 1}, "of step 2, want one of max_steps=1 at most"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_at_the_start(make_trainer, tmp_path, saved, options, message):
    make_trainer(max_steps=2, **SAVED, **saved).train()
    for given in (True, str(tmp_path / "run" / "checkpoint-2")):
        with pytest.raises(CheckpointError, match=message):
            make_trainer(**SAVED | {"max_steps": 3, "resume_from_checkpoint": given} | options)


def test_a_checkpoint_of_another_trainer_is_said_to_be_one(make_trainer, tmp_path):
    make_trainer(max_steps=1, **SAVED).train()
    (tmp_path / "run" / "checkpoint-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"as one that TRL or transformers wrote, .*the model of a new run"):
        make_trainer(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"), **SAVED)
