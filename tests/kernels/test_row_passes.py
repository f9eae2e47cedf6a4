"""Passes over materialised logits against fp64 autograd: Triton's, interpreted, and those in plain torch."""

import inspect
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor

from fused_grpo import kernels
from fused_grpo._maths import distributions
from fused_grpo._maths.moments import Moments, merge_moments
from fused_grpo._maths.statistics import HEADROOM, RowState, Statistics
from fused_grpo.passes import buffers, torch_passes
from fused_grpo.passes.protocol import RowPasses

pytestmark = pytest.mark.grid

DTYPES = [torch.float16, torch.float32, torch.bfloat16]
BOTH = [torch.float32, torch.bfloat16]
ALL = "bias softcap scale temperature"
SHAPES = [(1, 1), (7, 2), (3, 5), (7, 64), (5, 127), (3, 130), (2, 257)]


@pytest.fixture(params=[kernels, torch_passes], ids=["triton", "torch"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # As many columns in a block as there are in a tile of the interpreter.
    monkeypatch.setattr(buffers, "BLOCK_BYTES", 4 * 7 * 128)
    return request.param


def problem(R: int, V: int, *, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(R + 100 * V)
    return spread * torch.randn(R, V, generator=generator), torch.randint(V, (R,), generator=generator)


def upstream(R: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(R)
    return {name: torch.randn(R, generator=generator) for name in ("grad_logprobs", "grad_entropy")}


def statistics(passes: ModuleType, *inputs: Tensor, **options: Any) -> Statistics:
    state = RowState(*passes.row_statistics(*inputs, entropy=True, **options))
    return Statistics(*passes.finish_rows([state], entropy=True))


def gradient(passes: ModuleType, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Both passes on the given memory, which is overwritten."""
    grads = {name: options.pop(name) for name in ("grad_logprobs", "grad_entropy", "dtype") if name in options}
    row_statistics = statistics(passes, logits, targets, **options)
    return passes.logits_gradient_(logits, targets, statistics=row_statistics, **grads, **options)


def jacobian(passes: ModuleType, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """d log p / d logits [R, V] from the weights that overwrite them."""
    weights, scale, _ = passes.softmax_weights_(logits, targets, **options)
    return weights.float() * scale[:, None]


def check(independent: Any, compute: Any, logits: Tensor, targets: Tensor, *, raised: int = 0, **options: Any) -> None:
    """A gradient that `compute` takes, against fp64, next to fp32 autograd. In bf16 it is that, rounded."""
    ours = compute(logits.clone(), targets, **options)
    rounded = compute(logits.clone(), targets, **options, dtype=torch.bfloat16).float()
    # Half a unit in the last of 8 bits, and again whenever a later tile raises the shift; a hundredth for fp32.
    assert ((rounded - ours).abs() <= 1.01 * (1 + raised) * 2.0**-8 * ours.abs() + 1e-38).all()
    if "grad_logprobs" not in options:
        options |= {"grad_logprobs": torch.ones(len(logits)), "grad_entropy": torch.zeros(len(logits))}
    plain, exact = (independent.gradient(x, targets, **options) for x in (logits, logits.double()))
    independent.assert_as_exact_as_torch(ours, plain, exact)


@pytest.mark.parametrize(("R", "V"), SHAPES)
@pytest.mark.parametrize("names", ["", ALL])
def test_statistics_are_as_exact_as_torch(
    independent: Any, head_options: Any, passes: ModuleType, R: int, V: int, names: str
) -> None:
    (logits, targets), options = problem(R, V), head_options(R, V, names)
    before = logits.clone()
    ours = statistics(passes, logits, targets, **options)
    assert torch.equal(logits, before)
    at_once = passes.softmax_weights_(logits, targets, entropy=True, **options)[2]
    plain, exact = (independent.statistics(x, targets, **options) for x in (before, before.double()))
    for actuals in (ours, at_once):
        for actual, torchs, wanted in zip(actuals[:2], plain, exact, strict=True):
            independent.assert_as_exact_as_torch(actual, torchs, wanted)


@pytest.mark.parametrize(("R", "V"), SHAPES)
@pytest.mark.parametrize("names", ["", ALL, "softcap"])
@pytest.mark.parametrize("rises", [0.0, 90.0])
def test_moments_are_as_exact_as_torch(
    independent: Any, head_options: Any, passes: ModuleType, R: int, V: int, names: str, rises: float
) -> None:
    """In two tiles, of which the first row's target is in neither, as in a shard; that of the last row ties."""
    (logits, targets), options = problem(R, V), head_options(R, V, names)
    logits += rises * torch.linspace(0, 1, V)
    targets[1::2] = distributions.transform_logits(logits, **options).argmax(1)[1::2]
    logits[-1, V // 3] = logits[-1, V - 1] = logits[-1].max() + 1
    targets[0], targets[-1] = V + 1, V - 1 if R > 1 else V + 1
    before, bias = logits.clone(), options.pop("bias", None)
    parts = []
    for columns in (slice(0, V // 3), slice(V // 3, V)) if V > 2 else (slice(0, V),):
        tile = {"bias": None if bias is None else bias[columns], **options}
        passes.row_statistics(
            logits[:, columns],
            targets - columns.start,
            entropy=rises > 0,
            moments=lambda fields, columns: parts.append(Moments(*fields)),
            **tile,
        )
    assert torch.equal(logits, before)
    moments, local = merge_moments(parts), targets.clamp_max(V - 1)[:, None]
    expected = []
    for x in (before, before.double()):
        z = distributions.transform_logits(x, bias=bias, **options)
        others = z.scatter(1, local, torch.where(targets[:, None] < V, -torch.inf, z.gather(1, local)))
        shift = moments.shift.to(x.dtype)[:, None]
        squares = (2 * (others - shift.masked_fill(shift == -torch.inf, 0.0))).exp().sum(1)
        expected.append((squares, z.sum(1) / V))
    for actual, plain, exact in zip((moments.squares, moments.logits / V), *expected, strict=True):
        independent.assert_as_exact_as_torch(actual, plain, exact)
    leads = (moments.target_logit >= moments.largest) & (moments.target_logit > moments.before)
    # Where the cap saturates, logits that differ are equal in fp32.
    lead = torch.where(targets < V, z.gather(1, local)[:, 0], -torch.inf) - others.amax(1)
    assert (leads | (lead < 1e-5)).all()
    assert (lead[leads] > -1e-5).all()
    assert bias is not None or V < 3 or not leads[-1]


@pytest.mark.parametrize(("R", "V"), SHAPES)
@pytest.mark.parametrize("names", ["", ALL])
def test_weights_times_their_scale_are_the_gradient_of_the_log_prob(
    independent: Any, head_options: Any, passes: ModuleType, R: int, V: int, names: str
) -> None:
    (logits, targets), options = problem(R, V), head_options(R, V, names)
    check(independent, lambda *x, **o: jacobian(passes, *x, **o), logits, targets, **options)


@pytest.mark.parametrize(("R", "V"), SHAPES)
@pytest.mark.parametrize("names", ["", ALL])
def test_gradient_is_as_exact_as_autograd(
    independent: Any, head_options: Any, passes: ModuleType, R: int, V: int, names: str
) -> None:
    options = upstream(R) | head_options(R, V, names)
    check(independent, lambda *x, **o: gradient(passes, *x, **o), *problem(R, V), **options)


@pytest.mark.parametrize("names", ["bias", "softcap", "scale", "temperature"])
def test_gradients_of_each_option_alone(independent: Any, head_options: Any, passes: ModuleType, names: str) -> None:
    options = head_options(5, 130, names)
    check(independent, lambda *x, **o: jacobian(passes, *x, **o), *problem(5, 130), **options)
    check(independent, lambda *x, **o: gradient(passes, *x, **o), *problem(5, 130), **upstream(5), **options)


@pytest.mark.parametrize("step", [HEADROOM - 1, HEADROOM + 1, 60.0, 400.0])
@pytest.mark.parametrize("falls", [False, True])
def test_logits_that_rise_or_fall_from_tile_to_tile_are_as_exact_as_any(
    independent: Any, head_options: Any, passes: ModuleType, step: float, falls: bool
) -> None:
    """Up to the last tile the shift is raised, and what was written so far goes along."""
    logits, targets = problem(7, 520)
    steps = step * (torch.arange(520) // 128)
    logits += steps.flip(0) if falls else steps
    targets[:3] = torch.tensor([0, 200, 519])
    options = head_options(7, 520)
    exact, plain = (independent.statistics(x, targets, **options) for x in (logits.double(), logits))
    for actual, torchs, wanted in zip(statistics(passes, logits, targets, **options)[:2], plain, exact, strict=True):
        independent.assert_as_exact_as_torch(actual, torchs, wanted)
    # Up to four of the five tiles raise it.
    check(independent, lambda *x, **o: jacobian(passes, *x, **o), logits, targets, raised=4, **options)
    check(independent, lambda *x, **o: gradient(passes, *x, **o), logits, targets, **upstream(7), **options)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_huge_logits_keep_finite_statistics_and_gradients(
    independent: Any, head_options: Any, passes: ModuleType, shift: float
) -> None:
    logits, targets = problem(5, 130)
    options, shifted = head_options(5, 130), logits + shift
    exact = independent.statistics(shifted.double(), targets, **options)
    # The common shift cancels exactly: a log-prob of 5 must not carry the rounding of a logit of 10000.
    for actual, wanted in zip(statistics(passes, shifted, targets, **options)[:2], exact, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=2e-6, atol=2e-6)
    check(independent, lambda *x, **o: gradient(passes, *x, **o), shifted, targets, **upstream(5), **options)
    check(independent, lambda *x, **o: jacobian(passes, *x, **o), shifted, targets, **options)


@pytest.mark.parametrize("compute", [gradient, jacobian])
@pytest.mark.parametrize("dtype", BOTH)
def test_probable_target_at_huge_logits_keeps_exact_probabilities(
    head_options: Any, passes: ModuleType, compute: Any, dtype: torch.dtype
) -> None:
    logits, targets = torch.tensor([[1e4, 1e4 - 1.5, 1e4 - 3.0]]), torch.tensor([0])
    grads = {"grad_logprobs": torch.ones(1), "grad_entropy": torch.zeros(1)} if compute is gradient else {}
    exact = torch.tensor([[1.0, 0.0, 0.0]]).double() - torch.softmax(logits.double(), -1)
    ours = compute(passes, logits, targets, **grads, **head_options(1, 3), dtype=dtype)
    torch.testing.assert_close(ours.double(), exact, rtol=max(2e-6, torch.finfo(dtype).eps / 2), atol=0)


def test_hopeless_target_does_not_round_the_others(head_options: Any, passes: ModuleType) -> None:
    logits, targets = torch.tensor([[0.3, -0.2, -12345.678]]), torch.tensor([2])
    shift, total, _, target_logit = passes.row_statistics(logits, targets, **head_options(1, 3))
    assert (shift.item(), target_logit.item()) == (logits[0, 0].item(), logits[0, 2].item())
    exact = (logits[0, :2].double() - shift).exp().sum()
    torch.testing.assert_close(total.double(), exact[None], rtol=3e-7, atol=0)


@pytest.mark.parametrize("compute", [gradient, jacobian])
@pytest.mark.parametrize("dtype", BOTH)
def test_confident_target_keeps_its_gradient(
    head_options: Any, passes: ModuleType, compute: Any, dtype: torch.dtype
) -> None:
    logits, targets = torch.tensor([[30.0, 0.0, 0.0]]), torch.tensor([0])
    grads = {"grad_logprobs": torch.ones(1), "grad_entropy": torch.zeros(1)} if compute is gradient else {}
    ours = compute(passes, logits, targets, **grads, **head_options(1, 3), dtype=dtype)
    others = torch.tensor([-30.0]).double().exp()
    exact = torch.stack([2 * others, -others, -others], 1) / (1 + 2 * others)
    torch.testing.assert_close(ours.double(), exact, rtol=max(1e-5, torch.finfo(dtype).eps / 2), atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 5, 64, 127, 257])
def test_what_is_left_in_place_equals_what_is_rounded_afterwards(
    head_options: Any, passes: ModuleType, V: int, dtype: torch.dtype
) -> None:
    (logits, targets), options = problem(3, V), head_options(3, V, ALL)
    for run in (
        lambda x, **rounding: gradient(passes, x, targets, **upstream(3), **options, **rounding),
        lambda x, **rounding: passes.softmax_weights_(x, targets, **options, **rounding)[0],
    ):
        tile = logits.clone()
        apart, in_place = run(logits.clone()).to(dtype), run(tile, dtype=dtype)
        assert in_place.data_ptr() == tile.data_ptr()
        assert torch.equal(in_place, apart)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_beside_a_tile_is_neither_read_nor_written(
    head_options: Any, passes: ModuleType, dtype: torch.dtype
) -> None:
    (logits, targets), options = problem(3, 130), head_options(3, 130, ALL)
    for run in (
        lambda x: gradient(passes, x, targets, **upstream(3), **options, dtype=dtype),
        lambda x: passes.softmax_weights_(x, targets, **options, dtype=dtype)[0],
    ):
        padded = passes.empty_tile(5, 144, dtype=torch.float32, device=logits.device).fill_(float("nan"))
        padded[:3, :130] = logits
        torch.testing.assert_close(run(padded[:3, :130]), run(logits.clone()), rtol=1e-6, atol=1e-7)
        assert padded[3:].isnan().all()
        assert padded[:, 130:].isnan().all()


@pytest.mark.parametrize("rows", [1, 5, 130, 150])
@pytest.mark.parametrize("columns", [1, 63, 64, 100])
def test_tiles_lie_as_gemms_like_them(passes: ModuleType, rows: int, columns: int) -> None:
    row, column = passes.empty_tile(rows, columns, dtype=torch.float32, device=DEVICE).stride()
    if passes is kernels:
        assert column == 1
        assert row % 64 == 0
    else:
        assert row == 1
        assert rows < 96 or column % 32 == 16, "an odd number of cache lines, or columns share a set of the cache"


def test_rows_do_not_depend_on_their_neighbours_and_reruns_agree(head_options: Any, passes: ModuleType) -> None:
    (logits, targets), temperature = problem(7, 130), head_options(7, 130, "temperature")["temperature"]
    together = statistics(passes, logits, targets, temperature=temperature)
    again = statistics(passes, logits, targets, temperature=temperature)
    assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))
    if passes is kernels:
        alone = statistics(passes, logits[4:5], targets[4:5], temperature=temperature[4:5])
        assert all(torch.equal(a, b[4:5]) for a, b in zip(alone, together, strict=True))


def test_no_rows_is_no_results(head_options: Any, passes: ModuleType) -> None:
    logits, targets = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    options = head_options(0, 5)
    assert [len(result) for result in statistics(passes, logits, targets, **options)] == [0] * 4
    assert gradient(passes, logits, targets, **upstream(0), **options).shape == (0, 5)
    assert jacobian(passes, logits, targets, **options).shape == (0, 5)


@pytest.mark.parametrize("dtype", BOTH)
def test_a_row_of_banned_tokens_but_its_target_is_certain(
    head_options: Any, passes: ModuleType, dtype: torch.dtype
) -> None:
    logits, targets = torch.full((1, 300), float("-inf")), torch.tensor([2])
    logits[0, 2] = -5.0
    weights, scale, (logprobs, entropy, *_) = passes.softmax_weights_(
        logits, targets, entropy=True, dtype=dtype, **head_options(1, 300)
    )
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)
    assert not weights.any()
    assert scale.item() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", BOTH)
def test_rows_that_are_no_numbers_leave_numbers_for_the_products_of_others(
    head_options: Any, passes: ModuleType, bad: float, dtype: torch.dtype
) -> None:
    logits, targets = problem(4, 300)
    logits[1, 290] = bad
    targets[1] = 0
    with numpy.errstate(invalid="ignore"):
        weights, scale, (logprobs, *_) = passes.softmax_weights_(logits, targets, dtype=dtype, **head_options(4, 300))
    assert torch.equal(weights.isfinite().all(1), torch.ones(4, dtype=torch.bool))
    assert not weights[1].any()
    assert torch.equal(scale.isfinite(), torch.tensor([True, False, True, True]))
    assert not logprobs[1].isfinite()


@pytest.mark.parametrize("dtype", BOTH)
def test_without_a_gradient_a_row_is_zero_whatever_it_holds(
    head_options: Any, passes: ModuleType, dtype: torch.dtype
) -> None:
    logits, targets = problem(3, 130)
    hidden, scale = torch.randn(3, 9).to(dtype), torch.tensor([float("nan"), 2.0, 3.0])
    logits[0], hidden[0] = float("nan"), float("nan")
    g = torch.tensor([0.0, -1.0, 0.5])
    factor, scaled = passes.scale_hidden(hidden, scale, g)
    assert torch.equal(factor, torch.tensor([0.0, -2.0, 1.5]))
    expected = torch.stack([torch.zeros(9), -2 * hidden[1].float(), 1.5 * hidden[2].float()])
    assert torch.equal(scaled, expected.to(dtype))
    assert passes.scale_hidden(None, scale, g)[1] is None
    for grad_entropy in (None, torch.tensor([0.0, 1.0, 0.0])):
        grads = {"grad_logprobs": g, "grad_entropy": grad_entropy}
        ours = gradient(passes, logits.clone(), targets, **grads, **head_options(3, 130), dtype=dtype)
        assert not ours[0].any()
        assert ours[1:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(3, 5), (3000, 3001), (0, 4)])
def test_a_factor_of_one_touches_nothing_and_others_multiply(
    passes: ModuleType, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    """More blocks than programs, too."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    for factor in (1.0, -0.3):
        ours = values.clone()
        version = ours._version
        assert passes.scale_(ours, torch.tensor(factor)) is ours
        assert torch.equal(ours, (values.float() * factor).to(dtype))
        assert ours._version == version or factor != 1.0


# NumPy, under the interpreter, warns of those that are none.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_of_every_number_of_bf16_are_rounded_to_the_nearest_even(passes: ModuleType) -> None:
    """The products are halfway between two of them where the last bit is set; some are beyond the largest."""
    values, factor = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16), torch.tensor(1.0 + 2.0**-8)
    ours, expected = passes.scale_(values.clone(), factor), (values.float() * factor).bfloat16()
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def slices(logits: Tensor, targets: Tensor, *edges: int) -> list[tuple[Tensor, Tensor, slice]]:
    """(logits, local targets, columns) of a vocabulary in parts, a NaN before each row and each bias."""
    parts = []
    for first, last in pairwise(edges):
        guarded = torch.nn.functional.pad(logits[:, first:last], (1, 0), value=float("nan"))
        local = targets - first
        parts.append((guarded[:, 1:], local.masked_fill((local < 0) | (targets >= last), -1), slice(first, last)))
    return parts


def options_of(columns: slice, options: dict[str, Any]) -> dict[str, Any]:
    if "bias" not in options:
        return options
    return options | {"bias": torch.nn.functional.pad(options["bias"][columns], (1, 0), value=float("nan"))[1:]}


@pytest.mark.parametrize("names", ["", ALL])
@pytest.mark.parametrize("edges", [(0, 70, 130), (0, 1, 2, 130)])
def test_slices_merge_into_the_vocabulary(
    independent: Any, head_options: Any, passes: ModuleType, names: str, edges: tuple[int, ...]
) -> None:
    (logits, targets), options = problem(7, 130), head_options(7, 130, names)
    plain, exact = (independent.statistics(x, targets, **options) for x in (logits, logits.double()))
    parts = []
    for part, local, columns in slices(logits, targets, *edges):
        parts.append(RowState(*passes.row_statistics(part, local, entropy=True, **options_of(columns, options))))
        assert torch.equal(parts[-1].target_logit == -torch.inf, local == -1)
    for actual, torchs, wanted in zip(passes.finish_rows(parts, entropy=True)[:2], plain, exact, strict=True):
        independent.assert_as_exact_as_torch(actual, torchs, wanted)


@pytest.mark.parametrize("names", ["", ALL])
@pytest.mark.parametrize("case", ["weights", "without an entropy", "with one"])
def test_gradients_of_slices_are_those_of_the_vocabulary(
    independent: Any, head_options: Any, passes: ModuleType, names: str, case: str
) -> None:
    (logits, targets), options, grads = problem(7, 130), head_options(7, 130, names), upstream(7)
    if case != "with one":
        grads["grad_entropy"] = torch.zeros(7)
    plain, exact = (independent.gradient(x, targets, **grads, **options) for x in (logits, logits.double()))
    row_statistics = statistics(passes, logits, targets, **options)
    ours = []
    for part, local, columns in slices(logits, targets, 0, 70, 130):
        here = options_of(columns, options)
        if case == "weights":
            weights, scale, _ = passes.softmax_weights_(part, local, statistics=row_statistics, **here)
            ours.append(weights * (scale * grads["grad_logprobs"])[:, None])
        else:
            given = grads if case == "with one" else grads | {"grad_entropy": None}
            ours.append(passes.logits_gradient_(part, local, statistics=row_statistics, **given, **here))
    independent.assert_as_exact_as_torch(torch.cat(ours, 1), plain, exact)


def test_softcap_is_exact_from_the_smallest_to_the_largest_logit(passes: ModuleType) -> None:
    sizes = torch.logspace(-6, 4, 120)
    logits = torch.cat([-sizes, torch.linspace(0.55, 0.65, 40), sizes])[:, None]
    # Of one token, the largest logit is its own.
    none, options = torch.full((len(logits),), -1), {"temperature": torch.ones(len(logits)), "softcap": 1.0}
    shift, *_ = passes.row_statistics(logits, none, **options)
    torch.testing.assert_close(shift.double(), torch.tanh(logits[:, 0].double()), rtol=4e-7, atol=0)


@pytest.mark.cpu_only(reason="it looks at signatures")
def test_both_modules_of_passes_take_the_same_arguments() -> None:
    head = ("bias", "temperature", "logit_scale", "softcap")

    def arguments(function: Any) -> set[str]:
        return {x for name in inspect.signature(function).parameters for x in (head if name == "head" else (name,))}

    shared = set(kernels.__all__) - {"is_available"}
    assert shared == set(torch_passes.__all__) == {name for name in vars(RowPasses) if not name.startswith("_")}
    for name in shared - {"logprob_forward", "softmax_weights_forward"}:
        assert arguments(getattr(kernels, name)) == arguments(getattr(torch_passes, name)), name
