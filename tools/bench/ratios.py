"""Statistics of paired measurements, in which a slowdown of the machine affects both of a pair and cancels out.

Uses only Python's standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of paired ratios, and an interval with the true median in it with about 95% probability."""

    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"


def quantile(values: Sequence[float], fraction: float) -> float:
    """Interpolate linearly between order statistics, as numpy does by default.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("quantile of no values")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a distribution-free interval: the k-th smallest and largest value, with k from the binomial with p = 1/2.

    With fewer than six values, no interval narrower than [min, max] has 95% confidence, so that is returned.
    """
    ordered = sorted(values)
    n = len(ordered)
    below, k = 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2.0**n
        if below > (1.0 - confidence) / 2.0:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def ratio(reference: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return reference / other, pair by pair; above one, the other one is faster.

    Raises:
        ValueError: the numbers of turns differ, or are zero.
    """
    if len(reference) != len(other) or not reference:
        raise ValueError(f"expected as many turns of both, given {len(reference)} and {len(other)}")
    ratios = [a / b for a, b in zip(reference, other, strict=True)]
    quartiles = (quantile(ratios, 0.25), quantile(ratios, 0.75))
    return Ratio(statistics.median(ratios), quartiles, median_interval(ratios), len(ratios))
