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
from typing import Any

import torch
import yaml

from fused_grpo.errors import DataError
from fused_grpo.trainer.checkpoint.output_dir import former_run
from fused_grpo.trainer.cli.options import COMMANDS, TrainOptions
from fused_grpo.trainer.collect.plan import planned_memory, teacher_shape, warnings_of
from fused_grpo.trainer.collect.start_checks import Start, check_start
from fused_grpo.trainer.common.formatting import bytes_text
from fused_grpo.trainer.config.checks import check_arguments
from fused_grpo.trainer.data.datasets import check_dataset, eval_sets
from fused_grpo.trainer.data.prompt_sampler import planned_steps
from fused_grpo.trainer.models.memory_estimate import LEFT_OUT, ModelShape, Term


def dry_run(options: TrainOptions, load_rows: Callable[[], tuple[Any, Any]]) -> Iterator[str]:
    """The parts of the output of `--dry-run`, one after the other, up to the first error that the run would raise."""
    processes = options.world_size
    yield resolved(options)
    try:
        rows, held_out = load_rows()
    except DataError:
        yield batch_arithmetic(options, processes=processes, prompts=None)
        raise
    yield batch_arithmetic(options, processes=processes, prompts=len(rows) if hasattr(rows, "__len__") else None)
    start = planned_start(options, rows, held_out)
    check_start(start)
    if start.shape is None:
        yield "memory: unknown, the model cannot be built from its config alone\n"
    else:
        terms = planned_memory(start, start.shape, start.engine_name, teacher_shape(start))
        yield memory_table(start.shape, terms, f"prompts of at most {start.limit.longest} tokens")
    advice = warnings_of(options, start.tokenizer, engine=start.engine_name, processes=processes)
    if start.replaced:
        names = ", ".join(sorted(entry.name for entry in start.replaced))
        fate = "removed" if options.overwrite_output_dir else f"moved to {former_run(Path(options.output_dir))}"
        advice.append(f"{Path(options.output_dir)} holds another run ({names}), which would be {fate}")
    for text in advice:
        yield textwrap.fill(f"warning: {text}", 80, break_on_hyphens=False, break_long_words=False)  # paths stay whole


def planned_start(options: TrainOptions, rows: Any, held_out: Any) -> Start:
    """What the run would begin with."""
    from fused_grpo.trainer.recipes import arithmetic

    demo: dict[str, Any] = {}
    if options.model is None:
        tokenizer = arithmetic.build_tokenizer()
        demo = {"processing_class": tokenizer, "config": arithmetic.build_model_config(tokenizer)}
    check_arguments(options, rollout_func=None, eval_dataset=held_out, teacher_model=options.teacher_model)
    return Start(
        args=options,
        model=options.model,
        train=check_dataset(rows, name="train_dataset"),
        evals=eval_sets(held_out, check=True),
        reward_funcs=arithmetic.accuracy_reward if options.model is None else options.reward_funcs,
        peft_config=options.peft_config(),
        teacher=options.teacher_model,
        **demo,
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


def batch_arithmetic(options: TrainOptions, *, processes: int, prompts: int | None) -> str:
    """How sequences become optimizer steps. `prompts`: rows of the dataset; None where it has no length."""
    per_rollout = options.prompts_per_generation(processes)
    steps = options.optimizer_steps_per_generation(processes)
    group, iterations = options.num_generations, options.num_iterations
    effective = options.per_device_train_batch_size * options.gradient_accumulation_steps * processes
    rows = [
        ("micro-batch", f"{options.per_device_train_batch_size} sequences (per_device_train_batch_size)"),
        ("x accumulation", f"{options.gradient_accumulation_steps} (gradient_accumulation_steps)"),
        ("x processes", f"{processes}"),
        ("= optimizer step", f"{effective} sequences = {effective / group:.4g} prompt(s) x {group} (num_generations)"),
        ("generated at a time", f"{per_rollout * group} sequences = {per_rollout} prompt(s) x {group}"),
        ("used for", f"{steps} optimizer step(s) x {iterations} pass(es) (num_iterations)"),
    ]
    if prompts is not None:
        epoch = prompts / per_rollout * steps * iterations
        rows.append(("one epoch", f"{prompts} prompts = {epoch:.4g} optimizer steps"))
        source = "num_train_epochs" if options.max_steps < 0 else "max_steps"
        rows.append(("the run", f"{planned_steps(options, prompts, processes)[0]} optimizer steps ({source})"))
    return "\n".join(["the batch", *(f"  {name:20} {value}" for name, value in rows)]) + "\n"


def memory_table(shape: ModelShape, terms: list[Term], assumed: str) -> str:
    """All terms with their formulas, and their sum."""
    rows = [(term.name, bytes_text(term.size), term.formula) for term in terms]
    total = sum(term.size or 0 for term in terms)
    unknown = "" if all(term.size is not None for term in terms) else "without the terms marked -"
    rows.append(("sum", bytes_text(total), unknown))
    letters = (
        f"P = {shape.parameters:,}, T = {shape.trained:,}, L = {shape.layers}, D = {shape.hidden}, "
        f"I = {shape.intermediate}, V = {shape.vocabulary:,}"
    )
    lines = [f"{name:26} {size:>9}   {formula}".rstrip() for name, size, formula in rows]
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        lines.append(f"{'this device has':26} {bytes_text(whole):>9}")
    below = textwrap.wrap(LEFT_OUT, 80)
    title = "memory of one device, an estimate"
    return "\n".join([title, *(f"  {line}" for line in (letters, assumed, *lines)), *below])
