"""The bugs of `planted_bugs.py` in the losses and estimators that TRL does not have: (file, old, new, caught by)."""

KERNEL = "kernels/torch-ext/fused_grpo_kernels/grpo_loss.py"
AUTHORS = ["tests/ops/test_authors_formulas.py", "-k", "torch or icepop"]
ESTIMATORS = ["tests/trainer/collect/test_advantage_estimators.py"]
REMAX = ["tests/trainer/collect/test_remax.py"]
REMAX_RESUMED = ["tests/trainer/collect/test_prefetch.py", "-k", "stopped and remax"]
REMAX_EPISODES = ["tests/trainer/episodes/test_environments.py", "-k", "greedy"]
COVARIANCE = ["tests/trainer/batching/test_covariance_selection.py"]
LOSS_KERNEL = ["tests/kernels/test_grpo_loss.py", "-k", "every_variant"]
NOTHING = ["tests/kernels/test_grpo_loss.py", "-k", "without_an_advantage and (dppo_tv or bounds)"]
EXTREMES = ["--full", "tests/kernels/test_grpo_loss.py", "-k", "infinite_logprobs and (clipped or cispo) and 1.0"]

BUGS = {
    "dppo masks what moves back": (
        "fused_grpo/_maths/formulas.py",
        "falls, rises = falls & (advantages < 0)",
        "falls, rises = falls & (advantages > 0)",
        AUTHORS,
    ),
    "ipo masks only what moves away": (
        "fused_grpo/_maths/formulas.py",
        'if terms.form == "ipo":\n        return',
        "if False:\n        return",
        AUTHORS,
    ),
    "dro's penalty is measured from the old policy": (
        "fused_grpo/config.py",
        "if config.loss_type in OF_SAMPLER and",
        "if config.loss_type in DPPO and",
        AUTHORS,
    ),
    "a quadratic penalty without its half": (
        "fused_grpo/_maths/formulas.py",
        "terms.log_ratio_penalty / 2 *",
        "terms.log_ratio_penalty *",
        AUTHORS,
    ),
    "a token without an advantage is left in": (
        "fused_grpo/_maths/formulas.py",
        " | ((advantages == 0) & ~log_ratio.detach().isnan())",
        "",
        NOTHING,
    ),
    "the slope of what is left out is infinite": (
        "fused_grpo/_maths/formulas.py",
        "policy_term(moving, moving_ratio,",
        "policy_term(logprobs, moving_ratio,",
        NOTHING,
    ),
    "the kernel multiplies infinity by a weight of 0": (
        KERNEL,
        "tl.where(factor == 0.0, 0.0, rho * factor)",
        "rho * factor",
        NOTHING,
    ),
    "the kernel's penalty leads away": (
        KERNEL,
        "d_log_p += slope",
        "d_log_p -= slope",
        LOSS_KERNEL,
    ),
    "a penalty needs an advantage": (
        "fused_grpo/head/chunked_loss.py",
        "config.kl_cov_ratio, config.log_ratio_penalty)",
        "config.kl_cov_ratio)",
        ["tests/ops/test_loss_variants.py", "-k", "penalty"],
    ),
    "a run leaves out completions that have a penalty": (
        "trainer/batching/micro_batches.py",
        "[args.log_ratio_penalty, router_coefficient]",
        "[router_coefficient]",
        ["tests/trainer/batching/test_zero_advantages.py::test_nothing_is_left_out_where_every_token_counts[options5]"],
    ),
    "dro's centering is weighted by a ratio": (
        "fused_grpo/_maths/centering.py",
        'terms.form == "reinforce" and',
        'terms.form == "dro" and',
        ["tests/ops/test_score_centering.py", "-k", "mean_of_the_gradient"],
    ),
    "centering leaves ipo's masked tokens in": (
        "fused_grpo/_maths/centering.py",
        "weighted = torch.where(masked, 0.0, weighted)",
        'weighted = torch.where(masked & (bounds.terms.form != "ipo"), 0.0, weighted)',
        ["tests/ops/test_score_centering.py", "-k", "mean_of_the_gradient"],
    ),
    "dppo's divergence without the other tokens": (
        "fused_grpo/_maths/formulas.py",
        "(old - logprobs) + old_rest * (old_rest.log() - new_rest.log())",
        "(old - logprobs)",
        AUTHORS,
    ),
    "dppo's ratio is to the old policy": (
        "fused_grpo/_maths/formulas.py",
        "old = denominator(old, sampling_logprobs, mask)",
        "denominator(old, sampling_logprobs, mask)",
        AUTHORS,
    ),
    "gmpo does not clip": (
        "fused_grpo/_maths/formulas.py",
        "change.clamp(max=terms.epsilon_high),",
        "change.clamp(max=9.0),",
        AUTHORS,
    ),
    "a clipped token of gmpo has a gradient": (
        "fused_grpo/_maths/factors.py",
        " & ~(below | above)",
        "",
        AUTHORS,
    ),
    "sequences are rejected by the sum": (
        "fused_grpo/_maths/factors.py",
        "statistic = inputs.sequences.mean(token_values, mask)",
        "statistic = inputs.sequences.sum(torch.where(mask, token_values, 0.0))",
        AUTHORS,
    ),
    "icepop has no lower bound": (
        "fused_grpo/config.py",
        '"sampling_clip_min": 0.5,',
        '"sampling_clip_min": 0.0,',
        AUTHORS,
    ),
    "kl-cov takes the smallest covariances": (
        "fused_grpo/_maths/factors.py",
        "order, count = order.flip(0), max",
        "order, count = order, max",
        AUTHORS,
    ),
    "a rank selects by its own tokens": (
        "trainer/batching/micro_batch_metrics.py",
        "parts = rank_selected.split([len(part.targets) for part in packed])",
        "parts = [select_by_covariance(fact[0], fact[1], fact[2] != 0, config) for fact in facts]",
        COVARIANCE,
    ),
    "rloo has its own reward in the baseline": (
        "trainer/collect/advantages.py",
        "centred * count / (count - 1).clamp_min(1)",
        "centred",
        ESTIMATORS,
    ),
    "maxrl is divided by the standard deviation": (
        "trainer/collect/advantages.py",
        "centred / mean, 0.0)",
        "centred / nanstd(groups), 0.0)",
        ESTIMATORS,
    ),
    "opo weights completions equally": (
        "trainer/collect/advantages.py",
        "weights = weights.masked_fill(groups.isnan(), 0.0)",
        "weights = (~groups.isnan()).float()",
        ESTIMATORS,
    ),
    "gpg counts groups without a gradient": (
        "trainer/collect/advantages.py",
        "(~_are_equal(groups)).sum()",
        "(~groups.isnan()).any(1).sum()",
        ESTIMATORS,
    ),
    "pkpo compares with sets of k others": (
        "trainer/collect/advantages.py",
        "k * comb(j, k - 2) / sets",
        "k * comb(j, k - 1) / sets",
        ESTIMATORS,
    ),
    "pkpo divides by the sets of a full group": (
        "trainer/collect/advantages.py",
        "_shares_of_best(n, min(k, n),",
        "_shares_of_best(groups.shape[1], min(k, n),",
        ESTIMATORS,
    ),
    "remax asks each completion for a baseline of its own": (
        "trainer/collect/advantages.py",
        "baselines.view(groups.shape)[:, :1]",
        "baselines.view(groups.shape)",
        ESTIMATORS,
    ),
    "remax samples its baselines as all completions": (
        "trainer/collect/collector.py",
        "replace(sampling, n=1, temperature=0.0)",
        "replace(sampling, n=1)",
        REMAX,
    ),
    "a completion that is no baseline drops nothing": (
        "trainer/collect/scoring.py",
        "one.greedy is not None and one.greedy.dropped",
        "False",
        ["tests/trainer/collect/test_remax.py::test_a_group_whose_greedy_completion_cannot_be_scored_is_dropped[0]"],
    ),
    "a baseline that the engine fails for has no reason": (
        "trainer/collect/collector.py",
        "one.failure or (other and other.failure)",
        "one.failure",
        ["tests/trainer/collect/test_remax.py::test_a_group_whose_greedy_completion_the_engine_fails_for_is_dropped"],
    ),
    "remax replaces groups whose own rewards are equal": (
        "trainer/collect/advantages.py",
        "if baselines is None:",
        "if len(groups):",
        REMAX,
    ),
    "what a greedy completion logs is that of a batch": (
        "trainer/collect/scoring.py",
        "        failure=scored.failure or result.failure,",
        "        failure=scored.failure or result.failure,\n        logged=result.counted().logged,",
        ["tests/trainer/collect/test_remax.py::test_what_the_functions_log_of_greedy_completions_is_not_in_the_log"],
    ),
    "greedy completions are prefetched, and not saved": (
        "trainer/collect/collector.py",
        "self.has_greedy and not greedy",
        "self.has_greedy",
        REMAX_RESUMED,
    ),
    "greedy completions belong to other prompts after a resume": (
        "trainer/collect/collector.py",
        "from_tensors(greedy)",
        "from_tensors(greedy)[::-1]",
        ["tests/trainer/collect/test_prefetch.py::test_stopped_and_resumed_is_the_same_run[every second step, remax]"],
    ),
    "greedy episodes reset the environments of all others": (
        "trainer/collect/collector.py",
        "complete(), complete_greedy())",
        "complete(), self._completing(engine, *greedy_inputs, [numbers[place] for place in places], batch=batch)())",
        REMAX_EPISODES,
    ),
    "reinforce++ scales by the group": (
        "trainer/collect/advantages.py",
        "nanstd(in_batch) + EPSILON_OF_BATCH",
        "nanstd(in_batch.view(-1, size)).repeat_interleave(size)[None] + EPSILON_OF_BATCH",
        ESTIMATORS,
    ),
    "the kernel's dppo masks nothing that falls": (
        KERNEL,
        "(p_change < 0.0) & (divergence > lowest)",
        "(p_change < 0.0) & (p_change > lowest)",
        LOSS_KERNEL,
    ),
    "the kernel's ipo masks by the sign of the advantage": (
        KERNEL,
        "return falls | rises, falls & (advantage != 0.0)",
        "return (falls & (advantage < 0.0)) | (rises & (advantage > 0.0)), falls & (advantage != 0.0)",
        LOSS_KERNEL,
    ),
    "the kernel hides a ratio that is not a number": (
        KERNEL,
        "tl.where(values > bound, bound, values)",
        "tl.where(values < bound, values, bound)",
        EXTREMES,
    ),
    "the slope of a constant is 0 times an infinite ratio": (
        "fused_grpo/_maths/formulas.py",
        "torch.where(constant, change, log_ratio).exp()",
        "log_ratio.exp()",
        EXTREMES,
    ),
    "the kernel's kl-cov has the sign of a bonus": (
        KERNEL,
        "tl.where(change < 0.0, -penalty,",
        "tl.where(change < 0.0, penalty,",
        LOSS_KERNEL,
    ),
}
