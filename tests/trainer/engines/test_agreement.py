"""check_agreement: lets rounding pass, stops everything else."""

from __future__ import annotations

import pytest
import torch

from fused_grpo.errors import WeightSyncError
from fused_grpo.trainer.engines import check_agreement


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"),
    [(torch.float32, 5e-7, 9e-6), (torch.float16, 0.004, 0.3), (torch.bfloat16, 0.03, 1.5)],
)
def test_rounding_of_the_dtype_passes(dtype: torch.dtype, mean: float, largest: float) -> None:
    check_agreement(mean, largest, dtype=dtype, engine="vllm", version=3)


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"),
    [(torch.float32, 1e-5, 2e-3), (torch.float16, 0.03, 0.03), (torch.bfloat16, 0.2, 0.6)],
)
def test_more_than_rounding_is_an_error(dtype: torch.dtype, mean: float, largest: float) -> None:
    with pytest.raises(WeightSyncError, match="weight version 3"):
        check_agreement(mean, largest, dtype=dtype, engine="vllm", version=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_that_is_not_a_number_is_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(WeightSyncError):
        check_agreement(float("nan"), float("nan"), dtype=dtype, engine="vllm", version=0)


def test_the_error_says_what_was_got_wanted_and_how_to_fix_it() -> None:
    with pytest.raises(WeightSyncError, match=r"got a max difference of 0\.25 .* want at most 0\.001 .* fix: "):
        check_agreement(0.1, 0.25, dtype=torch.float32, engine="vllm", version=1)
