"""`fused-grpo train --dry-run`: the options, batch and memory of a run, before anything is loaded, started or written.

It has three parts: which options apply after the command line, the file and the defaults; how the batch divides; how
much memory it needs. Below them are the warnings that the run would begin with. The first part is a YAML file that
`--config` accepts. Under `accelerate launch` the arithmetic is that of all processes.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from fused_grpo.errors import DataError
from fused_grpo.trainer.checkpoint.output_dir import former_run
from fused_grpo.trainer.cli.inputs import Inputs
from fused_grpo.trainer.cli.options import COMMANDS, TrainOptions
from fused_grpo.trainer.collect.plan import Plan, batch_table
from fused_grpo.trainer.collect.start_checks import Start, check_start
from fused_grpo.trainer.config.checks import check_arguments
from fused_grpo.trainer.data.datasets import check_dataset, eval_sets


def dry_run(options: TrainOptions, load_inputs: Callable[[], Inputs]) -> Iterator[str]:
    """The parts of the output of `--dry-run`, one after the other, up to the first error that the run would raise."""
    processes = options.world_size
    yield resolved(options)
    try:
        inputs = load_inputs()
    except DataError:
        yield batch_table(options, processes=processes, prompts=None)
        raise
    rows = inputs.train
    yield batch_table(options, processes=processes, prompts=len(rows) if hasattr(rows, "__len__") else None)
    start = planned_start(options, inputs)
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


def planned_start(options: TrainOptions, inputs: Inputs) -> Start:
    """What the run would begin with."""
    check_arguments(options, rollout_func=None, eval_dataset=inputs.heldout, teacher_model=options.teacher_model)
    return Start(
        args=options,
        model=inputs.model,
        train=check_dataset(inputs.train, name="train_dataset"),
        evals=eval_sets(inputs.heldout, check=True),
        reward_funcs=inputs.reward_funcs,
        processing_class=inputs.processing_class,
        peft_config=options.peft_config(),
        teacher=options.teacher_model,
    )


def resolved(options: TrainOptions) -> str:
    """The options that are not at their defaults, as YAML."""
    default = type(options)()
    values = {
        entry.name: getattr(options, entry.name)
        for entry in dataclasses.fields(options)
        if entry.name not in (*COMMANDS, "config") and getattr(options, entry.name) != getattr(default, entry.name)
    }
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""
    return f"# options that are not at their defaults; what --config takes\n{text}"
