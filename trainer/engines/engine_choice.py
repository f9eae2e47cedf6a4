"""Which rollout engine the options of a run ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.data.datasets import is_stream
from fused_grpo.trainer.data.prompts import longest_prompt
from fused_grpo.trainer.engines import EngineName, RolloutEngine, make_engine
from fused_grpo.trainer.engines.function import FunctionEngine
from fused_grpo.trainer.models.loading import wants_bf16


def engine_name(args: GRPOConfig) -> EngineName:
    """What `make_engine` calls it."""
    if args.vllm_mode == "server":
        return "server"
    return "auto" if args.use_vllm is None else "vllm" if args.use_vllm else "transformers"


def choose_engine(
    args: GRPOConfig,
    model: Any,
    tokenizer: Any,
    datasets: Sequence[Any],
    *,
    rollout_func: Any = None,
    trainer: Any = None,
) -> RolloutEngine:
    """The engine, started; or the user's function, around an engine that was asked for by name.

    Args:
        datasets: all whose prompts it will be given.
        rollout_func: the user's function, which is handed the `trainer`.

    Raises:
        InputError: a dataset without random access, whose longest prompt is not known.
        UnavailableError: the engine is not installed, cannot start here, or does not answer.
    """
    if rollout_func is None:
        return _named_engine(args, model, tokenizer, datasets)
    wants_inner = args.use_vllm or args.vllm_mode == "server"
    inner = _named_engine(args, model, tokenizer, datasets) if wants_inner else None
    return FunctionEngine(rollout_func, trainer, inner=inner)


def _named_engine(args: GRPOConfig, model: Any, tokenizer: Any, datasets: Sequence[Any]) -> RolloutEngine:
    urls = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return make_engine(
        engine_name(args),
        model,
        tokenizer,
        max_model_len=args.vllm_max_model_length
        or _longest_prompt(args, tokenizer, datasets) + args.max_completion_length,
        dtype=torch.bfloat16 if wants_bf16(args) else torch.float32,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        adapter_sync=args.vllm_adapter_sync,
        engine_options=args.vllm_engine_kwargs,
        base_urls=[urls] if isinstance(urls, str) else urls,
        server_timeout=args.vllm_server_timeout,
        allow_remote=args.vllm_server_allow_remote,
        weight_transfer=args.vllm_weight_transfer,
    )


def _longest_prompt(args: GRPOConfig, tokenizer: Any, datasets: Sequence[Any]) -> int:
    """Tokens; of all datasets, so that none meets an engine that is too small for it."""
    if engine_name(args) == "transformers":
        return 0  # which has no limit to set
    if any(map(is_stream, datasets)):
        raise InputError("got a dataset without random access; fix: set vllm_max_model_length")
    options: Any = {"chat_template_kwargs": args.chat_template_kwargs}
    return max(longest_prompt(dataset, tokenizer, **options) for dataset in datasets)
