"""Batches of documents to tokens: in this process, or by several at once, with the same bytes as a result."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np

from framework.data.tokenizers import ByteTokenizer, Tokenizer
from framework.terminal import interrupts
from framework.terminal.tied import tie

# Text that one process encodes at a time, in characters: enough to keep all cores busy, and some 100 MB of the
# tokenizers library's own records.
_BATCH_ALONE = 4 << 20
# The same for each of several processes, which encode by one thread each.
_BATCH_OF_WORKER = 1 << 20
# Batches for each process that are being encoded, or wait to be encoded or written: this bounds the memory.
_BATCHES_OF_WORKER = 2
# From so many cores on, processes of one thread each are faster than one of many threads (docs/data.md).
_MANY_CORES = 8
# The variable by which the tokenizers library is told whether to use threads.
_LIBRARY_THREADS = "TOKENIZERS_PARALLELISM"


class Encoded(NamedTuple):
    """A batch of documents as a token file has it.

    Attributes:
        content: little-endian ids, a separator before each document.
        documents: number of documents.
        text_bytes: their UTF-8 bytes.
        tokens: number of ids, separators included.
    """

    content: bytes
    documents: int
    text_bytes: int
    tokens: int


# Encodes documents in order, batch by batch; empty documents are left out.
Encode = Callable[[Iterable[str]], Iterator[Encoded]]


class WorkerLostError(Exception):
    """A process that encodes has ended, and the batch that it had is lost."""


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
    """Returns the number of workers that makes use of all cores: one, whose threads do, or one for each of many."""
    cores = usable_cores()
    return cores if cores >= _MANY_CORES else 1


def alone(tokenizer: Tokenizer) -> Encode:
    """Returns a function that encodes in this process, by as many threads as the tokenizers library likes."""

    def encode(documents: Iterable[str]) -> Iterator[Encoded]:
        for texts in _batches(documents, _BATCH_ALONE):
            yield _encoded(tokenizer, texts)

    return encode


class _Forks(ForkContext):
    """Makes processes as forks, and lists them: the list has each one, however soon it ends."""

    def __init__(self):
        super().__init__()
        self.processes: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:
        process = ForkProcess(*args, **kwargs)
        self.processes.append(process)
        return process


@contextlib.contextmanager
def by_workers(tokenizer: Tokenizer, workers: int) -> Iterator[Encode]:
    """Yields a function that encodes by `workers` processes of one thread each, which end with the context.

    The processes are forks, so any tokenizer will do, a user's own too. They are made at once, before the caller
    starts threads. With one worker, or for a ByteTokenizer, all is done in this process.

    Args:
        tokenizer: prepared; it must encode a document the same way whatever the others of its batch are.
        workers: number of processes, at least 1.

    The function raises WorkerLostError if a process was killed.
    """
    # Bytes are their own ids, and to hand them over takes longer than to encode them.
    if workers == 1 or isinstance(tokenizer, ByteTokenizer):
        yield alone(tokenizer)
        return
    with _environment(_LIBRARY_THREADS, "false"):
        context = _Forks()
        processes = context.processes
        executor = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(tokenizer, os.getpid()))
        # The first call makes all processes.
        first_call = executor.submit(os.getpid)

        def kill(number: int, line: str) -> None:
            for process in processes:
                process.kill()

        take_back = interrupts.at_end(kill)

        def encode(documents: Iterable[str]) -> Iterator[Encoded]:
            try:
                first_call.result()
                yield from _in_order(executor, documents, _BATCHES_OF_WORKER * workers)
            except BrokenProcessPool as error:
                raise WorkerLostError(_loss(processes)) from error

        try:
            yield encode
        finally:
            executor.shutdown(cancel_futures=True)
            take_back()


def _in_order(executor: ProcessPoolExecutor, documents: Iterable[str], limit: int) -> Iterator[Encoded]:
    """Yields the batches in the order of the documents; at most `limit` of them are on their way."""
    futures: deque[Future[Encoded]] = deque()
    for texts in _batches(documents, _BATCH_OF_WORKER):
        futures.append(executor.submit(_work, texts))
        if len(futures) == limit:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()


# The tokenizer of a process that encodes, and of no other.
_tokenizer_of_worker: Tokenizer | None = None


def _begin(tokenizer: Tokenizer, parent: int) -> None:
    """Begins a process that encodes."""
    global _tokenizer_of_worker
    _tokenizer_of_worker = tokenizer
    # Ctrl-C reaches all processes of a terminal: the parent hears it, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tie()
    if os.getppid() != parent:
        # The parent has ended before this process was tied to it.
        os._exit(1)


def _work(texts: list[str]) -> Encoded:
    assert _tokenizer_of_worker is not None
    return _encoded(_tokenizer_of_worker, texts)


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    """Encodes documents."""
    dtype = token_dtype(tokenizer)
    separator = np.array([tokenizer.separator_id], dtype)
    parts = []
    for tokens in tokenizer.encode_batch(texts):
        parts += [separator, np.asarray(tokens).astype(dtype)]
    ids = np.concatenate(parts)
    text_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return Encoded(ids.tobytes(), len(texts), text_bytes, len(ids))


def _loss(processes: list[BaseProcess]) -> str:
    """What a person is told when a process was lost."""
    for process in processes:
        process.join(1.0)
    # The pool ends the other processes by SIGTERM.
    codes = [process.exitcode for process in processes if process.exitcode not in (None, 0, -signal.SIGTERM)]
    how = "ended"
    if codes and codes[0] is not None and codes[0] < 0:
        how = f"was killed by {signal.Signals(-codes[0]).name}"
    return (
        f"one of {len(processes)} processes that tokenize {how}; where memory is short, a smaller --workers needs less"
    )


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment until the context ends."""
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
    """Yields the documents that are not empty, in lists of about `limit` characters."""
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
