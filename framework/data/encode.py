"""Documents -> token files: the one way in which text becomes tokens, for a run's cache and for `launch.prepare` alike.

Token files are written in a temporary folder that is renamed when it is whole, so a kill leaves nothing under a final
name. May import: framework.data.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from framework.data.sources.base import Contents, TextSource, digest_of
from framework.data.storage import FileHashes, find, temporary_name
from framework.data.token_files import FORMAT, TokenShard, TokenStream, TokenWriter
from framework.data.tokenizers import Tokenizer

_BATCH_BYTES = 4 << 20  # text encoded at a time: enough for all cores, and some 100 MB of the library's own records


@dataclass
class Progress:
    """How far the tokenization of one source is."""

    name: str
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    read: int = 0  # bytes of the stored files, and
    total: int = 0  # in all; 0 where the source does not know
    done: bool = False


def write_tokens(
    source: TextSource,
    tokenizer: Tokenizer,
    folder: Path,
    name: str,
    *,
    shard_tokens: int | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> list[Path]:
    """Tokenizes all documents of `source` into `folder`; empty documents are left out.

    Args:
        name: of the files: `name.bin`, or `name-00000.bin` and on when there is a limit.
        shard_tokens: begin a new file after so many tokens (a document is never split over files); None for one file.
        report: called after each batch of documents.

    Returns:
        the `.bin` files in order.

    Raises:
        ValueError: the source yields no text, or a document is damaged (naming file and place).
    """
    assert tokenizer.eos_id is not None
    paths: list[Path] = []
    writer: TokenWriter | None = None
    progress = Progress(name)
    try:
        for texts in _batches(source.documents()):
            for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
                if writer is not None and shard_tokens is not None and writer.num_tokens >= shard_tokens:
                    writer.finish()
                    writer = None
                if writer is None:
                    paths.append(folder / (f"{name}.bin" if shard_tokens is None else f"{name}-{len(paths):05d}.bin"))
                    writer = TokenWriter(
                        paths[-1], vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, tokenizer=tokenizer.digest
                    )
                size = len(text.encode("utf-8"))
                writer.add(tokens, size)
                progress.documents += 1
                progress.text_bytes += size
                progress.tokens += len(tokens) + 1
            progress.read, progress.total = source.progress()
            report(progress)
        if writer is None:
            raise ValueError("the source holds no text: every document is empty, or there is none")
        writer.finish()
        progress.done, progress.read = True, progress.total
        report(progress)
    finally:
        if writer is not None:
            writer.close()
    return paths


def cached_tokens(
    source: TextSource,
    tokenizer: Tokenizer,
    cache: Path,
    name: str,
    *,
    hashes: FileHashes,
    write: bool,
    report: Callable[[Progress], None],
) -> TokenStream:
    """The tokens of `source`, from `cache` when the same content was tokenized before with the same tokenizer.

    Args:
        write: this process may tokenize and write; another finds what was written.

    Raises:
        FileNotFoundError: nothing is cached, and this process may not write.
    """
    contents = source.contents(hashes)
    key = digest_of({"format": FORMAT, "documents": contents.digest, "tokenizer": tokenizer.digest})
    folder = cache / f"tokens-{key[:16]}"
    if not folder.exists():
        if not write:
            raise FileNotFoundError(
                f"{folder} does not exist: the first process was to write it. All processes must see one "
                "data.cache_dir and the same source files"
            )
        _tokenize_into(folder, source, contents, tokenizer, name, report)
    shard = TokenShard(
        find(str(folder / "tokens.bin"))[0],
        dtype=None,
        eos_id=None,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.digest,
        verify=True,
        hashes=hashes,
    )
    return TokenStream([shard])


def _tokenize_into(
    folder: Path,
    source: TextSource,
    contents: Contents,
    tokenizer: Tokenizer,
    name: str,
    report: Callable[[Progress], None],
) -> None:
    temporary = folder.with_name(temporary_name(folder.name))
    temporary.mkdir(parents=True)
    try:

        def renamed(progress: Progress) -> None:  # the files are called "tokens", the person knows the source's name
            report(Progress(**{**vars(progress), "name": name}))

        write_tokens(source, tokenizer, temporary, "tokens", report=renamed)
        (temporary / "source.json").write_text(json.dumps(contents.record(), indent=1))
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():  # else another job tokenized the same content first: equal, so either will do
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        if not document:
            continue
        batch.append(document)
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
