"""Parquet files, streamed by row group: only the text column of one batch of rows is in memory.

May import: framework.data; pyarrow lazily.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from framework.config import did_you_mean
from framework.data.sources.base import FileSource
from framework.data.storage import DataFile

_ROWS = 256


class Parquet(FileSource):
    """A text column of Parquet files; each row is one document.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order (the matches of a glob sorted by name).
        column: the name of the text column.
    """

    def __init__(self, *, paths: list[str], column: str = "text"):
        super().__init__(paths=paths, compression=None)
        self.column = column

    def settings(self) -> dict[str, Any]:
        return {"column": self.column}

    def documents(self) -> Iterator[str]:
        for file in self.files():
            yield from self._documents_of(file)

    def _documents_of(self, file: DataFile) -> Iterator[str]:
        import pyarrow
        from pyarrow import parquet

        where = "its footer"
        try:  # what pyarrow raises on damage: ArrowInvalid (a ValueError), OSError, ArrowException
            with file.open() as stream:
                # Checksums of pages are verified where the writer stored them.
                reader = parquet.ParquetFile(stream, page_checksum_verification=True)
                self._check_column(reader, file)
                for group in range(reader.num_row_groups):
                    row = 0
                    for batch in reader.iter_batches(_ROWS, row_groups=[group], columns=[self.column]):
                        for text in batch.column(0).to_pylist():
                            where = f"row group {group}, row {row}"
                            if text is None:
                                raise _Unusable(f"column {self.column!r} is null, expected text")
                            yield text
                            row += 1
                    where = f"row group {group}, row {row}"
                    if row != (expected := reader.metadata.row_group(group).num_rows):
                        raise _Unusable(f"the row group ends there, its footer promises {expected} rows")
        except (FileNotFoundError, PermissionError):
            raise
        except _Unusable as error:
            raise ValueError(f"{file}, {where}: {error}") from error
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{file}: damaged, truncated or not Parquet, after {where}: {error}") from error

    def _check_column(self, reader: Any, file: DataFile) -> None:
        import pyarrow

        names = reader.schema_arrow.names
        if self.column not in names:
            hint = did_you_mean(self.column, names)
            raise _Unusable(f"no column {self.column!r}; it has {', '.join(map(repr, names))}{hint}")
        kind = reader.schema_arrow.field(self.column).type
        value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value)):
            raise _Unusable(f"column {self.column!r} is {kind}, expected text")


class _Unusable(Exception):
    """The file is sound, but not what was asked for."""
