"""Rows of one Parquet file, by row group.

Column chunks are read through a small buffer, never prefetched: pyarrow's default keeps a whole row group's bytes in
memory, and one giant row group is a common way to write a dataset. Decoding may start at any row group; within one,
pages before the row asked for are decoded and dropped. Page checksums are verified where the writer stored them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from extract.sources.columns import ColumnPath, find_column, take_column
from extract.sources.file_source import DECODE_BYTES, DECODE_ROWS, StoredBatches

BUFFER_BYTES = 2**20


class ParquetFile:
    """See `RowFile`. Keeps row counts and sizes of the row groups, not the footer."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        with _open(path) as file:
            schema, footer = file.schema_arrow, file.metadata
            groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
            leaves = [
                index for index in range(footer.num_columns) if _is_asked(file.schema.column(index).path, columns)
            ]
            self._group_bytes = [sum(group.column(leaf).total_uncompressed_size for leaf in leaves) for group in groups]
        self._path = path
        self._columns = columns
        self._bounds = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)  # [groups + 1]
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
            for groups, batch_rows in self._runs(first):
                for batch in file.iter_batches(
                    batch_size=batch_rows, row_groups=groups, columns=list(self._columns), use_threads=False
                ):
                    yield [take_column(batch, place) for place in self._places]

    def _runs(self, first: int) -> Iterator[tuple[list[int], int]]:
        """Row groups from `first` on, and how many rows of them to decode at once.

        Small row groups are read together, so that a file of many tiny ones is not a batch each; a large one is read
        alone, in batches of about `DECODE_BYTES` by its own mean row size.
        """
        groups: list[int] = []
        size = 0
        for group in range(first, len(self._group_bytes)):
            if groups and size + self._group_bytes[group] > DECODE_BYTES:
                yield groups, self._batch_rows(groups, size)
                groups, size = [], 0
            groups.append(group)
            size += self._group_bytes[group]
        if groups:
            yield groups, self._batch_rows(groups, size)

    def _batch_rows(self, groups: list[int], size: int) -> int:
        rows = int(self._bounds[groups[-1] + 1] - self._bounds[groups[0]])
        return max(1, min(DECODE_ROWS, rows * DECODE_BYTES // max(size, 1)))


def open_parquet(path: Path, columns: tuple[str, ...], max_rows: int | None) -> ParquetFile:
    """Read the footer. `max_rows` changes nothing: the footer has it all."""
    return ParquetFile(path, columns)


def _open(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True)


def _is_asked(leaf: str, columns: tuple[str, ...]) -> bool:
    return any(leaf == name or leaf.startswith(f"{name}.") for name in columns)
