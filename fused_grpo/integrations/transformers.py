"""A causal LM of transformers that returns log-probs instead of logits, inside a `with` block.

    with return_logprobs(model):
        out = model(input_ids, attention_mask=attention_mask, labels=labels)
    out.log_probs, out.entropy, out.loss

The model's own forward runs to its end. Only its head is replaced: during a call with labels, `lm_head.forward`
computes log-probs from its input, and the model continues with a *probe* instead of the logits: one artificial row,
[1, 1, V]. This has four consequences:

- All other parts of the model stay as they are: transforms before the head (a scale, a dense layer, a cast), the
  auxiliary loss of experts, hidden states, adapters. This file does not depend on the structure of a model.
- Everything that wraps the head also wraps the log-prob op: FSDP gathers its weight, Accelerate moves its inputs. This
  holds in the backward pass, too, where the op recomputes logits and needs the weight: the head *returns* log-probs
  through all its hooks, and the hooks gather the weight again. Our hook is the last one: it replaces the log-probs by
  the probe.
- The transform of the logits is checked at every call. `logit_transform.py` reads it from the config before; then the
  model applies its real transform (scales, caps, cuts, masks) to the probe. If they differ, the call is refused.
- A call without labels runs the original model, so `generate` works.

Two instance attributes change: `forward` of the model and, during a call, `forward` of its head. Both are restored.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fused_grpo._maths.statistics import compute_dtype
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head.checks import check_plan, check_temperature_values, check_tensors, outside_graphs
from fused_grpo.integrations._peers import check_items, check_version
from fused_grpo.integrations.logit_transform import head_transform, is_close, mismatch, transformed
from fused_grpo.integrations.model_head import forward_name, head_of, probe, weight_of
from fused_grpo.integrations.model_modes import replaced
from fused_grpo.logprobs import linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.passes.choice import Impl

check_version("transformers", ">=5.3")

from transformers import PreTrainedModel  # noqa: E402 - only where it is installed

_IGNORED = -100  # transformers'
_AUXILIARY_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_INSTEAD = "call it without labels, and linear_logprobs on its hidden states"


@contextmanager
def return_logprobs(
    model: nn.Module,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    chunk_bytes: int | None = None,
    batch_invariant: bool = False,
    impl: Impl = "auto",
) -> Iterator[None]:
    """Inside, `model(..., labels=labels)` returns log-probs and never computes logits. Other calls do not change.

    Equals: `logits = model(...).logits[:, :-1].float() / temperature`
            `logits.log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]`

    The output is the model's own, without logits and with
        log_probs: [B, T-1] fp32, of each next token; 0 where its label is -100.
        entropy: [B, T-1] fp32, of the whole distribution, in nats; 0 there too. None with `entropy=False`.
        loss: minus the sum of the log-probs, divided by `num_items_in_batch` or, without it, by the number of labels;
            plus the model's auxiliary loss times its coefficient. At temperature 1 it is the model's own loss (which is
            NaN, and here 0, where all labels are -100).
    Labels are those of transformers: in the shape of `input_ids`, and shifted inside. With `shift_labels=` instead,
    which are shifted already, results are [B, T]. `ignore_index=` takes the place of -100. A call with labels uses no
    cache.

    Args:
        model: a causal LM of transformers, or one inside a PeftModel, DDP, FSDP, DeepSpeed's engine or torch.compile.
        temperature: the divisor of the logits; a number, or a tensor that broadcasts to the shape of the log-probs.
        entropy: whether to return the entropy.
        chunk_bytes, batch_invariant, impl: as in `linear_logprobs`.

    Numerics, memory: those of `linear_logprobs`. Also in bf16 and under autocast, log-probs are those of logits that
        were never rounded, so they are more exact than those from the model's own logits.

    Raises:
        InputError: no causal LM; labels that do not fit the hidden states.
        UnsupportedError: a head that is not one matrix; a model whose transform of the logits is not in its config.
    """
    causal_lm = _causal_lm(model)
    # Before a backbone has run.
    check_plan(impl, chunk_bytes, batch_invariant=batch_invariant, entropy=entropy)
    if isinstance(temperature, Tensor):  # whose values count where there is a label
        check_tensors(temperature=temperature)
    else:
        check_temperature_values(temperature)
    options = {"chunk_bytes": chunk_bytes, "batch_invariant": batch_invariant, "impl": impl}
    scorer = _Scorer(causal_lm, temperature, entropy, options)
    try:
        with replaced(causal_lm, "forward", scorer.wrap(causal_lm.forward)):
            yield
    finally:
        scorer.open = False


@dataclasses.dataclass
class _Call:
    """The state of one call with labels."""

    targets: Tensor  # [B, T], the next token of each token; `ignored` where there is none
    ignored: int
    shifted: bool  # whether the caller shifted the labels: then the last position has a target
    temperature: float | Tensor  # or [B, T]
    scores: tuple[Tensor, ...] | None = None  # log-probs and maybe entropy, once the head has been called
    probe: Tensor | None = None  # [1, 1, V], in place of the logits

    @property
    def scored(self) -> slice:
        """The positions that have a target."""
        return slice(None) if self.shifted else slice(-1)


class _Scorer:
    """Replaces the forward of a model and, during a call with labels, the forward of its head."""

    def __init__(
        self, causal_lm: PreTrainedModel, temperature: float | Tensor, entropy: bool, options: dict[str, Any]
    ) -> None:
        self.causal_lm, self.temperature, self.entropy, self.options = causal_lm, temperature, entropy, options
        self.name, self.verified, self.open = type(causal_lm).__name__, False, True
        self.transform = head_transform(causal_lm.config)
        head_of(causal_lm)  # raises before anything runs
        if causal_lm.config.is_encoder_decoder or getattr(causal_lm, "loss_type", None) == "ForMaskedLM":
            raise UnsupportedError(
                f"got a {self.name}, whose labels are of the token at their own place, want those of the next one; "
                "fix: AutoModelForCausalLM, or linear_logprobs on its hidden states"
            )
        if getattr(causal_lm, "z_loss_coefficient", 0.0):
            raise UnsupportedError(
                f"got a {self.name} with a loss on the size of its logits, want z_loss_coefficient=0.0; fix: set "
                "model.z_loss_coefficient = 0.0"
            )

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of `original`, with the same signature, by which generate() checks its arguments.

        It is a bound method, because copies of the model copy it: bound to the copy, it calls the copy's own forward.
        """
        signature = inspect.signature(original)

        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            if model is not self.causal_lm:
                return (original.__func__.__get__(model) if inspect.ismethod(original) else original)(*args, **kwargs)
            named = {**signature.bind_partial(*args).arguments, **kwargs}
            labels, shift_labels = (named.pop(name, None) for name in ("labels", "shift_labels"))
            if not self.open or (labels is None and shift_labels is None):
                return original(*args, **kwargs)
            count, ignored = named.pop("num_items_in_batch", None), named.pop("ignore_index", _IGNORED)
            if not isinstance(named.get("logits_to_keep", 0), int) or named.get("logits_to_keep"):
                raise InputError(
                    "got logits_to_keep with labels, want all; fix: leave it out, and label the others -100"
                )
            is_class = named.get("return_dict")
            if not (getattr(self.causal_lm.config, "return_dict", True) if is_class is None else is_class):
                raise InputError("got return_dict=False with labels, want the model's output class; fix: leave it out")
            if "use_cache" in signature.parameters or hasattr(self.causal_lm.config, "use_cache"):
                named["use_cache"] = False
            name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
            check_tensors(**{name: given})
            if count is not None:
                check_items(count)
            if given.dtype != torch.int64:
                raise InputError(f"got {name} of dtype {given.dtype}, want torch.int64; fix: {name}.long()")
            _, ignored = check_plan(self.options["impl"], ignore_index=ignored)  # what pads the shifted labels
            for tokens in ("input_ids", "inputs_embeds"):
                if isinstance(inputs := named.get(tokens), Tensor):
                    self._check_labels(given, (*inputs.shape[:2], head_of(self.causal_lm).in_features))
            targets = pad(labels[..., 1:], (0, 1), value=ignored) if shift_labels is None else shift_labels
            call = _Call(targets, ignored, shifted=shift_labels is not None, temperature=self.temperature)
            if isinstance(self.temperature, Tensor):
                call.temperature = _broadcast(self.temperature, targets, call.scored, targets == ignored)
            return self._score(original, named, call, count)

        functools.update_wrapper(forward, original)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
        return types.MethodType(forward, self.causal_lm)

    def _score(self, original: Callable[..., Any], arguments: dict[str, Any], call: _Call, count: Any) -> Any:
        """The output of the model's own forward, with log-probs instead of logits."""
        head = head_of(self.causal_lm)

        def scores_of(hidden: Tensor) -> tuple[Tensor, ...]:
            if call.scores is not None:
                raise UnsupportedError(f"got a {self.name} that calls its head twice, want one call; fix: {_INSTEAD}")
            call.scores, call.probe = self._score_targets(head, hidden, call)
            return call.scores

        def swap(module: nn.Module, inputs: Any, outputs: Any) -> Tensor:
            assert call.scores is not None
            assert call.probe is not None
            if not isinstance(outputs, tuple) or len(outputs) != len(call.scores):
                raise UnsupportedError(
                    f"got a forward hook on the head of {self.name} that returns its own {type(outputs).__name__}, "
                    "want none: the head returns log-probs here; fix: remove it meanwhile, or call without labels"
                )
            # Other hooks may have replaced the log-probs, and need their replacements in the backward pass. FSDP2 also
            # rounds them to its `output_dtype` after its hooks: then the fp32 tensors before that are used.
            pairs = zip(outputs, call.scores, strict=True)
            call.scores = tuple(new if new.dtype == old.dtype else old for new, old in pairs)
            return call.probe.clone()

        hook = head.register_forward_hook(swap)
        try:
            with replaced(head, forward_name(head), scores_of):
                output = original(**arguments)
        finally:
            hook.remove()
        return self._finish(output, call, count)

    def _check_labels(self, labels: Tensor, hidden: Sequence[int]) -> None:
        if labels.shape != hidden[:-1]:
            raise InputError(
                f"got labels {tuple(labels.shape)} and hidden states {tuple(hidden)} at the head of "
                f"{self.name}, want one label for each; fix: pass labels of the shape of input_ids"
            )

    def _score_targets(self, head: Any, hidden: Tensor, call: _Call) -> tuple[tuple[Tensor, ...], Tensor]:
        """Log-probs and maybe entropy, [B, T] or [B, T-1]; and the probe."""
        self._check_labels(call.targets, hidden.shape)
        targets = call.targets.to(hidden.device)
        temperature, weight = call.temperature, weight_of(head)
        if isinstance(temperature, Tensor):
            temperature = temperature.to(hidden.device, compute_dtype(hidden))
        arguments = {**self.transform, **self.options, "temperature": temperature, "bias": head.bias}
        arguments["ignore_index"] = call.ignored
        if self.entropy:
            scores: tuple[Tensor, ...] = linear_logprobs_and_entropy(hidden, weight, targets, **arguments)
        else:
            scores = (linear_logprobs(hidden, weight, targets, **arguments),)
        # Not views: an in-place operation on a view would lose the hooks of FSDP2.
        return tuple(score[:, call.scored].clone() for score in scores), probe(hidden, len(weight))

    @outside_graphs
    def _finish(self, output: Any, call: _Call, count: Any) -> Any:
        self._check_probe(output, call)
        assert call.scores is not None
        log_probs, entropy = call.scores[0], call.scores[1] if self.entropy else None
        if count is None:
            count = (call.targets != call.ignored).sum().clamp_min(1)
        loss = -log_probs.sum() / (count.to(log_probs.device) if isinstance(count, Tensor) else count)
        auxiliary = getattr(output, "aux_loss", None)
        if isinstance(auxiliary, Tensor):
            loss = loss + self._auxiliary_coefficient() * auxiliary.to(loss.device)
        scores = {"loss": loss, "log_probs": log_probs, "entropy": entropy}
        kept = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        own_class: Any = type(output)
        return _output_class(own_class)(**{**kept, **scores, "logits": None, "unrounded": _Unrounded(scores)})

    def _check_probe(self, output: Any, call: _Call) -> None:
        """Check that the model applies to the probe the transform that the log-probs were computed with.

        Raises:
            InputError: no output class with logits.
            UnsupportedError: another transform, or the head was not called.
        """
        if call.probe is None:
            raise UnsupportedError(
                f"got a {self.name} that does not call its output embeddings, want logits from there; fix: {_INSTEAD}"
            )
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"got a {type(output).__name__} from {self.name}, want its output class; fix: return_dict=True"
            )
        if self.verified and logits.device.type == "cuda":  # only the first check may synchronize
            want = transformed(call.probe.to(compute_dtype(call.probe)), self.transform)
            close = is_close(call.probe, logits, want).all()
            torch._assert_async(close, f"{self.name} does something else to its logits than before")
            return
        if gap := mismatch(call.probe, logits, self.transform):
            raise UnsupportedError(
                f"got a {self.name} that takes {gap}: by its config it does {dict(self.transform)}, and by its forward "
                f"something else; fix: {_INSTEAD}, with the logit_scale and softcap of its forward"
            )
        self.verified = True

    def _auxiliary_coefficient(self) -> float:
        for owner in (self.causal_lm, self.causal_lm.config.get_text_config()):
            for name in _AUXILIARY_COEFFICIENTS:
                if hasattr(owner, name):
                    coefficient: float = getattr(owner, name)
                    return coefficient
        raise UnsupportedError(
            f"got an auxiliary loss from {self.name}, want {' or '.join(_AUXILIARY_COEFFICIENTS)} on the model or its "
            "config, to weigh it by; fix: pass output_router_logits=False"
        )


def _causal_lm(model: Any) -> PreTrainedModel:
    """The model of transformers inside its wrappers.

    Raises:
        InputError: there is none.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif hasattr(inner, "module"):  # DDP, FSDP, DeepSpeed
            inner = inner.module
        else:
            raise InputError(
                f"got a {type(model).__name__} with no model of transformers inside; want one; fix: pass what "
                "AutoModelForCausalLM gave"
            )
    return inner


def _broadcast(temperature: Tensor, targets: Tensor, scored: slice, is_ignored: Tensor) -> Tensor:
    """[B, T], checked, 1 at positions that are not scored."""
    temperatures, shape = temperature.new_ones(targets.shape, device=targets.device), tuple(targets[:, scored].shape)
    try:
        temperatures[:, scored] = temperature.detach().broadcast_to(shape)
    except RuntimeError:
        got = tuple(temperature.shape)
        raise InputError(f"got temperature {got}, want what broadcasts to the log-probs {shape}") from None
    temperatures = temperatures.masked_fill(is_ignored, 1.0)
    if not torch.compiler.is_compiling():  # the op finds it there, behind the backbone
        check_temperature_values(temperatures)
    return temperatures


class _Unrounded:
    """Log-probs, entropy and loss as they left the model, in a class that tree walks over an output do not enter."""

    def __init__(self, scores: dict[str, Tensor | None]) -> None:
        self.scores = {name: score for name, score in scores.items() if score is not None}


@functools.cache
def _output_class(base: Any) -> Any:
    """The output class of a model with our fields: a mapping and a dataclass, in which DDP and FSDP find tensors."""

    def restore(self: Any) -> None:
        base.__post_init__(self)
        if self.unrounded is None:
            return
        # FSDP2 makes a new output with tensors in its `output_dtype`. Accelerate sets that to bf16, in which a log-prob
        # of -5 is off by 0.02. Hooks for the backward pass are on the fp32 tensors, so these can be restored.
        for name, score in self.unrounded.scores.items():
            if getattr(self, name).dtype != score.dtype:
                setattr(self, name, score)
        OrderedDict.__delitem__(self, "unrounded")

    ours = ("log_probs", "entropy", "unrounded")
    fields = [(name, Any, dataclasses.field(default=None, repr=name != "unrounded")) for name in ours]

    def reduce(self: Any) -> Any:  # for pickle, which does not find a class that is made here
        return _made, (base, {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    namespace = {"__post_init__": restore, "__module__": __name__, "__reduce__": reduce}
    return dataclasses.make_dataclass(f"{base.__name__}WithLogProbs", fields, bases=(base,), namespace=namespace)


def _made(base: Any, values: dict[str, Any]) -> Any:
    return _output_class(base)(**values)
