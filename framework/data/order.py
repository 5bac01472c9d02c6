"""The order of training data: sequences, batches, and prefetched batches.

`GlobalOrder` returns the source and row of sequence g, a pure function of (g, seed). `BatchOrder` returns the batch
that comes after a given number of steps. `Prefetcher` computes batches in background threads.

Sequence g of the run is row g % B of step g // B. No other counters exist, so the number of processes and devices may
change, and resuming needs no saved iterator. If a run continues with another B, its batches start at another
sequence.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from grain import MapDataset

T = TypeVar("T")
# One thread assembles a batch; more threads only hide the latency of remote reads.
_THREADS = 4
# Building the order takes time in proportion to the ratio of the weights.
_LARGEST_RATIO = 1e6


def check_weights(weights: Sequence[float]) -> None:
    """Check the weights of sources, of which 0 leaves a source out.

    Raises:
        ValueError: a weight is negative or not finite, all are 0, or two that are above 0 differ by more than a factor
            of a million.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"expected numbers of at least 0, given {weight:g}")
    positive = [weight for weight in weights if weight > 0]
    if not positive:
        raise ValueError("expected at least one weight above 0")
    if max(positive) / min(positive) > _LARGEST_RATIO or math.isinf(sum(positive)):
        raise ValueError(
            f"expected weights that differ at most by a factor of {_LARGEST_RATIO:,.0f}, given {min(positive):g} and "
            f"{max(positive):g}; 0 leaves a source out"
        )


@dataclass(frozen=True)
class BatchOrder:
    """The order of batches: every batch in turn, except those that are skipped.

    It is a pure function of the number of steps and of these few numbers, so a run can resume from a checkpoint that
    holds them.

    Attributes:
        left_out: indices of batches that no step trains on, ascending.
        shift: number of steps by which every batch comes earlier. Always 0, except in a run resumed from a checkpoint
            of an earlier version, which after a rollback skipped everything since the checkpoint.
        origin: the sequence that batch 0 would start with if all batches had the current size. 0, except in a run
            that continued with another batch size; it may be negative.
    """

    left_out: tuple[int, ...] = ()
    shift: int = 0
    origin: int = 0

    @classmethod
    def from_json(cls, position: Mapping[str, Any]) -> BatchOrder:
        """Restores an order from a checkpoint: from `to_json`, or from the single "offset" of an earlier version."""
        left_out = tuple(position.get("left_out", ()))
        return cls(left_out, int(position["offset"]), int(position.get("origin", 0)))

    def to_json(self) -> dict[str, object]:
        """Returns the order as JSON data for a checkpoint."""
        return {"left_out": list(self.left_out), "offset": self.shift, "origin": self.origin}

    def batch_after(self, num_steps: int) -> int:
        """Returns the index of the batch that comes after `num_steps` steps."""
        index = num_steps + self.shift
        # Gaps ascend, so each one at or below the index increments it, which may move it past the next gap.
        for gap in self.left_out:
            if gap > index:
                break
            index += 1
        return index

    def first_step_of(self, batch: int) -> int:
        """Returns the number of steps after which all batches before `batch` were trained on or skipped."""
        num_steps = max(0, batch - self.shift - len(self.left_out))
        while self.batch_after(num_steps) < batch:
            num_steps += 1
        return num_steps

    def without(self, *batches: int) -> BatchOrder:
        """Returns the same order with these batches skipped too."""
        left_out = {*self.left_out, *batches}
        return BatchOrder(tuple(sorted(left_out)), self.shift, self.origin)

    def sequences_after(self, num_steps: int, batch_size: int) -> int:
        """Returns the sequence that the next batch starts with; earlier ones were trained on or skipped."""
        return self.origin + self.batch_after(num_steps) * batch_size

    def with_batch_size(self, num_steps: int, old_size: int, new_size: int) -> BatchOrder:
        """Returns the order that continues after `num_steps` steps with another batch size, at the next sequence.

        Batch numbers keep counting. Every sequence of a batch that is still to be skipped stays skipped: all new
        batches that contain one are skipped.
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
        num_windows: number of windows (rows) of each source.
        weights: fraction of the sequences from each source; they sum to 1. A source with weight 0 is never drawn.
        seed: seed for the permutation of each epoch.
        starts: number of sequences drawn from each source before sequence 0; () for none.
    """

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int, starts: Sequence[int] = ()):
        self._num_windows = list(num_windows)
        self._seed = seed
        self._starts = list(starts) or [0] * len(num_windows)
        self._mix: MapDataset[tuple[int, int]] | None = None
        # Only sources that are drawn; their numbers stay those of all sources.
        self._sources = [source for source, weight in enumerate(weights) if weight > 0]
        if len(self._sources) > 1:
            from grain import MapDataset

            # The mixture is over endless counters, and returns (source, count within the source). `locate` counts the
            # epochs, so that each can have its own permutation.
            counters = []
            for source in self._sources:
                endless = MapDataset.range(sys.maxsize)
                # The default argument binds the source of this loop iteration.
                counters.append(endless.map(lambda count, source=source: (source, count)))
            self._mix = MapDataset.mix(counters, [weights[source] for source in self._sources])

    def locate(self, sequence: int) -> tuple[int, int]:
        """Returns (source, window) of sequence g. Within an epoch of a source, each of its windows occurs once."""
        source, drawn = self._draw(sequence)
        count = self._num_windows[source]
        epoch, position = divmod(self._starts[source] + drawn, count)
        window = permute_index(position, count, f"{self._seed}/{source}/{epoch}")
        return source, window

    def _draw(self, sequence: int) -> tuple[int, int]:
        """Returns (source of sequence g, number of earlier sequences of this order from that source)."""
        if self._mix is None:
            return self._sources[0], sequence
        element = self._mix[sequence]
        # grain has None in datasets that filter.
        assert element is not None
        return element

    def positions_after(self, num_sequences: int) -> list[int]:
        """Returns the number of sequences drawn from each source up to here, with `num_sequences` of this order."""
        positions = list(self._starts)
        remaining = set(self._sources)
        num_remaining = sequence = num_sequences
        # The last sequence of a source has its count, and is at most about 1 / weight sequences back. The other counts
        # determine the last one, whose weight may be tiny.
        while len(remaining) > 1 and sequence > 0:
            sequence -= 1
            source, drawn = self._draw(sequence)
            if source in remaining:
                remaining.remove(source)
                positions[source] += drawn + 1
                num_remaining -= drawn + 1
        if len(remaining) == 1:
            positions[remaining.pop()] += num_remaining
        return positions


def permute_index(index: int, count: int, seed: str) -> int:
    """Returns the position of `index` in a permutation of range(count), without storing the permutation.

    The permutation is a Feistel cipher of six rounds on the next power of four, applied repeatedly until the result
    is in range (cycle walking, Black and Rogaway 2002). It replaces grain's `index_shuffle`, whose ciphers have at
    least 2^16 values: that takes 25 ms a call for 2 windows.
    """
    # The cipher needs two halves with the same number of bits, and at least one bit each.
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
    """An iterator over make(start), make(start + 1), ..., make(stop - 1), computed ahead of time.

    `next` raises an error of `make` at its position in the sequence, and closes the iterator.

    Args:
        make: a pure function; it runs in threads.
        start: first argument of `make`.
        stop: one past the last argument.
        depth: maximum number of results held in the background, in addition to the one returned last.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, *, depth: int):
        from grain import MapDataset, ReadOptions

        num_threads = min(depth, _THREADS)
        options = ReadOptions(num_threads=num_threads, prefetch_buffer_size=depth)
        dataset = MapDataset.range(start, stop).map(make)
        self._iterator = iter(dataset.to_iter_dataset(options))

    def __next__(self) -> T:
        try:
            return next(self._iterator)
        except BaseException as error:
            # After an error, grain by itself would continue with the next batch, and lose this one.
            if not isinstance(error, StopIteration):
                self.close()
            raise

    def close(self) -> None:
        """Drops the pending results, and stops the threads. May be called more than once."""
        self._iterator.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
