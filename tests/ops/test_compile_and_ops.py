"""What PyTorch knows of the op is true: `opcheck` says so, and a compiled call equals an eager one."""

from itertools import product

import pytest
import torch

from fused_grpo import GRPOLossConfig, linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.errors import InputError
from fused_grpo.passes import torch_passes

pytestmark = pytest.mark.cpu_only(reason="a wrapped op is none that torch knows: tests/gpu compiles the ops on a GPU")

N, V, D = 9, 31, 8
OPS = torch.ops.fused_grpo


def leaves(*, frozen: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((N, D), (V, D), (V,))]
    return [x.requires_grad_(not frozen or k == 0) for k, x in enumerate(tensors)]


def targets(count: int = N) -> torch.Tensor:
    return (torch.arange(count) * 7 % V).index_fill(0, torch.tensor([1]), -100)


def several() -> torch.Tensor:
    """[N, 3], one row without any, one with a repetition."""
    return torch.stack([targets(), targets().roll(3), targets()], 1).index_fill(0, torch.tensor([1]), -100)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler's, from torch 2.15 on
@pytest.mark.parametrize(
    ("moments", "entropy", "frozen", "bias", "ids"),
    [(True, *flags, targets()) for flags in product([False, True], repeat=3)]
    + [(False, False, True, False, several()), (False, True, False, True, several())],
)
def test_opcheck_finds_nothing(monkeypatch, moments, entropy, frozen, bias, ids):
    # Of the weights that are kept, those of ignored rows are undefined: here 0, so that two calls can be compared.
    empty_tile = torch_passes.empty_tile
    monkeypatch.setattr(torch_passes, "empty_tile", lambda *shape, **layout: empty_tile(*shape, **layout).zero_())
    hidden, weight, b = leaves(frozen=frozen)
    inputs = (hidden, weight, b if bias else None, ids, torch.full((N,), 0.7))
    wanted = [True, not frozen, bias and not frozen]
    options = (1.5, 4.0, -100, entropy, "torch", None, False, True, wanted)
    torch.library.opcheck(OPS.linear_logprobs.default, (*inputs, moments, *options))
    saved = [x.detach() for x in OPS.linear_logprobs(*inputs, moments, *options)[:5]]
    inputs = [None if x is None else x.detach() for x in inputs]
    upstream = (torch.randn(ids.shape), torch.randn(N) if entropy else None)
    torch.library.opcheck(OPS.linear_logprobs_backward.default, (*inputs, *saved, *upstream, *options))


def test_every_op_is_in_these_tests():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd")
    ours = {name for name in names if name.startswith("fused_grpo::")}
    assert ours == {"fused_grpo::linear_logprobs", "fused_grpo::linear_logprobs_backward"}


GRADIENTS = [[False] * 3, [True, False, False], [False, True, False], [True] * 3]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("ids", [targets, several])
def test_no_output_of_an_op_shares_memory(impl, ids):
    """PyTorch allows none with an input or another output, empty ones included; inductor reuses memory by that rule."""
    hidden, weight, bias = (x.detach() for x in leaves())
    every = product([N, 0], [False, True], [False, True], GRADIENTS)
    for count, entropy, invariant, wanted in list(every)[:: 1 if impl == "torch" else 5]:
        inputs = (hidden[:count], weight, bias, ids()[:count], torch.full((count,), 0.7))
        options = (1.5, 4.0, -100, entropy, impl, None, invariant, True, wanted)
        *saved, moments = OPS.linear_logprobs(*inputs, inputs[3].ndim == 1, *options)
        assert_apart(inputs, [*saved, moments])
        upstream = torch.ones(saved[0].shape), torch.ones(count) if entropy else None
        if any(wanted):
            tensors = (*inputs, *saved, *upstream)
            assert_apart(tensors, OPS.linear_logprobs_backward(*tensors, *options))


def test_opcheck_finds_nothing_without_a_gradient_or_rows():
    hidden, weight, bias = (x.detach() for x in leaves())
    for count in (N, 0):
        inputs = (hidden[:count], weight, bias, targets()[:count], torch.full((count,), 0.7))
        torch.library.opcheck(
            OPS.linear_logprobs.default, (*inputs, True, 1.5, 4.0, -100, True, "torch", None, False, True, [False] * 3)
        )


def assert_apart(inputs, outputs):
    storages = [x.untyped_storage()._cdata for x in (*inputs, *outputs) if x is not None]
    assert len({*storages}) == len(storages)


def step(hidden, weight, bias, targets):
    """Work of others on both sides, as in a model."""
    out = linear_logprobs_and_entropy(hidden * 2, weight, targets, bias=bias, softcap=3.0, temperature=0.7)
    return out.logprobs.exp().sum() + out.entropy.square().sum()


@pytest.mark.parametrize(
    ("backend", "frozen", "ids"),
    [
        ("aot_eager", False, targets()),
        ("aot_eager", True, targets()),
        ("aot_eager", False, several()),
        pytest.param("inductor", False, targets(), marks=pytest.mark.full),
        ("inductor", True, targets()),
        ("inductor", True, several()),
    ],
)
def test_a_compiled_call_equals_an_eager_one(assert_as_exact, backend, frozen, ids):
    inputs = leaves(frozen=frozen)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    results = []
    for function, given in ((compiled, inputs), (step, inputs), (step, wide)):
        value = function(*given, ids)
        results.append([value.detach(), *torch.autograd.grad(value, [x for x in given if x.requires_grad])])
    for ours, eager, exact in zip(*results, strict=True):
        assert_as_exact(ours, eager, exact, what=str(tuple(exact.shape)))


@pytest.mark.parametrize(("trainable", "impl"), [(False, "auto"), (True, "auto"), (True, "reference")])
def test_another_number_of_rows_does_not_compile_again(trainable, impl):
    weight, graphs = torch.randn(V, D, requires_grad=trainable), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda hidden, ids: linear_logprobs(hidden, weight, ids, impl=impl),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for count in (5, 6, 64, 200, 1000):
        hidden, ids = torch.randn(count, D), targets(count)
        torch.testing.assert_close(compiled(hidden, ids), linear_logprobs(hidden, weight, ids))
    assert len(graphs) == 1


@pytest.mark.parametrize("ids", [targets, several])
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_call_takes_any_number_of_rows(with_gradient, ids, frozen, strict):
    class Scorer(torch.nn.Module):
        def forward(self, hidden, ids):
            return linear_logprobs_and_entropy(hidden, self.weight, ids, bias=self.bias, temperature=0.7)

    hidden, weight, bias = leaves(frozen=frozen)
    module, shapes = Scorer(), {name: {0: torch.export.Dim("rows")} for name in ("hidden", "ids")}
    module.weight, module.bias = (torch.nn.Parameter(x.detach(), x.requires_grad) for x in (weight, bias))
    with torch.set_grad_enabled(with_gradient):
        exported = torch.export.export(module, (hidden, ids()), dynamic_shapes=shapes, strict=strict).module()
        for index in (torch.arange(N), torch.arange(4), torch.arange(95) % N, torch.arange(300) % N):
            given = hidden[index], ids()[index]
            torch.testing.assert_close(exported(*given), tuple(module(*given)))


def test_an_exported_head_learns_as_an_eager_one():
    """Though it keeps no softmax weights, whose memory depends on the number of rows."""

    class Scorer(torch.nn.Linear):
        def forward(self, hidden, ids):
            return linear_logprobs(hidden, self.weight, ids)

    hidden, module = torch.randn(200, D), Scorer(D, V)
    shapes = {name: {0: torch.export.Dim("rows")} for name in ("hidden", "ids")}
    exported = torch.export.export(module, (hidden[:9], targets(9)), dynamic_shapes=shapes).module()
    for one in (exported, module):
        one(hidden, targets(200)).sum().backward()
    torch.testing.assert_close(exported.weight.grad, module.weight.grad)


def test_a_compiled_call_still_names_a_bad_target():
    compiled = torch.compile(linear_logprobs, fullgraph=True, backend="aot_eager")
    with pytest.raises(InputError, match=r"target 31 at \[2\]; want 0 <= target < V=31"):
        compiled(torch.randn(3, D), torch.randn(V, D), torch.tensor([0, 1, 31]))


@pytest.mark.parametrize("option", ["loss_type", "kl_estimator", "sampling_correction", "score_centering"])
def test_a_config_made_in_compiled_code_still_names_a_bad_choice(option):
    make = torch.compile(lambda x: x + GRPOLossConfig(**{option: "odd"}).epsilon, backend="eager")
    with pytest.raises(InputError, match=f"got {option}='odd', want one of "):
        make(torch.zeros(1))
