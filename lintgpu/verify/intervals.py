"""Medians and their confidence intervals without assuming a distribution: times on a GPU have a long tail."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lintgpu.measurement import Interval

CONFIDENCE = 0.95


def median(values: Sequence[float]) -> Interval:
    """The median with its interval from the order statistics (the sign test turned round). Raises ValueError without values.

    Five or fewer values do not reach the confidence, so their interval is the whole range.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Interval(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def ratio(before: Sequence[float], after: Sequence[float]) -> Interval:
    """How many times as fast `after` is. The pairs were measured side by side, so that a drift of the clock cancels in each."""
    return median([one / other for one, other in zip(before, after, strict=True)])


def _rank(count: int) -> int:
    """The largest r for which the r-th smallest and largest value enclose the median with the confidence."""
    below, total = 0, 2**count
    for rank in range(count // 2):
        below += math.comb(count, rank)
        if 2 * below / total > 1 - CONFIDENCE:
            return max(0, rank - 1)
    return max(0, (count - 1) // 2)
