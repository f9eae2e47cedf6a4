"""vLLM inside the trainer's process: one `llm.generate` per effective batch, and weights loaded as tensors.

Why in this process. vLLM's CPU platform spawns two for its engine, each of which imports torch and vLLM again; sampling
costs the same. Weights are loaded from the trainer's own tensors (on a GPU they never leave it), and no process can be
left behind. The price is that vLLM changes the state of the trainer's process, which start_vllm.py restores, and that
there is one engine per process, because vLLM's process groups are global. Where one exists (DDP), vLLM makes its own
over all ranks: every rank has to start an engine.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, WeightSyncError
from fused_grpo.trainer.common.contexts import contextmanager, finalizer
from fused_grpo.trainer.engines import RolloutEngine
from fused_grpo.trainer.engines.checked_engine import checked_load_weights
from fused_grpo.trainer.engines.sampling import (
    Completion,
    as_experts,
    check_listed,
    check_speculative,
    listed_support,
    num_listed,
    rollouts_of,
    turn_sampling,
    vllm_requests,
)
from fused_grpo.trainer.engines.vllm.start_vllm import (
    check_installed,
    config_folder,
    cpu_options,
    packed_experts,
    preserved_state,
    start_vllm,
    write_checkpoint,
)
from fused_grpo.trainer.engines.weight_files import ServedAdapter, Tie, temporary_folder
from fused_grpo.trainer.models.adapters import adapter_stream, base_codes, base_model, base_weights, checkpoint_weights
from fused_grpo.trainer.models.memory_estimate import CPU_SEQUENCES
from fused_grpo.trainer.models.quantized import layers_in_4bit
from fused_grpo.trainer.models.weight_stream import WeightStream
from fused_grpo.trainer.types import ListedTokens, Rollouts, SamplingParams, Turn

_LOUD_LOGGERS = (
    "vllm.model_executor.model_loader.reload.layerwise",  # at every sync, of RotaryEmbedding: that layer has no weights
    "vllm.model_executor.models.utils",  # at every sync, of each norm that an engine in 16 bits is given in fp32
    "vllm.v1.engine.input_processor",
)
_TAKEN = {"model", "tokenizer", "dtype", "max_model_len", "seed", "enable_sleep_mode", "load_format", "logprobs_mode"}
_TAKEN |= {"gpu_memory_utilization", "trust_remote_code"}
_NEEDED_BY = {"enable_return_routed_experts": "router_replay=True", "model_impl": "vllm_model_impl"}
_PARTIAL_PREFILLS = {"enable_chunked_prefill", "long_prefill_token_threshold"}  # see cpu_options


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """What vLLM is started with, in the trainer's process or in one beside it."""

    max_model_len: int  # longest prompt plus completion, in tokens
    dtype: torch.dtype  # what it computes in
    gpu_memory_utilization: float = 0.3  # share of the GPU's memory for weights and cache together
    seed: int = 0  # of calls without `sampling.seed`
    trust_remote_code: bool = False  # let vLLM run code that comes with the model
    enable_sleep_mode: bool = False  # make `sleep` possible, on a GPU
    support: SamplingParams | None = None  # of which supports or the most likely tokens are wanted; None: neither
    max_sequences: int = CPU_SEQUENCES  # decoded at a time on a CPU, up to 256, with a KV cache for as many
    needed: Mapping[str, Any] = field(default_factory=dict)  # arguments of `vllm.LLM` that options of a run need
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # the user's, which override the choices made here

    def arguments(self, model: PreTrainedModel, *, in_process: bool = True) -> dict[str, Any]:
        """Those of `vllm.LLM` for a causal LM on its device; of a process beside the trainer's if not `in_process`.

        It raises what `check_engine_options` and `check_listed` do.
        """
        on_cpu, vocab_size = next(model.parameters()).device.type == "cpu", model.config.get_text_config().vocab_size
        same = ("max_model_len", "gpu_memory_utilization", "seed", "trust_remote_code")
        options: dict[str, Any] = {name: getattr(self, name) for name in same}
        options["dtype"] = str(self.dtype).removeprefix("torch.")
        if in_process:
            options |= {"load_format": "dummy", "logprobs_mode": "processed_logprobs"}
            options["enable_sleep_mode"] = self.enable_sleep_mode
        if on_cpu:
            block_size = self.engine_options.get("block_size")
            sizes = (self.max_model_len, self.max_sequences, self.dtype)
            options |= cpu_options(model.config, *sizes, block_size=block_size)
        support = self.support
        if support is not None and (listed := num_listed(support, vocab_size)) is not None:
            options["max_logprobs"] = listed
        # vLLM's sampling mask, which has no log-probs, so it is no help to score centering; servers return none.
        if support is not None and in_process and not on_cpu and not support.wants_logprobs:
            options["return_sampling_mask"] = True
        closed = (_PARTIAL_PREFILLS if on_cpu else set()) | (set() if in_process else {"return_sampling_mask"})
        check_engine_options(self.engine_options, self.needed, closed=closed)
        speculative, fix = self.engine_options.get("speculative_config"), "leave speculative_config out"
        check_speculative(speculative, on_cpu=on_cpu, engine="vllm_engine_kwargs with speculative_config", fix=fix)
        options |= {**self.needed, **self.engine_options}
        most, fix = options.get("max_logprobs", 0), "max_logprobs in vllm_engine_kwargs"
        check_listed(support, max_listed=most, vocab_size=vocab_size, engine=VLLMEngine.name, fix=fix)
        return options

    def with_adapter(self, adapter: ServedAdapter) -> VLLMOptions:
        """Those of an engine that loads this adapter; VLLMAdapterEngine says what it raises."""
        check_installed()
        return replace(self, needed={**self.needed, **adapter.arguments(self.dtype)})


def check_engine_options(given: Mapping[str, Any], needed: Mapping[str, Any], *, closed: Collection[str] = ()) -> None:
    """Check the user's arguments of `vllm.LLM`.

    InputError: one that is another option of the trainer's or in `closed`, or less than what is `needed`.
    UnsupportedError: an engine over several devices.
    """
    if wrong := sorted(given.keys() & (_TAKEN | {*closed})):
        raise InputError(
            f"got engine_options with {', '.join(wrong)} (vllm_engine_kwargs of a run), want only what the engine "
            "leaves open; fix: the option of its own (vllm_dtype, vllm_max_model_length, ... of a run), or leave it out"
        )
    if several := [name for name in given if name.endswith("_parallel_size") and given[name] != 1]:
        raise UnsupportedError(
            f"got {several[0]}={given[several[0]]}, want 1: an engine in the trainer's process serves "
            "from one device; fix: leave it out, and let every rank have its own engine"
        )
    for name in sorted(needed.keys() & given.keys()):
        got, want = given[name], needed[name]
        is_more = isinstance(got, int) and isinstance(want, int) and got >= want
        if got != want and not is_more:
            raise InputError(
                f"got {name}={got!r} in vllm_engine_kwargs, want {want!r} with "
                f"{_NEEDED_BY.get(name, 'vllm_adapter_sync=True')}; fix: leave either out"
            )


class VLLMEngine(RolloutEngine):
    """A RolloutEngine on an in-process `vllm.LLM`.

    With vLLM's sampling mask, which has no temperature 0, greedy log-probs are 0 (`top_k=1` takes its place).

    Args:
        model: the trainer's causal LM. The engine takes its config and, as version 0, a copy of its weights.

    Raises:
        UnavailableError: vLLM is missing, cannot start with these settings, or already runs in this process.
        UnsupportedError, InputError: sleep mode on a CPU, and as `VLLMOptions.arguments`.
    """

    name = "vllm"
    why_no_support = "it needs top_k of 1 to 1024, or vLLM with its model runner V2, on a GPU"
    _lora_request: Any = None  # for the adapter of a VLLMAdapterEngine
    _sleep_level = 2
    _only_one: ClassVar[threading.Lock] = threading.Lock()  # held from the start of an engine to its end

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: VLLMOptions) -> None:
        self._on_cpu = next(model.parameters()).device.type == "cpu"
        if options.enable_sleep_mode and self._on_cpu:
            raise UnsupportedError(
                "got sleep mode for a vllm engine on a CPU, want a GPU: there is no memory of another device to give "
                "back; fix: leave vllm_enable_sleep_mode False"
            )
        self._vocab_size = model.config.get_text_config().vocab_size
        self.weight_dtype: torch.dtype = options.dtype
        arguments = options.arguments(model)
        self._tie = Tie.of(model) if self._on_cpu else None
        self._can_sleep, self._asleep = options.enable_sleep_mode, False
        self.weight_version = -1
        check_installed()
        with ExitStack() as resources:
            if not VLLMEngine._only_one.acquire(blocking=False):
                raise UnavailableError(
                    "got a second vllm engine in this process, want one at a time because they would share vLLM's "
                    "process groups; fix: close() the first, end() of the trainer that has it"
                )
            resources.callback(VLLMEngine._only_one.release)
            self._llm: Any = self._start(model, tokenizer, arguments, resources)
            for logger in map(logging.getLogger, _LOUD_LOGGERS):
                resources.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.ERROR)
            self._close = finalizer(self, resources.pop_all().close)
        config = self._llm.llm_engine.model_config
        # Not those that were asked for: vLLM may have started without its mask.
        self._has_mask = getattr(config, "return_sampling_mask", False)
        self._options = partial(
            vllm_requests,
            seeds=random.Random(options.seed),
            engine=self.name,
            max_model_len=options.max_model_len,
            max_listed=0 if self._has_mask else config.max_logprobs,
            vocab_size=self._vocab_size,
        )
        self._load_first(model)

    def _start(self, model: Any, tokenizer: Any, arguments: dict[str, Any], resources: ExitStack) -> Any:
        folder = config_folder(model, tokenizer, untie=self._tie is not None)
        return start_vllm(folder, options=arguments, on_cpu=self._on_cpu, resources=resources)

    def _load_first(self, model: Any) -> None:
        checked_load_weights(self, checkpoint_weights(model, self.weight_dtype), version=0)

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> Rollouts:
        """Sample `sampling.n` completions for each prompt, in one call of vLLM; see RolloutEngine.

        Raises:
            InputError: an empty prompt, one that leaves no room for `sampling.max_tokens`, or refused options.
            WeightSyncError: the engine slept, and no weights were loaded since.
            UnavailableError: the engine is closed, or vLLM failed, which closes it.
        """
        prompts, options = self._options(prompt_ids, sampling)
        requests = self._requests(options, sampling)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        with self._sampling() as llm, _sampling_errors():
            outputs = llm.generate(inputs, requests, use_tqdm=False, lora_request=self._lora_request)
        listed, top = any(each["logprobs"] for each in options), sampling.top_k_listed
        completions = [_completion(each, listed, top) for output in outputs for each in output.outputs]
        return rollouts_of(prompts, completions, sampling, weight_version=self.weight_version)

    @contextmanager
    def turn_session(self, sampling: SamplingParams) -> Iterator[VLLMTurns]:
        """A batch of turns that come one after the other; see engines/turns.py. It raises what `generate` raises."""
        with self._sampling(generators=False) as llm:  # tools draw meanwhile
            yield VLLMTurns(self, llm, sampling)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy these weights (checkpoint names, full tensors, any float dtype) into the engine; see RolloutEngine.

        Raises:
            WeightSyncError: the engine sleeps; or vLLM refused them, and is closed: it cannot load again after that.
            UnsupportedError: experts that vLLM cannot load on a CPU; it is closed.
            UnavailableError: the engine is closed.
        """
        want = "every weight of the model, whole, under its checkpoint name; fix: pass checkpoint_weights(model), or "
        want += "use_vllm=False where vLLM cannot load this model at its start"
        with self._loading(f"weight version {version}", version, want=want) as llm:
            weights = WeightStream.of(named_weights)
            weights = weights if self._tie is None else self._tie.undo(weights)
            with packed_experts(llm) if self._on_cpu else nullcontext():
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def sleep(self) -> None:
        """Drop weights and KV cache; see RolloutEngine. Does nothing without `enable_sleep_mode`.

        vLLM's level 2 keeps no copy of the weights in the CPU's memory: the trainer has newer ones. After waking there
        are no usable weights, so the version is -1 from here on.
        """
        if self._can_sleep and not self._asleep:
            self._engine().sleep(level=self._sleep_level)
            self._asleep, self.weight_version = True, -1

    def wake(self) -> None:
        """Allocate the memory again. `load_weights` has to follow; see RolloutEngine."""
        if self._asleep:
            self._engine().wake_up()
            self._asleep = False

    def close(self) -> None:
        """Stop vLLM, free its memory and remove its folder. A second call does nothing."""
        self._llm = None
        self._close()

    def _engine(self) -> Any:
        if self._llm is None:
            raise UnavailableError("got a call on a closed vllm engine, want an open one; fix: make a new engine")
        return self._llm

    @contextmanager
    def _sampling(self, *, generators: bool = True) -> Iterator[Any]:
        """vLLM's `LLM`, for the requests of a batch."""
        if self.weight_version < 0:
            raise WeightSyncError(
                "got generate on a vllm engine that dropped its weights to sleep, want the trainer's first; "
                "fix: wake(), then load_weights(...)"
            )
        llm = self._engine()
        if self._on_cpu:
            # A resumed run has not made the calls before: what they left in the cache may not change the last bits.
            llm.reset_prefix_cache()
        try:
            # vLLM compiles small functions that enforce_eager does not reach.
            stance = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
            with preserved_state(generators=generators), stance:
                yield llm
        except BaseException:
            self.close()  # the next call would return the unfinished requests
            raise

    @contextmanager
    def _loading(self, what: str, version: int, *, want: str) -> Iterator[Any]:
        """vLLM's `LLM`, to load weights into; an error of it closes the engine, which cannot load again after that."""
        if self._asleep:
            # vLLM would write to memory that it has freed.
            raise WeightSyncError("got load_weights on a sleeping vllm engine, want it awake; fix: wake() before")
        llm = self._engine()
        try:
            with preserved_state():
                yield llm
        except BaseException as error:  # Ctrl-C too: who gets no engine cannot close it
            self.close()
            if isinstance(error, UnsupportedError) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(
                f"got {type(error).__name__} from vLLM while loading {what}, and closed the engine: {error}; "
                f"want {want}"
            ) from error
        # Keys and values of the old weights are wrong for the new ones; an adapter always has the same name to vLLM.
        llm.reset_prefix_cache()
        self.weight_version = version

    def _requests(self, prompt_options: list[dict[str, Any]], sampling: SamplingParams) -> list[Any]:
        from vllm import SamplingParams as RequestParams
        from vllm.sampling_params import StructuredOutputsParams

        regex, forced = sampling.structured_outputs_regex, dict[str, Any]()
        if self._has_mask:  # which takes neither temperature 0 nor an unlimited top_k
            greedy = {"temperature": 1.0, "top_k": 1}
            forced = {"top_k": sampling.top_k or self._vocab_size} if sampling.temperature > 0 else greedy
        try:
            structured = None if regex is None else StructuredOutputsParams(regex=regex)
            return [
                # As a server makes them of JSON. Only stop strings need the text.
                RequestParams.from_optional(
                    **options | forced, detokenize="stop" in sampling.extra, structured_outputs=structured
                )
                for options in prompt_options
            ]
        except Exception as error:  # of several types, all about these options
            raise InputError(
                f"got sampling options that vLLM refuses: {error}; want what it takes; fix: change that option"
            ) from error


class VLLMAdapterEngine(VLLMEngine):
    """A VLLMEngine with the weights of the base model, and the adapter of the PeftModel that is trained.

    `model` is the trainer's PeftModel; `load_weights` takes the adapter, as `adapter_stream` gives it.

    Raises:
        UnsupportedError: an adapter that vLLM has no layers for, as ServedAdapter; fp32 on a GPU, and with a base in 4
            bits; a mixture of experts on a CPU.
        UnavailableError: a base in 4 bits, and no plugin of vLLM's for it.
        InputError: a rank above the largest that vLLM has.
    """

    # Level 1 keeps the base model in the CPU's memory. Level 2 would discard it, and it is sent once.
    _sleep_level = 1
    takes_adapter = True

    def __init__(self, model: Any, tokenizer: Any, options: VLLMOptions) -> None:
        self._adapter = ServedAdapter(model)
        super().__init__(base_model(model), tokenizer, options.with_adapter(self._adapter))

    def _start(self, model: Any, tokenizer: Any, arguments: dict[str, Any], resources: ExitStack) -> Any:
        if not layers_in_4bit(model):
            return super()._start(model, tokenizer, arguments, resources)
        # They are read at the start, and never again.
        codes = base_codes(self._adapter.model, self.weight_dtype)
        with temporary_folder(codes.nbytes) as folder:
            write_checkpoint(codes, model, tokenizer, folder=folder, quantized=True)
            return start_vllm(str(folder), options=arguments, on_cpu=self._on_cpu, resources=resources)

    def _load_first(self, model: Any) -> None:
        if not layers_in_4bit(model):
            base = base_weights(self._adapter.model, self.weight_dtype)
            try:
                super().load_weights(base, version=0)
            finally:
                base.finish()
        checked_load_weights(self, adapter_stream(self._adapter.model, self.weight_dtype), version=0)

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the adapter into the engine. It raises what VLLMEngine raises."""
        from vllm.lora.request import LoRARequest

        self.weight_version = -1
        want = "an adapter that vLLM can serve; fix: vllm_adapter_sync=False"
        with self._loading(f"the adapter of version {version}", version, want=want) as llm:
            with self._adapter.folder(WeightStream.of(named_weights)) as folder:
                llm.llm_engine.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
            self._lora_request = LoRARequest("policy", 1, str(folder))


class VLLMTurns:
    """A TurnSession on the `LLM` of an engine, which has no other requests."""

    is_together, pending = False, ()

    def __init__(self, engine: VLLMEngine, llm: Any, sampling: SamplingParams) -> None:
        self._engine, self._llm, self._sampling = engine, llm.llm_engine, sampling
        self._counter, self._sampled = llm.request_counter, dict[str, tuple[int, bool]]()

    @property
    def has_work(self) -> bool:
        return bool(self._llm.has_unfinished_requests())

    def add(self, turn: Turn) -> None:
        from vllm.sampling_params import RequestOutputKind

        sampling = turn_sampling(self._sampling, turn.max_tokens, seed=turn.seed)
        (prompt,), options = self._engine._options([turn.prompt_ids], sampling)
        (params,) = self._engine._requests(options, sampling)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        name, lora = str(next(self._counter)), self._engine._lora_request
        self._sampled[name] = turn.episode, bool(params.logprobs)
        with _sampling_errors():
            self._llm.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=lora)

    def step(self) -> list[tuple[int, Completion]]:
        """A token of each turn that is under way."""
        with _sampling_errors():
            outputs = [output for output in self._llm.step() if output.finished]
        told = [(*self._sampled.pop(output.request_id), output.outputs[0]) for output in outputs]
        return [(episode, _completion(output, listed, self._sampling.top_k_listed)) for episode, listed, output in told]


@contextmanager
def _sampling_errors() -> Iterator[None]:
    """Turn what vLLM raises while it samples into an UnavailableError."""
    try:
        yield
    except Exception as error:
        raise UnavailableError(
            f"got {type(error).__name__} from vLLM while sampling, and closed the engine: {error}; want a model and "
            "options that vLLM can run here; fix: change engine_options or generation_kwargs, or use_vllm=False"
        ) from error


def _completion(output: Any, listed: bool, top: int = 0) -> Completion:
    logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
    support, mask = None, getattr(output, "sampling_mask", None)
    if mask is not None:
        support = ListedTokens.of(mask.token_ids)
    elif listed:
        steps = ({token: entry.logprob for token, entry in step.items()} for step in output.logprobs)
        support = listed_support(steps, top)
    experts = as_experts(getattr(output, "routed_experts", None))
    return Completion(list(output.token_ids), logprobs, output.finish_reason, support, experts)
