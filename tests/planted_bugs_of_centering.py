"""The bugs of `planted_bugs.py` in score centering: (file, old, new, caught by)."""

MATHS = "fused_grpo/_maths/centering.py"
HEAD = "fused_grpo/head/centering.py"
ROWS = "fused_grpo/head/visited_rows.py"
TESTS = "tests/ops/test_score_centering.py"
FORMULA = [TESTS, "-k", "formula"]
MEAN = [TESTS, "-k", "mean_of_the_gradient"]
CHUNKS = [TESTS, "-k", "chunks_give and (dapo or sequence or quantile)"]
CERTAIN = [TESTS, "-k", "almost_certain"]
BAD = [TESTS, "-k", "bad_input"]
SHARDS = ["tests/ops/test_vocab_parallel.py", "-k", "shards_give and centred"]

BUGS = {
    "the tail of the sampler is left out": (
        MATHS,
        "weighted - tail[:, None] * p",
        "weighted",
        FORMULA,
    ),
    "the tail is weighted by its own mass": (
        MATHS,
        "bounds.weighted(torch.ones_like(rho), rho)",
        "rho",
        FORMULA,
    ),
    "tokens of the sampler have no weight of importance": (
        MATHS,
        "weighted = bounds.weighted(p, q)",
        "weighted = q",
        FORMULA,
    ),
    "weights outside of the bounds are cut instead of masked": (
        MATHS,
        'if self.correction == "mask":',
        "if False:",
        MEAN,
    ),
    "a lower bound of weights is ignored": (
        MATHS,
        "p.maximum(self.least * q).minimum(",
        "p.minimum(",
        MEAN,
    ),
    "a token too far from the sampler is not left out": (
        MATHS,
        "weighted = torch.where(masked, 0.0, weighted)",
        'weighted = torch.where(masked & (bounds.terms.form == "ipo"), 0.0, weighted)',
        [TESTS, "-k", "mean_of_the_gradient and dppo"],
    ),
    "all that was kept has a tail": (
        HEAD,
        'whole=config.score_centering == "kept",',
        "whole=False,",
        FORMULA,
    ),
    "a token without a log-prob of the sampler is centred": (
        HEAD,
        "return inputs.tokens.mask & ~sampling.isnan()",
        "return inputs.tokens.mask",
        FORMULA,
    ),
    "a row's own token counts twice": (
        HEAD,
        "d_head.masked_fill(repeats, 0.0)], 1)",
        "d_head], 1)",
        CHUNKS,
    ),
    "a row's own token is not among the sampler's": (
        HEAD,
        "d_own = grad_logprobs + torch.where(repeats, d_head, 0.0).sum(1)",
        "d_own = grad_logprobs",
        CHUNKS,
    ),
    "factors of the policy term do not reach the centering": (
        HEAD,
        "self.weights = self.weights * policy_weights",
        "pass",
        ["tests/ops/test_score_centering.py::test_chunks_give_what_the_reference_gives[quantile-support]"],
    ),
    "clipped tokens of two phases are not visited again": (
        ROWS,
        "return upstream.have_gradient() | (",
        "return upstream.have_gradient() & (",
        ["tests/ops/test_score_centering.py::test_chunks_give_what_the_reference_gives[sequence-topk]"],
    ),
    "gradients are put at the targets of another row": (
        ROWS,
        "targets.at_targets * seen",
        "targets.at_targets.roll(1, 0) * seen",
        CHUNKS,
    ),
    "slopes of a soft cap are read after the logits are gone": (
        ROWS,
        "* seen.slopes[rows]",
        "* several_targets.target_slopes(tile)",
        CHUNKS,
    ),
    "a factor of almost 0 is divided by": (
        "fused_grpo/head/several_targets.py",
        "torch.copysign(factor.abs().maximum(size), factor)",
        "factor",
        CERTAIN,
    ),
    "gradients of kept tokens leave their own token out": (
        "fused_grpo/head/kept_tokens.py",
        "moved.index_copy(0, target_entries, -sums)",
        "moved",
        ["tests/ops/test_score_centering.py::test_chunks_give_what_the_reference_gives[dapo-support]"],
    ),
    "the policy's mass over a support is not subtracted": (
        "fused_grpo/head/kept_loss.py",
        "c = weighted[:, 0] - mass[1] * rows.sums_of_rows(weighted[:, 0])",
        "c = weighted[:, 0]",
        [TESTS, "-k", "kept_tokens_either"],
    ),
    "a token may be given twice": (
        HEAD,
        "elif bool((wrong | twice).any()):",
        "elif bool(wrong.any()):",
        BAD,
    ),
    "ranks find the tokens of their own shard alone": (
        ROWS,
        "parts = [state] if self.shards is None else self.shards.gather(state)",
        "parts = [state]",
        SHARDS,
    ),
    "a token that the policy bans has a correction": (
        MATHS,
        "present & (logprobs != -torch.inf)",
        "present",
        [TESTS, "-k", "bans and topk-torch"],
    ),
    "a sampler may be more than certain": (
        HEAD,
        "most > _ROUNDED_UP",
        "most > 1e9",
        BAD,
    ),
    "a token that centering alone moves is counted as without a gradient": (
        HEAD,
        "without & (d_head == 0).all(1)",
        "without",
        [TESTS, "-k", "moved_by_centering and topk"],
    ),
    "the same over kept tokens": (
        "fused_grpo/head/kept_loss.py",
        "(upstream.have_gradient() | (counts > 0))",
        "upstream.have_gradient()",
        [TESTS, "-k", "moved_by_centering and support-torch"],
    ),
}
