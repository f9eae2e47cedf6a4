"""Bytes on a GPU: never more than is promised, and what happens where there are not so many."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_problems import SIZES, Problem, assert_gradient, logprobs_of, loss_of, make_problem, report

from fused_grpo.head.head import Head
from fused_grpo.passes import buffers

pytestmark = pytest.mark.gpu

N, D = SIZES.memory_shape
V = SIZES.vocab
MIB = 2**20
# Small change: what a row or a program leaves, and PyTorch's rounding up of each piece.
SLACK = 48 * MIB


def peak_of(call: Callable[[], Any]) -> int:
    """The most bytes at a time beside what there was before, the results among them; the second time."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def leaves_of(problem: Problem) -> int:
    """`Problem.leaves` copies what a user has already."""
    return problem.hidden.nbytes + problem.weight.nbytes


@pytest.mark.parametrize("mib", [None, 64, 512])
@pytest.mark.parametrize("plan", ["trainable", "frozen head"])
def test_a_loss_holds_a_chunk_and_gradients_with_their_accumulators(mib, plan):
    problem, head = make_problem(N, D, V, off_policy=False), V * D
    total = torch.cuda.get_device_properties(0).total_memory
    chunk = min(buffers.MOST_COLUMN_BYTES * V, total // buffers.MEMORY_SHARE) if mib is None else mib * MIB
    peak = peak_of(lambda: loss_of(problem, plan, chunk_bytes=None if mib is None else mib * MIB))
    # dW in fp32 beside a chunk, then beside dW in bf16; dH, hidden states gathered, scaled and in fp32.
    head_bytes = max(4 * head + chunk, 6 * head) if plan == "trainable" else chunk
    allowed = head_bytes + 12 * N * D + leaves_of(problem) + SLACK
    report(f"peak of loss, {plan}, chunk of {mib} MiB", peak / MIB, "MiB", promised=allowed / MIB)
    assert peak <= allowed


@pytest.mark.parametrize("mib", [None, 64])
def test_log_probs_without_gradient_hold_no_logits_beyond_the_budget(mib):
    problem = make_problem(N, D, V, off_policy=False)
    budget = buffers.DEFAULT_TILE_BYTES if mib is None else mib * MIB
    peak = peak_of(lambda: logprobs_of(problem, "no gradient", chunk_bytes=None if mib is None else mib * MIB))
    allowed = budget + 128 * 3 * 4 * N + leaves_of(problem) + SLACK
    report(f"peak of log-probs, chunk of {mib} MiB", peak / MIB, "MiB", promised=allowed / MIB)
    assert peak <= allowed


def test_trainable_log_probs_hold_softmax_weights_and_gradients():
    """In 16 bits, where the budget of a chunk has room for them, instead of logits and an accumulator of dW."""
    problem = make_problem(N, D, V, off_policy=False)
    peak = peak_of(lambda: logprobs_of(problem, "trainable"))
    # dW in bf16; dH, hidden states scaled and in fp32; the sums of splits.
    allowed = 2 * N * (V + 64) + 2 * V * D + 12 * N * D + leaves_of(problem) + SLACK
    report("peak of log-probs, trainable", peak / MIB, "MiB", promised=allowed / MIB)
    assert peak <= allowed


def test_kept_tokens_hold_numbers_per_entry_and_gradients():
    """64 kept tokens of each row: gathered rows of the head would be 2 GiB, logits 5 GiB."""
    problem, kept = make_problem(N, D, V, off_policy=False), 64
    tokens = (problem.targets.clamp(min=0)[:, None] + torch.arange(kept, device=problem.targets.device)) % V
    support = tokens.flatten(), torch.arange(0, kept * N + 1, kept, device=tokens.device)
    peak = peak_of(lambda: logprobs_of(problem, "trainable", support=support))
    allowed = 2 * leaves_of(problem) + 200 * kept * N + SLACK
    report("peak of kept tokens", peak / MIB, "MiB", promised=allowed / MIB)
    assert peak <= allowed


@pytest.fixture
def scarce():
    """scarce(bytes): so much more than is taken now, for this process."""
    torch.cuda.empty_cache()

    def limit(more: int) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_where_memory_runs_out_chunks_are_halved_once_and_say_so(scarce, caplog, monkeypatch):
    problem = make_problem(N, 64, V, off_policy=False)
    exact = loss_of(problem)
    rows, seen = buffers.chunk_rows(buffers.Sizes(N, V, problem.hidden.device, 4)), []
    tiles = Head.tiles
    monkeypatch.setattr(Head, "tiles", lambda self, x, **options: seen.append(x.shape) or tiles(self, x, **options))
    torch.cuda.empty_cache()
    # Three quarters of a chunk, beside the other memory of a call.
    scarce(3 * rows * V + 10 * V * 64 + 24 * N * 64 + SLACK)
    ours = loss_of(problem)
    assert "chunks of half as many; fix: set chunk_bytes" in caplog.text
    assert caplog.text.count("no memory for") == 1
    assert max(shape[0] for shape in seen) < 0.6 * rows
    for name in ("hidden", "weight"):
        assert_gradient(ours[name], exact[name].double(), problem, what=name)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(problem, chunk_bytes=4 * rows * (V + 256))  # the user's own choice is not second-guessed
