"""What a soak has to hold, looked for in its figures. No spike and no sawtooth of memory decides about its growth."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

MOST_GROWTH = 0.02
WARM_UP = 0.2  # of the series: what imports, caches and the first of everything take is no growth
PARTS = 120


def growth(series: Sequence[float]) -> float:
    """By how much a series rises after its warm-up, as a share of where it stood then: 0.02 is 2 %.

    A line through the medians of equal parts, by the median of all slopes between two of them (Theil and Sen): a third
    of the parts may be outliers without moving it.
    """
    warm = series[int(WARM_UP * len(series)) :]
    medians = thinned(warm, PARTS)
    slopes = [
        (medians[later] - medians[earlier]) / (later - earlier)
        for earlier in range(len(medians))
        for later in range(earlier + 1, len(medians))
    ]
    if not slopes:
        return 0.0
    rise = statistics.median(slopes) * (len(medians) - 1)
    # Where the line begins: the median of what is left of each part without its slope.
    start = statistics.median(value - rise * index / (len(medians) - 1) for index, value in enumerate(medians))
    return rise / start


def thinned(series: Sequence[float], parts: int) -> list[float]:
    """The medians of so many equal parts of a series; of fewer where it is short."""
    parts = min(parts, len(series))
    cuts = [len(series) * part // parts for part in range(parts + 1)] if parts else []
    return [statistics.median(series[first:last]) for first, last in itertools.pairwise(cuts)]


def broken(found: dict[str, Any]) -> list[str]:
    """The bars that did not hold, in words."""
    said = [f"{kind} left: {names}" for kind, names in found["left"].items() if names]
    for name, track in found["tracks"].items():
        said += [f"{name}: {wrong}" for wrong in track["wrong"]]
        if track.get("memory", {}).get("growth", 0.0) > MOST_GROWTH:
            said.append(f"{name}: memory grew by {100 * track['memory']['growth']:.2f} % after its warm-up")
        grown = Counter(track.get("held_at_the_end", {})) - Counter(track.get("held_after_warm_up", {}))
        said += [f"{name}: {count} more {kind} than after the warm-up" for kind, count in grown.items()]
    return said
