"""An Arrow IPC file whose record batches several threads compress, in the bytes that pyarrow's own writer gives.

One thread compresses 0.6 GB/s of states; a card makes more. pyarrow's `use_threads` shares the columns of a batch, of
which one holds nearly everything. So each batch goes through a pyarrow stream of its own, in memory and in any thread,
and its message is taken out of there: messages say nothing of where they lie. What stands before them and after them
comes from a skeleton, a file that pyarrow writes with as many empty batches, and the places of the true messages are
put into its footer. Nothing else is known of the format. Before a file is begun, a sample of its schema is written both
ways; if a byte differs, as another pyarrow may have it, pyarrow's writer alone is used, by one thread.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SAMPLE_ROWS = (1, 0, 3)
"""Rows of the batches of a sample: its messages differ in length."""
RECORD_BATCHES = 3
"""Which field of the footer's table holds the blocks of record batches."""
BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
"""Where a message lies: the footer holds one after the other."""
TRAILER = struct.calcsize("<i6s")
"""Behind the footer: its length, and the magic."""


class Appended(Protocol):
    """What an IPC file is written to."""

    def write(self, data: Any) -> int:
        """Append bytes, which nobody changes afterwards."""


class IpcFile(Protocol):
    """An IPC file that is being written. One thread appends and closes."""

    def prepared(self, batch: pa.RecordBatch) -> Any:
        """What `append` takes for a batch; any thread may ask, at any time."""

    def append(self, prepared: Any) -> None:
        """Write the next batch.

        Raises:
            pa.ArrowInvalid: it has another dictionary than the first one.
        """

    def close(self) -> None:
        """Write what stands at the end."""


def ipc_file(file: Appended, schema: pa.Schema, options: pa.ipc.IpcWriteOptions, threads: int) -> IpcFile:
    """Begin an IPC file; by several threads where the bytes are the same then."""
    if threads > 1 and is_understood(schema, options):
        return ThreadedIpcFile(file, schema, options)
    return PlainIpcFile(file, schema, options)


def is_understood(schema: pa.Schema, options: pa.ipc.IpcWriteOptions) -> bool:
    """Whether both kinds of file are the same bytes, for a sample of a schema."""
    samples = [
        pa.RecordBatch.from_arrays([pa.nulls(rows, field.type) for field in schema], schema=schema)
        for rows in SAMPLE_ROWS
    ]
    plain, threaded = _Pieces(), _Pieces()
    try:
        for one in (PlainIpcFile(plain, schema, options), ThreadedIpcFile(threaded, schema, options)):
            for batch in samples:
                one.append(one.prepared(batch))
            one.close()
    except (ArithmeticError, LookupError, ValueError, struct.error):  # what looking into an unknown format may end in
        return False
    return b"".join(plain.taken()) == b"".join(threaded.taken())


class PlainIpcFile:
    """By pyarrow's writer, in the thread that appends."""

    def __init__(self, file: Appended, schema: pa.Schema, options: pa.ipc.IpcWriteOptions) -> None:
        self._arrow = pa.PythonFile(file, mode="w")
        self._writer = pa.ipc.new_file(self._arrow, schema, options=options)

    def prepared(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """See `IpcFile.prepared`."""
        return batch

    def append(self, prepared: pa.RecordBatch) -> None:
        """See `IpcFile.append`."""
        self._writer.write_batch(prepared)

    def close(self) -> None:
        """See `IpcFile.close`."""
        self._writer.close()
        self._arrow.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A record batch as it stands in a file.

    Attributes:
        pieces: what pyarrow writes one after the other.
        metadata, body: bytes of its two parts.
        opening: what its own stream holds before any batch: schema and dictionaries.
        empty: a batch without rows, as such a stream holds it.
    """

    pieces: Sequence[Any]
    metadata: int
    body: int
    opening: bytes
    empty: bytes


class ThreadedIpcFile:
    """By whichever threads ask for messages; see the module's docstring."""

    def __init__(self, file: Appended, schema: pa.Schema, options: pa.ipc.IpcWriteOptions) -> None:
        self._file, self._schema, self._options = file, schema, options
        self._first: Message | None = None
        self._blocks: list[tuple[int, int, int, int]] = []
        self._end = 0

    def prepared(self, batch: pa.RecordBatch) -> Message:
        """See `IpcFile.prepared`."""
        sink, no_rows = _Pieces(), batch.slice(0, 0)
        with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), self._schema, options=self._options) as stream:
            stream.write_batch(no_rows)  # the first batch brings schema and dictionaries along
            begun = b"".join(sink.taken())
            stream.write_batch(no_rows)
            empty = b"".join(sink.taken())
            stream.write_batch(batch)
            pieces = sink.taken()
        if not begun.endswith(empty):
            raise ValueError("a batch is not the same bytes twice")
        metadata = 8 + _metadata_bytes(pieces)
        body = sum(map(len, pieces)) - metadata
        opening = begun.removesuffix(empty)
        return Message(pieces=pieces, metadata=metadata, body=body, opening=opening, empty=empty)

    def append(self, prepared: Message) -> None:
        """See `IpcFile.append`."""
        if self._first is None:
            self._first = replace(prepared, pieces=())
            skeleton = self._skeleton(1)
            self._end = int(_blocks(skeleton)["offset"][0])
            self._file.write(bytes(skeleton[: self._end]))
        elif prepared.opening != self._first.opening:
            raise pa.ArrowInvalid("a record batch has another dictionary than the first one of its file")
        for piece in prepared.pieces:
            self._file.write(piece)
        self._blocks.append((self._end, prepared.metadata, 0, prepared.body))
        self._end += prepared.metadata + prepared.body

    def close(self) -> None:
        """See `IpcFile.close`."""
        skeleton, start = self._skeleton(len(self._blocks)), 0
        if self._blocks:
            blocks = _blocks(skeleton)
            start = int(sum(blocks[-1].item()))
            blocks[:] = self._blocks
        self._file.write(bytes(skeleton[start:]))

    def _skeleton(self, num_batches: int) -> bytearray:
        """A whole file of batches without rows, with the schema and dictionaries of this one."""
        sink = _Pieces()
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), self._schema, options=self._options) as file:
            if self._first is not None:
                empty = pa.ipc.open_stream(self._first.opening + self._first.empty).read_next_batch()
                for _ in range(num_batches):
                    file.write_batch(empty)
        return bytearray().join(sink.taken())


class _Pieces:
    """A file in memory that keeps what it is given as it is."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, data: Any) -> int:
        self._pieces.append(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to give back."""

    def taken(self) -> list[Any]:
        """What came since this was asked last."""
        pieces, self._pieces = self._pieces, []
        return pieces


def _metadata_bytes(pieces: Sequence[Any]) -> int:
    """Length of a message's metadata: it stands behind a marker of four bytes."""
    marker, length = struct.unpack("<II", b"".join(bytes(piece[:8]) for piece in pieces[:2])[:8])
    if marker != 2**32 - 1:
        raise ValueError(f"a message begins with {marker:#x}")
    return int(length)


def _blocks(file: bytearray) -> npt.NDArray[Any]:
    """The blocks of a file's record batches, to be read and changed in place: its footer is a flatbuffer's table.

    Raises:
        ValueError, struct.error: there is no such thing.
    """
    trailer = len(file) - TRAILER
    footer = trailer - struct.unpack_from("<i", file, trailer)[0]
    table = footer + struct.unpack_from("<I", file, footer)[0]
    fields = table - struct.unpack_from("<i", file, table)[0]  # two lengths, then where in the table each field is
    field = table + struct.unpack_from("<H", file, fields + 4 + 2 * RECORD_BATCHES)[0]
    vector = field + struct.unpack_from("<I", file, field)[0]
    count = struct.unpack_from("<I", file, vector)[0]
    return np.frombuffer(file, BLOCK, count, vector + 4)
