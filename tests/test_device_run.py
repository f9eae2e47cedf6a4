"""FUSED_GRPO_TEST_DEVICE: tensors go to the device and come back, and no test calls an op beside that."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import device_under_test
import pytest
import torch
from device_under_test import Trip, between, placed

from fused_grpo import kernels
from fused_grpo.passes import torch_passes

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ("tests/ops/test_grpo_loss.py", "tests/kernels/test_grpo_loss.py")
SOME = tuple(
    f"tests/{file}.py::test_{name}"
    for file, name in (
        ("ops/test_speculative", "the_speculated_loss"),
        ("ops/test_independent_ops", "ignored_rows_give_zero_and_no_gradient"),
        ("ops/test_extremes", "a_banned_target_has_no_probability_and_a_gradient"),
        ("kernels/test_logprob_forward", "single_token_vocabulary_is_certain"),
        ("kernels/test_row_passes", "gradients_of_each_option_alone"),
        ("kernels/test_row_passes", "without_a_gradient_a_row_is_zero_whatever_it_holds"),
        ("kernels/test_row_passes", "padding_beside_a_tile_is_neither_read_nor_written"),
        ("kernels/test_row_passes", "tiles_lie_as_gemms_like_them"),
    )
)


def pytest_on(device: str, *tests: str, seconds: int = 300) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FUSED_GRPO_TEST_DEVICE": device, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds)


def test_in_a_dry_run_every_op_and_pass_is_called_through_its_wrapper():
    process = pytest_on("cpu", *WHOLE, *SOME)
    assert process.returncode == 0, process.stdout
    (said,) = re.findall(r"^calls on cpu: (.*)$", process.stdout, re.MULTILINE)
    calls = Counter({name: int(count) for name, count in (call.split() for call in said.split(", "))})
    print(said)
    passes = {"row_statistics", "softmax_weights_", "logits_gradient_", "scale_hidden", "logprob_forward"}
    passes |= {"grpo_token_loss", "token_statistics"}
    assert passes <= set(kernels.__all__)
    ops = {"linear_logprobs", "linear_logprobs_and_entropy", "grpo_loss", "fused_linear_grpo_loss"}
    for name in {*passes, *ops, "speculative_logprobs"}:
        assert calls[name] > 0, name
    (without,) = re.findall(r"^tests without a call on cpu: (.*)$", process.stdout, re.MULTILINE)
    # It makes its memory on the device itself.
    assert without == "tests/kernels/test_row_passes.py::test_tiles_lie_as_gemms_like_them"


@pytest.mark.full
def test_every_test_of_ops_and_kernels_is_green_in_a_dry_run():
    process = pytest_on("cpu", "tests/ops", "tests/kernels", seconds=3600)
    assert process.returncode == 0, process.stdout[-5000:]


def test_without_a_gpu_the_tests_of_a_gpu_say_so():
    process = pytest_on("cuda", "tests/ops")
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert "got FUSED_GRPO_TEST_DEVICE=cuda, but torch" in process.stderr
    process = pytest_on("gpu", "tests/ops")
    assert "want cuda, or cpu for its dry run" in process.stderr


def strided() -> torch.Tensor:
    memory = torch.full((5, 12), torch.nan)
    memory[1:4, 2:10:2] = torch.arange(12.0).view(3, 4)
    return memory[1:4, 2:10:2]


def test_a_tensor_goes_with_its_strides_and_with_what_lies_around_it():
    tensor = strided()
    there = Trip().there({"x": [tensor]})["x"][0]
    assert there.data_ptr() != tensor.data_ptr()
    assert there.stride() == tensor.stride()
    assert torch.equal(there, tensor)
    around = placed(torch.empty(5, 12), there.untyped_storage())
    assert around.isnan().sum() == 48


def test_gradients_come_back_to_the_leaf():
    leaf = strided().clone().requires_grad_()
    results = between(lambda x: (x.square(), {"y": [x * 3]}))(leaf)
    assert results[0].data_ptr() != leaf.data_ptr()
    (results[0].sum() + results[1]["y"][0].sum()).backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach() + 3)


def test_what_is_written_in_place_is_written_here_too():
    tensor = strided()
    padded = placed(torch.empty(5, 12), tensor.untyped_storage())
    half = between(lambda x: x.mul_(2.0).view(x.shape)[:, :2])(tensor)
    torch.testing.assert_close(tensor, 2 * torch.arange(12.0).view(3, 4))
    assert half.data_ptr() == tensor.data_ptr()
    assert torch.equal(half, tensor[:, :2])
    assert padded.isnan().sum() == 48
    assert between(lambda x: x.add_(1))(tensor) is tensor
    assert tensor[0, 0] == 1


class Kept:
    """Keeps a tensor from one call to the next."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def pair(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tensor, other

    def add_(self, other: torch.Tensor) -> torch.Tensor:
        return self.tensor.add_(other)[1:]


def test_an_object_stays_there_and_what_its_methods_return_comes_back():
    tensor, other = torch.arange(3.0), torch.ones(3)
    kept = between(Kept)(tensor)
    inside = kept._itself
    assert inside.tensor.data_ptr() != tensor.data_ptr()
    returned = kept.pair(other)
    assert [x is y for x, y in zip(returned, (tensor, other), strict=True)] == [True, True]
    inside.pair = lambda x: x.data_ptr() != other.data_ptr()
    assert kept.pair(other)
    assert kept.add_(other).data_ptr() == tensor[1:].data_ptr()
    assert tensor.tolist() == [1.0, 2.0, 3.0]
    assert kept.tensor is tensor


def test_calls_within_the_package_stay_as_they_are(monkeypatch):
    seen = []
    monkeypatch.setattr(torch_passes, "probe", between(seen.append), raising=False)
    monkeypatch.setattr(device_under_test, "CALLS", Counter())
    tensor = torch.ones(3)
    exec(compile("probe(tensor)", "inside", "exec"), {**vars(torch_passes), "tensor": tensor})
    torch_passes.probe(tensor)
    assert [x is tensor for x in seen] == [True, False]
    assert Counter({"append": 1}) == device_under_test.CALLS
