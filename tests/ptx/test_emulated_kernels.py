"""Compiled kernels, emulated: as exact as fp64 demands, and no race, no stray access, no wait that is missing.

Other processes compile and run them, because this one imported the kernels in interpreter mode. Compiled kernels stay
in pytest's cache. What a fault is stands in `emulator/memory.py`.
"""

import fcntl
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from uninterpreted import run_script

pytestmark = pytest.mark.cpu_only(reason="it emulates a GPU, the same on any machine")
FOLDER, ARCHES = Path(__file__).parent, ("sm_80", "sm_90")
KERNELS = {"divergence", "entry_logits", "finish_rows", "grpo_loss", "logits_gradient", "logprob_forward", "scale"}
KERNELS |= {"clean_targets", "row_moments", "scale_hidden", "softmax_weights", "token_statistics", "weighted_rows"}
FOR_ONE_ARCH = {"sm_90": {"anchor", "far_rows", "finish_weights", "raise_shift", "softmax_weights_forward"}}
COPYING = """They separate the steps of copying a stage, which the first warp takes alone. One barrier orders all of
them after the reads of the stage that is overwritten, and the mbarrier before the products."""
# By case of `faults.py`: how many barriers may be missing on each architecture, and why that is no fault. Triton 3.6
# has more of them than 3.9, where they are 0 and 11, and 12.
HARMLESS = {
    "logprobs": ({"sm_80": 2, "sm_90": 17}, COPYING),
    "weights of a head": ({"sm_90": 18}, COPYING),
    "logprobs of unaligned rows": (
        {"sm_90": 1},
        "The barrier after a wait for products is followed by that before the next write, with no access between.",
    ),
    "softmax weights of rising logits": (
        {"sm_80": 2, "sm_90": 3},
        "As compiled, a thread rescales the weights that it wrote, and with several warps their sum has barriers that "
        "precede the target's weight. The source cannot rely on that.",
    ),
}
FINDINGS = {"sm_80": {"race between threads", "access where a copy is in flight", "misaligned access"}}
FINDINGS["sm_90"] = FINDINGS["sm_80"] | {
    *("read of what was never written", "wait without end", "write where a product in flight reads"),
    *("no fence between a write and an asynchronous access", "change of an mbarrier in use"),
    "no fence between a write of accumulators and their product",
}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def printed(fork_server: Any, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """By both scripts for all architectures; workers of a session share it."""
    kept, shared = getattr(pytestconfig, "cache", None), tmp_path_factory.getbasetemp()
    # Apart from that of other tests, because nothing is assembled here.
    cache = kept.mkdir("triton-ptx") if kept else tmp_path_factory.mktemp("triton")
    shared = shared.parent if hasattr(pytestconfig, "workerinput") else shared
    with (shared / "ptx.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (rows := shared / "ptx.json").exists():
            # The longer ones first; faults are planted in kernels of which the cases have compiled many.
            calls = itertools.product(("cases.py", "faults.py"), reversed(ARCHES))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                each = pool.map(lambda call: run_script(fork_server, FOLDER / call[0], call[1], cache=cache), calls)
                rows.write_text(json.dumps([row for rows in each for row in rows]))
        return json.loads(rows.read_text())


@pytest.fixture(scope="module")
def cases(printed: Rows) -> Rows:
    return [row for row in printed if "kind" not in row]


@pytest.fixture(scope="module")
def faults(printed: Rows) -> Rows:
    rows = [row for row in printed if "kind" in row]
    for row in rows:
        kind, findings = row["kind"].replace("_", " "), ", ".join(f"{n} {x}" for x, n in row["found"].items())
        print(f"{row['arch']}  {row['kernel']:24} {kind:16} {row['planted']:3} planted, found: {findings}")
    return rows


@pytest.mark.parametrize("arch", ARCHES)
def test_emulated_kernels_have_no_fault_and_are_exact(cases: Rows, arch: str) -> None:
    rows = [row for row in cases if row["arch"] == arch]
    assert not [row for row in rows if "fault" in row]
    assert {name for row in rows for name in row["programs"]} == {
        f"_{name}_kernel" for name in KERNELS | FOR_ONE_ARCH.get(arch, set())
    }
    assert not [(row["case"], name, x) for row in rows for name, x in row["errors"].items() if not x <= 1.0]


@pytest.mark.parametrize("arch", ARCHES)
def test_a_barrier_fence_or_wait_that_is_removed_is_found(faults: Rows, arch: str) -> None:
    rows = [row for row in faults if row["arch"] == arch and row["kind"] == "orders"]
    assert sum(row["planted"] for row in rows) > 150
    for row in rows:
        most, _ = HARMLESS.get(row["case"], ({}, ""))
        assert len(row["silent"]) <= most.get(arch, 0), row
        assert all(text.startswith("bar.sync") for text in row["silent"]), "no fence and no wait is harmless"


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", ["is_wait", "is_masked_store", "is_vector"])
def test_a_relaxed_wait_a_missing_mask_or_a_moved_vector_is_found(faults: Rows, arch: str, kind: str) -> None:
    rows = [row for row in faults if row["arch"] == arch and row["kind"] == kind]
    assert sum(row["planted"] for row in rows) >= (4 if kind == "is_wait" else 10)
    assert not any(row["silent"] for row in rows)


@pytest.mark.parametrize("arch", ARCHES)
def test_each_check_of_the_emulator_finds_a_planted_fault(faults: Rows, arch: str) -> None:
    assert {x for row in faults if row["arch"] == arch for x in row["found"]} >= FINDINGS[arch]
