"""The kernel folder stands alone: it can be published to the Kernel Hub as it is."""

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from device_under_test import NAME

from fused_grpo import kernels

reads_files = pytest.mark.cpu_only(reason="it looks at files")
PROJECT = Path(kernels.__file__).resolve().parents[2]
SOURCES = sorted(Path(kernels.__file__).resolve().parent.glob("*.py"))


@reads_files
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_imports_are_torch_triton_standard_or_relative(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] in {"torch", "triton"} | sys.stdlib_module_names
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= {"torch", "triton"}


@reads_files
def test_kernels_folder_is_a_project_and_no_package() -> None:
    build = tomllib.loads((PROJECT / "build.toml").read_text())
    module = build["general"]["name"].replace("-", "_")
    assert (PROJECT / "torch-ext" / module / "__init__.py").is_file()
    assert not (PROJECT / "__init__.py").exists()


def test_availability_comes_with_its_reason() -> None:
    available, reason = kernels.is_available()
    assert available
    assert torch.cuda.get_device_name() == reason if NAME == "cuda" else "TRITON_INTERPRET" in reason


# NumPy, under the interpreter, warns of the NaN that this test puts there.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_in_an_input_is_not_hidden(head_options: Any) -> None:
    hidden, weight, targets = torch.ones(2, 16), torch.ones(40, 16), torch.tensor([0, 39])
    hidden[1, 3] = float("nan")
    for result in kernels.logprob_forward(hidden, weight, targets, entropy=True, **head_options(2, 40))[:2]:
        assert result is not None
        assert result.isnan().tolist() == [False, True]
