"""`fused-grpo train`: what a run trains, the run itself, and its dry run.

`--dry-run` shows, before anything is loaded, started or written: the options that are not at their defaults, as a YAML
file that `--config` accepts; how the batch divides among all processes of the launcher; how much memory it needs; and
the warnings that the run would begin with.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import disable_progress_bars
from huggingface_hub.utils.tqdm import enable_progress_bars
from transformers.utils.logging import disable_progress_bar

from fused_grpo.errors import DataError
from fused_grpo.trainer.checkpoint.output_dir import check_output_dir, former_run
from fused_grpo.trainer.cli.options import COMMANDS, TrainOptions, check_combination
from fused_grpo.trainer.collect.plan import Plan, batch_table
from fused_grpo.trainer.collect.start_checks import Start, check_given, check_start
from fused_grpo.trainer.config.grpo_config import changed_options
from fused_grpo.trainer.data.datasets import as_conversations, column_names, first_rows, load_rows, mapped, renamed
from fused_grpo.trainer.data.prompts import has_chat_template
from fused_grpo.trainer.distributed.sharding import before_ranks_connect
from fused_grpo.trainer.episodes.environments import rows_of_environments
from fused_grpo.trainer.logging.console import is_first_process, progress
from fused_grpo.trainer.loop import GRPOTrainer
from fused_grpo.trainer.models import smollm2
from fused_grpo.trainer.models.loading import check_source, loading, tokenizer_for
from fused_grpo.trainer.rewards.builtin_rewards import NAMED
from fused_grpo.trainer.rewards.reward_call import load_reward
from fused_grpo.trainer.tasks.named import ARITHMETIC, named_task
from fused_grpo.trainer.tasks.task import Task, interval


def train(options: TrainOptions) -> None:
    """Train with these options, or show them (`--dry-run`). Of a task, the last line has the held-out means."""
    disable_progress_bar()  # of weights, between our own lines
    if sys.stderr.isatty():
        enable_progress_bars()  # of downloads
    # Before anything slow: the output directory is checked before a model is loaded.
    options.prompts_per_process(num_processes=options.world_size)
    check_combination(options)
    if options.dry_run:
        for part in dry_run(options, lambda: load_start(options)[0]) if is_first_process() else ():
            print(part, flush=True)
        return
    with before_ranks_connect(options):
        path, resume = Path(options.output_dir), bool(options.resume_from_checkpoint)
        models = {name for name in (options.model, options.teacher_model, *options.reward_funcs) if name is not None}
        check_output_dir(path, resume=resume, overwrite=options.overwrite_output_dir, keep=models)
        if options.model is None:
            if not torch.cuda.is_available():
                # A model this small gains nothing from a second thread, and loses a lot where the cores are shared.
                torch.set_num_threads(1)
            say(f"no --model given: training the small one of the built-in {options.task or ARITHMETIC} task")
        start, task = load_start(options)
    trainer = GRPOTrainer(**start.arguments())
    trainer.facts["command"] = options.command()  # run.json and the report say what data and prompts a run had
    result = trainer.train()
    trainer.accelerator.state.destroy_process_group()  # `end_training` would end the trackers a second time
    if task is not None and result.eval_before is not None and result.eval_after is not None:
        means = [of["reward"] for of in (result.eval_before, result.eval_after)]
        count = len(task.heldout)
        if all(0 <= mean <= 1 for mean in means):
            say(f"95 % intervals: {' -> '.join('{:.3f} to {:.3f}'.format(*interval(mean, count)) for mean in means)}")
        say(f"held-out {task.measures}: {means[0]:.3f} -> {means[1]:.3f}")


def dry_run(options: TrainOptions, load: Callable[[], Start]) -> Iterator[str]:
    """The parts of the output of `--dry-run`, one after the other, up to the first error that the run would raise."""
    processes = options.world_size
    yield resolved(options)
    try:
        start = load()
    except DataError:
        yield batch_table(options, processes=processes, prompts=None)
        raise
    rows = start.train_dataset = rows_of_environments(start.train_dataset, start.environment_factory, options)
    yield batch_table(options, processes=processes, prompts=len(rows) if hasattr(rows, "__len__") else None)
    check_given(start)
    check_start(start)
    plan = Plan(start)
    if prompts := plan.prompt_table():
        yield prompts
    yield plan.memory_table()
    advice = plan.warnings()
    if start.replaced:
        names = ", ".join(sorted(entry.name for entry in start.replaced))
        fate = "removed" if options.overwrite_output_dir else f"moved to {former_run(Path(options.output_dir))}"
        advice.append(f"{Path(options.output_dir)} holds another run ({names}), which would be {fate}")
    for text in advice:
        yield textwrap.fill(f"warning: {text}", 80, break_on_hyphens=False, break_long_words=False)  # paths stay whole


def resolved(options: TrainOptions) -> str:
    """The options that are not at their defaults, as YAML."""
    values = changed_options(options, TrainOptions, but=(*COMMANDS, "config"))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""
    return f"# options that are not at their defaults; what --config takes\n{text}"


def load_start(options: TrainOptions) -> tuple[Start, Task | None]:
    """What the options name: model, rewards, rows to train on and held-out ones, and the task that these come from."""
    task, name = None, options.task or (ARITHMETIC if options.model is None else None)
    if name is None:
        train = None if options.dataset is None else load_prompts(options, held_out=False)
        heldout = None if options.eval_dataset is None else load_prompts(options, held_out=True)
    else:
        with progress(f"making the rows of {name}"):
            task = named_task(name, options.task_options, limit=options.limit, eval_limit=options.eval_limit)
        train, heldout = task.train, task.heldout or None
    if options.model is None:
        assert task is not None
        assert task.load_model is not None
        model, tokenizer = task.load_model()
    else:
        model = str(smollm2.model_folder()) if options.model == smollm2.NAME else options.model
        # Needed before the trainer loads one: it says what form prompts have.
        check_source("model", model, options.model_init_kwargs)
        with loading(f"model {model!r}, whose tokenizer"):
            tokenizer = tokenizer_for(model, None, options)
    environments = options.environment_factory
    start = Start(
        args=options.trainer_args(),
        model=model,
        processing_class=tokenizer,
        reward_funcs=options.reward_funcs if task is None else [task.reward, *options.reward_funcs],
        train_dataset=in_format(train, options, tokenizer),
        eval_dataset=in_format(heldout, options, tokenizer),
        peft_config=options.peft_config(),
        teacher_model=options.teacher_model,
        tools=[*(() if task is None else task.tools), *(load_reward(name, what="tool") for name in options.tools)],
        environment_factory=environments and load_reward(environments, what="environment_factory"),
    )
    return start, task


def in_format(rows: Any, options: TrainOptions, tokenizer: Any) -> Any:
    """The rows with prompts of text in the form that `--prompt-format` and `--system-prompt` ask for."""
    if rows is None or options.prompt_format == "plain":
        return rows
    asked = options.prompt_format == "chat" or options.system_prompt is not None
    is_chat = asked or has_chat_template(tokenizer, options.chat_template_kwargs)
    return as_conversations(rows, options.system_prompt) if is_chat else rows


def load_prompts(options: TrainOptions, *, held_out: bool) -> Any:
    """The training or the held-out rows that the options name, with the columns that these want; or a DataError."""
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
    disable_progress_bars()  # a file of prompts is read quickly
    if "://" in source:
        raise DataError(f"got the dataset {source}, want a file, a hub id or module:name; fix: download it first")
    if ":" in source and not Path(source).exists():
        function: Any = load_reward(source, what="dataset")  # loads any function by its name
        try:
            return function(split)
        except (Exception, SystemExit) as error:
            raise DataError(f"got the dataset {source}, which raised {type(error).__name__}: {error}") from error
    return load_rows(source, split=split, config=config)


def named_columns(rows: Any, options: TrainOptions, source: str) -> Any:
    """The rows with the prompts as "prompt" and the answers as the rewards read them; DataError without a column."""
    columns = [] if isinstance(rows, Mapping | Iterator) else column_names(rows)
    if not columns:  # no rows, or no dataset, which the trainer says
        return rows
    listed = ", ".join(map(repr, columns))
    read = {name: NAMED[short].column for name in options.reward_funcs if (short := name.partition("=")[0]) in NAMED}
    names = {"prompt": options.prompt_column}
    if options.answer_column is not None:
        names["answer"] = options.answer_column
    if options.answer_column == options.prompt_column:
        raise DataError(f"got {options.prompt_column!r} as --prompt-column and --answer-column, want two columns")
    for option, column in zip(("--prompt-column", "--answer-column"), names.values(), strict=False):
        if column not in columns:
            raise DataError(f"got {source} with the columns {listed}, want {column!r}; fix: {option} with one of them")
    for reward, column in read.items():
        if column and options.answer_column is None and column not in columns:
            raise DataError(
                f"got --reward-funcs {reward}, which reads the column {column!r}, and {source} with {listed}; "
                "fix: --answer-column with the one that has the correct answers"
            )
    rows = renamed(rows, names)
    return mapped(rows, with_solution) if options.answer_column and "solution" in read.values() else rows


def with_solution(row: Any) -> Any:
    """A row whose answer is under the name that the rewards of TRL read, too."""
    return {**row, "solution": row["answer"]} if isinstance(row, Mapping) and "answer" in row else row


def say(text: str) -> None:
    if is_first_process():
        print(text, flush=True)
