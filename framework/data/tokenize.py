"""Writes the documents of a text source into a token file and its sidecar."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plimsoll.framework.data.encoding import Encode, encode_locally, token_dtype
from plimsoll.framework.data.files import find
from plimsoll.framework.data.row_files import read_file_rows
from plimsoll.framework.data.sources import DataSource, ExampleSource
from plimsoll.framework.data.token_files import Sidecar, scan, sidecar_name
from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.files.workdir import write_json, writing


@dataclass
class TokenizeProgress:
    """Progress of tokenizing one source.

    Attributes:
        documents: number of documents written.
        text_bytes: number of their UTF-8 bytes.
        tokens: number of tokens written, separators included.
        position: bytes read from the stored files.
        total: bytes of the stored files.
    """

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    position: int = 0
    total: int = 0


def write_tokens(
    source: DataSource, tokenizer: Tokenizer, path: Path, encode: Encode | None = None
) -> Iterator[TokenizeProgress]:
    """Writes all documents of `source` into the token file `path` and its sidecar; empty documents are skipped.

    Yields after each batch of documents. The caller passes a path in a temporary folder, and renames the folder when
    everything is written.

    Args:
        source: the documents.
        tokenizer: the tokenizer that encodes them.
        path: the token file.
        encode: function that encodes them with this tokenizer, possibly in other processes; None encodes in this one.

    Raises:
        ValueError: the source has no text, or a document is damaged. The message gives the file and location.
        OSError: `path` cannot be written, for instance because the disk is full. The message names it.
        WorkerLostError: a process of `encode` was killed.
    """
    files = source.files()
    progress = TokenizeProgress(total=sum(file.size() for file in files))
    documents = (text for file in files for text in source.read(file))
    # `writing` names the file in an error such as a full disk.
    with writing(path), open(path, "wb") as stream:
        for batch in encode(documents) if encode else encode_locally(tokenizer, documents):
            stream.write(batch.content)
            progress.documents += batch.documents
            progress.text_bytes += batch.text_bytes
            progress.tokens += batch.tokens
            progress.position = sum(file.position for file in files)
            yield progress
    if not progress.documents:
        raise ValueError(explain_empty_source(source))
    # Hash the file as it can be read back, not the bytes that were meant to be written.
    dtype = token_dtype(tokenizer)
    (token_file,) = find(str(path))
    hashes = [digest for digest, _ in scan(token_file, dtype.str)]
    sidecar = Sidecar(
        dtype=dtype.name,
        num_tokens=progress.tokens,
        num_documents=progress.documents,
        num_bytes=progress.text_bytes,
        eos_id=tokenizer.separator_id,
        tokenizer=tokenizer.digest,
        sha256=hashes,
    )
    write_json(sidecar_name(str(path)), dataclasses.asdict(sidecar))


def explain_empty_source(source: DataSource) -> str:
    """Explains why a source yields no documents: rows are split by their content, so all may be in the other part."""
    split = getattr(source, "split", "all")
    if isinstance(source, ExampleSource) and split in ("train", "validation") and getattr(source, "paths", None):
        num_rows = sum(1 for file in source.files() for _ in read_file_rows(file))
        if num_rows:
            whole = "data.validation={}" if split == "validation" else "data.source.split=all and data.validation={}"
            rows = "its only row is" if num_rows == 1 else f"all its {num_rows:,} rows are"
            return (
                f"the split {split!r} is empty: {rows} in the other one, where rows with the same prompt or text stay "
                "together; add rows with other prompts, change validation_fraction, or do not split the data "
                f"({whole})"
            )
    return "the source has no text: it has no documents, or all of them are empty"
