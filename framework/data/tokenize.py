"""Writing the documents of a source of text into a token file and its sidecar."""

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

# Text that is encoded at a time: enough to keep all cores busy, and some 100 MB of the tokenizers
# library's own records.
_BATCH_BYTES = 4 << 20


@dataclass
class Progress:
    """The state of the tokenization of one source.

    Attributes:
        documents: documents written.
        text_bytes: their UTF-8 bytes.
        tokens: tokens written, separators included.
        position: bytes of the stored files that were read.
        total: bytes of the stored files.
    """

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    position: int = 0
    total: int = 0


def write_tokens(source: TextSource, tokenizer: Tokenizer, path: Path) -> Iterator[Progress]:
    """Writes all documents of `source` into the token file `path` and its sidecar; empty documents are left out.

    Yields after each batch of documents. The caller gives a path in a temporary folder, and renames the folder when
    everything is written.

    Raises:
        ValueError: the source holds no text, or a document is damaged. The message names file and place.
        OSError: `path` cannot be written, for instance because the disk is full. The message names it.
    """
    with writing(path):
        yield from _write_tokens(source, tokenizer, path)


def _write_tokens(source: TextSource, tokenizer: Tokenizer, path: Path) -> Iterator[Progress]:
    files = source.files()
    progress = Progress(total=sum(file.size() for file in files))
    # The byte order is fixed: a token file may be read on another machine.
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    separator = np.array([tokenizer.separator_id], dtype)
    with open(path, "wb") as stream:
        documents = (text for file in files for text in source.read(file))
        for texts in _batches(documents):
            encoded_texts = tokenizer.encode_batch(texts)
            for text, tokens in zip(texts, encoded_texts, strict=True):
                document_tokens = np.append(separator, tokens).astype(dtype)
                stream.write(document_tokens.tobytes())
                progress.documents += 1
                progress.text_bytes += len(text.encode("utf-8"))
                progress.tokens += len(tokens) + 1
            progress.position = sum(file.position for file in files)
            yield progress
        # The caller's rename must not reach the disk before the tokens do.
        stream.flush()
        os.fsync(stream.fileno())
    if not progress.documents:
        raise ValueError("the source holds no text: every document is empty, or there is none")
    # The hashes are those of the file as it can be read back, not of what was meant to be written.
    (token_file,) = find(str(path))
    hashes = [digest for digest, _ in scan(token_file, dtype.str)]
    facts = (
        dtype.name,
        progress.tokens,
        progress.documents,
        progress.text_bytes,
        tokenizer.separator_id,
        tokenizer.digest,
        hashes,
    )
    write_json(sidecar_name(str(path)), dict(zip(FACTS, facts, strict=True)))


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields the documents that are not empty, in lists of about _BATCH_BYTES."""
    batch: list[str] = []
    size = 0
    for document in filter(None, documents):
        batch.append(document)
        # Characters stand for bytes here: the limit need not be exact.
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
