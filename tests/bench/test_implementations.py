"""Implementations and their correctness check: correct ones pass, wrong ones fail, and ops on rows get no padding."""

import importlib.metadata
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_grpo.bench.heads import peers, suites
from fused_grpo.bench.heads.correctness import errors_of
from fused_grpo.bench.heads.implementations import COEF, Implementation, dapo, exact, full_logits, over_scored, peer
from fused_grpo.bench.heads.peers import PEERS, named
from fused_grpo.bench.heads.suites import EVERYONE
from fused_grpo.bench.heads.work import HEADS, Work, batch_of, mask_of
from fused_grpo.bench.memory import allocations_of

COMPILED = {"full logits, compiled", "CCE, torch"}
KINDS = ("loss", "divergence", "distillation")
NAMES = sorted({*EVERYONE, *PEERS} - {"products alone"})
WORKS = [
    Work(kind=kind, head=head, tokens=2048, dtype=dtype, gradients=gradients, uneven=True, idle=0.5)
    for kind, head, dtype, gradients in product(
        ("logprobs", "loss"), ("GPT-2", "Gemma-2-2B"), ("float32", "bfloat16"), ("no_grad", "frozen", "trainable")
    )
]
WORKS[:0] = [Work(kind="logprobs", head="GPT-2", tokens=2048, uneven=True, several=3)]
WORKS += [
    Work(kind=kind, head=head, tokens=2048, gradients=gradients, uneven=True)
    for kind, head, gradients in product(
        ("divergence", "distillation"), ("GPT-2", "Gemma-2-2B"), ("no_grad", "frozen", "trainable")
    )
]
WORKS += [Work(kind="loss", head=head, tokens=2048, uneven=True, centred=20) for head in ("GPT-2", "Gemma-2-2B")]
# Each compilation takes seconds: all that differs in what is compiled, once.
FEW = [
    Work(kind="logprobs", head="GPT-2", tokens=2048, uneven=True),
    Work(kind="loss", head="Gemma-2-2B", tokens=2048, dtype="bfloat16", gradients="frozen", uneven=True, idle=0.5),
    Work(kind="logprobs", head="Gemma-2-2B", tokens=2048, gradients="no_grad"),
]
TRAINABLE = Work(kind="logprobs", head="tiny", tokens=96, sequences=4, uneven=True)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Past eight shapes of a function torch.compile gives up."""
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["fused-grpo", "full logits"])
@pytest.mark.parametrize("kind", ["logprobs", "loss"])
def test_kept_tokens_alone_are_in_the_softmax(name, kind):
    work = Work(kind=kind, head="Gemma-2-2B", tokens=2048, kept=20)
    assert not errors_of(named(name), work, "cpu").too_large(work)


def works_of(implementation: Implementation) -> list[Work]:
    works = [w for w in (FEW if implementation.name in COMPILED else WORKS) if implementation.why_not(w, "cpu") is None]
    if not works:
        pytest.skip(implementation.why_not(WORKS[-1], "cpu"))
    return works


# torch.compile reads `.grad` of every tensor, and hides the warning unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.full] * (x in COMPILED)) for x in NAMES])
def test_installed_implementations_pass_the_check(name):
    implementation = named(name)
    assert implementation.name == name
    errors = {work.name: errors_of(implementation, work, "cpu") for work in works_of(implementation)}
    assert not {work.name: errors[work.name] for work in works_of(implementation) if errors[work.name].too_large(work)}


def test_on_a_cpu_only_kernels_for_gpus_are_left_out():
    absent = {name for name in NAMES if all(named(name).why_not(work, "cpu") is not None for work in WORKS)}
    assert absent <= {"CCE", "CCE, exact", "verl", "quack"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COMPILED])
def test_gradients_are_those_of_the_work(name):
    implementation = named(name)
    for work in works_of(implementation):
        result = implementation.run(batch_of(work.small()), work.small())
        assert (result.d_hidden is not None) == (work.gradients != "no_grad")
        assert (result.d_weight is not None) == (work.gradients == "trainable")


def negated(hidden, weight, targets, work):
    logprobs = full_logits(hidden, weight, targets, work)
    return 2 * logprobs.detach() - logprobs


def off_by_one(hidden, weight, targets, work):
    return full_logits(hidden, weight, (targets + 1) % len(weight), work)


def at_another_temperature(hidden, weight, targets, work):
    return full_logits(hidden / 0.9, weight, targets, work)


def half_of_d_weight(hidden, weight, targets, work):
    half = len(hidden) // 2
    first, second = (
        full_logits(h, w, t, work)
        for h, w, t in (
            (hidden[:half], weight, targets[:half]),
            (hidden[half:], weight.detach(), targets[half:]),
        )
    )
    return torch.cat([first, second])


def without_softcap(hidden, weight, targets, work):
    return full_logits(hidden, weight, targets, replace(work, head="tiny"))


def nan_gradients(hidden, weight, targets, work):
    weight = weight * 1
    weight.register_hook(lambda gradient: gradient * torch.nan)
    return full_logits(hidden, weight, targets, work)


def one_nan(hidden, weight, targets, work):
    spoiled = torch.zeros(len(hidden))
    spoiled[3] = torch.nan
    return full_logits(hidden, weight, targets, work) + spoiled


def cut_off(hidden, weight, targets, work):
    return full_logits(hidden, weight, targets, work).detach().requires_grad_()


def unclipped(batch, work):
    logprobs = over_scored(full_logits, batch, work)
    ratio = torch.exp(logprobs - batch.old_logprobs) * batch.mask
    return -(ratio * batch.advantages[:, None]).sum() / batch.mask.sum()


def over_the_padding(batch, work):
    return dapo(over_scored(full_logits, batch, work), batch) * batch.mask.float().mean()


ANYWHERE = (off_by_one, at_another_temperature, one_nan)
WITH_GRADIENT = (negated, cut_off)
TRAINED = (half_of_d_weight, nan_gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["logprobs", "loss"])
@pytest.mark.parametrize("wrong", [*ANYWHERE, *WITH_GRADIENT, *TRAINED], ids=lambda wrong: wrong.__name__)
def test_a_wrong_implementation_is_rejected(wrong, kind, dtype):
    all_gradients = ("trainable",) if wrong in TRAINED else ("frozen", "trainable")
    all_gradients += ("no_grad",) if wrong in ANYWHERE else ()
    implementation = Implementation(name="wrong", version=None, setting="", logprobs=wrong)
    for gradients in all_gradients:
        work = Work(kind=kind, head="GPT-2", tokens=2048, dtype=dtype, gradients=gradients)
        errors = errors_of(implementation, work, "cpu")
        assert errors.too_large(work), (gradients, errors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [unclipped, over_the_padding], ids=lambda wrong: wrong.__name__)
def test_a_wrong_loss_over_right_logprobs_is_rejected(wrong, dtype):
    work = Work(kind="loss", head="GPT-2", tokens=2048, dtype=dtype, uneven=True)
    assert errors_of(Implementation(name="wrong", version=None, setting="", loss=wrong), work, "cpu").too_large(work)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_has_a_softcap_where_the_work_has_one(dtype):
    assert HEADS["Gemma-2-2B"].softcap == Work(kind="loss", head="Gemma-2-2B", tokens=8).small().shape.softcap
    assert Work(kind="loss", head="GPT-2", tokens=8).small().shape.softcap is None
    work = Work(kind="logprobs", head="Gemma-2-2B", tokens=2048, dtype=dtype)
    implementation = Implementation(name="wrong", version=None, setting="", logprobs=without_softcap)
    assert errors_of(implementation, work, "cpu").too_large(work)


def test_a_work_without_any_gradient_is_not_a_division_by_zero():
    work = Work(kind="loss", head="GPT-2", tokens=2048, idle=1.0)
    assert not errors_of(named("full logits"), work, "cpu").too_large(work)
    implementation = Implementation(
        name="wrong", version=None, setting="", loss=lambda batch, work: batch.hidden.sum() * 1e-12
    )
    assert errors_of(implementation, work, "cpu").too_large(work)


def test_a_small_work_has_sequences_with_an_advantage():
    for share in (0.1, 0.5, 0.9):
        busy = batch_of(Work(kind="loss", head="GPT-2", tokens=2048, idle=share).small()).advantages != 0
        assert busy.any()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COMPILED])
def test_ops_on_rows_get_no_padding(name):
    implementation = named(name)
    works_of(implementation)
    if implementation.loss is not None or implementation.logprobs is None:
        pytest.skip("takes the padded batch, and the mask with it")
    batch = batch_of(TRAINABLE)
    right, padding = exact(batch, TRAINABLE), ~batch.mask.bool()
    hidden = batch.hidden.detach().masked_fill(padding[..., None], torch.nan).requires_grad_()
    poisoned = batch._replace(hidden=hidden, targets=batch.targets.masked_fill(padding, 10**9))
    result = implementation.run(poisoned, TRAINABLE)
    assert padding.any()
    torch.testing.assert_close(result.value.double(), right.value, rtol=0, atol=2e-5)
    torch.testing.assert_close(result.d_hidden.double(), right.d_hidden, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(result.d_weight.double(), right.d_weight, rtol=1e-3, atol=1e-6)


class Names(TorchDispatchMode):
    """The names of torch's operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("uneven", [True, False])
@pytest.mark.parametrize("more", [{"kind": "logprobs"}, *({"kind": x} for x in KINDS), {"kind": "loss", "centred": 20}])
def test_rows_are_selected_only_where_there_is_padding(more, uneven):
    """Elsewhere it would be time of implementations that take rows alone."""
    work, mode = Work(head="tiny", tokens=96, sequences=4, uneven=uneven, **more), Names()
    batch, mode.seen = batch_of(work), set()
    with mode:
        results = named("full logits").run(batch, work)
    assert bool(mode.seen & {"index", "masked_scatter", "nonzero"}) is uneven
    for actual, right in zip(results, exact(batch, work), strict=True):
        torch.testing.assert_close(actual, right.to(actual), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("tokens", "uneven"), [(2048, False), (2048, True), (96, True), (100, False)])
def test_lengths_add_up_to_the_tokens_that_are_scored(tokens, uneven):
    mask = mask_of(Work(kind="loss", head="tiny", tokens=tokens, uneven=uneven))
    lengths = mask.sum(1)
    assert lengths.sum() == tokens
    assert lengths.min() >= 1
    assert (lengths.max() > 1.5 * lengths.double().mean()) == uneven
    assert (mask == (torch.arange(mask.shape[1]) < lengths[:, None])).all()


@pytest.mark.parametrize("gradients", ["no_grad", "frozen", "trainable"])
@pytest.mark.parametrize("kind", ["logprobs", "loss"])
def test_the_floor_is_the_products_of_the_work_and_nothing_else(kind, gradients, monkeypatch):
    work, shapes, multiply = replace(TRAINABLE, kind=kind, gradients=gradients), Counter(), torch.mm
    batch, floor = batch_of(work), named("products alone")
    assert floor.why_not(work, "cpu") is None
    floor.run(batch, work)

    def counted(a, b, *, out):
        shapes[tuple(out.shape)] += 1
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    floor.run(batch, work)
    n, d, v = work.tokens, *work.shape[:2]
    expected = {(n, v): 1} | ({(n, d): 1} if gradients != "no_grad" else {})
    assert shapes == (expected | {(v, d): 1} if gradients == "trainable" else expected)
    assert shapes.total() == work.products
    assert allocations_of(lambda: floor.run(batch, work), "cpu").peak == 0


def test_the_floor_follows_when_the_work_changes():
    floor = named("products alone")
    for tokens in (96, 48):
        work = replace(TRAINABLE, tokens=tokens)
        assert floor.forward(batch_of(work), work).shape == (tokens, work.shape.vocab)


def test_names_are_unique_and_the_floor_comes_first():
    everyone = peers.everyone()
    names = [implementation.name for implementation in everyone]
    floors = ["products alone", "fused-grpo, not centred", "fused-grpo, one target"]
    floors += ["fused-grpo, no teacher", "fused-grpo, JSD"]
    assert set(names) == {*NAMES, *floors}
    assert len(set(names)) == len(names)
    assert names[0] == "products alone"
    assert [implementation.name for implementation in everyone if implementation.floor] == floors


def test_one_target_is_the_first_of_several():
    work = WORKS[0].small()
    batch, implementation = batch_of(work), named("fused-grpo, one target")
    results = implementation.run(batch, work)
    alone = batch._replace(targets=batch.targets[..., 0], upstream=batch.upstream[..., 0])
    expected = named("fused-grpo").run(alone, work)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert implementation.why_not(TRAINABLE, "cpu") is not None


def test_without_a_teacher_a_distillation_is_the_loss():
    work = replace(TRAINABLE, kind="distillation")
    batch, results = batch_of(work), []
    for name in ("fused-grpo, no teacher", "fused-grpo"):
        results.append(named(name).run(batch, work))
    loss = named("fused-grpo").run(batch, replace(work, kind="loss"))
    assert all(torch.equal(*pair) for pair in zip(results[0], loss, strict=True))
    assert results[1].value > results[0].value
    assert named("fused-grpo, no teacher").why_not(TRAINABLE, "cpu") is not None


def test_a_distillation_by_jsd_is_the_loss_and_that_divergence():
    work = replace(TRAINABLE, kind="distillation")
    batch = batch_of(work)
    parts = [named("fused-grpo, no teacher").run(batch, work), exact(batch, replace(work, kind="divergence"))]
    results = named("fused-grpo, JSD").run(batch, work)
    for actual, loss, divergence in zip(results, *parts, strict=True):
        torch.testing.assert_close(actual, (loss + COEF * divergence).to(actual.dtype), atol=1e-6, rtol=1e-4)


def test_a_missing_peer_has_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    for name, make in PEERS.items():
        implementation = make()
        why = implementation.why_not(TRAINABLE, "cpu")
        assert implementation.name == name
        assert implementation.version is None
        assert why.startswith("is not installed; fix: pip install ")
    assert PEERS["verl"]().missing.endswith("pip install verl==0.9.1")
    assert PEERS["torch core"]().missing.endswith("pip install 'torch>=2.13'")


def test_a_peer_is_absent_whatever_error_its_import_raises():
    def load():
        raise OSError("libcudart.so.99: cannot open shared object file")

    why = peer("broken", "torch==1.0", "", load).why_not(TRAINABLE, "cpu")
    assert why == "OSError: libcudart.so.99: cannot open shared object file; fix: pip install torch==1.0"


def test_without_a_compiler_compiled_implementations_are_absent(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    for name in COMPILED:
        assert "no C++ compiler, /nowhere/c++; fix:" in named(name).why_not(TRAINABLE, "cpu")


def test_trls_op_is_timed_where_its_trainer_cannot_be_imported(monkeypatch):
    """As where `datasets` is missing, which the op does not need; bitwise equal to the run with the trainer."""
    pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")
    work, width = Work(kind="logprobs", head="tiny", tokens=16, sequences=4), peers._width_of_trl()
    whole = named("TRL").run(batch_of(work), work)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    assert peers._width_of_trl() == width
    for actual, expected in zip(named("TRL").run(batch_of(work), work), whole, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("suite", "every"), [("cpu", suites.CPU), ("gpu", suites.GPU)])
def test_a_dry_run_runs_every_implementation_of_every_kind_of_case(suite: str, every: list[suites.Case]) -> None:
    dry_run = {case.name: case.names for case in suites.cases(suite, tiny=True)}
    assert all(set(case.names) <= set(dry_run[case.tiny().name]) for case in every)
