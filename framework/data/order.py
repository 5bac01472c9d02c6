"""The order of training data: sequences, batches, and batches that are made ahead of time.

`GlobalOrder` gives the source and row of sequence g, a pure function of (g, seed). `BatchOrder` gives the batch that
comes after a number of steps. `Prefetcher` makes batches in background threads.

Sequence g of the run is row g % B of step g // B. Nothing else is counted, so the number of processes and devices may
change, and resuming needs no saved iterator. Where a run goes on with another B, its batches begin at another sequence.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
# A batch is assembled by one thread; more threads only hide the latency of remote reads.
_THREADS = 4


@dataclass(frozen=True)
class BatchOrder:
    """The order of batches: every batch in turn, except those that are left out.

    It is a pure function of the number of steps and of these few numbers, so a checkpoint that holds them is enough to
    go on.

    Attributes:
        left_out: indices of batches that no step trains on, ascending.
        shift: every batch comes that many steps earlier than without. Always 0 but in a run that goes on from a
            checkpoint of an earlier version, which after a roll back left out everything since the checkpoint.
        origin: the sequence that batch 0 would begin with, had all batches the size that they have now. 0 but in a run
            that went on with batches of another size; it may be negative.
    """

    left_out: tuple[int, ...] = ()
    shift: int = 0
    origin: int = 0

    @classmethod
    def stored(cls, position: Mapping[str, Any]) -> BatchOrder:
        """Restores an order from a checkpoint: from `to_json`, or from the lone "offset" of an earlier version."""
        left_out = tuple(position.get("left_out", ()))
        return cls(left_out, int(position["offset"]), int(position.get("origin", 0)))

    def to_json(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of the order."""
        return {"left_out": list(self.left_out), "offset": self.shift, "origin": self.origin}

    def batch_after(self, num_steps: int) -> int:
        """Returns the index of the batch that comes after `num_steps` steps."""
        index = num_steps + self.shift
        # Gaps ascend, so each one at or below the index moves it by one, past the next gap too.
        for gap in self.left_out:
            if gap > index:
                break
            index += 1
        return index

    def without(self, *batches: int) -> BatchOrder:
        """Returns the same order with these batches left out too."""
        left_out = {*self.left_out, *batches}
        return BatchOrder(tuple(sorted(left_out)), self.shift, self.origin)

    def sequences_after(self, num_steps: int, batch_size: int) -> int:
        """Returns the sequence that the next batch begins with; those before it were trained on or left out."""
        return self.origin + self.batch_after(num_steps) * batch_size

    def continued(self, num_steps: int, old_size: int, new_size: int) -> BatchOrder:
        """Returns the order that goes on after `num_steps` steps with batches of another size, at the next sequence.

        Batches keep counting. Of those that are yet to be left out, all sequences stay out: with all new batches that
        hold one.
        """
        next_batch = self.batch_after(num_steps)
        next_sequence = self.sequences_after(num_steps, old_size)
        origin = next_sequence - next_batch * new_size
        left_out: set[int] = set()
        for batch in self.left_out:
            if batch < next_batch:
                left_out.add(batch)
                continue
            first_sequence = self.origin + batch * old_size
            last_sequence = first_sequence + old_size - 1
            first_batch = (first_sequence - origin) // new_size
            last_batch = (last_sequence - origin) // new_size
            left_out.update(range(first_batch, last_batch + 1))
        return BatchOrder(tuple(sorted(left_out)), self.shift, origin)


class GlobalOrder:
    """The order of training sequences over one or several sources.

    Args:
        num_windows: windows (rows) of each source.
        weights: share of the sequences that each source gives; they sum to 1.
        seed: decides the permutation of each epoch.
    """

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int):
        self._num_windows = list(num_windows)
        self._seed = seed
        self._mix: Any = None
        if len(num_windows) > 1:
            from grain import MapDataset

            # The mix is over counters without end, and gives (source, count within the source).
            # Epochs are counted in `locate`, so that each can have a permutation of its own.
            counters = []
            for source in range(len(num_windows)):
                endless = MapDataset.range(sys.maxsize)
                # The default argument binds the source of this turn of the loop.
                counters.append(endless.map(lambda count, source=source: (source, count)))
            self._mix = MapDataset.mix(counters, list(weights))

    def locate(self, sequence: int) -> tuple[int, int]:
        """Returns (source, window) of sequence g. Within an epoch of a source each of its windows comes once."""
        if self._mix is None:
            source = 0
            index = sequence
        else:
            source, index = self._mix[sequence]
        count = self._num_windows[source]
        epoch, position = divmod(index, count)
        window = shuffled(position, count, f"{self._seed}/{source}/{epoch}")
        return source, window


def shuffled(index: int, count: int, seed: str) -> int:
    """Returns the place of `index` in a permutation of range(count), of which nothing is stored.

    The permutation is a Feistel cipher of six rounds on the next power of four, applied again until the result is in
    range (cycle walking, Black and Rogaway 2002). It stands in place of grain's `index_shuffle`, whose ciphers have at
    least 2^16 values: that takes 25 ms a call for 2 windows.
    """
    # The cipher needs two halves of equally many bits, and at least one bit each.
    half_bits = ((count - 1).bit_length() + 1) // 2 or 1
    mask = (1 << half_bits) - 1
    while True:
        # With four rounds, epochs of a few windows are not evenly shuffled.
        for round_number in range(6):
            left = index >> half_bits
            right = index & mask
            round_key = f"{seed}/{round_number}/{right}".encode()
            digest = hashlib.blake2b(round_key, digest_size=8).digest()
            left ^= int.from_bytes(digest, "big") & mask
            index = right << half_bits | left
        if index < count:
            return index


class Prefetcher(Iterator[T], AbstractContextManager):
    """An iterator over make(start), make(start + 1), ..., make(stop - 1), which are computed ahead of time.

    An error in `make` is raised by `next` at its own turn, and closes the iterator.

    Args:
        make: a pure function; it runs in threads.
        start: first argument of `make`.
        stop: one past the last argument.
        ahead: at most this many results wait in the background, beside the one that was handed out last.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, *, ahead: int):
        from grain import MapDataset, ReadOptions

        num_threads = min(ahead, _THREADS)
        options = ReadOptions(num_threads=num_threads, prefetch_buffer_size=ahead)
        dataset = MapDataset.range(start, stop).map(make)
        self._iterator = iter(dataset.to_iter_dataset(options))

    def __next__(self) -> T:
        try:
            return next(self._iterator)
        except BaseException as error:
            # After an error, grain by itself would go on with the next batch, and lose this one.
            if not isinstance(error, StopIteration):
                self.close()
            raise

    def close(self) -> None:
        """Drops the results that wait, and stops the threads. It may be called again."""
        self._iterator.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
