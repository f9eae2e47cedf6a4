"""Names of a log: what a reward function logs is never in the place of the log's own, whatever its name."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis.strategies import characters, dictionaries, floats, from_regex, none, one_of, sampled_from, text

from fused_grpo.trainer.collect.scoring import score_rollouts
from fused_grpo.trainer.logging.console import COLUMNS
from fused_grpo.trainer.logging.report import PANELS, write_report
from fused_grpo.trainer.logging.run_log import TAKEN, RunLog, free_name, read_metrics
from fused_grpo.trainer.rewards import Rewards
from fused_grpo.trainer.types import Rollouts

FIELDS = "step prompt completion reward rewards advantage finish_reason weight_version kept_tokens dropped failure"
names = one_of(
    from_regex(TAKEN, fullmatch=True),
    sampled_from([*FIELDS.split(), "", "logged/loss", "solution", "accuracy", "a\nb", "\x1b[31m", "x" * 9999]),
    text(characters(exclude_categories=())),
    sampled_from([None, 5, ("a", 1), b"step", 0.5]),
)
NAMES_OF_LOSSES = {
    "grpo": {"beta": 0.1, "entropy_coef": 0.1, "mask_truncated_completions": True},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, "use_adaptive_entropy": True, "entropy_target": 9.0},
    "vespo": {"loss_type": "vespo", "max_skipped_steps": 1, "dynamic_sampling": 1},
    "remax": {"advantage_estimator": "remax"},
    "curriculum": {"curriculum": "unequal_rewards", "variance_report": True},
    "distilled": {"distillation_coef": 0.5, "teacher_model": "self", "num_iterations": 2},
}


@pytest.mark.parametrize("options", NAMES_OF_LOSSES.values(), ids=NAMES_OF_LOSSES.keys())
def test_all_names_that_a_run_logs_are_taken(make_trainer, options):
    trainer = make_trainer(max_steps=1, eval_at_ends=True, eval_dataset=[{"prompt": "1+1=", "answer": "2"}], **options)
    trainer.train()
    entries = [*read_metrics(trainer.output_dir / "metrics.jsonl"), *trainer.state.log_history]
    entries += read_metrics(trainer.output_dir / "rollouts.jsonl")
    assert {name for entry in entries for name in entry if not TAKEN.fullmatch(name)} == set()


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(
    "options", [{"beta": 0.1}, {"loss_type": "cispo", "epsilon_high": 2.0}, {"loss_type": "vespo"}]
)
def test_a_step_without_a_token_has_the_names_of_every_other(make_trainer, served_engine, tmp_path, options, skips):
    class Cut(served_engine):
        def generate(self, prompt_ids, sampling):
            made = super().generate(prompt_ids, sampling)
            ids = [[2 + place % 3] for place, _ in enumerate(made.completion_ids)]
            return replace(made, completion_ids=ids, sampling_logprobs=None, finish_reasons=["length"] * len(ids))

    options |= {"max_completion_length": 1, "skip_zero_advantages": skips, "engine": Cut, "max_steps": 1}
    logged = []
    for masked in (True, False):
        trainer = make_trainer(mask_truncated_completions=masked, output_dir=str(tmp_path / f"{masked}"), **options)
        trainer.train()
        logged.append(trainer.state.log_history[0])
    nothing, other = logged
    assert nothing.keys() | {"ratio_min", "ratio_max"} == other.keys()  # extremes that TRL has not
    ratio_names = [name for name in nothing if "clip_ratio" in name or name in ("kl", "vespo/phi_seq_mean")]
    assert ratio_names
    assert all(nothing[name] == other[name] for name in ratio_names)


def test_the_names_of_trl_and_of_the_report_are_taken():
    if (trl := importlib.util.find_spec("trl")) is None:
        pytest.skip("TRL is not installed")
    source = (Path(trl.origin).parent / "trainer" / "grpo_trainer.py").read_text()  # to import it takes 10 s
    names = set(re.findall(r'_metrics\[mode\]\[f?"([^"]+)"\]', source))
    assert len(names) > 25
    names |= {name for panel in PANELS.values() for name in panel.values()} | {"eval/reward", "eval/hard_reward"}
    names |= {column.metric for column in COLUMNS if column.metric} | set(FIELDS.split())
    assert {name for name in names if not TAKEN.fullmatch(name)} == set()


def test_names_of_scripts_are_kept():
    kept = [
        "accuracy",
        "solution",
        "mean_digits",
        "pass@best",
        "judge/score",
        "train_accuracy",
        "rewarded",
        "loss_of_judge",
    ]
    assert list(map(free_name, kept)) == kept
    assert free_name("loss") == "logged/loss"


class Letters:
    """A tokenizer for which all tokens are one letter."""

    def batch_decode(self, ids, *, skip_special_tokens):
        return ["a"] * len(ids)


def scored(reward):
    """Two completions of one prompt."""
    lists = {"prompt_ids": [[1]], "completion_ids": [[1], [2]], "finish_reasons": ["stop"] * 2}
    rollouts = Rollouts(**lists, sampling_logprobs=None, num_generations=2, weight_version=3)
    return score_rollouts(rollouts.samples(), [{"prompt": "p"}], Rewards(reward), Letters())


@given(dictionaries(names, one_of(floats(), none()), max_size=6))
@example({"None": None, None: 0.5, "_": 1.0})
@settings(max_examples=60)
def test_records_are_the_same_whatever_else_is_logged(tmp_path_factory, logged):
    def reward(completions, log_extra=None, log_metric=None):
        for name, value in logged.items() if log_extra else ():
            log_extra(name, [value, "text"])
            log_metric(name, 0.5 if value is None else value)
        return [1.0, 2.0]

    logs, plain = scored(reward), scored(lambda completions: reward(completions))
    plain.reward_names[:] = logs.reward_names
    log = RunLog(tmp_path_factory.mktemp("log"))
    log.log_rollouts(1, logs.records())
    (means,) = [means for means, _ in logs.counted().logged]
    log.log_metrics(means | {"step": 1})
    (row, _), own = read_metrics(log.output_dir / "rollouts.jsonl"), plain.records()[0]
    assert {name: row[name] for name in FIELDS.split() if name in row} == {"step": 1, **own}
    assert len(row) - len(own) - 1 == len(set(map(free_name, logged)))
    (record,) = read_metrics(log.output_dir / "metrics.jsonl")
    assert all(value is None or abs(value) < 1e39 for value in record.values())


def test_a_run_with_such_names_resumes_and_its_report_is_written(make_trainer):
    def reward(completions, log_extra, log_metric):
        for name in ("step", "loss", "reward", "learning_rate", "epoch", "rewards/x/mean", "\ud800\x1b"):
            log_metric(name, 77.0)
            log_extra(name, [77] * len(completions))
        return [float(len(text)) for text in completions]

    options = {"save_strategy": "steps", "save_steps": 1, "overwrite_output_dir": False}
    make_trainer(reward, max_steps=1, **options).train()
    trainer = make_trainer(reward, max_steps=2, resume_from_checkpoint=True, **options)
    assert trainer.train().steps == 2
    records = read_metrics(trainer.output_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert not {77.0} & {record[name] for record in records for name in ("loss", "reward", "learning_rate", "epoch")}
    assert [record["logged/loss"] for record in records] == [77.0, 77.0]
    assert "77" not in json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert write_report(trainer.output_dir).is_file()


def test_what_a_script_logs_itself_does_not_move_its_step(make_trainer):
    trainer = make_trainer(max_steps=1)
    trainer.train()
    trainer.log({"step": "three", "mine": 2.0})
    assert read_metrics(trainer.output_dir / "metrics.jsonl")[-1] == {"step": 1, "mine": 2.0}
