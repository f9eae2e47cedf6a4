"""The bugs of `planted_bugs.py` in `batch_invariant` of the trainer: (file, old, new, caught by)."""

CHOICE = "trainer/engines/engine_choice.py"
METRICS = "trainer/batching/micro_batch_metrics.py"
OUTPUT = "trainer/logging/run_output.py"
SERVER = "trainer/engines/server/server_info.py"
START = "trainer/engines/vllm/start_vllm.py"
RUN = "tests/trainer/test_batch_invariant.py"
ALONE = [RUN, "-k", "of_its_own"]
VLLM = "tests/trainer/engines/test_batch_invariant_vllm.py"
RATIOS = ["tests/trainer/batching/test_ratio_metrics.py", "-k", "where_it_is_known"]

BUGS = {
    "sequences keep their company": (
        "trainer/learner.py",
        "sequences=args.sequences_per_micro_batch,",
        "sequences=args.per_device_train_batch_size,",
        ALONE,
    ),
    "the option is read the other way round": (
        "trainer/config/derived_options.py",
        "return 1 if self.batch_invariant else",
        "return 1 if not self.batch_invariant else",
        ALONE,
    ),
    "prompts are shared all the same": (
        "trainer/learner.py",
        "may_share = not (self.router_coefficient or self.args.batch_invariant)",
        "may_share = not self.router_coefficient",
        ALONE,
    ),
    "a budget of tokens packs sequences again": (
        "trainer/config/checks.py",
        '"max_tokens_per_micro_batch", "tf32"',
        '"tf32"',
        [RUN, "-k", "contradict"],
    ),
    "transformers samples all sequences in one batch": (
        CHOICE,
        "1 if args.batch_invariant else None",
        "None",
        [RUN, "-k", "as_if_it_were_alone"],
    ),
    "almost equal is bit-equal": (
        METRICS,
        "_mean(old == sampling,",
        "_mean(old.isclose(sampling, atol=0.3),",
        RATIOS,
    ),
    "an unknown log-prob counts as one that differs": (
        METRICS,
        "BIT_EQUAL: _mean(old == sampling, is_known)",
        "BIT_EQUAL: _mean(old == sampling, counts)",
        RATIOS,
    ),
    "the console says bit-equal at any share": (
        OUTPUT,
        "if equal == 1.0 else",
        "if equal > 0.5 else",
        [RUN, "-k", "console"],
    ),
    "the console says so at each step": (
        OUTPUT,
        "self._told_equality = True",
        "self._told_equality = False",
        [RUN, "-k", "console"],
    ),
    "a server that is not batch invariant is accepted": (
        SERVER,
        'variables.get("VLLM_BATCH_INVARIANT") is not True',
        '"VLLM_BATCH_INVARIANT" not in variables',
        [VLLM, "-k", "server_says and refused"],
    ),
    "servers are not asked": (
        CHOICE,
        '        "batch_invariant": args.batch_invariant,\n',
        "",
        [VLLM, "-k", "server_says and refused"],
    ),
    "an Ampere GPU trains without gradients": (
        START,
        "platform.has_device_capability(90)",
        "platform.has_device_capability(80)",
        [VLLM, "-k", "are_refused"],
    ),
    "what cuBLAS reads is removed again": (
        START,
        '    "CUBLASLT_WORKSPACE_SIZE": "1",\n',
        "",
        [VLLM, "-k", "stays_for"],
    ),
    "a product without a gradient stays in torch": (
        START,
        "torch.set_num_threads, torch.bmm, sys.excepthook = set_num_threads, bmm, excepthook",
        "torch.set_num_threads, sys.excepthook = set_num_threads, excepthook",
        [VLLM, "-k", "does_not_stay"],
    ),
    "vLLM has read its environment before": (
        START,
        'if not getattr(envs, "VLLM_BATCH_INVARIANT", False):',
        "if False:",
        [VLLM, "-k", "started_without"],
    ),
}
