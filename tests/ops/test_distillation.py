"""Distillation in the pass of the GRPO loss equals that loss plus the divergence, each through full logits."""

from typing import Any

import pytest
import torch
from device_under_test import assert_rounded
from numerics import assert_as_exact
from torch import Tensor

from fused_grpo import (
    Distillation,
    FusedLinearGRPOLoss,
    GRPOLossConfig,
    fused_linear_grpo_loss,
    grpo_loss,
    linear_logprobs_and_entropy,
)
from fused_grpo._maths import distributions
from fused_grpo.divergence import check_together
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.head import chunked_loss

N, V, D = 18, 23, 6
KINDS = ("reverse_kl", "forward_kl", "jsd")
LEAVES = ("hidden", "weight", "bias")
TEACHER = ("teacher_hidden", "teacher_weight", "teacher_bias")
LOGPROBS = ("old_logprobs", "ref_logprobs")
CONFIGS: dict[str, dict[str, Any]] = {
    "token": {"loss_type": "dapo", "beta": 0.1},
    "grpo": {"loss_type": "grpo"},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "quantile": {"top_entropy_quantile": 0.5},
}
Inputs = dict[str, Any]


def make_inputs(*, options: bool = True, seed: int = 0) -> Inputs:
    """Three sequences of six tokens, the second of advantage 0; a masked token with NaN, and one that is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    targets = torch.randint(V, (N,), generator=generator)
    targets[4] = -100
    inputs: Inputs = {
        "hidden": 2 * normal(N, D).index_fill(0, torch.tensor([7]), torch.nan),
        "weight": normal(V, D) / D**0.5,
        "bias": normal(V),
        "teacher_hidden": 2 * normal(N, D + 3),
        "teacher_weight": normal(V, D + 3) / D**0.5,
        "teacher_bias": normal(V),
        "targets": targets,
        "mask": torch.arange(N) != 7,
        "cu_seqlens": torch.tensor([0, 6, 12, N]),
        "advantages": torch.tensor([1.0, 0.0, -0.5]),
        "temperature": 0.7 + torch.rand(N, generator=generator),
    }
    inputs |= {name: -3 + normal(N) / 2 for name in LOGPROBS}
    return inputs | ({"logit_scale": -1.25, "softcap": 4.0} if options else {})


def upcast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    names = (*LEAVES, *TEACHER, *LOGPROBS)
    return {name: x.to(dtype) if name in names else x for name, x in inputs.items()}


def split(inputs: Inputs) -> tuple[Inputs, Inputs, list[Tensor]]:
    """(the arguments of the loss, those of a teacher, the leaves)."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in LEAVES if name in inputs}
    teacher = {name.removeprefix("teacher_"): inputs[name] for name in TEACHER}
    rest = {name: x for name, x in inputs.items() if name not in TEACHER}
    return {**rest, **leaves}, teacher | {"logit_scale": 0.8, "softcap": 3.0}, list(leaves.values())


def solve(inputs: Inputs, config: Inputs, *, kind: str = "reverse_kl", coef: float = 0.7, **options: Any) -> Inputs:
    """Loss, log-probs, the mean divergence and the gradients, in one pass."""
    given, teacher, leaves = split(inputs)
    distillation = Distillation(**teacher, coef=coef, kind=kind, beta=0.3)  # type: ignore[arg-type]
    out = fused_linear_grpo_loss(**given, distillation=distillation, config=GRPOLossConfig(**config), **options)
    results = {"loss": out.loss.detach(), "logprobs": out.logprobs, "distillation": out.metrics["distillation"]}
    return results | dict(zip(LEAVES, torch.autograd.grad(out.loss, leaves), strict=True))


def logits(head: Inputs) -> Tensor:
    names = ("bias", "temperature", "logit_scale", "softcap")
    return distributions.transform_logits(head["hidden"] @ head["weight"].t(), **{name: head[name] for name in names})


def separately(inputs: Inputs, config: Inputs, *, kind: str, coef: float = 0.7) -> Inputs:
    """The same in two ops over full logits, whose sum autograd differentiates."""
    given, teacher, leaves = split(inputs)
    head = {name: given[name] for name in (*LEAVES, "targets", "temperature")}
    cap = {name: given[name] for name in ("logit_scale", "softcap") if name in given}
    logprobs, entropy = linear_logprobs_and_entropy(**head, **cap, impl="reference")
    counted = (inputs["targets"] != -100) & inputs["mask"]
    names = ("advantages", "cu_seqlens", *LOGPROBS)
    rest = {name: given[name] for name in names if name in given} | {"entropy": entropy, "mask": counted}
    loss = grpo_loss(logprobs, **rest, config=GRPOLossConfig(**config), impl="reference").loss
    teacher |= {"temperature": given["temperature"]}
    student = {**head, "logit_scale": 1.0, "softcap": None, **cap}
    divergence = distributions.divergence(logits(student), logits(teacher), kind=kind, beta=0.3)
    lengths = torch.stack([part.sum() for part in counted.split(6)]).repeat_interleave(6)
    counts = 3 * lengths if config.get("loss_type") == "grpo" else counted.sum()
    total = loss + coef * (divergence / counts)[counted].sum()
    results = {"loss": total.detach(), "logprobs": torch.where(counted, logprobs, 0.0).detach()}
    results["distillation"] = divergence[counted].mean().detach()
    return results | dict(zip(LEAVES, torch.autograd.grad(total, leaves), strict=True))


def judge(inputs: Inputs, config: Inputs, *, kind: str = "reverse_kl", **options: Any) -> None:
    finite = {**inputs, "hidden": inputs["hidden"].nan_to_num()}
    plain, exact = (separately(upcast(finite, dtype), config, kind=kind) for dtype in (torch.float32, torch.float64))
    inputs = finite if options["impl"] == "reference" else inputs
    for name, value in solve(inputs, config, kind=kind, **options).items():
        assert_as_exact(value, plain[name], exact[name], what=f"{name}, {kind}, {options}")


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("impl", "chunk_bytes"), [("torch", None), ("torch", 6000), ("triton", 3000)])
def test_one_pass_is_as_exact_as_two_losses_over_full_logits(config, kind, impl, chunk_bytes):
    judge(make_inputs(), CONFIGS[config], kind=kind, impl=impl, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("config", ["token", "grpo"])
def test_masked_rows_may_hold_anything_where_a_cuda_graph_is_captured(config, impl, monkeypatch):
    for name in ("leaves_out_rows", "may_synchronize"):
        monkeypatch.setattr(chunked_loss, name, lambda _: False)
    inputs = make_inputs()
    inputs["teacher_hidden"][7] = torch.inf
    ours = solve(inputs, CONFIGS[config], impl=impl, chunk_bytes=6000)
    inputs["teacher_hidden"][7] = 0.0
    exact = separately(
        upcast({**inputs, "hidden": inputs["hidden"].nan_to_num()}, torch.float64), CONFIGS[config], kind="reverse_kl"
    )
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_without_a_soft_cap_and_by_full_logits(impl):
    judge(make_inputs(options=False), CONFIGS["token"], impl=impl)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("chunk_bytes", [None, 6000])
def test_in_fp64_it_has_ten_digits_and_without_a_gradient_the_same_values(config, chunk_bytes):
    inputs = upcast({**make_inputs(), "hidden": make_inputs()["hidden"].nan_to_num()}, torch.float64)
    exact = separately(inputs, CONFIGS[config], kind="jsd")
    ours = solve(inputs, CONFIGS[config], kind="jsd", chunk_bytes=chunk_bytes)
    for name, value in ours.items():
        torch.testing.assert_close(value, exact[name], rtol=1e-10, atol=1e-12)
    given, teacher, _ = split(inputs)
    distillation = Distillation(**teacher, coef=0.7, kind="jsd", beta=0.3)
    with torch.no_grad():
        module = FusedLinearGRPOLoss(GRPOLossConfig(**CONFIGS[config]), chunk_bytes=chunk_bytes)
        out = module(**given, distillation=distillation)
    torch.testing.assert_close(out.loss, ours["loss"])
    torch.testing.assert_close(out.metrics["distillation"], ours["distillation"])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_it_takes_one_product_more(gemms, impl):
    inputs = make_inputs() | {"advantages": torch.zeros(3)}
    ours = solve(inputs, {}, impl=impl, chunk_bytes=3000)
    chunks = len([what for what, _ in gemms if what == "hidden"])
    assert chunks > 1
    assert sorted(what for what, _ in gemms) == sorted(["logits", "logits", "hidden", "weight"] * chunks)
    # The advantages are 0: every gradient is that of the divergence, of 16 tokens.
    assert sum(rows for what, rows in gemms if what == "hidden") == N - 2
    assert (ours["hidden"] != 0).any(1).sum() == N - 2


@pytest.mark.parametrize("config", ["token", "sequence"])
def test_micro_batches_add_up_to_the_batch(config):
    inputs = make_inputs()
    whole = solve(inputs, CONFIGS[config])
    counts = {"num_tokens": float(N - 2), "num_sequences": 3.0}
    parts = []
    for rows, sequences in ((slice(0, 6), slice(0, 1)), (slice(6, N), slice(1, 3))):
        names = ("hidden", "teacher_hidden", "targets", "mask", "temperature", *LOGPROBS)
        part = {name: inputs[name][rows] for name in names} | {"advantages": inputs["advantages"][sequences]}
        part["cu_seqlens"] = torch.arange(0, rows.stop - rows.start + 1, 6)
        parts.append(solve(inputs | part, CONFIGS[config], **counts))
    for name in ("loss", "weight", "bias"):
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name])


@pytest.mark.parametrize("frozen", LEAVES)
def test_a_frozen_leaf_changes_no_other_gradient_and_the_teacher_gets_none(frozen):
    inputs = make_inputs()
    expected, (given, teacher, _) = solve(inputs, {}), split(inputs)
    given[frozen].requires_grad_(False)
    teacher |= {name: teacher[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    fused_linear_grpo_loss(**given, distillation=Distillation(**teacher, coef=0.7, beta=0.3)).loss.backward()
    for name in LEAVES:
        assert teacher[name].grad is None
        if name != frozen:
            torch.testing.assert_close(given[name].grad, expected[name])


def test_a_coefficient_of_0_is_the_loss_alone_with_a_metric():
    inputs = make_inputs()
    given, _, leaves = split(inputs)
    alone = fused_linear_grpo_loss(**given)
    ours = solve(inputs, {}, coef=0.0)
    expected = [alone.loss.detach(), *torch.autograd.grad(alone.loss, leaves)]
    for name, value in zip(("loss", *LEAVES), expected, strict=True):
        torch.testing.assert_close(ours[name], value)
    assert ours["distillation"] > 0


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("coef", [0.0, 0.7])
def test_every_token_has_a_gradient_by_its_teacher(coef, impl):
    given, teacher, _ = split(make_inputs() | {"hidden": make_inputs()["hidden"].nan_to_num()})
    distillation = Distillation(**teacher, coef=coef)
    given |= {"advantages": torch.zeros_like(given["advantages"])}
    out = fused_linear_grpo_loss(**given, distillation=distillation, impl=impl)
    assert out.metrics["zero_gradient_fraction"] == (coef == 0.0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_no_tokens_give_a_loss_of_zero(impl):
    for name, value in solve(make_inputs() | {"mask": torch.zeros(N)}, {}, impl=impl).items():
        assert not value.any(), name


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"kind": "kl"}, {}, InputError, "kind='kl', want 'reverse_kl'"),
        ({"coef": -1.0}, {}, InputError, "coef=-1.0 of a distillation, want a finite number >= 0"),
        ({"weight": torch.randn(V + 1, D + 3), "bias": None}, {}, InputError, "vocabularies of 23 and 24"),
        ({"hidden": torch.randn(N - 1, D + 3)}, {"temperature": 1.0}, InputError, "want the same tokens"),
        ({"hidden": torch.randn(N, D)}, {}, InputError, "of the teacher: got hidden"),
        ({}, {"distillation": 0.1}, InputError, "distillation of type float, want a Distillation or None"),
        ({}, {"score": "needed"}, UnsupportedError, "with score='needed', want every token.*fix: score='all'"),
        ({}, {"config": GRPOLossConfig(entropy_coef=0.1)}, UnsupportedError, "with entropy_coef=0.1, want 0;.*fix"),
        (
            {},
            {"support": (torch.arange(0), torch.zeros(N + 1, dtype=torch.int32))},
            UnsupportedError,
            "with support, want divergences over the whole vocabulary; fix",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, options, error, message):
    given, teacher, _ = split(make_inputs())
    distillation = Distillation(**{**teacher, "coef": 0.1, **changes})
    with pytest.raises(error, match=message):
        fused_linear_grpo_loss(**{**given, "distillation": distillation, **options})


def test_shards_of_a_head_are_refused_before_any_collective():
    _, teacher, _ = split(make_inputs())
    with pytest.raises(UnsupportedError, match="with a process_group, want both distributions whole on each rank; fix"):
        check_together(
            Distillation(**teacher, coef=0.1), GRPOLossConfig(), score="all", support=None, process_group=object()
        )


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", ["token", "sequence"])
def test_gradients_of_16_bit_inputs_are_rounded_once(config, impl, dtype):
    inputs = make_inputs()
    inputs |= {name: inputs[name].nan_to_num().to(dtype) for name in (*LEAVES, "teacher_hidden", "teacher_weight")}
    exact = solve(upcast(inputs, torch.float64), CONFIGS[config], impl="reference")
    ours = solve(inputs, CONFIGS[config], impl=impl, chunk_bytes=6000)
    for name in LEAVES:
        assert_rounded(ours[name], exact[name], dtype=dtype, what=name)
