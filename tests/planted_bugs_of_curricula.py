"""The bugs of `planted_bugs.py` in the order of prompts, the curriculum and pass@k: (file, old, new, caught by)."""

CURRICULUM = ["tests/trainer/data/test_curriculum.py", "-k", "not hears"]
RESUMED = ["tests/trainer/checkpoint/test_resume.py", "-k", "stopped and curriculum"]
EPOCHS = ["tests/trainer/test_callbacks.py", "-k", "leaves_the_next_one_whole"]
RATES = ["tests/trainer/collect/test_pass_rates.py"]

BUGS = {
    "a resumed curriculum has forgotten what it saw": (
        "trainer/data/prompt_sampler.py",
        "self._add(*entry)",
        "pass",
        RESUMED,
    ),
    "a curriculum draws the same in every batch": (
        "trainer/data/prompt_sampler.py",
        '/curriculum/{self.used}"',
        '/curriculum"',
        CURRICULUM,
    ),
    "a curriculum draws what teaches nothing": (
        "trainer/data/prompt_sampler.py",
        "+= sign * differs",
        "+= sign * (1 - differs)",
        CURRICULUM,
    ),
    "a dropped group counts in a curriculum": (
        "trainer/data/prompt_sampler.py",
        "if len(scored) > 1:",
        "if True:",
        CURRICULUM,
    ),
    "an epoch that is left out takes the next one with it": (
        "trainer/data/prompt_sampler.py",
        "end if end > self.used - self._size else self.used +",
        "self.used +",
        EPOCHS,
    ),
    "pass@k of samples with replacement": (
        "trainer/collect/scoring.py",
        "1 - math.comb(n - right, k) / math.comb(n, k)",
        "1 - (1 - right / n) ** k",
        RATES,
    ),
    "a completion that was not scored is right": (
        "trainer/collect/scoring.py",
        "(group >= FULL_REWARD).sum()",
        "(~(group < FULL_REWARD)).sum()",
        RATES,
    ),
}
