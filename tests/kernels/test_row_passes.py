"""Statistics and gradients of materialised logits against fp64 autograd, through Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo.kernels import logits_gradient_, row_statistics

pytestmark = pytest.mark.grid

ALL = "bias softcap scale temperature"
SHAPES = [(1, 1), (7, 2), (3, 5), (7, 64), (5, 127), (3, 130), (2, 257)]


def problem(R: int, V: int, *, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(R + 100 * V)
    return spread * torch.randn(R, V, generator=generator), torch.randint(V, (R,), generator=generator)


def upstream(R: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(R)
    return {name: torch.randn(R, generator=generator) for name in ("grad_logprobs", "grad_entropy")}


def everything(*inputs: Tensor, **options: Any) -> list[Tensor]:
    """log p, the entropy, and the state."""
    logprobs, entropy, state = row_statistics(*inputs, entropy=True, **options)
    assert entropy is not None
    return [logprobs, entropy, *state]


def our_gradient(logits: Tensor, targets: Tensor, *, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """Both passes on the given memory, which is overwritten."""
    grads = {name: options.pop(name) for name in ("grad_logprobs", "grad_entropy")}
    logprobs, entropy, (maximum, total, *_) = row_statistics(logits, targets, entropy=True, **options)
    saved = {"logprobs": logprobs, "entropy": entropy, "maximum": maximum, "total": total}
    return logits_gradient_(logits, targets, dtype=dtype, **saved, **grads, **options)


def check_gradient(oracle: Any, logits: Tensor, targets: Tensor, **options: Any) -> None:
    """Against fp64, next to fp32 autograd."""
    plain = oracle.gradient(logits, targets, **options)
    exact = oracle.gradient(logits.double(), targets, **options)
    oracle.assert_as_exact_as_torch(our_gradient(logits.clone(), targets, **options), plain, exact)


@pytest.mark.parametrize(("R", "V"), SHAPES)
@pytest.mark.parametrize("names", ["", ALL])
def test_statistics_are_as_exact_as_torch(oracle: Any, head_options: Any, R: int, V: int, names: str) -> None:
    (logits, targets), options = problem(R, V), head_options(R, V, names)
    before = logits.clone()
    ours = row_statistics(logits, targets, entropy=True, **options)
    plain, exact = (oracle.statistics(x, targets, **options) for x in (logits, logits.double()))
    for mine, torchs, wanted in zip(ours[:2], plain, exact, strict=True):
        oracle.assert_as_exact_as_torch(mine, torchs, wanted)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("R", "V"), SHAPES)
@pytest.mark.parametrize("names", ["", ALL])
def test_gradient_is_as_exact_as_autograd(oracle: Any, head_options: Any, R: int, V: int, names: str) -> None:
    check_gradient(oracle, *problem(R, V), **upstream(R), **head_options(R, V, names))


@pytest.mark.parametrize("names", ["bias", "softcap", "scale", "temperature"])
def test_gradient_of_each_option_alone(oracle: Any, head_options: Any, names: str) -> None:
    check_gradient(oracle, *problem(5, 130), **upstream(5), **head_options(5, 130, names))


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_huge_logits_keep_finite_statistics_and_gradients(oracle: Any, head_options: Any, shift: float) -> None:
    logits, targets = problem(5, 130)
    options, shifted = head_options(5, 130), logits + shift
    ours = row_statistics(shifted, targets, entropy=True, **options)
    exact = oracle.statistics(shifted.double(), targets, **options)
    # The common shift cancels exactly: a log-prob of 5 must not carry the rounding of a logit of 10000.
    for mine, wanted in zip(ours[:2], exact, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=2e-6, atol=2e-6)
    check_gradient(oracle, shifted, targets, **upstream(5), **options)


def test_probable_target_at_huge_logits_keeps_exact_probabilities(head_options: Any) -> None:
    logits, targets = torch.tensor([[1e4, 1e4 - 1.5, 1e4 - 3.0]]), torch.tensor([0])
    grads = {"grad_logprobs": torch.ones(1), "grad_entropy": torch.zeros(1)}
    exact = torch.tensor([[1.0, 0.0, 0.0]]).double() - torch.softmax(logits.double(), -1)
    ours = our_gradient(logits, targets, **grads, **head_options(1, 3))
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=0)


def test_hopeless_target_does_not_round_the_others(head_options: Any) -> None:
    logits, targets = torch.tensor([[0.3, -0.2, -12345.678]]), torch.tensor([2])
    _, _, (maximum, total, _, target_logit) = row_statistics(logits, targets, **head_options(1, 3))
    assert (maximum.item(), target_logit.item()) == (logits[0, 0].item(), logits[0, 2].item())
    exact = (logits[0, :2].double() - maximum).exp().sum()
    torch.testing.assert_close(total.double(), exact[None], rtol=3e-7, atol=0)


def test_gradient_without_entropy_needs_no_entropy(oracle: Any, head_options: Any) -> None:
    (logits, targets), options = problem(5, 130), head_options(5, 130, ALL)
    g = upstream(5)["grad_logprobs"]
    logprobs, none, (maximum, total, *_) = row_statistics(logits, targets, **options)
    exact = oracle.gradient(logits.double(), targets, grad_logprobs=g, grad_entropy=torch.zeros(5), **options)
    rest = {"maximum": maximum, "total": total, "logprobs": logprobs, "entropy": none}
    rest |= {"grad_logprobs": g, "grad_entropy": None}
    ours = logits_gradient_(logits, targets, **rest, **options)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def test_confident_target_keeps_its_gradient(head_options: Any) -> None:
    logits, targets = torch.tensor([[30.0, 0.0, 0.0]]), torch.tensor([0])
    grads = {"grad_logprobs": torch.ones(1), "grad_entropy": torch.zeros(1)}
    ours = our_gradient(logits, targets, **grads, **head_options(1, 3))
    others = torch.tensor([-30.0]).double().exp()
    exact = torch.stack([2 * others, -others, -others], 1) / (1 + 2 * others)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("V", [1, 5, 64, 127, 257])
def test_in_place_gradient_equals_the_one_rounded_afterwards(head_options: Any, V: int, dtype: torch.dtype) -> None:
    (logits, targets), options = problem(3, V), upstream(3) | head_options(3, V, ALL)
    apart = our_gradient(logits.clone(), targets, **options).clone().to(dtype)
    in_place = our_gradient(logits, targets, dtype=dtype, **options)
    assert in_place.data_ptr() == logits.data_ptr()
    assert torch.equal(in_place, apart)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_padding_between_rows_is_neither_read_nor_written(head_options: Any, dtype: torch.dtype) -> None:
    (logits, targets), options = problem(3, 130), upstream(3) | head_options(3, 130, ALL)
    padded = torch.full((3, 144), float("nan"))
    padded[:, :130] = logits
    ours = our_gradient(padded[:, :130], targets, dtype=dtype, **options)
    assert torch.equal(ours, our_gradient(logits.clone(), targets, dtype=dtype, **options))
    assert padded[:, 130:].isnan().all()


def test_rows_do_not_depend_on_their_neighbours_and_reruns_agree(head_options: Any) -> None:
    (logits, targets), temperature = problem(7, 130), head_options(7, 130, "temperature")["temperature"]
    together = everything(logits, targets, temperature=temperature)
    alone = everything(logits[4:5], targets[4:5], temperature=temperature[4:5])
    again = everything(logits, targets, temperature=temperature)
    assert all(torch.equal(a, b[4:5]) for a, b in zip(alone, together, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))


def test_no_rows_is_no_results(head_options: Any) -> None:
    logits, targets = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    assert [len(result) for result in everything(logits, targets, **head_options(0, 5))] == [0] * 6
    assert our_gradient(logits, targets, **upstream(0), **head_options(0, 5)).shape == (0, 5)


def stretches(logits: Tensor, targets: Tensor, cut: int) -> list[tuple[Tensor, Tensor, slice]]:
    """(logits, local targets, columns) of a vocabulary in two parts, a NaN before each row and each bias."""
    parts = []
    for columns in (slice(0, cut), slice(cut, logits.shape[1])):
        guarded = torch.nn.functional.pad(logits[:, columns], (1, 0), value=float("nan"))
        local = targets - columns.start
        parts.append((guarded[:, 1:], local.masked_fill((local < 0) | (targets >= columns.stop), -1), columns))
    return parts


def options_of(columns: slice, options: dict[str, Any]) -> dict[str, Any]:
    if "bias" not in options:
        return options
    return options | {"bias": torch.nn.functional.pad(options["bias"][columns], (1, 0), value=float("nan"))[1:]}


@pytest.mark.parametrize("names", ["", ALL])
def test_row_without_a_target_has_the_statistics_of_all_its_columns(oracle: Any, head_options: Any, names: str) -> None:
    (logits, targets), options = problem(7, 130), head_options(7, 130, names)
    for part, local, columns in stretches(logits, targets, 70):
        local_options = options_of(columns, options)
        ours = row_statistics(part, local, entropy=True, **local_options)
        plain = oracle.statistics(part, local.clamp(min=0), **local_options)
        exact = oracle.statistics(part.double(), local.clamp(min=0), **local_options)
        assert (local == -1).any()
        assert (ours[0][local == -1] == float("-inf")).all()
        oracle.assert_as_exact_as_torch(ours[0][local >= 0], plain[0][local >= 0], exact[0][local >= 0])
        oracle.assert_as_exact_as_torch(ours[1], plain[1], exact[1])


@pytest.mark.parametrize("names", ["", ALL])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_of_two_stretches_are_those_of_the_vocabulary(
    oracle: Any, head_options: Any, names: str, with_entropy: bool
) -> None:
    (logits, targets), options, grads = problem(7, 130), head_options(7, 130, names), upstream(7)
    if not with_entropy:
        grads["grad_entropy"] = torch.zeros(7)
    plain = oracle.gradient(logits, targets, **grads, **options)
    exact = oracle.gradient(logits.double(), targets, **grads, **options)
    logprobs, entropy, (maximum, total, *_) = row_statistics(logits, targets, entropy=True, **options)
    whole = {"maximum": maximum, "total": total, "logprobs": logprobs, "entropy": entropy} | grads
    if not with_entropy:
        whole |= {"entropy": None, "grad_entropy": None}
    ours = [
        logits_gradient_(part, local, **whole, **options_of(columns, options))
        for part, local, columns in stretches(logits, targets, 70)
    ]
    oracle.assert_as_exact_as_torch(torch.cat(ours, 1), plain, exact)


def test_gradient_without_any_target_is_that_of_the_log_sum_exp(head_options: Any) -> None:
    (logits, _), none = problem(5, 130), torch.full((5,), -1)
    logprobs, _, (maximum, total, *_) = row_statistics(logits, none, **head_options(5, 130))
    grads = {"logprobs": logprobs, "maximum": maximum, "total": total, "grad_logprobs": torch.ones(5)}
    grads |= {"entropy": None, "grad_entropy": None}
    ours = logits_gradient_(logits.clone(), none, **grads, **head_options(5, 130))
    torch.testing.assert_close(ours.double(), -torch.softmax(logits.double(), -1), rtol=2e-6, atol=1e-9)


def test_softcap_is_exact_from_the_smallest_to_the_largest_logit() -> None:
    sizes = torch.logspace(-6, 4, 120)
    logits = torch.cat([-sizes, torch.linspace(0.55, 0.65, 40), sizes])[:, None]
    # Of one token, the largest logit is its own.
    none, options = torch.full((len(logits),), -1), {"temperature": torch.ones(len(logits)), "softcap": 1.0}
    _, _, (maximum, *_) = row_statistics(logits, none, **options)
    torch.testing.assert_close(maximum.double(), torch.tanh(logits[:, 0].double()), rtol=4e-7, atol=0)
