"""What other people's training loops give the ops, and the modes that they call them in."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from fused_grpo import (
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    grpo_loss,
    linear_logprobs,
    linear_logprobs_and_entropy,
)
from fused_grpo._maths import formulas
from fused_grpo.errors import InputError

B, T, V, D = 3, 5, 37, 16
NAMES = ("hidden", "weight", "bias", "targets", "temperature")


def made() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((B, T, D), (V, D), (V,)))
    targets, temperature = torch.randint(0, V, (B, T), generator=generator), torch.full((B, T), 0.7)
    return dict(zip(NAMES, (hidden, weight, bias, targets, temperature), strict=True))


def one_op(inputs: dict[str, Tensor], **options: object) -> Tensor:
    return fused_linear_grpo_loss(**inputs, **options, **ADVANTAGES).loss


def two_ops(inputs: dict[str, Tensor], **options: object) -> Tensor:
    logprobs, entropy = linear_logprobs_and_entropy(**inputs, **options)
    return grpo_loss(logprobs, entropy=entropy, **ADVANTAGES).loss


def one_reference(inputs: dict[str, Tensor]) -> Tensor:
    ref = torch.full((B, T), -3.0)
    return fused_linear_grpo_loss(**inputs, **ADVANTAGES | {"config": KL}, ref_logprobs=ref).loss


KL = GRPOLossConfig(beta=0.1)
ADVANTAGES = {"advantages": torch.tensor([1.0, -1.0, 0.5]), "config": GRPOLossConfig(entropy_coef=0.1)}
SUPPORT = torch.arange(V).repeat(B * T), torch.arange(0, B * T * V + 1, V)
LOOPS = {
    "one op": one_op,
    "two ops": two_ops,
    "two ops, kept tokens": lambda inputs: two_ops(inputs, support=SUPPORT),
}


def gradients(loop: Callable[[dict[str, Tensor]], Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and the gradients of what requires one."""
    leaves = {name: x for name, x in inputs.items() if x.requires_grad}
    loss = loop(inputs)
    return {"loss": loss.detach()} | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("names", [*((name,) for name in NAMES), ("hidden", "targets"), ("weight", "bias")], ids=str)
def test_a_backward_pass_takes_what_was_made_in_inference_mode(loop, names):
    """A loop samples there, and may load its frozen head there; plain PyTorch saves no such tensor."""
    with torch.inference_mode():
        frozen = {name: x.clone() for name, x in made().items() if name in names}
    trained = [name for name in NAMES[:3] if name not in names]

    def inputs() -> dict[str, Tensor]:
        return {name: x.requires_grad_(name in trained) for name, x in made().items()}

    torch.testing.assert_close(gradients(loop, inputs() | frozen), gradients(loop, inputs()), rtol=0, atol=0)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_weight_that_changed_before_the_backward_pass_is_still_found(loop):
    """By autograd where the op needs it again; the fused loss has its gradients already."""
    inputs = {name: x.requires_grad_(name in NAMES[:3]) for name, x in made().items()}
    wanted, loss = gradients(loop, inputs), loop(inputs)
    with torch.no_grad():
        inputs["weight"].add_(1.0)
    with nullcontext() if loop is one_op else pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.testing.assert_close(torch.autograd.grad(loss, inputs["hidden"])[0], wanted["hidden"])


@pytest.mark.parametrize("trained", [("hidden", "weight", "bias"), ("hidden",)], ids=str)
@pytest.mark.parametrize("result", [0, 1, None])
@pytest.mark.parametrize("options", [{}, {"support": SUPPORT}], ids=["vocabulary", "kept tokens"])
def test_results_may_be_edited_in_place_as_those_of_plain_torch(options, result, trained):
    inputs = {name: x.requires_grad_(name in trained) for name, x in made().items()}
    masked = torch.arange(B * T).view(B, T) % 2 == 0

    def of(inputs: dict[str, Tensor]) -> Tensor:
        both = linear_logprobs_and_entropy if result is not None else lambda **given: [linear_logprobs(**given)]
        return both(**inputs, **options)[result or 0]

    def edited(inputs: dict[str, Tensor]) -> Tensor:
        return of(inputs).masked_fill_(masked, 0.0).sum()

    def apart(inputs: dict[str, Tensor]) -> Tensor:
        return of(inputs).masked_fill(masked, 0.0).sum()

    torch.testing.assert_close(gradients(edited, inputs), gradients(apart, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_after_the_backward_pass_a_kept_result_holds_no_hidden_states(loop):
    """A list of losses that were not detached holds nodes of the graph, and not what they saved."""
    inputs = {name: x.requires_grad_(name in NAMES[:3]) for name, x in made().items()}
    hidden = inputs["hidden"] * 2
    alive = weakref.ref(hidden)
    loss = loop(inputs | {"hidden": hidden})
    del hidden
    loss.backward()
    assert alive() is None


@pytest.mark.parametrize(("loss_type", "advantage"), [("dapo", 1.0), ("dapo", 0.0), ("dppo_tv", 0.0)])
@pytest.mark.parametrize("old", [-200.0, -torch.inf])
def test_anomaly_mode_finds_no_nan_where_there_is_none(loss_type, advantage, old):
    """Of a ratio above fp32's range, of a token that is clipped or has no advantage."""
    old_logprobs, logprobs = torch.full((2, 5), -2.0), torch.full((2, 5), -2.0, requires_grad=True)
    old_logprobs[1, 0] = old
    advantages = {"advantages": torch.tensor([-1.0, advantage]), "config": GRPOLossConfig(loss_type=loss_type)}
    with torch.autograd.set_detect_anomaly(True):
        grpo_loss(logprobs, old_logprobs=old_logprobs, **advantages).loss.backward()
    assert logprobs.grad.isfinite().all()


def test_anomaly_mode_stays_on_after_losses_in_two_threads(monkeypatch):
    """The first one that is in is out first."""
    inside, leave, token_loss = [], [threading.Event() for _ in range(2)], formulas.token_loss

    def waiting(*args: object, **options: object) -> object:
        inside.append(leave[len(inside)])
        inside[-1].wait(10)
        return token_loss(*args, **options)

    monkeypatch.setattr(formulas, "token_loss", waiting)
    with torch.autograd.set_detect_anomaly(True), ThreadPoolExecutor(2) as threads:
        losses = []
        for count in (1, 2):
            losses.append(threads.submit(grpo_loss, torch.zeros(2, 5), advantages=torch.ones(2), impl="torch"))
            while len(inside) < count:
                time.sleep(0.001)
        for event, loss in zip(leave, losses, strict=True):
            event.set()
            loss.result(10)
        assert torch.is_anomaly_enabled()


@pytest.mark.parametrize("hooks", [nullcontext(), saved_tensors_hooks(torch.clone, lambda x: x)], ids=["", "hooks"])
@pytest.mark.parametrize("loop", [*LOOPS.values(), one_reference], ids=[*LOOPS, "reference"])
def test_calls_leave_no_object_behind(loop, hooks):
    """Such as tensors in a cycle through a node of autograd, which no garbage collector sees."""
    inputs = {name: x.requires_grad_(name in NAMES[:3]) for name, x in made().items()}
    with hooks:
        loop(inputs).backward()
    gc.freeze()
    for _ in range(10):
        with hooks:
            loop(inputs).backward()
    gc.collect()
    objects = gc.get_objects()
    gc.unfreeze()
    assert len(objects) < 10


@pytest.mark.parametrize("chunk_bytes", [None, 4 * V * 2])
def test_a_flop_counter_sees_every_gemm_of_a_loss(chunk_bytes):
    inputs = {name: x.requires_grad_(name in NAMES[:3]) for name, x in made().items()}
    with FlopCounterMode(display=False) as counter:
        fused_linear_grpo_loss(**inputs, advantages=torch.ones(B), chunk_bytes=chunk_bytes).loss.backward()
    assert counter.get_total_flops() == 3 * 2 * B * T * D * V


def test_a_region_that_forbids_hooks_of_saved_tensors_is_no_obstacle():
    inputs = {name: x.requires_grad_(name in NAMES[:3]) for name, x in made().items()}
    wanted = gradients(one_op, inputs)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        actual = gradients(one_op, inputs)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


FLOATS, COUNTS = (np.float32, np.float64, np.float16), (np.int64, np.int32, np.uint8, np.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("real", FLOATS)
@pytest.mark.parametrize("count", COUNTS)
def test_numbers_of_numpy_are_numbers(real, count):
    """Counts of a collator, and what a sweep over np.linspace gives."""
    config = GRPOLossConfig(loss_type="grpo", top_entropy_quantile=0.5, entropy_coef=0.1)
    inputs, advantages = made(), ADVANTAGES["advantages"]

    def results(real: Callable, count: Callable) -> list[Tensor]:
        head = {"temperature": real(0.5), "logit_scale": real(1.5), "softcap": real(3.0)}
        counts = {"num_tokens": count(7), "num_sequences": count(3), "num_entropy_tokens": count(5)}
        given = inputs | head | {"advantages": advantages, "config": config}
        hidden, weight = inputs["hidden"], inputs["weight"]
        jsd = {"kind": "jsd", "beta": real(0.5), "temperature": real(0.5), "num_tokens": count(7)}
        return [
            fused_linear_grpo_loss(**given, **counts, entropy_threshold=real(1.0)).loss,
            linear_logprobs_and_entropy(**inputs | head).logprobs,
            fused_linear_divergence(hidden, weight, hidden, 2 * weight, **jsd).loss,
        ]

    torch.testing.assert_close(results(real, count), results(float, int), rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.float32("nan"), np.float64("inf"), np.int64(0), np.bool_(True), np.array(1.0)])
def test_numbers_of_numpy_that_are_no_count_are_refused(value):
    with pytest.raises(InputError, match=r"got num_tokens=.*, want a finite number > 0"):
        fused_linear_grpo_loss(**made(), advantages=ADVANTAGES["advantages"], num_tokens=value)
