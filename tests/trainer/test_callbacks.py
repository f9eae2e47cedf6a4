"""Callbacks of transformers: the same events in the same order as under TRL's own trainer, and what they decide."""

from __future__ import annotations

import pytest
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from fused_grpo.trainer import GRPOConfig, GRPOTrainer

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):
    """Keeps (event, step) of every event, and the names in each log entry."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[set[str]] = []


def record(name):
    def event(self, args, state, control, **kwargs):
        self.events.append((name, state.global_step))
        assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= kwargs.keys()
        assert name == "on_init_end" or kwargs["optimizer"] is not None
        assert args.label_smoothing_factor == 0.0  # an option that only TRL has
        if name == "on_log":
            self.logs.append(set(kwargs["logs"]))

    return event


for event_name in EVENTS:
    setattr(Recorder, event_name, record(event_name))


def kind(names: set[str]) -> str:
    return "eval" if any(name.startswith("eval_") for name in names) else "end" if "train_loss" in names else "steps"


OPTIONS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "num_generations_eval": 4,
    "num_train_epochs": 2,
    "max_completion_length": 4,
    "logging_steps": 2,
    "use_vllm": False,
    "bf16": False,
    "report_to": "none",
    "gradient_checkpointing": False,
    "metric_for_best_model": "reward",
}
CASES = {
    "evaluations by steps, checkpoints by epochs": {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "epoch"},
    "shares of all steps, from the start": {
        "eval_strategy": "steps", "eval_steps": 0.5, "save_steps": 0.4, "eval_on_start": True, "logging_first_step": True,
    },
    "epochs": {"eval_strategy": "epoch", "save_strategy": "best", "logging_strategy": "epoch", "eval_delay": 1},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of TRL's, about versions
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_events_and_entries_are_those_under_trl(make_model, tokenizer, tmp_path, options):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(2) for b in range(3)])

    def run(trainer_class, config_class, **more):
        recorder = Recorder()
        trainer = trainer_class(
            model=make_model(),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=config_class(output_dir=str(tmp_path / trainer_class.__module__), **OPTIONS, **options, **more),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tokenizer,
            callbacks=[recorder, PrinterCallback, EarlyStoppingCallback(early_stopping_patience=99)],
        )
        trainer.train()
        return recorder, trainer

    theirs, their_trainer = run(trl.GRPOTrainer, trl.GRPOConfig, use_cpu=True)
    ours, trainer = run(GRPOTrainer, GRPOConfig)
    assert ours.events == theirs.events
    assert [kind(names) for names in ours.logs] == [kind(names) for names in theirs.logs]
    for mine, other in zip(trainer.state.log_history, their_trainer.state.log_history, strict=True):
        assert (mine["step"], mine["epoch"]) == (other["step"], other["epoch"])
    assert trainer.state.log_history[-1].keys() >= {name for name in theirs.logs[-1] if name.startswith("train_")}
    folders = [sorted(path.name for path in (tmp_path / name).glob("checkpoint-*")) for name in ("a", "b")]
    assert folders[0] == folders[1]
