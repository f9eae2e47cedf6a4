"""What a run is going to do, said before anything slow: model, batch, length, memory, engine.

No weight is loaded for it. What cannot be known yet (the size of a model that needs its weights) is left out.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from accelerate import Accelerator
from torch import nn

from fused_grpo.trainer.collect.start_checks import Start, load_config, planned_shape
from fused_grpo.trainer.common.formatting import bytes_text, short_number
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import is_conversational, is_stream
from fused_grpo.trainer.engines.engine_choice import EngineName
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.logging.console import Console
from fused_grpo.trainer.logging.run_output import at_start
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.loading import SELF
from fused_grpo.trainer.models.memory_estimate import ModelShape, Term, memory_terms


def announce(start: Start, accelerator: Accelerator) -> dict[str, str]:
    """Print what the run will do and what its options alone warn of, on the first process. Returns what it will do."""
    args, engine, dataset, shape = start.args, start.engine, start.train, start.shape
    engine = start.engine_name if engine is None else getattr(engine, "name", FunctionEngine.name)
    is_known = not is_stream(dataset)
    facts = {
        "task": "+".join(start.rewards.names),
        "model": _described(start.model, shape),
        "data": (f"{len(dataset):,} prompts" if is_known else "a stream of prompts") + _kind(dataset, start.tokenizer),
        "engine": engine,
        "batch": _batch(args, start.processes),
        "run": f"{start.max_steps:,} optimizer steps",
        "loss": f"{args.loss_type}, beta {args.beta}, learning rate {args.learning_rate}",
    }
    teacher = teacher_shape(start)
    if start.teacher is not None:
        described = _described(start.teacher, teacher if isinstance(teacher, ModelShape) else None, is_teacher=True)
        name = "the reference model" if start.teacher == SELF else described
        facts["teacher"] = f"{name}, {args.distillation_kind} x {args.distillation_coef}"
    if shape is not None and is_known:
        facts["memory"] = _memory(planned_memory(start, shape, engine, teacher), args, engine)
    facts["output"] = args.output_dir
    console = Console(0, quiet=not accelerator.is_main_process)
    console.banner(facts)
    for text in warnings_of(args, start.tokenizer, engine=engine, processes=start.processes):
        console.warn(text)
    return facts


def teacher_shape(start: Start) -> ModelShape | str | None:
    """The shape of the teacher; "self" for the reference, None without one or of one that cannot be built.

    Raises:
        DataError: its configuration cannot be loaded.
    """
    if start.teacher is None or start.teacher == SELF:
        return SELF if start.teacher else None
    config = load_config("teacher_model", start.teacher, start.args, start.args.teacher_model_init_kwargs)
    return planned_shape(config, start.teacher, None)


def warnings_of(args: GRPOConfig, tokenizer: Any, *, engine: str, processes: int) -> list[str]:
    """What the options alone give reason to warn of, with an engine of that name."""
    corrected = engine != "transformers" and args.vllm_importance_sampling_correction
    thinks = any(word in _template(tokenizer) for word in ("enable_thinking", "<think>"))
    return at_start(args, processes=processes, corrected=corrected, thinks=thinks)


def _described(model: Any, shape: ModelShape | None, *, is_teacher: bool = False) -> str:
    """Name and size of a model."""
    name = type(base_model(model)).__name__.removesuffix("ForCausalLM") if isinstance(model, nn.Module) else str(model)
    if shape is None:
        return name
    is_part = shape.trained < shape.parameters and not is_teacher
    trained = f", {short_number(shape.trained)} of them trained" if is_part else ""
    return f"{name} ({short_number(shape.parameters)} parameters{trained})"


def _kind(dataset: Any, tokenizer: Any) -> str:
    """Whether the model sees the prompts in its chat template."""
    if is_stream(dataset) or not _template(tokenizer):
        return ""
    return ", conversations" if is_conversational(dataset[0]) else ", plain text: the model's chat template is not used"


def _template(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def _batch(args: GRPOConfig, processes: int) -> str:
    """The arithmetic of an optimizer step."""
    group, micro_batch = args.num_generations, args.per_device_train_batch_size
    micro_batches, steps = args.gradient_accumulation_steps, args.optimizer_steps_per_generation(processes)
    sequences = micro_batch * micro_batches * processes
    prompts = f"{sequences / group:.4g} prompt{'s' * (sequences != group)}"
    parts = [
        f"{sequences} sequences = {prompts} x {group} completions",
        f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} of {micro_batch}"
        + f" on each of {processes} processes" * (processes > 1),
        f"generated for {steps} steps at a time" * (steps > 1),
        f"used {args.num_iterations} times" * (args.num_iterations > 1),
    ]
    return ", ".join(filter(None, parts))


def planned_memory(start: Start, shape: ModelShape, engine: str, teacher: ModelShape | str | None) -> list[Term]:
    """The estimate for one device; `teacher` as of `teacher_shape`."""
    return memory_terms(
        shape,
        start.args,
        prompt_tokens=start.limit.longest,
        processes=start.processes,
        engine=engine if engine in get_args(EngineName) else "server",  # the memory of the user's own is unknown
        teacher=teacher,
    )


def _memory(terms: list[Term], args: GRPOConfig, engine: str) -> str:
    """The sum of the estimate, whose terms `--dry-run` prints."""
    known = bytes_text(sum(term.size or 0 for term in terms))
    without = "" if all(term.size is not None for term in terms) else f" and {engine}'s"
    has = ""
    if torch.cuda.is_available() and not args.use_cpu:
        has = f" of {bytes_text(torch.cuda.get_device_properties(0).total_memory)}"
    return f"about {known}{without}{has} per device, an estimate (see --dry-run)"
