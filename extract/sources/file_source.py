"""A source made of files, of any format: rows of all files as one range, read forwards through one cursor.

A format gives one `RowFile` per file and no more: how many rows, which types, where decoding can start, and batches
from there on. The cursor stays open between reads, so a job that walks its shards in order decodes each row once, and
seeks only where that is cheaper than reading on.

What could stop a job halfway is looked for before it begins or said when it happens: values that may not fit the type
over all files are read at the layout, and every batch counts only if its file is still the same after it was read.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from extract.sources.base import SourceLayout, column_names, copied_columns
from extract.sources.column_types import always_fits, conform, input_type, plain_type, unify
from extract.sources.cursor import Batches, RowCursor
from extract.sources.files import FileFormat, UnreadableFile, names_below_root, reading
from extract.sources.fingerprints import check_unchanged, describe_file
from extract.spec import SourceSpec
from extract.storage import Place

DECODE_ROWS = 4096
"""Most rows decoded at once."""
DECODE_BYTES = 16 * 2**20
"""Decoded size that a format aims at, when it can tell; a single larger row is decoded alone."""


StoredBatches = Generator[list[pa.Array], None, None]


class RowFile(Protocol):
    """One file, not held open. Attributes: `num_rows`, and `types`, the stored type of each column asked for."""

    num_rows: int
    types: tuple[pa.DataType, ...]

    def seek(self, row: int) -> int:
        """The nearest row at or before `row` where decoding can start without reading what is before it."""

    def batches(self, start: int) -> StoredBatches:
        """From row `start`, which `seek` gave, to the end: the columns asked for, as stored, in small batches.

        Closing the generator releases the file.
        """


OpenFile = Callable[[Place, tuple[str, ...], int | None], RowFile]
"""Path, columns asked for, and how many rows will be read at most."""


class FileSource:
    """Rows of a list of files."""

    def __init__(
        self,
        *,
        spec: SourceSpec,
        format: FileFormat,
        files: tuple[Place, ...],
        open_file: OpenFile,
        known: dict[str, Any] | None = None,
    ) -> None:
        self._spec = spec
        self._format = format
        self._paths = files
        self._open_file = open_file
        self._known = known
        self._files: list[RowFile] = []
        self._starts = np.zeros(0, np.int64)  # [files]: position in the source of each file's first row
        self._entries: list[dict[str, Any]] = []  # [files]: fingerprint entries, at the times of the last checks
        self._layout: SourceLayout | None = None
        self._cursor: RowCursor | None = None
        self._cursor_file = 0

    def layout(self) -> SourceLayout:
        """See `Source.layout`. Files are opened in order until `limit` is reached."""
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def read(self, start: int, stop: int | None, max_rows: int) -> Iterator[pa.RecordBatch]:
        """See `Source.read`."""
        num_rows = self.layout().num_rows
        assert num_rows is not None
        end = num_rows if stop is None else min(stop, num_rows)
        row = start
        while row < end:
            batch = self._next(row, min(max_rows, end - row))
            row += batch.num_rows
            yield batch

    def close(self) -> None:
        """See `Source.close`."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None

    def _make_layout(self) -> SourceLayout:
        columns, limit = column_names(self._spec), self._spec.limit
        files: list[RowFile] = []
        starts, num_rows = [], 0
        for path in self._paths:
            if files and limit is not None and num_rows >= limit:
                break
            with reading(path, self._format):
                files.append(self._open_file(path, columns, None if limit is None else limit - num_rows))
            starts.append(num_rows)
            num_rows += files[-1].num_rows
        paths = self._paths[: len(files)]
        fields = []
        for index, column in enumerate(columns):
            types = [self._read_type(file.types[index], index, path) for file, path in zip(files, paths, strict=True)]
            fields.append(pa.field(column, unify(column, types, paths)))
        schema = pa.schema(fields)
        self._files, self._starts = files, np.array(starts, np.int64)
        self._entries = self._describe(paths)
        self._check_values(schema, num_rows if limit is None else limit)
        return SourceLayout(
            format=self._format,
            num_rows=num_rows if limit is None else min(num_rows, limit),
            schema=schema,
            fingerprint={
                "format": self._format,
                "schema": {field.name: str(field.type) for field in schema},
                "files": [dict(entry) for entry in self._entries],
            },
        )

    def _read_type(self, stored: pa.DataType, index: int, path: Place) -> pa.DataType:
        return input_type(self._spec.input, stored, self._spec.column, path) if index == 0 else plain_type(stored)

    def _check_values(self, schema: pa.Schema, num_rows: int) -> None:
        """Read the columns whose type over all files may not hold what some file stores, up to row `num_rows`."""
        for index, file in enumerate(self._files):
            stored = zip(schema, file.types, strict=True)
            doubtful = [field for field, kind in stored if not always_fits(plain_type(kind), field.type)]
            if doubtful:
                path, row = self._paths[index], int(self._starts[index])
                with reading(path, self._format):
                    narrow = self._open_file(path, tuple(field.name for field in doubtful), None)
                    with closing(narrow.batches(0)) as stored_batches:
                        for arrays in stored_batches:
                            conform([array[: num_rows - row] for array in arrays], pa.schema(doubtful), path)
                            row += len(arrays[0])
                            if row >= num_rows:
                                break

    def _describe(self, paths: tuple[Place, ...]) -> list[dict[str, Any]]:
        known = {entry["name"]: entry for entry in (self._known or {}).get("files", ())}
        names = names_below_root(paths)
        total = sum(path.stat().st_size for path in paths)
        return [
            describe_file(path, name, file.num_rows, known.get(name), total)
            for path, name, file in zip(paths, names, self._files, strict=True)
        ]

    def _next(self, position: int, max_rows: int) -> pa.RecordBatch:
        """At most `max_rows` rows of one file from `position` on."""
        index = int(np.searchsorted(self._starts, position, side="right")) - 1
        row = position - int(self._starts[index])
        cursor = self._cursor_at(index, row)
        try:
            with reading(self._paths[index], self._format):
                batch = cursor.take(row, max_rows)
        except UnreadableFile as error:
            self.close()
            self._check_unchanged(index)
            raise self._naming_columns(error, index, row) from error
        self._check_unchanged(index)
        if batch is None:
            problem = f"it ends after {cursor.row:,} rows, expected {self._files[index].num_rows:,}"
            raise UnreadableFile(path=self._paths[index], format=self._format, problem=problem)
        return batch

    def _cursor_at(self, index: int, row: int) -> RowCursor:
        """A cursor from which `row` is reached by reading on: the open one, unless seeking skips more."""
        start, cursor = self._files[index].seek(row), self._cursor
        if cursor is None or self._cursor_file != index or not start <= cursor.row <= row:
            self.close()
            self._check_unchanged(index)
            cursor = RowCursor(self._batches(index, start), start)
            self._cursor, self._cursor_file = cursor, index
        return cursor

    def _batches(self, index: int, start: int) -> Batches:
        schema, row = self.layout().schema, int(self._starts[index]) + start
        copied = copied_columns(self._spec)
        with closing(self._files[index].batches(start)) as stored:
            for arrays in stored:
                yield conform(arrays, schema, self._paths[index], row, copied)
                row += len(arrays[0])

    def _check_unchanged(self, index: int) -> None:
        with reading(self._paths[index], self._format):
            self._entries[index] = check_unchanged(self._paths[index], self._entries[index])

    def _naming_columns(self, error: UnreadableFile, index: int, row: int) -> UnreadableFile:
        """The error with the columns that it comes from, found by reading each by itself, if not all are unreadable."""
        names = column_names(self._spec)
        if self._format == "jsonl" or len(names) == 1:
            return error
        path, readable = self._paths[index], []
        for name in names:
            with suppress(UnreadableFile), reading(path, self._format):
                file = self._open_file(path, (name,), None)
                start = file.seek(row)
                cursor = RowCursor(_first_columns(file.batches(start)), start)
                with closing(cursor):
                    cursor.take(row, 1)
                readable.append(name)
        if not readable:
            return error
        blamed = [f'column "{name}"' for name in names if name not in readable or len(readable) == len(names)]
        together = " together" if len(readable) == len(names) else ""
        problem = f"{', '.join(blamed)}{together}: {error.facts['problem']}"
        return UnreadableFile(path=path, format=self._format, problem=problem)


def _first_columns(batches: StoredBatches) -> Batches:
    with closing(batches):
        for arrays in batches:
            yield pa.record_batch([arrays[0]], names=["column"])
