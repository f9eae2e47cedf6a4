"""Packed advantages are read by a rule that no lengths change: [B] per sequence, [N, 1] per token, [N] where N != B."""

import pytest
import torch

from fused_grpo import fused_linear_grpo_loss, grpo_loss
from fused_grpo.errors import InputError

LENGTHS = {
    "an empty sequence before": [0, 2],
    "an empty sequence behind": [2, 0],
    "in the middle": [1, 3, 0, 0],
    "one token each": [1, 1, 1],
    "as many otherwise": [2, 1],
}


def numbers(count: int) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, count) if count > 1 else torch.ones(count)


def loss_of_logprobs(advantages: torch.Tensor, cu_seqlens: torch.Tensor | None, count: int, impl: str) -> torch.Tensor:
    logprobs = -numbers(count).abs() - 0.1
    logprobs, options = (logprobs[None], {}) if cu_seqlens is None else (logprobs, {"cu_seqlens": cu_seqlens})
    return grpo_loss(logprobs, advantages=advantages, old_logprobs=logprobs * 1.1, impl=impl, **options).loss


def loss_of_hidden(advantages: torch.Tensor, cu_seqlens: torch.Tensor | None, count: int, impl: str) -> torch.Tensor:
    hidden, weight, targets = numbers(count * 4).view(count, 4), numbers(20).view(5, 4), torch.arange(count)
    old, options = -numbers(count).abs(), {"cu_seqlens": cu_seqlens}
    if cu_seqlens is None:
        hidden, targets, old, options = hidden[None], targets[None], old[None], {}
    more = {"advantages": advantages, "old_logprobs": old, "impl": impl}
    return fused_linear_grpo_loss(hidden, weight, targets, **more, **options).loss


@pytest.mark.parametrize("loss", [loss_of_logprobs, loss_of_hidden])
@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("name", LENGTHS)
def test_each_shape_has_one_reading(name, impl, loss):
    lengths = torch.tensor(LENGTHS[name])
    cu_seqlens, count = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32), int(lengths.sum())
    token_advantages, sequence_advantages = numbers(count), numbers(len(lengths))
    # The tokens as one padded row, whose advantages [1, N] can be read in one way alone.
    by_token, by_sequence = (
        loss(advantages[None], None, count, impl)
        for advantages in (token_advantages, sequence_advantages.repeat_interleave(lengths))
    )
    for advantages, expected in ((token_advantages[:, None], by_token), (sequence_advantages, by_sequence)):
        torch.testing.assert_close(loss(advantages, cu_seqlens, count, impl), expected)
    if count != len(lengths):
        torch.testing.assert_close(loss(token_advantages, cu_seqlens, count, impl), by_token)


@pytest.mark.parametrize("shape", [(3, 1), (2, 2), (4,), (1, 2), (2, 1, 1)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(InputError, match=r"got advantages .*, want \[B\] = \(2,\), one per sequence, or \(2,\)"):
        grpo_loss(torch.zeros(2), advantages=torch.ones(shape), cu_seqlens=torch.tensor([0, 0, 2]))
    with pytest.raises(InputError, match="got advantages"):
        grpo_loss(torch.zeros(2, 3), advantages=torch.ones(2, 3, 1))
