"""The bugs of `planted_bugs.py` in syncs that send what changed: (file, old, new, caught by)."""

BOTH = "trainer/engines/changed_weights.py"
SENDER = "trainer/engines/server/weight_transfer.py"
TESTS = "tests/trainer/engines/test_changed_weights.py"

BUGS = {
    "values are compared, and not bits": (
        BOTH,
        "(bits != _bits(old)).nonzero()",
        "(new.view(-1) != old.view(-1)).nonzero()",
        [TESTS, "-k", "zero_of_another"],
    ),
    "a worker does not compare its copy": (BOTH, "if held != wanted:", "if False:", [TESTS, "-k", "no_flipped_bit"]),
    "changes of another copy are applied": (
        BOTH,
        "if base and held != base:",
        "if False:",
        [TESTS, "-k", "after_a_restart"],
    ),
    "the trainer does not read what workers have": (
        SENDER,
        'worker.get("digest") != wanted',
        "False",
        [TESTS, "-k", "a_wrong_bit"],
    ),
    "changes follow a sync that failed": (
        SENDER,
        'base, self._base = self._base, ""',
        "base = self._base",
        [TESTS, "-k", "one_server_lost"],
    ),
    "the weights of the last sync are the trainer's own tensors": (
        SENDER,
        'to("cpu", copy=True, memory_format',
        'to("cpu", copy=False, memory_format',
        [TESTS, "-k", "make_the_bits"],
    ),
}
