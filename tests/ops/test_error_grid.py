"""Bar 1: on a grid of shapes, dtypes and options, at most twice the error of plain torch with fp32 logits.

Plain torch is the reference on the same inputs, upcast; for 16-bit inputs its gradients are rounded once, as ours are.
Errors are judged in units of fp32 whatever the dtype, so that a second rounding to bf16 does not pass unseen.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from device_under_test import NAME, assert_rounded, rounds
from exp_of_gpus import SIGNS, make_exp_noisy, moved_by_exp
from numerics import largest, rms
from torch import Tensor

from fused_grpo import linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.head.head import Head

pytestmark = pytest.mark.grid

LEAVES = ("hidden", "weight", "bias")
PLANS = {
    "no gradient": (),
    "frozen head": ("hidden",),
    "trainable": LEAVES,
    "weight alone": ("weight",),
    "bias alone": ("bias",),
}
FEW = ("frozen head", "trainable")
ALL = "bias softcap scale temperature"
OPTIONS = ["", "bias", "softcap", "scale", "negative", "temperature", ALL]
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 and fp32": (torch.bfloat16, torch.float32),
    "fp16 and fp32": (torch.float16, torch.float32),
    "fp32 and bf16": (torch.float32, torch.bfloat16),
}
full = pytest.mark.full
ZERO = torch.zeros(())
SHIFTS = [30.0, 1e3, -1e4]
SHAPES = [(0, 5, 8), (1, 1, 3), (7, 2, 5), (64, 127, 16), (65, 128, 24), (65, 1003, 24), (1000, 127, 8)]
LARGE = [
    ((1, 151936, 16), "fp32"),
    ((64, 151936, 8), "fp32"),
    ((7, 151936, 8), "bf16 and fp32"),
    ((65, 32000, 16), "fp16"),
    ((1000, 1003, 8), "bf16"),
    pytest.param((1000, 32000, 8), "fp32", marks=full),
]
TRITON = [
    ((0, 5, 8), "fp32", None),
    ((1, 1, 3), "fp32", None),
    ((7, 2, 5), "fp16 and fp32", 64),
    ((7, 127, 24), "fp16", None),
    ((33, 20, 16), "fp32", 2000),
    ((7, 2, 5), "bf16", 64),
    ((7, 127, 24), "bf16", None),
    ((5, 40, 16), "bf16 and fp32", 900),
    *(
        pytest.param(*case, marks=pytest.mark.gpu)
        for case in (
            ((65, 1003, 24), "bf16", None),
            ((65, 128, 24), "bf16 and fp32", None),
            ((7, 151936, 16), "bf16", 4 * 2**20),
        )
    ),
    *(
        pytest.param(*case, marks=full)
        for case in (
            ((7, 2, 5), "fp32", 64),
            ((7, 2, 5), "fp16", None),
            ((7, 127, 24), "fp16 and fp32", 3000),
            ((65, 5, 16), "fp16", 2000),
            ((3, 1003, 16), "fp32", 6000),
        )
    ),
]
Inputs = dict[str, Any]


def make_inputs(shape: tuple[int, int, int], dtypes: str = "fp32", names: str = "", *, seed: int = 0) -> Inputs:
    """Leaves, targets and the options named; the first and the last token are among the targets, every fifth is not."""
    (N, V, D), (hidden_dtype, weight_dtype) = shape, DTYPES[dtypes]
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    targets = torch.randint(V, (N,), generator=generator)
    targets[1:3] = torch.tensor([V - 1, 0])[: max(0, N - 1)]
    targets[4::5] = -100
    hidden, weight, bias = 2 * normal(N, D), normal(V, D) / D**0.5, normal(V)
    inputs: Inputs = {"hidden": hidden.to(hidden_dtype), "weight": weight.to(weight_dtype), "targets": targets}
    options = {
        "bias": {"bias": bias.to(weight_dtype)},
        "softcap": {"softcap": 2.5},
        "scale": {"logit_scale": 1.25},
        "negative": {"logit_scale": -0.8},
        "temperature": {"temperature": 0.5 + torch.rand(N, generator=generator)},
    }
    for name in names.split():
        inputs |= options[name]
    return inputs


def solve(inputs: Inputs, asked: Iterable[str] = LEAVES, *, entropy: bool = True, **plan: Any) -> dict[str, Tensor]:
    """Outputs, and the gradients of those asked for, with an upstream gradient that differs from row to row."""
    leaves = {name: x.detach().requires_grad_(name in asked) for name, x in inputs.items() if name in LEAVES}
    if entropy:
        out = linear_logprobs_and_entropy(**{**inputs, **leaves}, **plan)._asdict()
    else:
        out = {"logprobs": linear_logprobs(**{**inputs, **leaves}, **plan)}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    if not wanted:
        return out
    g, g_entropy = upstream(inputs["targets"])
    total = (out["logprobs"] * g).sum()
    if entropy:
        total = total + (out["entropy"] * g_entropy).sum()
    gradients = torch.autograd.grad(total, list(wanted.values()))
    return {name: x.detach() for name, x in out.items()} | dict(zip(wanted, gradients, strict=True))


def upstream(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of log-probs and entropies."""
    steps = torch.arange(targets.numel()).view(targets.shape)
    return torch.sin(1 + steps), torch.cos(3 * steps)


def floors(inputs: Inputs, *, entropy: bool) -> dict[str, Tensor]:
    """What the exp of a GPU may add to the error of each output and gradient: see `exp_of_gpus`."""
    needed = inputs["targets"] >= 0
    g, g_entropy = (x.where(needed, 0.0).double() for x in upstream(inputs["targets"]))
    rest = {"temperature": torch.ones(len(needed)), **upcast(inputs, torch.float64)}
    tensors = {name: rest.pop(name) for name in (*LEAVES, "targets") if name in rest}
    moved = moved_by_exp(tensors, g, g_entropy * entropy, **rest)
    return moved | {name: moved[name].where(needed, 0.0) for name in ("logprobs", "entropy")}


def upcast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same values in another dtype: those of the weight as the dtype of the hidden states holds them."""
    rounded = {**inputs, "weight": inputs["weight"].to(inputs["hidden"].dtype)}
    return {name: x.to(dtype) if name in LEAVES else x for name, x in rounded.items()}


class Judge:
    """Holds solutions of one problem against those of plain fp32 and fp64."""

    def __init__(self, inputs: Inputs, *, exp_of_a_gpu: bool = False) -> None:
        self.inputs, self.exp_of_a_gpu = inputs, exp_of_a_gpu
        self.answers: dict[bool, list[dict[str, Tensor]]] = {}

    def __call__(self, asked: Iterable[str] = LEAVES, *, entropy: bool = True, **plan: Any) -> None:
        if entropy not in self.answers:
            both = (upcast(self.inputs, dtype) for dtype in (torch.float32, torch.float64))
            self.answers[entropy] = [solve(inputs, entropy=entropy, impl="reference") for inputs in both]
        plain, exact = self.answers[entropy]
        floor = floors(self.inputs, entropy=entropy) if self.exp_of_a_gpu else {}
        ours = solve(self.inputs, asked, entropy=entropy, **plan)
        assert ours.keys() == exact.keys() - set(LEAVES) | (exact.keys() & set(asked))
        assert (ours["logprobs"] <= 0).all()
        for name, value in ours.items():
            dtype = self.inputs[name].dtype if name in LEAVES else torch.float32
            assert value.dtype == dtype
            if name in LEAVES and rounds(self.inputs["hidden"].dtype):
                options = {"dtype": self.inputs["hidden"].dtype, "what": f"{name} of {asked}, {plan}"}
                assert_rounded(value, exact[name], **options)
                continue
            both = plain[name].to(dtype), exact[name]
            self.compare(value, *both, floor.get(name, ZERO), what=f"{name} of {asked}, {plan}")

    def compare(self, ours: Tensor, plain: Tensor, exact: Tensor, floor: Tensor = ZERO, *, what: str) -> None:
        """Plain torch may be closer by luck, by two units in the last place of the largest value."""
        for norm in (largest, rms):
            error, plain_error = norm(ours.double() - exact), norm(plain.double() - exact)
            allowed = 2 * (plain_error + torch.finfo(torch.float32).eps * largest(exact)) + norm(floor)
            assert error <= allowed, f"{what}: {norm.__name__} error {error:.3e}, of plain torch {plain_error:.3e}"


def judge_plans(
    inputs: Inputs,
    impl: str,
    *,
    chunks: list[int | None],
    plans: Iterable[str] = PLANS,
    exp_of_a_gpu: bool = NAME == "cuda",
) -> None:
    judge = Judge(inputs, exp_of_a_gpu=exp_of_a_gpu and impl == "triton")
    for chunk_bytes in chunks:
        for plan in plans:
            judge(PLANS[plan], impl=impl, chunk_bytes=chunk_bytes)
        # A frozen head with no gradient through the entropy: the plan of its own.
        judge(("hidden",), entropy=False, impl=impl, chunk_bytes=chunk_bytes)


def pieces(inputs: Inputs) -> list[int | None]:
    """Budgets that cut the logits into tiles of some of the columns, and of some of the rows besides."""
    N, (V, D) = max(1, len(inputs["targets"])), inputs["weight"].shape
    copies = 0 if inputs["hidden"].dtype == inputs["weight"].dtype == torch.float32 else 8 * D * (N + V)
    return [max(64, (4 * N * V + copies) // share) for share in (2, 25)]


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        pytest.param(shape, dtypes, marks=() if dtypes == "fp32" or shape == SHAPES[2] else full)
        for shape in SHAPES
        for dtypes in DTYPES
    ],
)
def test_shapes_and_dtypes_on_the_torch_path(shape, dtypes):
    inputs = make_inputs(shape, dtypes, ALL)
    judge_plans(inputs, "torch", chunks=[None])
    judge_plans(inputs, "torch", chunks=pieces(inputs), plans=FEW)


@pytest.mark.parametrize("dtypes", ["fp32", pytest.param("bf16 and fp32", marks=full)])
@pytest.mark.parametrize("names", OPTIONS)
def test_each_option_alone_on_the_torch_path(names, dtypes):
    inputs = make_inputs((65, 128, 16), dtypes, names)
    judge_plans(inputs, "torch", chunks=[None])
    judge_plans(inputs, "torch", chunks=pieces(inputs)[1:], plans=FEW)


@pytest.mark.parametrize(("shape", "dtypes"), LARGE)
def test_vocabularies_of_real_models_on_the_torch_path(shape, dtypes):
    judge = Judge(make_inputs(shape, dtypes, "bias temperature"))
    for plan in FEW:
        judge(PLANS[plan], entropy=shape[0] < 65, impl="torch", chunk_bytes=4 * 2**20)


@pytest.mark.parametrize(("shape", "dtypes", "chunk_bytes"), TRITON)
def test_shapes_and_dtypes_in_triton(shape, dtypes, chunk_bytes, **options):
    plans = PLANS if shape[1] <= 2 else FEW
    judge_plans(make_inputs(shape, dtypes, ALL), "triton", chunks=[chunk_bytes], plans=plans, **options)


@pytest.mark.parametrize("names", OPTIONS)
def test_each_option_alone_in_triton(names, **options):
    judge_plans(make_inputs((5, 40, 16), "fp32", names), "triton", chunks=[900], plans=FEW, **options)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(("impl", "chunk_bytes"), [("torch", None), ("torch", 300), ("triton", None), ("triton", 300)])
def test_a_shift_of_all_logits_costs_no_precision(shift, impl, chunk_bytes, **options):
    """The logits are multiples of 1/4, exact beside the shift: only a log-sum-exp of that size could round."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-4, 5, (n, 4), generator=generator) / 2 for n in (6, 11))
    inputs = {"hidden": hidden, "weight": weight, "bias": torch.full((11,), shift), "targets": torch.arange(6)}
    judge_plans(inputs, impl, chunks=[chunk_bytes], plans=FEW, **options)


def cases() -> Iterator[Callable[..., None]]:
    """Those above that run in Triton without a GPU."""
    for case in TRITON:
        if "gpu" not in [mark.name for mark in getattr(case, "marks", ())]:
            yield partial(test_shapes_and_dtypes_in_triton, *getattr(case, "values", case))
    yield from (partial(test_each_option_alone_in_triton, names) for names in OPTIONS)
    for shift, chunk_bytes in product(SHIFTS, (None, 300)):
        yield partial(test_a_shift_of_all_logits_costs_no_precision, shift, "triton", chunk_bytes)


@pytest.mark.cpu_only(reason="a GPU has an exp of its own")
@pytest.mark.parametrize("sign", [pytest.param(sign, marks=full if "mixed" in sign else ()) for sign in SIGNS])
def test_the_exp_of_a_gpu_moves_no_case_further_than_it_may(monkeypatch, sign):
    make_exp_noisy(monkeypatch, sign)
    for case in cases():
        case(exp_of_a_gpu=True)


@pytest.mark.parametrize("chunk_bytes", [None, 3000])
@pytest.mark.parametrize("layout", ["transposed", "every other", "one row for all", "slices of longer sequences"])
def test_strides_cost_no_precision(layout, chunk_bytes):
    """Not the same bits: by how its operands lie in memory, and on which CPU, the vendor's GEMM chooses its sums."""
    inputs = make_inputs((14, 33, 8), names=ALL)
    if layout == "one row for all":
        inputs["hidden"] = inputs["hidden"][:1].expand(14, 8)
    else:
        inputs |= {name: strided(inputs[name], layout) for name in (*LEAVES, "targets", "temperature")}
    assert not all(x.is_contiguous() for x in inputs.values() if isinstance(x, Tensor))
    judge_plans(inputs, "torch", chunks=[chunk_bytes])


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values amid others, or in another order."""
    if layout == "transposed":
        return x.t().contiguous().t()
    rows = slice(0, None, 2) if layout == "every other" else slice(0, len(x))
    amid = torch.full([2 * n for n in x.shape], 77).to(x.dtype)
    return amid[(rows, slice(0, None, 2))[: x.ndim]].copy_(x)


@pytest.mark.parametrize(
    ("leading", "impl"), [((2, 6), "torch"), ((3, 1, 4), "torch"), ((12,), "torch"), ((3, 1, 4), "triton")]
)
def test_leading_shapes_change_no_bit(leading, impl):
    inputs = make_inputs((12, 5, 8), names=ALL)
    shaped = {name: inputs[name].view(*leading, *inputs[name].shape[1:]) for name in ("targets", "temperature")}
    # The last position of every sequence is cut off, as by callers who shift the targets.
    longer = torch.cat([inputs["hidden"].view(*leading, 8), torch.full((*leading[:-1], 1, 8), torch.nan)], -2)
    shaped["hidden"] = longer.narrow(-2, 0, leading[-1])
    for plan in PLANS.values():
        expected = solve(inputs, plan, impl=impl)
        for name, value in solve(inputs | shaped, plan, impl=impl).items():
            assert value.shape == (leading if name in ("logprobs", "entropy") else (inputs | shaped)[name].shape)
            assert torch.equal(value.reshape(expected[name].shape), expected[name]), name


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_a_token_alone_needs_no_leading_dimension(impl):
    hidden, weight = torch.randn(8, requires_grad=True), torch.randn(5, 8)
    for targets in (torch.tensor(3), torch.tensor([3, 0]), torch.tensor(-100)):
        alone = linear_logprobs_and_entropy(hidden, weight, targets, temperature=torch.tensor(0.5), impl=impl)
        row = linear_logprobs_and_entropy(hidden[None], weight, targets[None], temperature=0.5, impl=impl)
        assert all(torch.equal(one[None], other) for one, other in zip(alone, row, strict=True))
        gradients = [torch.autograd.grad(sum(x.sum() for x in one), hidden)[0] for one in (alone, row)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_number_as_temperature_is_that_number_for_each_token(impl, plan):
    inputs = make_inputs((12, 5, 8))
    number = solve({**inputs, "temperature": 0.7}, PLANS[plan], impl=impl)
    for name, value in solve({**inputs, "temperature": torch.full((12,), 0.7)}, PLANS[plan], impl=impl).items():
        assert torch.equal(value, number[name]), name


# NumPy, under the interpreter, warns of the NaN that this test puts there.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_nan_in_ignored_rows_stays_there(assert_as_exact, impl, plan, entropy, ignore_index):
    inputs = {**make_inputs((12, 5, 8), names=ALL), "ignore_index": ignore_index}
    inputs["targets"] = torch.where(inputs["targets"] == 3, 1, inputs["targets"])
    ignored = inputs["targets"] == -100
    inputs["targets"][ignored] = ignore_index
    rest = {name: inputs[name][~ignored] for name in ("hidden", "targets", "temperature")}
    inputs["hidden"][ignored] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0]).repeat(2)
    ours = solve(inputs, PLANS[plan], entropy=entropy, impl=impl)
    for name in ours.keys() & {"logprobs", "entropy", "hidden"}:
        assert (ours[name][ignored] == 0).all(), name
    assert all(value.isfinite().all() for value in ours.values())
    plain, exact = (upcast(inputs | rest, dtype) for dtype in (torch.float32, torch.float64))
    plain, exact = (solve(x, (), entropy=entropy, impl="reference") for x in (plain, exact))
    for name, value in exact.items():
        assert_as_exact(ours[name][~ignored], plain[name], value, what=name)


@pytest.mark.parametrize("chunk_bytes", [None, 3000])
def test_tied_embeddings_get_both_gradients(chunk_bytes):
    inputs = make_inputs((17, 33, 8))
    tokens = inputs["targets"].roll(1).clamp_min(0)

    def gradient(dtype: torch.dtype, **options: Any) -> Tensor:
        weight = inputs["weight"].to(dtype).detach().requires_grad_()
        hidden = torch.nn.functional.embedding(tokens, weight).tanh()
        total = linear_logprobs(hidden, weight, inputs["targets"], **options).sum()
        return torch.autograd.grad(total, weight)[0]

    plain, exact = (gradient(dtype, impl="reference") for dtype in (torch.float32, torch.float64))
    Judge(inputs).compare(gradient(torch.float32, chunk_bytes=chunk_bytes), plain, exact, what="tied weight")


def test_small_budgets_make_ragged_tiles_of_rows_and_columns(monkeypatch):
    seen: list[torch.Size] = []

    def tiles(head, shape, **options):
        for tile in original(head, shape, **options):
            seen.append(tile.logits.shape)
            yield tile

    original = Head.tiles
    monkeypatch.setattr(Head, "tiles", tiles)
    ragged = set()
    for shape in SHAPES[3:]:
        inputs = make_inputs(shape)
        solve(inputs, impl="torch", chunk_bytes=pieces(inputs)[1])
        rows, columns = ({size[axis] for size in seen} for axis in (0, 1))
        assert len(seen) > 4
        assert max(rows) < shape[0]
        ragged |= {"rows"} if len(rows) > 1 else set()
        ragged |= {"columns"} if len(columns) > 1 else set()
        seen.clear()
    assert ragged == {"rows", "columns"}
