"""Which row of the tile tables an architecture gets."""

from __future__ import annotations

import pytest
import torch

from fused_grpo.kernels import _device, tuning

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90"), ((8, 7), "sm_86"), ((10, 3), "sm_100"), ((12, 1), "sm_120"), ((7, 5), "sm_75")],
)
def test_an_architecture_without_a_row_has_that_of_its_family(monkeypatch, capability, arch):
    monkeypatch.setattr(_device, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _device.architecture(CUDA) == arch
    expected = tuning.HALF_TMA.get(arch) or tuning.HALF.get(arch, tuning.HALF["default"])
    assert tuning.gemm_tile(CUDA, torch.bfloat16, tma=True) == expected
    assert tuning.row_tile(CUDA) == tuning.ROW["default"]
