"""Targets without those that are ignored: the same in one launch as in plain torch."""

import pytest
import torch

from fused_grpo.errors import InputError
from fused_grpo.kernels import clean_targets
from fused_grpo.passes import torch_passes


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (1500,)])
@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
def test_ignored_targets_are_zero_and_do_not_count(shape: tuple[int, ...], ignore_index: int) -> None:
    targets = torch.arange(torch.Size(shape).numel()).view(shape) % 5
    targets = torch.where(targets == 2, ignore_index, targets)
    kept, cleaned = clean_targets(targets, ignore_index=ignore_index, vocab_size=5)
    others = torch_passes.clean_targets(targets, ignore_index=ignore_index, vocab_size=5)
    assert torch.equal(kept, targets != ignore_index)
    assert torch.equal(cleaned, targets.where(kept, 0))
    assert torch.equal(kept, others[0])
    assert torch.equal(cleaned, others[1])


def test_targets_with_strides_are_read_where_they_are() -> None:
    targets = torch.arange(40).view(8, 5)[::2, 1:3]
    kept, cleaned = clean_targets(targets, ignore_index=6, vocab_size=40)
    assert torch.equal(kept, targets != 6)
    assert torch.equal(cleaned, targets.where(kept, 0))


@pytest.mark.cpu_only(reason="on a GPU it is an assertion of the device: tests/gpu/test_targets.py")
@pytest.mark.parametrize("wrong", [5, -1, 2**40])
def test_the_torch_path_names_a_target_outside_of_the_vocabulary(wrong: int) -> None:
    with pytest.raises(InputError, match=f"got target {wrong} at"):
        torch_passes.clean_targets(torch.tensor([0, wrong, -100]), ignore_index=-100, vocab_size=5)
