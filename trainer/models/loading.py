"""Load a model, its tokenizer and its teacher; precision, identity and longest sequence of a model."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from fused_grpo.errors import DataError, FusedGRPOError, InputError, UnsupportedError, WrongTypeError
from fused_grpo.integrations.model_modes import uncompiled as uncompiled
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.console import progress, without_bars
from fused_grpo.trainer.logging.model_card import is_hub_id
from fused_grpo.trainer.models.adapters import base_model, is_adapted, is_prompt_tuned
from fused_grpo.trainer.models.quantized import QUANTIZATION, check_quantization, keep_exact, quantization_of

SELF = "self"  # the reference model
FINGERPRINT_VALUES = 256  # of each parameter
_SET_HERE = {"cls", "pretrained_model_name_or_path", "return_unused_kwargs", "state_dict"}  # of `from_pretrained`
_NOWHERE = {"disk", "meta"}  # of `device_map`


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Around what reads a model's files: an error in one line that names them."""
    try:
        yield
    except (FusedGRPOError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of the network, the hub, a file
        reason = " ".join(str(error).split())[:600] or type(error).__name__
        raise DataError(
            f"got {what} cannot be loaded: {reason}; want a folder with a model in it, or the name of one on the hub; "
            "fix: the path or the name, what it says of an option, or a network and a login where it is on the hub"
        ) from error


def check_source(what: str, name: Any, options: Mapping[str, Any] | None) -> None:
    """DataError for a folder or hub id where no model can be, WrongTypeError for what is none and no module.

    UnsupportedError for a module that is no causal LM, as far as its attributes say; InputError for one without what is
    saved beside it.
    """
    if isinstance(name, nn.Module) and hasattr(base := base_model(name), "config"):
        if getattr(base, "get_output_embeddings", lambda: None)() is None or not hasattr(base, "generation_config"):
            raise UnsupportedError(
                f"got a {type(base).__name__} as {what}, without output embeddings, want a causal LM; fix: "
                "AutoModelForCausalLM"
            )
        if empty := next((key for key, weight in base.named_parameters() if weight.is_meta), None):
            raise InputError(
                f"got a {type(base).__name__} as {what} whose {empty} is on the meta device, without numbers, want all "
                "weights in memory; fix: from_pretrained(...) without offloading, and outside of torch.device('meta')"
            )
        if base.generation_config is None:
            raise InputError(
                f"got a {type(base).__name__} as {what} whose generation_config is None, want one, which is saved "
                "beside it; fix: model.generation_config = GenerationConfig.from_model_config(model.config)"
            )
        return
    if not isinstance(name, str | Path):
        raise WrongTypeError(f"got a {type(name).__name__} as {what}, want a path, a hub id or a model")
    folder = Path(name, (options or {}).get("subfolder") or "")
    problem = "which is a file" if folder.is_file() else None
    if folder.is_dir():
        with loading(f"{what} {str(name)!r}, whose index"):
            problem = _problem_of_folder(folder, {"gguf_file", "variant", "config"}.isdisjoint(options or {}))
    elif not folder.exists() and not is_hub_id(str(name)):
        problem = "a path that does not exist"
    if problem:
        raise DataError(
            f"got {what} {str(name)!r}, {problem}; want a folder with a model in it, or the name of one on the hub; "
            "fix: the path, or save or download the model again"
        )


def check_init_kwargs(name: str, given: Mapping[str, Any] | None) -> None:
    """InputError for options of `from_pretrained` that are set here, or with which it returns no model to train."""
    options, problem = given or {}, None
    places = options.get("device_map")
    if taken := sorted(_SET_HERE & options.keys()):
        problem = f"{taken[0]!r} in {name}, which is set here, want other options; fix: leave it out"
    elif options.get("output_loading_info"):
        problem = f"output_loading_info in {name}, want a model without such a report; fix: leave it out"
    elif not isinstance(config := options.get("config"), PreTrainedConfig | None):
        problem = f"config={config!r} in {name}, want a PreTrainedConfig; fix: AutoConfig.from_pretrained(...)"
    elif _NOWHERE & {str(place) for place in (places.values() if isinstance(places, Mapping) else [places])}:
        problem = f"device_map={places!r} in {name}, want weights that can be trained in memory; fix: leave it out"
    if problem:
        raise InputError(f"got {problem}")


def _problem_of_folder(folder: Path, plain: bool) -> str | None:
    """Why a folder cannot be loaded; `plain`: config and weights have their usual names."""
    if plain and not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        return "an adapter (pass a PeftModel with is_trainable=True)" if adapter else "a folder without config.json"
    if odd := [path.name for path in folder.iterdir() if not (path.is_file() or path.is_dir())]:
        return f"with {odd[0]}, which is no regular file"  # it might hang or fill the memory
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    for index in folder.glob("*.index.json") if plain else ():
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        if missing := sorted(named - {path.name for path in weights}):
            return f"without {missing[0]}, which {index.name} names"
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt"):
                pass
        except Exception as error:  # cut short, or a pointer of git-lfs
            return f"whose {path.name} cannot be read ({error})"
    return None if weights or not plain else "a folder without weights"


def wants_bf16(args: GRPOConfig) -> bool:
    """The option `bf16`; by default, True where a GPU trains."""
    return torch.cuda.is_available() and not args.use_cpu if args.bf16 is None else args.bf16


def tokenizer_for(model: str | Path | PreTrainedModel, processing_class: Any, args: GRPOConfig) -> Any:
    """The given tokenizer, or the one saved with the model; with a padding token.

    InputError where there is none with the model, or it has no end-of-sequence token; WrongTypeError for anything else.
    """
    if processing_class is None:
        source = getattr(model.config, "_name_or_path", "") if isinstance(model, nn.Module) else str(model)
        if not source:
            raise InputError("got a model without a path and no tokenizer; fix: pass processing_class=<tokenizer>")
        processing_class = AutoTokenizer.from_pretrained(source, **_tokenizer_options(loading_options(args)))
    if not all(hasattr(processing_class, name) for name in ("eos_token_id", "get_vocab", "batch_decode")):
        raise WrongTypeError(
            f"got a {type(processing_class).__name__} as processing_class, want a tokenizer of transformers; fix: "
            "AutoTokenizer.from_pretrained(...)"
        )
    if processing_class.eos_token_id is None:
        raise InputError("got a tokenizer without an eos_token, want one: completions could not end")
    if processing_class.pad_token_id is None:
        processing_class.pad_token = processing_class.eos_token
    return processing_class


def knows_text(tokenizer: Any) -> bool:
    """False for what transformers makes of a folder without a tokenizer's files: special tokens alone."""
    return not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)


def check_gradients(model: Any) -> None:
    """Raise UnsupportedError where nothing gets a gradient: in torch.no_grad, or in or of torch.inference_mode.

    And in torch.autocast, which is not the run's own.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    if not torch.is_grad_enabled() or any(parameter.is_inference() for parameter in parameters):
        raise UnsupportedError(
            "got a trainer inside torch.no_grad() or torch.inference_mode(), or a model that was made there, want "
            "gradients; fix: make the model and the trainer, and call train(), outside of it"
        )
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise UnsupportedError(
            "got a trainer inside torch.autocast(), which would round the trainer's log-probs where its checks want "
            "more, want no context around it; fix: bf16=True, and the trainer and train() outside of it"
        )


def load_model(
    model: str | Path | PreTrainedModel,
    accelerator: Accelerator,
    *,
    trust_remote_code: bool,
    given: str = "model_init_kwargs",
    **options: Any,
) -> Any:
    """The module itself, or a model from a path or hub id, in fp32 unless `options` of `from_pretrained` differ.

    It is loaded straight to the rank's device; under FSDP to the CPU, from where its shards go to the device. Logs a
    warning, once, where there are options for a module; `given` is their name in the config. UnsupportedError for a
    device without fp64.
    """
    if accelerator.device.type == "mps":
        raise UnsupportedError(
            "got Apple's MPS to train on, want a device with fp64, which a loss and its counts are summed in; fix: "
            "use_cpu=True"
        )
    if not isinstance(model, str | Path):
        if options:
            warn_once(
                f"got {given} {sorted(options)} with a {type(model).__name__}, which is loaded already: they "
                "change nothing; fix: pass its path or hub id"
            )
        return uncompiled(model)
    arguments: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if accelerator.distributed_type != DistributedType.FSDP and accelerator.device.type != "cpu":
        arguments["device_map"] = {"": accelerator.device}
    downloads = not Path(model).exists() and not _is_cached(str(model))
    words = f"{'downloading and ' * downloads}loading {model}"
    quietly = nullcontext() if downloads else without_bars()
    with loading(f"model {str(model)!r}"), quietly, progress(words, bars=downloads):
        load: Any = AutoModelForCausalLM.from_pretrained
        loaded, report = load(str(model), **arguments | options | {"output_loading_info": True})
        if missing := sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]):
            raise DataError(
                f"got model {str(model)!r} without {len(missing)} of the weights of a {type(loaded).__name__}, such as "
                f"{missing[0]}, want all: they would be random numbers; fix: a whole checkpoint of that class, whose "
                "config.json fits its weights; or load it yourself, and pass the model"
            )
        # Where its package is missing, transformers says so once in a process, and of a later model nothing.
        if (attention := loaded.config._attn_implementation) not in (None, "eager", *ALL_ATTENTION_FUNCTIONS):
            raise ImportError(f"attn_implementation {attention!r}, of which the package is not installed")
        return loaded


def warn_of_other_weights(model: Any) -> None:
    """A warning for a module, not quantised, with other weights than a new one of its class and config has.

    What is saved of it would load as another model. A class that cannot be made from its config is not compared.
    Two names of one tensor (a tied head) differ from two tensors.
    """

    def shapes(one: nn.Module) -> dict[str, tuple[torch.Size, str]]:
        first, weights = dict[int, str](), one.state_dict(keep_vars=True)
        return {name: (weight.shape, first.setdefault(id(weight), name)) for name, weight in weights.items()}

    if not isinstance(model, PreTrainedModel) or quantization_of(model.config):  # whose weights are codes
        return
    expected = actual = shapes(model)
    with torch.random.fork_rng([]), suppress(Exception), torch.device("meta"):
        expected = shapes(type(model)(copy.deepcopy(model.config)))
    if differ := sorted({name for name, _ in expected.items() ^ actual.items()}):
        warn_once(
            f"got a {type(model).__name__} whose {', '.join(differ[:8])} are not those of its config, or tied "
            "otherwise: from_pretrained will load what is saved as another model; fix: a class of your own for it, or "
            "config.tie_word_embeddings as it is"
        )


def warn_of_added_rows(model: Any, peft_config: Any) -> None:
    """A warning for a module whose embedding has other rows than the path that it came from: an adapter has none."""
    config = peft_config or getattr(model, "active_peft_config", None)
    if config is None or not isinstance(model, nn.Module):
        return
    base, before = base_model(model), None
    embedding, source = base.get_input_embeddings(), base.config._name_or_path
    with suppress(Exception):  # without a path, or of a hub id that is not cached
        before = AutoConfig.from_pretrained(source, local_files_only=True).get_text_config().vocab_size
    name = next((name for name, one in base.named_modules() if one is embedding), "").rpartition(".")[2]
    if before not in (None, len(embedding.weight)) and name not in (getattr(config, "modules_to_save", None) or ()):
        warn_once(
            f"got a model with {len(embedding.weight)} tokens, of which {source} has {before}, and an adapter, which "
            f"is saved alone: rows of the embedding that were added are lost; fix: modules_to_save={[name, 'lm_head']} "
            "in its config, or save the model and pass its new path"
        )


def load_config(what: str, model: Any, args: GRPOConfig, init_kwargs: Mapping[str, Any] | None) -> Any:
    """The configuration of a module, or with which a path or hub id will be; DataError where it cannot be loaded.

    UnsupportedError where no causal LM is made of it, as of models that see or hear.
    """
    if isinstance(model, nn.Module):
        return base_model(model).config
    options = {"trust_remote_code": args.runs_remote_code, **(init_kwargs or {})}
    with loading(f"{what} {str(model)!r}, whose config"):
        given = {name: value for name, value in options.items() if name not in ("dtype", "torch_dtype", QUANTIZATION)}
        config = given.pop("config", None) or AutoConfig.from_pretrained(model, return_unused_kwargs=True, **given)[0]
    beside = getattr(config, "auto_map", None) or {}  # classes of its own
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in beside:
        raise UnsupportedError(
            f"got {what} {str(model)!r} of type {config.model_type!r}, want one of which transformers' "
            "AutoModelForCausalLM makes a model; fix: another model; one for images or audio too is trained on text "
            "if you load it yourself and pass it"
        )
    return config


def loading_options(args: GRPOConfig) -> dict[str, Any]:
    """Those of the policy."""
    return {**(args.model_init_kwargs or {}), "trust_remote_code": args.runs_remote_code}


def generation_config(model: Any, args: GRPOConfig) -> Any:
    """That of a module, or beside a path; None where a model that is yet to be loaded makes one."""
    if isinstance(model, nn.Module):
        return base_model(model).generation_config
    revision = (args.model_init_kwargs or {}).get("revision") or "main"
    with loading(f"model {str(model)!r}, whose generation_config"), suppress(OSError):
        return GenerationConfig.from_pretrained(str(model), revision=revision)
    return None


def _tokenizer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"trust_remote_code": options["trust_remote_code"], "revision": options.get("revision") or "main"}


def _is_cached(model: str) -> bool:
    """Whether weights of that hub id are in the hub's cache."""
    files = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    try:
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in files)
    except HFValidationError:  # no hub id: loading it raises its own error
        return True


def load_teacher(
    teacher: str | Path | PreTrainedModel | None,
    args: GRPOConfig,
    accelerator: Accelerator,
    tokenizer: Any,
    policy: Any = None,
) -> Any:
    """The teacher, not trained, as `load_model` loads the policy; "self" and None as they are.

    InputError where an id is another token for the tokenizer that lies beside the teacher than for the policy's;
    UnsupportedError for one in 8 bits, or in 4 under FSDP.
    """
    if teacher is None or teacher == SELF:
        return teacher
    options = {"trust_remote_code": args.runs_remote_code, **(args.teacher_model_init_kwargs or {})}
    if not isinstance(teacher, nn.Module):
        _check_tokens(teacher, tokenizer, **_tokenizer_options(options))
    elif isinstance(policy, nn.Module):  # before what they may share is frozen
        check_teacher_model(teacher, policy)
    loaded = load_model(teacher, accelerator, given="teacher_model_init_kwargs", **options)
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    check_quantization(quantization_of(loaded.config), has_adapter=True, is_sharded=is_sharded)
    keep_exact(loaded)
    return loaded.requires_grad_(False).eval()


def _check_tokens(teacher: str | Path, tokenizer: Any, **options: Any) -> None:
    try:
        own = AutoTokenizer.from_pretrained(str(teacher), **options)
    except (OSError, ValueError):  # no tokenizer beside the weights; where they are missing too, loading them says so
        return
    token_of = {index: token for token, index in own.get_vocab().items()} if knows_text(own) else {}
    other = [(index, token) for token, index in tokenizer.get_vocab().items() if token_of.get(index, token) != token]
    if other:
        index, token = other[0]
        raise InputError(
            f"got the teacher_model {teacher}, in whose tokenizer {len(other)} tokens of the policy's have other ids "
            f"({index} is {token_of[index]!r} and not {token!r}), want the same; fix: a teacher of the policy's family"
        )


def check_teacher_model(teacher: Any, policy: Any) -> None:
    """Check that the teacher can see the policy's tokens and has a logit for each.

    InputError for a smaller vocabulary or the policy itself; UnsupportedError for virtual tokens of one of the two.
    """
    for name, model in (("the policy", policy), ("the teacher", teacher)):
        if model != SELF and is_prompt_tuned(model):
            raise UnsupportedError(
                f"got a teacher_model, and {name} has virtual tokens, want rows with the same places for both; fix: "
                "LoRA instead of prompt tuning"
            )
    if teacher == SELF:
        return
    own = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    if not own.isdisjoint(map(id, teacher.parameters())) or base_model(teacher) is base_model(policy):
        raise InputError(
            "got the model that is trained as its teacher_model, too, or one that has some of its weights, want one "
            "that stays; fix: teacher_model='self' for the model as it is now, or load it a second time"
        )
    policy_tokens, teacher_tokens = (len(base_model(m).get_output_embeddings().weight) for m in (policy, teacher))
    if policy_tokens > teacher_tokens:
        raise InputError(
            f"got a teacher_model with a vocabulary of {teacher_tokens} and a policy with one of {policy_tokens}, want "
            "one that has all of the policy's tokens; fix: a teacher of the policy's family; where only rows of "
            f"padding differ, pass the policy as a loaded model after its resize_token_embeddings({teacher_tokens})"
        )


def fingerprint(model: PreTrainedModel) -> str:
    """A sha256 sum of the first values of each parameter: it differs between models and between checkpoints of one.

    Of a model with an adapter, of what is not trained. Numbers count in bf16, so that those of a model that is loaded
    in another dtype are the same.
    """
    digest = hashlib.sha256(type(base_model(model)).__name__.encode())
    for name, parameter in model.named_parameters():
        if is_adapted(model) and parameter.requires_grad:
            continue
        first = parameter.detach().flatten()[:FINGERPRINT_VALUES].cpu()
        first = first.bfloat16() if first.is_floating_point() else first
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def known_tokens(text_config: Any, model: Any) -> int:
    """The tokens that a module, or one that is yet to be loaded, has an embedding for."""
    rows = [len(base_model(model).get_input_embeddings().weight)] if isinstance(model, nn.Module) else []
    return int(min([text_config.vocab_size, *rows]))


def positions(*text_configs: Any) -> int | None:
    """The longest sequence of all models, with what scaled rotary embeddings add to it; None where none is known."""
    return min(filter(None, map(_positions, text_configs)), default=None)


def _positions(text_config: Any) -> int | None:
    most = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1 or getattr(text_config, "alibi", False):
        return None
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, Mapping)]  # one for each kind of layer
    scaled = [(kind.get("original_max_position_embeddings") or most) * (kind.get("factor") or 1) for kind in kinds]
    return max([most, *map(int, scaled)])
