"""Which row of which source is sequence g of the run, a pure function of (g, seed); which batch comes after so many
steps; and batches made ahead of time.

Sequence g of the run is row g % B of step g // B. Nothing else is counted, so the number of processes and devices may
change, and resuming needs no saved iterator.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_THREADS = 4  # a batch is assembled by one thread; more only hide the latency of remote reads


@dataclass(frozen=True)
class BatchOrder:
    """Which batch each step trains on: every batch in turn, except those that are left out.

    A pure function of the number of steps and of these few numbers, so a checkpoint that holds them is enough to go on.

    Attributes:
        left_out: indices of batches that no step trains on, ascending.
        shift: every batch comes that many steps earlier than without. Always 0 but in a run that goes on from a
            checkpoint of an earlier version, which after a roll back left out everything since the checkpoint.
    """

    left_out: tuple[int, ...] = ()
    shift: int = 0

    @classmethod
    def stored(cls, position: Mapping[str, Any]) -> BatchOrder:
        """From what a checkpoint holds: `to_json`, or the lone "offset" of an earlier version."""
        return cls(tuple(position.get("left_out", ())), int(position["offset"]))

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {"left_out": list(self.left_out), "offset": self.shift}

    def batch_after(self, num_steps: int) -> int:
        """The index of the batch that comes after so many steps."""
        index = num_steps + self.shift
        for gap in self.left_out:
            if gap > index:
                break
            index += 1
        return index

    def without(self, *batches: int) -> BatchOrder:
        """The same order with these batches left out too."""
        return BatchOrder(tuple(sorted({*self.left_out, *batches})), self.shift)


class GlobalOrder:
    """The order of training sequences: of sources with so many windows, with shares `weights` that sum to 1."""

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int):
        self._num_windows, self._seed = list(num_windows), seed
        self._mix: Any = None
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


class Prefetcher(Iterator[T], AbstractContextManager):
    """Yields make(start), make(start + 1), ... up to make(stop - 1); `make` is a pure function, and runs in threads.

    At most `ahead` results wait in the background, beside the one that was handed out last. An error in `make` is
    raised by `next` at its own turn and closes the iterator: grain by itself would go on with the batch after it.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, *, ahead: int):
        from grain import MapDataset, ReadOptions

        options = ReadOptions(num_threads=min(ahead, _THREADS), prefetch_buffer_size=ahead)
        self._iterator = iter(MapDataset.range(start, stop).map(make).to_iter_dataset(options))

    def __next__(self) -> T:
        try:
            return next(self._iterator)
        except BaseException as error:
            if not isinstance(error, StopIteration):
                self.close()
            raise

    def close(self) -> None:
        """Drops what waits and stops the threads; may be called again."""
        self._iterator.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
