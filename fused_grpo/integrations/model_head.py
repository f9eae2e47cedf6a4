"""The head of a causal LM of transformers: its weight as one matrix, and what the model gives it.

    hidden, output = to_head(model, input_ids=ids)            # [R, L, D], whatever the model does before its head
    output.logits                                             # [1, 1, V], what it does behind it to a probe

The model's own forward runs to its end, with another `forward` of its head alone. So nothing here depends on the
structure of a model: which module is its backbone, or that a dense layer, a norm or a scale comes before the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.integrations.logit_transform import head_transform, mismatch
from fused_grpo.integrations.model_modes import replaced


def to_head(causal_lm: Any, **inputs: Any) -> tuple[Tensor, Any]:
    """The input [R, L, D] of the head, and the model's output with the logits of `probe`; no logits are computed.

    Args:
        causal_lm: the model of transformers itself, not a wrapper around it.
        inputs: the arguments of its forward.

    Raises:
        InputError: no output class.
        UnsupportedError: a head that is not one matrix, or is not called once with hidden states.
    """
    head, states = head_of(causal_lm), list[Tensor]()

    def keep(hidden: Tensor) -> Tensor:
        states.append(hidden)
        return probe(hidden, len(head.weight))

    name = type(causal_lm).__name__
    # A compiled head would be compiled again for this forward. The model's own forward, because a compiled call of
    # the whole model would be, too; a compiled backbone is called as it is.
    with replaced(head, forward_name(head), keep), replaced(head, "_compiled_call_impl", None):
        output = causal_lm.forward(**inputs)
    if len(states) != 1 or states[0].dim() != 3:
        shapes = [tuple(hidden.shape) for hidden in states]
        raise UnsupportedError(
            f"got a {name} that calls its output embeddings with {shapes}, want one call with hidden states [R, L, D]; "
            "fix: another model: its logits are not a linear head over hidden states"
        )
    if not isinstance(getattr(output, "logits", None), Tensor):
        raise InputError(f"got a {type(output).__name__} from {name}, want its output class; fix: return_dict=True")
    return states[0], output


def check_transform(causal_lm: Any, states: Tensor, output: Any) -> None:
    """Check what `to_head` returned: behind its head the model does what `head_transform` reads in its config.

    Raises:
        UnsupportedError: it does something else.
    """
    transform = head_transform(causal_lm.config)
    if gap := mismatch(probe(states, len(head_of(causal_lm).weight)), output.logits, transform):
        raise UnsupportedError(
            f"got a {type(causal_lm).__name__} that takes {gap}: by its config it does {dict(transform)} behind its "
            "head, and by its forward something else, want the same; fix: a config whose options its forward reads"
        )


def head_of(causal_lm: Any) -> Any:
    """The module that computes the logits: nn.Linear, or PEFT's LoRA around one.

    Raises:
        UnsupportedError: no head, or a head that is not one matrix.
    """
    name, head = type(causal_lm).__name__, causal_lm.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"got a {name} without output embeddings, want a causal LM; fix: AutoModelForCausalLM")
    while hasattr(head, "modules_to_save") and hasattr(head, "original_module"):  # PEFT's copy that is trained whole
        active = [adapter for adapter in head.active_adapters if adapter in head.modules_to_save]
        head = head.modules_to_save[active[0]] if active and not head.disable_adapters else head.original_module
    linear = head.get_base_layer() if hasattr(head, "lora_A") else head
    was_replaced = "forward" in vars(head) and not hasattr(head, "_hf_hook")
    if (kind := type(linear)).forward is not nn.Linear.forward or was_replaced:
        raise UnsupportedError(  # many classes are called Linear
            f"got a {kind.__name__} of {kind.__module__}{' with another forward' * was_replaced} as the head of "
            f"{name}, want nn.Linear: only its weight is used; fix: leave the head out of what quantises, shards or "
            "adapts layers"
        )
    if hasattr(head, "lora_A") and not _is_a_sum(head):
        raise UnsupportedError(
            "got an adapter with dropout, a bias or a variant like DoRA on the head, want W + (alpha / r) B A; fix: "
            "plain LoRA there, modules_to_save=['lm_head'], or leave the head out of target_modules"
        )
    return head


def forward_name(head: Any) -> str:
    """The attribute to replace: where Accelerate has put hooks on a module, `forward` is a wrapper of another one."""
    return "_old_forward" if hasattr(head, "_hf_hook") else "forward"


def _is_a_sum(head: Any) -> bool:
    """Whether LoRA on this layer equals the sum of its weight and a matrix."""
    drops = any(isinstance(x, nn.Dropout) and x.p > 0 and x.training for x in head.lora_dropout.values())
    return not drops and not any(head.lora_variant.get(x) is not None or head.lora_bias[x] for x in head.lora_A)


def weight_of(head: Any) -> Tensor:
    """[V, D]: the head's own or, where an adapter is active, W + (alpha / r) B A under autograd.

    The sum is computed in each call, in the precision of the weights even under autocast, like the weight that an
    engine gets. It takes one more [V, D] matrix, and its gradient another.
    """
    weight: Tensor = head.weight
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
        raise UnsupportedError(
            f"got a {type(weight).__name__} of {weight.dtype} as the weight of the head, want a plain floating tensor; "
            "fix: leave the head out of what quantises it, shards it along the vocabulary or makes its tensors fake"
        )
    if hasattr(head, "lora_A") and not head.disable_adapters and not head.merged:
        with torch.autocast(weight.device.type, enabled=False):
            for name in head.active_adapters:
                if name in head.lora_A:
                    weight = (weight + head.get_delta_weight(name)).to(weight.dtype)
    return weight


def probe(hidden: Tensor, vocab_size: int) -> Tensor:
    """[1, 1, V] in the dtype of logits: small and large numbers of both signs, no two neighbours equal."""
    device, dtype = hidden.device, hidden.dtype
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    row = 100 * torch.sin(12.9898 * torch.arange(vocab_size, device=device, dtype=torch.float32))
    return row.to(dtype).view(*(1 for _ in hidden.shape[1:]), vocab_size)
