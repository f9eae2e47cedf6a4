"""The bugs of `planted_bugs.py` in the throughput model and its command: (file, old, new, caught by)."""

MODEL = "trainer/throughput.py"
COMMAND = "trainer/cli/plan.py"
ENGINE = "trainer/engines/server/server_engine.py"
UNITS = "tests/trainer/test_throughput.py"
TOKEN = [UNITS, "-k", "read_the_weights or more_of_its_weights"]
HOST = [UNITS, "-k", "host_is_not_split"]
FLOP = [UNITS, "-k", "counts_flop"]
LONGEST = [UNITS, "-k", "longest_completion"]
CACHE = [UNITS, "-k", "into_the_cache"]
MEMORY = [UNITS, "-k", "needs_memory"]
PHASES = [UNITS, "-k", "sum_of_its_phases"]
SAID = ["tests/trainer/cli/test_plan.py"]

BUGS = {
    "keys are read and values are not": (
        MODEL,
        "return 4 * self.layers * self.kv_heads",
        "return 2 * self.layers * self.kv_heads",
        TOKEN,
    ),
    "all experts are read for one sequence": (
        MODEL,
        "(1 - float((1 - self.active / self.model_params) ** sequences))",
        "1.0",
        TOKEN,
    ),
    "tensor parallelism splits the host too": (
        MODEL,
        "* gpu.reached) + host",
        "* gpu.reached) + host / tensor_parallel",
        HOST,
    ),
    "the head is recomputed with the layers": (
        MODEL,
        "(6 + 2 * run.log_prob_passes) * size.head",
        "passes * size.head",
        FLOP,
    ),
    "prompts go through the head": (
        MODEL,
        "* size.head * completion\n",
        "* size.head * (completion + prompt)\n",
        FLOP,
    ),
    "each prompt is computed for each completion": (
        MODEL,
        "(run.prompts if run.share_prompts else run.completions)",
        "run.completions",
        FLOP,
    ),
    "a batch ends with its mean completion": (
        MODEL,
        "zip(shares, ages, strict=True):\n            # The probability",
        "zip(shares[:16], ages[:16], strict=True):\n            # The probability",
        LONGEST,
    ),
    "sequences that do not fit are sampled at once": (
        MODEL,
        "if per_replica > min(MAX_SEQUENCES, cache / fullest):",
        "if False:",
        CACHE,
    ),
    "the optimizer's state takes no memory": (
        MODEL,
        "TRAINING_BYTES = 16",
        "TRAINING_BYTES = 0",
        MEMORY,
    ),
    "rewards are free while the next batch is sampled": (
        MODEL,
        "max(rollouts, rewards + training)",
        "max(rollouts, training)",
        PHASES,
    ),
    "tools are free": (
        MODEL,
        "return seconds + together + run.tool_seconds",
        "return seconds + together",
        PHASES,
    ),
    "experts are all active": (
        COMMAND,
        "in_experts * (1 - chosen / experts)",
        "in_experts * 0.0",
        ["tests/trainer/cli/test_plan.py::test_the_sizes_of_a_mixture_of_experts_are_read_from_its_config"],
    ),
    "the slowest split comes first": (
        MODEL,
        "if one.seconds < math.inf), key=lambda one: one.seconds)",
        "if one.seconds < math.inf), key=lambda one: -one.seconds)",
        SAID,
    ),
    "all ranks begin with the same server": (
        ENGINE,
        "torch.distributed.get_rank() % max(1, len(base_urls))",
        "0",
        ["tests/trainer/engines/test_replicas.py::test_each_rank_begins_with_another_server[1-1]"],
    ),
}
