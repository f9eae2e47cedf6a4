"""`Events`: the callbacks of a run, the state and control that they share, and the history of its log.

The events come in the order of `transformers.Trainer`. `DefaultFlowCallback` of transformers decides when to log, to
evaluate and to save; `EvaluateBetweenEnds` and the loop decide it for our own `eval_at_ends`.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from accelerate import Accelerator
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from fused_grpo.errors import InputError, quoted
from fused_grpo.trainer.common.formatting import to_json
from fused_grpo.trainer.common.process_state import process_kept
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.run_output import RunOutput, StepMetrics

_log = logging.getLogger(__name__)


class EvaluateBetweenEnds(TrainerCallback):
    """With `eval_at_ends`: evaluates every `eval_steps`, if that is set, but after the last step."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        at_ends, step = args.eval_at_ends and args.eval_strategy == "no", state.global_step
        if at_ends and args.eval_steps and args.eval_delay <= step < state.max_steps:
            control.should_evaluate |= step % state.eval_steps == 0


# What CallbackHandler gives to every event, and to some beside that.
GIVEN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
BESIDE = {"on_log": ("logs",), "on_evaluate": ("metrics",)}
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_") and name != "on_predict")


_SUSPENDED = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def keys_of_best(name: str) -> tuple[str, str]:
    """The names in an evaluation that `metric_for_best_model` may mean, transformers' choice first.

    The second is a metric without "eval_", which a subclass added, or one of an eval set that is called "eval".
    """
    return (name, f"eval_{name}") if name.startswith("eval_") else (f"eval_{name}", name)


def check_callback(callback: Any) -> None:
    """InputError unless every event can be called as transformers' handler does; most are called after hours."""
    for event in EVENTS:
        method = getattr(callback, event, None)
        try:
            signature = inspect.signature(method)  # type: ignore[arg-type]
            signature.bind(None, None, None, **dict.fromkeys((*GIVEN, *BESIDE.get(event, ()))))
            if any(kind(method) for kind in _SUSPENDED):
                raise TypeError("it is a coroutine or a generator, which would not run")
        except ValueError:  # of a function that does not say what it takes
            continue
        except TypeError as error:
            raise InputError(
                f"got a callback {type(callback).__name__} whose {event} cannot be called ({error}), want a method "
                "(self, args, state, control, **kwargs) for each event; fix: a subclass of transformers.TrainerCallback"
            ) from error


# Events of a step that has begun and not ended.
IN_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
# Fields of a TrainerState that are read after callbacks have been called.
STATE_KINDS = {"log_history": list, "global_step": int, "max_steps": int, "epoch": int | float | None}


class CheckedHandler(CallbackHandler):
    """transformers' own, that names a callback which cannot be called, or returns something else than the control."""

    def add_callback(self, callback: Any) -> None:
        made = callback() if isinstance(callback, type) else callback
        check_callback(made)
        super().add_callback(made)  # type: ignore[no-untyped-call]

    def call_event(self, event: str, args: Any, state: Any, control: Any, **values: Any) -> TrainerControl:
        values |= {name: getattr(self, name) for name in GIVEN}
        for callback in self.callbacks:
            result = getattr(callback, event)(args, state, control, **values)
            if not isinstance(result, TrainerControl | None):
                raise InputError(
                    f"got {quoted(result, 200)} from the {event} of a callback, want None or the control; fix: return "
                    f"nothing there (in {type(callback).__name__})"
                )
            control = control if result is None else result
        return cast(TrainerControl, control)


class Events:
    """Calls the callbacks of a run, and keeps what they and its log share.

    Every event gets what is `shown`: the model, tokenizer, optimizer and schedule. `log` makes an entry by the
    trainer's method of that name, which a subclass may override.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        callbacks: Iterable[Any],
        *,
        max_steps: int,
        shown: Iterable[Any],
        log: Callable[..., None],
    ) -> None:
        self.args, self.accelerator, self.max_steps, self.log = args, accelerator, max_steps, log
        own = [DefaultFlowCallback, *[EvaluateBetweenEnds] * bool(args.eval_at_ends and args.eval_steps)]
        self.handler = CheckedHandler([*own, *callbacks], *shown)  # type: ignore[no-untyped-call]
        self.control = TrainerControl()
        self.begin(None, 0)

    def begin(self, saved: TrainerState | None, num_train_epochs: int, windows: dict[str, Any] | None = None) -> None:
        """Take the state at the start of a run: a new one, or that of a checkpoint, with the `windows` of its steps.

        InputError as `check_callback`.
        """
        for callback in self.handler.callbacks:
            check_callback(callback)
        self.state = TrainerState() if saved is None else saved
        if saved is not None and self.args.restore_callback_states_from_checkpoint:
            self._restore_callbacks()
        self.state.max_steps, self.state.num_train_epochs = self.max_steps, num_train_epochs
        self.state.compute_steps(self.args, self.max_steps)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.is_world_process_zero = bool(self.accelerator.is_main_process)
        self.state.is_local_process_zero = bool(self.accelerator.is_local_main_process)
        self.state.stateful_callbacks = self._callback_states()
        self.steps = StepMetrics()
        self.steps.windows = windows or self.steps.windows
        self.in_step = ""  # between two steps; else the last event of the one that is being made

    def __call__(self, name: str, **values: Any) -> None:
        """Call the event of every callback.

        InputError where one returns something else than nothing or the control, or leaves another kind of value in a
        field of the state.
        """
        if name in (*IN_STEP, "on_step_begin", "on_step_end"):
            self.in_step = name if name in IN_STEP else ""
        with process_kept(("gradients", "autocast")):  # what else it changes may be meant to stay
            self.control = getattr(self.handler, name)(self.args, self.state, self.control, **values)
        self.in_step = name if name == "on_step_begin" else self.in_step
        for field, kind in STATE_KINDS.items():
            if not isinstance(value := getattr(self.state, field), kind):
                got, want = f"state.{field}={quoted(value, 200)}", getattr(kind, "__name__", kind)
                raise InputError(
                    f"got {got} from the {name} of a callback, want {want}; fix: leave it, or change what is in it"
                )

    def saved_state(self) -> dict[str, Any]:
        """The state as a checkpoint has it."""
        self.state.stateful_callbacks = self._callback_states()
        # `asdict` would copy the log of a long run, which takes longer than to write it.
        saved = to_json({entry.name: getattr(self.state, entry.name) for entry in dataclasses.fields(self.state)})
        assert isinstance(saved, dict)
        return saved

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Add an entry to `state.log_history`, with its epoch, and show it to the callbacks."""
        entry["epoch"] = self.state.epoch
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self("on_log", logs=entry)

    def log_steps(self) -> None:
        """The entry of the steps since the last one, if a callback has asked for it; none where there was no step."""
        if self.control.should_log and (metrics := self.steps.take()):
            self.log(metrics, self.steps.start)

    def log_closing(self, output: RunOutput) -> dict[str, Any]:
        """The last entry of a run. Returns it without the metrics of steps."""
        per_step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        closing = self.steps.closing(per_step * self.accelerator.num_processes)
        output.track({"step": self.state.global_step} | closing)
        self.log(self.steps.take() | closing)
        return closing

    def evaluated(self, entry: dict[str, Any], sequences: int) -> None:
        """The entry of an evaluation, which is one `generate` call; transformers' events count its batches."""
        for _ in range(math.ceil(sequences / (self.args.per_device_eval_batch_size * self.accelerator.num_processes))):
            self("on_prediction_step")
        self.log(entry)
        self("on_evaluate", metrics=entry)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation with these is the best one, by `metric_for_best_model`; the state keeps which one was.

        `check_best_metric` has found it there.
        """
        name, rises = self.args.metric_for_best_model, self.args.greater_is_better
        keys = () if name is None else keys_of_best(name)
        value = next((metrics[key] for key in keys if isinstance(metrics.get(key), int | float)), None)
        if value is None:  # also of an evaluation in which nothing was scored
            return False
        if self.state.best_metric is None:
            self.state.best_metric = float("-inf" if rises else "inf")
        if not (value > self.state.best_metric if rises else value < self.state.best_metric):
            return False
        self.state.best_metric = value
        if self.args.save_strategy != "no":
            self.state.best_global_step = self.state.global_step
        return True

    def _callback_states(self) -> Any:
        stateful: Any = [one for one in [*self.handler.callbacks, self.control] if isinstance(one, ExportableState)]
        return TrainerState(stateful_callbacks=stateful).stateful_callbacks

    def _restore_callbacks(self) -> None:
        """Put the callbacks, and the control, into the state in which the checkpoint has those of the same class."""
        present: list[Any] = [*self.handler.callbacks, self.control]
        saved: Any = self.state.stateful_callbacks
        for kind, states in saved.items():
            same = [place for place, one in enumerate(present) if type(one).__name__ == kind]
            for place, values in zip(same, states if isinstance(states, list) else [states], strict=False):
                present[place] = type(present[place]).from_state({"args": {}, "attributes": {}, **values})
        *self.handler.callbacks, self.control = present
        if absent := saved.keys() - {type(one).__name__ for one in present}:
            names = ", ".join(sorted(absent))
            _log.warning("the checkpoint has the state of callbacks that this run has not: %s", names)
