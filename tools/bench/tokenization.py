"""Tokenization speed of `plimsoll prepare` with one process and with several: MB of UTF-8 text per second.

    python -m tools.bench.tokenization                          # 1 and 2 workers, two tokenizers
    python -m tools.bench.tokenization --workers=1,4,16 --repeats=5 --megabytes=100

The text is the Python standard library's, one document per file, written into a single file of JSON lines, so that the
workers have only one file to share. Each line is the best of several repeats, because other load on the machine can
only slow a repeat down; the numbers of workers take turns. Times include starting and ending the worker processes, but
not training the tokenizer or importing packages. The token files of all numbers of workers are compared.

In addition to MB/s, prints MB per second of processor time, which other jobs on the machine affect less, and MB per
second of the work that one process does alone (read, write, hand over). With many cores, that work bounds the speed.

One worker is this process, with as many threads as the tokenizers library likes; several workers are processes with one
thread each.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from plimsoll.framework.data.encoding import start_workers, usable_cores
from plimsoll.framework.data.sources import JsonLines, StdlibSource
from plimsoll.framework.data.tokenize import write_tokens
from plimsoll.framework.data.tokenizers import BPETokenizer, Tokenizer


def write_corpus(file: Path, megabytes: float) -> int:
    """Write files of the standard library repeatedly until the text has that size. Return the bytes of text."""
    num_bytes = 0
    with open(file, "w") as stream:
        for text in itertools.cycle(StdlibSource().documents()):
            stream.write(json.dumps({"text": text}) + "\n")
            num_bytes += len(text.encode())
            if num_bytes >= 1e6 * megabytes:
                return num_bytes
    raise AssertionError("a cycle does not end")


def train_tokenizer(folder: Path, vocab_size: int) -> BPETokenizer:
    """Return a byte-level BPE tokenizer with `vocab_size` ids, trained on the standard library."""
    folder.mkdir()
    tokenizer = BPETokenizer(vocab_size=vocab_size)
    tokenizer.prepare(folder, lambda budget: StdlibSource().documents(), write=True)
    return tokenizer


def read_back(file: Path, vocab_size: int) -> BPETokenizer:
    """Return the tokenizer of a tokenizer.json."""
    tokenizer = BPETokenizer(vocab_size=vocab_size, path=str(file))
    tokenizer.prepare(file.parent, None, write=False)
    return tokenizer


class TokenizationTime(NamedTuple):
    """One pass over the text.

    Attributes:
        seconds: wall-clock time.
        unshared_cpu_seconds: processor time of work that is not distributed; more cores cannot make it faster.
        cpu_seconds: processor time of all processes.
        digest: sha256 of the tokens.
    """

    seconds: float
    unshared_cpu_seconds: float
    cpu_seconds: float
    digest: str


def time_tokenization(source: JsonLines, tokenizer: Tokenizer, workers: int, out: Path) -> TokenizationTime:
    """Tokenize once."""
    start = time.perf_counter()
    first_start = time.process_time()
    thread_start = time.thread_time()
    others_start = others_cpu_seconds()
    with start_workers(tokenizer, workers) as encode:
        for _ in write_tokens(source, tokenizer, out, encode):
            pass
    seconds = time.perf_counter() - start
    first = time.process_time() - first_start
    # With one worker the library's threads encode, and the main thread waits for them.
    unshared = time.thread_time() - thread_start if workers == 1 else first
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    return TokenizationTime(seconds, unshared, first + others_cpu_seconds() - others_start, digest)


def others_cpu_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def row(name: str, num_bytes: int, runs_by_count: dict[int, list[TokenizationTime]]) -> str:
    """Return a tokenizer's line: MB/s, MB per second of all processor time, and MB per second of undistributed work."""
    megabytes = num_bytes / 1e6
    cells = []
    for runs in runs_by_count.values():
        speed = megabytes / min(run.seconds for run in runs)
        of_all = megabytes / min(run.cpu_seconds for run in runs)
        of_unshared = megabytes / min(run.unshared_cpu_seconds for run in runs)
        cells.append(f"{speed:11.1f} {of_all:9.1f} {of_unshared:9.1f}")
    return f"{name:30}" + "".join(cells)


def main() -> None:
    """Print a line for each tokenizer."""
    parser = argparse.ArgumentParser(description="Speed of `plimsoll prepare`.")
    parser.add_argument("--workers", default="1,2", help="numbers of workers to compare")
    parser.add_argument("--repeats", type=int, default=4, help="repeats of each measurement; the fastest counts")
    parser.add_argument(
        "--megabytes",
        type=float,
        default=20.0,
        help="megabytes of text; with less text, a repeat is less likely to be disturbed",
    )
    args = parser.parse_args()
    counts = [int(text) for text in args.workers.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_bytes = write_corpus(folder / "corpus.jsonl", args.megabytes)
        source = JsonLines(paths=[str(folder / "corpus.jsonl")])
        small = train_tokenizer(folder / "small", 2048)
        train_tokenizer(folder / "large", 32_000)
        tokenizers = {
            "BPE, 2,048 ids, trained here": small,
            "tokenizer.json, 32,000 ids": read_back(folder / "large" / "tokenizer.json", 32_000),
        }
        print(f"{num_bytes / 1e6:.0f} MB of text, {usable_cores()} cores, the best of {args.repeats}; MB/s, MB for a")
        print(
            "second of processor time, and MB for a second of the work that is not distributed over threads or workers"
        )
        print(f"{'':30}" + "".join(f"{f'--workers={count}':>31}" for count in counts))
        for name, tokenizer in tokenizers.items():
            runs_by_count: dict[int, list[TokenizationTime]] = {count: [] for count in counts}
            for _ in range(args.repeats):
                for count in counts:
                    runs_by_count[count].append(time_tokenization(source, tokenizer, count, folder / "tokens.bin"))
            digests = {run.digest for runs in runs_by_count.values() for run in runs}
            assert len(digests) == 1, f"{name}: the files differ"
            print(row(name, num_bytes, runs_by_count), flush=True)


if __name__ == "__main__":
    main()
