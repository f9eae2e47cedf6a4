"""Supports, several targets, outputs, divergences, teachers, score centering and drop-ins, as `test_ops.py` does it."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bent_arguments import Arguments, assert_same, bend, is_tame, results
from torch import Tensor

from fused_grpo import Distillation, GRPOLossConfig, fused_linear_divergence, fused_linear_grpo_loss
from fused_grpo import linear_logprobs as logprobs
from fused_grpo.integrations.liger import LigerFusedLinearGRPOLoss
from fused_grpo.integrations.verl import linear_cross_entropy

V = 5
KINDS = ("reverse_kl", "forward_kl", "jsd")
LEAVES = ("hidden", "weight", "bias", "student_hidden", "student_weight", "student_bias")
PER_TOKEN = ("hidden", "student_hidden", "teacher_hidden", "sampling_logprobs", "sampling_topk_logprobs", "temperature")
CONFIGS = {
    "topk": GRPOLossConfig(score_centering="topk"),
    "kept": GRPOLossConfig(score_centering="kept", sampling_correction=None),
    "kept of a support": GRPOLossConfig(score_centering="kept"),
    "covariance": GRPOLossConfig(clip_cov_ratio=0.1),
}
OF_LOGPROBS = ("support", "several targets", "outputs")
OF_LOSS = ("loss of a support", "teacher", *CONFIGS)
GROUPS = (*OF_LOGPROBS, *OF_LOSS, "divergence")


class Draw:
    """Random tensors of one seed; gradients are wanted of some of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.generator = rng, torch.Generator().manual_seed(rng.getrandbits(32))

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator)

    def leaf(self, *size: int) -> Tensor:
        return self.normal(*size).requires_grad_(self.rng.random() < 0.4)

    def ids(self, *size: int) -> Tensor:
        return torch.randint(0, V, size, generator=self.generator)

    def kept(self, targets: Tensor) -> Arguments:
        """A support with the targets in it; some rows are not restricted."""
        rows = [{int(t), *self.rng.sample(range(V), self.rng.randint(1, V))} for t in targets]
        rows = [row if self.rng.random() < 0.8 else set() for row in rows]
        ids = [token for row in rows for token in self.rng.sample(sorted(row), len(row))]
        sizes = torch.tensor([0, *map(len, rows)])
        return {"token_ids": torch.tensor(ids, dtype=torch.int64), "offsets": sizes.cumsum(0)}


def good(rng: random.Random, group: str) -> Arguments:
    """Arguments that are right. Of a support and a teacher each part is one, so that it can be bent."""
    draw, lengths = Draw(rng), [rng.randint(0, 3) for _ in range(rng.randint(1, 3))]
    N, D = sum(lengths), rng.randint(1, 4)
    head = {"hidden": draw.leaf(N, D), "weight": draw.leaf(V, D), "bias": rng.choice([None, draw.normal(V)])}
    teacher = {"teacher_hidden": draw.normal(N, D + 1), "teacher_weight": draw.normal(V, D + 1), "beta": 0.3}
    teacher |= {"kind": rng.choice(KINDS), "teacher_bias": rng.choice([None, draw.normal(V)])}
    teacher |= {"teacher_logit_scale": 1.0, "teacher_softcap": rng.choice([None, 4.0])}
    plan = {"impl": rng.choice(["auto", "torch", "reference"]), "chunk_bytes": None}
    plan |= {"temperature": rng.choice([1.0, 0.7, draw.normal(N).abs() + 0.1])}
    mask = rng.choice([None, draw.normal(N) > -0.5])
    if group == "divergence":
        student = {f"student_{name}": value for name, value in head.items()}
        return {**student, **teacher, **plan, "mask": mask, "num_tokens": rng.choice([None, 3])}
    targets = draw.ids(N, rng.randint(1, 4)) if group == "several targets" else draw.ids(N)
    arguments = {**head, **plan, "targets": targets}
    if group in ("support", "loss of a support", "kept of a support"):
        arguments |= draw.kept(targets)
    if group in ("support", "outputs"):
        arguments |= {"outputs": rng.choice([None, ("sum_squared_probs",), ("is_top1", "mean_logit")])}
    if group in OF_LOGPROBS:
        return arguments
    arguments |= {"advantages": draw.normal(len(lengths)), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int()}
    arguments |= {"mask": mask, "sampling_logprobs": -draw.normal(N).abs(), "config": CONFIGS.get(group)}
    if group == "teacher":
        arguments |= {**teacher, "coef": 0.3}
    if group in ("topk", "kept"):
        ids = torch.rand(N, V, generator=draw.generator).argsort(1)[:, : rng.randint(1, 4)]
        arguments |= {"sampling_topk_ids": ids, "sampling_topk_logprobs": draw.normal(*ids.shape).log_softmax(-1)}
    if group == "kept of a support":
        arguments["sampling_topk_logprobs"] = -3 - draw.normal(len(arguments["token_ids"])).abs()
    if group == "covariance":
        arguments["covariance_selected"] = rng.choice([None, draw.normal(N) > 0])
    return arguments


def solve(group: str, arguments: Arguments) -> list[Tensor]:
    """Results and gradients, of a support and a teacher made of their parts."""
    given = dict(arguments)
    if "token_ids" in given:
        given["support"] = given.pop("token_ids"), given.pop("offsets")
    if group == "teacher":
        names = ("bias", "logit_scale", "softcap")
        options = {name: given.pop(f"teacher_{name}") for name in names}
        options |= {name: given.pop(name) for name in ("coef", "kind", "beta")}
        given["distillation"] = Distillation(given.pop("teacher_hidden"), given.pop("teacher_weight"), **options)
    op: Any = logprobs if group in OF_LOGPROBS else fused_linear_grpo_loss if group in OF_LOSS else None
    return results((op or fused_linear_divergence)(**given), arguments, LEAVES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_bent_arguments_give_the_reference_or_an_error_of_ours(hostile, group):
    def call(rng: random.Random) -> None:
        given = good(rng, group)
        given = bend(rng, given, [name for name in given if name != "config"])
        ours = solve(group, given)
        if all(map(is_tame, given.values())):
            assert_same(ours, solve(group, {**given, "impl": "reference"}))

    assert min(hostile(call, 600)) > 0.03


def poisoned(rng: random.Random, arguments: Arguments, left_out: Tensor) -> Arguments:
    """The same with values that are none, and ids out of range, in the rows that are left out."""
    changed = dict(arguments)
    for name, x in arguments.items():
        is_of_entries = name == "sampling_topk_logprobs" and "token_ids" in arguments
        if name in PER_TOKEN and isinstance(x, Tensor) and not is_of_entries:
            changed[name] = x.detach().clone()
            changed[name][left_out] = rng.choice([float("nan"), float("inf"), -1e30])
            changed[name].requires_grad_(x.requires_grad)
        if name == "sampling_topk_ids":
            changed[name] = x.masked_fill(left_out[:, None], rng.choice([-7, 10**6]))
    return changed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", [group for group in GROUPS if group != "several targets"])
def test_rows_that_are_left_out_may_hold_anything(hostile, group):
    def call(rng: random.Random) -> None:
        given = good(rng, group)
        tokens = given["student_hidden" if group == "divergence" else "hidden"]
        mask = torch.tensor([rng.random() < 0.5 for _ in tokens], dtype=torch.bool)
        if group in OF_LOGPROBS:
            given["targets"] = given["targets"].masked_fill(~mask, -100)
        else:
            given["mask"] = mask
        if group in ("kept of a support", "kept", "topk", "covariance"):
            given["impl"] = "torch"  # autograd multiplies such values by 0
        ours, clean = solve(group, poisoned(rng, given, ~mask)), solve(group, given)
        assert all(torch.equal(x, y) for x, y in zip(ours, clean, strict=True))

    assert hostile(call, 120)[0] == 1.0


@contextlib.contextmanager
def default(which: Any) -> Iterator[None]:
    """Another default of torch than a caller's tensors have."""
    set_default: Any = torch.set_default_device if isinstance(which, str) else torch.set_default_dtype
    set_default(which)
    try:
        yield
    finally:
        set_default(None if isinstance(which, str) else torch.float32)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("which", ["meta", torch.bfloat16, torch.float64], ids=str)
def test_defaults_of_torch_change_nothing(group, which):
    for seed in range(12):
        given = good(random.Random(f"{group}/{seed}"), group)
        if group in OF_LOSS[:-1] and seed % 2:
            given["squared_gradients"] = None if group == "teacher" else torch.zeros(given["targets"].shape)
        usual = solve(group, given)
        with default(which):
            assert all(torch.equal(x, y) for x, y in zip(solve(group, given), usual, strict=True))


LIGER = ("beta", "loss_type", "importance_sampling_level", "temperature", "delta", "epsilon_high", "use_ref_model")


def liger(draw: Draw) -> Callable[[], None]:
    B, T, D = draw.rng.randint(1, 3), draw.rng.randint(1, 3), draw.rng.randint(1, 4)
    options = {"beta": 0.04, "loss_type": draw.rng.choice(["dapo", "luspo", "vespo"]), "max_completion_length": 4}
    inputs = {
        **{"_input": draw.leaf(B, T, D), "lin_weight": draw.leaf(V, D), "bias": None},
        **{"selected_token_ids": draw.ids(B, T), "attention_mask": draw.normal(B, T) > -1},
        **{"advantages": draw.normal(B), "ref_per_token_logps": -draw.normal(B, T).abs(), "num_items_in_batch": None},
        **{"old_per_token_logps": draw.rng.choice([None, -draw.normal(B, T).abs()]), "vllm_is_ratio": None},
    }
    options, inputs = bend(draw.rng, options, LIGER), bend(draw.rng, inputs, tuple(inputs))
    return lambda: results(LigerFusedLinearGRPOLoss(**options)(**inputs), inputs, ("_input", "lin_weight")) and None


def verl(draw: Draw) -> Callable[[], None]:
    N, D = draw.rng.randint(0, 3), draw.rng.randint(1, 4)
    given = {"hidden": draw.leaf(N, D), "weight": draw.leaf(V, D), "labels": draw.ids(N), "temperature": 0.7}
    given = bend(draw.rng, given | {"reduction": "mean"}, (*given, "reduction", "dist_process_group"))
    return lambda: results(linear_cross_entropy(**given), given, LEAVES) and None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("drop_in", [liger, verl], ids=lambda function: function.__name__)
def test_drop_ins_give_a_result_or_an_error_of_ours(hostile, drop_in):
    assert min(hostile(lambda rng: drop_in(Draw(rng))(), 600)) > 0.03
