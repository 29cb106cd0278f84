"""Rows of one JSONL file: plain, gzip or zstd, one JSON object a line.

Parsed with Python's json, because Arrow's own reader refuses a lone surrogate (an escaped d800 alone) that JSON allows;
one such row must not end the job. Its text, and text of a line that is not UTF-8, is passed on as bytes encoded with
"surrogatepass", for the tokeniser to judge. A file has no header, so it is read once for the count and the types; a
plain file keeps the place of every `INDEX_ROWS`-th line, a compressed one is read from the start.
"""

import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import pyarrow as pa

from extract.errors import SourceError
from extract.sources.columns import missing_column
from extract.sources.file_source import DECODE_BYTES, DECODE_ROWS, StoredBatches
from extract.sources.json_types import Conflict, SeenValues
from extract.storage import Place
from extract.storage.arrow_files import RangeFile

INDEX_ROWS = 1024
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ABSENT = object()


class BadLine(SourceError):
    """A line that is not an object, or whose values do not fit the column."""

    template = "{path}, line {line:,}: {problem}."


class JsonLines:
    """See `RowFile`. The first column asked for is the input; only it may hold what UTF-8 cannot."""

    def __init__(self, path: Place, columns: tuple[str, ...], max_rows: int | None) -> None:
        self._path = path
        self._columns = columns
        self._compression = _COMPRESSION.get(path.suffix.lower())
        self._offsets: list[int] = []  # byte offset of rows 0, INDEX_ROWS, 2 * INDEX_ROWS, ...
        self._as_bytes = False
        self.num_rows = 0
        self.types = self._scan(max_rows)

    def seek(self, row: int) -> int:
        """The last indexed line before `row`; 0 in a compressed file."""
        return 0 if self._compression else row - row % INDEX_ROWS

    def batches(self, start: int) -> StoredBatches:
        """See `RowFile.batches`."""
        values: list[list[Any]] = [[] for _ in self._columns]
        size = 0
        with self._open() as file:
            if start:
                file.seek(self._offsets[start // INDEX_ROWS])
            for number, line in _lines(file, self._path, start + 1):
                row = _parse(line, self._path, number)
                for column, taken in zip(self._columns, values, strict=True):
                    value = _take(row, column)
                    taken.append(None if value is _ABSENT else value)
                size += len(line)
                if size >= DECODE_BYTES or len(values[0]) == DECODE_ROWS:
                    yield self._arrays(values)
                    values, size = [[] for _ in self._columns], 0
        if values[0]:
            yield self._arrays(values)

    def _scan(self, max_rows: int | None) -> tuple[pa.DataType, ...]:
        """Count rows, index lines, see every value of the columns; returns their types."""
        seen = [SeenValues() for _ in self._columns]
        present = [False] * len(seen)
        keys: dict[str, None] = {}
        offset = 0
        with self._open() as file:
            for number, line in _lines(file, self._path, 1):
                if not self._compression and self.num_rows % INDEX_ROWS == 0:
                    self._offsets.append(offset)
                offset += len(line)
                row = _parse(line, self._path, number)
                if self.num_rows < INDEX_ROWS:
                    keys |= dict.fromkeys(row)
                for index, column in enumerate(self._columns):
                    value = _take(row, column)
                    if value is not _ABSENT:
                        present[index] = True
                        self._see(seen[index], value, column, number)
                self.num_rows += 1
                if max_rows is not None and self.num_rows >= max_rows:
                    break
        for column, is_present in zip(self._columns, present, strict=True):
            if self.num_rows and not is_present:
                raise missing_column(column, list(keys), self._path)
        self._as_bytes = seen[0].lone_surrogate
        types = [column.arrow() for column in seen]
        if self._as_bytes and pa.types.is_string(types[0]):
            types[0] = pa.large_binary()
        return tuple(types)

    def _see(self, seen: SeenValues, value: Any, column: str, number: int) -> None:
        try:
            seen.add(value)
        except Conflict as conflict:
            problem = f'column "{column}" has {conflict}'
            raise BadLine(path=self._path, line=number, problem=problem) from None
        if seen.lone_surrogate and column != self._columns[0]:
            problem = f'column "{column}" has a string that is not valid Unicode; only the input column may'
            raise BadLine(path=self._path, line=number, problem=problem)

    def _arrays(self, values: list[list[Any]]) -> list[pa.Array]:
        arrays = [pa.array(taken, kind) for taken, kind in zip(values[1:], self.types[1:], strict=True)]
        if not self._as_bytes:
            return [pa.array(values[0], self.types[0]), *arrays]
        encoded = pa.array([_encode(value) for value in values[0]], _strings_as(pa.binary(), self.types[0]))
        return [encoded.view(self.types[0]), *arrays]

    def _open(self) -> BufferedReader:
        # pyarrow's stream, not gzip's or zstandard's: it reads concatenated members and raises on a truncated file.
        file = str(self._path) if isinstance(self._path, Path) else RangeFile(self._path)
        return BufferedReader(pa.input_stream(file, compression=self._compression), 2**20)


def open_jsonl(path: Place, columns: tuple[str, ...], max_rows: int | None) -> JsonLines:
    """Read the file once, or its first `max_rows` rows."""
    return JsonLines(path, columns, None if max_rows is None else max(max_rows, 1))


def _lines(file: BufferedReader, path: Place, first: int) -> Iterator[tuple[int, bytes]]:
    """Numbered lines. Blank ones may end the file, and are an error anywhere else: rows are counted by lines."""
    blank = None
    for number, line in enumerate(file, first):
        if not line.strip():
            blank = blank or number
            continue
        if blank is not None:
            raise BadLine(path=path, line=blank, problem="blank, expected a JSON object")
        yield number, line


def _parse(line: bytes, path: Place, number: int) -> dict[str, Any]:
    body = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).rstrip(b"\r\n")
    try:
        row = json.loads(body.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        problem = f"not JSON ({error.msg} at column {error.colno:,})"
        raise BadLine(path=path, line=number, problem=problem) from None
    except (ValueError, RecursionError) as error:
        raise BadLine(path=path, line=number, problem=f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadLine(path=path, line=number, problem=f"{type(row).__name__} found, expected a JSON object")
    return row


def _take(row: dict[str, Any], name: str) -> Any:
    """The value at a dotted name, a key that holds the dots first; `_ABSENT` if there is none."""
    if name in row:
        return row[name]
    for end in range(len(name) - 1, 0, -1):
        if name[end] == "." and isinstance(inner := row.get(name[:end]), dict):
            value = _take(inner, name[end + 1 :])
            if value is not _ABSENT:
                return value
    return _ABSENT


def _encode(value: Any) -> Any:
    """The value with every string as bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value


def _strings_as(kind: pa.DataType, container: pa.DataType) -> pa.DataType:
    """`container` with its strings replaced by `kind`."""
    if pa.types.is_list(container):
        return pa.list_(_strings_as(kind, container.value_type))
    if pa.types.is_struct(container):
        fields = [container.field(index) for index in range(container.num_fields)]
        return pa.struct([(field.name, _strings_as(kind, field.type)) for field in fields])
    return kind if pa.types.is_string(container) else container
