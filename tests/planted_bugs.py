"""Bugs planted on purpose: `python tests/planted_bugs.py [name ...]` says of each whether the tests catch it.

Each is one replacement in one file of a copy of this repository, where a few of its tests then run: those that ought to
go red. A bug that survives is a hole in the tests; so is a test that is red without one, which `--none` shows.

The tests run in forks of a process that has imported everything but the package: each takes its own copy of that.
Within the suite that is a stage of the farm, which starts `planted_bugs.py --here NAME`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "kernels/torch-ext/fused_grpo_kernels"
EXACT = ["tests/ops/test_exactness.py", "-k", "logprobs_are_as_exact and True-torch-shape2"]
# Many tiles from left to right, which takes more columns than hidden features.
REAL = ["tests/ops/test_error_grid.py", "-k", "vocabularies_of_real_models and shape1"]
ORACLE = ["tests/ops/test_outside_oracle.py", "-k", "temperature_per_token or ignored_rows or master_weight"]
ENTROPY = ["tests/ops/test_error_grid.py", "-k", "vocabularies_of_real_models"]
ANCHORS = ["tests/ops/test_anchors.py"]
LAYOUT = ["tests/ops/test_layout.py"]
PAGES = ["tests/ops/test_pages.py"]
HALF = ["tests/ops/test_gpu_arithmetic.py", "-k", "40000 and dtype0"]
FROZEN = ["tests/ops/test_gpu_arithmetic.py", "-k", "40000 and dtype1"]
CONFIDENT = ["tests/ops/test_extremes.py", "-k", "confident and torch"]
FOLD = ["tests/kernels/test_fold_tile.py"]
HEAD_KERNEL = ["tests/kernels/test_logprob_forward.py", "-k", "each_option or any_tile or ragged"]
# TRL's own code is the judge: formulas that every path of ours shares cannot judge themselves.
TRL = ["tests/ops/test_trl_oracle.py", "-k", "ten_digits and dapo"]
OF_TYPES = ["tests/ops/test_trl_oracle.py", "-k", "ten_digits and nothing"]
LOSS_KERNEL = ["tests/kernels/test_grpo_loss.py"]
PROMISES = ["tests/ops/test_loss_promises.py", "-k", "torch"]
VARIANTS = ["tests/ops/test_loss_variants.py", "-k", "(all_paths or no_trace) and dapo and (plain or quantile)"]
ROW_KERNELS = ["tests/kernels/test_row_passes.py", "-k", "two_stretches"]
SHARDS = ["tests/ops/test_vocab_parallel.py", "-k", "shards_give and 3-tokens"]


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT |= {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


class Bug(NamedTuple):
    file: str
    old: str
    new: str
    caught_by: list[str]


BUGS = {
    "a tile's targets are off by one": Bug(
        "fused_grpo/head.py", "targets - columns.start, -1)", "targets - columns.start - 1, -1)", EXACT
    ),
    "every tile gets the bias of the first": Bug(
        "fused_grpo/head.py", "self.bias[columns],", "self.bias[: columns.stop - columns.start],", EXACT
    ),
    "dH of later tiles replaces that of earlier ones": Bug(
        "fused_grpo/head_gradients.py",
        "weighted_sum_into(self._rows, values, tile.weight, accumulate=not first)",
        "weighted_sum_into(self._rows, values, tile.weight, accumulate=False)",
        REAL,
    ),
    "dW of later row groups replaces that of earlier ones": Bug(
        "fused_grpo/head_gradients.py",
        "accumulate=tile.columns.start in self._started)",
        "accumulate=False)",
        EXACT,
    ),
    "db is that of the last row group": Bug(
        "fused_grpo/head_gradients.py",
        "columns += values.sum(0, dtype=columns.dtype)",
        "columns.copy_(values.sum(0, dtype=columns.dtype))",
        EXACT,
    ),
    "rows that are left out are scattered to the wrong place": Bug(
        "fused_grpo/head_gradients.py",
        "self._hidden[tile.rows if index is None else index]",
        "self._hidden[tile.rows]",
        EXACT,
    ),
    "rows with nothing but an entropy gradient are left out": Bug(
        "fused_grpo/plans.py",
        "(grad_logprobs != 0) | (grad_entropy != 0)",
        "(grad_logprobs != 0)",
        EXACT,
    ),
    "a growing maximum does not rescale the direction": Bug(
        "fused_grpo/plans.py",
        "torch.exp(before - rows.shift)",
        "torch.ones_like(before)",
        FROZEN,
    ),
    "the direction forgets 1 - p": Bug(
        "fused_grpo/head_gradients.py",
        '/ tile.arguments["temperature"] * -torch.expm1(logprobs)',
        '/ tile.arguments["temperature"] * torch.ones_like(logprobs)',
        ["tests/ops/test_exactness.py", "-k", "confident"],
    ),
    "the direction forgets the soft cap at the target": Bug(
        "fused_grpo/head_gradients.py",
        "4 * e / (1 + e).square()",
        "torch.ones_like(e)",
        FROZEN,
    ),
    "small gradients vanish in fp16": Bug(
        "fused_grpo/plans.py", "if head.gemm_dtype != torch.float16 or not len(upstream):", "if True:", HALF
    ),
    "temperature missing from the gradient": Bug(
        "fused_grpo/chunked.py",
        "slope, share = logit_scale / temperature[:, None]",
        "slope, share = logit_scale / torch.ones_like(temperature[:, None])",
        EXACT,
    ),
    "derivative of the soft cap": Bug(
        "fused_grpo/chunked.py", "slopes = 1 - out.square()", "slopes = 1 - out.abs()", EXACT
    ),
    "sign of the entropy's gradient": Bug(
        "fused_grpo/chunked.py",
        "of_entropy = -upstream_entropy,",
        "of_entropy = upstream_entropy,",
        EXACT,
    ),
    "the target counts among the others": Bug(
        "fused_grpo/chunked.py",
        "torch.where(targets[:, None] == column, -torch.inf, kept)",
        "kept",
        EXACT,
    ),
    "1 - p by subtraction": Bug(
        "fused_grpo/chunked.py",
        "at_target = upstream * -torch.expm1(log_p_target)",
        "at_target = upstream * (1 - torch.exp(log_p_target))",
        CONFIDENT,
    ),
    "the sum so far is not rescaled": Bug("fused_grpo/chunked.py", "    state.total.mul_(rescale)\n", "", ENTROPY),
    "a row adrift keeps its anchor": Bug("fused_grpo/plans.py", "state.put(lost, fold(", "_ = (lost, fold(", ANCHORS),
    "a row adrift keeps its direction": Bug(
        "fused_grpo/plans.py", "direction, head.select(lost)", "direction.clone(), head.select(lost)", ANCHORS
    ),
    "a chunk keeps anchors adrift": Bug("fused_grpo/loss_plans.py", "if adrift(state) is None:", "if True:", ANCHORS),
    "a log-prob is rounded like its logits": Bug("fused_grpo/statistics.py", "_D = 16.0", "_D = 0.0", ANCHORS),
    "a gap between columns": Bug("fused_grpo/planner.py", "column_stride(even)", "even + -even % _LINE", LAYOUT),
    "a chunk of one row": Bug("fused_grpo/planner.py", "if num_rows > rows and", "if False and", LAYOUT),
    "memory that somebody holds": Bug("fused_grpo/_pages.py", "_kept.remove(pages)", "pass", PAGES),
    "memory that nobody may have": Bug("fused_grpo/_pages.py", "not _advised(pages, mmap.MADV_FREE)", "False", PAGES),
    "logits that are not relative to an anchor": Bug("fused_grpo/chunked.py", " and not shift.any()", "", ANCHORS),
    "what an anchor may be off by": Bug("fused_grpo/statistics.py", "math.exp(50.0)", "math.exp(88.0)", ANCHORS),
    "a tile's look at its first block changes it": Bug(
        "fused_grpo/chunked.py", "if keep and self.as_it_is:", "if False:", ANCHORS
    ),
    "columns that share a cache set": Bug(
        "fused_grpo/planner.py", "(_LINE - rows) % (2 * _LINE)", "(_LINE - rows) % _LINE", LAYOUT
    ),
    "few rows without a gradient stay, with one": Bug(
        "fused_grpo/loss_plans.py", "bool(torch.isfinite(rows.total).all())", "True", LAYOUT
    ),
    "entropy without the target's own term": Bug(
        "fused_grpo/statistics.py", "rest - logprobs.exp() * logprobs.clamp_min(-128.0)", "rest", EXACT
    ),
    "shards merged without regard to their maxima": Bug(
        "fused_grpo/statistics.py", "(rescale * parts.total).sum(0)", "parts.total.sum(0)", SHARDS
    ),
    "a shard starts where its rank says": Bug(
        "fused_grpo/vocab_parallel.py",
        "start = sum(self.sizes[: dist.get_rank(self.group)])",
        "start = dist.get_rank(self.group) * len(head.weight)",
        SHARDS,
    ),
    "dH of a shard is not summed over ranks": Bug(
        "fused_grpo/vocab_parallel.py", "dist.all_reduce(d_hidden, group=self.group)", "pass", SHARDS
    ),
    "ignored rows keep their log-prob": Bug(
        "fused_grpo/_ops.py",
        "value.masked_fill_(~kept, 0.0)",
        "value",
        ["tests/ops/test_error_grid.py", "-k", "nan_in_ignored and triton"],
    ),
    "a master weight is rounded with its gradient": Bug(
        "fused_grpo/reference.py",
        "return weight + (weight.detach().to(dtype).to(weight.dtype) - weight.detach())",
        "return weight.to(dtype).to(weight.dtype)",
        ORACLE,
    ),
    "the upper clip on the wrong side": Bug(
        "fused_grpo/reference.py", "lowest, highest = 1 - terms.epsilon_low", "lowest, highest = 1", TRL
    ),
    "delta bounds the clipped branch, too": Bug(
        "fused_grpo/reference.py", "ratio.clamp(lowest, highest) * advantages)", "bounded * advantages)", TRL
    ),
    "cispo sends a gradient through its weight": Bug(
        "fused_grpo/reference.py",
        "ratio.clamp(max=terms.epsilon_high).detach()",
        "ratio.clamp(max=terms.epsilon_high)",
        OF_TYPES,
    ),
    "sapo's temperatures the wrong way round": Bug(
        "fused_grpo/reference.py",
        "torch.where(advantages > 0, *terms.sapo",
        "torch.where(advantages < 0, *terms.sapo",
        OF_TYPES,
    ),
    "vespo's k for every advantage": Bug(
        "fused_grpo/reference.py",
        "torch.where(risen, config.vespo_k_pos, config.vespo_k_neg)",
        "config.vespo_k_pos",
        OF_TYPES,
    ),
    "the KL against the policy": Bug(
        "fused_grpo/reference.py", "ref_logprobs - logprobs, 0.0)", "logprobs - ref_logprobs, 0.0)", TRL
    ),
    "the sampler's ratio upside down": Bug(
        "fused_grpo/reference.py",
        "torch.where(mask, old - sampling_logprobs",
        "torch.where(mask, sampling_logprobs - old",
        TRL,
    ),
    "what is out of bounds is truncated, not left out": Bug(
        "fused_grpo/reference.py", "(ratio < low) | (ratio > high), 0.0, ratio)", "ratio > high, high, ratio)", TRL
    ),
    "the off-policy mask takes positive advantages": Bug(
        "fused_grpo/reference.py", "(tokens.advantages >= 0) | sequences", "(tokens.advantages > 1e9) | sequences", TRL
    ),
    "the tokens of low entropy are kept": Bug(
        "fused_grpo/reference.py", "torch.quantile(entropies, 1 - config", "torch.quantile(entropies, config", TRL
    ),
    "the entropy bonus is a penalty": Bug(
        "fused_grpo/reference.py",
        "loss = loss - (torch.where(mask, entropy_weights",
        "loss = loss + (torch.where(mask, entropy_weights",
        TRL,
    ),
    "a sequence's ratio is the sum of its tokens'": Bug(
        "fused_grpo/_layout.py", "/ self.sum(mask).clamp_min(1.0)", "/ 1.0", TRL
    ),
    "a sequence's gradient is not shared out": Bug(
        "fused_grpo/loss.py",
        "shares = sequences.sum(of_ratio) / sequences.sum(mask)",
        "shares = sequences.sum(of_ratio) * sequences.sum(mask)",
        TRL,
    ),
    "luspo averages over tokens": Bug(
        "fused_grpo/_layout.py", "return on / num_sequences", "return on / on.sum()", OF_TYPES
    ),
    "dr_grpo divides by its own length": Bug(
        "fused_grpo/_layout.py",
        "num_sequences * config.max_completion_length)",
        "num_sequences * on.sum() / len(sequences))",
        OF_TYPES,
    ),
    "rows moved to the front lose their own order": Bug(
        "fused_grpo/loss_plans.py", "return order.index_copy_(0, holes, movers)", "return order", PROMISES
    ),
    "dW of a skipped row": Bug(
        "fused_grpo/loss_plans.py", "(done.logprobs != 0) | (done.entropy != 0)", "done.logprobs != 0", VARIANTS
    ),
    "a main gradient without the upstream one": Bug(
        "fused_grpo/fused_loss.py", "addcmul_(d_weight, upstream.to(d_weight.dtype))", "add_(d_weight)", PROMISES
    ),
    "the kernel clips a falling advantage from above": Bug(
        f"{KERNELS}/grpo_loss.py",
        "(ratio < lowest) | (ratio > tl.maximum(highest, delta))",
        "ratio > highest",
        LOSS_KERNEL,
    ),
    "the kernel's KL slope without the ratio": Bug(
        f"{KERNELS}/grpo_loss.py", "of_logprob += beta * kl_slope * times", "of_logprob += beta * kl_slope", LOSS_KERNEL
    ),
    "columns past the end enter the log-sum-exp": Bug(
        f"{KERNELS}/_tiles.py",
        'tl.where(columns < V, 0.0, float("-inf"))',
        'tl.where(columns <= V, 0.0, float("-inf"))',
        HEAD_KERNEL,
    ),
    "splits merged without their maxima": Bug(
        f"{KERNELS}/_tiles.py",
        "return new_maximum, tl.sum(rescale * total, 0), merged",
        "return new_maximum, tl.sum(total, 0), merged",
        HEAD_KERNEL,
    ),
    "the gradient kernel sees a target that is elsewhere": Bug(
        f"{KERNELS}/logits_gradient.py",
        "is_target = (columns == target)[None, :]",
        "is_target = (columns == tl.maximum(target, 0))[None, :]",
        ROW_KERNELS,
    ),
    "folding forgets the other tokens' slope": Bug(
        f"{KERNELS}/fold_tile.py", "e = e * softcap_slope(", "e = e + 0 * softcap_slope(", FOLD
    ),
    "folding forgets what came before": Bug(
        f"{KERNELS}/fold_tile.py",
        "tl.store(total + row, rescale * old_total + tl.sum(sums, 0))",
        "tl.store(total + row, tl.sum(sums, 0))",
        FOLD,
    ),
}


def copy_of_the_project(folder: Path) -> None:
    for name in ("fused_grpo", "kernels", "trainer", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("*-pytest-*"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def plant(bug: Bug, folder: Path) -> None:
    path = folder / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.file} has {bug.old!r} {text.count(bug.old)} times, want once; fix: mend this list")
    path.write_text(text.replace(bug.old, bug.new))


def run(selection: list[str], folder: Path) -> int:
    """pytest's status for these tests, in and of the copy."""
    assert not any(name.split(".")[0] == "fused_grpo" for name in sys.modules), "the tests would see no bug"
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)  # for what the tests start
    sys.path.insert(0, str(folder))
    import pytest

    import fused_grpo

    assert Path(fused_grpo.__file__).is_relative_to(folder), fused_grpo.__file__
    # Rewritten assertions explain themselves better, but rewriting takes longer than most of these tests.
    return int(pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "--full", *selection]))


def try_here(name: str) -> int:
    """pytest's status with the bug of this name planted; without one, with the tests that `name` selects."""
    bug = BUGS.get(name)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy_of_the_project(path := Path(folder).resolve())
        if bug is not None:
            plant(bug, path)
        return run(name.split("\t") if bug is None else bug.caught_by, path)


def is_caught(status: int, output: str) -> bool:
    """1: tests ran and some failed. Anything else, an import error included, proves nothing."""
    return status == 1 and re.search(r"^\d+ failed", output, re.MULTILINE) is not None


def selections() -> list[str]:
    """What the bugs are caught by, each once, as `try_here` takes it."""
    return sorted({"\t".join(bug.caught_by) for bug in BUGS.values()})


def main(arguments: list[str]) -> int:
    """How many are not as they should be: bugs that survive or, with --none, tests that are red without one."""
    if arguments[:1] == ["--here"]:
        return try_here(arguments[1])
    import farm

    farm.import_torch()
    farm.import_libraries()
    without, wrong = arguments == ["--none"], 0
    for name in selections() if without else arguments or BUGS:
        with tempfile.TemporaryFile("w+") as output:
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os._exit(try_here(name))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            said = output.read()
        right = status == 0 if without else is_caught(status, said)
        wrong += not right
        print(
            "ok      " if right else "NOT OK  ",
            name.replace("\t", " "),
            "" if right else f"\n{said[-4000:]}",
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    sys.exit(main(sys.argv[1:]))
