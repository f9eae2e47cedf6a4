"""Counts the bytes of the tensors that operations make, as long as they exist."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`most`: the bytes that operations inside have made and that were alive together, in this thread.

    Args:
        own: tensors from before; views of them are not counted.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.tensors: Counter[int] = Counter()  # of each storage
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(tensor)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.own or not size:
            return
        self.now += 0 if self.tensors[place] else size
        self.most = max(self.most, self.now)
        self.tensors[place] += 1
        weakref.finalize(tensor, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self.tensors[place] -= 1
        self.now -= 0 if self.tensors[place] else size
