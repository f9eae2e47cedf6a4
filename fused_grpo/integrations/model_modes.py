"""How a causal LM of transformers runs: at random in training mode, compiled, recomputing activations, in 16 bits.

    has_dropout(model)                     # whether log-probs of a training step differ from those of the sampler
    disable_dropout(model)                 # all rates to 0; measure again: a forward may read a config
    model = uncompiled(torch.compile(model))            # weights under their own names, and compiled all the same
    checkpoint_activations(model, {"offload": True})    # options of transformers and torch, and no others

Rates of dropout are in layers, in attributes that a layer gives to a function, in configs, routers and adapters. So
whether there is dropout is found out by two forward passes with different seeds.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from fused_grpo.errors import InputError, UnsupportedError

M = TypeVar("M")
Modes = list[tuple[nn.Module, bool, bool | None]]
_log = logging.getLogger(__name__)


@torch.no_grad()
def has_dropout(model: Any) -> bool:
    """Whether a forward pass of a causal LM in training mode is random. Takes two or three passes of 16 tokens."""
    # The output of LoRA is 0 at first, whatever its dropout.
    if any(".lora_dropout." in name and getattr(layer, "p", 0.0) > 0 for name, layer in model.named_modules()):
        return True
    embedding = model.get_input_embeddings().weight
    row = torch.arange(16, device=embedding.device)[None] % len(embedding)

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(input_ids=row).logits.float()  # type: ignore[no-any-return]

    with as_it_was(model):
        model.train()
        first, other = logits(0), logits(1)
        difference = float((first - other).norm() / first.norm())
        if difference == 0.0:
            return False
        # Sums in no fixed order, on a GPU, differ with the same seed, too.
        noise = float((first - logits(0)).norm() / first.norm())
    return difference > min(10 * noise, 1e-2)


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout rates to 0, also those that a layer gives to a function, and the noise of routers."""
    for layer in model.modules():
        for name, value in list(vars(layer).items()):
            is_rate = "drop" in name or "jitter" in name or (name == "p" and isinstance(layer, _DropoutNd))
            if is_rate and isinstance(value, float):
                setattr(layer, name, 0.0)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace `owner.name` by `value` inside the context. Afterwards it is restored, or deleted if it was inherited.

    If other code has replaced it in the meantime, that replacement stays: that code has to undo it.
    """
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is not value:
            pass
        elif is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def modes_of(model: nn.Module) -> Modes:
    """Of every layer: whether it is in training mode, and whether it recomputes its activations (None: it cannot)."""
    return [(layer, layer.training, getattr(layer, "gradient_checkpointing", None)) for layer in model.modules()]


def set_modes(modes: Modes) -> None:
    """Put every layer into its mode in `modes`, and no other."""
    for layer, training, recomputes in modes:
        layer.training = training
        if recomputes is not None:
            setattr(layer, "gradient_checkpointing", recomputes)  # noqa: B010 -- no attribute of every layer


@contextmanager
def as_it_was(model: nn.Module, *, generators: bool = True) -> Iterator[None]:
    """A context that restores the modes of all layers and, with `generators`, the states of torch's generators.

    Compiled layers run eagerly inside: other shapes would be compiled, too. Generators belong to the whole process:
    what is restored in a thread may be the state of a moment in which another one had seeded them for itself.
    """
    modes, devices = modes_of(model), {weight.device for weight in model.parameters() if weight.device.type == "cuda"}
    compiled = [(layer, layer._compiled_call_impl) for layer in model.modules() if layer._compiled_call_impl]
    with torch.random.fork_rng(devices, enabled=generators):
        try:
            for layer, _ in compiled:
                layer._compiled_call_impl = None
            yield
        finally:
            set_modes(modes)
            for layer, call in compiled:
                layer._compiled_call_impl = call


def uncompiled(model: M) -> M:
    """The model without the wrappers of torch.compile, which are in the names of its weights.

    What was compiled stays so, in place and with the same options: a layer as it was, and of a whole model its
    backbone, since the loss takes the place of its head.

    Raises:
        InputError: a model in DataParallel or DistributedDataParallel.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(
            f"got a {type(model).__name__}, want the model inside, which is wrapped here; fix: pass model.module, and "
            "start a process for each GPU with `accelerate launch`"
        )
    if not isinstance(model, nn.Module):
        return model
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if child is not model and _is_compiled(child):
                setattr(layer, name, _compiled_in_place(child))
    if _is_compiled(model):
        inner: M = _compiled_in_place(model)
        return inner
    if model._compiled_call_impl is not None:
        _log.warning(
            f"got a {type(model).__name__} after its compile(), which is about a call with its head, whose place the "
            "loss takes; fix: torch.compile(model), or compile() its backbone"
        )
    return model


def _is_compiled(layer: nn.Module) -> bool:
    return "_orig_mod" in layer._modules


def _compiled_in_place(wrapper: Any) -> Any:
    backbone = inner = wrapper._orig_mod
    if hasattr(inner, "get_output_embeddings"):
        backbone = (inner.get_base_model() if hasattr(inner, "get_base_model") else inner).base_model
    backbone._compiled_call_impl = wrapper.dynamo_ctx(backbone._call_impl)
    return inner


def checkpoint_activations(model: Any, given: Mapping[str, Any]) -> None:
    """Recompute activations in the backward pass.

    Args:
        model: of transformers, or a PeftModel.
        given: arguments of `torch.utils.checkpoint`, non-reentrant unless they say so; and of transformers' own.

    Raises:
        InputError: an option that neither transformers nor `torch.utils.checkpoint` has.
        UnsupportedError: a model that cannot.
    """
    # The name of transformers from 5.24 on; options of its own are offload and every_n_layers, from 5.16 on.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    extras, options = {}, {"use_reentrant": False, **given}
    known_names = {"preserve_rng_state", *inspect.signature(checkpoint).parameters} - {"function", "args", "kwargs"}
    for name in options.keys() - known_names:
        if name not in inspect.signature(enable).parameters:
            raise InputError(
                f"got gradient_checkpointing_kwargs with {name!r}, want arguments of torch.utils.checkpoint "
                f"({', '.join(sorted(known_names))}) or, with transformers from 5.16 on, offload and every_n_layers; "
                "fix: leave it out"
            )
        extras[name] = options.pop(name)
    if extras.get("offload") and next(model.parameters()).device.type == "cpu" and not torch.accelerator.is_available():
        _log.warning("got offload=True on a CPU, where it changes nothing: activations are in the memory of the host")
        extras["offload"] = False  # transformers would ask for pinned memory, which takes an accelerator
    had_hook = hasattr(model, "_require_grads_hook")
    try:
        enable(options, **extras)
    except ValueError as error:
        raise UnsupportedError(f"got gradient_checkpointing=True: {error} fix: gradient_checkpointing=False") from error
    if options["use_reentrant"] and hasattr(model, "peft_config"):
        # Reentrant checkpointing needs an input that requires a gradient; the frozen embedding's output does not.
        model.enable_input_require_grads()
    if not options["use_reentrant"] and not had_hook and hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()  # which the reentrant kind alone needs


def warn_of_rounding(model: nn.Module, learning_rate: float) -> None:
    """Log a warning where trained weights have 16 bits: most steps are below their distance to the next one."""
    for dtype in {weight.dtype for weight in model.parameters() if weight.requires_grad and weight.itemsize == 2}:
        # The next number is between |w| eps / 2 and |w| eps away; AdamW moves a weight by about the learning rate.
        _log.warning(
            f"got trained weights in {dtype}, want float32: a step of learning_rate={learning_rate} is lost in "
            f"rounding for those above {4 * learning_rate / torch.finfo(dtype).eps:.1g}, which is most of them; fix: "
            "model.float(), or no dtype in model_init_kwargs; bf16=True computes in bf16 all the same"
        )
