"""The bugs of `planted_bugs.py` in the outputs beside log-probs: (file, old, new, caught by)."""

KERNEL = "kernels/torch-ext/fused_grpo_kernels/row_moments.py"
MATHS = "fused_grpo/_maths/moments.py"
PASS = "fused_grpo/passes/torch_passes/tile_moments.py"
TESTS = "tests/ops/test_outputs.py"
TRL = "tests/integrations/test_trl.py"
VALUES = [TESTS, "-k", "exact_as_fp32 and trainable and torch-dtype0"]
TIES = [TESTS, "-k", "equal_logits and torch"]
TIES_IN_TRITON = [TESTS, "-k", "equal_logits and triton"]
MERGED = [TESTS, "-k", "tiles_merge or equal_logits"]
ENTROPY = [TESTS, "-k", "rise and triton"]
FIELDS = [TRL, "-k", "fields_of_ties"]

BUGS = {
    "the target is not among the squared probabilities": (
        MATHS,
        "torch.exp(2 * log_p) + (share",
        "(share",
        VALUES,
    ),
    "squares of the others are relative to their own sum": (
        MATHS,
        "share_of_others(log_p, total) *",
        "1 / total *",
        VALUES,
    ),
    "squares of tiles are rescaled once": (
        MATHS,
        "torch.exp(2 * (shifts - finite(shift)))",
        "torch.exp(shifts - finite(shift))",
        ["tests/ops/test_outputs.py::test_tiles_merge_to_the_moments_of_whole_rows"],
    ),
    "squares are relative to the shift of the log-probs": (
        MATHS,
        " * torch.exp(moments.shift - finite(shift))",
        "",
        ENTROPY,
    ),
    "a tie leads wherever it is": (
        MATHS,
        " & (moments.target_logit > moments.before)",
        "",
        TIES,
    ),
    "no tie leads": (
        MATHS,
        "moments.target_logit >= moments.largest",
        "moments.target_logit > moments.largest",
        TIES,
    ),
    "a tie in the target's own block is not looked at": (
        PASS,
        "if (tied := before == logits).any():",
        "if False:",
        TIES,
    ),
    "a tile after the target is before it": (
        PASS,
        "torch.where(self._tile.targets < self._tile.raw.shape[1], self._before, self._largest)",
        "self._largest",
        MERGED,
    ),
    "the mean logit leaves the target out": (
        PASS,
        "z[rows, columns] = logits\n",
        "z[rows, columns] = 0.0\n",
        VALUES,
    ),
    "the pass leaves the target's logit in the tile": (
        PASS,
        "            z[rows, columns] = -torch.inf\n",
        "",
        VALUES,
    ),
    "only the last tile of a row counts": (
        MATHS,
        "self._parts.append(Moments(*fields))",
        "self._parts = [Moments(*fields)]",
        VALUES,
    ),
    "a kernel without logits runs beside outputs": (
        "fused_grpo/head/logprob_plans.py",
        "head.targets.ndim == 2 or options.moments or (any",
        "head.targets.ndim == 2 or (any",
        [TESTS, "-k", "exact_as_fp32 and triton-dtype2 and gradient"],
    ),
    "outputs of ignored rows are those of the first token": (
        "fused_grpo/head/registered_ops.py",
        "all_rows(row_moments.finish(statistics))",
        "row_moments.finish(statistics)",
        [TESTS, "-k", "exact_as_fp32 and triton-dtype2 and gradient"],
    ),
    "the kernel's sums keep the shift of the first tile": (
        KERNEL,
        "twice * exp(2.0 * (m - shift)) + exp",
        "twice + exp",
        ["tests/kernels/test_row_passes.py::test_moments_are_as_exact_as_torch[triton-0.0--2-257]"],
    ),
    "the kernel's ties in the target's tile lead": (
        KERNEL,
        "tl.where(columns < target, z, float",
        "tl.where(columns < 0, z, float",
        TIES_IN_TRITON,
    ),
    "the kernel's ties in tiles before the target lead": (
        KERNEL,
        "            earlier = tl.maximum(earlier, top)\n",
        "            earlier = earlier\n",
        ["tests/kernels/test_row_passes.py::test_moments_are_as_exact_as_torch[triton-0.0--2-257]"],
    ),
    "TRL gets the sum of squares without its logarithm": (
        "fused_grpo/integrations/trl.py",
        "else squares.log()",
        "else squares",
        FIELDS,
    ),
}
