"""What the ops would do on a GPU, seen on fake CUDA tensors: launches, waits, products and memory of every call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from uninterpreted import run_script

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="a CPU build of torch has no fake CUDA tensors")

GIB = 2**30
# A chunk is no more than a 48th of the GPU, here 141 GiB.
CHUNK = 141 * GIB / 48
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def seen(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """By name of the call; every kernel is compiled with the arguments that it was launched with."""
    rows = run_script(
        fork_server, Path(__file__).with_name("walk.py"), "--compile", cache=tmp_path_factory.mktemp("triton")
    )
    by_call = {row.pop("call"): row for row in rows}
    for name, facts in by_call.items():
        shown = (
            facts.get("error") or f"{facts['launches']} launches, {facts['peak'] / GIB:.2f} GiB, waits {facts['waits']}"
        )
        print(f"{name}: {shown}")
    return by_call


def test_every_call_goes_through_and_its_kernels_compile(seen: dict[str, Facts]) -> None:
    assert len(seen) >= 200
    assert {name: facts["error"] for name, facts in seen.items() if "error" in facts} == {}
    assert next(reversed(seen.values()))["compiled"] > 30


def test_without_a_gradient_log_probs_never_wait(seen: dict[str, Facts]) -> None:
    for name, facts in seen.items():
        if name.startswith("log-probs, no_grad") or (name.startswith("grpo_loss") and "quantile" not in name):
            assert facts["waits"] == [], name


def test_a_loss_waits_for_rows_to_score_and_in_two_phases_to_recompute(seen: dict[str, Facts]) -> None:
    for name, facts in seen.items():
        if name.startswith("loss") and "quantile" not in name:
            # No number of chunks makes it more.
            assert facts["waits"][:1] in ([], ["tolist"]), name
            assert facts["waits"][1:] in ([], ["nonzero"] if "sequence" in name else []), name


def test_a_loss_can_be_captured_in_a_graph(seen: dict[str, Facts]) -> None:
    assert seen["loss, trainable, while a graph is captured"]["waits"] == []


def test_chunks_have_rows_in_multiples_of_128(seen: dict[str, Facts]) -> None:
    for name, facts in seen.items():
        if name.startswith("loss, trainable, bf16"):
            assert all(rows % 128 == 0 for rows, *_ in facts["gemms"]), name


def test_nothing_is_held_but_a_chunk_and_gradients_with_their_accumulators(seen: dict[str, Facts]) -> None:
    head = 151936 * 4096
    for name, facts in seen.items():
        if name.startswith("loss, trainable, bf16, dapo"):
            # dW in fp32 beside a chunk, then beside dW in bf16; dH; hidden states gathered and scaled; small change.
            assert facts["peak"] <= max(4 * head + CHUNK, 6 * head) + 8192 * 4096 * 8, name


def test_a_divergence_waits_for_unmasked_rows_alone_and_holds_two_chunks(seen: dict[str, Facts]) -> None:
    head = 151936 * 4096
    calls = {name: facts for name, facts in seen.items() if name.startswith("divergence")}
    assert len(calls) >= 30
    for name, facts in calls.items():
        assert facts["waits"] == ["nonzero"], name
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        peak = calls[f"divergence, trainable, bf16, {kind}"]["peak"]
        assert peak <= max(4 * head + 2 * CHUNK, 6 * head) + 8192 * 4096 * 12, kind


def test_kept_tokens_wait_for_their_plan_alone_and_hold_no_gathered_rows(seen: dict[str, Facts]) -> None:
    head = 151936 * 4096
    calls = {name: facts for name, facts in seen.items() if name.startswith("kept tokens")}
    assert len(calls) >= 30
    for name, facts in calls.items():
        # No number of rows, entries or vocabulary makes it more.
        assert len(facts["waits"]) <= (8 if "no_grad" in name else 17), name
    for what in ("log-probs", "loss"):
        options = "plain" if what == "log-probs" else "dapo"
        # Gathered, the rows of W for all entries would take 1.4 GB. The rows that keep everything take a chunk.
        assert calls[f"kept tokens, {what}, no_grad, bf16, {options}"]["peak"] <= 2**28
        assert calls[f"kept tokens, {what}, trainable, bf16, {options}"]["peak"] <= 6 * head + 2**28


def test_launches_of_a_chunk_are_few(seen: dict[str, Facts]) -> None:
    """Half of the tokens are scored: one chunk, or four. Joining what they found is six launches a call."""
    few, many = (seen[f"loss, trainable, N={tokens}, KL"]["launches"] for tokens in (8192, 32768))
    assert many - few <= 3 * 10 + 6
    assert few <= 72
