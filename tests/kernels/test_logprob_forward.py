"""The fused head against explicit softmax maths in fp64, through Triton's interpreter."""

import importlib
from typing import Any

import pytest
import torch
from device_under_test import NAME
from torch import Tensor

from fused_grpo.kernels import logprob_forward, tuning

pytestmark = pytest.mark.grid

MODULE = importlib.import_module("fused_grpo.kernels._head_gemm")
SHAPES = [(1, 1, 1), (7, 2, 16), (33, 5, 40), (7, 127, 16), (33, 130, 16), (7, 257, 40), (1, 257, 1), (33, 257, 16)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH, HALF = [torch.float32, torch.bfloat16], [torch.float16, torch.bfloat16]
OPTIONS = ["", "bias", "softcap", "scale temperature", "bias softcap scale temperature"]


def problem(N: int, V: int, D: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N + 100 * V + 10000 * D)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def everything(*inputs: Tensor, **options: Any) -> list[Tensor]:
    """log p, the entropy, and the state."""
    logprobs, entropy, state = logprob_forward(*inputs, entropy=True, **options)
    assert entropy is not None
    return [logprobs, entropy, *state]


def check(independent: Any, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> None:
    ours = everything(hidden, weight, targets, **options)
    plain = independent.statistics(hidden.float() @ weight.float().T, targets, **options)
    raw = hidden.double() @ weight.double().T
    magnitude = raw.abs().max().item() if raw.numel() else 0.0
    for actual, torchs, exact in zip(ours[:2], plain, independent.statistics(raw, targets, **options), strict=True):
        independent.assert_as_exact_as_torch(actual, torchs, exact, magnitude=magnitude)
    assert (ours[0] <= 0).all()


@pytest.mark.parametrize(("N", "V", "D"), SHAPES)
@pytest.mark.parametrize("names", ["", "bias softcap scale temperature"])
@pytest.mark.parametrize("dtype", BOTH)
def test_ragged_shapes_are_as_exact_as_torch(
    independent: Any, head_options: Any, N: int, V: int, D: int, names: str, dtype: torch.dtype
) -> None:
    check(independent, *problem(N, V, D, dtype=dtype), **head_options(N, V, names))


@pytest.mark.parametrize("names", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_option_enters_the_logit_where_it_should(
    independent: Any, head_options: Any, names: str, dtype: torch.dtype
) -> None:
    check(independent, *problem(7, 130, 40, dtype=dtype), **head_options(7, 130, names))


@pytest.mark.parametrize("logit_scale", [-0.7, 0.0, 1e-30])
@pytest.mark.parametrize("dtype", BOTH)
def test_logits_that_a_scale_turns_around_or_away_are_logits(
    independent: Any, head_options: Any, logit_scale: float, dtype: torch.dtype
) -> None:
    """Where all of a row lies beyond a mask, 0 times its -inf would be no number."""
    inputs = problem(33, 257, 16, dtype=dtype)
    check(independent, *inputs, **head_options(33, 257, "temperature"), logit_scale=logit_scale)


@pytest.mark.parametrize("dtype", BOTH)
def test_target_in_any_tile_of_any_split_is_found(independent: Any, head_options: Any, dtype: torch.dtype) -> None:
    hidden, weight, _ = problem(33, 257, 16, dtype=dtype)
    edges = torch.tensor([0, 31, 32, 63, 64, 95, 96, 127, 128, 255, 256])
    check(independent, hidden, weight, edges.repeat(3), **head_options(33, 257))


@pytest.mark.parametrize("dtype", BOTH)
def test_single_token_vocabulary_is_certain(head_options: Any, dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(7, 1, 16, dtype=dtype)
    logprobs, entropy, _ = logprob_forward(hidden, weight, targets, entropy=True, **head_options(7, 1))
    assert torch.equal(logprobs, torch.zeros(7))
    assert torch.equal(entropy, torch.zeros(7))


def test_no_rows_is_no_results(head_options: Any) -> None:
    results = everything(*problem(0, 5, 16), **head_options(0, 5))
    assert [tuple(result.shape) for result in results] == [(0,)] * 6


@pytest.mark.parametrize("dtype", BOTH)
def test_rows_do_not_depend_on_how_many_there_are(head_options: Any, dtype: torch.dtype) -> None:
    # From a multiple of 16 on: the interpreter multiplies with BLAS, whose bits depend on the place within the tile.
    hidden, weight, targets = problem(33, 257, 16, dtype=dtype)
    temperature = head_options(33, 257, "temperature")["temperature"]
    together = everything(hidden, weight, targets, temperature=temperature)
    for rows in (slice(0, 1), slice(16, 23), slice(32, 33)):
        alone = everything(hidden[rows], weight, targets[rows], temperature=temperature[rows])
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b[rows])


@pytest.mark.parametrize("dtype", BOTH)
def test_reruns_are_bitwise_equal_and_an_entropy_moves_only_a_sums_order(head_options: Any, dtype: torch.dtype) -> None:
    inputs, options = problem(7, 257, 40, dtype=dtype), head_options(7, 257, "bias softcap")
    first, again = (everything(*inputs, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    plain, none, _ = logprob_forward(*inputs, **options)
    assert none is None
    torch.testing.assert_close(plain, first[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", BOTH)
def test_strided_inputs_are_read_in_place(independent: Any, head_options: Any, dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(7, 130, 16, dtype=dtype)
    temperature = torch.tensor(0.8).expand(7)
    wide = torch.full((7, 40), float("nan"), dtype=dtype)
    wide[:, 3:35:2] = hidden
    check(independent, wide[:, 3:35:2], weight.T.contiguous().T, targets, temperature=temperature)


@pytest.mark.cpu_only(reason="it is about the tile tables")
def test_number_of_splits_follows_from_the_vocabulary_alone() -> None:
    for V in (1, 255, 256, 32000, 151936, 262144):
        for tile in (*tuning.HALF.values(), *tuning.ALIGNED.values(), *tuning.SINGLE.values()):
            splits, per_split = MODULE._splits(V, tile)
            tiles = -(-V // tile.block_v)
            assert splits <= tile.max_splits
            assert (splits - 1) * per_split < tiles <= splits * per_split


@pytest.mark.parametrize(("N", "V", "D"), [(1, 1, 8), (7, 130, 24), (33, 257, 40), (16, 64, 32)])
@pytest.mark.parametrize("dtype", HALF)
def test_descriptors_and_pointers_read_the_same_head(
    monkeypatch: pytest.MonkeyPatch, head_options: Any, N: int, V: int, D: int, dtype: torch.dtype
) -> None:
    made, make = [], MODULE.TensorDescriptor.from_tensor
    monkeypatch.setattr(MODULE.TensorDescriptor, "from_tensor", lambda *args: made.append(args) or make(*args))
    (hidden, weight, targets), options = problem(N, V, D, dtype=dtype), head_options(N, V, "bias temperature")
    aligned = everything(hidden, weight, targets, **options)
    assert len(made) == 2
    spread = torch.full((N, 2 * D), float("nan"), dtype=dtype)
    spread[:, ::2] = hidden
    through_pointers = everything(spread[:, ::2], weight, targets, **options)
    assert len(made) == 2
    for one, other in zip(aligned, through_pointers, strict=True):
        # On a GPU a tile has another size where it comes through pointers, and sums are in another order.
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if NAME == "cuda" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dtype", HALF)
def test_descriptor_neither_reads_past_the_features_nor_past_the_rows(
    independent: Any, head_options: Any, dtype: torch.dtype
) -> None:
    hidden, weight, targets = problem(7, 130, 40, dtype=dtype)
    inputs = []
    for matrix in (hidden, weight):
        around = torch.full((len(matrix) + 3, 48), float("nan"), dtype=dtype)
        around[: len(matrix), :40] = matrix
        inputs.append(around[: len(matrix), :40])
        assert tuning.is_aligned(inputs[-1])
    check(independent, *inputs, targets, **head_options(7, 130))


@pytest.mark.cpu_only(reason="it is about addresses and strides, which are the same anywhere")
def test_only_a_matrix_that_a_descriptor_can_describe_gets_one() -> None:
    memory = torch.zeros(4096, dtype=torch.float16)
    suits = {
        strides: tuning.is_aligned(memory.as_strided((8, 16), strides)) for strides in [(16, 1), (24, 1), (256, 1)]
    }
    assert all(suits.values())
    assert not tuning.is_aligned(memory.as_strided((8, 16), (16, 1), 1))
    assert not tuning.is_aligned(memory.float().as_strided((8, 16), (16, 1)))
    assert not tuning.is_aligned(memory[:0].view(0, 16))
    for strides in [(20, 1), (1, 8), (32, 2), (0, 1), (8, 1)]:
        assert not tuning.is_aligned(memory.as_strided((8, 16), strides))


@pytest.mark.cpu_only(reason="it is about strides, which are the same anywhere")
def test_rows_too_far_apart_for_int32_are_copied() -> None:
    near, far = (torch.empty(rows, 2**24, 4, device="meta")[:, 0] for rows in (8, 128))
    assert MODULE._within_int32(near, 128, 32).stride() == near.stride()
    assert MODULE._within_int32(far, 128, 32).stride() == (4, 1)
    assert MODULE._within_int32(far[:1], 128, 32).stride() == far.stride()


@pytest.mark.parametrize("names", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_without_a_target_has_the_statistics_of_all_tokens(
    independent: Any, head_options: Any, names: str, dtype: torch.dtype
) -> None:
    (hidden, weight, targets), options = problem(33, 257, 16, dtype=dtype), head_options(33, 257, names)
    plain = independent.statistics(hidden.float() @ weight.float().T, targets, **options)
    raw = hidden.double() @ weight.double().T
    exact = independent.statistics(raw, targets, **options)
    elsewhere = torch.arange(33) % 3 == 0
    ours = logprob_forward(hidden, weight, targets.masked_fill(elsewhere, -1), entropy=True, **options)
    assert (ours[0][elsewhere] == float("-inf")).all()
    independent.assert_as_exact_as_torch(
        ours[0][~elsewhere], plain[0][~elsewhere], exact[0][~elsewhere], magnitude=raw.max()
    )
    independent.assert_as_exact_as_torch(ours[1], plain[1], exact[1], magnitude=raw.abs().max().item())


@pytest.mark.parametrize("dtype", BOTH)
def test_a_slice_of_banned_tokens_adds_nothing_to_the_vocabulary(head_options: Any, dtype: torch.dtype) -> None:
    hidden, weight, _ = problem(7, 40, 16, dtype=dtype)
    options = head_options(7, 40) | {"bias": torch.full((40,), float("-inf"))}
    logprobs, entropy, (maximum, total, *_) = logprob_forward(
        hidden, weight, torch.full((7,), -1), entropy=True, **options
    )
    assert (logprobs == float("-inf")).all()
    assert (maximum == float("-inf")).all()
    assert not total.any()
    assert torch.equal(entropy, torch.zeros(7))
