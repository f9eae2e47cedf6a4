"""The command line: `fused-grpo train`, `recipes`, `tasks`, `rewards`, `report`, `bench` and `env`.

`fused-grpo train` without a model trains the built-in arithmetic task, so the whole path can be seen on any machine
with one command. Its options are in `options.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fused_grpo.errors import DataError, FusedGRPOError, InputError
from fused_grpo.trainer import extra_installed

if TYPE_CHECKING:
    from fused_grpo.trainer.cli.inputs import Inputs
    from fused_grpo.trainer.cli.options import TrainOptions

USAGE = """usage: fused-grpo {train,recipes,tasks,rewards,report,bench,env} [options]

  train        train a model with GRPO; without --model, the built-in task
               (--help: all options; --dry-run: options, batch and memory of a
               run that is not started)
  recipes      names for train --config, and configurations for accelerate
  tasks [NAME] names for train --task; of one, its options
  rewards      names for train --reward-funcs
  report DIR   write report.html again from the logs of the run in DIR
  bench        time and memory of the ops and the trainer on this machine
               (fused-grpo bench --help)
  env          versions, devices, and which implementations can run here

  fused-grpo train --model Qwen/Qwen2.5-0.5B-Instruct \\
      --dataset questions.jsonl --prompt-column question \\
      --answer-column answer --reward-funcs accuracy
  fused-grpo train --model Qwen/Qwen2.5-0.5B-Instruct \\
      --task reasoning_gym:chain_sum --task-options max_terms=3
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `fused-grpo` script. Errors of ours end it with their message and status 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            with extra_installed():
                run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # `fused-grpo train --help | head` has read what it wants. The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # what a shell reports for a program that SIGPIPE has ended
    except FusedGRPOError as error:
        sys.exit(f"fused-grpo: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit("fused-grpo: interrupted")


def run(arguments: Sequence[str]) -> None:
    """Run a command, or raise InputError. Each imports what it needs, so that `env` works in any environment."""
    match arguments:
        case ["train", *options]:
            train(options)
        case ["report", directory] if not directory.startswith("-"):
            from fused_grpo.trainer.logging.report import write_report

            print(write_report(Path(directory)))
        case ["report", *_]:
            raise InputError("got no directory of a run, want one; fix: fused-grpo report runs/demo")
        case ["recipes"]:
            print_recipes()
        case ["tasks", *names] if len(names) <= 1:
            from fused_grpo.trainer.tasks.named import task_lines

            print("\n".join(task_lines(*names)))
        case ["rewards"]:
            print_rewards()
        case ["bench", *options]:
            # By name, because bench/ is above this floor; it needs pytest.
            sys.exit(importlib.import_module("fused_grpo.bench.__main__").main(options))
        case ["env"]:
            from fused_grpo.env import environment

            for name, value in environment().items():
                print(f"{name:14} {value}")
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
        case [unknown, *_]:
            raise InputError(f"got the command {unknown!r}, want train, recipes, tasks, rewards, report, bench or env")


def train(arguments: Sequence[str]) -> None:
    """Train with these options, or show them (`--dry-run`)."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    from fused_grpo.trainer.checkpoint.output_dir import check_output_dir
    from fused_grpo.trainer.cli.inputs import check_combination
    from fused_grpo.trainer.cli.options import parse_train_options

    options = parse_train_options(arguments)
    disable_progress_bar()  # of weights, between our own lines
    if sys.stderr.isatty():
        enable_progress_bars()  # of downloads
    # Before anything slow: the output directory is checked before a model is loaded.
    options.prompts_per_process(num_processes=options.world_size)
    check_combination(options)
    if options.dry_run:
        from fused_grpo.trainer.cli.dry_run import dry_run

        for part in dry_run(options, lambda: load_inputs(options)) if options.should_log else ():
            say(part)
        return
    check_output_dir(
        Path(options.output_dir),
        resume=bool(options.resume_from_checkpoint),
        overwrite=options.overwrite_output_dir,
        keep=options.model,
    )
    train_model(options)


def train_model(options: TrainOptions) -> None:
    """Train the user's model, or the built-in one. Of a task, the last line has the held-out mean before and after."""
    from fused_grpo.trainer.loop import GRPOTrainer
    from fused_grpo.trainer.tasks.task import interval

    if options.model is None:
        if not torch.cuda.is_available():
            # A model this small gains nothing from a second thread, and loses a lot where the cores are shared.
            torch.set_num_threads(1)
        say("no --model given: training the small one of the built-in arithmetic task")
    inputs = load_inputs(options)
    trainer = GRPOTrainer(
        inputs.model,
        inputs.reward_funcs,
        options.trainer_args(),
        inputs.train,
        inputs.heldout,
        inputs.processing_class,
        peft_config=options.peft_config(),
        teacher_model=options.teacher_model,
    )
    result = trainer.train()
    trainer.accelerator.state.destroy_process_group()  # `end_training` would end the trackers a second time
    if inputs.task is not None and result.eval_before is not None and result.eval_after is not None:
        means = [of["reward"] for of in (result.eval_before, result.eval_after)]
        count = len(inputs.task.heldout)
        if all(0 <= mean <= 1 for mean in means):
            say(f"95 % intervals: {' -> '.join('{:.3f} to {:.3f}'.format(*interval(mean, count)) for mean in means)}")
        say(f"held-out {inputs.task.measures}: {means[0]:.3f} -> {means[1]:.3f}")


def load_inputs(options: TrainOptions) -> Inputs:
    """The model, the rewards, and the rows to train on and held-out ones, or None where no option names any."""
    from fused_grpo.trainer.cli.inputs import Inputs, load_task
    from fused_grpo.trainer.models import smollm2

    task = load_task(options)
    if task is None:
        train = load_prompts(options, held_out=False)
        heldout = None if options.eval_dataset is None else load_prompts(options, held_out=True)
    else:
        train, heldout = task.train, task.heldout or None
    if options.model is None:
        assert task is not None
        assert task.load_model is not None
        model, tokenizer = task.load_model()
    else:
        model = str(smollm2.model_folder()) if options.model == smollm2.NAME else options.model
        tokenizer = load_tokenizer(model, options)
    return Inputs(
        model=model,
        processing_class=tokenizer,
        reward_funcs=options.reward_funcs if task is None else [task.reward, *options.reward_funcs],
        train=in_format(train, options, tokenizer),
        heldout=in_format(heldout, options, tokenizer),
        task=task,
    )


def load_tokenizer(model: str, options: TrainOptions) -> Any:
    """The tokenizer of the model, which is needed before the trainer loads one: it says what form prompts have."""
    from fused_grpo.trainer.collect.start_checks import check_source
    from fused_grpo.trainer.models.loading import loading, tokenizer_for

    check_source("model", model, options.model_init_kwargs)
    with loading(f"model {model!r}, whose tokenizer"):
        return tokenizer_for(model, None, options)


def in_format(rows: Any, options: TrainOptions, tokenizer: Any) -> Any:
    """The rows with prompts of text in the form that `--prompt-format` and `--system-prompt` ask for."""
    from fused_grpo.trainer.data.datasets import as_conversations
    from fused_grpo.trainer.data.prompts import has_chat_template

    if rows is None or options.prompt_format == "plain":
        return rows
    asked = options.prompt_format == "chat" or options.system_prompt is not None
    is_chat = asked or has_chat_template(tokenizer, options.chat_template_kwargs)
    return as_conversations(rows, options.system_prompt) if is_chat else rows


def load_prompts(options: TrainOptions, *, held_out: bool) -> Any:
    """The training or the held-out rows that the options name, with the columns that these want; or a DataError."""
    from fused_grpo.trainer.data.datasets import first_rows

    option, source, split, limit = ("--dataset", options.dataset, options.dataset_split, options.limit)
    if held_out:
        option, source, split = "--eval-dataset", options.eval_dataset, options.eval_dataset_split
        limit = options.eval_limit
    assert source is not None
    try:
        rows = load_source(source, split, options.dataset_config)
    except DataError as error:
        raise DataError(f"{error} ({option}{'; None leaves it out' * held_out})") from error
    return named_columns(rows if limit is None else first_rows(rows, limit), options, f"{option} {source}")


def load_source(source: str, split: str, config: str | None) -> Any:
    """The rows of a file, a hub dataset or a function."""
    from datasets import disable_progress_bars

    from fused_grpo.trainer.data.datasets import load_rows
    from fused_grpo.trainer.rewards.reward_call import load_reward

    disable_progress_bars()  # a file of prompts is read quickly
    if ":" in source and not Path(source).exists():
        function: Any = load_reward(source)  # loads any function by its name
        try:
            return function(split)
        except Exception as error:
            raise DataError(f"got the dataset {source}, which raised {type(error).__name__}: {error}") from error
    return load_rows(source, split=split, config=config)


def named_columns(rows: Any, options: TrainOptions, source: str) -> Any:
    """The rows with the prompts as "prompt" and the answers as the rewards read them; DataError without a column."""
    from fused_grpo.trainer.data.datasets import column_names, renamed
    from fused_grpo.trainer.rewards.builtin_rewards import NAMED

    columns = column_names(rows)
    if not columns or isinstance(rows, Mapping):  # no rows, or no dataset, which the trainer says
        return rows
    listed = ", ".join(map(repr, columns))
    read = {name: NAMED[name].column for name in options.reward_funcs if name in NAMED and NAMED[name].column}
    names = {"prompt": options.prompt_column}
    if options.answer_column is not None:
        names["solution" if "solution" in read.values() else "answer"] = options.answer_column
    for option, column in zip(("--prompt-column", "--answer-column"), names.values(), strict=False):
        if column not in columns:
            raise DataError(f"got {source} with the columns {listed}, want {column!r}; fix: {option} with one of them")
    for reward, column in read.items():
        if column not in names and column not in columns:
            raise DataError(
                f"got --reward-funcs {reward}, which reads the column {column!r}, and {source} with {listed}; "
                "fix: --answer-column with the one that has the correct answers"
            )
    return renamed(rows, names)


def say(text: str) -> None:
    """Print a line on the first process alone, which the launcher names: there may be no process group yet."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def print_recipes() -> None:
    """Each recipe with what its first line says about it, and the paths of Accelerate's configurations."""
    from fused_grpo.trainer.cli.options import RECIPES

    for path in sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem):
        what = path.read_text().partition("\n")[0].removeprefix("# ")
        print(textwrap.fill(f"{path.stem:16} {what}", 80, subsequent_indent=17 * " "))
    for path in sorted((RECIPES / "accelerate").glob("*.yaml")):
        print(path)


def print_rewards() -> None:
    """Each short name of a reward with what it scores and the column that it reads."""
    from fused_grpo.trainer.rewards.builtin_rewards import NAMED, usage_of

    for name, reward in NAMED.items():
        print(f"{usage_of(name):25} {reward.scores}")
        if reward.column:
            print(f"{'':25} reads the column {reward.column!r} (--answer-column)")
