"""All output of a run: console, metrics, rollouts, trackers, report. Only the main process writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from fused_grpo.trainer.config.derived_options import whole_steps
from fused_grpo.trainer.config.file_names import REPORT_FILE
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.advice import Advice
from fused_grpo.trainer.logging.console import Console
from fused_grpo.trainer.logging.log_entries import StepMetrics
from fused_grpo.trainer.logging.report import write_report
from fused_grpo.trainer.logging.run_log import RunLog
from fused_grpo.trainer.logging.trackers import Trackers


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What `GRPOTrainer.train` returns."""

    steps: int
    training_loss: float  # mean over the steps of this call of `train`
    metrics: dict[str, Any]  # of the last step, and transformers' train_runtime, train_loss, ...
    # {"reward": ..., "rewards/<fn>/mean": ...}, after "<set>_" where eval sets have names; None without an evaluation
    # before the first or after the last step
    eval_before: dict[str, float] | None
    eval_after: dict[str, float] | None
    checkpoint: Path
    report: Path

    @property
    def global_step(self) -> int:
        """`steps`, as transformers calls it."""
        return self.steps


class RunOutput:
    """The output of one run, in `args.output_dir` and on the console.

    Args:
        args: the options of the run.
        max_steps: optimizer steps it will take.
        is_main: False on every process but the first: then nothing is shown or written.
        facts: what `describe_run` says.
        accelerator: made with `tracker_arguments(args)`; None where nothing is tracked.
    """

    def __init__(
        self,
        args: GRPOConfig,
        max_steps: int,
        *,
        is_main: bool,
        facts: dict[str, str],
        accelerator: Accelerator | None = None,
    ) -> None:
        self.args, self.max_steps = args, max_steps
        self.console_steps = whole_steps(args.logging_steps, max_steps)
        self.console = Console(max_steps, quiet=not is_main)
        self.advice, self.since_last_line = Advice(args), StepMetrics()
        self.log = RunLog(Path(args.output_dir), args.rollouts_kept_steps) if is_main else None
        if self.log is not None:
            self.log.log_config(args.to_dict(), **facts)
        self.trackers = Trackers(accelerator, args, facts) if is_main and accelerator is not None else None

    @classmethod
    def silent(cls, args: GRPOConfig) -> RunOutput:
        """The output before a run begins: nothing is shown or written."""
        return cls(args, 0, is_main=False, facts={})

    def rollouts(self, step: int, make_records: Callable[[], list[dict[str, Any]]]) -> None:
        """The completions that optimizer step `step` is about to learn from, written before the step can fail."""
        if self.log is None:
            return
        records = make_records()
        self.log.log_rollouts(step, records)
        if self.args.log_completions and (step - 1) % self.args.log_completions_steps == 0:
            self.console.completions(step, records, self.args.num_completions_to_print)

    def step(self, record: dict[str, Any], generation: Mapping[str, Any]) -> None:
        """One optimizer step, and the metrics of its generated batch, which are a part of the record.

        The console shows means since its last line, as `state.log_history` has them. The first step has a line of its
        own besides, and its time, most of which is compilation, is in no mean.
        """
        step = record["step"]
        self._log(record)
        self.since_last_line.add(record | ({"step_time": None} if step == 1 else {}), generation)
        is_due = step % self.console_steps == 0 or step == self.max_steps
        if step == 1 or is_due:
            shown = self.since_last_line.take() if is_due or self.args.logging_first_step else record
            phases = {name: mean for name, mean in shown.items() if name.startswith("time/")}
            self.console.step(step, shown, {name.removeprefix("time/"): mean for name, mean in phases.items()})
        for text in self.advice(record):
            self.console.warn(text)

    def evaluation(self, step: int, result: dict[str, float], num_prompts: int, *, prefix: str = "eval") -> None:
        """Mean rewards on held-out prompts, by name: `<set>_reward` where an eval set has a name."""
        self._log({"step": step} | {f"{prefix}/{name}": value for name, value in result.items()})
        for name in (name for name in result if name.endswith("reward")):
            self.console.note(f"step {step}: held-out {name} {result[name]:.3f} on {num_prompts} prompts")

    def numbers(self, step: int, numbers: dict[str, Any]) -> None:
        """What the user's code has logged."""
        self._log({**numbers, "step": step})

    def closing(self, step: int, numbers: dict[str, Any]) -> None:
        """Time, speed and mean loss of the run: for trackers, beside the steps."""
        if self.trackers is not None:
            self.trackers.log({"step": step} | numbers)

    def note(self, text: str) -> None:
        """A line on the console."""
        self.console.note(text)

    def report(self) -> Path:
        """Write report.html, on the main process; its path everywhere."""
        return Path(self.args.output_dir) / REPORT_FILE if self.log is None else write_report(self.log.output_dir)

    def close(self) -> None:
        """End the trackers, however the run ended. Harmless a second time."""
        if self.trackers is not None:
            self.trackers.finish()
            self.trackers = None

    def _log(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.log_metrics(record)
        if self.trackers is not None:
            self.trackers.log(record)
