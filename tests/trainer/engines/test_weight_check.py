"""check_same_weights: accepts rounding, and nothing else."""

from __future__ import annotations

import pytest
import torch

from fused_grpo.errors import WeightSyncError
from fused_grpo.trainer.engines import check_same_weights


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"),
    [(torch.float32, 5e-7, 9e-6), (torch.float16, 0.004, 0.3), (torch.bfloat16, 0.03, 1.5)],
)
def test_rounding_of_the_dtype_passes(dtype: torch.dtype, mean: float, largest: float) -> None:
    check_same_weights(mean, largest, dtype=dtype, engine="vllm", version=3)


@pytest.mark.parametrize(
    ("dtype", "mean", "largest", "message"),
    [
        (torch.float32, 1e-5, 2e-3, r"got a max difference of 0\.002 .* version 3, want at most 0\.001 .* fix: "),
        (torch.float16, 0.03, 0.03, "got a mean difference"),
        (torch.bfloat16, 0.2, 0.6, "got a mean difference"),
        (torch.float32, float("nan"), float("nan"), "nan"),
        (torch.bfloat16, float("nan"), float("nan"), "nan"),
    ],
)
def test_more_than_rounding_is_an_error(dtype: torch.dtype, mean: float, largest: float, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check_same_weights(mean, largest, dtype=dtype, engine="vllm", version=3)
