"""Record batches compressed by several threads: byte for byte the file of pyarrow's own writer, or pyarrow's writer."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import shard_rig as rig
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sink import DICTIONARY

from extract.shards import threaded_ipc
from extract.shards.schema import storable_type
from extract.shards.threaded_ipc import PlainIpcFile, ThreadedIpcFile, ipc_file, is_understood
from extract.spec import StatesSpec

COLUMNS: dict[str, pa.Array] = {
    "int8": pa.array([1, None, 3, 4], pa.int8()),
    "bool": pa.array([True, None, False, True]),
    "float16": pa.array(np.arange(4, dtype=np.float16)),
    "decimal": pa.array([1, None, 3, 4], pa.decimal128(38, 2)),
    "timestamp": pa.array([1, None, 3, 4], pa.timestamp("us", "UTC")),
    "null": pa.nulls(4),
    "text": pa.array(["a", None, "", "long " * 300]),
    "large_text": pa.array(["a", None, "", "long " * 300], pa.large_string()),
    "view": pa.array(["a", None, "", "long " * 300], pa.string_view()),
    "binary": pa.array([b"a", None, b"", b"\0" * 3000], pa.large_binary()),
    "fixed": pa.array([b"ab", None, b"cd", b"ef"], pa.binary(2)),
    "lists": pa.array([[1, 2], None, [], [3] * 500]),
    "fixed_lists": pa.array([["a", "b"], None, ["c", "d"], ["e", "f"]], pa.list_(pa.string(), 2)),
    "structs": pa.array([{"role": "user", "parts": [{"text": "t"}]}, None, {"role": None, "parts": []}, {"role": "x"}]),
    "map": pa.array([[("a", "b")], None, [], [("c", None)]], pa.map_(pa.string(), pa.string())),
    "empty_struct": pa.array([{}, None, {}, {}], pa.struct([])),
    "dictionary": pa.array(["x", "y", None, "x"]).dictionary_encode(),
    "nested_dictionary": pa.ListArray.from_arrays([0, 1, 1, 3, 3], DICTIONARY),
    "dictionary_of_lists": pa.DictionaryArray.from_arrays([0, 1, None, 0], pa.array([["p"], ["q", "r"]])),
}


def options(compression: str | None) -> pa.ipc.IpcWriteOptions:
    return pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)


class Memory:
    """A file that keeps everything it is given."""

    closed = False

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: Any) -> int:
        self.content += data
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def plain(schema: pa.Schema, batches: list[pa.RecordBatch], compression: str | None) -> bytes:
    """What pyarrow alone writes, without any code of ours."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=options(compression)) as file:
        for batch in batches:
            file.write_batch(batch)
    return sink.getvalue().to_pybytes()


def threaded(schema: pa.Schema, batches: list[pa.RecordBatch], compression: str | None) -> bytes:
    sink = Memory()
    file = ipc_file(sink, schema, options(compression), 3)
    assert isinstance(file, ThreadedIpcFile)
    with ThreadPoolExecutor(3) as pool:
        for message in pool.map(file.prepared, batches):
            file.append(message)
    file.close()
    return bytes(sink.content)


def batch_of(names: list[str], index: list[int]) -> pa.RecordBatch:
    """Rows of `COLUMNS` by index; each column keeps its whole dictionary."""
    rows = pa.array(index, pa.int64())
    return pa.RecordBatch.from_arrays([COLUMNS[name].take(rows) for name in names], names=names)


TAKEN = [name for name in COLUMNS if name not in ("view", "dictionary_of_lists")]
"""Columns whose rows pyarrow takes by index; the others are slices."""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(TAKEN), unique=True, max_size=6),
    st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=6),
    st.sampled_from([None, "lz4", "zstd"]),
)
def test_any_batches_are_the_bytes_of_pyarrows_own_writer(names: Any, rows: Any, compression: Any) -> None:
    schema = batch_of(names, []).schema
    batches = [batch_of(names, index) for index in rows] if names else []
    assert threaded(schema, batches, compression) == plain(schema, batches, compression)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_any_type_in_whole_and_in_slices(name: str, compression: str | None) -> None:
    whole = pa.RecordBatch.from_arrays([COLUMNS[name]], names=["column"])
    batches = [whole, whole.slice(1, 2), whole.slice(0, 0), whole.slice(3), whole]
    written = threaded(whole.schema, batches, compression)
    assert written == plain(whole.schema, batches, compression)
    with pa.ipc.open_file(written) as file:
        assert [file.get_batch(number) for number in range(file.num_record_batches)] == batches


@pytest.mark.parametrize("count", [0, 1, 2, 700])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_any_number_of_batches(count: int, compression: str | None) -> None:
    names = ["text", "lists", "dictionary"]
    batches = [batch_of(names, [number % 4] * (number % 5)) for number in range(count)]
    schema = batch_of(names, []).schema
    assert threaded(schema, batches, compression) == plain(schema, batches, compression)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_batches_of_many_megabytes(compression: str | None) -> None:
    noise = np.random.default_rng(0).integers(0, 2**12, 2**23, np.uint16)
    batch = pa.record_batch({"states": pa.FixedSizeListArray.from_arrays(pa.array(noise), 4096)})
    digests = [
        hashlib.sha256(write(batch.schema, [batch, batch.slice(7, 3), batch], compression)).hexdigest()
        for write in (plain, threaded)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", ["tokens", "last"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_every_schema_of_ours_is_understood(kind: Any, dtype: Any) -> None:
    spec = StatesSpec(kind=kind, dtype=dtype, layers=(0, 1))
    carried = [pa.field(name, storable_type(column.type)) for name, column in COLUMNS.items()]
    schema = pa.schema([*rig.schema_for(spec, chunked=True), *carried])
    assert all(is_understood(schema, options(compression)) for compression in (None, "lz4", "zstd"))


@pytest.mark.parametrize("kind", [PlainIpcFile, ThreadedIpcFile])
def test_another_dictionary_is_refused_by_both(kind: Any) -> None:
    batches = [pa.record_batch({"word": pa.array(words).dictionary_encode()}) for words in ("ab", "ab", "cd")]
    file = kind(Memory(), batches[0].schema, options(None))
    file.append(file.prepared(batches[0]))
    file.append(file.prepared(batches[1]))
    with pytest.raises(pa.ArrowInvalid, match=r"(?i)dictionary"):
        file.append(file.prepared(batches[2]))


def another_footer(patch: pytest.MonkeyPatch) -> None:
    """Fields of the footer's table in another order."""
    patch.setattr(threaded_ipc, "RECORD_BATCHES", 2)


def another_block(patch: pytest.MonkeyPatch) -> None:
    """Blocks with their parts in another order."""
    swapped = np.dtype([("body", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("offset", "<i8")])
    patch.setattr(threaded_ipc, "BLOCK", swapped)


def smaller_block(patch: pytest.MonkeyPatch) -> None:
    """Blocks without padding."""
    patch.setattr(threaded_ipc, "BLOCK", np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("body", "<i8")]))


def more_fields(patch: pytest.MonkeyPatch) -> None:
    """A table far longer than it is."""
    patch.setattr(threaded_ipc, "RECORD_BATCHES", 10_000)


def longer_trailer(patch: pytest.MonkeyPatch) -> None:
    """More behind the footer."""
    patch.setattr(threaded_ipc, "TRAILER", 18)


def aligned_messages(patch: pytest.MonkeyPatch) -> None:
    """A writer of files that fills up before each batch, which depends on where it lies."""
    real = pa.ipc.new_file

    class Aligned:
        def __init__(self, sink: Any, schema: pa.Schema, **more: Any) -> None:
            self.sink, self.inner = sink, real(sink, schema, **more)

        def __enter__(self) -> "Aligned":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def write_batch(self, batch: pa.RecordBatch) -> None:
            self.sink.write(b"\0" * (-self.sink.tell() % 64))
            self.inner.write_batch(batch)

        def close(self) -> None:
            self.inner.close()

    patch.setattr(pa.ipc, "new_file", Aligned)


def streams_of_another_kind(patch: pytest.MonkeyPatch) -> None:
    """Streams whose messages begin without a marker, as they did before Arrow 0.15."""
    real = pa.ipc.new_stream

    def old_stream(sink: Any, schema: pa.Schema, *, options: Any) -> Any:
        return real(sink, schema, options=pa.ipc.IpcWriteOptions(use_legacy_format=True))

    patch.setattr(pa.ipc, "new_stream", old_stream)


@pytest.mark.parametrize(
    "changed",
    [
        another_footer,
        another_block,
        smaller_block,
        more_fields,
        longer_trailer,
        aligned_messages,
        streams_of_another_kind,
    ],
)
def test_a_format_that_is_not_understood_is_left_to_pyarrows_writer(changed: Any) -> None:
    batch = batch_of(["text", "dictionary"], [0, 3, 2])
    with pytest.MonkeyPatch.context() as patch:
        changed(patch)
        assert not is_understood(batch.schema, options("zstd"))
        assert isinstance(ipc_file(Memory(), batch.schema, options("zstd"), 3), PlainIpcFile)
    assert is_understood(batch.schema, options("zstd"))


def test_one_thread_has_pyarrows_writer() -> None:
    assert isinstance(ipc_file(Memory(), batch_of(["text"], []).schema, options("zstd"), 1), PlainIpcFile)
