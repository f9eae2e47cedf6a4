"""A misspelled pass, a wrong argument and a wrong field are found by `make check`: the seams of the house are types."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GRADIENTS, LOSS, ROWS = "head/head.py", "head/chunked_loss.py", "passes/torch_passes/row_passes.py"
# What is wrong -> (file of fused_grpo, what is there, what is planted).
SLIPS = {
    "a pass's name": (GRADIENTS, "passes.scale_hidden(hidden", "passes.scale_hiden(hidden"),
    "too few arguments of a pass": (GRADIENTS, "scale_hidden(hidden, scale, grad", "scale_hidden(hidden, grad"),
    "an option of the gradients": (LOSS, "every_row=one_group", "evry_row=one_group"),
    "a field of a plan": (LOSS, "plan.chunk_bytes)", "plan.chunk_byte)"),
    "a plan that is left out": ("fused_loss.py", "config, passes, plan, Beside", "config, passes, Beside"),
    "an argument of another type": (
        "head/registered_ops.py",
        "forward(head.select(index), passes",
        "forward(index, passes",
    ),
    "a field of what was seen": (LOSS, "seen.statistics.logprobs, seen", "seen.statistics.logprob, seen"),
    "the transform of a tile": (GRADIENTS, "**tile.transform\n            )", "**tile.arguments\n            )"),
    "a field of the transform": ("head/several_targets.py", 'transform["temperature"]', 'transform["temprature"]'),
    "an option of the head": ("divergence.py", "HeadOptions(student_bias", "HeadOptions(student_bias, None"),
    "a gradient that is wanted": ("head/chunked_divergence.py", "any(wanted) else", "wanted.weigth else"),
    "a pass that only kernels have": (ROWS, "def scale_(values", "def scale(values"),
    "an option of the loss that is assigned": (
        "config.py",
        "object.__setattr__(self, name, value)\n\n    def _check",
        "self.sampling_clip_min = 0.5\n\n    def _check",
    ),
    "an option that the trainer gives the loss": (
        "trainer/config/grpo_config.py",
        "options, max_completion_length=",
        "options, length=",
    ),
    "an argument that only kernels have": (ROWS, "    statistics: Statistics,\n", "    seen: Statistics,\n"),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is checked, with what the checker remembers of it."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("fused_grpo", "kernels", "trainer", "bench", ".mypy_cache"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    assert check(folder).returncode == 0
    return folder


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mypy"], cwd=folder, capture_output=True, text=True, timeout=600)


def test_what_is_replaced_is_there_once() -> None:
    counts = {name: (ROOT / "fused_grpo" / file).read_text().count(there) for name, (file, there, _) in SLIPS.items()}
    assert counts == dict.fromkeys(SLIPS, 1)


@pytest.mark.full
@pytest.mark.parametrize("name", SLIPS)
def test_the_type_checker_finds_it(house: Path, name: str) -> None:
    file, there, slip = SLIPS[name]
    path = house / "fused_grpo" / file
    text = path.read_text()
    assert text.count(there) == 1
    path.write_text(text.replace(there, slip))
    try:
        checked = check(house)
        assert checked.returncode == 1, checked.stdout
        assert "error: " in checked.stdout
    finally:
        path.write_text(text)
