"""The bugs of `planted_bugs.py` in the optimal token baseline and the variance report: (file, old, new, caught by)."""

BASELINE = "trainer/collect/advantages.py"
COLLECTOR = "trainer/collect/collector.py"
METRICS = "trainer/batching/micro_batch_metrics.py"
LOSS = "fused_grpo/fused_loss.py"
TESTS = "tests/trainer/collect/test_token_baseline.py"
FORMULA = [TESTS, "-k", "formula or exactly_0"]
RANKS = [TESTS, "-k", "two_processes and tir"]
SQUARES = ["tests/ops/test_squared_gradients.py", "-k", "autograd and torch-dtype0"]
KEPT = ["tests/ops/test_outputs.py", "-k", "kept_tokens and torch"]

BUGS = {
    "a group with equal rewards learns from its longest completion": (
        BASELINE,
        "if len({one.reward for one in taking}) < 2:",
        "if len(taking) < 2:",
        ["tests/trainer/collect/test_token_baseline.py::test_equal_rewards_have_advantages_of_exactly_0"],
    ),
    "a path has the norm of its last token alone": (
        BASELINE,
        "one.norms.double().cumsum(0)",
        "one.norms.double()",
        FORMULA,
    ),
    "a completion without a reward is a wrong one": (
        BASELINE,
        "len(self.norms) > 0 and not isnan(self.reward)",
        "len(self.norms) > 0",
        FORMULA,
    ),
    "a completion that is alone has no baseline anywhere": (
        BASELINE,
        "if zero_tail:",
        "if True:",
        FORMULA,
    ),
    "places of tools count the tools' tokens": (
        COLLECTOR,
        "range(sample.num_own) if is_tir else sample.own(range(len(sample.completion_ids)))",
        "range(sample.num_own)",
        [TESTS, "-k", "places_count"],
    ),
    "each rank has a baseline of its part": (
        COLLECTOR,
        "parts = [values] if is_whole else gather_objects(doing, values)",
        "parts = [values] * self.accelerator.num_processes",
        RANKS,
    ),
    "a middle reward counts for none": (
        "trainer/types.py",
        "self.advantage != 0 if self.token_advantages is None else bool(self.token_advantages.any())",
        "self.advantage != 0",
        [TESTS, "-k", "mean_reward"],
    ),
    "norms have the correction once": (
        "trainer/learner.py",
        "own * correction_weights(logprobs, part, self.loss_config).square()",
        "own * correction_weights(logprobs, part, self.loss_config)",
        [TESTS, "-k", "stale"],
    ),
    "norms of kept tokens are those of the vocabulary": (
        "fused_grpo/head/kept_tokens.py",
        "self._sums(torch.exp(2 * self.entry_logprobs(statistics)))",
        "self._sums(torch.exp(self.entry_logprobs(statistics)))",
        KEPT,
    ),
    "the first of a tie leads wherever it is listed": (
        "fused_grpo/head/kept_tokens.py",
        "e.tokens < e.tokens[target_entries][e.row]",
        "e.tokens > e.tokens[target_entries][e.row]",
        KEPT,
    ),
    "squared gradients are those of log-probs": (
        LOSS,
        "token_squares = upstream.square() * score_norms(logprobs.detach(), squares)",
        "token_squares = score_norms(logprobs.detach(), squares)",
        SQUARES,
    ),
    "an own probability is in the norm twice": (
        "fused_grpo/_maths/moments.py",
        "(squares - torch.exp(2 * logprobs))",
        "squares",
        SQUARES,
    ),
    "the log-prob of a centred row is of its first target": (
        "fused_grpo/head/centering.py",
        "every._replace(logprobs=every.logprobs.amax(1))",
        "every._replace(logprobs=every.logprobs[:, 0])",
        [*SQUARES[:-1], "autograd and torch-dtype0 and phases"],
    ),
    "a report counts completions by their energy": (
        METRICS,
        "sum(map(sqrt, squares)) ** 2 / total",
        "total ** 2 / sum(x * x for x in squares)",
        [TESTS, "-k", "report_is"],
    ),
    "a report is of one rank": (
        METRICS,
        'gather_objects("joining gradients", energies)',
        "[energies]",
        RANKS,
    ),
    "an effective sample size is one of weights": (
        METRICS,
        "_mean(rho.square(), ones)",
        "_mean(rho, ones)",
        ["tests/trainer/batching/test_ratio_metrics.py"],
    ),
}
