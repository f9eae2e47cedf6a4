"""verl's `linear_cross_entropy` from ours: numbers, reductions, groups, and the swap inside verl's layout.

verl needs CUDA and Ray, so modules of its names stand in for it. Run as a script, this file is the second of two ranks.
"""

import contextlib
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.integrations import verl as integration
from fused_grpo.integrations.verl import linear_cross_entropy, patched

ROOT = Path(__file__).resolve().parents[2]
B, T, D, V, TEMPERATURE = 2, 9, 16, 53, 0.7
N = B * T


def problem(dtype: torch.dtype = torch.float64) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, V, (B, T), generator=generator)
    return SimpleNamespace(hidden=normal(B, T, D), weight=normal(V, D), labels=labels, g=normal(N), g_entropy=normal(N))


def plain(hidden, weight, labels, temperature=1.0, reduction="none", group=None):
    """verl's function with the logits."""
    logits = hidden.reshape(-1, D) @ weight.t() / temperature
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(-1, labels.reshape(-1, 1))[:, 0]
    return {"none": logprobs, "sum": logprobs.sum(), "mean": logprobs.mean()}[reduction], -(log_p.exp() * log_p).sum(-1)


def run(function, inputs, *args, weight=None, dtype=None) -> dict[str, torch.Tensor]:
    """Both results and both gradients, with a gradient through both results."""
    hidden, weight = inputs.hidden.to(dtype), (inputs.weight if weight is None else weight).to(dtype)
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = function(hidden, weight, inputs.labels, *args)
    upstream = inputs.g.to(logprobs) if logprobs.ndim else torch.tensor(1.7).to(logprobs)
    torch.autograd.backward([logprobs, entropy], [upstream, inputs.g_entropy.to(entropy)])
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}


def assert_close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, want in expected.items():
        assert ours[name].shape == want.shape, name
        error = ((ours[name] - want).norm() / want.norm()).item()
        assert error <= tolerance, f"{name} is {error:.1e} off"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_values_and_gradients_are_those_of_the_logits(dtype, tolerance, reduction):
    ours = run(linear_cross_entropy, problem(), TEMPERATURE, reduction, dtype=dtype)
    assert {x.dtype for x in ours.values()} == {dtype}
    assert_close(ours, run(plain, problem(), TEMPERATURE, reduction), tolerance)


def test_from_16_bits_results_are_fp32_and_gradients_keep_their_dtype():
    ours = run(linear_cross_entropy, problem(torch.bfloat16), TEMPERATURE, dtype=torch.bfloat16)
    assert [x.dtype for x in ours.values()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    expected = run(plain, problem(torch.bfloat16), TEMPERATURE, dtype=torch.float64)
    assert_close({k: ours[k] for k in ("logprobs", "entropy")}, {k: expected[k] for k in ("logprobs", "entropy")}, 2e-6)
    assert_close(ours, expected, 4e-3)


def test_megatrons_layout_is_flattened_each_on_its_own():
    inputs = problem()
    thd = SimpleNamespace(**{**vars(inputs), "hidden": inputs.hidden.view(N, 1, D), "labels": inputs.labels.view(1, N)})
    ours = run(linear_cross_entropy, thd, TEMPERATURE, "none", None)
    assert ours.pop("hidden").shape == (N, 1, D)
    expected = run(plain, inputs, TEMPERATURE)
    assert_close(ours, {name: expected[name] for name in ours}, 1e-12)


def test_labels_may_be_int32_and_a_reduction_in_capitals():
    inputs = problem()
    ours = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels.int(), TEMPERATURE, "SUM")
    assert_close(
        {"sum": ours[0]}, {"sum": plain(inputs.hidden, inputs.weight, inputs.labels, TEMPERATURE, "sum")[0]}, 1e-12
    )


def test_an_ignored_label_gives_nothing_and_counts_in_the_mean():
    inputs = problem()
    inputs.labels[1, 2] = -100
    ours = run(linear_cross_entropy, inputs, 1.0, "none")
    assert ours["logprobs"][T + 2] == 0
    assert not ours["hidden"][1, 2].any()
    assert ours["hidden"][1, 3].any()
    mean = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, 1.0, "mean")[0]
    torch.testing.assert_close(mean, ours["logprobs"].sum() / N)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, "got reduction='max', want one of 'none', 'sum', 'mean'"),
        ({"reduction": None}, "got reduction=None"),
        ({"labels": torch.full((B, T), V)}, f"got target {V}"),
        ({"temperature": 0.0}, "got temperature=0.0"),
        ({"hidden": None}, "hidden of type NoneType, want a torch.Tensor"),
        ({"hidden": torch.tensor(1.0)}, r"got hidden \(\)"),
        ({"labels": [[0] * T] * B}, "labels of type list, want a torch.Tensor"),
        *[({"labels": torch.ones(B, T).to(x)}, f"labels of dtype {x}") for x in (torch.float32, torch.bool)],
        ({"dist_process_group": "tensor"}, "process_group of type str, want a torch.distributed.ProcessGroup"),
    ],
)
def test_what_cannot_be_right_is_refused(change, message):
    inputs = problem()
    arguments = {"hidden": inputs.hidden, "weight": inputs.weight, "labels": inputs.labels}
    with pytest.raises(InputError, match=message):
        linear_cross_entropy(**{**arguments, **change})


def test_of_a_shared_head_each_rank_returns_its_share(fork_server, tmp_path):
    """Megatron's sequence parallelism sums the gradient of `hidden` over the ranks, once, as verl leaves it to."""
    other_rank = fork_server.start(__file__, tmp_path)
    one = rank_of_two(0, tmp_path)
    assert other_rank.wait(timeout=60) == 0, other_rank.output
    other = torch.load(tmp_path / "other.pt", weights_only=True)
    assert all(torch.equal(one[name], other[name]) for name in ("logprobs", "entropy"))
    joined = {"hidden": one["hidden"] + other["hidden"], "weight": torch.cat([one["weight"], other["weight"]])}
    assert_close({**one, **joined}, run(plain, problem(), TEMPERATURE), 1e-12)


def rank_of_two(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """What a rank gets that has the first 30 rows of the head, or the others."""
    store, patience = f"file://{folder}/store", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    inputs = problem()
    shard = inputs.weight[30:] if rank else inputs.weight[:30]
    results = run(linear_cross_entropy, inputs, TEMPERATURE, "none", dist.group.WORLD, weight=shard)
    dist.destroy_process_group()
    return results


class LinearCrossEntropy(torch.autograd.Function):
    """Stands in for verl's: what calls it has not been patched."""

    @staticmethod
    def forward(ctx, *args):
        raise AssertionError("verl's own kernel was called")


# verl 0.9.1: who imports the name when, and how it is called.
MODULES = {
    "verl": "__version__ = '0.9.1'",
    "verl.utils": "",
    "verl.utils.kernel": "",
    "verl.utils.kernel.linear_cross_entropy": "linear_cross_entropy = LinearCrossEntropy.apply",
    "verl.models": "",
    "verl.models.mcore.model_forward_fused": """
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
def fused(hidden, weight, labels, temperature):
    return linear_cross_entropy(hidden, weight, labels, temperature, "none", None)
""",
    "verl.models.transformers.dense_common": """
def fused(hidden, weight, labels, temperature):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
    return linear_cross_entropy(hidden, weight, labels, temperature, "none")
""",
}
SITES = [name for name in MODULES if "fused" in MODULES[name]]
HOME = "verl.utils.kernel.linear_cross_entropy"


def stand_in(name: str, patch: pytest.MonkeyPatch, source: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__, module.LinearCrossEntropy = [], LinearCrossEntropy
    patch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), vars(module))
    return module


@pytest.fixture
def verl(monkeypatch) -> dict[str, ModuleType]:
    return {name: stand_in(name, monkeypatch, source) for name, source in MODULES.items()}


@pytest.mark.parametrize("site", SITES)
def test_inside_verls_calls_are_ours_and_outside_they_are_verls(verl, site):
    inputs, call = problem(), verl[site].fused
    verl_function = verl[HOME].linear_cross_entropy
    with patched():
        assert_close(run(call, inputs, TEMPERATURE), run(plain, inputs, TEMPERATURE), 1e-12)
    assert verl[HOME].linear_cross_entropy is verl_function
    with pytest.raises(AssertionError, match="verl's own kernel"):
        run(call, inputs, TEMPERATURE)


def test_what_was_imported_inside_gets_verls_function_back(verl, monkeypatch):
    verl_function = verl[HOME].linear_cross_entropy
    with contextlib.suppress(KeyError), patched():
        late = stand_in("late", monkeypatch, f"from {HOME} import linear_cross_entropy as fused_head")
        assert late.fused_head is not verl_function
        raise KeyError
    assert late.fused_head is verl_function


def test_other_names_and_our_own_function_are_left_alone(verl, monkeypatch):
    verl_function, kept = verl[HOME].linear_cross_entropy, stand_in("kept", monkeypatch, "")
    kept.verl_function, kept.linear_cross_entropy = verl_function, linear_cross_entropy
    with patched():
        assert kept.verl_function is verl_function
    assert kept.linear_cross_entropy is linear_cross_entropy is integration.linear_cross_entropy


def test_one_in_another_and_one_that_is_not_kept(verl):
    verl_function, patch = verl[HOME].linear_cross_entropy, patched()
    with patch, patch:
        pass
    assert verl[HOME].linear_cross_entropy is verl_function
    patched().__enter__()
    assert verl[HOME].linear_cross_entropy is not verl_function


def test_without_verl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(UnavailableError, match=r"got no module 'verl.*pip install 'verl>=0.5,<0.10'"), patched():
        pass


@pytest.mark.parametrize("version", ["0.4.1", "0.10.0", "1.0.0.dev0"])
def test_a_release_that_was_not_checked_is_refused_and_left_as_it_is(verl, version):
    verl_function, verl["verl"].__version__ = verl[HOME].linear_cross_entropy, version
    with pytest.raises(UnavailableError, match=rf"got verl {version}, want >=0.5,<0.10"), patched():
        pass
    assert verl["verl.models.mcore.model_forward_fused"].linear_cross_entropy is verl_function


def test_a_verl_that_does_not_import_is_told_from_none(monkeypatch):
    class Broken:
        def find_spec(self, name, *_):
            if name == "verl":
                raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    with (
        pytest.raises(UnavailableError, match="verl is installed but does not import: No module named 'ray'"),
        patched(),
    ):
        pass


def test_importing_the_integration_imports_neither_verl_nor_transformers(fork_server, tmp_path):
    (tmp_path / "probe.py").write_text(
        "import sys, fused_grpo.integrations.verl; print({'verl', 'transformers', 'triton'} & set(sys.modules))"
    )
    assert fork_server.run(tmp_path / "probe.py", stage="torch").strip() == "set()"


def test_the_example_agrees_with_the_logits_and_stays_below_them(fork_server):
    shown = fork_server.run(ROOT / "examples" / "verl_drop_in.py", env={"TRITON_INTERPRET": "0"}, stage="libraries")
    assert float(shown.split("log_softmax of the logits: ")[1].split()[0]) < 1e-5
    logits, allocated = (float(shown.split(start)[1].split()[0]) for start in ("32000], ", "included: "))
    assert allocated < logits / 2


if __name__ == "__main__":
    torch.save(rank_of_two(1, Path(sys.argv[1])), Path(sys.argv[1]) / "other.pt")
