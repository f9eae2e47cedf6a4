"""Softmax weights straight from hidden states, against those of logits in fp64; rows far from their anchors as well."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from device_under_test import NAME
from torch import Tensor

from fused_grpo.kernels import empty_tile, softmax_weights_, softmax_weights_forward, tuning

ON_A_GPU = NAME == "cuda"
DTYPE = torch.bfloat16 if ON_A_GPU else torch.float32
SHAPES = [(1, 1, 8), (7, 2, 16), (33, 5, 40), (7, 127, 16), (33, 130, 16), (7, 257, 40), (1, 257, 8), (33, 257, 16)]
OPTIONS = ["", "bias", "softcap", "scale temperature", "bias softcap scale temperature"]
# Of the target, from the others: within what its anchor allows, just beyond it, and beyond what fp32 can hold.
DISTANCES = {0: -18.0, 1: -26.0, 3: -45.0, 4: -70.0, 5: -300.0, 17: 40.0, 18: 60.0, 19: 85.0, 20: 300.0}


def problem(N: int, V: int, D: int, *, dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N + 100 * V + 10000 * D)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def far(N: int = 33, V: int = 257, D: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose target lies DISTANCES above the others, by a last feature that it alone has."""
    hidden, weight, targets = problem(N, V, D)
    hidden[:, -1], weight[:, -1], weight[7, -1] = 0.0, 0.0, 1.0
    for row, distance in DISTANCES.items():
        targets[row], hidden[row, -1] = 7, distance
    return hidden, weight, targets


def run(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(scale * E, log p, entropy), and the memory behind E, whose padding must stay what it was."""
    out = empty_tile(len(hidden), len(weight), dtype=DTYPE, device=hidden.device)
    assert out._base is not None
    out._base.fill_(-7.0)
    same, scale, (logprobs, entropy, _, total) = softmax_weights_forward(
        hidden, weight, targets, out=out, entropy=True, **options
    )
    assert torch.equal(same.nan_to_num(), out.nan_to_num())
    assert entropy is not None
    assert (out._base[:, len(weight) + -len(weight) % 8 :] == -7.0).all()
    assert torch.equal(out[torch.arange(len(out)), targets].isfinite(), torch.ones(len(out), dtype=torch.bool))
    assert len(total) == len(hidden)
    return scale[:, None].double() * out.double(), logprobs, entropy


def check(independent: Any, inputs: tuple[Tensor, Tensor, Tensor], **options: Any) -> None:
    hidden, weight, targets = inputs
    ours, logprobs, entropy = run(*inputs, **options)
    raw = hidden.double() @ weight.double().T
    plain = independent.statistics(raw.float(), targets, **options)
    for actual, torchs, exact in zip(
        (logprobs, entropy), plain, independent.statistics(raw, targets, **options), strict=True
    ):
        independent.assert_as_exact_as_torch(actual, torchs, exact, magnitude=raw.abs().max().item())
    ones, none = torch.ones(len(hidden)), torch.zeros(len(hidden))
    exact = independent.gradient(raw, targets, ones, none, **options)
    rounding = 1e-2 if ON_A_GPU else 2e-5
    torch.testing.assert_close(ours, exact, rtol=rounding, atol=rounding * exact.abs().max().item())
    # What is left beside a certain token is exact by itself, not beside that of other rows. In fp64, 1 - p is not.
    wrong, size = ((x.scatter(1, targets[:, None], 0.0)).abs().amax(1) for x in (ours - exact, exact))
    assert (wrong <= 3 * rounding * (1 + raw.abs().max()) * size)[size > 1e-36].all()


@pytest.mark.parametrize(("N", "V", "D"), SHAPES)
@pytest.mark.parametrize("names", ["", "bias softcap scale temperature"])
def test_ragged_shapes_are_exact(independent: Any, head_options: Any, N: int, V: int, D: int, names: str) -> None:
    check(independent, problem(N, V, D), **head_options(N, V, names))


@pytest.mark.parametrize("names", OPTIONS)
def test_each_option_enters_the_logit_where_it_should(independent: Any, head_options: Any, names: str) -> None:
    check(independent, problem(33, 130, 40), **head_options(33, 130, names))


@pytest.mark.parametrize("logit_scale", [-0.7, 0.0, 1e-30])
def test_logits_that_a_scale_turns_around_or_away(independent: Any, head_options: Any, logit_scale: float) -> None:
    check(independent, problem(33, 257, 16), **head_options(33, 257, "temperature"), logit_scale=logit_scale)


@pytest.mark.parametrize("names", ["", "bias"])
def test_rows_far_from_their_anchor_are_as_exact_as_any(independent: Any, head_options: Any, names: str) -> None:
    check(independent, far(), **head_options(33, 257, names))


def test_rows_beside_far_ones_keep_their_bits(head_options: Any) -> None:
    hidden, weight, targets = far()
    near = hidden.clone()
    near[list(DISTANCES), -1] = 0.0
    options = head_options(33, 257)
    beside = [row for row in range(33) if row not in DISTANCES]
    for with_far, without in zip(
        run(hidden, weight, targets, **options), run(near, weight, targets, **options), strict=True
    ):
        assert torch.equal(with_far[beside], without[beside])


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_rows_that_are_no_numbers_leave_others_alone(head_options: Any) -> None:
    """They have weights of 0, and a log-prob of NaN."""
    hidden, weight, targets = problem(33, 257, 16)
    options, others = head_options(33, 257), torch.arange(33) != 20
    before = run(hidden, weight, targets, **options)
    hidden[20, 3] = float("nan")
    after = run(hidden, weight, targets, **options)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(before, after, strict=True))
    assert after[1][20].isnan()
    out = empty_tile(33, 257, dtype=DTYPE, device=hidden.device)
    softmax_weights_forward(hidden, weight, targets, out=out, **options)
    assert (out[20] == 0).all()


def test_banned_tokens_have_no_weight(independent: Any, head_options: Any) -> None:
    """A bias of -inf, at the target of one row as well: that has a log-prob of -inf."""
    inputs, bias = problem(33, 257, 16), torch.zeros(257).index_fill_(0, torch.arange(40), -torch.inf)
    inputs[2].clamp_(40)[5] = 3
    ours, logprobs, _ = run(*inputs, **head_options(33, 257), bias=bias)
    assert logprobs[5] == -torch.inf
    assert (ours[:5, :40] == 0).all()
    raw = (inputs[0].double() @ inputs[1].double().T) + bias
    torch.testing.assert_close(logprobs.double(), raw.log_softmax(1)[torch.arange(33), inputs[2]], rtol=1e-4, atol=1e-4)


def test_they_are_the_weights_of_logits(head_options: Any) -> None:
    (hidden, weight, targets), options = problem(33, 257, 16), head_options(33, 257, "bias temperature")
    logits = empty_tile(33, 257, dtype=torch.float32, device=hidden.device).copy_(hidden.float() @ weight.float().T)
    weights, scale, (logprobs, _, _, _) = softmax_weights_(logits, targets, entropy=True, dtype=DTYPE, **options)
    ours, our_logprobs, _ = run(hidden, weight, targets, **options)
    rounding = 2e-2 if ON_A_GPU else 1e-5
    torch.testing.assert_close(ours, scale[:, None].double() * weights.double(), rtol=rounding, atol=1e-6)
    torch.testing.assert_close(our_logprobs, logprobs, rtol=1e-5, atol=1e-5)


def test_no_rows_are_no_results(head_options: Any) -> None:
    hidden, weight, targets = problem(0, 5, 16)
    _, scale, (logprobs, entropy, *_) = softmax_weights_forward(
        hidden, weight, targets, out=torch.empty(0, 64, dtype=DTYPE)[:, :5], **head_options(0, 5)
    )
    assert (len(scale), len(logprobs), entropy) == (0, 0, None)


@pytest.mark.cpu_only(reason="it is about the tile tables")
def test_it_is_preferred_where_it_was_measured_and_can_be_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefers(arch: str, dtype: torch.dtype, rows: int, D: int = 4096, stride: int | None = None) -> bool:
        monkeypatch.setattr(tuning, "architecture", lambda device: arch)
        weight = torch.empty_strided((151936, D), (stride or D, 1), device="meta", dtype=torch.bfloat16)
        return tuning.prefers_softmax_weights(torch.empty(1, D, device="meta", dtype=dtype), weight, rows)

    bf16 = torch.bfloat16
    assert prefers("sm_90", bf16, 8192)
    assert prefers("sm_90", bf16, 8192, stride=4104)
    assert not prefers("sm_90", bf16, 8192, stride=4100)
    assert not prefers("sm_90", bf16, 8192, D=4090)
    assert not prefers("sm_90", bf16, 256)  # launches would take longer
    assert not prefers("sm_90", torch.float16, 8192)
    assert not prefers("sm_90", torch.float32, 8192)
    assert not prefers("sm_80", bf16, 8192)


def test_fewer_longer_splits_give_weights_as_exact(independent: Any, head_options: Any, monkeypatch) -> None:
    for arch, tile in [*tuning.WEIGHTS.items()]:
        monkeypatch.setitem(tuning.WEIGHTS, arch, replace(tile, max_splits=3))
    check(independent, problem(33, 257, 16), **head_options(33, 257, "bias"))
