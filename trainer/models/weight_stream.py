"""The weights of a model on their way to an engine: one at a time, under the names of a checkpoint.

A weight may have to be made first: gathered from shards, merged with an adapter, cast, cut into experts. It is made on
the model's device when it is its turn, and nothing here keeps it. Names, shapes and dtypes are known without that.

**Gathers.** A weight that is sharded across ranks is gathered by all of them, whether or not they send it. So every
rank has to read its whole stream, at the same time as the others: `finish` reads what an engine has left, because it
failed, or needs no weights on this rank.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_grpo.errors import WeightSyncError
from fused_grpo.trainer.common.contexts import contextmanager

Named = Iterable[tuple[str, Tensor]]

BUCKET_BYTES = 128 << 20  # sent at a time, in a file or an NCCL broadcast, and the weight that overfills them


class WeightStream(Iterator[tuple[str, Tensor]]):
    """Names and full tensors. Each is made when it is read, and the stream can be read once, by any thread.

    Args:
        shapes: each weight by its name on the meta device, in the order of the stream.
        is_gathered: whether all ranks have to read it to its end.
    """

    def __init__(self, shapes: Mapping[str, Tensor], weights: Named, *, is_gathered: bool = False) -> None:
        self.shapes, self.is_gathered = dict(shapes), is_gathered
        self._weights, self._lock = iter(weights), threading.Lock()

    @classmethod
    def of(cls, weights: Named) -> WeightStream:
        """`weights`; those of another kind have to be in memory, because their shapes are not known beforehand."""
        if isinstance(weights, WeightStream):
            return weights
        named = [(name, weight.detach()) for name, weight in weights]
        return cls({name: weight.to("meta") for name, weight in named}, named)

    def __next__(self) -> tuple[str, Tensor]:
        with self._lock:
            return next(self._weights)

    @property
    def nbytes(self) -> int:
        """Of all weights together."""
        return sum(weight.nbytes for weight in self.shapes.values())

    def finish(self) -> None:
        """Take part in the gathers that this rank has not come to, which the others wait in."""
        if self.is_gathered:
            deque(self, maxlen=0)  # it drops each before it asks for the next

    def buckets(self) -> Iterator[list[int]]:
        """Sizes of weights in bytes, cut as vLLM's workers cut them: a bucket ends with the one that overfills it."""
        bucket, total = list[int](), 0
        for weight in self.shapes.values():
            bucket.append(weight.nbytes)
            total += weight.nbytes
            if total > BUCKET_BYTES:
                yield bucket
                bucket, total = [], 0
        if bucket:
            yield bucket


def copied(weights: WeightStream, *, kept: bool = True) -> WeightStream:
    """The weights as they are now, in the CPU's memory, where each is freed once it is read; none if not `kept`."""
    named = deque[tuple[str, Tensor]]()
    try:
        if kept:
            named.extend((name, weight.to("cpu", copy=True)) for name, weight in weights)
    finally:
        weights.finish()
    return WeightStream(weights.shapes if kept else {}, (named.popleft() for _ in range(len(named))))


@contextmanager
def weights_stay(model: nn.Module, engine: Any) -> Iterator[None]:
    """Around a call of an engine that is given weights: WeightSyncError where it changes the model's, in place.

    A stream may give it the tensors that are trained.
    """
    before = [weight._version for weight in model.parameters()]  # which count changes by torch
    yield
    if changed := sum(weight._version != one for weight, one in zip(model.parameters(), before, strict=True)):
        raise WeightSyncError(
            f"got {changed} of the trainer's weights changed in place by the {engine.name} engine, want them as they "
            "were: load_weights is given the tensors that are trained; fix: weight.clone() before it is changed, or "
            "has_own_weights = False of an engine that samples with the trainer's model; go on from a checkpoint"
        )


def is_sharded(weight: Tensor) -> bool:
    """Whether it is a DTensor, of which this rank holds only a part."""
    return isinstance(weight, DTensor)


def gathered(weight: Tensor) -> Tensor:
    """The full tensor of one that is sharded, which all ranks gather at the same time; any other one itself."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


class Part(NamedTuple):
    """Weights that are made together, under the names that the model itself has for them."""

    shapes: dict[str, Tensor]  # on the meta device
    make: Callable[[], dict[str, Tensor]]

    @classmethod
    def like(cls, weights: Mapping[str, Tensor], make: Callable[[], dict[str, Tensor]]) -> Part:
        """Of the shapes and dtypes of these; of a shard, those of the full tensor."""
        empty = partial(torch.empty, device="meta")
        return cls({name: empty(weight.shape, dtype=weight.dtype) for name, weight in weights.items()}, make)


def checkpoint_stream(model: Any, parts: Sequence[Part], *, dtype: torch.dtype | None) -> WeightStream:
    """`parts`, all weights of a causal LM, in the layout of its checkpoint: experts, for example, lie one by one there.

    They are cast to `dtype` as by `narrowing`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # That of bitsandbytes reads codes and has no way back: `parts` have the names that they have in a checkpoint.
    if conversions := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [one for one in conversions if not _reads_codes(one)] or None
    narrow, raw = narrowing(model, dtype), _shapes(parts)
    # It returns its argument where there is nothing to do, and takes half a millisecond for each call to find out.
    is_as_saved = revert_weight_conversion(model, raw) is raw

    def converted(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        cast = {name: narrow(name, weights.pop(name)) for name in list(weights)}
        return cast if is_as_saved else revert_weight_conversion(model, cast)

    if not is_as_saved:
        parts = _joined(parts, converted)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            made = converted(part.make())
            for name in list(made):
                yield name, made.pop(name).detach()

    shapes = {name: weight for part in parts for name, weight in converted(dict(part.shapes)).items()}
    return WeightStream(shapes, weights(), is_gathered=any(map(is_sharded, model.parameters())))


def _reads_codes(conversion: Any) -> bool:
    return any(type(step).__name__.startswith("Bnb") for step in getattr(conversion, "operations", ()))


def narrowing(model: Any, dtype: torch.dtype | None) -> Callable[[str, Tensor], Tensor]:
    """A function of a name and a weight that casts the weight for an engine of that dtype, if that makes it smaller.

    Vectors and what the model keeps in fp32 are few, and stay: engines compute some of them in fp32.
    """
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def narrow(name: str, weight: Tensor) -> Tensor:
        is_smaller = dtype is not None and weight.is_floating_point() and dtype.itemsize < weight.itemsize
        stays = not is_smaller or weight.ndim < 2 or any(module in name for module in kept)
        return weight if stays else weight.to(dtype)

    return narrow


def _joined(parts: Sequence[Part], converted: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> list[Part]:
    """`parts`; joined by layer, or all of them, where a checkpoint has several of them in one weight."""

    def layout(parts: Sequence[Part]) -> dict[str, Any]:
        shapes = [converted(dict(part.shapes)) for part in parts]
        return {name: (weight.shape, weight.dtype) for weights in shapes for name, weight in weights.items()}

    whole = [_union(parts)]
    wanted = layout(whole)
    by_layer = defaultdict[str, list[Part]](list)
    for part in parts:
        first = next(iter(part.shapes))
        by_layer[re.sub(r"(\.\d+).*", r"\1", first, count=1)].append(part)  # up to a number: "model.layers.3"
    for joined in (list(parts), list(map(_union, by_layer.values()))):
        with suppress(Exception):  # of many types, where a conversion misses its other half
            if layout(joined) == wanted:
                return joined
    return whole


def _union(parts: Sequence[Part]) -> Part:
    def make() -> dict[str, Tensor]:
        return {name: weight for part in parts for name, weight in part.make().items()}

    return Part(_shapes(parts), make)


def _shapes(parts: Sequence[Part]) -> dict[str, Tensor]:
    return {name: weight for part in parts for name, weight in part.shapes.items()}
