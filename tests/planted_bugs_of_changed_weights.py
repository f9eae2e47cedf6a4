"""The bugs of `planted_bugs.py` in syncs that send what changed: (file, old, new, caught by)."""

BOTH = "trainer/engines/changed_weights.py"
SENDER = "trainer/engines/server/weight_transfer.py"
TESTS = "tests/trainer/engines/test_changed_weights.py"

BUGS = {
    "values are compared, and not bits": (
        BOTH,
        "changed = bits != _bits(old)",
        "changed = new.view(-1) != old.view(-1)",
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
    "the workers of the first engine answer for all": (
        "trainer/engines/server/server_info.py",
        'parallel.get("data_parallel_size", 1) != 1',
        "False",
        [TESTS, "-k", "refused_at_the_start"],
    ),
    "a weight that is not sent any more is sent with all": (
        SENDER,
        "held, self._weights = self._weights, {}",
        "held = self._weights",
        [TESTS, "-k", "not_sent_any_more"],
    ),
    "places are made of changes that are not sent": (
        BOTH,
        "count = int(changed.count_nonzero())",
        "count = len(changed.nonzero())",
        [TESTS, "-k", "larger_than_the_weight"],
    ),
    "a server that was restarted with other options is sent weights": (
        "trainer/engines/server/server_engine.py",
        "if not await replica.has_weight_version(client, self._server_version):",
        "if not self._server_version:",
        ["tests/trainer/engines/test_replicas.py", "-k", "do_not_fit"],
    ),
}
