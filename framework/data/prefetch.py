"""Batches made ahead of time by grain's background threads, never more than a given number, and closable.

May import: grain lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")
_THREADS = 4  # a batch is assembled by one thread; more only hide the latency of remote reads


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
        """Drops what waits and stops the threads; may be called again. `next` is an error then."""
        self._iterator.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
