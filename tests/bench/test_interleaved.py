"""Interleaved rounds: their order, and the quotient of medians."""

from fused_grpo.bench.interleaved import interleaved_seconds, quotient


def test_each_round_starts_with_the_next():
    ran: list[str] = []
    actions = {name: (lambda name=name: ran.append(name)) for name in ("gemms", "ours", "trl")}
    seconds = interleaved_seconds(actions, rounds=2)
    assert ran == ["gemms", "ours", "trl", "ours", "trl", "gemms"]
    assert {name: len(values) for name, values in seconds.items()} == {"gemms": 2, "ours": 2, "trl": 2}


def test_a_quotient_is_of_medians():
    assert quotient({"trl": [1.0, 6.0, 50.0], "ours": [1.0, 2.0, 5.0]}, "trl", "ours") == 3.0
