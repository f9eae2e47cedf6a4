"""What a run is going to do, said before anything slow: in lines for its banner, in tables for `--dry-run`.

No weight is loaded for it. What cannot be known yet (the size of a model that needs its weights) is left out.
"""

from __future__ import annotations

import textwrap
from typing import Any, get_args

from torch import nn

from fused_grpo.errors import elide_middle, visible
from fused_grpo.trainer.collect.start_checks import Start
from fused_grpo.trainer.common.formatting import bytes_text, short_number
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import as_row, is_conversational, is_stream, read_rows
from fused_grpo.trainer.data.prompt_sampler import planned_steps
from fused_grpo.trainer.data.prompts import rendered
from fused_grpo.trainer.engines.engine_choice import EngineName, sampling_dtype
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.logging.console import Console
from fused_grpo.trainer.logging.run_output import at_start
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.loading import SELF, load_config, wants_bf16
from fused_grpo.trainer.models.memory_estimate import (
    LEFT_OUT,
    ModelShape,
    Term,
    device_memory,
    memory_terms,
    planned_shape,
    process_memory,
)

PROMPT_CHARACTERS = 400  # of the prompt that is shown


def batch_facts(args: GRPOConfig, processes: int) -> list[tuple[str, str, bool]]:
    """How sequences become optimizer steps: facts, the options that decide each, and whether the banner has it.

    InputError where they are no whole groups.
    """
    group, micro_batch, uses = args.num_generations, args.per_device_train_batch_size, args.num_iterations
    micro_batches, steps = args.gradient_accumulation_steps, args.optimizer_steps_per_generation(processes)
    generated = args.prompts_per_generation(processes) * group

    def in_prompts(sequences: int) -> str:
        return f"{sequences} sequences = {_counted(sequences / group, 'prompt')} x {group} completions"

    split = f"{_counted(micro_batches, 'micro-batch', 'es')} of {micro_batch}"
    baselines = f"a greedy completion of each of {_counted(generated / group, 'prompt')} as baseline"
    each = f" on each of {processes} processes" * (processes > 1)
    at_a_time = f"generated for {_counted(steps, 'step')} at a time: {in_prompts(generated)}"
    return [
        (in_prompts(generated // steps), "num_generations", True),
        (split + each, "gradient_accumulation_steps, per_device_train_batch_size", True),
        (at_a_time, "steps_per_generation", steps > 1),
        (f"used {_counted(uses, 'time')}", "num_iterations", uses > 1),
        *([(baselines, "advantage_estimator", True)] if args.advantage_estimator == "remax" else []),
    ]


def batch_table(args: GRPOConfig, *, processes: int, prompts: int | None) -> str:
    """The facts with their options, and the steps of the run. `prompts`: of the dataset; None: it has no length."""
    facts = [(text, options) for text, options, _ in batch_facts(args, processes)]
    if prompts is not None:
        steps, epochs = planned_steps(args, prompts, processes)
        facts += [
            (f"one epoch: {prompts} prompts = {float(1 / epochs.per_step):.4g} optimizer steps", "dataset"),
            (f"the run: {steps} optimizer steps", "num_train_epochs" if args.max_steps < 0 else "max_steps"),
        ]
    return "\n".join(["an optimizer step", *(f"  {text} ({options})" for text, options in facts)]) + "\n"


class Plan:
    """What a run begins with, after its checks; DataError where the teacher's configuration cannot be loaded."""

    def __init__(self, start: Start) -> None:
        self._start, self._args, own = start, start.args, start.engine
        self._engine: str = start.engine_name if own is None else getattr(own, "name", FunctionEngine.name)
        self._prompt = _first_prompt(start)
        # Of the teacher: "self" for the reference, None without one or of one that cannot be built.
        self._teacher: ModelShape | str | None = SELF if start.teacher_model == SELF else None
        if start.teacher_model is not None and start.teacher_model != SELF:
            config = load_config("teacher_model", start.teacher_model, start.args, start.args.teacher_model_init_kwargs)
            options = {"trust_remote_code": start.args.runs_remote_code, **(start.args.teacher_model_init_kwargs or {})}
            self._teacher = planned_shape(config, start.teacher_model, **options)
        self._terms: list[Term] | None = None  # of the memory of one device
        if start.shape is not None and not is_stream(start.train_dataset):
            # Of this process, without the model that it may have loaded already; on a GPU that is not known.
            held = process_memory() if device_memory(start.args) is None else None
            weights = sum(p.nbytes for p in start.model.parameters()) if isinstance(start.model, nn.Module) else 0
            terms = memory_terms(
                start.shape,
                start.args,
                prompt_tokens=start.limit.longest,
                processes=start.processes,
                engine=self._engine if self._engine in get_args(EngineName) else "server",  # one's own: unknown
                sampling_dtype=sampling_dtype(start.args),
                held=None if held is None else max(0, held - weights),
                teacher=self._teacher,
            )
            self._terms = list(terms)

    def print(self) -> dict[str, str]:
        """Print banner and warnings, on the first process. Returns the banner."""
        console, facts = Console(0, quiet=not self._start.is_main), self.banner()
        console.banner(facts if self._prompt is None else facts | {"first prompt": self._prompt[1]})
        for text in self.warnings():
            console.warn(text)
        return facts

    def banner(self) -> dict[str, str]:
        """What the run will do, in a line each. In what a server samples is not known yet."""
        start, args = self._start, self._args
        count = "a stream of prompts" if is_stream(start.train_dataset) else f"{len(start.train_dataset):,} prompts"
        trains = "bfloat16, with weights in float32" if wants_bf16(args) else "float32"
        trains += ", on a base in 4 bits" * bool(start.shape is not None and start.shape.quantized)
        samples = str(sampling_dtype(args)).removeprefix("torch.")
        facts = {
            "task": "+".join(start.rewards.names),
            "model": _described(start.model, start.shape),
            "data": count if self._prompt is None else f"{count}, {self._prompt[0]}",
            "engine": self._engine,
            "precision": f"trains in {trains}" + f"; vLLM samples in {samples}" * (self._engine == "vllm"),
            "batch": ", ".join(text for text, _, is_shown in batch_facts(args, start.processes) if is_shown),
            "run": f"{start.max_steps:,} optimizer steps",
            "loss": f"{args.loss_type}, beta {args.beta}, learning rate {args.learning_rate}",
        }
        if start.teacher_model is not None:
            shape = self._teacher if isinstance(self._teacher, ModelShape) else None
            name = _described(start.teacher_model, shape, is_teacher=True)
            name = "the reference model" if start.teacher_model == SELF else name
            facts["teacher"] = f"{name}, {args.distillation_kind} x {args.distillation_coef}"
        if self._terms is not None:
            size, device = bytes_text(sum(term.size for term in self._terms)), device_memory(args)
            device_text = "" if device is None else f" of {bytes_text(device)}"
            facts["memory"] = f"about {size}{device_text} per device, an estimate (see --dry-run)"
        return facts | {"output": args.output_dir}

    def prompt_table(self) -> str:
        """The form of the prompts, and the first one as its tokens are; empty where there is no chat template."""
        return "" if self._prompt is None else "\n  ".join(["the prompts", *self._prompt]) + "\n"

    def memory_table(self) -> str:
        """The memory of one device in terms with their formulas, and its sum."""
        shape, device = self._start.shape, device_memory(self._args)
        if shape is None or self._terms is None:
            return "memory: unknown, the model cannot be built from its config alone\n"
        letters = (
            f"P = {shape.parameters:,}, T = {shape.trained:,}, L = {shape.layers}, D = {shape.hidden}, "
            f"I = {shape.intermediate}, V = {shape.vocabulary:,}" + f", Q = {shape.quantized:,}" * bool(shape.quantized)
        )
        rows = [(term.name, bytes_text(term.size), term.formula) for term in self._terms]
        rows.append(("sum", bytes_text(sum(term.size for term in self._terms)), ""))
        rows += [] if device is None else [("this device has", bytes_text(device), "")]
        lines = [f"{name:26} {size:>9}   {formula}".rstrip() for name, size, formula in rows]
        assumed = f"prompts of at most {self._start.limit.longest} tokens"
        title = "memory of one device, an estimate"
        return "\n".join([title, *(f"  {line}" for line in (letters, assumed, *lines)), *textwrap.wrap(LEFT_OUT, 80)])

    def warnings(self) -> list[str]:
        corrected = self._engine != "transformers" and self._args.vllm_importance_sampling_correction
        thinks = any(word in _template(self._start.tokenizer) for word in ("enable_thinking", "<think>"))
        return at_start(self._args, processes=self._start.processes, corrected=corrected, thinks=thinks)


def _first_prompt(start: Start) -> tuple[str, str] | None:
    """The form of the prompts, and the text of the first one's tokens, special ones too: of a long one start and end.

    None where the tokenizer has no chat template, which leaves nothing to ask.
    """
    if not _template(start.tokenizer):
        return None
    row = as_row(next(iter(read_rows(start.train_dataset, name="train_dataset"))))
    form = "conversations in the model's chat template"
    if not is_conversational(row):
        form = "plain text: the model's chat template is not used"
    text = rendered(row, start.tokenizer, start.limit.template)
    return form, visible(elide_middle(text, PROMPT_CHARACTERS))


def _described(model: Any, shape: ModelShape | None, *, is_teacher: bool = False) -> str:
    name = type(base_model(model)).__name__.removesuffix("ForCausalLM") if isinstance(model, nn.Module) else str(model)
    if shape is None:
        return name
    is_part = shape.trained < shape.parameters and not is_teacher
    trained = f", {short_number(shape.trained)} of them trained" if is_part else ""
    return f"{name} ({short_number(shape.parameters)} parameters{trained})"


def _template(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def _counted(count: float, noun: str, plural: str = "s") -> str:
    return f"{count:.4g} {noun}{plural * (count != 1)}"
