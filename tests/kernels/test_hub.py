"""`kernels/` as a repository of the Kernel Hub: laid out by scripts/build_kernel.py, loaded by HF's own `kernels`.

Nothing here reaches the Hub. What it would serve is a folder, and `get_local_kernel` reads the same folder by the same
rules: a variant for this machine's backend, metadata, then an import under the id that the metadata gives.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_grpo import kernels as ours

pytest.importorskip("kernels._rust", reason="Hugging Face's kernels is not installed")
hub = importlib.import_module("kernels")

pytestmark = pytest.mark.cpu_only(reason="it is about a package, whose kernels are those of the other tests")
ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "kernels"
BUILD = tomllib.loads((PROJECT / "build.toml").read_text())
PACKAGE = BUILD["general"]["name"].replace("-", "_")
R, V, D = 5, 130, 24

spec = importlib.util.spec_from_file_location("build_kernel", ROOT / "scripts" / "build_kernel.py")
build_kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_kernel)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "repository"
    command = [sys.executable, str(ROOT / "scripts" / "build_kernel.py"), str(out), "--repo-id", "someone/grpo"]
    subprocess.run(command, check=True)
    return out


@pytest.fixture(scope="module")
def loaded(repository: Path) -> ModuleType:
    """The CUDA variant, by its folder: no variant is for a CPU, where only Triton's interpreter runs it."""
    return hub.get_local_kernel(repository / "build" / "torch-cuda")


def rows(names: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "hidden": torch.randn(R, D, generator=generator),
        "weight": torch.randn(V, D, generator=generator),
        "targets": torch.tensor([0, 63, 64, 129, -1]),
        "temperature": 0.5 + torch.rand(R, generator=generator),
        "bias": torch.randn(V, generator=generator),
        "grad_logprobs": torch.randn(R, generator=generator),
        "grad_entropy": torch.randn(R, generator=generator),
    }
    return {name: tensors[name] for name in names.split()} if names else tensors


OPTIONS: dict[str, Any] = {**rows("temperature bias"), "softcap": 3.0, "logit_scale": 0.7}


def head(module: ModuleType, run: str) -> list[Tensor | None]:
    x = rows("hidden weight targets")
    if run == "logprob_forward":
        logprobs, entropy, state = module.logprob_forward(*x.values(), entropy=True, **OPTIONS)
        return [logprobs, entropy, *state]
    logits = x["hidden"] @ x["weight"].T
    return list(getattr(module, run)(logits, x["targets"], entropy=True, **OPTIONS))


def weights(module: ModuleType) -> list[Tensor | None]:
    weights, scale, known = head(module, "softmax_weights_")
    return [weights, scale, *known]


def finished(module: ModuleType) -> list[Tensor | None]:
    parts = [head(module, "row_statistics"), head(module, "logprob_forward")[2:]]
    return list(module.finish_rows(parts, entropy=True))


def gradient(module: ModuleType) -> list[Tensor | None]:
    *_, known = head(module, "softmax_weights_")
    x = rows("hidden weight targets grad_logprobs grad_entropy")
    given = {"known": known, **{name: x[name] for name in ("grad_logprobs", "grad_entropy")}}
    logits = x["hidden"] @ x["weight"].T
    return [module.logits_gradient_(logits, x["targets"], dtype=torch.float16, **given, **OPTIONS)]


def scaled(module: ModuleType) -> list[Tensor | None]:
    x = rows("hidden temperature grad_logprobs")
    return list(module.scale_hidden(x["hidden"], x["temperature"], x["grad_logprobs"]))


def tile(module: ModuleType) -> list[Tensor | None]:
    return [torch.tensor(module.empty_tile(R, V, dtype=torch.float32, device=torch.device("cpu")).stride())]


def loss(module: ModuleType) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(4)
    names = ("advantages", "weights", "old_logprobs", "ref_logprobs", "sampling_logprobs", "entropy", "entropy_weights")
    inputs = {name: torch.randn(R, generator=generator) for name in names} | {"mask": torch.arange(R) != 2}
    terms = ("clipped", 0.2, 0.28, 3.0, (1.0, 1.05), 0.1, "k3", True, "truncate", None, 2.0)
    ratio = torch.randn(R, generator=generator)
    return list(module.grpo_token_loss(-ratio.abs(), log_ratio=ratio, inputs=inputs, terms=terms))


def statistics(module: ModuleType) -> list[Tensor | None]:
    return list(module.token_statistics([loss(module)[-1]]).values())


CALLS: dict[str, Callable[[ModuleType], list[Tensor | None]]] = {
    "logprob_forward": lambda module: head(module, "logprob_forward"),
    "row_statistics": lambda module: head(module, "row_statistics"),
    "finish_rows": finished,
    "logits_gradient_": gradient,
    "softmax_weights_": weights,
    "scale_hidden": scaled,
    "scale_": lambda module: [module.scale_(rows()["hidden"], torch.tensor(0.7))],
    "empty_tile": tile,
    "grpo_token_loss": loss,
    "token_statistics": statistics,
}


def same_bits(one: list[Tensor | None], other: list[Tensor | None]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine is not None
        assert theirs is not None
        assert not mine.isnan().all()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_every_launcher_gives_the_bits_of_the_package(loaded: ModuleType, name: str) -> None:
    same_bits(CALLS[name](loaded), CALLS[name](ours))


def test_no_launcher_is_missing_here(loaded: ModuleType) -> None:
    assert set(loaded.__all__) == set(ours.__all__) == {*CALLS, "is_available", "prefers_tiles"}
    assert loaded.is_available() == ours.is_available()
    assert loaded.prefers_tiles(rows()["hidden"]) == ours.prefers_tiles(rows()["hidden"])


def test_loaded_log_probs_are_those_of_plain_torch(loaded: ModuleType, oracle: Any, head_options: Any) -> None:
    x, options = rows("hidden weight"), head_options(R, V, "bias softcap scale temperature")
    targets = torch.tensor([0, 63, 64, 129, 7])
    logprobs, entropy, _ = loaded.logprob_forward(*x.values(), targets, entropy=True, **options)
    plain, exact = (
        oracle.statistics(h @ w.T, targets, **options)
        for h, w in (tuple(x.values()), tuple(y.double() for y in x.values()))
    )
    for mine, torchs, wanted in zip((logprobs, entropy), plain, exact, strict=True):
        oracle.assert_as_exact_as_torch(mine, torchs, wanted, magnitude=10)


@pytest.mark.parametrize(("backend", "cuda", "hip"), [("cuda", "12.8", None), ("rocm", None, "7.1.25424")])
def test_a_gpu_finds_its_variant(
    repository: Path, monkeypatch: pytest.MonkeyPatch, backend: str, cuda: str | None, hip: str | None
) -> None:
    """As `kernels` would choose on a machine whose torch is built for that backend."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    module = hub.get_local_kernel(repository)
    assert Path(module.__file__) == repository / "build" / f"torch-{backend}" / "__init__.py"
    same_bits(loss(module), loss(ours))


def test_a_cpu_is_told_why_it_finds_none(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(FileNotFoundError, match=r"torch-cuda: backend \(cuda\) does not match system backend \(cpu\)"):
        hub.get_local_kernel(repository)


def test_copies_share_no_module(repository: Path, loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    other = hub.get_local_kernel(repository / "build" / "torch-rocm")
    before = head(ours, "row_statistics")
    assert len({module.__name__ for module in (loaded, other, ours)}) == 3
    broken = sys.modules[f"{loaded.__name__}.softmax_weights"]
    monkeypatch.setattr(broken, "_softmax_weights_kernel", None)
    with pytest.raises(TypeError):
        head(loaded, "row_statistics")
    for module in (other, ours):
        same_bits(head(module, "row_statistics"), before)


def test_a_plain_import_finds_the_package(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(repository / "build" / "torch-rocm")
    module = importlib.import_module(PACKAGE)
    del sys.modules[PACKAGE]
    assert set(ours.__all__) <= set(vars(module))
    same_bits(weights(module), weights(ours))


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
    of_cuda = {f"sm_{capability.replace('.', '')}" for capability in BUILD["torch-noarch"]["cuda_capabilities"]}
    tabled = set(ours.tuning.HALF) - {"default", "interpreter"}
    assert of_cuda | set(BUILD["torch-noarch"]["rocm_archs"]) == tabled


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


def test_nothing_is_written_over(repository: Path) -> None:
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
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout
