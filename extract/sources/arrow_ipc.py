"""Rows of one Arrow IPC file (Feather too) or stream, told apart by the first bytes.

Files are memory-mapped: without compression nothing is copied before it is used. The file format is read by record
batch, from anywhere; a stream only from its start, and to the mark at its end: without that the writer was stopped, and
rows may be missing. Every offset, index and view is checked before use, since a damaged file would otherwise be read
outside its own bytes; whether text is UTF-8 is not judged here.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from extract.sources.columns import find_column, take_column
from extract.sources.file_source import DECODE_ROWS, StoredBatches
from extract.storage import Place
from extract.storage.arrow_files import arrow_file

FILE_MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + bytes(4)


class ArrowFile:
    """See `RowFile`, for both layouts."""

    def __init__(self, path: Place, columns: tuple[str, ...], max_rows: int | None) -> None:
        self._path = path
        with arrow_file(path) as data:
            self._random_access = data.read(len(FILE_MAGIC)) == FILE_MAGIC
            data.seek(0)
            schema = self._reader(data, None).schema
            found = [find_column(schema, name, path) for name in columns]
            self._places = [place for place, _ in found]
            self.types = tuple(kind for _, kind in found)
            fields = sorted({schema.get_field_index(place[0]) for place in self._places})
            self._asked = pa.ipc.IpcReadOptions(included_fields=fields)
            counts = self._count(data, schema, max_rows)
        self._bounds = np.cumsum([0, *counts], dtype=np.int64)  # [batches + 1]
        self.num_rows = int(self._bounds[-1])

    def seek(self, row: int) -> int:
        """The first row of the record batch that holds `row`; 0 for a stream."""
        if not self._random_access:
            return 0
        return int(self._bounds[np.searchsorted(self._bounds, row, side="right") - 1])

    def batches(self, start: int) -> StoredBatches:
        """See `RowFile.batches`."""
        with arrow_file(self._path) as data:
            reader = self._reader(data, self._asked)
            first = int(np.searchsorted(self._bounds, start, side="right")) - 1 if self._random_access else 0
            for batch in self._record_batches(reader, first):
                batch.validate()
                for offset in range(0, batch.num_rows, DECODE_ROWS):
                    part = batch.slice(offset, DECODE_ROWS)
                    arrays = [take_column(part, place) for place in self._places]
                    for array in arrays:
                        _check_bounds(array)
                    yield arrays

    def _reader(self, data: pa.NativeFile, options: pa.ipc.IpcReadOptions | None) -> pa.ipc.RecordBatchReader:
        open_layout = pa.ipc.open_file if self._random_access else pa.ipc.open_stream
        return open_layout(data, options=options)

    def _record_batches(self, reader: pa.ipc.RecordBatchReader, first: int) -> Iterator[pa.RecordBatch]:
        if not self._random_access:
            yield from reader
            return
        for index in range(first, reader.num_record_batches):
            yield reader.get_batch(index)

    def _count(self, data: pa.NativeFile, schema: pa.Schema, max_rows: int | None) -> list[int]:
        """Rows of each record batch, from the one column that is cheapest to decompress."""
        fixed_width = [index for index, field in enumerate(schema) if pa.types.is_primitive(field.type)]
        narrow = pa.ipc.IpcReadOptions(included_fields=[fixed_width[0] if fixed_width else 0])
        data.seek(0)
        counts: list[int] = []
        for batch in self._record_batches(self._reader(data, narrow), 0):
            counts.append(batch.num_rows)
            if max_rows is not None and sum(counts) >= max_rows:
                return counts
        if not self._random_access:
            _check_end(data)
        return counts


def _check_end(data: pa.NativeFile) -> None:
    """Raise `ValueError` unless a stream that was read through ends with its mark, and the file with the stream."""
    end, size = data.tell(), data.size()
    if end != size:
        raise ValueError(f"{size - end:,} bytes follow the end of its stream, as where streams were joined into a file")
    data.seek(0)
    is_marked = data.read(len(CONTINUATION)) == CONTINUATION  # else of a time before there were marks of 8 bytes
    data.seek(max(0, size - len(END_OF_STREAM)))
    if is_marked and data.read() != END_OF_STREAM:
        raise ValueError("it has no end-of-stream mark, so its writer was stopped and rows may be missing")


def _check_bounds(array: pa.Array) -> None:
    """Raise `pa.ArrowInvalid` for an array that points outside of its buffers, whatever its text is."""
    bare = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    try:
        (array.view(bare[array.type]) if array.type in bare else array).validate(full=True)
    except pa.ArrowInvalid as error:
        # Text inside a list or struct is not judged either. Indices are checked where they are used: under a null
        # struct they may point nowhere.
        if "UTF8" not in str(error) and "Dictionary indices" not in str(error):
            raise


def open_arrow(path: Place, columns: tuple[str, ...], max_rows: int | None) -> ArrowFile:
    """Read the schema and count the rows, at most about `max_rows`."""
    return ArrowFile(path, columns, max_rows)
