"""From the documents of a source of text to a token file and its sidecar."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from framework.data.files import find
from framework.data.sources import TextSource
from framework.data.token_files import FACTS, scan, sidecar_name
from framework.data.tokenizers import Tokenizer
from framework.files.workdir import write_json, writing

_BATCH_BYTES = 4 << 20  # text encoded at a time: enough for all cores, and some 100 MB of the library's own records


@dataclass
class Progress:
    """How far the tokenization of one source is."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    position: int = 0  # bytes of the stored files that were read, of
    total: int = 0


def write_tokens(source: TextSource, tokenizer: Tokenizer, path: Path) -> Iterator[Progress]:
    """Writes all documents of `source` into the token file `path` and its sidecar; empty documents are left out. Yields
    after each batch of documents. To be written in a folder that the caller renames when it is whole.

    Raises:
        ValueError: the source holds no text, or a document is damaged (naming file and place).
        OSError: `path` cannot be written, as the disk is full, say; names it.
    """
    with writing(path):
        yield from _write_tokens(source, tokenizer, path)


def _write_tokens(source: TextSource, tokenizer: Tokenizer, path: Path) -> Iterator[Progress]:
    files = source.files()
    progress = Progress(total=sum(file.size() for file in files))
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    separator = np.array([tokenizer.separator_id], dtype)
    with open(path, "wb") as stream:
        for texts in _batches(text for file in files for text in source.read(file)):
            for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
                stream.write(np.append(separator, tokens).astype(dtype).tobytes())
                progress.documents += 1
                progress.text_bytes += len(text.encode("utf-8"))
                progress.tokens += len(tokens) + 1
            progress.position = sum(file.position for file in files)
            yield progress
        stream.flush()
        os.fsync(stream.fileno())
    if not progress.documents:
        raise ValueError("the source holds no text: every document is empty, or there is none")
    hashes = [digest for digest, _ in scan(find(str(path))[0], dtype.str)]
    counts = (progress.tokens, progress.documents, progress.text_bytes)
    facts = (dtype.name, *counts, tokenizer.separator_id, tokenizer.digest, hashes)
    write_json(sidecar_name(str(path)), dict(zip(FACTS, facts, strict=True)))


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in filter(None, documents):
        batch.append(document)
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
