"""The bugs of `planted_bugs.py` in what samplers say of tokens that were not drawn: (file, old, new, caught by)."""

ENGINE = ["tests/trainer/engines/test_contract.py", "-k", "logprobs_of_likely and transformers"]
LISTS = ["tests/trainer/engines/test_support.py", "-k", "most_likely or unusable or too_few or sum_to_one"]
CUTS = ["tests/trainer/test_score_centering.py", "-k", "however_a_batch_is_cut"]
ROWS = ["tests/trainer/batching/test_micro_batches.py", "-k", "likely or beside_the_ids or table"]
TURNS = ["tests/trainer/episodes/test_combinations.py", "-k", "likely and transformers"]
TYPES = "trainer/types.py"
SAMPLING, BATCHES = "trainer/engines/sampling.py", "trainer/batching/micro_batches.py"

BUGS = {
    "the token that was drawn is among the likely ones": (
        SAMPLING,
        "sorted(step.items(), key=lambda entry: (-entry[1], entry[0]))[:top]",
        "list(step.items())[:top]",
        LISTS,
    ),
    "log-probs of several sequences stay in the order of steps": (
        "trainer/engines/transformers_generate.py",
        "torch.cat(self._logprobs)[order].split(counts)",
        "torch.cat(self._logprobs).split(counts)",
        ENGINE,
    ),
    "likely tokens that were left out are listed": (
        "trainer/engines/transformers_generate.py",
        "kept &= torch.zeros_like(kept).scatter_(1, likely, True)",
        "kept = torch.zeros_like(kept).scatter_(1, likely, True)",
        [
            "tests/trainer/test_score_centering.py",
            "-k",
            "on_policy_the_samplers_logprobs_are_those_of_the_policy and topk and truncated",
        ],
    ),
    "tokens that are all kept are not listed": (
        "trainer/engines/transformers_generate.py",
        "if logprobs is None:\n            kept",
        "if True:\n            kept",
        LISTS,
    ),
    "the probabilities of kept tokens may sum to less than 1": (
        "trainer/engines/checked_engine.py",
        "0.0 if listed.is_top_k else 1.0",
        "0.0",
        [
            "tests/trainer/engines/test_support.py",
            "-k",
            "logprobs_that_are_no_distribution_make_a_completion_unusable and logprobs3",
        ],
    ),
    "an engine is not asked whether it lists enough": (
        SAMPLING,
        "if listed > max_listed >= 0:\n        raise",
        "if False:\n        raise",
        [
            "tests/trainer/engines/test_support.py",
            "-k",
            "an_engine_that_lists_too_few_tokens_is_refused_at_the_start and sampling0-100",
        ],
    ),
    "scores stand for log-probs": (
        "trainer/engines/transformers_generate.py",
        "add(scores, logprobs if",
        "add(scores, scores if",
        ENGINE,
    ),
    "a turn loses the log-probs of its likely tokens": (
        TYPES,
        "logprobs = None if logprobs is None else logprobs[:count].clone()",
        "logprobs = None",
        TURNS,
    ),
    "several turns forget that their tokens are the likely ones": (
        TYPES,
        "any(part.is_top_k for part in parts)",
        "False",
        TURNS,
    ),
    "log-probs of a tool's tokens are packed": (
        TYPES,
        "self.logprobs[entries]",
        "self.logprobs",
        ROWS,
    ),
    "likely tokens are taken for kept ones": (BATCHES, "if listed.is_top_k:", "if False:", CUTS),
    "a checkpoint forgets that tokens are the likely ones": (
        "trainer/batching/rollout_buffer.py",
        '    "is_top_k": torch.bool,\n',
        "",
        ROWS,
    ),
    "likely tokens are reported as kept": (
        TYPES,
        "return None if self.listed_tokens is None or self.listed_tokens.is_top_k else",
        "return None if self.listed_tokens is None else",
        [
            "tests/trainer/test_score_centering.py",
            "-k",
            "on_policy_the_samplers_logprobs_are_those_of_the_policy and topk and truncated",
        ],
    ),
    "an evaluation lists likely tokens": (
        "trainer/collect/collector.py",
        ', score_centering="off")',
        ")",
        ["tests/trainer/test_score_centering.py::test_an_evaluation_asks_for_no_logprobs_of_further_tokens"],
    ),
    "a rank without samples wants log-probs": (
        "trainer/policy.py",
        "if not len(batch.targets):",
        "if False:",
        ["tests/trainer/test_score_centering.py::test_a_rank_without_samples_takes_part_in_a_step[kept]"],
    ),
}
