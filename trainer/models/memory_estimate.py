"""An estimate of the memory of one device, from the shape of the model and the options.

The model is built on the meta device. Weights, gradients, optimizer state, the reference and a teacher are exact.
Activations are rough: what the layers of a Llama-like model keep for the backward pass, as measured on Qwen2 (per token
and layer 9.5 D + 4 I numbers in fp32; under autocast 34 D + 8 I bytes, because norms and the residual stream stay in
fp32). `LEFT_OUT` says what is not in it.

**On a CPU** it is that of the whole process. Terms are added although not all are full at the same time: gradients
come while activations are freed, but the C library rarely gives those back in between. What is measured and not derived
has its raw figures in bench/results/cpu-2-cores/memory-2026-11-26.json.

Letters: P parameters, Q those in 4 bits, T those that are trained, L layers, D hidden size, I intermediate size, V
vocabulary, N tokens of a micro-batch, C completion tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil  # which Accelerate needs
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from fused_grpo.errors import FusedGRPOError
from fused_grpo.passes.buffers import chunk_budget
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.adapters import is_adapted, with_adapter
from fused_grpo.trainer.models.attention import attention_cost, sees_all, tree_sizes
from fused_grpo.trainer.models.loading import wants_bf16
from fused_grpo.trainer.models.quantized import is_codes, layers_in_4bit, quantization_of

CPU_BLOCK_TOKENS = 32  # of vLLM's KV cache
CPU_SEQUENCES = 256  # that vLLM samples at a time
_BITS = {2: "16 bits", 4: "fp32", 8: "fp64"}
_CPU_CACHE_LIMIT = 1 << 30
_VLLM_LIBRARIES = 330 << 20  # vLLM 0.32 with all that it imports
_KEPT_FREE = 250 << 20  # 0 to 0.4 GB in runs of 9M and 135M parameters

LEFT_OUT = (
    "Left out: attention scores where the attention keeps them (eager), the all-reduce buckets of DDP, CUDA's own "
    "context (about 0.5 GB), the experts of tokens (router_replay), what the processes of a server beside the trainer "
    "import (generate_ahead), and what the allocator wastes. Under FSDP2, weights, gradients, AdamW state, the "
    "reference and a teacher are divided by the number of processes."
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that memory depends on."""

    parameters: int
    quantized: int = 0  # of them in 4 bits
    trained: int
    dtype: torch.dtype  # of weights that are not quantised
    trained_size: int  # bytes of each number that is trained; of an adapter, PEFT makes them in fp32
    matrices: int  # numbers in the layers' weight matrices: what autocast makes copies of
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int  # numbers in the keys of one token and layer
    head_trained: bool
    head_tied: bool  # to the embedding
    shares_prompts: bool = False  # completions of one prompt, in a micro-batch


class Term(NamedTuple):
    """One part of the estimate. `size` in bytes."""

    name: str
    formula: str
    size: int


def device_memory(args: GRPOConfig) -> int | None:
    """Bytes of the GPU that trains; None without one."""
    if args.use_cpu or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def process_memory() -> int:
    """Bytes of memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


def cpu_cache_bytes(
    token_bytes: int, max_model_len: int, sequences: int, *, block_tokens: int = CPU_BLOCK_TOKENS
) -> int:
    """Size of vLLM's KV cache on a CPU: of one full batch, 1 GiB at most; at least that of two sequences.

    `token_bytes` are those of the keys and values of one token in all layers; `sequences` are those of a batch.
    """
    sequence = -(-max_model_len // block_tokens) * block_tokens * token_bytes
    return max(min(min(sequences, CPU_SEQUENCES) * sequence, _CPU_CACHE_LIMIT), 2 * sequence)


def layers_of(text: Any) -> list[Any]:
    """A config for each layer, where layers differ (Gemma 4); else the text config itself, as that of all."""
    return [*text.per_layer_config] if getattr(text, "is_heterogeneous", False) else [text]


def kv_width(text: Any) -> int:
    """Numbers in the keys of one token and layer, of a text config: a mean over layers that differ, rounded up."""
    widths = list[int]()
    for layer in layers_of(text):
        queries = getattr(layer, "num_attention_heads", None) or 1  # Mamba has none
        heads = getattr(layer, "num_key_value_heads", None) or queries
        widths.append(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // queries))
    return -(-sum(widths) // len(widths))


def shape_of(
    model: Any, peft_config: Any = None, /, *, dtype: Any = None, trust_remote_code: bool = False, **options: Any
) -> ModelShape:
    """The shape of a causal LM.

    Args:
        model: of transformers, or a PeftModel; or a config, from which one is built on the meta device.
        peft_config: of the adapter that it is going to get, and that alone is trained.
        dtype: what a config's model is going to be loaded in, as for `from_pretrained`; None: fp32.
        trust_remote_code: run the code that lies beside a config. Without it transformers asks, or here refuses.
        options: further ones of `from_pretrained`. Where its quantisation, or a config's, says `load_in_4bit`,
            bitsandbytes is going to quantise all linear layers but the head.
    """
    if not isinstance(model, nn.Module):
        config, given = copy.deepcopy(model), {} if dtype == "auto" else {"dtype": dtype or torch.float32}  # set in it
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **given)
    loaded = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    # bitsandbytes has the codes of two weights in one number.
    quantized = sum(math.prod(layer.weight.quant_state.shape) for layer in layers_in_4bit(model).values())
    parameters = sum(parameter.numel() for parameter in model.parameters() if not is_codes(parameter)) + quantized
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear | Conv1D) and layer is not head]
    added, adapter = (0, trained) if peft_config is None or is_adapted(model) else adapter_sizes(model, peft_config)
    in_4bit = bool(quantization_of(options, model.config).get("load_in_4bit"))
    matrices = sum(layer.weight.numel() for layer in linear)
    inner = [getattr(layer, "intermediate_size", None) or 4 * text.hidden_size for layer in layers_of(text)]
    return ModelShape(
        parameters=parameters + added,
        quantized=quantized or (matrices if in_4bit else 0),
        trained=adapter,
        dtype=loaded,
        trained_size=loaded.itemsize if peft_config is None and not is_adapted(model) else 4,
        matrices=0 if quantized or in_4bit else matrices,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=max(max(one) if isinstance(one, list) else one for one in inner),  # a list has one for each layer
        vocabulary=text.vocab_size,
        kv_width=kv_width(text),
        head_tied=head.weight is model.get_input_embeddings().weight,
        # The loss of routers is of whole sequences.
        shares_prompts=sees_all(model) and not hasattr(text, "output_router_logits"),
        head_trained=peft_config is None and all(parameter.requires_grad for parameter in head.parameters()),
    )


def adapter_sizes(model: nn.Module, peft_config: Any) -> tuple[int, int]:
    """The parameters that PEFT adds to a model, and those that it trains: of a copy on the meta device."""
    config, copies = copy.deepcopy(peft_config), dict[int, Any]()
    if hasattr(config, "prompt_tuning_init"):
        config.prompt_tuning_init = "RANDOM"  # which reads no numbers
    for weight in model.parameters():  # PEFT asks codes how they were made, and leaves them as they are
        empty = weight if is_codes(weight) else nn.Parameter(torch.empty_like(weight, device="meta"), False)
        copies[id(weight)] = empty
    own = set(map(id, copies.values()))
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # which the adapter itself gives
        adapted = with_adapter(copy.deepcopy(model, copies), config)
    sizes = [(weight.numel(), id(weight) in own, weight.requires_grad) for weight in adapted.parameters()]
    return sum(size for size, is_own, _ in sizes if not is_own), sum(size for size, _, trained in sizes if trained)


def planned_shape(config: Any, model: Any, peft_config: Any = None, /, **options: Any) -> ModelShape | None:
    """`shape_of` a model that is loaded or not; None where its config's own code fails, which loading raises again.

    An adapter that is refused raises what `adapt` would, before anything is loaded.
    """
    try:
        return shape_of(model if isinstance(model, nn.Module) else config, peft_config, **options)
    except FusedGRPOError as error:
        if isinstance(error.__cause__, ValueError | ImportError | None):  # others may be of the meta device alone
            raise
    except Exception:
        return None
    return None


def memory_terms(
    shape: ModelShape,
    args: GRPOConfig,
    *,
    prompt_tokens: int,
    processes: int,
    engine: str,
    sampling_dtype: torch.dtype = torch.float32,
    held: int | None = None,
    teacher: ModelShape | str | None = None,
) -> Iterator[Term]:
    """All parts of the estimate, for one device; on a CPU, for one process.

    Args:
        prompt_tokens: of the longest prompt.
        engine: "vllm", "server" or "transformers".
        sampling_dtype: what vLLM in process computes in.
        held: bytes of this process without the model; None: unknown, and on a GPU.
        teacher: the shape of a teacher; "self": the reference.
    """
    bf16 = wants_bf16(args)
    tokens, completion_tokens = micro_batch_tokens(args, prompt_tokens, shape)
    sequences = args.prompts_per_process(processes) * args.group_part(processes)  # generated at a time
    if held is not None:
        yield Term("the process so far", "Python, its libraries, the data", held)
        yield Term("loaded later, or kept free", "measured", _KEPT_FREE)
    yield from _weights(f"weights, {_BITS[shape.dtype.itemsize]}", shape)
    size = shape.trained_size
    yield Term(f"gradients, {_BITS[size]}", f"{size} T", size * shape.trained)
    yield Term(f"AdamW state, {_BITS[size]}", f"{2 * size} T", 2 * size * shape.trained)
    if (args.beta > 0 or teacher == "self") and shape.head_trained:
        why, size = "beta > 0" if args.beta > 0 else "the teacher", shape.dtype.itemsize
        yield Term(f"reference model, {_BITS[size]}", f"{size} P ({why})", size * shape.parameters)
    if isinstance(teacher, ModelShape):
        yield from _weights(f"teacher, {str(teacher.dtype).removeprefix('torch.')}", teacher)
    if bf16 and shape.dtype == torch.float32:
        yield Term("bf16 copies of matrices", "2 P without embeddings", 2 * shape.matrices)
    yield from _activations(shape, tokens, bf16=bf16, checkpointing=args.gradient_checkpointing)
    if held is not None and args.gradient_checkpointing:
        holes = tokens * shape.layers * (5 * shape.hidden + 3 * shape.intermediate)
        yield Term("holes in the heap", "N L (5 D + 3 I), measured", holes)
    yield from _loss(shape, shape if isinstance(teacher, str) else teacher, completion_tokens, args.chunk_bytes)
    if engine == "vllm":
        yield from _vllm(shape, args, prompt_tokens + args.max_completion_length, sequences, sampling_dtype)
    else:
        generated = sequences * (prompt_tokens + args.max_completion_length) * (engine == "transformers")
        size = (2 if bf16 else 4) * 2 * shape.layers * shape.kv_width * generated
        yield Term("KV cache while generating", "2 L (width of keys), each token generated at a time", size)


def _weights(name: str, shape: ModelShape) -> Iterator[Term]:
    size, adapter = shape.dtype.itemsize, shape.trained * (shape.trained_size - shape.dtype.itemsize)
    formula = f"{size} (P - Q)" if shape.quantized else f"{size} P"
    yield Term(name, formula, size * (shape.parameters - shape.quantized) + adapter)
    if shape.quantized:  # a scale for each 64 codes, in fp32 where it is not quantised again
        yield Term(f"{name.partition(',')[0]} in 4 bits", "9/16 Q at most", shape.quantized * 9 // 16)


def micro_batch_tokens(args: GRPOConfig, prompt_tokens: int, shape: ModelShape | None = None) -> tuple[int, int]:
    """N and C: tokens of the largest micro-batch, and of its completions; a prompt counts as often as it is run."""
    completion, limit = args.max_completion_length, args.max_tokens_per_micro_batch
    sequences, prompts = args.sequences_per_micro_batch, float(args.sequences_per_micro_batch)
    takes_mask = "flash" not in str((args.model_init_kwargs or {}).get("attn_implementation"))
    if shape is not None and shape.shares_prompts and takes_mask and args.share_prompts is not False:
        group = min(args.num_generations, sequences)
        attention = attention_cost(shape.hidden)
        trees = tree_sizes(prompt_tokens, [completion] * group, attention=attention, max_tokens=limit)
        prompts = sequences * len(trees) / group
    tokens = math.ceil(prompts * prompt_tokens) + sequences * completion
    if limit is None:
        return tokens, sequences * completion
    largest = max(limit, prompt_tokens + completion)
    return largest, math.ceil(largest * sequences * completion / tokens)


def _activations(shape: ModelShape, tokens: int, *, bf16: bool, checkpointing: bool) -> Iterator[Term]:
    hidden, intermediate = shape.hidden, shape.intermediate
    numbers, three = ((34, 8), 6) if bf16 else ((38, 16), 12)  # at most three gradients of each width exist at a time
    layer, inside = numbers[0] * hidden + numbers[1] * intermediate, f"{numbers[0]} D + {numbers[1]} I"
    if checkpointing:
        size, formula = tokens * (4 * hidden * (shape.layers + 2) + layer), f"N (4 D (L + 2) + {inside})"
    else:
        size, formula = tokens * (8 * hidden + layer * shape.layers), f"N (8 D + L ({inside}))"
    yield Term("activations, roughly", f"{formula}, N = {tokens:,}", size)
    yield Term("their gradients, one layer", f"{three} N (D + I)", three * tokens * (hidden + intermediate))


def _loss(shape: ModelShape, teacher: ModelShape | None, tokens: int, chunk_bytes: int | None) -> Iterator[Term]:
    """What the head's part of a step takes; `chunk_bytes` is for the chunks of both models."""
    budget = chunk_budget(chunk_bytes, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    formula = f"min(chunk_bytes, 4 C V), C = {tokens:,}"
    yield Term("one chunk of logits", formula, min(budget, 4 * tokens * shape.vocabulary))
    yield Term("gradient of hidden states", "4 C D", 4 * tokens * shape.hidden)
    if shape.head_trained:
        # Computed in the forward pass, and kept beside the accumulated one until the backward pass.
        yield Term("the head's new gradient", "4 V D", 4 * shape.vocabulary * shape.hidden)
    if teacher is not None:
        yield Term("hidden states of the teacher", "4 C D of the teacher", 4 * tokens * teacher.hidden)
        if chunk_bytes is None:
            yield Term("one chunk of its logits", "4 C V at most", min(budget, 4 * tokens * teacher.vocabulary))


def _vllm(shape: ModelShape, args: GRPOConfig, tokens: int, sequences: int, dtype: torch.dtype) -> Iterator[Term]:
    """vLLM in process, or in one beside it with `generate_ahead`, for so many sequences of at most so many tokens."""
    share = args.vllm_gpu_memory_utilization
    if (total := device_memory(args)) is not None:
        yield Term("vLLM", f"{share} of the GPU (vllm_gpu_memory_utilization)", int(share * total))
        return
    name, size, copies = str(dtype).removeprefix("torch."), dtype.itemsize, int(args.generate_ahead)
    # In shared memory while a server beside the trainer reads them, and a copy for each further batch in flight.
    copies = min(copies, 1) if args.vllm_adapter_sync else copies
    if copies:
        yield Term(f"weights on their way, {name}", f"{size * copies} P", size * copies * shape.parameters)
    yield Term("vLLM's libraries", "measured", _VLLM_LIBRARIES)
    # vLLM's CPU build packs the head beside its weight, and never updates a tied one, so that the engine has its own.
    heads = 1 + shape.head_tied
    parameters = shape.parameters + heads * shape.vocabulary * shape.hidden
    yield Term(f"vLLM's weights, {name}", f"{size} P + {size * heads} V D", size * parameters)
    token_bytes = 2 * shape.layers * shape.kv_width * size
    cache = cpu_cache_bytes(token_bytes, args.vllm_max_model_length or tokens, sequences)
    cache = (args.vllm_engine_kwargs or {}).get("kv_cache_memory_bytes", cache)
    yield Term(f"vLLM's KV cache, {name}", "2 L (width of keys) a token, kv_cache_memory_bytes", cache)
