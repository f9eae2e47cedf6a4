"""The bugs of `planted_bugs.py` in divergences, kept tokens and K targets per row: (file, old, new, caught by)."""

KERNELS = "kernels/torch-ext/fused_grpo_kernels"
SEVERAL = ["tests/ops/test_several_targets.py", "-k", "as_exact_as_fp32 and entropy-softcap-torch-dtype0"]
SEVERAL_CONFIDENT = ["tests/ops/test_several_targets.py", "-k", "confident and None-torch"]
PACKED_SUPPORTS = ["tests/trainer/batching/test_micro_batches.py", "-k", "keeps_its_support"]
SUPPORTS = ["tests/trainer/engines/test_support.py", "-k", "recorder"]
TRUNCATED = "tests/trainer/test_sampling_support.py"
KEPT = ["tests/ops/test_support.py", "-k", "each_option and None and torch and temperature"]
KEPT_REFUSED = ["tests/ops/test_support.py", "-k", "cannot_be_is_refused"]
KEPT_PIECES = ["tests/ops/test_support.py", "-k", "long_segments and torch"]
KEPT_KERNELS = ["tests/kernels/test_support.py", "-k", "triton and weighted_rows"]
DIVERGENCE = ["tests/kernels/test_divergence.py", "-k", "torch and (autograd or confident)"]
SWEEP = ["tests/kernels/test_divergence.py", "-k", "statistics_of_the_sweep"]
KERNEL_DIVERGENCE = ["tests/kernels/test_divergence.py", "-k", "triton and ((autograd and 130) or confident)"]
CERTAIN_STUDENT = ["tests/ops/test_divergence.py", "-k", "certain_student"]
DIVERGENCES = ["tests/ops/test_divergence.py", "-k", "ten_digits or masked_tokens or four_products"]
DISTILLATION = ["tests/ops/test_distillation.py", "-k", "ten_digits or product_more"]
NOT_ALLOWED = ["tests/ops/test_divergence.py", "-k", "neither_model and torch"]

BUGS = {
    "the student's confident token has the gradient of a difference": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "confident, hit = rows.s < 1,",
        "confident, hit = rows.s < 0,",
        ["tests/kernels/test_divergence.py::test_a_confident_target_keeps_both_of_its_gradients[torch-reverse_kl]"],
    ),
    "the gradient of a divergence forgets its mean": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "(factor * rows.x * p + g) * p",
        "g * p",
        DIVERGENCE,
    ),
    "jsd mixes the wrong way round": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "e_s, value=self.beta, out=",
        "e_s, value=1 - self.beta, out=",
        DIVERGENCE,
    ),
    "the teacher's peak counts among its others": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "torch.where(self.same_peak, t, 1 + t - t_sums)",
        "1 + t",
        DIVERGENCE,
    ),
    "the most probable token is sought in the first block alone": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "(at + torch.arange(",
        "(at + 0 * torch.arange(",
        DIVERGENCE,
    ),
    "two tokens of probability 0 diverge": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "x.masked_fill_(weights == 0.0, 0.0)",
        "x",
        NOT_ALLOWED,
    ),
    "the teacher has the temperature and bias of the student": (
        "fused_grpo/head/chunked_divergence.py",
        "teacher_head=teacher.transform,\n            dtype=",
        "teacher_head=tile.transform,\n            dtype=",
        DIVERGENCES,
    ),
    "masked rows of the teacher take part": (
        "fused_grpo/head/chunked_divergence.py",
        "TwoHeads(self.student.select(index), self.teacher.select(index))",
        "TwoHeads(self.student.select(index), self.teacher)",
        DIVERGENCES,
    ),
    "a teacher's rows are those of the chunk": (
        "fused_grpo/head/head.py",
        "return self.rows if self.index is None else self.index",
        "return self.rows",
        DISTILLATION,
    ),
    "a loss in two phases leaves the teacher out where it has no gradient itself": (
        "fused_grpo/head/visited_rows.py",
        "torch.ones_like(upstream.logprobs, dtype=torch.bool)",
        "upstream.have_gradient()",
        DISTILLATION,
    ),
    "the gradients of the loss are lost beside those of the divergence": (
        "fused_grpo/head/chunked_divergence.py",
        "self.weights[rows] * scale, grad_logprobs * scale",
        "self.weights[rows] * scale, 0.0 * grad_logprobs",
        DISTILLATION,
    ),
    "beside a teacher, the others of a target leave out the most probable token": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "torch.where(self.student.at == self.targets, s, 1 + s - e)",
        "s",
        SWEEP,
    ),
    "beside a teacher, the entropy counts the target twice": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "weighted = self._weighted - e * c.clamp_min(-128.0)",
        "weighted = self._weighted",
        SWEEP,
    ),
    "beside a teacher, the entropy leaves out the teacher's most probable token": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "        self._add_entropy(peak_s)\n",
        "",
        SWEEP,
    ),
    "a certain student's divergence keeps the digits of a quotient": (
        "fused_grpo/passes/torch_passes/divergence.py",
        "torch.where(difference < -0.5, ",
        "torch.where(difference < -2.0, ",
        CERTAIN_STUDENT,
    ),
    "the kernel's certain student's divergence keeps the digits of a quotient": (
        f"{KERNELS}/divergence.py",
        "tl.where(change < -0.5, ",
        "tl.where(change < -2.0, ",
        CERTAIN_STUDENT,
    ),
    "the kernel's forward KL is the reverse one": (
        f"{KERNELS}/divergence.py",
        "(e_s * d, e_t) if KIND == REVERSE else (e_t, -e_t * d)",
        "(e_s * d, e_t) if KIND == REVERSE else (e_t, e_s * d)",
        KERNEL_DIVERGENCE,
    ),
    "the kernel's confident token has the gradient of a difference": (
        f"{KERNELS}/divergence.py",
        "tl.where(s < 1.0, 0.0, 1.0)",
        "tl.where(s < 0.0, 0.0, 1.0)",
        ["tests/kernels/test_divergence.py::test_a_confident_target_keeps_both_of_its_gradients[triton-reverse_kl]"],
    ),
    "the kernel's largest logits count among the others": (
        f"{KERNELS}/divergence.py",
        "e_s, x_terms = tl.where(c_s == 0.0, 0.0, e_s), ",
        "e_s, x_terms = e_s, ",
        KERNEL_DIVERGENCE,
    ),
    "the kernel's target has no gradient of its log-prob": (
        f"{KERNELS}/divergence.py",
        "tl.where(columns == target, g, 0.0)",
        "tl.where(columns == target, 0.0 * g, 0.0)",
        [
            "tests/kernels/test_divergence.py::test_divergence_and_gradient_are_as_exact_as_autograd[triton-True--3-130-reverse_kl]"
        ],
    ),
    "supports of another sequence": (
        "trainer/batching/micro_batches.py",
        "tables[index] if mask is None",
        "tables[index - 1] if mask is None",
        PACKED_SUPPORTS,
    ),
    "supports begin one token late": (
        "trainer/batching/micro_batches.py",
        "listed.sizes]).cumsum(0)",
        "listed.sizes]).roll(-1).cumsum(0)",
        PACKED_SUPPORTS,
    ),
    "answers of a tool are learned from": (
        "trainer/types.py",
        "values if self.completion_mask is None else list(compress(values, self.completion_mask))",
        "values",
        ["tests/trainer/batching/test_completion_mask.py", "-k", "rows_hold"],
    ),
    "kept tokens of a step stay with the step": (
        "trainer/engines/transformers_generate.py",
        "torch.cat(self._ids)[order]",
        "torch.cat(self._ids)",
        SUPPORTS,
    ),
    "log-probs of truncated sampling over the whole vocabulary": (
        "trainer/policy.py",
        '"support": batch.support}',
        '"support": None}',
        [TRUNCATED, "-k", "plain_loop"],
    ),
    "supports of the tokens after the end": (
        "trainer/types.py",
        "self.ids[:count].clone()",
        "self.ids[-count:].clone()",
        [TRUNCATED, "-k", "on_policy and 0.05"],
    ),
    "no log-prob check under truncation": (
        "trainer/loop.py",
        "self.weight_check.is_plain_within_support if buffer.has_support else self.weight_check.is_plain",
        "self.weight_check.is_plain",
        [TRUNCATED, "-k", "stale"],
    ),
    "a checkpoint without supports": (
        "trainer/batching/rollout_buffer.py",
        '    "support_ids": torch.int32,\n    "support_sizes": torch.int32,\n',
        "",
        ["tests/trainer/checkpoint/test_resume.py", "-k", "same_run and kept"],
    ),
    "the padding of a tile of kept tokens is a token": (
        "fused_grpo/head/kept_tokens.py",
        "z.fill_(-torch.inf)",
        "z.fill_(-9.0)",
        KEPT,
    ),
    "kept tokens have the temperature of another row": (
        "fused_grpo/head/kept_tokens.py",
        "raw[items], e.rows[row]",
        "raw[items], row",
        KEPT,
    ),
    "the slope of kept tokens forgets the soft cap": (
        "fused_grpo/head/kept_tokens.py",
        "slope = slope * distributions.cap_slope(",
        "slope * distributions.cap_slope(",
        KEPT,
    ),
    "dW takes gradients in the order of rows and hidden states in that of tokens": (
        "fused_grpo/head/kept_tokens.py",
        "[order], g[order], self.head.hidden",
        "[order], g, self.head.hidden",
        KEPT,
    ),
    "dW of kept tokens replaces that of rows without a support": (
        "fused_grpo/head/kept_tokens.py",
        "len(self.full_rows) > 0",
        "False",
        KEPT,
    ),
    "sums of pieces go to the first rows": (
        "fused_grpo/head/kept_tokens.py",
        "put(out, places[long]",
        "put(out, places[: len(long)]",
        KEPT_PIECES,
    ),
    "a token may be kept twice": ("fused_grpo/head/entries.py", "keys[1:] == keys[:-1]", "keys[1:] < 0", KEPT_REFUSED),
    "a target may be outside of its support": (
        "fused_grpo/head/entries.py",
        "lost = places < 0",
        "lost = places < -1",
        KEPT_REFUSED,
    ),
    # Not the next segment's first: after the last one that would be a read from anywhere, and a crash now and then.
    "the kernel leaves out a segment's last entry": (
        f"{KERNELS}/support.py",
        "exists = entries < end",
        "exists = entries < end - 1",
        KEPT_KERNELS,
    ),
    "the kernel does not round what it gathers": (
        f"{KERNELS}/support.py",
        "values.to(CAST).to(tl.float32)",
        "values.to(tl.float32)",
        KEPT_KERNELS,
    ),
    "a target that a tile left out stays out of the sums": (
        "fused_grpo/_maths/statistics.py",
        "torch.ones_like(returned)",
        "torch.zeros_like(returned)",
        [
            "tests/ops/test_several_targets.py",
            "-k",
            "values_and_gradients_are_as_exact_as_fp32_allows and trainable and entropy-softcap-torch-dtype0",
        ],
    ),
    "a tile leaves out its first target, not the largest": (
        "fused_grpo/head/several_targets.py",
        "top = z.argmax(1, keepdim=True)",
        "top = 0 * z.argmax(1, keepdim=True)",
        SEVERAL_CONFIDENT,
    ),
    "a target of another tile is written to this one": (
        "fused_grpo/head/several_targets.py",
        "torch.where(in_tile.any(1, keepdim=True), values, out.gather(1, column))",
        "values",
        SEVERAL,
    ),
    "a repeated target has the gradient of its first place alone": (
        "fused_grpo/head/several_targets.py",
        "torch.where(repeated, gradients[:, reach:], 0.0)",
        "0.0",
        SEVERAL,
    ),
    "the gradient of the largest target as a difference": (
        "fused_grpo/head/several_targets.py",
        ".scatter_(1, top, others_of_top)",
        "",
        SEVERAL_CONFIDENT,
    ),
    "the entropy has no gradient at targets": (
        "fused_grpo/head/several_targets.py",
        "values -= grad_entropy[:, None] * p",
        "values -= 0.0 * p",
        SEVERAL,
    ),
    "a frozen head: a target moves towards its row of W alone": (
        "fused_grpo/head/several_targets.py",
        "moved.scatter_(1, is_top.int().argmax(1, keepdim=True), -moved.sum(1, keepdim=True))",
        "moved",
        SEVERAL_CONFIDENT,
    ),
    "a frozen head: repetitions of the largest target leave a rounding": (
        "fused_grpo/head/several_targets.py",
        "torch.where(is_top, 0.0, grad_logprobs)",
        "grad_logprobs.scatter(1, is_top.int().argmax(1, keepdim=True), 0.0)",
        ["tests/ops/test_several_targets.py", "-k", "confident and frozen and triton"],
    ),
    "a frozen head: the largest target is chosen again, from log-probs": (
        "fused_grpo/head/registered_ops.py",
        "(head, kept, largest, g)",
        "(head, kept, counted_targets.gather(1, logprobs.argmax(1, keepdim=True))[:, 0], g)",
        ["tests/ops/test_several_targets.py", "-k", "almost_equal"],
    ),
    "no row is far from its anchor": (
        f"{KERNELS}/softmax_weights_forward.py",
        "((row_total > LEAST) & (row_total < MOST)) == 0",
        "row_total != row_total",
        ["tests/kernels/test_softmax_weights_forward.py", "-k", "far_from"],
    ),
    "kept weights of other rows": (
        "fused_grpo/head/logprob_plans.py",
        "return gradient_rows, kept.cumsum(0)[gradient_rows] - 1",
        "return gradient_rows, gradient_rows",
        ["tests/ops/test_kept_weights.py", "-k", "mixture"],
    ),
    "a target's gradient in every tile": (
        "fused_grpo/head/several_targets.py",
        "torch.where(in_tile, moved * _slopes(None, tile.transform), 0.0)",
        "moved * _slopes(None, tile.transform)",
        ["tests/ops/test_kept_weights.py::test_tiles_of_copied_weights_add_up[0-0-True-triton]"],
    ),
    "a tangent is 0 in silence": (
        "fused_grpo/head/checks.py",
        "(forward or transformed())",
        "False",
        ["tests/ops/test_transforms.py", "-k", "linear_logprobs-jvp"],
    ),
    "ranks send one target of several": (
        "fused_grpo/head/sharded.py",
        "x[3:].t() if several",
        "x[3:4].t().expand(-1, len(x) - 3) if several",
        ["tests/ops/test_vocab_parallel.py", "-k", "shards_give and 2-several"],
    ),
}
