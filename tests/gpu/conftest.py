"""What only a GPU has, and what differs there: `make test-gpu`. With FUSED_GRPO_TEST_DEVICE=cpu a rehearsal of it.

Tests marked `rehearsed` run in that, with interpreted kernels at the tiny sizes of tests/imported/gpu_problems.py;
those marked `gpu` have nothing to rehearse with.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
from device_under_test import NAME


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """To the tests beside this one, which have processes of their own."""
    yield
    if NAME == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
