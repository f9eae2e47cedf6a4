"""`kernels/` as a repository of the Kernel Hub: built by scripts/build_kernel.py, loaded by HF's own `kernels`.

No test connects to the Hub. The Hub serves a folder, and `get_local_kernel` reads such a folder by the same rules: a
variant for the backend of this machine, metadata, then an import under the id in the metadata.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import build_kernel
import pytest
import torch
from torch import Tensor

from fused_grpo import GRPOLossConfig
from fused_grpo import kernels as ours
from fused_grpo.config import TokenTerms

pytest.importorskip("kernels._rust", reason="Hugging Face's kernels is not installed")
hub = importlib.import_module("kernels")

pytestmark = pytest.mark.cpu_only(reason="it is about a package, whose kernels are those of the other tests")
ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "kernels"
BUILD = tomllib.loads((PROJECT / "build.toml").read_text())
PACKAGE = BUILD["general"]["name"].replace("-", "_")
R, V, D = 5, 130, 24


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "repository"
    command = [sys.executable, str(ROOT / "scripts" / "build_kernel.py"), str(out), "--repo-id", "someone/grpo"]
    subprocess.run(command, check=True)
    return out


@pytest.fixture(scope="module")
def loaded(repository: Path) -> ModuleType:
    """The CUDA variant, by its folder: there is no variant for CPUs, where Triton's interpreter runs it."""
    return hub.get_local_kernel(repository / "build" / "torch-cuda")


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(R, D, generator=generator), torch.randn(V, D, generator=generator)
    return hidden, weight, torch.tensor([0, 63, 64, 129, 7])


def logprobs(module: ModuleType) -> Tensor:
    """From one launcher that uses most of the modules of the package."""
    return module.logprob_forward(*problem(), temperature=torch.ones(R))[0]


def assert_same_bits(module: ModuleType) -> None:
    torch.testing.assert_close(logprobs(module), logprobs(ours), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BUILD["general"]["backends"])
def test_every_source_is_that_of_the_package(repository: Path, backend: str) -> None:
    sources = {path.name: path.read_bytes() for path in (PROJECT / "torch-ext" / PACKAGE).glob("*.py")}
    variant = repository / "build" / f"torch-{backend}"
    assert {path.name: path.read_bytes() for path in variant.glob("*.py")} == sources


def test_what_is_loaded_has_every_launcher(loaded: ModuleType) -> None:
    assert set(loaded.__all__) == set(ours.__all__)
    assert loaded.is_available() == ours.is_available()
    assert_same_bits(loaded)


def test_loaded_log_probs_are_those_of_plain_torch(loaded: ModuleType, independent: Any, head_options: Any) -> None:
    (hidden, weight, targets), options = problem(), head_options(R, V, "bias softcap scale temperature")
    ours = loaded.logprob_forward(hidden, weight, targets, entropy=True, **options)[:2]
    plain, exact = (
        independent.statistics(x @ w.T, targets, **options)
        for x, w in ((hidden, weight), (hidden.double(), weight.double()))
    )
    for actual, torchs, wanted in zip(ours, plain, exact, strict=True):
        independent.assert_as_exact_as_torch(actual, torchs, wanted, magnitude=10)


@pytest.mark.parametrize(("backend", "cuda", "hip"), [("cuda", "12.8", None), ("rocm", None, "7.1.25424")])
def test_a_gpu_finds_its_variant(
    repository: Path, monkeypatch: pytest.MonkeyPatch, backend: str, cuda: str | None, hip: str | None
) -> None:
    """As `kernels` would choose on a machine whose torch is built for that backend."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    module = hub.get_local_kernel(repository)
    assert Path(module.__file__) == repository / "build" / f"torch-{backend}" / "__init__.py"
    assert_same_bits(module)


def test_on_a_cpu_the_error_says_why(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(FileNotFoundError, match=r"torch-cuda: backend \(cuda\) does not match system backend \(cpu\)"):
        hub.get_local_kernel(repository)


WITHOUT_A_GPU = """
import ast, sys, torch
from kernels import get_local_kernel
from pathlib import Path
kernels = get_local_kernel(Path(sys.argv[1]))
ones, some, ids = torch.ones(5), torch.ones(5, 5), torch.arange(5)
of_rows = {"temperature": ones}
calls = {
    "logprob_forward": lambda f: f(some, some, ids, **of_rows),
    "row_statistics": lambda f: f(some, ids, **of_rows),
    "softmax_weights_": lambda f: f(some, ids, **of_rows),
    "finish_rows": lambda f: f([(ones, ones, ones, ones)], entropy=True),
    "logits_gradient_": lambda f: f(
        some, ids, statistics=(ones,) * 4, grad_logprobs=ones, grad_entropy=None, **of_rows
    ),
    "divergence_gradient_": lambda f: f(
        some, some, kind="jsd", beta=0.5, upstream=ones, student_head=of_rows, teacher_head=of_rows
    ),
    "Divergence": lambda f: f(
        some, some, kind="jsd", beta=0.5, student_head=of_rows, teacher_head=of_rows, targets=ids
    ).divergence,
    "grpo_token_loss": lambda f: f(ones, inputs=dict.fromkeys(["advantages", "weights", "mask"], ones), terms=TERMS),
    "softmax_weights_forward": lambda f: f(some, some, ids, out=some, **of_rows),
    "prefers_tiles": lambda f: f(some),
    "clean_targets": lambda f: f(ids, ignore_index=-100, vocab_size=5),
    "prefers_softmax_weights": lambda f: f(some, some, 5),
    "scale_": lambda f: f(some, ones[0]),
    "scale_hidden": lambda f: f(some, ones, ones),
    "entry_logits": lambda f: f(some, some, ids, ids, dtype=some.dtype),
    "weighted_rows_": lambda f: f(some, ids[:1], 5 * ids[:2], ids, ones, some, cast=some.dtype),
}
TERMS = ast.literal_eval(sys.argv[2])
assert not kernels.is_available()[0]
assert calls.keys() | {"is_available", "empty_tile", "token_statistics"} == {*kernels.__all__}
for name, call in calls.items():
    try:
        call(getattr(kernels, name))
        print(name, "ran")
    except RuntimeError as error:
        assert str(error).startswith("got tensors on cpu, want them on a CUDA or ROCm device"), (name, error)
        assert "; fix: " in str(error)
"""


def test_without_a_gpu_every_launcher_says_so(repository: Path) -> None:
    """Not with the compiler's or the driver's own errors."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    terms = repr(tuple(TokenTerms.of(GRPOLossConfig())))
    command = [sys.executable, "-c", WITHOUT_A_GPU, str(repository / "build" / "torch-cuda"), terms]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (0, ""), process.stdout + process.stderr


def test_copies_share_no_module(repository: Path, loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    other = hub.get_local_kernel(repository / "build" / "torch-rocm")
    assert len({module.__name__ for module in (loaded, other, ours)}) == 3
    monkeypatch.setattr(sys.modules[f"{loaded.__name__}.logprob_forward"], "_logprob_forward_kernel", None)
    with pytest.raises(TypeError):
        logprobs(loaded)
    assert_same_bits(other)


def test_a_plain_import_finds_the_package(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(repository / "build" / "torch-rocm")
    module = importlib.import_module(PACKAGE)
    del sys.modules[PACKAGE]
    assert set(ours.__all__) <= set(vars(module))
    assert_same_bits(module)


@pytest.mark.parametrize("backend", BUILD["general"]["backends"])
def test_metadata_is_that_of_build_toml(repository: Path, backend: str) -> None:
    variant, general, archs = repository / "build" / f"torch-{backend}", BUILD["general"], BUILD["torch-noarch"]
    metadata = hub.Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version) == (general["name"], general["version"])
    assert (metadata.license, metadata.name.python_name) == (general["license"], PACKAGE)
    assert re.fullmatch(rf"_{PACKAGE}_{backend}_[0-9a-f]{{7}}", metadata.id)
    assert str(metadata.backend.backend_type) == backend
    assert metadata.backend.archs == archs["cuda_capabilities" if backend == "cuda" else "rocm_archs"]
    assert metadata.python_depends == metadata.kernel_depends == []


def test_digests_are_the_hubs(repository: Path, tmp_path: Path) -> None:
    from kernels._rust import Digest, DigestValidationError

    variant = repository / "build" / "torch-cuda"
    digest = hub.Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(digest.algorithm, variant))
    assert len(digest.files) == len(list((PROJECT / "torch-ext" / PACKAGE).glob("*.py"))) + 1
    copy = shutil.copytree(variant, tmp_path / "copy")
    (copy / "tuning.py").write_text("# not what was built\n")
    with pytest.raises(DigestValidationError, match=r"hash mismatch for tuning\.py"):
        digest.validate(Digest.hash_variant(digest.algorithm, copy))


def test_build_toml_is_what_their_parser_takes() -> None:
    from kernels._rust import Build

    backends = Build.open(PROJECT).general.backends
    assert [str(backend) for backend in backends] == BUILD["general"]["backends"]


def test_the_declared_architectures_are_those_with_tile_tables() -> None:
    cuda_archs = {f"sm_{capability.replace('.', '')}" for capability in BUILD["torch-noarch"]["cuda_capabilities"]}
    tabled = set(ours.tuning.HALF) - {"default", "interpreter"}
    assert cuda_archs | set(BUILD["torch-noarch"]["rocm_archs"]) == tabled


def test_same_sources_same_bytes_and_other_sources_another_id(repository: Path, tmp_path: Path) -> None:
    project = shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    build_kernel.build(project, tmp_path / "same", "someone/grpo")
    one, two = (build_kernel.hashes(folder) for folder in (repository, tmp_path / "same"))
    assert one == two
    with (project / "torch-ext" / PACKAGE / "tuning.py").open("a") as file:
        file.write("# changed\n")
    build_kernel.build(project, tmp_path / "other")
    ids = {
        hub.Metadata.read_from_file(folder / "build" / "torch-cuda" / "metadata.json").id
        for folder in (tmp_path / "same", tmp_path / "other")
    }
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[torch-noarch]", "[torch]", "torch-noarch"),
        ("edition = 5", "edition = 6", "edition 6"),
        ("license =", "python-depends = []\nlicense =", "python-depends"),
        ('license = "Apache-2.0"\n', "", "license"),
        ('"rocm",', '"xpu",', "xpu"),
        ("fused-grpo-kernels", "another-name", "no package at"),
    ],
)
def test_a_project_it_cannot_lay_out_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    project = shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    text = (project / "build.toml").read_text()
    assert old in text
    (project / "build.toml").write_text(text.replace(old, new))
    with pytest.raises(SystemExit, match=f"got .*{complaint}.*; fix: "):
        build_kernel.build(project, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_file_is_overwritten(repository: Path) -> None:
    with pytest.raises(SystemExit, match="not empty; fix: remove it"):
        build_kernel.build(PROJECT, repository)


def test_the_card_names_every_launcher_and_fills_its_blanks(repository: Path, tmp_path: Path) -> None:
    card = (repository / "build" / "CARD.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", card, re.MULTILINE)) == sorted(ours.__all__)
    assert f'get_kernel("someone/grpo", version={BUILD["general"]["version"]}, ' in card
    assert f"license: {BUILD['general']['license'].lower()}\n" in card
    project = shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "CARD.md").write_text("{{ functions }}")
    with pytest.raises(SystemExit, match=r"unknown blank in CARD\.md; fix: "):
        build_kernel.build(project, tmp_path / "out")


def test_the_cards_example_runs(repository: Path, tmp_path: Path) -> None:
    """As it stands but for the device, the dtype and the sizes: interpreted on a CPU, the folder in the Hub's place."""
    (example,) = re.findall(r"```python\n(.*?)```", (repository / "build" / "CARD.md").read_text(), re.DOTALL)
    for old, new in (('"cuda", torch.bfloat16', '"cpu", torch.float32'), ("256, 1024, 32000", "5, 16, 40")):
        assert old in example
        example = example.replace(old, new)
    check = "\nassert torch.allclose(logprobs, torch.log_softmax(hidden @ weight.T, -1)[range(N), targets], atol=1e-5)"
    variant = repository / "build" / "torch-cuda"
    env = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"someone/grpo={variant}"}
    command = [sys.executable, "-W", "error", "-c", example + check]
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "tensor(" in process.stdout
