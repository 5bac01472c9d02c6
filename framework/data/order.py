"""Which window of which source is sequence g of the run: a pure function of (g, seed), through grain.

Sequence g of the run is row g % B of step g // B. Nothing else is counted, so the process count and the number of
devices may change, and resuming at a step needs no saved iterator. Shuffling is grain's `index_shuffle` (a block cipher
on the index: no permutation is stored), mixing is grain's `MapDataset.mix`.
May import: grain lazily, numpy.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any


class GlobalOrder:
    """The order of training sequences.

    Args:
        num_windows: windows of each source.
        weights: share of each source, summing to 1.
        seed: any integer >= 0.
    """

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int):
        from grain import MapDataset
        from grain.experimental import index_shuffle

        self._num_windows = list(num_windows)
        # grain shuffles epoch e with seed + e: hashing keeps runs with neighbouring seeds from sharing epochs, and
        # sources of equal length from sharing orders.
        self._seeds = [_seed_of(seed, source) for source in range(len(num_windows))]
        self._shuffle = index_shuffle
        self._mix: Any = None
        if len(num_windows) > 1:
            # Of many sequences, the mix only needs which source and the how-manieth of it; epochs are counted below.
            self._mix = MapDataset.mix([MapDataset.source(_Counter(i)) for i in range(len(num_windows))], list(weights))

    def locate(self, sequence: int) -> tuple[int, int]:
        """(source, window) of sequence g. Within an epoch of a source each of its windows comes once."""
        source, index = (0, sequence) if self._mix is None else self._mix[sequence]
        count = self._num_windows[source]
        epoch, place = divmod(index, count)
        seed = (self._seeds[source] + epoch) % 2**32
        return source, self._shuffle(place, max_index=count - 1, seed=seed, rounds=4)


class _Counter:
    """An endless source for grain: element k is (source, k)."""

    def __init__(self, source: int):
        self._source = source

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self._source, index


def _seed_of(seed: int, source: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{source}".encode()).digest()[:4], "big")
