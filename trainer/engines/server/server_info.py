"""What a vLLM server reports of itself, and whether a trainer can use it; docs/engines.md has what is compared.

Names of norms and the use of biases are compared only where the class has another name, because vLLM serves some
architectures with the class of another one.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from transformers import PreTrainedModel

from fused_grpo.errors import InputError
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.engines.changed_weights import RECEIVER
from fused_grpo.trainer.engines.sampling import check_listed, check_speculative
from fused_grpo.trainer.engines.server.replicas import NoRouteError, Replica, RequestError, asked_again
from fused_grpo.trainer.engines.weight_files import Tie, check_precision
from fused_grpo.trainer.types import SamplingParams

# As vLLM prints it. None of them backtracks over more than a number or a name: the text is another program's.
_SIZE, _NAME = r"(\d{1,9})\b", r"\((\w+)\): "
_LAYERS = rf"^ *\((?:\d[\d, -]*[ -])?{_SIZE}\): "  # the last index of "(0-26, 28)"
_ATTENTION = rf"\bAttention\(head_size=\d+, num_heads={_SIZE}, num_kv_heads={_SIZE}"
_ROW_PARALLEL = rf"{_NAME}RowParallelLinear\((?:quant=\w+, )?in_features={_SIZE}, [\w=]+, [\w=]+, tp_size={_SIZE}"

_LORA = r"\): \w{1,99}WithLoRA\(\)\(\s{1,99}\(base_layer\): "  # around layers, where it serves adapters

SERVER_INFO = "/server_info?config_format=json"
ADAPTER_PREFIX, _UPDATING = "fused-grpo-adapter-", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    id: str
    max_model_len: int | None  # None: an adapter


@dataclass(frozen=True)
class ModelConfig:
    logprobs_mode: str
    dtype: str | None = None  # what it computes in
    max_logprobs: int = 0  # how many most likely tokens it lists; -1: all


@dataclass(frozen=True)
class LoRAConfig:
    max_lora_rank: int


@dataclass(frozen=True)
class VLLMConfig:
    model_config: ModelConfig
    device_config: dict[str, object]
    weight_transfer_config: dict[str, object] | None = None
    lora_config: LoRAConfig | None = None  # None: it serves no adapters
    parallel_config: dict[str, object] | None = None
    aux_output_config: dict[str, object] | None = None  # None: of a vLLM that has none
    watermark_config: dict[str, object] | None = None  # the same, or none was asked for
    speculative_config: dict[str, object] | None = None


class ModelFacts:
    """Sizes and names of the trainer's model."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        self.vocab_size: int = config.vocab_size
        # vLLM has all experts of a layer in one module.
        modules = {name.rpartition(".")[2]: module for name, module in model.named_modules() if "expert" not in name}
        sizes: dict[str, Any] = {
            "tokens in the vocabulary": None if head is None else head.weight.shape[0],
            "hidden units": None if head is None else head.weight.shape[1],
            "layers": getattr(config, "num_hidden_layers", None),
            "attention heads": getattr(config, "num_attention_heads", None),
            "heads of keys and values": getattr(config, "num_key_value_heads", None),
        }
        sizes |= {f"inputs of {name}": getattr(module, "in_features", None) for name, module in modules.items()}
        self._sizes = {name: size for name, size in sizes.items() if isinstance(size, int)}
        self._classes = [kind.__name__ for kind in type(model).__mro__]  # FSDP2 makes a class of its own
        self._norms = {name for name in modules if "norm" in name}
        linear = [module for module in modules.values() if hasattr(module, "in_features") and module is not head]
        self._has_biases = any(getattr(module, "bias", None) is not None for module in linear)

    def check(self, url: str, printed: str) -> None:
        """Compare with what a server's workers have printed of its model; InputError where it is another one."""
        printed = re.sub(_LORA, "): ", printed)
        served = _printed_sizes(printed)
        pairs = [(name, size, served.get(name)) for name, size in self._sizes.items()]
        wrong = [f"{min(values)} {name}, not {size}" for name, size, values in pairs if values and size not in values]
        kind, norms = re.findall(r"^\w*", printed)[0], {name for name in re.findall(_NAME, printed) if "norm" in name}
        # vLLM's Mamba serves FalconMamba too, with norms of its own.
        if norms and kind not in self._classes and not kind.startswith(("Transformers", "Mamba")):
            wrong += [f"other norms ({', '.join(sorted(norms ^ self._norms))})"] if norms ^ self._norms else []
            wrong += ["other biases"] if ("bias=True" in printed) != self._has_biases else []
        if wrong:
            raise InputError(
                f"got a server at {url} whose {kind} has {'; '.join(wrong)}, want the {self._classes[0]} of the "
                "trainer: vLLM would overwrite the server's weights and fail half-way; fix: start it with the model "
                "that is trained, or train the model that it serves"
            )


@dataclass(frozen=True)
class Wanted:
    """What a run needs of a server."""

    facts: ModelFacts
    tie: Tie | None
    max_model_len: int | None  # None: the server's own limit
    support: SamplingParams | None
    batch_invariant: bool
    routed_experts: bool
    changes: bool  # it is sent what changed, for which it needs our worker extension
    adapter_rank: int | None  # of the adapter that it loads; None: it is sent merged weights


async def server_info(client: httpx.AsyncClient, replica: Replica, wanted: Wanted) -> tuple[int, VLLMConfig]:
    """What a server that is up says of itself: its longest prompt plus completion, and its configuration.

    InputError: a server with another model, or started with options that a trainer cannot use; names the option.
    UnsupportedError: score centering that needs more log-probs than it lists, or speculative decoding on a CPU.
    RequestError: responses unlike vLLM's.
    """
    try:
        models = await replica.ask(client, "/v1/models", field="data", kind=list[Model])
    except NoRouteError:
        got, want = "without /v1/models, as that of `trl vllm-serve` is", "vLLM's own"
        raise _unusable(replica, got, want, fix="as docs/engines.md says: vllm serve ...") from None
    limit = models[0].max_model_len if models else None
    if limit is None:
        raise RequestError("no model in /v1/models")
    try:
        config = await replica.ask(client, SERVER_INFO, field="vllm_config", kind=VLLMConfig)
    except NoRouteError:
        got, want = "without /server_info and /collective_rpc", "them for weight sync"
        raise _unusable(replica, got, want, fix="with the environment variable VLLM_SERVER_DEV_MODE=1") from None
    version = await replica.ask(client, "/version", field="version", kind=str)
    _log.info("%s: vLLM %s, %d tokens", replica.url, replica.redacted(version)[:100], limit)
    mode = replica.redacted(config.model_config.logprobs_mode)[:100]
    if mode != "processed_logprobs":
        got, want = f"with --logprobs-mode {mode}", "processed_logprobs, of the distribution that was sampled"
        raise _unusable(replica, got, want, fix="with --logprobs-mode processed_logprobs")
    if config.watermark_config is not None:
        got, want = "with --watermark-config", "tokens that are drawn at random, which log-probs cannot show"
        raise _unusable(replica, got, want, fix="without it")
    on_cpu, engine = config.device_config.get("device") == "cpu", f"a server at {replica.url} with --speculative-config"
    check_speculative(config.speculative_config, on_cpu=on_cpu, engine=engine, fix="restart it without it")
    if limit < (most := wanted.max_model_len or limit):
        got, want = f"for {limit} tokens", f"{most} (prompt and completion)"
        raise _unusable(replica, got, want, fix=f"with --max-model-len {most}, or shorten either")
    vocab_size, most = wanted.facts.vocab_size, config.model_config.max_logprobs
    check_listed(wanted.support, max_listed=most, vocab_size=vocab_size, engine="vllm-server", fix="--max-logprobs")
    if wanted.batch_invariant:
        await _check_invariant(client, replica)
    if wanted.routed_experts and not (config.aux_output_config or {}).get("enable_return_routed_experts"):
        got, want = "that returns no experts of its tokens", "them with router_replay=True"
        fix = "with --enable-return-routed-experts (vLLM 0.32 or newer), or router_replay=False"
        raise _unusable(replica, got, want, fix=fix)
    if wanted.changes:
        _check_receiver(replica, config.parallel_config or {})
    await _check_model(client, replica, wanted.facts)
    if wanted.tie is not None and on_cpu:
        await _check_untied(client, replica, wanted.tie)
    if wanted.adapter_rank is not None:
        await _check_lora(client, replica, config, rank=wanted.adapter_rank)
    return limit, config


async def _check_model(client: httpx.AsyncClient, replica: Replica, facts: ModelFacts) -> None:
    """InputError where a server's model is not the trainer's; a warning where it does not say what it has."""
    call = {"method": "get_model_inspection"}
    try:
        ask = partial(replica.ask, client, "/collective_rpc", call, field="results", kind=list[str])
        printed = await asked_again(ask)
    except RequestError as error:
        reason = replica.redacted(str(error))[:300]
        warn_once(f"{replica.url} does not say which model it has ({reason}): weights of another model would ruin it")
    else:
        facts.check(replica.url, "\n".join(printed))


def _unusable(replica: Replica, got: str, want: str, *, fix: str) -> InputError:
    return InputError(f"got a server at {replica.url} {got}, want {want}; fix: restart it {fix}")


def _check_receiver(replica: Replica, parallel: dict[str, object]) -> None:
    """InputError where changes cannot reach a server, or not each of its workers says what it has."""
    # vLLM returns what the workers of the first engine say: the others could have older weights.
    reasons = {
        "without our worker extension": parallel.get("worker_extension_cls") != RECEIVER,
        "with --data-parallel-size above 1": parallel.get("data_parallel_size", 1) != 1,
    }
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        fix = f"with --worker-extension-cls {RECEIVER}, fused-grpo beside it, several servers for data parallelism"
        want = "workers that make weights of changes for vllm_full_sync_interval above 1"
        raise _unusable(replica, wrong[0], want, fix=f"{fix}, or vllm_full_sync_interval=1")


async def environment(client: httpx.AsyncClient, replica: Replica) -> dict[str, object] | None:
    """vLLM's own variables, as it has parsed them; None where it is too old to say."""
    with suppress(RequestError):
        return await replica.ask(client, SERVER_INFO, field="vllm_env", kind=dict[str, object])
    return None


async def _check_invariant(client: httpx.AsyncClient, replica: Replica) -> None:
    if (variables := await environment(client, replica)) is None:
        warn_once(f"{replica.url} does not say whether it was started with VLLM_BATCH_INVARIANT=1")
    elif variables.get("VLLM_BATCH_INVARIANT") is not True:
        got, want = "without VLLM_BATCH_INVARIANT=1", "it with batch_invariant=True"
        raise _unusable(replica, got, want, fix="with that environment variable, on a GPU that vLLM has the mode for")


async def _check_untied(client: httpx.AsyncClient, replica: Replica, tie: Tie) -> None:
    """Raise where vLLM's CPU build serves a tied head, which would be stale after every sync (see weight_files.py)."""
    try:
        call, kind = {"action": "checksum"}, dict[str, str]
        sums = await asked_again(partial(replica.ask, client, "/weight_checker", call, field="checksums", kind=kind))
    except NoRouteError:
        return
    # By worker, as "dp0:pp0:pcp0:tp0:model.norm.weight".
    if tie.head not in {name.rpartition(":")[2] for name in sums}:
        raise InputError(
            f"got a server at {replica.url} that ties {tie.head} to the embedding, want weights of its own: vLLM's CPU "
            "build never updates a tied head; fix: serve the folder that server_folder(model, tokenizer, DIR) writes"
        )


async def _check_lora(client: httpx.AsyncClient, replica: Replica, config: VLLMConfig, *, rank: int) -> None:
    """InputError, or UnsupportedError, for a server that cannot serve an adapter of that rank on the trainer's base."""
    engine, device = f"a server at {replica.url}", config.device_config.get("device")
    check_precision(config.model_config.dtype, device, engine=engine, fix="restart it with --dtype bfloat16")
    variables, version = await environment(client, replica), "default"
    with suppress(NoRouteError):
        version = await replica.ask(client, "/weight_info", field="weight_version", kind=str)
    api_servers = (config.parallel_config or {}).get("_api_process_count", 1)
    most = 0 if config.lora_config is None else config.lora_config.max_lora_rank
    reasons = {
        "without --enable-lora": config.lora_config is None,
        f"with --max-lora-rank {most}": most < rank,
        f"without {_UPDATING}=True": variables is not None and variables.get(_UPDATING) is not True,
        "with several API servers, of which one knows the adapter": api_servers != 1,
        "that another run has sent merged weights": version != "default" and not version.startswith(ADAPTER_PREFIX),
    }
    if wrong := [name for name, holds in reasons.items() if holds]:
        raise InputError(
            f"got {engine} {wrong[0]}, want one that loads adapters of rank {rank} on the trainer's base, for "
            f"vllm_adapter_sync; fix: restart it with --enable-lora --max-lora-rank {rank} (or more), without "
            f"--api-server-count, and with the environment variable {_UPDATING}=True; or vllm_adapter_sync=False"
        )


def _printed_sizes(printed: str) -> dict[str, set[int]]:
    """All values of each quantity; none where vLLM's layers of the model do not print it."""

    def numbers(pattern: str) -> set[int]:
        return set(map(int, re.findall(pattern, printed, re.MULTILINE)))

    workers = max(numbers(r"\btp_size=(\d{1,4})\b"), default=1)
    attention = {(int(heads), int(groups)) for heads, groups in re.findall(_ATTENTION, printed)}
    groups = {workers * groups for _, groups in attention}
    sizes = {
        "tokens in the vocabulary": numbers(rf"\borg_vocab_size={_SIZE}"),
        "hidden units": numbers(rf"\bembedding_dim={_SIZE}"),
        "layers": {last + 1 for last in numbers(_LAYERS)},
        "attention heads": {workers * heads for heads, _ in attention},
        # Fewer than there are workers are repeated on several.
        "heads of keys and values": groups | set(range(1, workers) if workers in groups else ()),
    }
    for name, inputs, parts in re.findall(_ROW_PARALLEL, printed):
        sizes.setdefault(f"inputs of {name}", set()).add(int(inputs) * int(parts))
    return sizes
