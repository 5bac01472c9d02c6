"""How fast `plimsoll prepare` tokenizes, by one process and by several: MB of UTF-8 text a second.

    python -m tools.bench.prepare                          # 1 and 2 workers, three tokenizers
    python -m tools.bench.prepare --workers=1,4,16 --repeats=5 --copies=8

The text is the Python standard library's, as a document for each file, written several times into one file of JSON
lines, so that there is but one file to share among the workers. Each line is the best of several repeats, as a shared
machine only ever makes one slower; the numbers of workers take turns. Start and end of the worker processes count, the
training of the tokenizer and the import of packages do not. The files of all numbers of workers are compared.

One worker is this process, with all threads that the tokenizers library likes; several are processes of one thread
each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

from framework.data.encoding import by_workers, usable_cores
from framework.data.sources import JsonLines, StdlibSource
from framework.data.tokenize import write_tokens
from framework.data.tokenizers import BPETokenizer, ByteTokenizer, Tokenizer


def write_corpus(file: Path, copies: int) -> int:
    """Writes the standard library `copies` times. Returns the bytes of text."""
    texts = list(StdlibSource().documents())
    with open(file, "w") as stream:
        for _ in range(copies):
            for text in texts:
                stream.write(json.dumps({"text": text}) + "\n")
    return copies * sum(len(text.encode()) for text in texts)


def trained(folder: Path, vocab_size: int) -> BPETokenizer:
    """Returns a byte-level BPE of so many ids, trained on the standard library."""
    folder.mkdir()
    tokenizer = BPETokenizer(vocab_size=vocab_size)
    tokenizer.prepare(folder, lambda budget: StdlibSource().documents(), write=True)
    return tokenizer


def read_back(file: Path, vocab_size: int) -> BPETokenizer:
    """Returns the tokenizer of a tokenizer.json."""
    tokenizer = BPETokenizer(vocab_size=vocab_size, path=str(file))
    tokenizer.prepare(file.parent, None, write=False)
    return tokenizer


def tokenized(source: JsonLines, tokenizer: Tokenizer, workers: int, out: Path) -> tuple[float, str]:
    """Tokenizes once. Returns (seconds, the sha256 of the tokens)."""
    start = time.perf_counter()
    with by_workers(tokenizer, workers) as encode:
        for _ in write_tokens(source, tokenizer, out, encode):
            pass
    seconds = time.perf_counter() - start
    return seconds, hashlib.sha256(out.read_bytes()).hexdigest()


def main() -> None:
    """Prints a line for each tokenizer."""
    parser = argparse.ArgumentParser(description="Speed of `plimsoll prepare`.")
    parser.add_argument("--workers", default="1,2", help="numbers of workers to compare")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--copies", type=int, default=4, help="how often the text is written into the file")
    args = parser.parse_args()
    counts = [int(text) for text in args.workers.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_bytes = write_corpus(folder / "corpus.jsonl", args.copies)
        source = JsonLines(paths=[str(folder / "corpus.jsonl")])
        small = trained(folder / "small", 2048)
        trained(folder / "large", 32_000)
        tokenizers = {
            "bytes": ByteTokenizer(),
            "BPE, 2,048 ids, trained here": small,
            "tokenizer.json, 32,000 ids": read_back(folder / "large" / "tokenizer.json", 32_000),
        }
        print(f"{num_bytes / 1e6:.0f} MB of text, {usable_cores()} cores; MB/s, the best of {args.repeats}")
        print(f"{'tokenizer':30}" + "".join(f"{count:>4} worker{'s' if count > 1 else ' '}" for count in counts))
        for name, tokenizer in tokenizers.items():
            best_seconds = dict.fromkeys(counts, float("inf"))
            digests = set()
            for _ in range(args.repeats):
                for count in counts:
                    seconds, digest = tokenized(source, tokenizer, count, folder / "tokens.bin")
                    best_seconds[count] = min(best_seconds[count], seconds)
                    digests.add(digest)
            assert len(digests) == 1, f"{name}: the files differ"
            print(
                f"{name:30}" + "".join(f"{num_bytes / 1e6 / best_seconds[count]:12.1f}" for count in counts), flush=True
            )


if __name__ == "__main__":
    main()
