"""What PyTorch puts around the ops changes no gradient: FSDP2, DDP, compilation, checkpointing, loss scaling."""

import functools
from collections.abc import Callable
from typing import Any

import fsdp_run
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss, grpo_loss, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.errors import InputError, UnsupportedError

V, D = 31, 8


# Parameters that processes share


@pytest.fixture(scope="module")
def shared(fork_server, tmp_path_factory) -> dict[str, Any]:
    """What two processes found."""
    folder = tmp_path_factory.mktemp("shared")
    fork_server.run(fsdp_run.__file__, folder, timeout=240)
    return torch.load(folder / "results.pt", weights_only=True)


@functools.cache
def alone(tied: bool) -> dict[str, Tensor]:
    """The gradients of the whole batch in this process, through all logits."""
    model, batch = fsdp_run.make_model(tied=tied), fsdp_run.make_batch()
    logprobs = (model(batch["ids"]).logits[:, :-1] / fsdp_run.TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    logprobs = logprobs.gather(-1, batch["ids"][:, 1:, None])[..., 0]
    fsdp_run.loss_of(logprobs, entropy, batch, int(batch["mask"].sum()), impl="reference").backward()
    return {name: x.grad for name, x in model.named_parameters()}


def error(ours: Tensor, expected: Tensor) -> float:
    return ((ours.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", [name for name, case in fsdp_run.CASES.items() if case.way != "bare full_tensor"])
def test_processes_that_share_parameters_find_the_gradients_of_one(shared, name):
    expected = alone(fsdp_run.CASES[name].tied)
    assert shared["gradients"][name].keys() == expected.keys()
    for parameter, gradient in shared["gradients"][name].items():
        assert error(gradient, expected[parameter]) <= 1e-6, parameter


def test_a_bare_full_tensor_drops_what_other_processes_found(shared):
    """PyTorch's own behaviour, for which the page names the cure; each keeps its part of its own gradient."""
    gradients = shared["gradients"]["bare full_tensor, head"]
    errors = {name: error(x, alone(False)[name]) for name, x in gradients.items()}
    assert errors.pop("lm_head.weight") > 0.1
    assert max(errors.values()) <= 1e-6


@pytest.mark.parametrize("op", ["linear_logprobs", "fused_linear_grpo_loss"])
def test_a_sharded_weight_is_refused_with_what_to_do(shared, op):
    assert "got weight as a DTensor" in shared["refusals"][op]
    assert "fix: call this in the forward of the module that FSDP wraps" in shared["refusals"][op]
    assert "module.unshard()" in shared["refusals"][op]


def test_a_weight_that_deepspeed_has_taken_away_is_refused_with_what_to_do():
    """As ZeRO-3 leaves it outside a forward (seen with DeepSpeed 0.19.8, which is not installed here)."""
    weight = nn.Parameter(torch.empty(0))
    weight.ds_id = 0
    with pytest.raises(InputError, match=r"got weight of shape \(0,\).*; fix: .* in the forward of the module"):
        linear_logprobs(torch.ones(2, D), weight, torch.ones(2).long())


# Regions: what may be compiled, or run again in the backward pass


def fused(hidden: Tensor, weight: Tensor, ids: Tensor, **inputs: Any) -> Tensor:
    return 2 * fused_linear_grpo_loss(torch.tanh(hidden), weight, ids, **inputs).loss


def of_sequences(hidden: Tensor, weight: Tensor, ids: Tensor, **inputs: Any) -> Tensor:
    config = GRPOLossConfig(importance_sampling_level="sequence")
    return 2 * fused_linear_grpo_loss(torch.tanh(hidden), weight, ids, config=config, **inputs).loss


def by_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor, **inputs: Any) -> Tensor:
    out = linear_logprobs_and_entropy(torch.tanh(hidden), weight, ids)
    config = GRPOLossConfig(entropy_coef=0.1)
    return 2 * grpo_loss(out.logprobs, entropy=out.entropy, config=config, **inputs).loss


def frozen(hidden: Tensor, weight: Tensor, ids: Tensor, **inputs: Any) -> Tensor:
    return weight.sum() * grpo_loss(linear_logprobs(torch.tanh(hidden), weight.detach(), ids), **inputs).loss


REGIONS = [fused, of_sequences, by_logprobs, frozen]


def problem(B: int = 3, T: int = 7, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Tensor]]:
    """hidden [B, T, D], weight [V, D], ids [B, T]; and the other inputs of a loss."""
    generator = torch.Generator().manual_seed(T)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((B, T, D), (V, D)))
    ids, advantages = torch.randint(0, V, (B, T), generator=generator), torch.randn(B, generator=generator)
    inputs = {"advantages": advantages, "old_logprobs": -5 + torch.randn(B, T, generator=generator)}
    return [hidden.requires_grad_(), weight.requires_grad_(), ids], inputs


def gradients(region: Callable[..., Tensor], leaves: list[Tensor], inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(region(*leaves, **inputs), leaves[:2])


def assert_same(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


# The compiler looks for a gradient on every tensor, and hides what PyTorch says to that from all but `error` filters.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@compiles
@pytest.mark.parametrize(
    ("region", "backend"),
    [
        *(pytest.param(x, "aot_eager", marks=() if x is of_sequences else pytest.mark.full) for x in REGIONS),
        (fused, "inductor"),
        pytest.param(by_logprobs, "inductor", marks=pytest.mark.full),
    ],
)
def test_a_compiled_step_finds_the_gradients_of_an_eager_one(assert_as_exact, region, backend):
    torch._dynamo.reset()
    compiled = torch.compile(region, backend=backend, dynamic=True)
    for shape in ((3, 7), (4, 11)):
        leaves, inputs = problem(*shape)
        wide = [x.detach().double().requires_grad_() for x in leaves[:2]] + leaves[2:]
        plain, exact = gradients(region, leaves, inputs), gradients(region, wide, inputs)
        for ours, *wanted in zip(gradients(compiled, leaves, inputs), plain, exact, strict=True):
            assert_as_exact(ours, *wanted, what=str(tuple(ours.shape)))


@compiles
@pytest.mark.parametrize("region", REGIONS)
def test_a_loss_breaks_a_graph_once_and_no_other_shape_compiles_again(region):
    graphs, seen = list[Any](), list[int]()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(region, backend=backend, dynamic=True)
    for shape in ((3, 7), (4, 11), (2, 30), (9, 5)):
        leaves, inputs = problem(*shape)
        compiled(*leaves, **inputs)
        seen.append(len(graphs))
    assert seen == seen[:1] * 4
    assert seen[0] == 2 or (seen[0] == 3 and torch.__version__.startswith("2.10."))  # which cuts one part in two
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch.compiler|disable"):
        torch.compile(region, backend=backend, fullgraph=True)(*leaves, **inputs)


def test_who_does_not_compile_does_not_import_the_compiler(fork_server, tmp_path):
    code = "import sys, torch, fused_grpo; h, w, i = torch.ones(1, 2, 3).requires_grad_(), torch.ones(5, 3), torch.ones"
    code += "(1, 2).long(); fused_grpo.fused_linear_grpo_loss(h, w, i, advantages=i[:, 0].float()).loss.backward(); "
    (tmp_path / "probe.py").write_text(f"{code} sys.exit('torch._dynamo' in sys.modules)")
    fork_server.run(tmp_path / "probe.py", stage="torch")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("region", REGIONS)
def test_in_a_checkpointed_region_gradients_are_the_same(region, use_reentrant):
    leaves, inputs = problem()
    checkpoint(functools.partial(region, **inputs), *leaves, use_reentrant=use_reentrant).backward()
    assert_same(tuple(x.grad for x in leaves[:2]), gradients(region, *problem()))


# In U, one product of all hidden states with the head: without checkpointing, not reentrant, reentrant.
COSTS = {fused: (3, 3, 4), of_sequences: (3, 3, 4), by_logprobs: (4, 5, 5)}


@pytest.mark.parametrize("region", COSTS)
def test_what_a_checkpointed_region_costs(region):
    leaves, inputs = problem()
    del inputs["old_logprobs"]  # nothing is clipped, and every row counts
    unit = 2 * leaves[2].numel() * V * D
    ours = torch.ops.fused_grpo
    formulas = {ours.linear_logprobs: lambda *_, **__: unit, ours.linear_logprobs_backward: lambda *_, **__: 3 * unit}
    for cost, reentrant in zip(COSTS[region], (None, False, True), strict=True):
        run = functools.partial(region, **inputs)
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            (run(*leaves) if reentrant is None else checkpoint(run, *leaves, use_reentrant=reentrant)).backward()
        assert counter.get_total_flops() / unit == cost, reentrant


@pytest.mark.parametrize("region", [fused, by_logprobs])
def test_a_graph_that_is_kept_gives_the_same_again(region):
    leaves, inputs = problem()
    loss = region(*leaves, **inputs)
    loss.backward(retain_graph=True)
    first = [x.grad.clone() for x in leaves[:2]]
    loss.backward()
    assert_same(tuple(x.grad for x in leaves[:2]), tuple(2 * x for x in first))
    with pytest.raises(RuntimeError, match=r"backward through the (graph|loss) a second time"):
        loss.backward()


@pytest.mark.parametrize("region", REGIONS)
def test_a_second_derivative_is_refused_rather_than_wrong(region):
    leaves, inputs = problem()
    with pytest.raises(UnsupportedError, match=r"got create_graph=True, .*; fix: impl='reference'"):
        torch.autograd.grad(region(*leaves, **inputs), leaves[:1], create_graph=True)


# Loss scaling


def scaled_step(loss_of: Callable[..., Tensor], num_tokens: int) -> tuple[float, list[Tensor]]:
    """(the error of d hidden, scaled back; the parameters after a step) in fp16, of a step of so many tokens."""
    (hidden, weight, ids), inputs = problem(4, 50)
    layer = nn.Parameter(torch.eye(D))
    optimizer, scaler = torch.optim.SGD([layer, weight], lr=1.0), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", torch.float16):
        states = hidden.detach() @ layer
        states.retain_grad()
        loss = loss_of(states, weight, ids, advantages=inputs["advantages"], num_tokens=num_tokens)
    scaler.scale(loss).backward()
    exact = states.detach().double().requires_grad_()
    wide = weight.detach().double()
    loss_of(exact, wide, ids, advantages=inputs["advantages"].double(), num_tokens=num_tokens).backward()
    gradient_error = error(states.grad.double() / scaler.get_scale(), exact.grad)
    scaler.step(optimizer)
    return gradient_error, [layer, weight]


def with_two_ops(hidden: Tensor, weight: Tensor, ids: Tensor, **inputs: Any) -> Tensor:
    return grpo_loss(linear_logprobs(hidden, weight, ids), **inputs).loss


def with_one(hidden: Tensor, weight: Tensor, ids: Tensor, **inputs: Any) -> Tensor:
    return fused_linear_grpo_loss(hidden, weight, ids, **inputs).loss


def test_a_loss_scaler_keeps_small_fp16_gradients_of_two_ops_alone():
    (two_ops, _), (one_op, _) = (scaled_step(loss_of, num_tokens=2**20) for loss_of in (with_two_ops, with_one))
    assert two_ops < 1e-3
    assert one_op > 10 * two_ops


@pytest.mark.parametrize("loss_of", [with_two_ops, with_one])
def test_a_step_whose_fp16_gradients_overflow_is_skipped(loss_of):
    for num_tokens, skipped in ((2**20, False), (1, True)):
        _, (layer, _) = scaled_step(loss_of, num_tokens)
        assert torch.equal(layer, torch.eye(D)) == skipped
