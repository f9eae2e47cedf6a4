"""Whether a server has the model that is trained, asked before weights are sent.

vLLM loads weights in place, one after the other: those of another model leave a server that no client can use. No route
has the config of the server's model, but in development mode its workers print their modules (`get_model_inspection`).
Sizes are compared with those that vLLM's layers print; names of norms and the use of biases only where the class has
another name, because vLLM serves some architectures with the class of another one. What no layer prints is left to the
log-prob check of the first step.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fused_grpo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# As vLLM prints it. None of them backtracks over more than a number or a name: the text is another program's.
_SIZE, _NAME = r"(\d{1,9})\b", r"\((\w+)\): "
_LAYERS = rf"^ *\((?:\d[\d, -]*[ -])?{_SIZE}\): "  # the last index of "(0-26, 28)"
_ATTENTION = rf"\bAttention\(head_size=\d+, num_heads={_SIZE}, num_kv_heads={_SIZE}"
_ROW_PARALLEL = rf"{_NAME}RowParallelLinear\((?:quant=\w+, )?in_features={_SIZE}, [\w=]+, [\w=]+, tp_size={_SIZE}"


class ModelFacts:
    """Sizes and names of the trainer's model."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        # vLLM has all experts of a layer in one module.
        named = [(name, module) for name, module in model.named_modules() if "expert" not in name]
        modules = {name.rpartition(".")[2]: module for name, module in named}
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
        """Compare with what a server's workers have printed of its model.

        Raises:
            InputError: it is another model.
        """
        served = _printed_sizes(printed)
        pairs = [(name, size, served.get(name)) for name, size in self._sizes.items()]
        wrong = [f"{min(found)} {name}, not {size}" for name, size, found in pairs if found and size not in found]
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
