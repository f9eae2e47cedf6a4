"""The package as it is installed: what the wheel holds, what an import costs, whose name is whose."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[list[str], list[str]]:
    """The file names in the wheel and in the sdist, built as a user's pip would."""
    out = tmp_path_factory.mktemp("dist")
    backend = (
        "import setuptools.build_meta as b, sys; sys.argv[1:] or 0; "
        f"b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    )
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={out}/tree/"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-c", backend], cwd=out / "tree", check=True, capture_output=True)
    wheel, sdist = next(out.glob("*.whl")), next(out.glob("*.tar.gz"))
    return zipfile.ZipFile(wheel).namelist(), tarfile.open(sdist).getnames()


def test_the_wheel_holds_only_fused_grpo_with_all_three_floors(archives):
    wheel, _ = archives
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fused_grpo"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trainer").rglob("*.py")}
    assert {f"fused_grpo/{name}" for name in sources} <= set(wheel)
    for name in ("py.typed", "fused_loss.py", "kernels/logprob_forward.py", "trainer/recipes/demo.yaml"):
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
    theirs = tmp_path / "kernels" / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    here = subprocess.check_output(
        [sys.executable, "-c", probe], cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, text=True
    )
    assert here.strip() == str(theirs)


def test_importing_is_cheap_and_lazy():
    """At most 150 ms over `import torch`, the best of five; no Triton, vLLM or transformers."""
    probe = (
        "import sys, time, json, torch; before = set(sys.modules); t = time.perf_counter(); import fused_grpo; "
        "s = time.perf_counter() - t; new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(json.dumps([s, sorted(new & {'triton', 'vllm', 'transformers', 'datasets', 'accelerate'})]))"
    )
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", probe], cwd=ROOT)) for _ in range(5)]
    print(f"import fused_grpo: {min(seconds for seconds, _ in runs) * 1e3:.1f} ms over import torch")
    assert min(seconds for seconds, _ in runs) <= 0.150
    assert all(heavy == [] for _, heavy in runs)


def test_the_first_op_brings_in_no_trainer():
    op = "fused_grpo.linear_logprobs(torch.randn(2, 3), torch.randn(4, 3), torch.tensor([1, 2]))"
    probe = f"import sys, torch, fused_grpo; {op}; assert not {{'vllm', 'transformers', 'datasets'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True)


def test_every_public_name_is_there():
    import fused_grpo

    assert sorted(fused_grpo.__all__) == fused_grpo.__all__
    for name in fused_grpo.__all__:
        assert getattr(fused_grpo, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fused_grpo.nothing


def test_the_house_rules_hold():
    subprocess.run([sys.executable, ROOT / "scripts" / "house_style.py"], check=True)
