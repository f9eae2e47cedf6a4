"""The rollout engine for the options of a run."""

from __future__ import annotations

import importlib.util
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import torch

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.rollout_func import FunctionEngine
from fused_grpo.trainer.engines.server.own_server import OwnServer
from fused_grpo.trainer.engines.server.server_engine import VLLMServerAdapterEngine, VLLMServerEngine
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.engines.vllm.inprocess import VLLMAdapterEngine, VLLMEngine, VLLMOptions, check_engine_options
from fused_grpo.trainer.engines.vllm.start_vllm import check_installed, check_routed_experts, write_checkpoint
from fused_grpo.trainer.engines.weight_files import ServedAdapter, Tie, temporary_folder
from fused_grpo.trainer.logging.console import progress
from fused_grpo.trainer.models.adapters import base_codes, base_model, base_weights, checkpoint_weights, is_adapted
from fused_grpo.trainer.models.loading import wants_bf16
from fused_grpo.trainer.models.quantized import check_layout, layers_in_4bit

EngineName = Literal["vllm", "server", "transformers"]

_log = logging.getLogger(__name__)


def engine_name(args: GRPOConfig, peft_config: Any = None) -> EngineName:
    """The engine that the options select for a model, with the configuration of its adapter if there is one.

    `use_vllm=None` means vLLM where it is installed, transformers otherwise and for a model with prompt tuning.
    UnsupportedError for vLLM and prompt tuning; InputError for `vllm_dtype` and another engine, and for arguments of
    vLLM that other options contradict.
    """
    name: EngineName
    if getattr(peft_config, "is_prompt_learning", False):
        if args.use_vllm or args.vllm_mode == "server":
            raise UnsupportedError(
                "got vLLM and a model with prompt tuning, want the model itself to sample: vLLM has no virtual tokens; "
                "fix: use_vllm=False, and no vllm_mode"
            )
        name = "transformers"
    elif args.vllm_mode == "server":
        name = "server"
    elif args.use_vllm is not None:
        name = "vllm" if args.use_vllm else "transformers"
    else:
        # The vLLM of a machine with a GPU would use that.
        elsewhere = args.use_cpu and torch.accelerator.is_available()
        name = "transformers" if elsewhere or importlib.util.find_spec("vllm") is None else "vllm"
    if name == "vllm":
        check_engine_options(args.vllm_engine_kwargs or {}, _needed(args))
    elif args.vllm_dtype != "auto":
        raise InputError(
            f"got vllm_dtype={args.vllm_dtype!r} with the engine {name!r}, want vLLM in process: a server has a dtype "
            "of its own, and transformers samples with the trainer's tensors; fix: use_vllm=True, or leave it out"
        )
    return name


def sampling_dtype(args: GRPOConfig) -> torch.dtype:
    """What vLLM in process computes in."""
    if args.vllm_dtype != "auto":
        return cast("torch.dtype", getattr(torch, args.vllm_dtype))
    return torch.bfloat16 if wants_bf16(args) else torch.float32


def check_routing(args: GRPOConfig, name: EngineName, config: Any, *, own: Any = None) -> None:
    """Raise where `router_replay` has no engine that says where tokens went, or the model of `config` no experts.

    `own` is the user's engine or function. What the routers are is checked with the model.
    """
    if not args.router_replay:
        return
    if callable(own) or (own is None and name == "transformers"):
        raise InputError(
            f"got router_replay=True with {'a rollout_func' if callable(own) else 'the transformers engine'}, which "
            "returns no experts, want vLLM; fix: use_vllm=True or vllm_mode='server', or router_replay=False"
        )
    if not any(value and "expert" in option for option, value in config.to_dict().items()):
        raise InputError(
            f"got router_replay=True and a model of type {config.model_type}, which has no experts, want a mixture of "
            "experts; fix: router_replay=False"
        )
    if own is None and name == "vllm":
        check_routed_experts()


def choose_engine(
    name: EngineName, args: GRPOConfig, model: Any, tokenizer: Any, *, rollout_func: Any = None, trainer: Any = None
) -> RolloutEngine:
    """The engine called `name`, started; or that around a `rollout_func`, which may use one that `args` asks for.

    `args.vllm_max_model_length` is that of the data where the user sets none.

    InputError, UnsupportedError: options that do not fit, or that the engine does not have on this machine.
    UnavailableError: the engine is not installed, cannot start here, or does not respond.
    """
    with progress(f"starting the engine: {name}"):
        if rollout_func is None:
            return _make_engine(name, args, model, tokenizer)
        needs_inner = args.use_vllm or args.vllm_mode == "server"
        inner = _make_engine(name, args, model, tokenizer) if needs_inner else None
    return FunctionEngine(rollout_func, trainer, inner=inner)


def server_urls(args: GRPOConfig) -> list[str]:
    """The addresses of the vLLM servers that the options name."""
    urls, host = args.vllm_server_base_url, args.vllm_server_host
    if urls is None:
        is_bare = ":" in host and not host.startswith("[")  # of IPv6
        urls = f"http://{f'[{host}]' if is_bare else host}:{args.vllm_server_port}"
    return [urls] if isinstance(urls, str) else urls


def _needed(args: GRPOConfig) -> dict[str, Any]:
    """Arguments of `vllm.LLM` without which options of a run would fail, but for the sizes of an adapter."""
    experts = {"enable_return_routed_experts": True} if args.router_replay else {}
    model_impl = {} if args.vllm_model_impl == "vllm" else {"model_impl": args.vllm_model_impl}
    return experts | model_impl | ({"enable_lora": True} if args.vllm_adapter_sync else {})


def _make_engine(name: EngineName, args: GRPOConfig, model: Any, tokenizer: Any) -> RolloutEngine:
    _log.info("rollout engine: %s", name)
    if args.vllm_adapter_sync and (name == "transformers" or not is_adapted(model)):
        raise InputError(
            f"got vllm_adapter_sync with the engine {name!r} and a {type(model).__name__}, want vLLM and a model with "
            "an adapter; fix: leave it out"
        )
    if name == "transformers":
        most, cache = 1 if args.batch_invariant else None, args.cache_implementation
        return TransformersEngine(model, tokenizer, seed=args.seed, cache_implementation=cache, max_sequences=most)
    check_layout(base_model(model))
    if name == "server":
        return _server_engine(args, model, tokenizer)
    check_installed()
    options = VLLMOptions(
        max_model_len=cast("int", args.vllm_max_model_length),
        dtype=sampling_dtype(args),
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        seed=args.seed,
        trust_remote_code=args.runs_remote_code,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        support=sampling if (sampling := args.sampling(seed=0)).wants_ids else None,
        max_sequences=args.prompts_per_process(args.world_size) * args.group_part(args.world_size),
        needed=_needed(args),
        engine_options=args.vllm_engine_kwargs or {},
    )
    if args.generate_ahead:
        return _engine_beside(args, model, tokenizer, options)
    if args.vllm_adapter_sync:
        return VLLMAdapterEngine(model, tokenizer, options)
    return VLLMEngine(base_model(model), tokenizer, options)


def _server_engine(args: GRPOConfig, model: Any, tokenizer: Any, own: OwnServer | None = None) -> RolloutEngine:
    """The engine over the servers that the options name, or over one of this process' own.

    As in process there is no limit of time with that: where it has ended, it is noticed without one.
    """
    served: dict[str, Any] = {
        "own": own,
        "base_urls": [] if own else server_urls(args),
        "allow_remote": args.vllm_server_allow_remote,
        "timeout": None if own else args.vllm_server_timeout,
        "max_model_len": args.vllm_max_model_length,
        "seed": args.seed,
        "support": args.sampling(seed=0),
        "batch_invariant": args.batch_invariant,
        "routed_experts": args.router_replay,
    }
    if args.vllm_adapter_sync:
        return VLLMServerAdapterEngine(model, tokenizer, **served)
    if own is None:
        served |= {"weight_transfer": args.vllm_weight_transfer, "full_sync_interval": args.vllm_full_sync_interval}
    return VLLMServerEngine(base_model(model), tokenizer, **served)


def _engine_beside(args: GRPOConfig, model: Any, tokenizer: Any, options: VLLMOptions) -> RolloutEngine:
    """vLLM with the `options` of the engine in process, in a process beside the trainer's; see own_server.py."""
    base = base_model(model)
    environment = {"VLLM_BATCH_INVARIANT": "1"} if args.batch_invariant else {}
    on_cpu, is_4bit = next(base.parameters()).device.type == "cpu", False
    if args.vllm_adapter_sync:
        options, is_4bit = options.with_adapter(ServedAdapter(model)), bool(layers_in_4bit(model))
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if on_cpu:  # as in process: a further one for the worker is imported anew, and waits in a busy loop
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    arguments = options.arguments(base, in_process=False)
    served = base_codes if is_4bit else base_weights if args.vllm_adapter_sync else checkpoint_weights
    weights = served(model, options.dtype)
    tie = Tie.of(base) if on_cpu and not is_4bit else None
    log = Path(args.output_dir) / f"vllm-{args.process_index}.log"
    try:
        with temporary_folder(weights.nbytes) as folder, ExitStack() as started:
            write_checkpoint(weights, base, tokenizer, folder=folder, tie=tie, quantized=is_4bit)
            own = OwnServer(folder, arguments, environment=environment, log=log)
            started.callback(own.close)
            engine = _server_engine(args, model, tokenizer, own)
            started.pop_all()
    finally:
        weights.finish()  # of a rank that fails the others wait in its gathers
    return engine
