"""The package as it is installed: what the wheel holds, what an import costs, whose name is whose."""

import ast
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from bare_venv import bare_venv, link, site_packages
from packaging.requirements import Requirement

from fused_grpo.trainer import EXTRA

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, built as a user's pip would."""
    out = tmp_path_factory.mktemp("dist")
    backend = (
        "import setuptools.build_meta as b, sys; sys.argv[1:] or 0; "
        f"b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    )
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={out}/tree/"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-c", backend], cwd=out / "tree", check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def archives(built) -> tuple[list[str], list[str]]:
    """The file names in both."""
    wheel, sdist = next(built.glob("*.whl")), next(built.glob("*.tar.gz"))
    return zipfile.ZipFile(wheel).namelist(), tarfile.open(sdist).getnames()


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory) -> Path:
    """An environment with the wheel, torch, triton and what those two need: `--no-index` can fetch nothing more."""
    folder = bare_venv(tmp_path_factory.mktemp("bare"), "torch", "triton")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-index", "--quiet"]
    subprocess.run([*pip, str(next(built.glob("*.whl")))], check=True)
    return folder


def in_bare(bare: Path, *command: str | Path, **environment: str) -> str:
    """What a command of that environment prints, to either stream."""
    env = {"PATH": f"{bare / 'bin'}:/usr/bin:/bin", "HOME": str(bare), **environment}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=bare, env=env, **both, text=True, timeout=120).stdout


RECIPES = ("trainer/recipes/demo.yaml", "trainer/recipes/base_model.safetensors")
BARE = ROOT / "tests" / "bare_environment.py"


def test_torch_and_triton_are_all_that_the_ops_need(bare):
    assert in_bare(bare, "python", "-W", "ignore", BARE, "ops") == ""
    assert "'fused-grpo[trainer]'" in in_bare(bare, "fused-grpo", "train")
    assert "torch" in in_bare(bare, "fused-grpo", "env")


def test_integrations_and_trainer_say_what_they_want(bare):
    lines = in_bare(bare, "python", "-W", "ignore", BARE, "integrations").splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert {name for name in said if said[name] == "imported"} == {
        "liger",
        "logit_transform",
        "model_head",
        "model_modes",
        "speculative",
        "verl",
    }
    for name in ("transformers", "trl"):
        assert re.match(rf"got no {name}, want {name}.*; fix: pip install '{name}", said[name]), said
    config, trainer = in_bare(bare, "python", "-W", "ignore", BARE, "trainer").splitlines()
    assert config == "GRPOConfig: imported"
    assert re.match(r"GRPOTrainer: got no \w+ in this .* fix: pip install 'fused-grpo\[trainer\]'", trainer), trainer


def test_the_interpreter_wants_numpy_and_says_so(bare):
    asked = in_bare(bare, "python", "-W", "ignore", BARE, "ops", TRITON_INTERPRET="1")
    assert "needs NumPy, which is not installed (pip install numpy)" in asked
    link("numpy", site_packages(bare))
    assert in_bare(bare, "python", "-W", "ignore", BARE, "ops", TRITON_INTERPRET="1") == ""


def test_the_trainers_imports_are_those_of_its_extra():
    """What `import` may bring in at the trainer's floor, and what the extra installs."""
    names = set[str]()
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    # NumPy and packaging come with transformers, psutil with Accelerate.
    brought = sys.stdlib_module_names | {"fused_grpo", "torch", "numpy", "packaging", "psutil"}
    assert {name.split(".")[0] for name in names} - brought <= EXTRA
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {
        Requirement(line).name.lower().replace("pyyaml", "yaml") for line in project["optional-dependencies"]["trainer"]
    }
    assert extra == EXTRA
    assert {Requirement(line).name for line in project["dependencies"]} == {"torch", "triton"}


def test_the_wheel_holds_only_fused_grpo_with_all_three_floors(archives):
    wheel, _ = archives
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fused_grpo"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fused_grpo").rglob("*.py")}
    for floor in ("kernels", "trainer", "bench"):
        folder = (ROOT / "fused_grpo" / floor).resolve()
        paths = [path for data in ("*.py", "templates/*", "config/*.json") for path in folder.rglob(data)]
        sources |= {f"fused_grpo/{floor}/{path.relative_to(folder).as_posix()}" for path in paths}
    assert sources <= set(wheel)
    for name in ("py.typed", "fused_loss.py", "kernels/logprob_forward.py", *RECIPES):
        assert f"fused_grpo/{name}" in wheel


def test_the_sdist_holds_the_same_package_and_nothing_else(archives):
    wheel, sdist = archives
    inside = {name.partition("/")[2] for name in sdist}
    assert {name for name in wheel if ".dist-info" not in name} <= inside
    folders = {name.split("/")[0] for name in inside if "/" in name}
    assert folders == {"fused_grpo", "fused_grpo.egg-info"}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= inside


def test_the_name_kernels_is_left_to_others(tmp_path):
    """transformers imports a package of that name, Hugging Face's: ours must never stand before it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    probe = "import importlib.util as u; print((u.find_spec('kernels') or u).__dict__.get('origin'))"
    elsewhere = subprocess.check_output([sys.executable, "-c", probe], cwd=tmp_path, text=True)
    # The real one may be installed, in an environment inside the checkout.
    assert str(ROOT / "kernels") not in elsewhere
    assert str(ROOT / "fused_grpo") not in elsewhere
    other_package = tmp_path / "kernels" / "__init__.py"
    other_package.parent.mkdir()
    other_package.touch()
    here = subprocess.check_output(
        [sys.executable, "-c", probe], cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, text=True
    )
    assert here.strip() == str(other_package)


def test_importing_is_cheap_and_lazy(fork_server, tmp_path):
    """At most 150 ms over `import torch`, the best of five; no Triton, vLLM or transformers."""
    (tmp_path / "probe.py").write_text(
        "import sys, time, json, torch; before = set(sys.modules); t = time.perf_counter(); import fused_grpo; "
        "s = time.perf_counter() - t; new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(json.dumps([s, sorted(new & {'triton', 'vllm', 'transformers', 'datasets', 'accelerate'})]))"
    )
    runs = [json.loads(fork_server.run(tmp_path / "probe.py", stage="torch")) for _ in range(5)]
    print(f"import fused_grpo: {min(seconds for seconds, _ in runs) * 1e3:.1f} ms over import torch")
    assert min(seconds for seconds, _ in runs) <= 0.150
    assert all(heavy == [] for _, heavy in runs)


def test_the_first_op_brings_in_no_trainer(fork_server, tmp_path):
    op = "fused_grpo.linear_logprobs(torch.randn(2, 3), torch.randn(4, 3), torch.tensor([1, 2]))"
    probe = f"import sys, torch, fused_grpo; {op}; assert not {{'vllm', 'transformers', 'datasets'}} & set(sys.modules)"
    (tmp_path / "probe.py").write_text(probe)
    fork_server.run(tmp_path / "probe.py", stage="torch")


def test_every_public_name_is_there():
    import fused_grpo

    assert sorted(fused_grpo.__all__) == fused_grpo.__all__
    for name in fused_grpo.__all__:
        assert getattr(fused_grpo, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fused_grpo.nothing


def test_the_house_rules_hold():
    subprocess.run([sys.executable, ROOT / "scripts" / "house_style.py"], check=True)
