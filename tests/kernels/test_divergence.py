"""The divergence's row pass against fp64 autograd: Triton's, interpreted, and that in plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import kernels
from fused_grpo._maths import distributions
from fused_grpo.passes import buffers, torch_passes

pytestmark = pytest.mark.grid

KINDS = ["reverse_kl", "forward_kl", "jsd"]
ALL = "bias softcap scale temperature"
DTYPES = [torch.float16, torch.float32, torch.bfloat16]


@pytest.fixture(params=["triton", "torch"])
def pass_(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    # As many columns in a block as there are in a tile of the interpreter.
    monkeypatch.setattr(buffers, "BLOCK_BYTES", 4 * 7 * 128)
    monkeypatch.setattr(torch_passes.divergence, "_SEARCHED", 8)  # in several rounds
    return (kernels if request.param == "triton" else torch_passes).divergence_gradient_


def problem(R: int, V: int, *, confident: bool = False) -> tuple[Tensor, Tensor]:
    """Logits of both models; in every other row they agree on a token with almost all of the probability."""
    generator = torch.Generator().manual_seed(R + 100 * V)
    student, noise = (3 * torch.randn(R, V, generator=generator) for _ in range(2))
    teacher = student + noise / 3
    if confident:
        student[::2, V // 2], teacher[::2, V // 2] = 30.0, 28.0
    return student, teacher


def targets_of(R: int, V: int) -> dict[str, Tensor]:
    targets = torch.arange(R) * 37 % V
    targets[::4] = V // 2
    return {"targets": targets, "grad_logprobs": torch.cos(torch.arange(R))}


def independent_divergence(
    student: Tensor, teacher: Tensor, heads: dict[str, Any], *, kind: str, beta: float, upstream: Tensor, **rest: Any
) -> tuple[Tensor, Tensor]:
    """(the divergence, the gradient) by autograd."""
    raw, dtype = student.detach().clone().requires_grad_(), student.dtype
    blank = {"bias": None, "logit_scale": 1.0, "softcap": None}
    z, y = (
        distributions.transform_logits(x, **(blank | heads[f"{model}_head"]))
        for x, model in ((raw, "student"), (teacher, "teacher"))
    )
    divergence = distributions.divergence(z, y, kind=kind, beta=beta)
    loss = (divergence * upstream.to(dtype)).sum()
    if rest:
        logprobs = z.log_softmax(-1).gather(1, rest["targets"][:, None])[:, 0]
        loss = loss + (logprobs * rest["grad_logprobs"].to(dtype)).sum()
    loss.backward()
    assert raw.grad is not None
    return divergence.detach(), raw.grad


def given_to(R: int, V: int, kind: str, names: str, head_options: Any, *, target: bool) -> tuple[Any, Any]:
    """(the heads, the other arguments): the student has the options of `names`, the teacher the temperature."""
    head = head_options(R, V, names)
    heads = {"student_head": head, "teacher_head": {"temperature": head["temperature"]}}
    upstream = torch.sin(1 + torch.arange(R))
    return heads, {"kind": kind, "beta": 0.3, "upstream": upstream} | (targets_of(R, V) if target else {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("R", "V"), [(7, 2), (3, 5), (5, 127), (3, 130), (7, 257)])
@pytest.mark.parametrize("names", ["", ALL])
@pytest.mark.parametrize("target", [False, True])
def test_divergence_and_gradient_are_as_exact_as_autograd(
    independent: Any, head_options: Any, pass_: Any, kind: str, R: int, V: int, names: str, target: bool
) -> None:
    heads, given = given_to(R, V, kind, names, head_options, target=target)
    for confident in (False, True):
        logits = problem(R, V, confident=confident)
        ours = pass_(*(x.clone() for x in logits), **heads, **given)
        plain, exact = (
            independent_divergence(*(x.to(d) for x in logits), heads, **given) for d in (torch.float32, torch.float64)
        )
        for actual, torchs, wanted in zip(ours, plain, exact, strict=True):
            independent.assert_as_exact_as_torch(actual, torchs, wanted)
        rounded = pass_(*logits, **heads, **given, dtype=torch.bfloat16)[1]
        # Plain torch adds the gradient of the target's log-prob to what is rounded already.
        if not target or pass_ is kernels.divergence_gradient_:
            assert torch.equal(rounded, ours[1].bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("R", "V"), [(7, 2), (3, 5), (5, 127), (3, 130), (7, 257)])
@pytest.mark.parametrize("names", ["", ALL])
def test_statistics_of_the_sweep_are_as_exact_as_autograd(
    independent: Any, head_options: Any, monkeypatch: pytest.MonkeyPatch, kind: str, R: int, V: int, names: str
) -> None:
    """Targets are the most probable token of the student, of the teacher, and others."""
    monkeypatch.setattr(buffers, "BLOCK_BYTES", 4 * 7 * 128)
    heads, given = given_to(R, V, kind, names, head_options, target=True)
    options, blank = {"kind": kind, "beta": 0.3, **heads}, {"bias": None, "logit_scale": 1.0, "softcap": None}
    for confident in (False, True):
        logits = problem(R, V, confident=confident)
        for targets in (given["targets"], *(x.argmax(1) for x in logits)):
            pair = torch_passes.Divergence(*(x.clone() for x in logits), targets=targets, entropy=True, **options)
            statistics, ways = pair.statistics(), []
            for dtype in (torch.float32, torch.float64):
                z = distributions.transform_logits(logits[0].to(dtype), **blank | heads["student_head"]).log_softmax(-1)
                ways.append((z.gather(1, targets[:, None])[:, 0], -(z.exp() * z).sum(1)))
            for actual, plain, exact in zip(statistics[:2], *ways, strict=True):
                independent.assert_as_exact_as_torch(actual, plain, exact)


def rows_with_largest_logits(where: str) -> tuple[Tensor, Tensor]:
    """Logits of both models over many blocks, whose largest come late, not at all, or often."""
    student, teacher = problem(4, 1300)
    if where == "in every block":
        rise = torch.linspace(-40, 20, 1300)
        return rise + 0.3 * student, 1.1 * rise + 0.3 * teacher
    if where == "from end to end":
        student[:, ::130], teacher[:, 65::130] = 15.0, 14.0
    elif where == "after blocks of neither":
        student[:, :260] = teacher[:, :260] = -torch.inf
    elif where == "of the student last":
        student[:, 1299], teacher[:, 3] = 18.0, 17.0
    return student, teacher


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "where", ["in every block", "from end to end", "after blocks of neither", "of the student last"]
)
def test_largest_logits_are_found_wherever_they_are(
    independent: Any, head_options: Any, pass_: Any, kind: str, where: str
) -> None:
    heads, given = given_to(4, 1300, kind, "", head_options, target=True)
    logits = rows_with_largest_logits(where)
    ours = pass_(*(x.clone() for x in logits), **heads, **given)
    plain, exact = (
        independent_divergence(*(x.to(d) for x in logits), heads, **given) for d in (torch.float32, torch.float64)
    )
    for actual, torchs, wanted in zip(ours, plain, exact, strict=True):
        independent.assert_as_exact_as_torch(actual, torchs, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unlikely", [0, 1])
def test_what_has_no_probability_adds_nothing_though_its_kl_was_infinite(
    head_options: Any, pass_: Any, kind: str, unlikely: int
) -> None:
    """Of the first blocks, one model has e^-200, which is 0, and the other allows none."""
    heads, given = given_to(4, 1300, kind, "", head_options, target=False)
    logits, expected = rows_with_largest_logits("after blocks of neither"), None
    for value in (-torch.inf, -200.0):
        logits[unlikely][:, :260] = value - torch.arange(260) % 7
        ours = pass_(*(x.clone() for x in logits), **heads, **given)
        expected = expected or ours
        assert all(torch.equal(actual, wanted) for actual, wanted in zip(ours, expected, strict=True))


@pytest.mark.parametrize("apart", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_of_almost_equal_models_keeps_its_digits(head_options: Any, pass_: Any, apart: float, beta: float) -> None:
    """The error of a difference of exponentials, 2**-24 / apart, would be that of the square of `apart` otherwise."""
    heads, given = given_to(4, 1300, "jsd", "", head_options, target=False)
    student, noise = problem(4, 1300)
    logits, given = (student, student + apart * noise / 3), given | {"beta": beta}
    ours = pass_(*(x.clone() for x in logits), **heads, **given)
    exact = independent_divergence(*(x.double() for x in logits), heads, **given)
    for actual, wanted, share in zip(ours, exact, (min(beta, 1 - beta), 1.0), strict=True):
        assert (actual - wanted).norm() <= 2e-7 / (apart * share) * wanted.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_confident_target_keeps_both_of_its_gradients(head_options: Any, pass_: Any, kind: str) -> None:
    """Both are of the size of 1 - p, which a difference of probabilities would lose."""
    heads, given = given_to(8, 130, kind, "", head_options, target=True)
    logits = problem(8, 130, confident=True)
    exact = independent_divergence(*(x.double() for x in logits), heads, **given)[1][::4, 65]
    assert exact.abs().max() < 1e-6
    for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        ours = pass_(*(x.clone() for x in logits), **heads, **given, dtype=dtype)[1][::4, 65]
        torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_upstream_gradient_there_is_a_divergence_alone(head_options: Any, pass_: Any, kind: str) -> None:
    heads, given = given_to(5, 130, kind, ALL, head_options, target=False)
    with_one, without = (pass_(*problem(5, 130), **heads, **given | {"upstream": x}) for x in (torch.ones(5), None))
    assert torch.equal(with_one[0], without[0])
    assert without[1] is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_left_in_place_equals_what_is_rounded_afterwards(
    head_options: Any, pass_: Any, kind: str, dtype: torch.dtype
) -> None:
    heads, given = given_to(3, 257, kind, ALL, head_options, target=False)
    (tile, teacher), apart = problem(3, 257), pass_(*problem(3, 257), **heads, **given)[1]
    in_place = pass_(tile, teacher, **heads, **given, dtype=dtype)[1]
    assert in_place.data_ptr() == tile.data_ptr()
    assert torch.equal(in_place, apart.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_padding_beside_the_tiles_is_neither_read_nor_written(head_options: Any, kind: str, name: str) -> None:
    passes = kernels if name == "triton" else torch_passes
    heads, given = given_to(3, 130, kind, ALL, head_options, target=True)
    for dtype in (torch.float32, torch.bfloat16):
        logits, padded = problem(3, 130), []
        for x in logits:
            padded.append(passes.empty_tile(5, 144, dtype=torch.float32, device=x.device).fill_(float("nan")))
            padded[-1][:3, :130] = x
        ours = passes.divergence_gradient_(*(x[:3, :130] for x in padded), **heads, **given, dtype=dtype)
        alone = passes.divergence_gradient_(*logits, **heads, **given, dtype=dtype)
        for actual, other in zip(ours, alone, strict=True):
            torch.testing.assert_close(actual, other, rtol=max(1e-5, torch.finfo(actual.dtype).eps), atol=1e-7)
        assert all(x[3:].isnan().all() and x[:, 130:].isnan().all() for x in padded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [0, 1])
def test_a_row_that_is_no_number_is_seen_and_leaves_the_others(
    head_options: Any, pass_: Any, kind: str, model: int
) -> None:
    heads, given = given_to(4, 130, kind, "", head_options, target=False)
    logits = problem(4, 130)
    expected = pass_(*(x.clone() for x in logits), **heads, **given)
    logits[model][1, 77] = float("nan")
    divergence, gradient = pass_(*logits, **heads, **given)
    others = torch.tensor([True, False, True, True])
    assert divergence[1].isnan()
    assert torch.equal(divergence[others], expected[0][others])
    assert torch.equal(gradient[others], expected[1][others])


def test_no_rows_are_no_results(head_options: Any, pass_: Any) -> None:
    heads, given = given_to(0, 5, "jsd", "", head_options, target=False)
    divergence, gradient = pass_(torch.zeros(0, 5), torch.zeros(0, 5), **heads, **given)
    assert (divergence.shape, gradient.shape) == ((0,), (0, 5))
