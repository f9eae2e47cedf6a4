"""What the options of a run become: the form that has their type, and what follows from them.

A user may write a mapping as JSON, or a number of steps as a share of all. What callbacks of transformers read from
their `args` beside the fields of `GRPOConfig` is here too.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fused_grpo.errors import InputError
from fused_grpo.trainer.common.redaction import redacted
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.trl_fields import MISSING

if TYPE_CHECKING:
    from accelerate import PartialState

# Sampling options that `generation_kwargs` replaces, as in TRL.
OVERRIDDEN = {"top_p", "top_k", "min_p", "repetition_penalty"}
# Those of the command line too, which a YAML file may write as a shell reads them.
PATHS = (
    "output_dir resume_from_checkpoint model teacher_model dataset eval_dataset reward_funcs tools environment_factory"
)


class DerivedOptions:
    """The base of `GRPOConfig`: the arithmetic of a generated batch, and the properties of transformers' arguments."""

    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int
    num_iterations: int
    num_generations: int
    steps_per_generation: int | None
    generation_batch_size: int | None
    dynamic_sampling: int
    batch_invariant: bool
    save_strategy: str
    save_steps: float
    save_total_limit: int | None
    use_cpu: bool
    ddp_backend: str | None
    ddp_timeout: int

    @property
    def sequences_per_micro_batch(self) -> int:
        """How many are computed at a time, where no number of tokens limits them."""
        return 1 if self.batch_invariant else self.per_device_train_batch_size

    def micro_batches_per_generation(self, num_processes: int) -> int:
        """`steps_per_generation`, from `generation_batch_size` where that is given, rounded up to optimizer steps.

        Until the weights change, one generation samples what several would. Otherwise rounding is another run than
        TRL's, in which an optimizer step may use parts of two generated batches: a warning says so, once. InputError
        for a `generation_batch_size` that is no whole number of micro-batches.
        """
        step, given = self.gradient_accumulation_steps, f"steps_per_generation={self.steps_per_generation}"
        count, rest = self.steps_per_generation or step, 0
        if self.generation_batch_size is not None:
            given = f"generation_batch_size={self.generation_batch_size}"
            count, rest = divmod(self.generation_batch_size, self.per_device_train_batch_size * num_processes)
        if rest or not count:
            raise InputError(
                f"got {given}, want a multiple of {self.per_device_train_batch_size} sequences on each of "
                f"{num_processes} process(es); fix: leave it out, or change one of the others"
            )
        rounded = -(-count // step) * step
        if count % step and (self.num_iterations > 1 or step % count):
            warn_once(
                f"got {given} with gradient_accumulation_steps={step} and num_iterations={self.num_iterations}: a "
                f"generation has {rounded} micro-batches instead of {count}, since an optimizer step uses one "
                f"generated batch; fix: a multiple of {step} micro-batches"
            )
        return rounded

    def optimizer_steps_per_generation(self, num_processes: int) -> int:
        """Optimizer steps of one pass over a generated batch; there are `num_iterations` passes."""
        return self.micro_batches_per_generation(num_processes) // self.gradient_accumulation_steps

    def prompts_per_generation(self, num_processes: int) -> int:
        """Prompts of a generated batch, over all processes; InputError where its sequences are no whole groups."""
        steps = self.optimizer_steps_per_generation(num_processes)
        step = self.per_device_train_batch_size * self.gradient_accumulation_steps * num_processes
        sequences = step * steps
        if sequences % self.num_generations:
            lower = sequences // self.num_generations * self.num_generations
            options = " or ".join(str(size) for size in (lower, lower + self.num_generations) if size)
            raise InputError(
                f"got an effective batch of {self.per_device_train_batch_size} (per_device_train_batch_size) * "
                f"{self.gradient_accumulation_steps} (gradient_accumulation_steps) * {num_processes} process(es) = "
                f"{step} sequences with {steps} optimizer step(s) per generation, want a multiple of "
                f"num_generations={self.num_generations}; fix: make the product {options}"
            )
        return sequences // self.num_generations

    def group_part(self, num_processes: int) -> int:
        """Completions of a prompt that one process samples: a group, or the part of it that fits into its share.

        InputError as `prompts_per_generation`; or for `dynamic_sampling` with groups over several processes.
        """
        self.prompts_per_generation(num_processes)
        share = self.per_device_train_batch_size * self.micro_batches_per_generation(num_processes)
        part = math.gcd(share, self.num_generations)
        if self.dynamic_sampling and part < self.num_generations:
            raise InputError(
                f"got dynamic_sampling={self.dynamic_sampling} with {share} sequences on each of {num_processes} "
                f"process(es), want whole groups of num_generations={self.num_generations} on each, which it replaces; "
                "fix: a larger per_device_train_batch_size or gradient_accumulation_steps, or dynamic_sampling=0"
            )
        return part

    def prompts_per_process(self, num_processes: int) -> int:
        """Prompts that each process completes `group_part` times in a generated batch."""
        part = self.group_part(num_processes)
        return self.prompts_per_generation(num_processes) * self.num_generations // part // num_processes

    @property
    def world_size(self) -> int:
        """Number of processes, as the launcher sets it."""
        return _launched("WORLD_SIZE", 1)

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return _launched("RANK", 0)

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return _launched("LOCAL_RANK", 0)

    @property
    def should_save(self) -> bool:
        """Whether this process writes files, and logs."""
        return self.process_index == 0

    should_log = should_save

    def most_checkpoints(self, max_steps: int, epochs: float) -> int:
        """How many a run of so many steps and epochs has at a time; with save_strategy="best" at least."""
        by_steps = math.ceil(max_steps / whole_steps(self.save_steps, max_steps))
        saved = {"no": 0, "steps": by_steps, "epoch": math.ceil(epochs)}.get(self.save_strategy, 1)
        # The newest is written before the oldest is removed.
        return min(saved, self.save_total_limit + 1) if self.save_total_limit else saved

    @property
    def distributed_state(self) -> PartialState:
        """Accelerate's state of this process; it connects the processes when it is first read."""
        from accelerate import PartialState

        return PartialState(self.trains_on_cpu, **self.process_group_options())

    @property
    def trains_on_cpu(self) -> bool:
        """Whether no accelerator is used, without which Accelerate would let every rank train by itself."""
        from torch import accelerator

        return self.use_cpu or not accelerator.is_available()

    def process_group_options(self) -> dict[str, Any]:
        """Its timeout, and its backend where `ddp_backend` says which. A process without a launcher has no group."""
        sizes = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
        is_launched = "LOCAL_RANK" in os.environ or any(os.environ.get(name, "1") != "1" for name in sizes)
        backend = {"backend": self.ddp_backend} if is_launched and self.ddp_backend is not None else {}
        return {"timeout": timedelta(seconds=self.ddp_timeout), **backend}

    @property
    def device(self) -> Any:
        """The device of this process."""
        return self.distributed_state.device

    @property
    def n_gpu(self) -> int:
        """GPUs that this process uses."""
        return int(not self.trains_on_cpu)

    @property
    def parallel_mode(self) -> Any:
        """A `transformers.training_args.ParallelMode`."""
        from transformers.training_args import ParallelMode

        return ParallelMode.NOT_PARALLEL if self.world_size == 1 else ParallelMode.DISTRIBUTED

    if not TYPE_CHECKING:  # for which every name would be one

        def __getattr__(self, name: str) -> Any:
            """The other methods and properties of transformers' arguments, such as `train_batch_size`."""
            from transformers import TrainingArguments

            attribute = None if name.startswith("_") else inspect.getattr_static(TrainingArguments, name, None)
            if not hasattr(attribute, "__get__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return attribute.__get__(self, type(self))

    def to_dict(self) -> dict[str, Any]:
        """The options that have an effect here as JSON, without secrets and home directories."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # of the dataclass that inherits
        values = redacted({field.name: getattr(self, field.name) for field in fields if field.name not in MISSING})
        assert isinstance(values, dict)
        return values

    def to_json_string(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` with plain values only, all others as text: for trackers of hyperparameters."""
        return {
            name: value if type(value) in (bool, int, float, str) else str(value)
            for name, value in self.to_dict().items()
        }


def _launched(name: str, default: int) -> int:
    """A number that a launcher sets."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise InputError(f"got the variable {name}={value!r}, want a number, as launchers set it; fix: unset {name}")
    return int(value)


def normalise(args: Any, mappings: Iterable[str]) -> None:
    """Bring options into the form that has their type, before types are checked; `mappings` are names of options.

    InputError for text that is not JSON of a mapping, or trackers without names.
    """
    scale = _as_bool(args.scale_rewards)
    args.scale_rewards = ("group" if scale else "none") if isinstance(scale, bool) else scale
    args.resume_from_checkpoint = _as_bool(args.resume_from_checkpoint)
    args.eval_delay = 0 if args.eval_delay is None else args.eval_delay  # by `set_evaluate` of transformers
    if not isinstance(args.report_to, str | list | tuple | None):
        raise InputError(f"got report_to={args.report_to!r}, want the names of trackers")
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    args.report_to = [name for name in trackers if name != "none"]
    if hasattr(weights := args.reward_weights, "tolist"):  # torch's or NumPy's
        weights = weights.tolist()
    args.reward_weights = list(weights) if isinstance(weights, tuple) else weights
    for name in PATHS.split():
        given = getattr(args, name, None)
        if isinstance(given, os.PathLike | str):
            setattr(args, name, os.path.expanduser(given))  # as transformers; `to_dict` writes "~"
        elif isinstance(given, list):
            setattr(args, name, [os.path.expanduser(one) if isinstance(one, str) else one for one in given])
    for name in mappings:
        given = mapping(name, getattr(args, name))
        if isinstance(given, dict) and "torch_dtype" in given:  # the name of `dtype` before transformers 5
            given = {"dtype": given["torch_dtype"], **given}
            del given["torch_dtype"]
        setattr(args, name, given)
    for name in ("checkpointing", "checkpointing_kwargs"):
        if getattr(args, f"activation_{name}") is not None:
            setattr(args, f"gradient_{name}", getattr(args, f"activation_{name}"))
    given = args.generation_kwargs if isinstance(args.generation_kwargs, dict) else {}
    for name in OVERRIDDEN.intersection(given):
        setattr(args, name, given[name])
    if args.optim_target_modules == ["all-linear"]:  # as the command line reads it
        args.optim_target_modules = "all-linear"
    if args.vllm_importance_sampling_cap not in (None, args.vllm_importance_sampling_clip_max):  # once
        fix = "fix: set vllm_importance_sampling_clip_max"
        warnings.warn(f"vllm_importance_sampling_cap is deprecated; {fix}", FutureWarning, stacklevel=6)
        args.vllm_importance_sampling_clip_max = args.vllm_importance_sampling_cap


def complete_intervals(args: Any) -> None:
    """Names of strategies as text, whole numbers of steps as int, and the values that None stands for."""
    # A script for TRL looks for "no" where it sets nothing.
    if args.eval_at_ends is None:
        args.eval_at_ends = args.eval_strategy is None
    args.eval_strategy = args.eval_strategy or "no"
    for name in ("logging", "eval", "save"):
        chosen, steps = getattr(args, f"{name}_strategy"), getattr(args, f"{name}_steps")
        # It may be a member of transformers' IntervalStrategy.
        setattr(args, f"{name}_strategy", str(getattr(chosen, "value", chosen)))
        if isinstance(steps, float) and steps >= 1 and steps.is_integer():
            setattr(args, f"{name}_steps", int(steps))
    args.do_eval = args.do_eval or args.eval_strategy != "no"  # as in transformers: a script may read it
    if args.eval_strategy == "steps" and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def fill_loader_options(args: Any, *, stream: bool) -> None:
    """Set the options of TRL's that load rows to what its trainer makes of them, for scripts that read them.

    InputError for a `stream` that one process would read for all.
    """
    from transformers.trainer_pt_utils import AcceleratorConfig

    given = args.accelerator_config
    config = AcceleratorConfig(**given) if isinstance(given, Mapping) else given or AcceleratorConfig()
    if stream:
        if config.dispatch_batches:
            raise InputError(
                "got a stream and accelerator_config with dispatch_batches=True, want each process to read its own "
                "rows: Iterable datasets require `dispatch_batches=False`; fix: leave it out"
            )
        config.dispatch_batches, args.dataloader_num_workers = False, 0
    args.accelerator_config = config


def whole_steps(steps: float, max_steps: int) -> int:
    """A number of steps, which may be given as a share of all steps."""
    return math.ceil(steps * max_steps) if steps < 1 else int(steps)


def _as_bool(value: Any) -> Any:
    """True or False for their text, and any other value as it is."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A mapping, or the JSON of one, as in TRL; InputError for other text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"got {name}={value[:200]!r}, which is not JSON ({error}); want a JSON object") from error
    if not isinstance(parsed, dict):
        raise InputError(f"got {name}={value[:200]!r}, want a JSON object, or a mapping")
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if repeated := [name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1]:
        raise ValueError(f"{repeated[0]!r} is there twice")
    return dict(pairs)
