"""Tokenizes batches of documents, in this process or in several workers, with byte-identical results."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from plimsoll.framework.data.tokenizers import ByteTokenizer, Tokenizer
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.kill_with_parent import kill_with_parent

# Characters that one process encodes at a time: enough to keep all cores busy, with some 100 MB of internal records in
# the tokenizers library.
_LOCAL_BATCH = 4 << 20
# The same limit for each of several workers, which encode with one thread each.
_WORKER_BATCH = 1 << 20
# Batches per worker that are queued, being encoded, or waiting to be written: this bounds the memory.
_BATCHES_PER_WORKER = 2
# From this number of cores on, single-threaded processes are faster than one multi-threaded one. For 16 cores we
# extrapolate 46 MB/s instead of 33, from measurements by tools/bench/tokenization.py.
_MANY_CORES = 8
# The environment variable that enables or disables threads in the tokenizers library.
_LIBRARY_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class EncodedBatch:
    """A batch of documents in token file format.

    Attributes:
        content: little-endian ids, with a separator before each document.
        documents: number of documents.
        text_bytes: number of UTF-8 bytes of the documents.
        tokens: number of ids, separators included.
    """

    content: bytes
    documents: int
    text_bytes: int
    tokens: int


# Encodes documents in order, batch by batch; empty documents are skipped.
Encode = Callable[[Iterable[str]], Iterator[EncodedBatch]]


class WorkerLostError(Exception):
    """A worker process exited, and the batch it was encoding is lost."""


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Returns the dtype of a token file: the narrower of uint16 and uint32 that holds every id."""
    # The byte order is fixed: a token file may be read on another machine.
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """Returns the number of workers that uses all cores: one, which is multi-threaded, or one per core if many."""
    cores = usable_cores()
    return cores if cores >= _MANY_CORES else 1


def encode_locally(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[EncodedBatch]:
    """Encodes in this process, with as many threads as the tokenizers library chooses."""
    for texts in _batches(documents, _LOCAL_BATCH):
        yield _encode_batch(tokenizer, texts)


class _Forks(ForkContext):
    """A context that forks processes and records each of them, even one that ends immediately."""

    def __init__(self):
        super().__init__()
        self.processes: list[BaseProcess] = []

    # A class there, a method here: every caller only calls it.
    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # pyright: ignore[reportIncompatibleVariableOverride]
        process = ForkProcess(*args, **kwargs)
        self.processes.append(process)
        return process


@contextlib.contextmanager
def start_workers(tokenizer: Tokenizer, workers: int) -> Iterator[Encode]:
    """Yields a function that encodes with `workers` single-threaded processes, which end with the context.

    The processes are forks, so any tokenizer works, including a user's own. They are created immediately, before the
    caller starts threads. With one worker, or for a ByteTokenizer, all work is done in this process.

    Args:
        tokenizer: a prepared tokenizer; it must encode a document the same way regardless of the rest of its batch.
        workers: number of processes, at least 1.

    Yields:
        The function. It raises WorkerLostError if a process was killed.
    """
    # Bytes are their own ids, and transferring them takes longer than encoding them.
    if workers == 1 or isinstance(tokenizer, ByteTokenizer):
        yield functools.partial(encode_locally, tokenizer)
        return
    # The forks inherit the variable. With threads in each of them, there would be more threads than cores.
    with _environment(_LIBRARY_THREADS, "false"):
        context = _Forks()
        processes = context.processes
        executor = ProcessPoolExecutor(workers, context, initializer=_init_worker, initargs=(tokenizer, os.getpid()))
        # The first call creates all processes.
        first_call = executor.submit(os.getpid)

        # Workers ignore Ctrl-C, and a signal ends this process without the pool's own cleanup.
        def kill(number: int, line: str) -> None:
            for process in processes:
                process.kill()

        unregister = interrupts.register_cleanup(kill)

        def encode(documents: Iterable[str]) -> Iterator[EncodedBatch]:
            # In the order of the documents.
            futures: deque[Future[EncodedBatch]] = deque()
            try:
                first_call.result()
                for texts in _batches(documents, _WORKER_BATCH):
                    futures.append(executor.submit(_work, texts))
                    if len(futures) == _BATCHES_PER_WORKER * workers:
                        yield futures.popleft().result()
                while futures:
                    yield futures.popleft().result()
            except BrokenProcessPool as error:
                for process in processes:
                    process.join(1.0)
                # The pool ends the other processes with SIGTERM.
                codes = [process.exitcode or 0 for process in processes]
                codes = [code for code in codes if code not in (0, -signal.SIGTERM)]
                how = f"was killed by {signal.Signals(-codes[0]).name}" if codes and codes[0] < 0 else "ended"
                advice = "if memory is short, use a smaller --workers"
                raise WorkerLostError(f"one of {len(processes)} tokenizer processes {how}; {advice}") from error

        try:
            yield encode
        finally:
            executor.shutdown(cancel_futures=True)
            unregister()


# The tokenizer of a worker process; None in any other process.
_worker_tokenizer: Tokenizer | None = None


def _init_worker(tokenizer: Tokenizer, parent: int) -> None:
    """Initializes a worker process."""
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    # Ctrl-C reaches all processes of a terminal: the parent handles it, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kill_with_parent()
    if os.getppid() != parent:
        # The parent exited before this process was tied to it.
        os._exit(1)


def _work(texts: list[str]) -> EncodedBatch:
    assert _worker_tokenizer is not None
    return _encode_batch(_worker_tokenizer, texts)


def _encode_batch(tokenizer: Tokenizer, texts: list[str]) -> EncodedBatch:
    """Encodes documents in token file format."""
    dtype = token_dtype(tokenizer)
    separator = np.array([tokenizer.separator_id], dtype)
    parts = []
    for tokens in tokenizer.encode_batch(texts):
        parts += [separator, np.asarray(tokens).astype(dtype)]
    ids = np.concatenate(parts)
    text_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return EncodedBatch(ids.tobytes(), len(texts), text_bytes, len(ids))


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable until the context exits."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _batches(documents: Iterable[str], limit: int) -> Iterator[list[str]]:
    """Yields the non-empty documents, in lists of about `limit` characters."""
    batch: list[str] = []
    size = 0
    for document in filter(None, documents):
        batch.append(document)
        size += len(document)
        if size >= limit:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
