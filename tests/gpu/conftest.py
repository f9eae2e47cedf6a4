"""What only a GPU has, and what differs there: `make test-gpu`. With FUSED_GRPO_TEST_DEVICE=cpu a dry run of it.

Tests marked `dry_run` run in that, with interpreted kernels at the tiny sizes of tests/imported/gpu_problems.py;
those marked `gpu` have no dry run.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
from device_under_test import NAME

from fused_grpo.kernels import tuning


@pytest.fixture(params=["logits", "without logits"])
def weights_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax weights from logits, or by the kernel without logits wherever it can run: sizes decide elsewhere."""
    for arch in tuning.WEIGHTS_FROM:
        monkeypatch.setitem(tuning.WEIGHTS_FROM, arch, 2**62 if request.param == "logits" else 0)


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """To the tests beside this one, which have processes of their own."""
    yield
    if NAME == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
