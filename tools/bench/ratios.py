"""Statistics of pairs: what is left when a busy machine slows down both of a pair.

Python's standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Of pairs: median, quartiles, and an interval that holds the true median with about 95% probability."""

    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear between order statistics, as numpy's default.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("quantile of no values")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free: the k-th smallest and largest value, k by the binomial distribution with p = 1/2.

    With fewer than six values nothing narrower than [min, max] has that confidence, and that is returned.
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
    """reference / other, pair by pair: above one, the other one is faster.

    Raises:
        ValueError: different numbers of turns, or none.
    """
    if len(reference) != len(other) or not reference:
        raise ValueError(f"expected as many turns of both, given {len(reference)} and {len(other)}")
    ratios = [a / b for a, b in zip(reference, other, strict=True)]
    quartiles = (quantile(ratios, 0.25), quantile(ratios, 0.75))
    return Ratio(statistics.median(ratios), quartiles, median_interval(ratios), len(ratios))
