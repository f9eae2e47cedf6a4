"""Router replay: a mixture of experts computes its tokens with the experts that the sampler chose (docs/models.md).

**The seam.** All routers of transformers choose by one `topk` of scores [T, E], inside of the module that holds the
`experts`. There its result is replaced: indices by the sampler's, values by the scores at them. What a model does
before it (groups of experts, biases of the choice) and behind it (softmax over the k, scaling) is its own code. `check`
shows by a few tokens that it is so for a model, and raises where it is not.

The choice stays until the backward pass is over, because gradient checkpointing computes the layers in it again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fused_grpo.errors import UnavailableError, UnsupportedError

_TOPK = (torch.topk, Tensor.topk)
ROUTING = "sampling/routing_disagreement"


class RouterReplay(AbstractContextManager["RouterReplay"]):
    """The routers of a model, and the experts that they are to choose while this is entered.

    Args:
        model: a causal LM of transformers, whose modules have hooks meanwhile.
        replaces: False only counts where the routers choose others.
    """

    def __init__(self, model: PreTrainedModel, *, replaces: bool) -> None:
        self.replaces, self._name = replaces, type(model).__name__
        self.num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        self.layers: dict[int, int] = {}  # the number of experts of each layer that has some; empty: of no layer
        self._experts: Tensor | None = None
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] | None = None  # scores and choices, while `check` runs
        self._counts: list[Tensor] = []
        self._blocks: dict[int, nn.Module] = {}  # by layer: where the routers are
        self._hooks, self._mode = ExitStack(), ExitStack()
        for name, block in model.named_modules():
            count = getattr(getattr(block, "experts", None), "num_experts", None)
            numbers = [int(part) for part in name.split(".") if part.isdecimal()]
            if count is not None and len(numbers) == 1:  # vLLM counts layers in the same way
                self.layers[numbers[0]], self._blocks[numbers[0]] = int(count), block

    def __enter__(self) -> Self:
        for layer, block in self._blocks.items():
            self._hooks.callback(block.register_forward_pre_hook(partial(self._enter, layer)).remove)
            self._hooks.callback(block.register_forward_hook(self._leave, always_call=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._experts = None
        self._hooks.close()
        self._mode.close()  # hooks do not run behind a KeyboardInterrupt

    def start(self, experts: Tensor | None) -> None:
        """Before a forward pass of T tokens: their experts [T, layers, k], -1 where the routers choose for themselves.

        With None they do so everywhere.
        """
        self._experts, self._counts = experts, []

    def counts(self) -> dict[str, Tensor]:
        """ROUTING since `start`: of tokens times layers those where the router's own experts are another set, and all.

        UnsupportedError where not every router has been replayed once, as `check` has seen it do in another mode.
        """
        if self.replaces and self._experts is not None and len(self._counts) != len(self.layers):
            raise self._refused(
                f"{len(self._counts)} topk of scores in a step through {len(self.layers)} layers with experts, want "
                "one in each, in training mode, too"
            )
        return {ROUTING: torch.stack(self._counts).sum(0)} if self._counts else {}

    def _enter(self, layer: int, block: nn.Module, inputs: Any) -> None:
        if self._experts is not None or self._seen is not None:
            self._mode.enter_context(_ReplacedTopK(self, layer))

    def _leave(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self._mode.close()

    def choose(self, layer: int, scores: Tensor, own: Any) -> Any:
        """The result of `topk` of the scores [T, E] of a layer, of which `own` is the router's."""
        if self._seen is not None:
            self._seen.setdefault(layer, []).append((scores, own.indices))
        if self._experts is None:
            return own
        given = self._experts[:, layer].to(own.indices)
        if given.shape != own.indices.shape:
            raise UnavailableError(
                f"got {given.shape[1]} experts of each token from the engine, want the {own.indices.shape[1]} that a "
                f"{self._name} takes in layer {layer}; fix: an engine of the model that is trained"
            )
        is_known = given[:, 0] >= 0
        other = (given.sort().values != own.indices.sort().values).any(1) & is_known
        self._counts.append(torch.stack([other.sum(), is_known.sum()]))
        if not self.replaces:
            return own
        indices = given.where(is_known[:, None], own.indices)
        return torch.return_types.topk((scores.gather(1, indices), indices))

    @torch.no_grad()
    def check(self, run: Callable[[Tensor | None], Tensor]) -> None:
        """Raise UnsupportedError where the routers cannot be replayed.

        `run` has the log-probs of some tokens, computed with their experts as of `start`. Their own have to give the
        same bits again, and others in any layer other ones. Where scores of some experts are masked, as in groups that
        are not chosen, these have to have weights all the same: the sampler may have chosen another group.
        """
        self._seen = {}
        try:
            own, seen = run(None), self._seen
        finally:
            self._seen = None
        chosen = {layer: choices[0] for layer, choices in seen.items() if len(choices) == 1}
        shapes = {choice.shape for _, choice in chosen.values()}
        if not self.layers or chosen.keys() != self.layers.keys() or len(shapes) > 1:
            raise self._refused(
                f"{len(self.layers)} layers with experts, of which {len(chosen)} choose these by one topk of the "
                "scores of all, want some, and one topk in each"
            )
        ((tokens, k),) = shapes
        table = own.new_full((tokens, self.num_layers, k), -1, dtype=torch.int64)
        for layer, (_, choice) in chosen.items():
            table[:, layer] = choice
        if not torch.equal(run(table), own):
            raise self._refused("other log-probs where its routers' own experts are replayed, want the same bits")
        for layer, (scores, choice) in chosen.items():
            others, least = [(choice + 1) % self.layers[layer]], scores.sort(1)
            if (least.values[:, :1] == least.values[:, 1:2]).all():  # masked
                others += [one.expand(-1, k) for one in least.indices[:, :2].split(1, 1)]
            logprobs = [own]
            for each in others:
                changed = table.clone()
                changed[:, layer] = each
                logprobs.append(run(changed))
            if any(map(torch.equal, logprobs, logprobs[1:])) or not all(each.isfinite().all() for each in logprobs):
                raise self._refused(f"no effect of other experts in layer {layer}, want other, finite log-probs")

    def _refused(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"got router_replay=True and a {self._name} with {what}; fix: router_replay=False, or a mixture of experts "
            "whose routers take topk of their scores"
        )


class _ReplacedTopK(TorchFunctionMode):
    """Passes the result of each `topk` of scores [T, E] of a layer through `choose`."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay, self._layer = replay, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK and args[0].ndim == 2 and args[0].shape[1] == self._replay.layers[self._layer]:
            return self._replay.choose(self._layer, args[0], result)
        return result
