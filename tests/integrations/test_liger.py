"""Liger's class and ours, called alike: loss, metrics, gradients, and what they refuse.

As a script, `test_liger.py RANK FOLDER` is one of two processes that count their tokens together.
"""

import inspect
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fused_grpo.config import CLIPPED, LEVELS, TRL_LOSS_TYPES
from fused_grpo.errors import InputError
from fused_grpo.integrations import liger

pytestmark = pytest.mark.grid

B, T, V, D = 6, 7, 29, 6
KINDS = [(x, level) for x in TRL_LOSS_TYPES for level in LEVELS if level == "token" or x in CLIPPED]
REF_LOGPS, REF_HEAD = ("ref_per_token_logps",), ("ref_input", "ref_weight", "ref_bias")
REFERENCES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no KL": ({"beta": 0.0, "use_ref_model": False}, ()),
    "log-probs": ({}, REF_LOGPS),
    "a head": ({}, REF_HEAD),
    "given, not used": ({"use_ref_model": False}, REF_LOGPS),
    "bias-corrected": ({"use_bias_correction_kl": True}, REF_HEAD),
}
RATIOS = {"no ratio": None, "[B]": (slice(None), 0), "[B, 1]": (slice(None), slice(1)), "[B, T]": (...,)}


def liger_class() -> type:
    """Liger's class; importing it takes seconds, so only where a test runs."""
    return pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss


@pytest.fixture(params=["Liger's", "ours"])
def loss_class(request) -> type:
    return liger_class() if request.param == "Liger's" else liger.LigerFusedLinearGRPOLoss


def make_batch() -> dict[str, Tensor]:
    """Everything that a call can take: holes, an empty sequence, both signs, log-probs on both sides of the clip."""
    generator = torch.Generator().manual_seed(44)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = normal(B, T, D), normal(V, D)
    ids = torch.randint(0, V, (B, T), generator=generator)
    near = (hidden @ weight.t()).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask = (torch.arange(T) < torch.tensor([7, 4, 0, 1, 6, 3])[:, None]).long()
    mask[0, 2] = 0
    batch = {
        "_input": hidden,
        "lin_weight": weight,
        "selected_token_ids": ids,
        "attention_mask": mask,
        "advantages": torch.tensor([1.2, -0.7, 0.9, -0.4, 0.0, 0.8]),
        "bias": 0.1 * normal(V),
        "ref_per_token_logps": near + 0.5 * normal(B, T),
        "old_per_token_logps": near + 0.6 * normal(B, T),
        "ref_input": hidden + 0.3 * normal(B, T, D),
        "ref_weight": weight + 0.3 * normal(V, D),
        "ref_bias": 0.1 * normal(V),
        # On padding, too.
        "vllm_is_ratio": (0.5 * normal(B, T)).exp(),
    }
    # A token that is not clipped; TRL's "token_mask" leaves some out like this.
    batch["vllm_is_ratio"][0, 1] = 0.0
    return batch


ALWAYS = ("_input", "lin_weight", "selected_token_ids", "attention_mask", "advantages")
TRAINED = ("_input", "lin_weight", "bias")


def run(
    loss_class: type, options: dict[str, Any], inputs: dict[str, Any], *, trained=TRAINED, upstream: float = 1.0
) -> dict[str, Tensor]:
    """The loss, the metrics by place, and the gradients by name."""
    leaves = {name: x.clone().requires_grad_(name in trained) for name, x in inputs.items() if name in TRAINED}
    # Liger in one chunk: as exact, and six times as fast.
    module = loss_class(**{"compiled": False, "chunk_size": B, "max_completion_length": 9} | options)
    loss, metrics = module(**{**inputs, **leaves})
    (upstream * loss).backward()
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"loss": loss.detach(), **{f"metric {i}": x for i, x in enumerate(metrics)}, **gradients}


def assert_same(ours: dict[str, Tensor], others: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == others.keys()
    for name, other in others.items():
        assert ours[name].dtype == other.dtype
        assert ours[name].shape == other.shape
        error = (ours[name] - other).norm().item()
        assert error <= tolerance * other.norm().item(), f"{name}: {error:.1e} away, of {other.norm():.1e}"


def compare(options: dict[str, Any], inputs: dict[str, Any], **arguments: Any) -> dict[str, Tensor]:
    others = run(liger_class(), options, inputs, **arguments)
    assert_same(run(liger.LigerFusedLinearGRPOLoss, options, inputs, **arguments), others)
    return others


def chosen(reference: str, ratio: str, *, old: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(constructor options, arguments of the call)."""
    options, names = REFERENCES[reference]
    batch = make_batch()
    inputs = {name: batch[name] for name in (*ALWAYS, *names, *(["old_per_token_logps"] if old else []))}
    if RATIOS[ratio] is not None:
        inputs["vllm_is_ratio"] = batch["vllm_is_ratio"][RATIOS[ratio]]
    return options, inputs


@pytest.mark.parametrize("old", [False, True], ids=["on policy", "off policy"])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_loss_metrics_and_gradients_are_ligers(loss_type, level, reference, ratio, old):
    options, inputs = chosen(reference, ratio, old=old)
    compare({"loss_type": loss_type, "importance_sampling_level": level, **options}, inputs)


VARIANTS: dict[str, dict[str, Any]] = {
    "delta inside of the clip": {"delta": 1.1},
    "delta below the clip": {"delta": 0.7},
    "delta outside": {"delta": 1.6},
    "wide clip": {"epsilon_low": 0.5, "epsilon_high": 0.7},
    "no lower clip": {"epsilon_low": 1.5},
    "temperature": {"temperature": 0.7},
    "constants of sapo": {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.3},
    "constants of vespo": {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.4, "vespo_lambda_neg": 1.5},
    "several chunks": {"chunk_size": 2},
    "a negative beta that is not used": {"beta": -1.0, "use_ref_model": False},
}
CALLS: dict[str, dict[str, Any]] = {
    "count": {"num_items_in_batch": 50},
    "count as a tensor": {"num_items_in_batch": torch.tensor(31)},
    "count of nothing": {"num_items_in_batch": 0},
    "mask of floats": {"attention_mask": make_batch()["attention_mask"].float()},
    "mask of booleans": {"attention_mask": make_batch()["attention_mask"].bool()},
    "all masked": {"attention_mask": torch.zeros(B, T)},
    "no padding": {"attention_mask": torch.ones(B, T)},
    "bias": {"bias": make_batch()["bias"]},
    "advantages of zero": {"advantages": torch.zeros(B)},
    "both references": {name: make_batch()[name] for name in (*REF_LOGPS, *REF_HEAD)},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "frozen head": {"trained": ("_input",)},
    "frozen hidden states": {"trained": ("lin_weight", "bias")},
    "upstream": {"upstream": -3.5},
}
# What all the options go with: little, and everything.
BASES = {"plain": ("no KL", "no ratio"), "full": ("bias-corrected", "[B, T]")}


@pytest.mark.filterwarnings("ignore:.*Using ref_per_token_logps")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("variant", [*VARIANTS, *CALLS, *ARGUMENTS])
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_every_option_is_ligers(loss_type, level, variant, base):
    options, inputs = chosen(*BASES[base], old=True)
    inputs |= {"bias": make_batch()["bias"]} if variant in ARGUMENTS else {}
    options = {"loss_type": loss_type, "importance_sampling_level": level, **options, **VARIANTS.get(variant, {})}
    compare(options, {**inputs, **CALLS.get(variant, {})}, **ARGUMENTS.get(variant, {}))


@pytest.mark.parametrize("reference", ["log-probs", "a head"])
def test_with_beta_zero_a_reference_is_asked_for_and_not_used(reference):
    options, inputs = chosen(reference, "no ratio", old=True)
    assert "metric 1" not in compare({**options, "beta": 0.0}, inputs)


@pytest.mark.parametrize(("loss_type", "changes"), [("vespo", True), ("luspo", True), ("dapo", False)])
def test_the_samplers_ratio_on_padding_counts_where_it_does_in_liger(loss_type, changes):
    options, inputs = chosen("no KL", "[B, T]", old=True)
    options = {"loss_type": loss_type, **options}
    with_padding = compare(options, inputs)
    inputs["vllm_is_ratio"] = torch.where(inputs["attention_mask"] == 0, 1.0, inputs["vllm_is_ratio"])
    assert (with_padding["loss"] != compare(options, inputs)["loss"]) == changes


def test_in_bf16_ours_is_the_nearer_to_exact_numbers():
    options, inputs = chosen("log-probs", "no ratio", old=True)
    inputs |= {name: inputs[name].bfloat16() for name in ("_input", "lin_weight")}
    doubled = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    ours, exact = (run(liger.LigerFusedLinearGRPOLoss, options, given) for given in (inputs, doubled))
    others = run(liger_class(), {**options, "chunk_size": 1}, inputs)
    # Gradients are bf16 at the end; the loss is not.
    for name, bound in {"loss": 1e-5, "metric 0": 1e-5, "_input": 2**-8, "lin_weight": 2**-8}.items():
        error, error_of_liger = ((x[name] - exact[name]).norm() / exact[name].norm() for x in (ours, others))
        assert error <= bound
        assert error < error_of_liger / 2


def test_the_numbers_cross_the_clip_from_both_sides():
    batch = make_batch()
    logits = batch["_input"] @ batch["lin_weight"].t()
    near = logits.log_softmax(-1).gather(-1, batch["selected_token_ids"][..., None])[..., 0]
    on, change = batch["attention_mask"].bool(), near - batch["old_per_token_logps"]
    mean_change = (change * on).sum(1, keepdim=True) / on.sum(1, keepdim=True).clamp_min(1)
    good, bad = (batch["advantages"] > 0)[:, None] & on, (batch["advantages"] < 0)[:, None] & on
    for ratio in (change.exp(), mean_change.exp().expand(B, T)):
        assert (good & (ratio > 1.2)).any()
        assert (bad & (ratio < 0.8)).any()
        assert ((ratio > 0.8) & (ratio < 1.2) & on).any()


def test_signatures_are_ligers():
    for method in ("__init__", "forward"):
        ours, others = (
            [(x.name, x.default, x.kind) for x in inspect.signature(getattr(c, method)).parameters.values()]
            for c in (liger.LigerFusedLinearGRPOLoss, liger_class())
        )
        assert ours == others


def test_a_call_by_position_gives_a_loss_and_detached_metrics(loss_class):
    inputs = {name: x for name, x in make_batch().items() if name != "vllm_is_ratio"}
    inputs["ref_per_token_logps"] = None
    inputs["_input"].requires_grad_()
    loss, metrics = loss_class(0.04, False)(*inputs.values())
    assert loss.requires_grad
    kl, clipped = metrics
    assert not kl.requires_grad
    assert kl > 0
    assert 0 < clipped < 1


def test_options_may_be_changed_between_calls(loss_class):
    _, inputs = chosen("no KL", "no ratio", old=True)
    module = loss_class(beta=0.0, use_ref_model=False, compiled=False)
    before = module(**inputs)[0]
    module.temperature, module.loss_type = 0.5, "grpo"
    fresh = loss_class(beta=0.0, use_ref_model=False, compiled=False, temperature=0.5, loss_type="grpo")
    assert module(**inputs)[0] == fresh(**inputs)[0] != before


def test_two_references_bring_a_warning(loss_class):
    options, inputs = chosen("log-probs", "no ratio", old=True)
    one = loss_class(compiled=False, **options)
    both = {**inputs, **{name: make_batch()[name] for name in REF_HEAD}}
    with pytest.warns(UserWarning, match="Using ref_per_token_logps") as warned:
        loss, _ = one(**both)
    assert loss == one(**inputs)[0]
    # Ours names the line that made the call.
    assert loss_class is liger_class() or warned[0].filename == __file__


@pytest.mark.parametrize(
    "options",
    [{"sapo_temperature_pos": 0.0}, {"sapo_temperature_neg": -1.0}, {"delta": 0.0}],
    ids=lambda x: next(iter(x)),
)
def test_constructors_refuse(loss_class, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_class(**options)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no such loss": ({"loss_type": "ppo"}, {}),
    "no such level": ({"importance_sampling_level": "batch"}, {}),
    "cispo of sequences": ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, {}),
    "sapo of sequences": ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, {}),
    "vespo of sequences": ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, {}),
    "no length": ({"loss_type": "dr_grpo", "max_completion_length": None}, {}),
    "no reference": ({}, {"ref_per_token_logps": None}),
    "no reference, and no use for it": ({"beta": 0.0}, {"ref_per_token_logps": None}),
    "a ratio of sequences too many": ({}, {"vllm_is_ratio": torch.ones(B + 1)}),
    "a ratio of tokens too many": ({}, {"vllm_is_ratio": torch.ones(B, T + 1)}),
    "a ratio of another batch": ({}, {"vllm_is_ratio": torch.ones(B + 1, T)}),
    "a ratio of three dimensions": ({}, {"vllm_is_ratio": torch.ones(B, T, 1)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_refuse(loss_class, case):
    options, inputs = REFUSED[case]
    with pytest.raises((ValueError, AssertionError)):  # ours names some before the first call
        loss_class(compiled=False, **options)(**{**chosen("log-probs", "no ratio", old=True)[1], **inputs})


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention_mask": torch.ones(B, 1)},
        {"old_per_token_logps": torch.ones(B, 1)},
        {"ref_per_token_logps": torch.ones(B, 1)},
        {"ref_per_token_logps": torch.ones(B, T, dtype=torch.complex64)},
        {"old_per_token_logps": torch.ones(B, T, dtype=torch.complex64)},
        {"advantages": torch.ones(B, T)},
        {"ref_per_token_logps": None, "ref_input": make_batch()["ref_input"]},
        {"selected_token_ids": torch.ones(B, T)},
    ],
    ids=lambda x: list(x)[-1],
)
def test_ours_refuses_what_would_broadcast_or_crash(wrong):
    _, inputs = chosen("log-probs", "no ratio", old=True)
    with pytest.raises(
        InputError, match=r"want .* of both|got ref_per|got old_per|got advantages|ref_weight|got selected"
    ):
        liger.LigerFusedLinearGRPOLoss()(**{**inputs, **wrong})


@pytest.mark.parametrize("wrong", [torch.ones(2), np.ones(2), object(), "many"], ids=lambda x: type(x).__name__)
def test_values_of_any_type_are_refused_by_name(wrong):
    names = ("loss_type", "importance_sampling_level", "use_ref_model", "use_bias_correction_kl", "beta")
    for name in names:
        with pytest.raises(InputError, match=f"got {name}="):
            liger.LigerFusedLinearGRPOLoss(**{name: wrong})
    _, inputs = chosen("log-probs", "no ratio", old=True)
    with pytest.raises(InputError, match="got num_items_in_batch="):
        liger.LigerFusedLinearGRPOLoss()(**{**inputs, "num_items_in_batch": wrong})


@pytest.mark.parametrize("wrong", ["0.2", torch.inf])
def test_what_is_no_finite_number_is_named(wrong):
    _, inputs = chosen("log-probs", "no ratio", old=True)
    for name in ("delta", "epsilon_low", "epsilon_high", "beta"):
        with pytest.raises(InputError, match=f"{name.removesuffix('_low')}={wrong!r}, want"):
            liger.LigerFusedLinearGRPOLoss(**{name: wrong})(**inputs)
    with pytest.raises(InputError, match="epsilon_high=None, want"):
        liger.LigerFusedLinearGRPOLoss(epsilon_high=None)(**inputs)


@pytest.mark.parametrize(
    "value", [1.0, [1.0], make_batch()["old_per_token_logps"].numpy()], ids=lambda x: type(x).__name__
)
def test_what_is_no_tensor_is_named(value):
    _, inputs = chosen("log-probs", "no ratio", old=True)
    for name in (
        "_input",
        "selected_token_ids",
        "attention_mask",
        "advantages",
        "old_per_token_logps",
        "vllm_is_ratio",
    ):
        with pytest.raises(InputError, match=f"{name} of type {type(value).__name__}, want a torch.Tensor"):
            liger.LigerFusedLinearGRPOLoss()(**{**inputs, name: value})


@pytest.mark.parametrize(("loss_type", "level"), [x for x in KINDS if x != ("luspo", "token")])
def test_padding_may_hold_anything(loss_type, level):
    options, inputs = chosen("no KL", "no ratio", old=True)
    options = {"loss_type": loss_type, "importance_sampling_level": level, **options}
    expected = run(liger.LigerFusedLinearGRPOLoss, options, inputs)
    off = inputs["attention_mask"] == 0
    inputs["selected_token_ids"] = inputs["selected_token_ids"].masked_fill(off, -1)
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"].masked_fill(off, torch.nan)
    inputs["_input"] = inputs["_input"].masked_fill(off[..., None], torch.nan)
    assert_same(run(liger.LigerFusedLinearGRPOLoss, options, inputs), expected, 0.0)


@pytest.mark.parametrize("reference", ["no KL", "log-probs"])
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_only_luspo_makes_the_logits_twice(monkeypatch, loss_type, level, reference):
    calls = []
    original = liger.linear_logprobs
    monkeypatch.setattr(liger, "linear_logprobs", lambda *a, **k: calls.append(1) or original(*a, **k))
    options, inputs = chosen(reference, "[B, T]", old=True)
    options = {"loss_type": loss_type, "importance_sampling_level": level, **options}
    run(liger.LigerFusedLinearGRPOLoss, options, inputs)
    assert bool(calls) == (loss_type == "luspo" and (level == "token" or reference == "log-probs"))


def test_a_sequence_without_an_advantage_is_not_scored(monkeypatch):
    outputs = []
    original = liger.fused_linear_grpo_loss
    monkeypatch.setattr(
        liger, "fused_linear_grpo_loss", lambda *a, **k: outputs.append(original(*a, **k)) or outputs[0]
    )
    options, inputs = chosen("no KL", "no ratio", old=True)
    run(liger.LigerFusedLinearGRPOLoss, options, inputs)
    scored = inputs["attention_mask"].bool() & (inputs["advantages"] != 0)[:, None]
    assert torch.equal(outputs[0].logprobs != 0, scored)
    assert scored.sum() < inputs["attention_mask"].sum()


CALLS_OF_RANKS: tuple[dict[str, Any], ...] = ({}, {"num_items_in_batch": 50})


def of_rank(rank: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rank has its part of the batch, no rank all of it."""
    options, inputs = chosen("log-probs", "no ratio", old=True)
    rows = {None: slice(None), 0: slice(0, 3), 1: slice(3, 6)}[rank]
    return options, {name: x if name == "lin_weight" else x[rows] for name, x in inputs.items()}


def one_rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    options, inputs = of_rank(rank)
    for i, call in enumerate(CALLS_OF_RANKS):
        torch.save(run(liger.LigerFusedLinearGRPOLoss, options, {**inputs, **call}), f"{folder}/{i}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(fork_server, tmp_path_factory) -> list[list[dict[str, Tensor]]]:
    """What each of two processes got, call by call."""
    folder = tmp_path_factory.mktemp("ranks")
    for process in [fork_server.start(__file__, rank, folder) for rank in (0, 1)]:
        assert process.wait() == 0, process.output
    return [[torch.load(folder / f"{i}-{rank}.pt", weights_only=True) for rank in (0, 1)] for i in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_process_group_they_are_ligers(ranks, monkeypatch, rank):
    others_tokens = of_rank(1 - rank)[1]["attention_mask"].sum()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, op: count.add_(others_tokens))
    options, inputs = of_rank(rank)
    for results, call in zip(ranks, CALLS_OF_RANKS, strict=True):
        assert_same(results[rank], run(liger_class(), options, {**inputs, **call}))


def test_the_mean_over_processes_is_one_process_with_all_tokens(ranks):
    options, inputs = of_rank(None)
    for (first, second), call in zip(ranks, CALLS_OF_RANKS, strict=True):
        whole = run(liger.LigerFusedLinearGRPOLoss, options, {**inputs, **call})
        # What DDP does to gradients.
        mean = {name: (first[name] + second[name]) / 2 for name in ("loss", "lin_weight")}
        assert_same(mean, {name: whole[name] for name in mean})


if __name__ == "__main__":
    # Ours does without Liger.
    sys.modules["liger_kernel"] = None  # type: ignore[assignment]
    one_rank(int(sys.argv[1]), sys.argv[2])
