"""The trainer's weights under the names of a checkpoint, and what to do about a head that is the embedding.

vLLM's CPU build repacks the head when it starts and, where the head is tied, never again: after a sync it would go on
sampling from the old head (log-probs off by 0.2 to 0.6). So a tied model is served untied there: its engine's config
says so, and `Tie.undo` feeds every new embedding to both. The price is one more [V, D] matrix in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fused_grpo.trainer.distributed.sharding import full_state_dict
from fused_grpo.trainer.models.adapters import is_adapted, merged_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_weights(model: PreTrainedModel) -> Iterable[tuple[str, Tensor]]:
    """Every weight under the name that `save_pretrained` would give it, without a copy where only names change.

    An adapter is merged into them. What FSDP2 has divided is gathered in every process, and they all have to ask.
    Equals, without either,
        model.save_pretrained(folder); safetensors.torch.load_file(folder / "model.safetensors").items()
    """
    from transformers.core_model_loading import revert_weight_conversion

    if is_adapted(model):
        return merged_weights(model)
    weights: dict[str, Tensor] = revert_weight_conversion(model, full_state_dict(model))
    return weights.items()


@dataclass(frozen=True)
class Tie:
    """The weight names of an embedding and of the head that shares its tensor."""

    embedding: str
    head: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Tie | None:
        """The tie of `model`, or None where its head has weights of its own."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            return None
        return cls(f"{_name_of(embedding, model)}.weight", f"{_name_of(head, model)}.weight")

    def undo(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`weights` with the embedding under both names, whether or not it came under both."""
        for name, weight in weights:
            if name != self.head:
                yield name, weight
            if name == self.embedding:
                yield self.head, weight


def _name_of(module: nn.Module, model: nn.Module) -> str:
    return next(str(name) for name, candidate in model.named_modules() if candidate is module)
