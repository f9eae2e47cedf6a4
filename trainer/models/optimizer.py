"""The optimizer of a run, its schedule, and the controller of the entropy bonus."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, get_scheduler

from fused_grpo.config import number_fix
from fused_grpo.errors import InputError, UnavailableError, WrongTypeError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig

TRIED_STEPS = 20_000  # of a schedule; a third of a second


class EntropyController:
    """The coefficient of the entropy bonus, which `use_adaptive_entropy` moves to a target (arXiv:2505.22312).

    As TRL does it: after each step the coefficient rises where the step's mean entropy was at the target or below, and
    falls elsewhere; the bonus is applied in steps that follow one at the target or below.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self.args, self.coefficient = args, args.entropy_coef
        self.last_entropy: float | None = None

    @property
    def applied(self) -> float:
        """In the step to come."""
        is_low = self.last_entropy is not None and self.last_entropy <= self.args.entropy_target
        return self.coefficient if is_low else 0.0

    def update(self, entropy: float | None) -> dict[str, float]:
        """Update from the mean entropy of a step, in nats. Returns the metrics to log."""
        if entropy is None:
            return {}
        args, applied = self.args, self.applied
        move = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        self.coefficient = min(max(self.coefficient + move, args.entropy_coef_min), args.entropy_coef_max)
        self.last_entropy = entropy
        return {"entropy_coef": self.coefficient, "entropy_coef_applied": applied}

    def state(self) -> dict[str, float | None]:
        """As JSON."""
        return {"coefficient": self.coefficient, "last_entropy": self.last_entropy}

    def load_state(self, state: dict[str, float | None]) -> None:
        """The inverse of `state`."""
        self.coefficient, self.last_entropy = float(state["coefficient"] or 0.0), state["last_entropy"]


def check_pair(given: Any) -> None:
    """Raise WrongTypeError for no pair of an optimizer and its schedule, InputError for a schedule of another one."""
    pair = given if isinstance(given, tuple | list) else (given,)
    optimizer, schedule = pair if len(pair) == 2 else (given, given)
    has_steps = not isinstance(schedule, type) and all(
        callable(getattr(schedule, name, None)) for name in ("step", "get_last_lr", "state_dict", "load_state_dict")
    )
    if len(pair) != 2 or not isinstance(optimizer, torch.optim.Optimizer | None) or not (has_steps or schedule is None):
        got = ", ".join(one.__name__ if isinstance(one, type) else type(one).__name__ for one in pair)
        raise WrongTypeError(
            f"got {got} as optimizers, want an optimizer and its schedule; fix: (optimizer, schedule), with None for "
            "what the options ask for"
        )
    inner = getattr(optimizer, "optimizer", optimizer)  # of one that Accelerate has wrapped
    if getattr(schedule, "optimizer", inner) not in (inner, optimizer):
        raise InputError(
            f"got optimizers with a {type(schedule).__name__} of another optimizer, whose learning rate would never "
            "move, want one of the same pair; fix: make the schedule of the optimizer that is passed"
        )


def try_schedule(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Make the steps of a schedule and take them back, so that one which ends or fails before the run does says so now.

    InputError for that, and for a learning rate that is no finite number of at least 0.
    """
    groups, state, step = [dict(group) for group in optimizer.param_groups], copy.deepcopy(schedule.state_dict()), 0
    clones = [{name: one.clone() for name, one in group.items() if isinstance(one, Tensor)} for group in groups]
    try:
        with warnings.catch_warnings(action="ignore"):  # of a schedule that moves before its optimizer
            while step < min(steps, TRIED_STEPS):
                step += 1
                rates = [float(group["lr"]) for group in optimizer.param_groups]
                if not all(0 <= rate < math.inf for rate in rates):
                    raise ValueError(f"learning rates {rates}")
                schedule.step()
    except Exception as error:
        raise InputError(
            f"got a {type(schedule).__name__} that gives {type(error).__name__}: {error}, in step {step} of "
            f"{steps}, want a learning rate for each; fix: a schedule of that length"
        ) from error
    finally:
        schedule.load_state_dict(state)
        for group, first, tensors in zip(optimizer.param_groups, groups, clones, strict=True):
            group.clear()
            group.update(first)
            for name, tensor in tensors.items():  # such as a rate that is moved in place
                first[name].copy_(tensor)


def make_optimizer(model: torch.nn.Module, args: GRPOConfig) -> torch.optim.Optimizer:
    """The optimizer called `args.optim`, over the groups of parameters that transformers' Trainer makes.

    Biases and the parameters of norms do not decay. An optimizer with low-rank groups of its own (GaLore, APOLLO) has
    those.

    InputError for a model without trained parameters; UnavailableError where the package of that optimizer is not
    installed, or `optim_args` are not its own.
    """
    # The rule is transformers', which reads nothing of a trainer for it.
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trained = [(name in decaying, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("got a model without trained parameters, want some; fix: model.requires_grad_(True) of a part")
    groups = [
        {"params": [parameter for decays, parameter in trained if decays is wanted], "weight_decay": weight_decay}
        for wanted, weight_decay in ((True, args.weight_decay), (False, 0.0))
    ]
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
        for name in ("optim_args", "optim_target_modules"):
            with suppress(Exception):  # it needs them, or has tensors
                setattr(other := copy.copy(args), name, None)
                if getattr(args, name) and Trainer.get_optimizer_cls_and_kwargs(other, model) == (kind, options):  # type: ignore[arg-type]
                    warn_once(f"got {name}={getattr(args, name)!r} with optim={args.optim!r}, which does not read it")
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            optimizer = kind(options.pop("params", groups), **options)
        else:  # a factory, of an optimizer that is made of several
            optimizer = kind()(model, **options)
        if options.get("optim_bits") == 8 and "bitsandbytes" in str(kind):
            # The states of embeddings stay in 32 bits, since 8 would make them unstable.
            manager = import_module("bitsandbytes").optim.GlobalOptimManager.get_instance()
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):
                    manager.register_module_override(module, "weight", {"optim_bits": 32})
    except (ImportError, ValueError, TypeError, RuntimeError) as error:
        raise UnavailableError(
            f"got optim={args.optim!r} with optim_args={args.optim_args!r}, which cannot be made: {error}; "
            'fix: install its package, or set optim="adamw_torch_fused"'
        ) from error
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def make_schedule(optimizer: torch.optim.Optimizer, args: GRPOConfig, max_steps: int) -> Any:
    """The schedule `args.lr_scheduler_type`; InputError where `args.lr_scheduler_kwargs` are not its arguments."""
    warmup = args.warmup_steps if args.warmup_steps >= 1 else args.warmup_steps * max_steps
    options = args.lr_scheduler_kwargs
    if args.lr_scheduler_type == "constant" and (warmup or options):
        warn_once(
            f"got warmup_steps={args.warmup_steps} and lr_scheduler_kwargs={options!r} with "
            "lr_scheduler_type='constant', which has neither; fix: 'constant_with_warmup'"
        )
    elif warmup >= max_steps:
        warn_once(
            f"got warmup_steps={args.warmup_steps} in a run of {max_steps} steps, which ends before the learning rate "
            "is reached; fix: fewer, or a share below 1"
        )
    steps = {"num_warmup_steps": math.ceil(warmup), "num_training_steps": max_steps}
    try:
        return get_scheduler(args.lr_scheduler_type, optimizer, scheduler_specific_kwargs=options, **steps)
    except (TypeError, ValueError) as error:
        fixes = (number_fix(one, float) for one in (options or {}).values() if isinstance(one, str))
        raise InputError(
            f"got lr_scheduler_type={args.lr_scheduler_type!r} with lr_scheduler_kwargs={options!r}, want arguments of "
            f"that scheduler of transformers ({error}){next(filter(None, fixes), '; fix: lr_scheduler_kwargs')}"
        ) from error
