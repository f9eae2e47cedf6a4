"""How large a chunk of logits may be.

One chunk is the only thing of size rows x V that ever exists, so its byte budget is the memory dial of the whole
library. More rows per chunk save memory traffic: each chunk reads W and updates dW once, so below about a thousand
rows those passes, not the GEMMs, set the time. 256 MiB is 441 rows at V=151936; raise `chunk_bytes` where there is
room.
"""

from __future__ import annotations

from collections.abc import Iterator

DEFAULT_CHUNK_BYTES = 256 * 2**20


def chunk_rows(num_rows: int, vocab_size: int, *, itemsize: int, chunk_bytes: int | None = None) -> int:
    """Rows per chunk: the most that fit the budget (at least one), evened out so that the last chunk is not a stub."""
    budget = DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    fitting = max(1, budget // max(1, vocab_size * itemsize))
    num_chunks = -(-num_rows // fitting)
    return -(-num_rows // max(1, num_chunks))


def chunks(num_rows: int, rows: int) -> Iterator[slice]:
    """The slices of `rows` rows that cover `num_rows`, in order; one empty slice where there are none."""
    for start in range(0, max(1, num_rows), max(1, rows)):
        yield slice(start, min(start + rows, num_rows))
