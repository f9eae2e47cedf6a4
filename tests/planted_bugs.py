"""Bugs planted on purpose (mutation tests): `python tests/planted_bugs.py [name ...]` runs them.

Each bug is one replacement in one file. A few tests then run, and at least one of them must fail. A bug that survives
is a gap in the tests. So is a test that fails without a bug: see `--none`.

`swap.py` plants a bug in functions that are imported already. Where it cannot, or where all tests pass, `plant.py` does
so in a copy of this repository, whose other files are links. The fork server runs both.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "kernels/torch-ext/fused_grpo_kernels"
EXACT = ["tests/ops/test_exactness.py", "-k", "logprobs_are_as_exact and True-torch-shape2"]
# Many tiles from left to right, which takes more columns than hidden features.
REAL = ["tests/ops/test_error_grid.py", "-k", "vocabularies_of_real_models and shape1"]
PASSES = "tests/kernels/test_row_passes.py"
ROW_PASSES = [PASSES, "-k", "torch and (each_option or slices or confident)"]
ROW_PASSES_LIE = [PASSES, "-k", "torch and tiles_lie"]
RISING = [PASSES, "-k", "torch and rise_or_fall"]
NO_NUMBERS = [PASSES, "-k", "torch and (no_numbers or without_a_gradient)"]
KERNEL_WEIGHTS = [PASSES, "-k", "triton and each_option"]
KERNEL_RISING = [PASSES, "-k", "triton and rise_or_fall"]
KERNEL_NO_NUMBERS = [PASSES, "-k", "triton and no_numbers"]
PAGES = ["tests/ops/test_cpu_buffers.py"]
HALF = ["tests/ops/test_gpu_arithmetic.py", "-k", "40000 and dtype0"]
HEAD_KERNEL = ["tests/kernels/test_logprob_forward.py", "-k", "each_option or any_tile or ragged"]
# TRL's own code is the judge: formulas that every path of ours shares cannot judge themselves.
TRL = ["tests/ops/test_trl_loss.py", "-k", "ten_digits and dapo"]
TRL_TYPES = ["tests/ops/test_trl_loss.py", "-k", "ten_digits and nothing"]
LOSS_KERNEL = ["tests/kernels/test_grpo_loss.py"]
PROMISES = ["tests/ops/test_loss_promises.py", "-k", "torch"]
VARIANTS = ["tests/ops/test_loss_variants.py", "-k", "(all_paths or no_trace) and dapo and (plain or quantile)"]
SHARDS = ["tests/ops/test_vocab_parallel.py", "-k", "shards_give and 3-tokens"]


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT |= {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_PROFILE": "found"}


class Bug(NamedTuple):
    file: str
    old: str
    new: str
    caught_by: list[str]


BUGS = {
    "a tile's targets are off by one": Bug(
        "fused_grpo/head/head.py", "targets - columns.start if", "targets - columns.start - 1 if", REAL
    ),
    "every tile gets the bias of the first": Bug(
        "fused_grpo/head/head.py", "picked(self.bias, columns),", "self.bias[: columns.stop - columns.start],", EXACT
    ),
    "dH of later tiles replaces that of earlier ones": Bug(
        "fused_grpo/head/head.py",
        "multiply_into(self._rows, values, tile.weight, accumulate=not first)",
        "multiply_into(self._rows, values, tile.weight, accumulate=False)",
        REAL,
    ),
    "dH of later tiles replaces that of earlier ones, by slices": Bug(
        "fused_grpo/head/head.py",
        "wide, accumulate=not first or part.start > 0)",
        "wide, accumulate=part.start > 0)",
        ["tests/ops/test_error_grid.py", "-k", "vocabularies_of_real_models and shape3"],
    ),
    "dW of later row groups replaces that of earlier ones": Bug(
        "fused_grpo/head/head.py",
        "accumulate=tile.columns.start in self._started)",
        "accumulate=False)",
        EXACT,
    ),
    "db is that of the last row group": Bug(
        "fused_grpo/head/head.py",
        "columns += values.sum(0, dtype=dtype)",
        "columns.copy_(values.sum(0, dtype=dtype))",
        EXACT,
    ),
    "rows that are left out are scattered to the wrong place": Bug(
        "fused_grpo/head/head.py",
        "self._hidden[index] = d_rows",
        "self._hidden[tile.rows] = d_rows",
        EXACT,
    ),
    "dH without its factors": Bug(
        "fused_grpo/head/head.py",
        "torch.mul(d_rows, factor[:, None], out=",
        "torch.mul(d_rows, 1.0, out=",
        ["tests/ops/test_layout.py::test_clipped_rows_add_nothing[3]"],
    ),
    "dH of rows that are left out is whatever was in memory": Bug(
        "fused_grpo/head/chunked_loss.py",
        "every_row=one_group or not in_phases",
        "every_row=True",
        ["tests/ops/test_loss_promises.py", "-k", "no_phase_multiplies and torch"],
    ),
    "the temperatures of several rows are never checked": Bug(
        "fused_grpo/head/head.py",
        "one_number = self.temperature.stride() == (0,) and self.temperature.shape[0] > 1",
        "one_number = self.temperature.shape[0] > 1",
        ["tests/ops/test_bad_input.py", "-k", "temperature"],
    ),
    "rows with nothing but an entropy gradient are left out": Bug(
        "fused_grpo/head/logprob_plans.py",
        "has_gradient | (grad_entropy != 0)",
        "has_gradient",
        EXACT,
    ),
    "small gradients vanish in fp16": Bug(
        "fused_grpo/head/logprob_plans.py", "if head.gemm_on_softmax or not len(head.targets):", "if True:", HALF
    ),
    "fp16 takes weights": Bug("fused_grpo/head/head.py", "self.gemm_dtype != torch.float16", "True", HALF),
    "the weight of the target forgets the soft cap": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py", "-total * tile.slope_at_target", "-total", ROW_PASSES
    ),
    "the weight of the target has the sign of the others": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py",
        "at_target = -total if",
        "at_target = total if",
        ROW_PASSES,
    ),
    "the scale of the weights forgets 1 - p": Bug(
        "fused_grpo/_maths/statistics.py",
        "return -torch.expm1(logprobs) / total",
        "return torch.ones_like(logprobs) / total",
        ["tests/ops/test_extremes.py", "-k", "confident and torch"],
    ),
    "the scale of the weights forgets the temperature": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py",
        "* tile.logit_scale / tile.temperature, statistics",
        "* tile.logit_scale, statistics",
        ROW_PASSES,
    ),
    "temperature missing from the gradient": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py",
        "slope, share = tile.logit_scale / tile.temperature[:, None]",
        "slope, share = tile.logit_scale / torch.ones_like(tile.temperature[:, None])",
        EXACT,
    ),
    "derivative of the soft cap": Bug(
        "fused_grpo/passes/torch_passes/tile.py", "slopes = 1 - out.square()", "slopes = 1 - out.abs()", EXACT
    ),
    "sign of the entropy's gradient": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py",
        "entropy_terms = -upstream_entropy,",
        "of_entropy = upstream_entropy,",
        EXACT,
    ),
    "the target counts among the others": Bug(
        "fused_grpo/passes/torch_passes/tile.py",
        "self.targets - columns.start, -torch.inf)",
        "-1 - self.targets, -torch.inf)",
        EXACT,
    ),
    "the target counts among the others of plain logits": Bug(
        "fused_grpo/passes/torch_passes/tile.py",
        "put_at_targets_(self.raw, self.targets, -torch.inf)",
        "put_at_targets_(self.raw, -1 - self.targets, -torch.inf)",
        ROW_PASSES,
    ),
    "1 - p by subtraction": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py",
        "at_target = upstream * -torch.expm1(log_p)",
        "at_target = upstream * (1 - torch.exp(log_p))",
        ROW_PASSES,
    ),
    "a shift that is never raised": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py", "    if not higher.any():", "    if True:", RISING
    ),
    "weights that do not follow a raised shift": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py",
        "before.mul_(torch.exp(shift - finite(raised))[:, None])",
        "pass",
        RISING,
    ),
    "sums that do not follow a raised shift": Bug(
        "fused_grpo/_maths/statistics.py", "(rescale * totals).sum(0)", "totals.sum(0)", RISING
    ),
    "a row that is no number spoils the others": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py",
        "        out.masked_fill_(lost[:, None], 0.0)",
        "        pass",
        NO_NUMBERS,
    ),
    "a row without a gradient takes part": Bug(
        "fused_grpo/passes/torch_passes/row_passes.py", ".masked_fill_((factor == 0)[:, None], 0.0)", "", NO_NUMBERS
    ),
    "a tile that is only looked at is changed": Bug(
        "fused_grpo/passes/torch_passes/tile.py",
        "if out is None and self.is_plain:",
        "if False:",
        ["tests/kernels/test_row_passes.py::test_statistics_are_as_exact_as_torch[torch--1-1]"],
    ),
    "a log-prob is rounded like its logits": Bug(
        "fused_grpo/_maths/statistics.py",
        "_D = 16.0",
        "_D = 0.0",
        ["tests/ops/test_far_tokens.py::test_a_log_prob_has_not_the_rounding_of_its_parts"],
    ),
    "columns that share a cache set": Bug(
        "fused_grpo/passes/buffers.py", "(_LINE - rows) % (2 * _LINE)", "(_LINE - rows) % _LINE", ROW_PASSES_LIE
    ),
    "a chunk of a GPU that exceeds its memory": Bug(
        "fused_grpo/passes/buffers.py",
        "max(1, min(rows, most))",
        "max(1, rows)",
        ["tests/ops/test_layout.py::test_on_a_gpu_rows_decide_and_its_memory_is_the_limit[8192-151936-1073741824-36]"],
    ),
    "memory that is in use is given out again": Bug(
        "fused_grpo/passes/buffers.py", "_free_pages.remove(pages)", "pass", PAGES
    ),
    "memory is kept that the kernel cannot take": Bug(
        "fused_grpo/passes/buffers.py",
        "not _advised(pages, mmap.MADV_FREE)",
        "False",
        ["tests/ops/test_cpu_buffers.py::test_what_is_kept_is_the_kernels_for_the_asking"],
    ),
    "entropy without the target's own term": Bug(
        "fused_grpo/_maths/statistics.py",
        "others_entropy - logprobs.exp() * logprobs.clamp_min(-128.0)",
        "others_entropy",
        EXACT,
    ),
    "shards merged without regard to their maxima": Bug(
        "fused_grpo/_maths/statistics.py", "rescale = drop.exp()", "rescale = torch.ones_like(drop)", SHARDS
    ),
    "a shard starts where its rank says": Bug(
        "fused_grpo/head/sharded.py",
        "start = sum(self.sizes[: dist.get_rank(self.group)])",
        "start = dist.get_rank(self.group) * len(head.weight)",
        SHARDS,
    ),
    "dH of a shard is not summed over ranks": Bug(
        "fused_grpo/head/sharded.py", "dist.all_reduce(d_hidden, group=self.group)", "pass", SHARDS
    ),
    "ignored rows keep their log-prob": Bug(
        "fused_grpo/head/registered_ops.py",
        "return torch.where(rows, values, 0)",
        "return values",
        ["tests/ops/test_error_grid.py", "-k", "nan_in_ignored and triton"],
    ),
    "a master weight is rounded with its gradient": Bug(
        "fused_grpo/_maths/distributions.py",
        "return weight + (weight.detach().to(dtype).to(weight.dtype) - weight.detach())",
        "return weight.to(dtype).to(weight.dtype)",
        ["tests/ops/test_independent_ops.py::test_a_master_weight_is_rounded_once_and_its_gradient_never[reference]"],
    ),
    "the upper clip on the wrong side": Bug(
        "fused_grpo/_maths/formulas.py", "highest, delta = 1 - terms.epsilon_low", "highest, delta = 1", TRL
    ),
    "delta bounds the clipped branch, too": Bug(
        "fused_grpo/_maths/formulas.py", "inside = ratio.clamp(lowest, highest)", "inside = bounded", TRL
    ),
    "cispo sends a gradient through its weight": Bug(
        "fused_grpo/_maths/formulas.py",
        "ratio.clamp(max=terms.epsilon_high).detach()",
        "ratio.clamp(max=terms.epsilon_high)",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[cispo-token-nothing]"],
    ),
    "sapo's temperatures the wrong way round": Bug(
        "fused_grpo/_maths/formulas.py",
        "masked_fill_(advantages > 0, tau_high)",
        "masked_fill_(advantages < 0, tau_high)",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[sapo-token-nothing]"],
    ),
    "vespo's k for every advantage": Bug(
        "fused_grpo/_maths/factors.py",
        "torch.full_like(advantages, config.vespo_k_neg).masked_fill_(risen, config.vespo_k_pos)",
        "config.vespo_k_pos",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[vespo-token-nothing]"],
    ),
    "the KL against the policy": Bug(
        "fused_grpo/_maths/formulas.py", "ref_logprobs - logprobs, 0.0)", "logprobs - ref_logprobs, 0.0)", TRL
    ),
    "the sampler's ratio upside down": Bug(
        "fused_grpo/_maths/formulas.py",
        "torch.where(has_ratio, old - sampling_logprobs",
        "torch.where(has_ratio, sampling_logprobs - old",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[dapo-token-token_truncate]"],
    ),
    "what is out of bounds is truncated, not left out": Bug(
        "fused_grpo/_maths/formulas.py",
        "(ratio < low) | (ratio > high), 0.0, ratio)",
        "ratio > high, high, ratio)",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[dapo-token-token_mask]"],
    ),
    "the off-policy mask takes positive advantages": Bug(
        "fused_grpo/_maths/factors.py",
        "(tokens.advantages < 0) & sequences",
        "(tokens.advantages < 1e9) & sequences",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[dapo-token-off-policy mask]"],
    ),
    "the tokens of low entropy are kept": Bug(
        "fused_grpo/_maths/factors.py",
        "torch.quantile(entropies, 1 - config",
        "torch.quantile(entropies, config",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[dapo-token-high entropy]"],
    ),
    "the entropy bonus is a penalty": Bug(
        "fused_grpo/_maths/formulas.py",
        "loss = loss - (torch.where(mask, entropy_weights",
        "loss = loss + (torch.where(mask, entropy_weights",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[dapo-token-entropy bonus]"],
    ),
    "a sequence's ratio is the sum of its tokens'": Bug(
        "fused_grpo/_maths/formulas.py",
        "/ self.sum(mask).clamp_min(1.0)",
        "/ 1.0",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[dapo-sequence-nothing]"],
    ),
    "a sequence's gradient is not shared out": Bug(
        "fused_grpo/_maths/factors.py",
        "shares = sequences.sum(ratio_gradient) / sequences.sum(tokens.mask)",
        "shares = sequences.sum(ratio_gradient) * sequences.sum(tokens.mask)",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[dapo-sequence-nothing]"],
    ),
    "luspo averages over tokens": Bug(
        "fused_grpo/_maths/formulas.py",
        "return on / num_sequences",
        "return on / on.sum()",
        ["tests/ops/test_trl_loss.py::test_in_fp64_they_are_trls_to_ten_digits[luspo-token-nothing]"],
    ),
    "dr_grpo divides by its own length": Bug(
        "fused_grpo/_maths/formulas.py",
        "num_sequences * config.max_completion_length)",
        "num_sequences * on.sum() / sequences.count)",
        TRL_TYPES,
    ),
    "dW of a row with nothing but an entropy gradient": Bug(
        "fused_grpo/_maths/statistics.py",
        "(self.logprobs != 0) | (self.entropy != 0)",
        "self.logprobs != 0",
        VARIANTS,
    ),
    "a main gradient without the upstream one": Bug(
        "fused_grpo/head/chunked_loss.py",
        "addcmul_(gradients[1], upstream.to(gradients[1].dtype))",
        "add_(gradients[1])",
        PROMISES,
    ),
    "the kernel clips a falling advantage from above": Bug(
        f"{KERNELS}/grpo_loss.py",
        "tl.where(falls, tl.maximum(highest, delta), tl.minimum(highest, delta))",
        "tl.minimum(highest, delta)",
        LOSS_KERNEL,
    ),
    "the kernel's KL slope without the ratio": Bug(
        f"{KERNELS}/grpo_loss.py",
        "kl, slope = kl * ratio, slope * ratio",
        "kl, slope = kl * ratio, slope",
        LOSS_KERNEL,
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
    "a tile's target is one of the others": Bug(
        f"{KERNELS}/_tiles.py",
        'tl.where(columns[None, :] == target[:, None], float("-inf"), x)',
        'tl.where(columns[None, :] == -target[:, None] - 1, float("-inf"), x)',
        HEAD_KERNEL,
    ),
    "the last block of a tile is left out": Bug(
        f"{KERNELS}/_tiles.py",
        "for i in tl.static_range(len(blocks)):",
        "for i in tl.static_range(len(blocks) - 1):",
        HEAD_KERNEL,
    ),
    "a negative logit_scale passes for a positive one": Bug(
        f"{KERNELS}/logprob_forward.py",
        "POSITIVE=softcap is None and logit_scale > 0",
        "POSITIVE=softcap is None",
        ["tests/kernels/test_logprob_forward.py", "-k", "turns_around"],
    ),
    "a target in a later part is not found": Bug(
        f"{KERNELS}/finish_rows.py",
        "target_logit = target_logits.amax(0)",
        "target_logit = target_logits[0]",
        ["tests/kernels/test_row_passes.py", "-k", "slices and triton"],
    ),
    "the kernel scales by nothing but 1": Bug(
        f"{KERNELS}/scale_hidden.py",
        "if times != 1.0:",
        "if times == 1.0:",
        ["tests/kernels/test_row_passes.py", "-k", "factor_of_one and triton"],
    ),
    "tiles are taken where the caller bounds the memory": Bug(
        "fused_grpo/head/logprob_plans.py",
        "options.chunk_bytes is None and not options.batch_invariant and",
        "not options.batch_invariant and",
        ["tests/kernels/test_tuning.py"],
    ),
    "the gradient kernel sees a target that is elsewhere": Bug(
        f"{KERNELS}/logits_gradient.py",
        "is_target = columns == target",
        "is_target = columns == tl.maximum(target, 0)",
        [
            "tests/kernels/test_row_passes.py",
            "-k",
            "gradients_of_slices_are_those_of_the_vocabulary and triton-without",
        ],
    ),
    "the kernel's weights forget the soft cap": Bug(
        f"{KERNELS}/softmax_weights.py",
        "e = e * softcap_slope(",
        "e = e + 0 * softcap_slope(",
        ["tests/kernels/test_row_passes.py::test_gradients_of_each_option_alone[triton-softcap]"],
    ),
    "the kernel's target weight forgets the soft cap": Bug(
        f"{KERNELS}/softmax_weights.py", "(-row_total * slope)", "(-row_total)", KERNEL_WEIGHTS
    ),
    "the kernel's sums do not follow a raised shift": Bug(
        f"{KERNELS}/softmax_weights.py", "sums *= factor", "sums *= 1.0", KERNEL_RISING
    ),
    "the kernel's weights do not follow a raised shift": Bug(
        f"{KERNELS}/softmax_weights.py",
        "written, first, tl.exp(m - top), BLOCK_V)",
        "written, first, 1.0, BLOCK_V)",
        KERNEL_RISING,
    ),
    "the kernel's scale forgets the temperature": Bug(
        f"{KERNELS}/softmax_weights.py",
        "-share * logit_scale * inverse_temperature",
        "-share * logit_scale",
        ["tests/kernels/test_row_passes.py::test_gradients_of_each_option_alone[triton-temperature]"],
    ),
    "the kernel leaves a row that is no number": Bug(
        f"{KERNELS}/softmax_weights.py", '(row_total < float("inf")) == 0', "row_total < 0.0", KERNEL_NO_NUMBERS
    ),
}

for more in sorted(Path(__file__).parent.glob("planted_bugs_of_*.py")):
    BUGS |= {name: Bug(*bug) for name, bug in runpy.run_path(str(more))["BUGS"].items()}


def is_caught(status: int, output: str) -> bool:
    """1: tests ran and some failed. Anything else, an import error included, proves nothing."""
    return status == 1 and re.search(r"^\d+ failed", output, re.MULTILINE) is not None


def without_a_bug() -> dict[str, Bug]:
    """What the bugs are caught by, each once and by itself."""
    return {" ".join(bug.caught_by): Bug("", "", "", bug.caught_by) for bug in BUGS.values()}


def main(arguments: list[str]) -> int:
    """pytest's status for the bugs of these names, or for all; with --none, for their tests without a bug."""
    tests = "tests/test_planted_bugs.py::test_"
    chosen = [f"{tests}the_bug_is_caught[{name}]" for name in arguments] or [f"{tests}the_bug_is_caught"]
    if arguments == ["--none"]:
        chosen = [f"{tests}without_a_bug_the_same_tests_are_green"]
    return subprocess.call([sys.executable, "-m", "pytest", "-v", "--full", *chosen], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
