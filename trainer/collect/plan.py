"""What a run is going to do, said before anything slow: model, batch, length, memory, engine.

No weight is loaded for it. What cannot be known yet (a config that does not load) is left out; the run itself raises
the error.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, get_args

import torch
from accelerate import Accelerator
from torch import nn

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import is_stream
from fused_grpo.trainer.data.prompts import is_conversational, longest_prompt
from fused_grpo.trainer.engines.engine_choice import EngineName
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.logging.advice import at_start
from fused_grpo.trainer.logging.console import Console
from fused_grpo.trainer.logging.formatting import bytes_text, short_number
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.memory_estimate import ModelShape, memory_terms, model_shape, shape_of
from fused_grpo.trainer.models.teacher import SELF

SAMPLED_PROMPTS = 256


def announce(
    model: Any,
    args: GRPOConfig,
    accelerator: Accelerator,
    *,
    dataset: Any,
    tokenizer: Any,
    peft_config: Any,
    engine: Any,
    rewards: list[str],
    max_steps: int,
    teacher: Any = None,
) -> dict[str, str]:
    """Print what the run will do, and what its options alone give reason to warn of, on the first process.

    Args:
        model: a path, a hub id or a module.
        args: the options of the run.
        accelerator: the processes of the run.
        dataset: the prompts.
        tokenizer: of the model.
        peft_config: of the adapter that is going to be added to it; None for none.
        engine: the user's rollout engine or function; else the name of the engine that is going to start.
        rewards: names of the reward functions.
        max_steps: number of optimizer steps.
        teacher: a path, a hub id, a module or "self", to distil from.

    Returns:
        What was printed, for run.json and trackers.
    """
    engine = engine if isinstance(engine, str) else getattr(engine, "name", FunctionEngine.name)
    processes, is_known = accelerator.num_processes, not is_stream(dataset)
    shape = _shape(args, model, peft_config, args.model_init_kwargs)
    facts = {
        "task": "+".join(rewards),
        "model": _described(model, shape),
        "data": (f"{len(dataset):,} prompts" if is_known else "a stream of prompts") + _kind(dataset, tokenizer),
        "engine": engine,
        "batch": _batch(args, processes),
        "run": f"{max_steps:,} optimizer steps",
        "loss": f"{args.loss_type}, beta {args.beta}, learning rate {args.learning_rate}",
    }
    of_teacher: ModelShape | str | None = None
    if teacher == SELF:
        of_teacher, facts["teacher"] = SELF, "the reference model"
    elif teacher is not None:
        of_teacher = _shape(args, teacher, None, args.teacher_model_init_kwargs)
        facts["teacher"] = _described(teacher, of_teacher, is_teacher=True)
    if teacher is not None:
        facts["teacher"] += f", {args.distillation_kind} x {args.distillation_coef}"
    if shape is not None and is_known:
        how: dict[str, Any] = {"engine": engine, "processes": processes, "teacher": of_teacher}
        if memory := _memory(args, shape, dataset, tokenizer, **how):
            facts["memory"] = memory
    facts["output"] = args.output_dir
    console = Console(0, quiet=not accelerator.is_main_process)
    console.banner(facts)
    for text in warnings_of(args, tokenizer, engine=engine, processes=processes):
        console.warn(text)
    return facts


def warnings_of(args: GRPOConfig, tokenizer: Any, *, engine: str, processes: int) -> list[str]:
    """What the options alone give reason to warn of; the arguments are those of `announce`."""
    corrected = engine != "transformers" and args.vllm_importance_sampling_correction
    thinks = any(word in _template(tokenizer) for word in ("enable_thinking", "<think>"))
    return at_start(args, processes=processes, corrected=corrected, thinks=thinks)


def _described(model: Any, shape: ModelShape | None, *, is_teacher: bool = False) -> str:
    """Name and size of a model."""
    name = type(base_model(model)).__name__.removesuffix("ForCausalLM") if isinstance(model, nn.Module) else str(model)
    if shape is None:
        return name
    return f"{name} ({short_number(shape.parameters)} parameters{'' if is_teacher else _trained(shape)})"


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


def _shape(args: GRPOConfig, model: Any, peft_config: Any, init_kwargs: dict[str, Any] | None) -> ModelShape | None:
    from transformers import AutoConfig

    lora: dict[str, Any] = {}
    if peft_config is not None:
        targets = getattr(peft_config, "target_modules", None)
        lora = {"lora_r": getattr(peft_config, "r", 0), "lora_targets": None if isinstance(targets, str) else targets}
    try:
        if isinstance(model, nn.Module):
            return shape_of(model, **lora)
        options = {**(init_kwargs or {}), "trust_remote_code": args.runs_remote_code}
        of_config = {name: options[name] for name in ("trust_remote_code", "revision") if name in options}
        return model_shape(AutoConfig.from_pretrained(model, **of_config), **lora)
    except Exception:  # of the network, the hub, a config's own code: loading the model raises it again
        return None


def _trained(shape: ModelShape) -> str:
    return f", {short_number(shape.trained)} of them trained" if shape.trained < shape.parameters else ""


def _memory(
    args: GRPOConfig,
    shape: ModelShape,
    dataset: Any,
    tokenizer: Any,
    *,
    engine: str,
    processes: int,
    teacher: ModelShape | str | None,
) -> str | None:
    """The sum of the estimate of `--dry-run`, for one device."""
    options: Any = {"chat_template_kwargs": args.chat_template_kwargs}
    try:
        prompt_tokens = longest_prompt(islice(iter(dataset), SAMPLED_PROMPTS), tokenizer, **options)
    except Exception:  # of the tokenizer or its template: encoding the prompts raises it again
        return None
    terms = memory_terms(
        shape,
        args,
        prompt_tokens=prompt_tokens,
        processes=processes,
        engine=engine if engine in get_args(EngineName) else "server",  # the memory of the user's own is unknown
        teacher=teacher,
    )
    known = bytes_text(sum(term.size or 0 for term in terms))
    without = "" if all(term.size is not None for term in terms) else f" and {engine}'s"
    has = ""
    if torch.cuda.is_available() and not args.use_cpu:
        has = f" of {bytes_text(torch.cuda.get_device_properties(0).total_memory)}"
    return f"about {known}{without}{has} per device, an estimate (see --dry-run)"
