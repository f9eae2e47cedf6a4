"""Which rollout engine the options of a run ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.data import is_stream
from fused_grpo.trainer.models import wants_bf16
from fused_grpo.trainer.prompts import longest_prompt
from fused_grpo.trainer.rollout import EngineName, RolloutEngine, make_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def engine_name(args: GRPOConfig) -> EngineName:
    """What `make_engine` calls it."""
    if args.vllm_mode == "server":
        return "server"
    return "auto" if args.use_vllm is None else "vllm" if args.use_vllm else "transformers"


def choose_engine(
    args: GRPOConfig, model: PreTrainedModel, tokenizer: Any, *, datasets: Sequence[Any]
) -> RolloutEngine:
    """The engine, started. It holds the longest prompt of `datasets` and a completion, unless told how much.

    Raises:
        InputError: a dataset without random access, whose longest prompt is not known.
        UnavailableError: the engine is not installed, cannot start here, or does not answer.
    """
    own = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    urls = args.vllm_server_base_url or own
    return make_engine(
        engine_name(args),
        model,
        tokenizer,
        max_model_len=args.vllm_max_model_length or _longest(args, tokenizer, datasets) + args.max_completion_length,
        dtype=torch.bfloat16 if wants_bf16(args) else torch.float32,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        engine_options=args.vllm_engine_kwargs,
        base_urls=[urls] if isinstance(urls, str) else urls,
        server_timeout=args.vllm_server_timeout,
        allow_remote=args.vllm_server_allow_remote,
    )


def _longest(args: GRPOConfig, tokenizer: Any, datasets: Sequence[Any]) -> int:
    if engine_name(args) == "transformers":
        return 0  # which has no such limit
    if any(map(is_stream, datasets)):
        raise InputError("got a dataset without random access; fix: set vllm_max_model_length")
    template = args.chat_template_kwargs
    return max(longest_prompt(dataset, tokenizer, chat_template_kwargs=template) for dataset in datasets)
