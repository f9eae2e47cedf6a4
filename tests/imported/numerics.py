"""How errors are measured, and the rule for them: at most twice the error of plain torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def assert_as_exact(ours: Tensor, plain: Tensor, exact: Tensor, *, what: str) -> None:
    """Error against fp64 at most twice that of plain torch in fp32 from the same inputs, on maximum and RMS."""
    assert torch.equal(ours.isinf(), exact.isinf()), f"{what}: infinite in other places"
    ours, plain, exact = (x.masked_fill(exact.isinf(), 0.0) for x in (ours, plain, exact))
    # A single number may come out right by luck in plain fp32, the largest of a few hundred nearly so; many cannot.
    ulps, scale = (4 if exact.numel() > 1000 else 16, largest(exact)) if exact.ndim else (32, max(1.0, largest(exact)))
    floor = ulps * torch.finfo(ours.dtype).eps * scale
    for norm in (largest, rms):
        error, allowed = norm(ours.double() - exact), 2 * norm(plain.double() - exact) + floor
        assert error <= allowed, f"{what}: {norm.__name__} error {error:.3e}, allowed {allowed:.3e}"


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """The log-prob of each token of the completion: an fp64 softmax of the model's logits."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


@torch.no_grad()
def logprobs_of_all(model: Any, pairs: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
    """The same of each (prompt, completion), in one batch: the model is to be causal, without a mask."""
    rows = pad_sequence([torch.tensor(prompt + completion) for prompt, completion in pairs], batch_first=True)
    logprobs = (model(rows).logits[:, :-1].double() / temperature).log_softmax(-1)
    chosen = logprobs.gather(2, rows[:, 1:, None])[:, :, 0].tolist()
    spans = [(len(prompt) - 1, len(prompt) + len(completion) - 1) for prompt, completion in pairs]
    return [row[start:end] for row, (start, end) in zip(chosen, spans, strict=True)]
