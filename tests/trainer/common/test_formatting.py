"""Bytes have three digits at most, and a unit that a reader knows."""

import pytest

from fused_grpo.trainer.common.formatting import bytes_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (999_999_999, "1 GB"),
        (24_650_000_000, "24.6 GB"),
        (10**15, "1 PB"),
        (10**21, "1e+03 EB"),
    ],
)
def test_bytes_never_show_a_thousand_of_a_unit_but_of_the_last(size, text):
    assert bytes_text(size) == text
