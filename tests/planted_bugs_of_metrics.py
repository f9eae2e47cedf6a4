"""The bugs of `planted_bugs.py` in the numbers that a run logs: (file, old, new, caught by)."""

INDEPENDENT = ["tests/trainer/logging/test_independent_metrics.py", "-k"]
INDEPENDENT_STEPS = ["tests/trainer/logging/test_independent_step_metrics.py", "-k"]
SCORING, STEPS, OUTPUT = (
    "trainer/collect/scoring.py",
    "trainer/batching/micro_batch_metrics.py",
    "trainer/logging/run_output.py",
)

BUGS = {
    "the reward of all that was sampled is that of the batch": (
        SCORING,
        "every.nanmean()",
        "rewards.nanmean()",
        [*INDEPENDENT, "rounds"],
    ),
    "what dynamic sampling replaced was not dropped": (
        SCORING,
        "torch.tensor(scored.sampled or [",
        "torch.tensor([",
        [*INDEPENDENT, "rounds"],
    ),
    "a group of one reward has a spread of 0": (
        SCORING,
        "nanstd(groups)[comparable].mean()",
        "nanstd(groups).mean()",
        [*INDEPENDENT, "nothing_for_most or drops"],
    ),
    "a dropped group has equal rewards": (
        SCORING,
        "(apart < EQUAL_REWARDS)[kept]",
        "apart < EQUAL_REWARDS",
        [*INDEPENDENT, "drops"],
    ),
    "the spread of normalised rewards is that of raw ones": (
        SCORING,
        "(nanstd(in_batch) < EQUAL_REWARDS)",
        "(nanstd(rewards[None]) < EQUAL_REWARDS)",
        [*INDEPENDENT, "equal and groups"],
    ),
    "rounds weigh alike in what a function logs": (
        SCORING,
        "[count / total for _, count in valid]",
        "[1.0 for _, count in valid]",
        [*INDEPENDENT, "rounds and drops"],
    ),
    "the greedy reward of a dropped group counts": (
        SCORING,
        "baselines[kept, 0]",
        "baselines[:, 0]",
        [*INDEPENDENT, "greedy"],
    ),
    "tools keep no token, which counts": (
        SCORING,
        "int((sizes > 0).sum())",
        "len(sizes)",
        [*INDEPENDENT, "kept_tokens"],
    ),
    "a curriculum's difficulty is that of the last round": (
        "trainer/data/prompt_sampler.py",
        "self._drawn or self.batch",
        "self.batch",
        [*INDEPENDENT, "difficulty"],
    ),
    "the ratio of a sequence counts for each token": (
        STEPS,
        "_mean(sequences.mean(ratio, tokens.mask), counts > 0)",
        "_mean(ratio, tokens.mask)",
        [*INDEPENDENT_STEPS, "sequences or gmpo"],
    ),
    "ipo clips by the sign of the advantage": (
        "fused_grpo/_maths/formulas.py",
        "return falls | rises, falls & (advantages != 0), rises & (advantages != 0)",
        "return falls | rises, (falls | rises) & (advantages < 0), (falls | rises) & (advantages > 0)",
        [*INDEPENDENT_STEPS, "ipo"],
    ),
    "the weights of no correction are logged": (
        STEPS,
        ' and terms.correction != "sampler":',
        ":",
        [*INDEPENDENT_STEPS, "dppo_tv or dro"],
    ),
    "a count so far is averaged": (OUTPUT, '"skipped_steps", ', "", [*INDEPENDENT, "skipped"]),
    "a loss that is not finite is in a mean": (
        OUTPUT,
        "and math.isfinite(value):",
        "and not math.isnan(value):",
        [*INDEPENDENT, "skipped"],
    ),
    "the line after a resume has the steps since": (
        "trainer/checkpoint/resume.py",
        "{name: numbers[name] for name in files.WINDOWS}",
        '{"unlogged": numbers["unlogged"], "unshown": {}}',
        [*INDEPENDENT, "resumed"],
    ),
    "the compilation of a resumed run is in a mean": (
        OUTPUT,
        "or self.steps > 1",
        'or record["step"] > 1',
        [*INDEPENDENT, "resumed"],
    ),
    "a step has the time of its phases alone": (
        "trainer/loop.py",
        "phases.so_far()",
        "sum(phases.seconds.values())",
        [*INDEPENDENT, "step_time"],
    ),
    "a reward function may log a curriculum's name": (
        "trainer/logging/run_log.py",
        "(completions|curriculum|",
        "(completions|",
        ["tests/trainer/logging/test_log_names.py", "-k", "taken and curriculum"],
    ),
}
