"""All output of a run: console, metrics, rollouts, trackers, warnings, report. Only the main process writes it.

docs/trainer.md says what goes where. Trackers are Accelerate's, which skips a missing one with a message at debug level
only: so it is checked that they are installed. Warnings with a fix name what makes a run learn little or nothing
although nothing fails, each once: `at_start` reads the options, `Advice` the metrics of each step.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import ProjectConfiguration
from transformers.integrations.integration_utils import rewrite_logs
from transformers.trainer_utils import speed_metrics

from fused_grpo.errors import UnavailableError, shown
from fused_grpo.trainer.common.file_names import METRICS_FILE, REPORT_FILE, TRACKERS_FOLDER
from fused_grpo.trainer.common.formatting import from_here, short_number, to_json
from fused_grpo.trainer.common.redaction import redacted
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.derived_options import whole_steps
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.console import Console
from fused_grpo.trainer.logging.report import parts_text, write_report
from fused_grpo.trainer.logging.run_log import RunLog, metric

# Of these the last step counts, not the mean.
LATEST = {"grad_norm", "learning_rate"} | {
    *("num_tokens", "weight_version", "generate_calls", "skipped_steps", "prompts/dropped")  # counted so far
}
# The argument of each tracker for the name of a run.
NAME_ARGUMENTS = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}
# Variables of a project and of a run's name, which Accelerate's arguments would override; it reads those of others.
PROJECTS = {"wandb": "WANDB_PROJECT", "comet_ml": "COMET_PROJECT_NAME", "swanlab": "SWANLAB_PROJECT"}
NAMES = {"wandb": "WANDB_NAME", "swanlab": "SWANLAB_EXP_NAME"}
WANDB_STEP = "train/global_step"
# The run that a script has begun, of a tracker's module; the arguments to go on with it, or to begin one within it.
REUSED: dict[str, tuple[Callable[[Any], Any], dict[str, bool]]] = {
    "wandb": (lambda module: getattr(module, "run", None), {"reinit": False}),
    "mlflow": (lambda module: getattr(module, "active_run", lambda: None)(), {"nested_run": True}),
}
# Thresholds of the warnings.
TRUNCATED_STEPS, TRUNCATED_SHARE = 3, 0.5
EQUAL_STEPS = 10
GROWTH_STEPS, GROWTH, LEAST_DIFFERENCE = 10, 3.0, 0.01  # steps of each mean, factor between them, nats
FAR_DIFFERENCE = 0.3  # nats; stale rollouts that a run learnt from as well as from its own stayed below 0.2
THINKING_TOKENS = 2048  # fewer are seldom enough
SUGGESTED_PROMPTS = 32  # prompts of an optimizer step, as in the recipes
# What is said of EQUAL_STEPS in a row, by what is so in each.
REPEATED = {
    "equal": "all completions of each prompt got the same reward, so nothing was learnt; fix: look at rollouts.jsonl: "
    "is the reward what it should be, are prompts too easy or too hard? Then dynamic_sampling=2 draws others in their "
    "place",
    # Of rewards that differ a step may have no gradient, where all is clipped; not several in a row.
    "gradient": "the gradient was 0, although rewards differ, so nothing was learnt; fix: look for a detach(), a "
    "torch.no_grad() or a hook in the model's forward, and at loss_type and its clipping",
    # Of a run with tools: a policy that does not call them, or wrongly, is no error.
    "uncalled": "no completion called a tool; fix: look at rollouts.jsonl, ask for a call in the prompt, with an "
    "example in the form of the chat template, or take a model that was trained to call tools",
    "failed": "every call of a tool failed; fix: `tool_calls` in rollouts.jsonl has arguments and results: does the "
    "tool raise, or do names and arguments need a better docstring?",
}


@dataclass
class Results:
    """What the model card and the result of `train` say of a run."""

    metrics: dict[str, Any] = field(default_factory=dict)  # of the last step
    eval_before: dict[str, float] | None = None
    eval_after: dict[str, float] | None = None  # of the weights of the last step

    @property
    def evaluations(self) -> dict[str, Any]:
        """What a checkpoint has of them."""
        return {"eval_before": self.eval_before, "eval_after": self.eval_after}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What `GRPOTrainer.train` returns. As a sequence it is transformers' triple: steps, loss and metrics."""

    steps: int
    training_loss: float  # mean over the steps of this call of `train`
    # Of the last step, and transformers' train_runtime, train_loss, ...: too many to show.
    metrics: dict[str, Any] = field(repr=False)
    # {"reward": ..., "rewards/<fn>/mean": ..., "pass@<k>": ...}, after "<set>_" where eval sets have names; None
    # without an evaluation before the first or after the last step
    eval_before: dict[str, float] | None
    eval_after: dict[str, float] | None
    checkpoint: Path
    report: Path

    @property
    def global_step(self) -> int:
        """`steps`, as transformers calls it."""
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return iter((self.steps, self.training_loss, self.metrics))

    def __getitem__(self, index: int) -> Any:
        return [*self][index]


class RunOutput:
    """The output of one run, on the console and in `output_dir` (None: that of `args`, from the present folder).

    Nothing is shown or written on a process that is not `is_main`. `facts` are the run's task, model, data and engine.
    `accelerator` was made with `tracker_arguments(args)`; None where nothing is tracked.
    """

    def __init__(
        self,
        args: GRPOConfig,
        max_steps: int,
        *,
        is_main: bool,
        facts: dict[str, str],
        accelerator: Accelerator | None = None,
        output_dir: Path | None = None,
        resumed_from: Path | None = None,
    ) -> None:
        self.args, self.max_steps = args, max_steps
        self.output_dir = Path(args.output_dir) if output_dir is None else output_dir
        self.console_steps = whole_steps(args.logging_steps, max_steps)
        self.console = Console(max_steps, quiet=not is_main)
        if resumed_from is not None:  # which may have been chosen for the user
            self.console.note(f"resumed from {from_here(resumed_from)}")
        self.advice, self._told_equality = Advice(args), False
        self.log = RunLog(self.output_dir, args.rollouts_kept_steps) if is_main else None
        if self.log is not None:
            self.log.log_config(args.to_dict(), **facts)
        self.trackers: list[Any] = []
        self._has_ended = False
        if is_main and args.report_to and accelerator is not None:
            accelerator.trackers.clear()  # those of a `train()` before, which have ended
            name = args.run_name or Path(args.output_dir).name
            options: dict[str, dict[str, Any]] = {
                tracker: {argument: name}
                for tracker, argument in NAME_ARGUMENTS.items()
                if args.run_name or NAMES.get(tracker, "") not in os.environ
            }
            for tracker, (open_run, option) in REUSED.items():
                if open_run(sys.modules.get(tracker)) is not None:
                    options[tracker] = options.get(tracker, {}) | option
            config = args.to_sanitized_dict() | {key: str(redacted(fact, key)) for key, fact in facts.items()}
            try:
                accelerator.init_trackers(_project(args, accelerator.log_with), config, options)
            except Exception as error:  # of a service, an account, a name
                for tracker in accelerator.trackers:
                    with suppress(Exception):
                        tracker.finish()
                raise UnavailableError(
                    f"got {type(error).__name__} when beginning the trackers report_to={args.report_to} ({error}), "
                    "want them before the first step; fix: their login, project and run_name, or report_to='none'"
                ) from error
            self.trackers = [WandbRun(one.tracker) if one.name == "wandb" else one for one in accelerator.trackers]

    def rollouts(self, step: int, make_records: Callable[[], list[dict[str, Any]]]) -> None:
        """The completions that optimizer step `step` is about to learn from, written before the step can fail."""
        if self.log is None:
            return
        records = make_records()
        self.log.log_rollouts(step, records)
        is_due = self.args.log_completions and (step - 1) % self.args.log_completions_steps == 0
        if is_due and (limit := self.args.num_completions_to_print) != 0:
            self.console.completions(step, records, limit)

    def step(self, record: dict[str, Any], steps: StepMetrics) -> None:
        """One optimizer step, which `steps` have been given.

        The console shows means since its last line, as `state.log_history` has them. The first step has a line of its
        own besides.
        """
        step = record["step"]
        self.write(record)
        is_due = step % self.console_steps == 0 or step == self.max_steps
        if step == 1 or is_due:
            shown = steps.take("unshown") if is_due or self.args.logging_first_step else record
            self.console.step(step, shown)
        for text in self.advice(record):
            self.console.warn(text)
        equal = metric(record, "sampling/bit_equal_fraction")
        if self.args.batch_invariant and not self._told_equality and equal is not None:
            self._told_equality = True
            share = "bit-equal" if equal == 1.0 else f"not bit-equal ({equal:.2%} of the tokens are)"
            self.console.note(f"step {step}: the log-probs of sampler and trainer are {share}")

    def evaluation(
        self, step: int, entry: dict[str, Any], rewards: dict[str, float], num_prompts: int, *, prefix: str = "eval"
    ) -> None:
        """An evaluation by its entry (`<prefix>_<metric>`), and its mean rewards: `<set>_reward` of a named set."""
        numbers = {f"{prefix}/{name.removeprefix(f'{prefix}_')}": value for name, value in entry.items()}
        self.write({"step": step} | numbers)
        for name in (name for name in rewards if name.endswith("reward")):
            passes = [key for key in rewards if key.startswith(f"{name.removesuffix('reward')}pass@")]
            rates = "".join(f", {key} {rewards[key]:.3f}" for key in passes[-1:])  # that of all completions
            self.console.note(f"step {step}: held-out {name} {rewards[name]:.3f}{rates} on {num_prompts} prompts")

    def report(self, model: Path) -> Path:
        """Write report.html and say where it and the model are, on the main process; its path everywhere."""
        if self.log is None:
            return self.output_dir / REPORT_FILE
        report = write_report(self.log.output_dir)
        lines = [parts_text(self.log.output_dir), f"report: {from_here(report)}", f"model: {from_here(model)}"]
        self.console.note("\n".join(filter(None, lines)))
        return report

    def close(self) -> None:
        """End the trackers but W&B's run, however the run ended. Harmless a second time.

        What comes later, of a script behind `train`, begins them again, until the next call.
        """
        if not self._has_ended:  # not by `Accelerator.end_training`, which also destroys the process group
            self._tell(lambda tracker: tracker.finish())
        self._has_ended = True

    def write(self, record: dict[str, Any]) -> None:
        """A record of a step: metrics.jsonl and the trackers get it."""
        if self.log is not None:
            self.log.log_metrics(record)
        if self.trackers:
            self.track(record)

    def track(self, record: dict[str, Any]) -> None:
        """Give trackers the numbers of a record, at its step: also those of NumPy and torch. What is not finite is left
        out, and what is none, with a warning."""
        plain: Any = to_json(record)
        numbers = {
            re.sub(r"^(eval|test)/", r"\1_", name): value
            for name, value in plain.items()
            if metric(plain, name) is not None and name != "step"
        }
        for name, value in plain.items():
            if isinstance(value, str | list | dict) and name != "rollout_engine":
                warn_once(
                    f"got {name!r}, which is no number, for the trackers: they get numbers alone; fix: wandb.log(...)"
                )
        if self._has_ended:
            self._has_ended = False
            self._tell(_begin_again)
        self._tell(lambda tracker: tracker.log(rewrite_logs(numbers), step=record["step"]))

    def _tell(self, call: Callable[[Any], None]) -> None:
        """Make that call for each tracker. One that raises gets nothing more, with a warning: files have all of it."""
        for tracker in list(self.trackers):
            try:
                call(tracker)
            except Exception as error:
                self.trackers.remove(tracker)
                self.console.warn(
                    f"the tracker {tracker.name} raised {type(error).__name__} ({shown(error, 500)}) and gets nothing "
                    f"more of this run; {METRICS_FILE} has every step"
                )


def _begin_again(tracker: Any) -> None:
    """Begin a tracker that has ended: the same run where Accelerate's class can name it, or another of that name."""
    if tracker.name == "mlflow":
        tracker.run_id, tracker.nested_run = tracker.active_run.info.run_id, True  # a script may have begun its own
    elif tracker.name == "trackio":
        tracker.init_kwargs["resume"] = "allow"
    tracker.start()


class WandbRun:
    """W&B's run of this process, which a script may have begun, as transformers uses it: it stays open behind `train`,
    for what a script logs, until `wandb.finish()` or the end of the process."""

    name = "wandb"

    def __init__(self, run: Any) -> None:
        self.run = run
        run.define_metric(WANDB_STEP)
        run.define_metric("*", step_metric=WANDB_STEP, step_sync=True)

    def log(self, values: dict[str, Any], step: int) -> None:
        # W&B's own step counts what a script logs too, and drops a smaller one.
        self.run.log({**values, WANDB_STEP: step})

    def finish(self) -> None:
        """Nothing."""

    start = finish


class StepMetrics:
    """Collects the metrics of steps for the next entry and the next line, and mean loss and time of one `train`."""

    def __init__(self) -> None:
        self.start, self.steps = time.time(), 0
        self.run: dict[str, dict[str, Any]] = {"loss": {"total": 0, "count": 0}}
        # Saved with a checkpoint: of each metric total and count of its finite values, in LATEST of the last value.
        self.windows: dict[str, dict[str, dict[str, Any]]] = {"unlogged": {}, "unshown": {}}
        self.generation: Mapping[str, Any] = {}  # the one that was counted last

    def add(self, record: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
        """One step. The metrics of its generated batch count once, as in TRL, although several steps may use it."""
        self.steps += 1
        counted = generation.keys() if generation is self.generation else ()
        self.generation = generation
        collected = {**self.windows, "run": self.run}
        for name, value in record.items():
            # The entry has step and epoch from the state. Names, such as that of the engine, have no mean.
            if name in ("step", "epoch", *counted) or isinstance(value, str):
                continue
            for window, sums in collected.items():
                if name in LATEST or name not in sums:
                    sums[name] = {"total": 0, "count": 0}
                # Most of the first one's is compilation, also in a run that is resumed.
                is_warm = name != "step_time" or self.steps > 1 or window == "unlogged"
                if is_warm and value is not None and math.isfinite(value):
                    sums[name] = {"total": sums[name]["total"] + value, "count": sums[name]["count"] + 1}

    def take(self, window: str = "unlogged") -> dict[str, Any]:
        """The means over the steps since the last call; None where a metric had no finite value."""
        since, self.windows[window] = self.windows[window], {}
        return {
            name: sums["total"] if name in LATEST and sums["count"] else _mean(sums) for name, sums in since.items()
        }

    def closing(self, sequences_per_step: int) -> dict[str, Any]:
        """transformers' last entry of a run: time, speed and mean loss, which is 0 of no steps."""
        samples = self.steps * sequences_per_step
        speed: dict[str, Any] = speed_metrics("train", self.start, num_samples=samples, num_steps=self.steps)
        # A number of floating point operations is not counted.
        return speed | {"total_flos": 0.0, "train_loss": _mean(self.run["loss"]) or 0.0}


def _mean(sums: dict[str, Any]) -> float | None:
    return sums["total"] / sums["count"] if sums["count"] else None


def _project(args: GRPOConfig, trackers: Iterable[Any]) -> str:
    """That of the options, unless a tracker has a variable for it and no option says otherwise."""
    names = (os.environ.get(PROJECTS.get(str(tracker), "")) for tracker in trackers)
    return args.project if args.project != GRPOConfig.project else next(filter(None, names), args.project)


def tracker_arguments(args: GRPOConfig) -> dict[str, Any]:
    """The arguments of `Accelerator(...)` for `args.report_to`; UnavailableError for one that is not installed."""
    if not args.report_to:
        return {}
    installed = {str(name) for name in get_available_trackers()}
    for name in args.report_to:
        if isinstance(name, GeneralTracker) or name == "all" or name in installed:
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            names = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UnavailableError(f"got report_to={name!r}, want one or several of {names}")
        raise UnavailableError(
            f"got report_to={name!r}, which is not installed; fix: pip install {name.replace('_', '-')}"
        )
    logs = str(Path(args.output_dir).absolute() / TRACKERS_FOLDER)  # for those that write files: TensorBoard
    return {"log_with": args.report_to, "project_config": ProjectConfiguration(logging_dir=logs)}


def at_start(args: GRPOConfig, *, processes: int, corrected: bool, thinks: bool = False) -> list[str]:
    """What the options say: of a loss `corrected` for the sampler, and of a model that `thinks` before it answers."""
    warnings = []
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    if sequences <= args.num_generations:
        steps = -(-SUGGESTED_PROMPTS * args.num_generations // (args.per_device_train_batch_size * processes))
        warnings.append(
            f"each optimizer step learns from {sequences / args.num_generations:.3g} prompt, so updates are noisy; "
            f"fix: gradient_accumulation_steps={steps} for {SUGGESTED_PROMPTS} prompts"
        )
    no_thinking = (args.chat_template_kwargs or {}).get("enable_thinking") is False
    if thinks and not no_thinking and args.max_completion_length < THINKING_TOKENS:
        warnings.append(
            f"this model thinks before it answers, and max_completion_length={args.max_completion_length} cuts most of "
            f"its completions; fix: max_completion_length={THINKING_TOKENS} or more, or "
            'chat_template_kwargs={"enable_thinking": false} where the template has it'
        )
    cuts = {"top_p": (args.top_p or 1.0) < 1.0, "top_k": bool(args.top_k), "min_p": bool(args.min_p)}
    if corrected and any(cuts.values()) and args.sampling_support == "off":
        names = " and ".join(f"{name}={getattr(args, name)}" for name, is_set in cuts.items() if is_set)
        warnings.append(
            f"with {names} the sampler's log-probs are normalised over the tokens that it keeps, the trainer's over "
            "all: the sampling correction is biased, and the check of the weight sync is off; fix: "
            "sampling_support='auto', which trains on the tokens that are kept"
        )
    return warnings


class Advice:
    """Reads the metrics of each optimizer step."""

    def __init__(self, args: GRPOConfig) -> None:
        self.args, self.given = args, set[str]()
        self.truncated = deque[float](maxlen=TRUNCATED_STEPS)
        self.in_a_row = dict.fromkeys(REPEATED, 0)
        self.first_differences = list[float]()
        self.differences = deque[float](maxlen=GROWTH_STEPS)

    def __call__(self, metrics: Mapping[str, object]) -> list[str]:
        """The warnings that this step is the first to justify."""
        equal, calls = metric(metrics, "groups_with_equal_rewards"), metric(metrics, "tools/call_frequency")
        is_so = {
            "equal": equal == 1.0 and self.args.distillation_coef == 0,
            "gradient": metric(metrics, "grad_norm") == 0.0 and equal is not None and equal < 1.0,
            "uncalled": calls == 0,
            "failed": bool(calls) and metric(metrics, "tools/failure_frequency") == 1.0,
        }
        self.in_a_row = {name: (self.in_a_row[name] + 1) * is_now for name, is_now in is_so.items()}
        repeated = (name for name, steps in self.in_a_row.items() if steps >= EQUAL_STEPS)
        warnings = {
            "truncated": self._truncated(metric(metrics, "completions/clipped_ratio")),
            **{name: f"in {EQUAL_STEPS} steps {REPEATED[name]}" for name in repeated},
            "difference": self._difference(metric(metrics, "sampling/sampling_logp_difference/mean")),
        }
        new = {name: text for name, text in warnings.items() if text is not None and name not in self.given}
        self.given |= new.keys()
        return list(new.values())

    def _truncated(self, share: float | None) -> str | None:
        self.truncated.extend([] if share is None else [share])
        mean = sum(self.truncated) / TRUNCATED_STEPS
        if len(self.truncated) < TRUNCATED_STEPS or mean <= TRUNCATED_SHARE:
            return None
        limit = self.args.max_completion_length
        return (
            f"{mean:.0%} of the completions of {TRUNCATED_STEPS} steps were cut at max_completion_length={limit}, "
            f"before they could give an answer; fix: max_completion_length={4 * limit} (thinking models need "
            "thousands of tokens), or a prompt that asks for short answers"
        )

    def _difference(self, mean: float | None) -> str | None:
        if mean is None:
            return None
        self.differences.append(mean)
        if len(self.first_differences) < GROWTH_STEPS:
            self.first_differences.append(mean)
        first_mean, last_mean = (sum(values) / GROWTH_STEPS for values in (self.first_differences, self.differences))
        is_full = len(self.differences) == GROWTH_STEPS
        if not is_full or last_mean < LEAST_DIFFERENCE or last_mean < min(GROWTH * first_mean, FAR_DIFFERENCE):
            return None
        fix = "" if self.args.off_policy_mask_threshold is not None else "off_policy_mask_threshold=0.05, "
        if self.args.generate_ahead > 1 and self.args.generate_ahead_max_kl is None:
            fix += "generate_ahead_max_kl=0.001, "
        return (
            f"the log-probs of sampler and trainer differ by {short_number(last_mean)} nats on average "
            f"({short_number(first_mean)} in the first steps): what is trained and what is sampled are far apart; fix: "
            f"{fix}a lower learning_rate, fewer num_iterations or steps_per_generation, or the engine in fp32"
        )
