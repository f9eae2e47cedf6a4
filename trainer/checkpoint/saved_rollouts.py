"""Rollouts that a checkpoint brings along, refused where a run could not have left them.

Their tensors are lists of rows laid end to end (`<name>.values`) with the length of each (`<name>.lengths`). Lengths
that do not add up, or a token that the model does not have, would otherwise end the run later, somewhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fused_grpo.trainer.batching.rollout_buffer import RAGGED

_IDS = ("prompt_ids", "completion_ids")


def check_buffer(
    numbers: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    batches: int,
    iterations: int,
    num_generations: int,
    vocab_size: int,
) -> None:
    """Raise ValueError unless `RolloutBuffer.from_state` makes something of this that this run can learn from."""
    if (numbers["batches"], numbers["iterations"]) != (batches, iterations):
        raise ValueError(f"it has {numbers['batches']} x {numbers['iterations']} steps, want {batches} x {iterations}")
    if numbers["done"] >= batches * iterations:
        raise ValueError(f"{numbers['done']} of its {batches * iterations} steps are done, want some left")
    for index in range(batches):
        start = f"{index}."
        mine = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        _check_batch(mine, num_generations=num_generations, vocab_size=vocab_size)
    _refuse_others(tensors, {f"{index}" for index in range(batches)}, of=lambda name: name.partition(".")[0])


def check_ahead(tensors: Mapping[str, Tensor], *, prompts: int, num_generations: int, vocab_size: int) -> None:
    """Raise ValueError unless these are rollouts of a batch sampled ahead; none at all are fine."""
    if not tensors:
        return
    rows = prompts * num_generations
    _refuse_others(tensors, {"numbers", "finish_reasons", *_IDS, "sampling_logprobs"})
    numbers = _flat(tensors, "numbers", torch.int64, 2)
    if numbers[0] != num_generations or numbers[1] < 0:
        raise ValueError(f"its numbers are {numbers.tolist()}, want {num_generations} completions per prompt")
    reasons = _flat(tensors, "finish_reasons", torch.int64, rows)
    if ((reasons != 0) & (reasons != 1)).any():
        raise ValueError("it has an unknown finish reason")
    _check_ids(tensors, "prompt_ids", prompts, vocab_size)
    lengths = _check_ids(tensors, "completion_ids", rows, vocab_size)
    if "sampling_logprobs.values" in tensors:
        _check_per_token(tensors, "sampling_logprobs", lengths)


def _check_batch(tensors: Mapping[str, Tensor], *, num_generations: int, vocab_size: int) -> None:
    _refuse_others(tensors, {"advantages", "rewards", "in_loss", *RAGGED})
    rows = len(_flat(tensors, "advantages", torch.float32))
    if rows % num_generations:
        raise ValueError(f"it has {rows} completions, want whole groups of {num_generations}")
    if "rewards" in tensors:
        _flat(tensors, "rewards", torch.float32, rows)
    if "in_loss" in tensors:
        _flat(tensors, "in_loss", torch.bool, rows)
    _check_ids(tensors, "prompt_ids", rows, vocab_size)
    lengths = _check_ids(tensors, "completion_ids", rows, vocab_size)
    for name in RAGGED:
        if name not in _IDS and f"{name}.values" in tensors:
            _check_per_token(tensors, name, lengths)


def _check_ids(tensors: Mapping[str, Tensor], name: str, rows: int, vocab_size: int) -> Tensor:
    """The lengths of rows of token ids."""
    values, lengths = _rows(tensors, name, rows)
    if len(values) and (values.min() < 0 or values.max() >= vocab_size):
        raise ValueError(f"it has token {values.min()} or {values.max()} in {name}, want 0 to {vocab_size - 1}")
    return lengths


def _check_per_token(tensors: Mapping[str, Tensor], name: str, lengths: Tensor) -> None:
    if not torch.equal(_rows(tensors, name, len(lengths))[1], lengths):
        raise ValueError(f"its {name} are not one for each token")


def _rows(tensors: Mapping[str, Tensor], name: str, rows: int) -> tuple[Tensor, Tensor]:
    values = _flat(tensors, f"{name}.values", RAGGED[name])
    lengths = _flat(tensors, f"{name}.lengths", torch.int64, rows)
    # Each of them first: a sum of huge ones may come out right.
    if ((lengths < 0) | (lengths > len(values))).any() or lengths.sum() != len(values):
        raise ValueError(f"its {name} do not add up to {len(values)}")
    return values, lengths


def _flat(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, size: int | None = None) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 1 or tensor.dtype != dtype or size not in (None, len(tensor)):
        got = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"it has {got} as {name}, want {dtype} [{'any' if size is None else size}]")
    return tensor


def _refuse_others(tensors: Collection[str], known: set[str], of: Any = None) -> None:
    """Raise ValueError for a tensor that nothing reads."""
    for name in tensors:
        stem = of(name) if of else name.removesuffix(".values").removesuffix(".lengths")
        if stem not in known:
            raise ValueError(f"it has {name[:80]!r}, which no run writes")
