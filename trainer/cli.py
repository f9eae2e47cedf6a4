"""The command line: `fused-grpo train` and `fused-grpo env`.

`fused-grpo train` without a model trains the embedded arithmetic task, so the whole path can be seen on any machine
with one command. Options are the fields of `GRPOConfig`; `--help` shows their docstrings.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
import tyro
import yaml

from fused_grpo.errors import FusedGRPOError, InputError
from fused_grpo.trainer.config import GRPOConfig

RECIPES = Path(__file__).parent / "recipes"
USAGE = """usage: fused-grpo {train,env} [options]

  train   train a model with GRPO; without --model, the built-in arithmetic task (fused-grpo train --help)
  env     what this machine offers: versions, devices, which implementations can run
"""


@dataclass(kw_only=True)
class TrainOptions(GRPOConfig):
    """Train a causal language model with GRPO. Without --model: the built-in arithmetic task."""

    model: str | None = None
    """Path or hub id of the model. None: the built-in arithmetic task, with a model made on the spot."""
    dataset: str | None = None
    """Path (.jsonl, .json, .csv, .parquet) or hub id of the prompts: a "prompt" column, others go to the rewards."""
    dataset_split: str = "train"
    """Split of a hub dataset."""
    eval_dataset: str | None = None
    """Path or hub id of held-out prompts."""
    eval_dataset_split: str = "test"
    """Split of a hub dataset of held-out prompts."""
    reward_funcs: list[str] = dataclasses.field(default_factory=list)
    """Reward functions as module:name or path.py:name."""
    config: str | None = None
    """A YAML file with values for these options. The command line wins over it."""

    def trainer_args(self) -> GRPOConfig:
        return GRPOConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(GRPOConfig)})


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `fused-grpo` script. Errors of ours end it with their message and status 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        match arguments[:1]:
            case ["train"]:
                train(parse_train_options(arguments[1:]))
            case ["env"]:
                print_environment()
            case [] | ["-h"] | ["--help"]:
                print(USAGE, end="")
            case [unknown]:
                raise InputError(f"got the command {unknown!r}, want 'train' or 'env'")
    except FusedGRPOError as error:
        sys.exit(f"fused-grpo: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit("fused-grpo: interrupted")


def parse_train_options(arguments: Sequence[str]) -> TrainOptions:
    """Options from the command line, over those of a YAML file, over the defaults (of the demo, without a model)."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--config":
            values = read_yaml(Path(value or "".join(arguments[position + 1 : position + 2])))
    has_model = "model" in values or any(argument.split("=")[0] == "--model" for argument in arguments)
    default = TrainOptions() if has_model else TrainOptions(**read_yaml(RECIPES / "demo.yaml"))
    return tyro.cli(TrainOptions, args=[*as_arguments(values), *arguments], default=default, prog="fused-grpo train")


def as_arguments(values: dict[str, Any]) -> list[str]:
    """The values of a YAML file as the command line would have them, so that one parser checks both."""
    types, arguments = get_type_hints(TrainOptions), list[str]()
    for name, value in values.items():
        option = name.replace("_", "-")
        if types[name] is bool and isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return arguments


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file.

    Raises:
        InputError: no such file, not a mapping, or an option that does not exist.
    """
    if not path.is_file():
        raise InputError(f"got --config {path}, want a YAML file that exists")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise InputError(f"got {path}, which is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"got {path} holding {type(values).__name__}, want a mapping of option names to values")
    known = {field.name for field in dataclasses.fields(TrainOptions)}
    if unknown := sorted(set(values) - known):
        raise InputError(
            f"got unknown option(s) {', '.join(map(repr, unknown))} in {path}; see fused-grpo train --help"
        )
    return values


def train(options: TrainOptions) -> None:
    """Run what the options ask for."""
    from transformers.utils.logging import disable_progress_bar

    from fused_grpo.trainer.checkpoint import check_output_dir

    disable_progress_bar()  # bars for single files, between our own lines

    # Before anything slow: a demo that has made its model should not then find its directory taken.
    options.prompts_per_process(num_processes=1)
    check_output_dir(Path(options.output_dir), overwrite=options.overwrite_output_dir, keep=options.model)
    if options.model is None:
        train_demo(options)
    else:
        train_given(options)


def train_demo(options: TrainOptions) -> None:
    """The embedded default. Its last line is the held-out accuracy before and after."""
    from fused_grpo.trainer.loop import GRPOTrainer
    from fused_grpo.trainer.recipes import arithmetic

    if options.dataset or options.reward_funcs:
        raise InputError("got a dataset or reward functions without --model; fix: pass --model too")
    if not torch.cuda.is_available():
        # A model this small gains nothing from a second thread, and loses a lot where the cores are shared.
        torch.set_num_threads(1)
    print("no --model given: making a small one for the built-in arithmetic task", flush=True)
    splits = arithmetic.build_splits()
    model, tokenizer = arithmetic.make_base_model(on_progress=lambda line: print(f"  {line}", flush=True))
    trainer = GRPOTrainer(
        model,
        arithmetic.accuracy_reward,
        options.trainer_args(),
        splits.train,
        eval_dataset=splits.heldout,
        processing_class=tokenizer,
    )
    result = trainer.train()
    assert result.eval_before is not None
    assert result.eval_after is not None
    print(f"report: {result.report}")
    print(f"held-out accuracy: {result.eval_before['reward']:.3f} -> {result.eval_after['reward']:.3f}")


def train_given(options: TrainOptions) -> None:
    """A model, a dataset and reward functions of the user's."""
    from fused_grpo.trainer.data import load_rows
    from fused_grpo.trainer.loop import GRPOTrainer

    assert options.model is not None
    if options.dataset is None or not options.reward_funcs:
        raise InputError("got --model without --dataset and --reward-funcs, want all three")
    rewards = [load_function(name) for name in options.reward_funcs]
    held_out = (
        None if options.eval_dataset is None else load_rows(options.eval_dataset, split=options.eval_dataset_split)
    )
    rows = load_rows(options.dataset, split=options.dataset_split)
    GRPOTrainer(options.model, rewards, options.trainer_args(), rows, eval_dataset=held_out).train()


def load_function(name: str) -> Callable[..., Any]:
    """`module:name` or `path.py:name`.

    Raises:
        InputError: not of that form, or nothing callable there.
    """
    source, _, attribute = name.rpartition(":")
    if not source:
        raise InputError(f"got reward function {name!r}, want module:name or path.py:name")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")  # modules beside the user, as `python -m` finds them
            module = importlib.import_module(source)
        function: Callable[..., Any] = getattr(module, attribute)
    except Exception as error:  # whatever the file does when it runs
        raise InputError(f"got reward function {name!r}, which cannot be loaded: {error}") from error
    if not callable(function):
        raise InputError(f"got reward function {name!r}, which is a {type(function).__name__}, want something callable")
    return function


def print_environment() -> None:
    from fused_grpo.env import environment

    for name, value in environment().items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
