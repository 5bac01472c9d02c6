"""Which window of which source is sequence g of the run: a pure function of (g, seed).

Sequence g of the run is row g % B of step g // B. Nothing else is counted, so the number of processes and devices may
change, and resuming needs no saved iterator. Mixing is grain's `MapDataset.mix`. May import: grain lazily.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence


class GlobalOrder:
    """The order of training sequences: of sources with so many windows, with shares `weights` that sum to 1."""

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int):
        self._num_windows, self._seed, self._mix = list(num_windows), seed, None
        if len(num_windows) > 1:
            from grain import MapDataset

            # Of a sequence, the mix only needs which source and the how-manieth of it; epochs are counted below.
            counters = [MapDataset.range(sys.maxsize).map(lambda k, i=i: (i, k)) for i in range(len(num_windows))]
            self._mix = MapDataset.mix(counters, list(weights))

    def locate(self, sequence: int) -> tuple[int, int]:
        """(source, window) of sequence g. Within an epoch of a source each of its windows comes once."""
        source, index = (0, sequence) if self._mix is None else self._mix[sequence]
        epoch, place = divmod(index, self._num_windows[source])
        return source, shuffled(place, self._num_windows[source], f"{self._seed}/{source}/{epoch}")


def shuffled(index: int, count: int, seed: str) -> int:
    """Where `index` goes in a permutation of range(count), of which nothing is stored.

    A Feistel cipher of six rounds on the next power of four, walked until it is in range (Black and Rogaway 2002). In
    place of grain's `index_shuffle`, whose ciphers have at least 2^16 values: 25 ms a call for 2 windows.
    """
    half = ((count - 1).bit_length() + 1) // 2 or 1
    while True:
        for turn in range(6):  # with four, epochs of a few windows are not evenly shuffled
            right = index & ((1 << half) - 1)
            digest = hashlib.blake2b(f"{seed}/{turn}/{right}".encode(), digest_size=8).digest()
            index = right << half | (index >> half) ^ (int.from_bytes(digest, "big") & ((1 << half) - 1))
        if index < count:
            return index
