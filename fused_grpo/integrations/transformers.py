"""A causal LM of transformers that returns log-probs instead of logits, for as long as a `with` block lasts.

    with return_logprobs(model):
        out = model(input_ids, attention_mask=attention_mask, labels=labels)
    out.log_probs, out.entropy, out.loss

The model's own forward runs, to its last line. Only its head answers differently: for the length of a call with labels,
`lm_head.forward` computes log-probs from the hidden states that it is given, and a *probe* goes on in place of the
logits: one made-up row, [1, 1, V]. Four things follow from doing it there, and not beside the model:

- Everything else stays the model's: what it does before its head (a scale, a dense layer, a cast), the auxiliary loss
  of its experts, hidden states, adapters. Nothing here knows how a model is built inside.
- Whatever wraps the head wraps us: FSDP has gathered its weight, Accelerate has moved its inputs. In the backward pass
  too, where the log-prob op computes logits again and needs the weight: log-probs are what the head *returns*, through
  every hook that is on it, and those hooks see to it. The last of them is ours, and swaps the log-probs for the probe.
- The transform of the logits is checked at every call. It has to be known before (`logit_transform.py` reads it from
  the config), but then the model does to the probe what it does to logits: scales, caps, cuts, masks. If that is not
  what the log-probs were computed with, the call is refused.
- A call without labels is the model's own, so `generate` works.

What changes are two instance attributes: `forward` of the model and, during a call, of its head. Both go when they
should, and what was there comes back.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fused_grpo._dispatch import Impl
from fused_grpo._graphs import outside_graphs
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.integrations._peers import check_version, replaced
from fused_grpo.integrations.logit_transform import head_transform, transformed
from fused_grpo.logprobs import linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.precision import compute_dtype

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
    """In here, `model(..., labels=labels)` returns log-probs, and never makes logits. Other calls are the model's own.

    Equals: `logits = model(...).logits[:, :-1].float() / temperature`
            `logits.log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]`

    The output is the model's own, without logits and with
        log_probs: [B, T-1] fp32, of each next token; 0 where its label is -100.
        entropy: [B, T-1] fp32, of the whole distribution, in nats; 0 there too. None with `entropy=False`.
        loss: minus the sum of the log-probs, divided by `num_items_in_batch` if that is passed and by the number of
            labels if not; plus the model's auxiliary loss times its coefficient. At temperature 1, the model's own.
    Labels are transformers': of the shape of `input_ids`, shifted in here. With `shift_labels=` instead, which are
    shifted already, results are [B, T]. There is no cache while there are labels.

    Args:
        model: a causal LM of transformers, or one inside a PeftModel, DDP, FSDP, DeepSpeed's engine or torch.compile.
        temperature: what logits are divided by; a number, or a tensor that broadcasts to the shape of the log-probs.
        entropy: whether to return it.
        chunk_bytes, batch_invariant, impl: as in `linear_logprobs`.

    Numerics, memory: those of `linear_logprobs`. In bf16 and under autocast, too, log-probs are those of logits that
        were never rounded: nearer to the truth than what comes of the model's own logits.

    Raises:
        InputError: no causal LM; labels that do not fit the hidden states.
        UnsupportedError: a head that is not one matrix; a model that does to its logits what its config does not say.
    """
    causal_lm = _causal_lm(model)
    options = {"chunk_bytes": chunk_bytes, "batch_invariant": batch_invariant, "impl": impl}
    scorer = _Scorer(causal_lm, temperature, entropy, options)
    try:
        with replaced(causal_lm, "forward", scorer.wrap(causal_lm.forward)):
            yield
    finally:
        scorer.open = False


@dataclasses.dataclass
class _Call:
    """A call with labels, from when it comes to the model until its output leaves it."""

    targets: Tensor  # [B, T], of the token after each; -100 where there is none
    shifted: bool  # whether the labels came shifted: then the last position has one
    scores: tuple[Tensor, ...] | None = None  # log-probs and maybe entropy, once the head has been called
    probe: Tensor | None = None  # [1, 1, V], what went on in place of the logits


class _Scorer:
    """What stands in for a model's forward and, during a call with labels, for that of its head."""

    def __init__(
        self, causal_lm: PreTrainedModel, temperature: float | Tensor, entropy: bool, options: dict[str, Any]
    ) -> None:
        self.causal_lm, self.temperature, self.entropy, self.options = causal_lm, temperature, entropy, options
        self.name, self.verified, self.open = type(causal_lm).__name__, False, True
        self.transform = head_transform(causal_lm.config)
        _head_of(causal_lm)  # better refused before anything runs
        if getattr(causal_lm, "z_loss_coefficient", 0.0):
            raise UnsupportedError(
                f"got a {self.name} with a loss on the size of its logits, want z_loss_coefficient=0.0; fix: set "
                "model.z_loss_coefficient = 0.0"
            )

    def wrap(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A forward for `own`, with the same signature: generate() checks arguments by it.

        A method, because copies of the model take it along: bound to the copy, it is the copy's own.
        """
        signature = inspect.signature(own)

        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            if model is not self.causal_lm:
                return (own.__func__.__get__(model) if inspect.ismethod(own) else own)(*args, **kwargs)
            named = {**signature.bind_partial(*args).arguments, **kwargs}
            labels, shift_labels = (named.pop(name, None) for name in ("labels", "shift_labels"))
            if not self.open or (labels is None and shift_labels is None):
                return own(*args, **kwargs)
            count = named.pop("num_items_in_batch", None)
            if not isinstance(named.get("logits_to_keep", 0), int) or named.get("logits_to_keep"):
                raise InputError(
                    "got logits_to_keep with labels, want all; fix: leave it out, and label the others -100"
                )
            if "use_cache" in signature.parameters or hasattr(self.causal_lm.config, "use_cache"):
                named["use_cache"] = False
            targets = pad(labels[:, 1:], (0, 1), value=_IGNORED) if shift_labels is None else shift_labels
            return self._score(own, named, _Call(targets, shifted=shift_labels is not None), count)

        functools.update_wrapper(forward, own)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
        return types.MethodType(forward, self.causal_lm)

    def _score(self, own: Callable[..., Any], arguments: dict[str, Any], call: _Call, count: Any) -> Any:
        """The model's own output, with scores for logits."""
        head = _head_of(self.causal_lm)

        def answer(hidden: Tensor) -> tuple[Tensor, ...]:
            if call.scores is not None:
                raise UnsupportedError(f"got a {self.name} that calls its head twice, want one call; fix: {_INSTEAD}")
            call.scores, call.probe = self._answer(head, hidden, call)
            return call.scores

        def swap(module: nn.Module, inputs: Any, outputs: Any) -> Tensor:
            assert call.scores is not None
            assert call.probe is not None
            # What other hooks have made of the log-probs is what these know in the backward pass. FSDP2 also rounds
            # them to its `output_dtype`, after hooks on the ones before: those will do, and are fp32.
            pairs = zip(outputs, call.scores, strict=True)
            call.scores = tuple(new if new.dtype == old.dtype else old for new, old in pairs)
            return call.probe.clone()

        # Where Accelerate has put hooks on a module, its `forward` is theirs, and calls this one.
        name = "_old_forward" if hasattr(head, "_hf_hook") else "forward"
        hook = head.register_forward_hook(swap)
        try:
            with replaced(head, name, answer):
                output = own(**arguments)
        finally:
            hook.remove()
        return self._finish(output, call, count)

    def _answer(self, head: Any, hidden: Tensor, call: _Call) -> tuple[tuple[Tensor, ...], Tensor]:
        """Log-probs and maybe entropy, [B, T] or [B, T-1]; and the probe."""
        if hidden.shape[:-1] != call.targets.shape:
            raise InputError(
                f"got labels {tuple(call.targets.shape)} and hidden states {tuple(hidden.shape)} at the head of "
                f"{self.name}, want one label for each; fix: pass labels of the shape of input_ids"
            )
        targets = call.targets.to(hidden.device)
        scored = slice(None) if call.shifted else slice(-1)
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = torch.ones(targets.shape, device=hidden.device, dtype=compute_dtype(hidden))
            temperature[:, scored] = _broadcast(self.temperature, temperature[:, scored])
        weight = _weight_of(head)
        arguments = {**self.transform, **self.options, "temperature": temperature, "bias": head.bias}
        if self.entropy:
            scores: tuple[Tensor, ...] = linear_logprobs_and_entropy(hidden, weight, targets, **arguments)
        else:
            scores = (linear_logprobs(hidden, weight, targets, **arguments),)
        # Not views: an in-place operation on one would lose the hooks that FSDP2 puts on it.
        return tuple(score[:, scored].clone() for score in scores), _probe(hidden, len(weight))

    @outside_graphs
    def _finish(self, output: Any, call: _Call, count: Any) -> Any:
        self._check_probe(output, call)
        assert call.scores is not None
        log_probs, entropy = call.scores[0], call.scores[1] if self.entropy else None
        if count is None:
            count = (call.targets != _IGNORED).sum().clamp_min(1)
        loss = -log_probs.sum() / (count.to(log_probs.device) if isinstance(count, Tensor) else count)
        auxiliary = getattr(output, "aux_loss", None)
        if isinstance(auxiliary, Tensor):
            loss = loss + self._auxiliary_coefficient() * auxiliary.to(loss.device)
        scores = {"loss": loss, "log_probs": log_probs, "entropy": entropy}
        kept = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        own_class: Any = type(output)
        return _output_class(own_class)(**{**kept, **scores, "logits": None, "unrounded": _Unrounded(scores)})

    def _check_probe(self, output: Any, call: _Call) -> None:
        """Raise UnsupportedError where the model has done to the probe what we have not done to the logits."""
        if call.probe is None:
            raise UnsupportedError(
                f"got a {self.name} that does not call its output embeddings, want logits from there; fix: {_INSTEAD}"
            )
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"got a {type(output).__name__} from {self.name}, want its output class; fix: return_dict=True"
            )
        want = transformed(call.probe.to(compute_dtype(call.probe)), self.transform)
        found = f"logits {tuple(want.shape)} to {tuple(logits.shape)}"
        if logits.shape == want.shape:
            # A few roundings, in what may be fp32 where the rest is fp64.
            eps = max(torch.finfo(dtype).eps for dtype in (call.probe.dtype, torch.float32))
            close = torch.isclose(logits.detach().to(want), want, rtol=8 * eps, atol=1e-6)
            if self.verified and close.device.type == "cuda":  # once is reason enough to stop the stream
                return torch._assert_async(close.all(), f"{self.name} does something else to its logits than before")
            if bool(close.all()):
                self.verified = True
                return None
            at = int((~close).flatten().nonzero()[0])
            x, got, wanted = (z.flatten()[at].item() for z in (call.probe, logits, want))
            found = f"a logit of {x:.6g} to {got:.6g}, want {wanted:.6g}"
        raise UnsupportedError(
            f"got a {self.name} that takes {found}: by its config it does {dict(self.transform)}, and by its forward "
            f"something else; fix: {_INSTEAD}, with the logit_scale and softcap of its forward"
        )

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
    """The model of transformers inside whatever has been put around it."""
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


def _head_of(causal_lm: PreTrainedModel) -> Any:
    """The module whose forward makes the logits: nn.Linear, or PEFT's LoRA around one."""
    name, head = type(causal_lm).__name__, causal_lm.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"got a {name} without output embeddings, want a causal LM; fix: AutoModelForCausalLM")
    while hasattr(head, "modules_to_save") and hasattr(head, "original_module"):  # PEFT's copy that is trained whole
        active = [adapter for adapter in head.active_adapters if adapter in head.modules_to_save]
        head = head.modules_to_save[active[0]] if active and not head.disable_adapters else head.original_module
    linear = head.get_base_layer() if hasattr(head, "lora_A") else head
    replaced = "forward" in vars(head) and not hasattr(head, "_hf_hook")
    if type(linear).forward is not nn.Linear.forward or replaced:
        raise UnsupportedError(
            f"got a {type(linear).__name__}{' with another forward' * replaced} as the head of {name}, want nn.Linear: "
            "only its weight is used; fix: leave the head out of what quantises, shards or adapts layers"
        )
    if hasattr(head, "lora_A") and not _is_a_sum(head):
        raise UnsupportedError(
            "got an adapter with dropout, a bias or a variant like DoRA on the head, want W + (alpha / r) B A; fix: "
            "plain LoRA there, modules_to_save=['lm_head'], or leave the head out of target_modules"
        )
    return head


def _is_a_sum(head: Any) -> bool:
    """Whether LoRA does to this layer what adding a matrix to its weight would do."""
    drops = any(isinstance(x, nn.Dropout) and x.p > 0 and x.training for x in head.lora_dropout.values())
    return not drops and not any(head.lora_variant.get(x) is not None or head.lora_bias[x] for x in head.lora_A)


def _weight_of(head: Any) -> Tensor:
    """[V, D]: the head's own or, where an adapter is active, W + (alpha / r) B A under autograd."""
    weight: Tensor = head.weight
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
        raise UnsupportedError(
            f"got a {type(weight).__name__} of {weight.dtype} as the weight of the head, want a plain floating tensor; "
            "fix: leave the head out of what quantises it or shards it along the vocabulary"
        )
    if hasattr(head, "lora_A") and not head.disable_adapters and not head.merged:
        with torch.autocast(weight.device.type, enabled=False):
            for name in head.active_adapters:
                if name in head.lora_A:
                    weight = (weight + head.get_delta_weight(name)).to(weight.dtype)
    return weight


def _broadcast(temperature: Any, rows: Tensor) -> Tensor:
    try:
        return torch.broadcast_to(temperature.detach().to(rows), rows.shape)
    except RuntimeError:
        raise InputError(
            f"got temperature {tuple(temperature.shape)}, want what broadcasts to the log-probs {tuple(rows.shape)}"
        ) from None


def _probe(hidden: Tensor, vocab_size: int) -> Tensor:
    """[1, 1, V] in the dtype that logits would have: large and small, of both signs, no column like the next."""
    device, dtype = hidden.device, hidden.dtype
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    row = 100 * torch.sin(12.9898 * torch.arange(vocab_size, device=device, dtype=torch.float32))
    return row.to(dtype).view(*(1 for _ in hidden.shape[1:]), vocab_size)


class _Unrounded:
    """Scores as they left the model, in something that whoever walks through an output does not look into."""

    def __init__(self, scores: dict[str, Tensor | None]) -> None:
        self.scores = {name: score for name, score in scores.items() if score is not None}


@functools.cache
def _output_class(base: Any) -> Any:
    """A model's output class with our fields: still the mapping and dataclass that DDP and FSDP find tensors in."""

    def restore(self: Any) -> None:
        base.__post_init__(self)
        if self.unrounded is None:
            return
        # FSDP2 makes a new output, of tensors in its `output_dtype`. Accelerate sets that to bf16, and a log-prob of -5
        # would be off by 0.02. Hooks for the backward pass are on the tensors before, so these may come back.
        for name, score in self.unrounded.scores.items():
            if getattr(self, name).dtype != score.dtype:
                setattr(self, name, score)
        OrderedDict.__delitem__(self, "unrounded")

    ours = ("log_probs", "entropy", "unrounded")
    fields = [(name, Any, dataclasses.field(default=None, repr=name != "unrounded")) for name in ours]
    namespace = {"__post_init__": restore, "__module__": __name__}
    return dataclasses.make_dataclass(f"{base.__name__}WithLogProbs", fields, bases=(base,), namespace=namespace)
