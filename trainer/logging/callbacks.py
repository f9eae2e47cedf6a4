"""`WithCallbacks`: the callbacks of a trainer, its state and its log, with the code of transformers where that fits.

The events come in the order of `transformers.Trainer`. `DefaultFlowCallback` of transformers decides when to log, to
evaluate and to save; our own `eval_at_ends` is decided by `EvaluateBetweenEnds` and the loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from accelerate import Accelerator
from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from fused_grpo.trainer.common.redaction import to_json
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.run_output import LogEntry, RunOutput, StepMetrics


class EvaluateBetweenEnds(TrainerCallback):
    """With `eval_at_ends`: evaluates every `eval_steps`, if that is set, but after the last step."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        step = state.global_step
        at_ends = args.eval_at_ends and args.eval_strategy == "no"
        if at_ends and args.eval_steps and args.eval_delay <= step < state.max_steps:
            control.should_evaluate |= step % state.eval_steps == 0
        return control


class WithCallbacks:
    """The part of a trainer that calls callbacks and keeps the history of its log, under transformers' names."""

    args: GRPOConfig
    accelerator: Accelerator
    output: RunOutput
    learner: Any
    rewards: Any
    engine_name: Any
    max_steps: int

    def _init_callbacks(self, callbacks: Iterable[Any] | None, model: Any, processing_class: Any) -> None:
        """With the model, optimizer and schedule that are passed to every event."""
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, EvaluateBetweenEnds, *(callbacks or [])],
            model,
            processing_class,
            self.learner.optimizer,
            self.learner.scheduler,
        )
        self.control, self.state = TrainerControl(), TrainerState()
        self._prepare_state(None, 0)

    def _prepare_state(self, saved: TrainerState | None, num_train_epochs: int) -> None:
        """The state at the start of a run: a new one, or that of a checkpoint."""
        self.state = TrainerState() if saved is None else saved
        if saved is not None:
            self._load_callback_state()
        self.state.max_steps, self.state.num_train_epochs = self.max_steps, num_train_epochs
        self.state.compute_steps(self.args, self.max_steps)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.stateful_callbacks = self._callback_states()
        self.step_metrics, self.last_evaluation = StepMetrics(), dict[str, Any]()

    def _callback_states(self) -> Any:
        stateful: Any = [
            one for one in [*self.callback_handler.callbacks, self.control] if isinstance(one, ExportableState)
        ]
        return TrainerState(stateful_callbacks=stateful).stateful_callbacks

    def _saved_state(self) -> dict[str, Any]:
        """The state as a checkpoint has it."""
        self.state.stateful_callbacks = self._callback_states()
        saved = to_json(dataclasses.asdict(self.state))
        assert isinstance(saved, dict)
        return saved

    def event(self, name: str, **values: Any) -> None:
        """Call every callback."""
        self.control = getattr(self.callback_handler, name)(self.args, self.state, self.control, **values)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Make an entry of `state.log_history` and show it to the callbacks.

        Trackers and metrics.jsonl get what they do not have yet. They have every step and every evaluation already.

        Args:
            logs: numbers by name; the epoch is added.
            start_time: not used, as in TRL.
        """
        written = logs.written if isinstance(logs, LogEntry) else frozenset()
        if added := {name: value for name, value in logs.items() if name not in written}:
            self.output.numbers(self.state.global_step, added)
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.event("on_log", logs=logs)

    def _log_steps(self) -> None:
        """The entry of the steps since the last one; none where there was no step."""
        if metrics := self.step_metrics.take():
            self.log(LogEntry(metrics), self.step_metrics.start)

    def _log_evaluation(self, entry: LogEntry, num_prompts: int) -> None:
        """The entry of an evaluation, which is one `generate` call; transformers' events count its batches."""
        sequences = num_prompts * (self.args.num_generations_eval or 1)
        for _ in range(math.ceil(sequences / (self.args.per_device_eval_batch_size * self.accelerator.num_processes))):
            self.event("on_prediction_step")
        self.log(entry)
        of_this_step = self.last_evaluation if self.last_evaluation.get("step") == self.state.global_step else {}
        self.last_evaluation = {**of_this_step, **entry, "step": self.state.global_step}
        self.event("on_evaluate", metrics=dict(entry))

    def _log_closing(self) -> dict[str, Any]:
        """The last entry of a run, without the metrics of steps."""
        per_step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        closing = self.step_metrics.closing(per_step * self.accelerator.num_processes)
        self.output.closing(self.state.global_step, closing)
        self.log(LogEntry(self.step_metrics.take() | closing))
        return closing

    # The first is whether an evaluation is the best one, which the state keeps.
    _determine_best_metric: Any = Trainer._determine_best_metric
    _load_callback_state: Any = Trainer._load_callback_state
    add_callback: Any = Trainer.add_callback
    pop_callback: Any = Trainer.pop_callback
    remove_callback: Any = Trainer.remove_callback
    log_metrics: Any = Trainer.log_metrics
    metrics_format: Any = staticmethod(Trainer.metrics_format)
    get_num_trainable_parameters: Any = Trainer.get_num_trainable_parameters
    save_metrics: Any = Trainer.save_metrics
    save_state: Any = Trainer.save_state

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return bool(self.accelerator.is_local_main_process)

    # What TRL's trainer copies from its options and its parts.
    optimizer: Any = property(attrgetter("learner.optimizer"))
    lr_scheduler: Any = property(attrgetter("learner.scheduler"))
    reward_funcs: Any = property(attrgetter("rewards.functions"))
    reward_func_names: Any = property(attrgetter("rewards.names"))
    reward_weights: Any = property(attrgetter("rewards.weights"))
    num_generations: Any = property(attrgetter("args.num_generations"))
    num_iterations: Any = property(attrgetter("args.num_iterations"))
    max_completion_length: Any = property(attrgetter("args.max_completion_length"))
    beta: Any = property(attrgetter("args.beta"))
    epsilon_low: Any = property(attrgetter("args.epsilon"))
    loss_type: Any = property(attrgetter("args.loss_type"))
    scale_rewards: Any = property(attrgetter("args.scale_rewards"))
    temperature: Any = property(attrgetter("args.temperature"))
    top_p: Any = property(attrgetter("args.top_p"))
    top_k: Any = property(attrgetter("args.top_k"))
    min_p: Any = property(attrgetter("args.min_p"))
    repetition_penalty: Any = property(attrgetter("args.repetition_penalty"))
    shuffle_dataset: Any = property(attrgetter("args.shuffle_dataset"))

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizers of reward models; None for functions."""
        return [getattr(function, "tokenizer", None) for function in self.rewards.functions]

    @property
    def epsilon_high(self) -> float:
        """Upper clip of the ratio."""
        return self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    @property
    def entropy_coef(self) -> float:
        """Coefficient of the entropy bonus now: with `use_adaptive_entropy` it moves."""
        return float(self.learner.entropy.coefficient)

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the router of a mixture of experts has a loss."""
        return bool(self.learner.router_coefficient)

    @property
    def use_vllm(self) -> bool:
        """Whether vLLM samples."""
        return bool(self.engine_name != "transformers")

    @property
    def ref_model(self) -> Any:
        """The reference model; None where there is none, or where it is the policy without its adapter."""
        reference = self.learner.reference
        return None if reference is None else self.accelerator.unwrap_model(reference).model
