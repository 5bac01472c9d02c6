"""Which window of which source is sequence g of the run: a pure function of (g, seed), through grain.

Sequence g of the run is row g % B of step g // B. Nothing else is counted, so the process count and the number of
devices may change, and resuming at a step needs no saved iterator. Shuffling is grain's `index_shuffle` (a block cipher
on the index: no permutation is stored; short sources use a stored one), mixing is grain's `MapDataset.mix`.
May import: grain lazily, numpy.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# grain's cipher walks over at least 2^16 values until one is in range: 4 us a call from here on, but 1 ms for 64
# windows and 17 ms for 2 (measured with grain 0.2.18). Below, an epoch's whole permutation is cheaper.
_SHORT = 1 << 16


class GlobalOrder:
    """The order of training sequences.

    Args:
        num_windows: windows of each source.
        weights: share of each source, summing to 1.
        seed: any integer >= 0.
    """

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int):
        self._num_windows = list(num_windows)
        # grain shuffles epoch e with seed + e: hashing keeps runs with neighbouring seeds from sharing epochs, and
        # sources of equal length from sharing orders.
        self._seeds = [_seed_of(seed, source) for source in range(len(num_windows))]
        self._shuffle: Any = None
        if max(num_windows) >= _SHORT:
            from grain.experimental import index_shuffle

            self._shuffle = index_shuffle
        self._mix: Any = None
        if len(num_windows) > 1:
            from grain import MapDataset

            # Of many sequences, the mix only needs which source and the how-manieth of it; epochs are counted below.
            self._mix = MapDataset.mix([MapDataset.source(_Counter(i)) for i in range(len(num_windows))], list(weights))

    def locate(self, sequence: int) -> tuple[int, int]:
        """(source, window) of sequence g. Within an epoch of a source each of its windows comes once."""
        source, index = (0, sequence) if self._mix is None else self._mix[sequence]
        count = self._num_windows[source]
        epoch, place = divmod(index, count)
        seed = (self._seeds[source] + epoch) % 2**32
        if count < _SHORT:
            return source, int(_permutation(seed, count)[place])
        return source, self._shuffle(place, max_index=count - 1, seed=seed, rounds=4)


class _Counter:
    """An endless source for grain: element k is (source, k)."""

    def __init__(self, source: int):
        self._source = source

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self._source, index


@functools.lru_cache(maxsize=32)
def _permutation(seed: int, count: int) -> np.ndarray:
    """int32[count]. RandomState, because numpy promises that its streams never change."""
    return np.random.RandomState(seed).permutation(count).astype(np.int32)


def _seed_of(seed: int, source: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{source}".encode()).digest()[:4], "big")
