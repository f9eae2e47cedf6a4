"""The bugs of `planted_bugs.py` in the trainer's distillation: (file, old, new, caught by)."""

RUNS = "tests/trainer/test_distillation.py"
STEPS = [RUNS, "-k", "full_logits"]
ADAPTER = [RUNS, "-k", "adapter"]
EQUAL = [RUNS, "-k", "without_an_advantage"]
OTHERS = [RUNS, "-k", "mixes_packed"]
EVALUATION = [RUNS, "-k", "evaluation"]
RESUMED = [RUNS, "-k", "another_teacher"]

BUGS = {
    "the teacher's hidden states are shifted by a token": (
        "trainer/policy.py",
        "return Distillation(hidden,",
        "return Distillation(hidden.roll(1, 0),",
        STEPS,
    ),
    "the coefficient of the divergence is ignored": (
        "trainer/learner.py",
        '"coef": args.distillation_coef,',
        '"coef": 1.0,',
        STEPS,
    ),
    "the kind of the divergence is ignored": (
        "trainer/learner.py",
        '"kind": args.distillation_kind,',
        '"kind": "reverse_kl",',
        [
            "tests/trainer/test_distillation.py::test_steps_are_those_of_full_logits_of_both_models[forward_kl-grpo-digits]"
        ],
    ),
    "a policy with an adapter is its own teacher": (
        "trainer/models/adapters.py",
        "nullcontext() if has_copy else model.disable_adapter()",
        "nullcontext()",
        ADAPTER,
    ),
    "completions without an advantage do not learn from the teacher": (
        "trainer/batching/micro_batches.py",
        "[args.beta, args.distillation_coef, args.entropy_coef,",
        "[args.beta, args.entropy_coef,",
        EQUAL,
    ),
    "the teacher's attention is not tried": (
        "trainer/learner.py",
        "for policy in policies if self.accelerator.is_main",
        "for policy in policies[:1] if self.accelerator.is_main",
        OTHERS,
    ),
    "an evaluation has no teacher": (
        "trainer/learner.py",
        '"loss", packed, **options)',
        '"loss", packed, **options | {"teacher": None})',
        EVALUATION,
    ),
    "a run goes on with another teacher": (
        "trainer/checkpoint/resume.py",
        "None if learner.teacher is None else learner.teacher.identity",
        "None",
        RESUMED,
    ),
    "tokens that only the teacher moves are counted as without a gradient": (
        "fused_grpo/head/chunked_divergence.py",
        "(without & (self.weights == 0)).sum()",
        "without.sum()",
        ["tests/ops/test_distillation.py", "-k", "by_its_teacher"],
    ),
}
