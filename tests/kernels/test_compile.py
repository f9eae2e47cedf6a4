"""Every kernel compiles for every architecture as shipped, fits it, and uses its tensor cores. No GPU needed.

Other processes compile them, because this one imported the kernels in interpreter mode. Compiled kernels stay in
pytest's cache, so a second run takes little longer than its imports. With `--full` all architectures are compiled for
the dtypes, options and layouts that differ in kind; with COMPILE_EVERY=1 also for their full product.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton
from uninterpreted import run_script

from fused_grpo.kernels import tuning

pytestmark = pytest.mark.cpu_only(reason="it compiles ahead of time, the same on any machine")
FOLDER = Path(__file__).parent
COMPILE_ALL, LAUNCH_KEYS = FOLDER / "compile_all.py", FOLDER / "launch_keys.py"
KIB = 1024
SHARED_LIMIT = {"sm_90": 227, "sm_100": 227, "sm_80": 163, "sm_120": 99, "sm_86": 99, "sm_89": 99, "gfx942": 64}
SHARED_LIMIT |= {"sm_103": 227, "sm_110": 227, "sm_121": 99, "sm_75": 64}
# Of each generation of tensor cores one; compile_all.py has what is compiled for them.
QUICK = ("sm_90", "sm_80", "sm_100")
HAS_TMA = {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}
KERNELS = {
    "_clean_targets_kernel",
    "_divergence_kernel",
    "_entry_logits_kernel",
    "_finish_rows_kernel",
    "_grpo_loss_kernel",
    "_logits_gradient_kernel",
    "_logprob_forward_kernel",
    "_row_moments_kernel",
    "_scale_hidden_kernel",
    "_scale_kernel",
    "_softmax_weights_kernel",
    "_token_statistics_kernel",
    "_weighted_rows_kernel",
}
# Of the kernel for softmax weights, where that is faster than the vendor's GEMM and a pass.
OF_WEIGHTS = {
    "_anchor_kernel",
    "_far_rows_kernel",
    "_finish_weights_kernel",
    "_raise_shift_kernel",
    "_softmax_weights_forward_kernel",
}
HEADS = ("_logprob_forward_kernel", "_softmax_weights_forward_kernel")
COLUMNS = (
    "arch",
    "dtype",
    "options",
    "layout",
    "loads",
    "name",
    "reg",
    "stack",
    "shared",
    "per_logit",
    "per_tile",
    "hgmma",
)
Facts = dict[str, Any]


def table(rows: Iterable[Facts]) -> str:
    cells = [
        COLUMNS,
        *([" ".join(row[key]) if key == "hgmma" else str(row.get(key, "")) for key in COLUMNS] for row in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


@pytest.fixture(scope="module")
def compiled(fork_server: Any, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    kept = getattr(pytestconfig, "cache", None)
    cache = kept.mkdir("triton") if kept else tmp_path_factory.mktemp("triton")
    if not pytestconfig.getoption("full"):
        facts = run_script(fork_server, COMPILE_ALL, "quick", *QUICK, cache=cache)
    else:
        which = "every" if os.environ.get("COMPILE_EVERY") else "usual"
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            per_arch = pool.map(
                lambda arch: run_script(fork_server, COMPILE_ALL, which, arch, cache=cache), SHARED_LIMIT
            )
            facts = [row for rows in per_arch for row in rows]
    print("\n" + table(facts))
    return facts


@pytest.mark.parametrize("arch", [pytest.param(x, marks=() if x in QUICK else pytest.mark.full) for x in SHARED_LIMIT])
def test_every_kernel_compiles_and_fits_shared_memory(compiled: list[Facts], arch: str) -> None:
    built = [row for row in compiled if row["arch"] == arch]
    cases: dict[tuple[str, str], set[str]] = {}
    for row in built:
        cases.setdefault((row["dtype"], row["options"]), set()).add(row["name"])
    assert ("float16" if arch == "sm_75" else "bfloat16", "all") in cases
    assert all(names - OF_WEIGHTS == KERNELS for names in cases.values()), table(built)
    assert any(names >= OF_WEIGHTS for names in cases.values()) == (arch in tuning.WEIGHTS), table(built)
    too_large = [row for row in built if row["shared"] > SHARED_LIMIT[arch] * KIB]
    assert not too_large, table(compiled)


def test_no_shipped_tile_spills_a_register(compiled: list[Facts]) -> None:
    """But one of two small kernels with Triton 3.6 or 3.7, whose ptxas spills it to stay within 48 registers."""
    ptxas_rows = [
        row
        for row in compiled
        if triton.__version__.startswith(("3.6.", "3.7.")) and row["stack"] == 8 and row["reg"] <= 48
        if row["name"] in ("_grpo_loss_kernel", "_weighted_rows_kernel")
    ]
    assert not [row for row in compiled if row["stack"] and row not in ptxas_rows], table(compiled)


def test_aligned_16_bit_heads_load_through_tma_where_there_is_one(compiled: list[Facts]) -> None:
    for row in compiled:
        if row["name"] in HEADS:
            possible = row["arch"] in HAS_TMA and row["layout"] == "aligned" and row["dtype"] != "float32"
            assert row["loads"] == ("tma" if possible else "pointers"), table(compiled)


def test_the_head_runs_on_hopper_tensor_cores_and_accumulates_in_fp32(compiled: list[Facts]) -> None:
    heads = [row for row in compiled if row["name"] in HEADS and row["arch"] == "sm_90"]
    assert {row["name"] for row in heads} == {*HEADS}
    for row in heads:
        suffix = {"bfloat16": ".F32.BF16", "float16": ".F32", "float32": None}[row["dtype"]]
        assert bool(row["hgmma"]) == (suffix is not None), table(heads)
        assert all(instruction.endswith(suffix) for instruction in row["hgmma"]), table(heads)


def test_what_is_written_over_its_input_waits_for_its_readers(compiled: list[Facts]) -> None:
    passes = ("_divergence_kernel", "_logits_gradient_kernel", "_softmax_weights_kernel")
    barriers = [row["barriers"] for row in compiled if row["name"] in passes and row["in_place"]]
    assert len(barriers) >= 6 * len({row["arch"] for row in compiled})
    assert all(count > 0 for count in barriers)


def test_no_kernel_computes_in_fp64(compiled: list[Facts]) -> None:
    # But for the sums over all tokens, of which one program has 14.
    assert {row["name"] for row in compiled if row.get("fp64")} == {"_token_statistics_kernel"}, table(compiled)


def test_the_divergence_lets_the_compiler_fuse_no_product(compiled: list[Facts]) -> None:
    """If it fused one in one sweep, or for one model, and not in the other, c would not be 0 at the largest logit."""
    rows = [row for row in compiled if row["name"] == "_divergence_kernel" and "fusible" in row]
    assert len(rows) >= 6 * len(QUICK)
    assert not any(row["fusible"] for row in rows), table(rows)
    assert all(row["fusible"] for row in compiled if row["name"] == "_softmax_weights_kernel" and "fusible" in row)


def test_passes_over_rows_are_lean(compiled: list[Facts]) -> None:
    """So that memory is what bounds them: 16 instructions for each logit that moves 4 or 6 bytes."""
    rows = [row for row in compiled if row["name"] == "_softmax_weights_kernel" and "per_logit" in row]
    # One where a tile is overwritten. Where several warps share a row, they agree on the largest logit of a tile: one
    # before shared memory is written, one after. Until Triton 3.7 one warp combined their numbers and wrote the result
    # there, for which the others waited once more; since 3.8 each warp combines them.
    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    assert all(row["per_tile"] <= (2 if newer else 3) for row in rows), table(rows)
    plain = [row for row in rows if row["options"] == "none"]
    assert len(plain) >= 3 * len(QUICK)
    assert all(row["per_logit"] <= 16 for row in plain), table(plain)


def test_what_follows_the_products_is_lean(compiled: list[Facts]) -> None:
    """Nothing else overlaps with it."""
    heads = [row for row in compiled if row["name"] in HEADS and row["arch"] in QUICK]
    plain = [row for row in heads if (row["options"], row["layout"], row["dtype"]) == ("none", "aligned", "bfloat16")]
    assert len(plain) > len(QUICK)
    assert all(row["per_logit"] <= 7 for row in plain), table(plain)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_each_plan_has_one_binary_of_each_kernel_for_39_row_counts(fork_server: Any, arch: str, tmp_path: Path) -> None:
    """Whose rows have one tile or several: row counts decide that, too."""
    binaries: dict[str, dict[str, set[str]]] = {}
    for launch in run_script(fork_server, LAUNCH_KEYS, arch, "plans", cache=tmp_path):
        binaries.setdefault(launch["plan"], {}).setdefault(launch["kernel"], set()).add(launch["key"])
    counts = {plan: {kernel: len(keys) for kernel, keys in kernels.items()} for plan, kernels in binaries.items()}
    passes = {"_softmax_weights_kernel": 1, "_scale_hidden_kernel": 1}
    assert counts == {
        "loss": {**passes, "_grpo_loss_kernel": 1, "_token_statistics_kernel": 1, "_scale_kernel": 1},
        # The statistics of rows, and the weights that follow from them.
        "log-probs": {**passes, "_softmax_weights_kernel": 2, "_finish_rows_kernel": 1},
        "no gradient": {"_logprob_forward_kernel": 1, "_softmax_weights_kernel": 1, "_finish_rows_kernel": 1},
    }


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_neither_row_count_nor_alignment_of_a_slice_compiles_again(fork_server: Any, arch: str, tmp_path: Path) -> None:
    launches = run_script(fork_server, LAUNCH_KEYS, arch, cache=tmp_path)
    weight_launches = 7 if arch in tuning.WEIGHTS else 0
    assert len(launches) == 4 * 4 * (2 * 14 + weight_launches)
    keys: dict[tuple[str, str, str], set[str]] = {}
    for launch in launches:
        keys.setdefault((launch["dtype"], launch["kernel"], launch["number"]), set()).add(launch["key"])
    assert len(keys) == 28 + weight_launches
    assert {name: kernel_keys for name, kernel_keys in keys.items() if len(kernel_keys) > 1} == {}
