"""An estimate of the memory of one device, from the shape of the model and the options.

No weight is loaded: the model is built on the meta device, where tensors have shapes and no storage. Weights,
gradients, optimizer state, the reference and a teacher are exact. Activations are rough: what the layers of a
Llama-like model keep for the backward pass, as measured on Qwen2 (per token and layer 9.5 D + 4 I numbers in fp32;
under autocast 34 D + 8 I bytes, because norms and the residual stream stay in fp32). `LEFT_OUT` says what is not in it.

Letters: P parameters, T those that are trained, L layers, D hidden size, I intermediate size, V vocabulary, N tokens of
a micro-batch, C completion tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fused_grpo.passes.buffers import chunk_budget
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.loading import wants_bf16

LEFT_OUT = (
    "Left out: attention scores where the attention keeps them (eager), the all-reduce buckets of DDP, the copy of the "
    "weights while they go to an engine, CUDA's own context (about 0.5 GB), and what the allocator wastes. Under "
    "FSDP2, weights, gradients, AdamW state, the reference and a teacher are divided by the number of processes."
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that memory depends on."""

    parameters: int
    trained: int
    matrices: int  # numbers in the layers' weight matrices: what autocast makes copies of
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int  # numbers in the keys of one token and layer
    head_trained: bool


@dataclass(frozen=True)
class Term:
    """One part of the estimate. `size` in bytes; None where it is unknown."""

    name: str
    formula: str
    size: int | None


def device_memory(args: GRPOConfig) -> int | None:
    """Bytes of the GPU that trains; None without one."""
    if args.use_cpu or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def model_shape(config: Any, *, lora_r: int | None = None, lora_targets: Collection[str] | None = None) -> ModelShape:
    """The shape of the causal LM that a transformers config describes, built on the meta device.

    The arguments are those of `shape_of`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return shape_of(model, lora_r=lora_r, lora_targets=lora_targets)


def shape_of(model: Any, *, lora_r: int | None = None, lora_targets: Collection[str] | None = None) -> ModelShape:
    """The shape of a causal LM.

    Args:
        model: of transformers, or a PeftModel.
        lora_r: rank of the adapter that is going to be added, where only that is trained.
        lora_targets: names of the modules that get one. None: every linear layer but the head.
    """
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    linear = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    adapted = [linear[name] for name in linear if lora_targets is None or name.rpartition(".")[2] in lora_targets]
    adapter = sum((lora_r or 0) * (layer.in_features + layer.out_features) for layer in adapted)
    heads = text.num_attention_heads
    intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=parameters + adapter,
        trained=trained if lora_r is None else adapter,
        matrices=sum(layer.weight.numel() for layer in linear.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=max(intermediate) if isinstance(intermediate, list) else intermediate,  # one for each layer
        vocabulary=text.vocab_size,
        kv_width=width * (getattr(text, "num_key_value_heads", None) or heads),
        head_trained=lora_r is None and all(parameter.requires_grad for parameter in head.parameters()),
    )


def memory_terms(
    shape: ModelShape,
    args: GRPOConfig,
    *,
    prompt_tokens: int,
    processes: int,
    engine: str,
    teacher: ModelShape | str | None = None,
) -> list[Term]:
    """All parts of the estimate, for one device.

    Args:
        shape: of the model.
        args: the options of the run.
        prompt_tokens: of the longest prompt.
        processes: how many train.
        engine: "vllm", "server" or "transformers".
        teacher: the shape of a teacher; "self": the reference.
    """
    trained, bf16 = shape.trained, wants_bf16(args)
    tokens, completion_tokens = micro_batch_tokens(args, prompt_tokens)
    sequences = args.prompts_per_process(processes) * args.group_part(processes)  # generated at a time
    terms = [
        Term("weights, fp32", "4 P", 4 * shape.parameters),
        Term("gradients, fp32", "4 T", 4 * trained),
        Term("AdamW state, fp32", "8 T", 8 * trained),
    ]
    if (args.beta > 0 or teacher == "self") and shape.head_trained:
        why = "beta > 0" if args.beta > 0 else "the teacher"
        terms.append(Term("reference model, fp32", f"4 P ({why})", 4 * shape.parameters))
    if isinstance(teacher, ModelShape):
        dtype = _teacher_dtype(args)
        size = dtype.itemsize * teacher.parameters
        terms.append(Term(f"teacher, {str(dtype)[6:]}", f"{dtype.itemsize} P of the teacher", size))
    if bf16:
        terms.append(Term("bf16 copies of matrices", "2 P without embeddings", 2 * shape.matrices))
    terms += [_activations(shape, tokens, bf16=bf16, checkpointing=args.gradient_checkpointing)]
    terms += _loss(shape, shape if isinstance(teacher, str) else teacher, completion_tokens, args.chunk_bytes)
    return [*terms, _engine(shape, args, (prompt_tokens + args.max_completion_length) * sequences, bf16, engine)]


def micro_batch_tokens(args: GRPOConfig, prompt_tokens: int) -> tuple[int, int]:
    """N and C: tokens of the largest micro-batch, and those of them that are of completions."""
    sequence = prompt_tokens + args.max_completion_length
    tokens = args.per_device_train_batch_size * sequence
    if args.max_tokens_per_micro_batch is not None:
        tokens = max(args.max_tokens_per_micro_batch, sequence)
    return tokens, math.ceil(tokens * args.max_completion_length / sequence)


def _activations(shape: ModelShape, tokens: int, *, bf16: bool, checkpointing: bool) -> Term:
    hidden, intermediate = shape.hidden, shape.intermediate
    layer = 34 * hidden + 8 * intermediate if bf16 else 38 * hidden + 16 * intermediate
    inside = "34 D + 8 I" if bf16 else "38 D + 16 I"
    if checkpointing:
        size, formula = tokens * (4 * hidden * (shape.layers + 2) + layer), f"N (4 D (L + 2) + {inside})"
    else:
        size, formula = tokens * (8 * hidden + layer * shape.layers), f"N (8 D + L ({inside}))"
    return Term("activations, roughly", f"{formula}, N = {tokens:,}", size)


def _chunk(shape: ModelShape, tokens: int, chunk_bytes: int | None) -> int:
    budget = chunk_budget(chunk_bytes, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return min(budget, 4 * tokens * shape.vocabulary)


def _teacher_dtype(args: GRPOConfig) -> torch.dtype:
    """Of a teacher that is loaded: what its options say, or fp32."""
    given = str((args.teacher_model_init_kwargs or {}).get("dtype")).removeprefix("torch.")
    dtype = getattr(torch, given, torch.float32)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _loss(shape: ModelShape, teacher: ModelShape | None, tokens: int, chunk_bytes: int | None) -> list[Term]:
    """What the head's part of a step takes; `chunk_bytes` is for the chunks of both models."""
    terms = [
        Term("one chunk of logits", f"min(chunk_bytes, 4 C V), C = {tokens:,}", _chunk(shape, tokens, chunk_bytes)),
        Term("gradient of hidden states", "4 C D", 4 * tokens * shape.hidden),
    ]
    if shape.head_trained:
        # Computed in the forward pass, and kept beside the accumulated one until the backward pass.
        terms.append(Term("the head's new gradient", "4 V D", 4 * shape.vocabulary * shape.hidden))
    if teacher is not None:
        terms.append(Term("hidden states of the teacher", "4 C D of the teacher", 4 * tokens * teacher.hidden))
        if chunk_bytes is None:
            terms.append(Term("one chunk of its logits", "4 C V at most", _chunk(teacher, tokens, None)))
    return terms


def _engine(shape: ModelShape, args: GRPOConfig, tokens: int, bf16: bool, engine: str) -> Term:
    if engine == "server":
        return Term("engine", "in a process of its own", 0)
    if engine == "transformers":
        size = (2 if bf16 else 4) * 2 * shape.layers * shape.kv_width * tokens
        return Term("KV cache while generating", "2 L (width of keys), each token generated at a time", size)
    share = args.vllm_gpu_memory_utilization
    if (total := device_memory(args)) is not None:
        return Term("vLLM", f"{share} of the GPU (vllm_gpu_memory_utilization)", int(share * total))
    return Term("vLLM", f"{share} of a GPU; its weights and KV cache on a CPU", None)
