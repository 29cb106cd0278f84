"""Rows of one Parquet file, by row group.

Column chunks are read through a small buffer, never prefetched: pyarrow's default keeps a whole row group's bytes in
memory, and one giant row group is a common way to write a dataset. Decoding may start at any row group; within one,
pages before the row asked for are decoded and dropped. Page checksums are verified where the writer stored them.

What pyarrow does not catch in a footer (an encrypted column, sizes that contradict the levels) ends the process when a
column's metadata is asked for. So a row is read first, which raises in such a case, and sizes are asked for after it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from extract.errors import SourceError
from extract.sources.columns import ColumnPath, find_column, take_column
from extract.sources.file_source import DECODE_BYTES, DECODE_ROWS, StoredBatches
from extract.storage import Place
from extract.storage.arrow_files import arrow_file

BUFFER_BYTES = 2**20
ENCRYPTED_MAGIC = b"PARE"


class EncryptedParquet(SourceError):
    """A file, or a column of it, that takes a key to read."""

    template = "{path}: {what} is encrypted, and no keys are taken here. Decrypt the file first{otherwise}."


class ParquetFile:
    """See `RowFile`. Keeps row counts of the row groups, not the footer."""

    def __init__(self, path: Place, columns: tuple[str, ...]) -> None:
        with arrow_file(path) as bare:
            bare.seek(max(0, bare.size() - 8))
            footer_end = bare.read(8)  # length of the footer, magic
        if footer_end[4:] == ENCRYPTED_MAGIC:
            raise EncryptedParquet(path=path, what="it", otherwise="")
        with _open(path) as file:
            schema, footer = file.schema_arrow, file.metadata
            if footer.serialized_size != int.from_bytes(footer_end[:4], "little"):  # a signature follows
                _refuse_encrypted(file, columns, path)
            counts = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
        self._path = path
        self._columns = columns
        self._bounds = np.cumsum([0, *counts], dtype=np.int64)  # [groups + 1]
        found = [find_column(schema, name, path) for name in columns]
        self._places: list[ColumnPath] = [place for place, _ in found]
        self.types = tuple(kind for _, kind in found)
        self.num_rows = int(self._bounds[-1])

    def seek(self, row: int) -> int:
        """The first row of the row group that holds `row`."""
        return int(self._bounds[np.searchsorted(self._bounds, row, side="right") - 1])

    def batches(self, start: int) -> StoredBatches:
        """See `RowFile.batches`."""
        first = int(np.searchsorted(self._bounds, start, side="right")) - 1
        with _open(self._path) as file:
            for groups, batch_rows in self._runs(file, first):
                for batch in _read(file, batch_rows, groups, self._columns):
                    yield [take_column(batch, place) for place in self._places]

    def _runs(self, file: pq.ParquetFile, first: int) -> Iterator[tuple[list[int], int]]:
        """Row groups from `first` on, and how many rows of them to decode at once.

        Small row groups are read together, so that a file of many tiny ones is not a batch each; a large one is read
        alone, in batches of about `DECODE_BYTES` by its own mean row size.
        """
        names = enumerate(file.schema)
        leaves = [index for index, leaf in names if _is_asked(leaf.path, self._columns)]
        groups: list[int] = []
        size = 0
        for group in range(first, file.num_row_groups):
            if size >= DECODE_BYTES:
                yield groups, self._batch_rows(groups, size)
                groups, size = [], 0
            next(_read(file, 1, [group], self._columns), None)
            metadata = file.metadata.row_group(group)
            own_size = sum(metadata.column(leaf).total_uncompressed_size for leaf in leaves)
            if groups and size + own_size > DECODE_BYTES:
                yield groups, self._batch_rows(groups, size)
                groups, size = [], 0
            groups.append(group)
            size += own_size
        if groups:
            yield groups, self._batch_rows(groups, size)

    def _batch_rows(self, groups: list[int], size: int) -> int:
        rows = int(self._bounds[groups[-1] + 1] - self._bounds[groups[0]])
        return max(1, min(DECODE_ROWS, rows * DECODE_BYTES // max(size, 1)))


def open_parquet(path: Place, columns: tuple[str, ...], max_rows: int | None) -> ParquetFile:
    """Read the footer. `max_rows` changes nothing: the footer has it all."""
    return ParquetFile(path, columns)


def _open(path: Place) -> pq.ParquetFile:
    file = path if isinstance(path, Path) else arrow_file(path)
    return pq.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True)


def _read(
    file: pq.ParquetFile, batch_rows: int, groups: list[int], columns: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    batches: Iterator[pa.RecordBatch] = file.iter_batches(
        batch_size=batch_rows, row_groups=groups, columns=list(columns), use_threads=False
    )
    return batches


def _refuse_encrypted(file: pq.ParquetFile, columns: tuple[str, ...], path: Place) -> None:
    """Try each column of a file with a plain, signed footer, which says that some of its columns are encrypted."""
    for name in columns:
        try:
            for group in range(min(1, file.num_row_groups)):
                next(_read(file, 1, [group], (name,)), None)
        except OSError as error:
            if "decrypt" not in str(error):
                raise
            what, otherwise = f'column "{name}"', ", or name another column"
            raise EncryptedParquet(path=path, what=what, otherwise=otherwise) from None


def _is_asked(leaf: str, columns: tuple[str, ...]) -> bool:
    return any(leaf == name or leaf.startswith(f"{name}.") for name in columns)
