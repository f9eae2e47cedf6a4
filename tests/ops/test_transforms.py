"""Each op under each transform of derivatives: right, or an error that says what to use instead; never 0 in silence."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

import fused_grpo
from fused_grpo import divergence
from fused_grpo.errors import UnsupportedError
from fused_grpo.head import kept_tokens, registered_ops, sharded
from fused_grpo.integrations import speculative

pytestmark = pytest.mark.cpu_only(reason="it is about what PyTorch differentiates, not about numbers")

B, T, D, V = 2, 3, 4, 9
IMPLS = ["triton", "torch", "reference"]
generator = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT, TEACHER, TEACHER_WEIGHT = (
    torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((B, T, D), (V, D)) * 2
)
TARGETS = torch.randint(0, V, (B, T), generator=generator)
# As many numbers as there are targets, so that no gradient cancels.
UPSTREAM = 1 + torch.arange(B * T, dtype=torch.float64).view(B, T)
CHOSEN = torch.arange(B * T * V) % V, V * torch.arange(B * T + 1)


def logprobs(hidden: Tensor, weight: Tensor, impl: str, **options: Any) -> Tensor:
    return (fused_grpo.linear_logprobs(hidden, weight, TARGETS, impl=impl, **options) * UPSTREAM.to(hidden)).sum()


def logprobs_of_several(hidden: Tensor, weight: Tensor, impl: str) -> Tensor:
    targets = torch.stack([TARGETS, (TARGETS + 1) % V], -1)
    return (fused_grpo.linear_logprobs(hidden, weight, targets, impl=impl) * UPSTREAM.to(hidden)[..., None]).sum()


def entropy(hidden: Tensor, weight: Tensor, impl: str) -> Tensor:
    out = fused_grpo.linear_logprobs_and_entropy(hidden, weight, TARGETS, impl=impl)
    return ((out.logprobs + out.entropy) * UPSTREAM.to(hidden)).sum()


def of_loss(hidden: Tensor) -> dict[str, Tensor]:
    """A token is clipped, so that its gradient is 0."""
    old = torch.tensor([[-2.0, -9.0, -1.0], [-3.0, -4.0, -2.5]])
    return {"advantages": torch.tensor([1.0, -0.5]).to(hidden), "old_logprobs": old.to(hidden)}


def fused(
    hidden: Tensor, weight: Tensor, impl: str, op: Any = fused_grpo.fused_linear_grpo_loss, **rest: Any
) -> Tensor:
    return op(hidden, weight, TARGETS, **of_loss(hidden), **rest, **({"impl": impl} if impl else {})).loss


def module(hidden: Tensor, weight: Tensor, impl: str) -> Tensor:
    return fused(hidden, weight, "", op=fused_grpo.FusedLinearGRPOLoss(impl=impl))


def distilled(hidden: Tensor, weight: Tensor, impl: str) -> Tensor:
    teacher = fused_grpo.Distillation(TEACHER.to(hidden), TEACHER_WEIGHT.to(hidden), coef=0.5)
    return fused(hidden, weight, impl, distillation=teacher)


def plain_loss(hidden: Tensor, weight: Tensor, impl: str) -> Tensor:
    every = (hidden @ weight.t()).log_softmax(-1).gather(-1, TARGETS[..., None])[..., 0]
    return fused_grpo.grpo_loss(every, **of_loss(hidden), impl=impl).loss


def divergence_of(hidden: Tensor, weight: Tensor, impl: str, kind: str) -> Tensor:
    teacher = TEACHER.to(hidden), TEACHER_WEIGHT.to(hidden)
    return fused_grpo.fused_linear_divergence(hidden, weight, *teacher, kind=kind, impl=impl).loss


SEQUENCE = fused_grpo.GRPOLossConfig(importance_sampling_level="sequence")
OPS: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "linear_logprobs": logprobs,
    "linear_logprobs of several": logprobs_of_several,
    "linear_logprobs of a support": partial(logprobs, support=CHOSEN),
    "linear_logprobs_and_entropy": entropy,
    "grpo_loss": plain_loss,
    "fused_linear_grpo_loss": fused,
    "fused_linear_grpo_loss of sequences": partial(fused, config=SEQUENCE),
    "fused_linear_grpo_loss of a support": partial(fused, support=CHOSEN),
    "FusedLinearGRPOLoss": module,
    "Distillation": distilled,
    **{f"fused_linear_divergence {kind}": partial(divergence_of, kind=kind) for kind in ("reverse_kl", "jsd")},
}


def tangent_of(x: Tensor) -> Tensor:
    return torch.linspace(-1, 2, x.numel()).view(x.shape).to(x)


def traced(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # of values that are read
        return torch.jit.trace(f, (x,))(x)


def product(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    """The tangent, by a backward pass."""
    return (backward_of(f, x) * tangent_of(x)).sum()


def dual(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent_of(x)))).tangent


def backward_of(f: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x, **options)[0]


def batched(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    return backward_of(f, x, grad_outputs=torch.tensor([1.0, 2.0]).to(x), is_grads_batched=True)


def twice(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(f, x)


# Each beside how plain autograd gives the same with impl="reference"; None where no impl can.
TRANSFORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor] | None]] = {
    "forward_ad": (dual, product),
    "jvp": (lambda f, x: func.jvp(f, (x,), (tangent_of(x),))[1], product),
    "grad": (lambda f, x: func.grad(f)(x), backward_of),
    "vjp": (lambda f, x: func.vjp(f, x)[1](x.new_tensor(3.0))[0], lambda f, x: 3 * backward_of(f, x)),
    "jacfwd": (lambda f, x: func.jacfwd(f)(x), backward_of),
    "jacrev": (lambda f, x: func.jacrev(f)(x), backward_of),
    "hessian": (lambda f, x: func.hessian(f)(x), twice),
    "create_graph": (twice, twice),
    "is_grads_batched": (batched, lambda f, x: torch.stack([backward_of(f, x), 2 * backward_of(f, x)])),
    "vmap": (lambda f, x: func.vmap(f)(torch.stack([x, x])), None),
    "vmap of grad": (lambda f, x: func.vmap(func.grad(f))(torch.stack([x, x])), None),
    "linearize": (lambda f, x: func.linearize(f, x)[1](tangent_of(x)), None),
    "torch.jit.trace": (traced, None),
    "functionalize": (lambda f, x: func.functionalize(f)(x), None),
}


def test_every_public_op_is_walked():
    public = {name: getattr(fused_grpo, name) for name in fused_grpo.__all__}
    ops = {name for name, x in public.items() if inspect.isfunction(x) or hasattr(x, "forward")}
    assert ops | {"Distillation"} == {name.split()[0] for name in OPS}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", OPS)
def test_a_derivative_is_right_or_refused(op, transform):
    transformed, plainly = TRANSFORMS[transform]
    for x, other in ((HIDDEN, WEIGHT), (WEIGHT, HIDDEN))[: 2 if transform in ("jvp", "grad") else 1]:
        swap = 1 if x is HIDDEN else -1
        for impl in IMPLS:
            dtype = torch.float32 if impl == "triton" else torch.float64
            call = lambda x, impl=impl, other=other, swap=swap: OPS[op](*(x, other.to(x))[::swap], impl)  # noqa: E731
            if impl == "reference" and plainly is not None:
                torch.testing.assert_close(transformed(call, x), plainly(call, x))
            else:
                with pytest.raises(UnsupportedError, match=r"^got .*, want .*; fix: "):
                    transformed(call, x.to(dtype))


@pytest.mark.parametrize("op", ["linear_logprobs", "fused_linear_grpo_loss"])
@pytest.mark.parametrize("outside", [False, True], ids=["compiled around", "compiled inside"])
def test_a_compiled_tangent_is_right_or_refused(op, outside):
    for impl in ("torch", "reference"):
        call = lambda x, impl=impl: OPS[op](x, WEIGHT, impl)  # noqa: E731
        inner = torch.compile(call, backend="eager") if outside else call
        tangent = lambda x, inner=inner: func.jvp(inner, (x,), (tangent_of(x),))[1]  # noqa: E731
        tangent = tangent if outside else torch.compile(tangent, backend="eager")
        if impl == "reference":
            torch.testing.assert_close(tangent(HIDDEN), product(call, HIDDEN))
        else:
            with pytest.raises(UnsupportedError, match=r"inside torch\.func"):
                tangent(HIDDEN)


@pytest.mark.parametrize("op", OPS)
def test_what_hooks_give_back_is_what_is_differentiated(op):
    """They may have moved it elsewhere, and the memory of the forward pass may hold something else by then."""
    given = [x.clone().requires_grad_() for x in (HIDDEN, WEIGHT)]
    expected = torch.autograd.grad(OPS[op](*given, "torch"), given)
    moved = [x * 1 for x in given]
    with saved_tensors_hooks(torch.clone, lambda x: x):
        value = OPS[op](*moved, "torch")
    for x in moved:
        x.data.zero_()
    torch.testing.assert_close(torch.autograd.grad(value, given), expected)


def test_no_function_of_ours_has_a_backward_without_the_check():
    modules = (divergence, registered_ops, kept_tokens, sharded, speculative)
    functions = [x for x in torch.autograd.Function.__subclasses__() if x.__module__.startswith("fused_grpo")]
    assert {x.__module__ for x in functions} >= {x.__name__ for x in modules[1:]}
    for function in functions:
        if function.__name__ != "_Share":  # verl's: plain operations, differentiable any number of times
            assert hasattr(function.backward, "__wrapped__"), function


def test_constants_beside_a_transform_need_no_gradient_of_it():
    """The gradient of something else, whose constants come from an op outside of it."""
    constant = fused_grpo.linear_logprobs(HIDDEN, WEIGHT, TARGETS)
    torch.testing.assert_close(func.grad(lambda x: (x[..., 0] * constant).sum())(HIDDEN)[..., 0], constant)
