"""Windows are a function of a shard's rows and the limits: they tile the rows, however these are read."""

import itertools
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extract.records import OUTCOME_CODE, Outcome, TokenRows
from extract.shard_windows import MAX_READ_ROWS, READ_BYTES, Window, WindowLimits, windows_of
from extract.sources.base import SourceLayout

any_pace = settings(deadline=None)

SCHEMA = pa.schema([("text", pa.large_string()), ("key", pa.int64())])


@dataclass
class ListSource:
    """Rows from a list, in batches of the given sizes, over and over."""

    chunk_lengths: list[list[int]]
    batch_sizes: list[int]
    bytes_a_row: int = 1
    reads: list[tuple[int, int]] = field(default_factory=list)

    def layout(self) -> SourceLayout:
        return SourceLayout(format="parquet", num_rows=len(self.chunk_lengths), schema=SCHEMA, fingerprint={})

    def read(self, start: int, stop: int | None, max_rows: int) -> Iterator[pa.RecordBatch]:
        end = min(len(self.chunk_lengths), len(self.chunk_lengths) if stop is None else stop)
        self.reads.append((start, end))
        place = 0
        while start < end:
            size = min(self.batch_sizes[place % len(self.batch_sizes)], max_rows, end - start)
            texts = [f"{row}" * self.bytes_a_row for row in range(start, start + size)]
            yield pa.record_batch([texts, [100 * row for row in range(start, start + size)]], schema=SCHEMA)
            start, place = start + size, place + 1

    def close(self) -> None:
        pass


@dataclass
class FakeTokenizer:
    """Row r has `chunk_lengths[r]` chunks; token t of row r is 1,000,000 r + t, so that every token is known."""

    chunk_lengths: list[list[int]]
    positions: list[int] = field(default_factory=list)

    def tokenize(self, column: pa.Array, first_row: int) -> TokenRows:
        rows = range(first_row, first_row + len(column))
        self.positions += rows
        lengths = [length for row in rows for length in self.chunk_lengths[row]]
        per_row = [len(self.chunk_lengths[row]) for row in rows]
        sums = [sum(self.chunk_lengths[row]) for row in rows]
        tokens = [1_000_000 * row + np.arange(count) for row, count in zip(rows, sums, strict=True)]
        codes = [OUTCOME_CODE[Outcome.OK if length else Outcome.EMPTY] for length in lengths]
        return TokenRows(
            source_index=np.repeat(np.arange(len(column), dtype=np.int32), per_row),
            chunk=np.concatenate([np.zeros(0, np.int32), *(np.arange(n, dtype=np.int32) for n in per_row)]),
            outcome=np.array(codes, np.uint8),
            num_tokens_original=np.repeat(np.array(sums, np.int32), per_row),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            input_ids=np.concatenate([np.zeros(0, np.int64), *tokens]).astype(np.int32),
            doubled_bos=len(column),
        )


def windows(
    chunk_lengths: list[list[int]],
    limits: WindowLimits,
    batch_sizes: tuple[int, ...] | list[int] = (64,),
    *,
    start: int = 0,
    stop: int | None = None,
    carried: tuple[str, ...] = ("key", "text"),
) -> list[Window]:
    source, tokenizer = ListSource(chunk_lengths, list(batch_sizes)), FakeTokenizer(chunk_lengths)
    end = len(chunk_lengths) if stop is None else stop
    return list(windows_of(7, start, end, source, tokenizer, limits, carried, lambda row: row))


def described(window: Window) -> tuple:
    """Everything of a window but how long it took and how far the source had been read."""
    piece, rows = window.piece, window.piece.rows
    arrays = (rows.source_index, rows.chunk, rows.outcome, rows.num_tokens_original, rows.offsets, rows.input_ids)
    source = piece.source.to_pydict() if piece.source.num_columns else None
    values = tuple(array.tolist() for array in arrays)
    return window.shard, window.opens, window.closes, piece.first_row, piece.num_rows, piece.new_rows, values, source


chunk_lengths = st.lists(
    st.one_of(
        st.just([0]),
        st.integers(1, 12).map(lambda n: [n]),
        st.integers(1, 7).flatmap(lambda n: st.lists(st.integers(1, 12), min_size=n, max_size=n)),
    ),
    max_size=40,
)
limits = st.builds(WindowLimits, max_tokens=st.integers(1, 40), max_sequences=st.integers(1, 9))
batch_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@any_pace
@given(chunk_lengths, limits, batch_sizes, batch_sizes)
@example([[5], [0], [0], [5]], WindowLimits(max_tokens=5, max_sequences=9), [1], [30])
@example([[50], [0], [3]], WindowLimits(max_tokens=5, max_sequences=9), [1], [30])
@example([[0], [50]], WindowLimits(max_tokens=5, max_sequences=9), [1], [30])
@example([[0]] * 20, WindowLimits(max_tokens=5, max_sequences=3), [1], [7])
def test_windows_are_the_same_whatever_batches_the_source_hands_out(lengths, limits, sizes, other_sizes):
    first, second = (list(map(described, windows(lengths, limits, batches))) for batches in (sizes, other_sizes))
    assert first == second


@any_pace
@given(chunk_lengths, limits, batch_sizes, st.integers(0, 5), st.integers(0, 45))
def test_windows_tile_the_rows_exactly_and_in_order(lengths, limits, sizes, start, stop):
    start = min(start, len(lengths))
    stop = min(max(start, stop), len(lengths))
    found = windows(lengths, limits, sizes, start=start, stop=stop)
    assert [window.opens for window in found] == [True] + [False] * (len(found) - 1)
    assert [window.closes for window in found] == [False] * (len(found) - 1) + [True]
    seen: list[tuple[int, int, int, int]] = []
    new_rows = 0
    for window in found:
        piece, rows = window.piece, window.piece.rows
        new_rows += piece.new_rows
        assert piece.num_rows == (int(rows.source_index[-1]) + 1 if len(rows.source_index) else 0)
        for n, index in enumerate(rows.source_index):
            row = piece.first_row + int(index)
            ids = rows.input_ids[rows.offsets[n] : rows.offsets[n + 1]]
            assert piece.source.column("key")[int(index)].as_py() == 100 * row
            assert piece.source.column("text")[int(index)].as_py() == f"{row}"
            seen.append((row, int(rows.chunk[n]), len(ids), int(ids[0]) if len(ids) else -1))
    expected = []
    for row in range(start, stop):
        at = 1_000_000 * row
        for chunk, length in enumerate(lengths[row]):
            expected.append((row, chunk, length, at if length else -1))
            at += length
    assert seen == expected
    assert new_rows == stop - start
    assert sum(window.piece.rows.doubled_bos for window in found) == stop - start


@any_pace
@given(chunk_lengths, limits, batch_sizes)
def test_a_window_keeps_the_limits_unless_it_is_a_single_sequence(lengths, limits, sizes):
    for window in windows(lengths, limits, sizes):
        rows = window.piece.rows
        assert len(rows.outcome) <= limits.max_sequences
        assert len(rows.input_ids) <= limits.max_tokens or len(rows.outcome) == 1


@any_pace
@given(chunk_lengths, limits, batch_sizes)
def test_a_window_is_as_full_as_the_limits_allow(lengths, limits, sizes):
    """Full windows make full passes: the next sequence would not have fitted."""
    found = windows(lengths, limits, sizes)
    for window, after in itertools.pairwise(found):
        rows, more = window.piece.rows, after.piece.rows
        if len(more.outcome):
            over = len(rows.input_ids) + int(more.offsets[1]) > limits.max_tokens
            assert over or len(rows.outcome) == limits.max_sequences


def test_a_row_cut_between_two_chunks_is_in_both_windows_with_its_carried_values_and_counts_once():
    found = windows([[4], [4, 4, 4, 4], [4]], WindowLimits(max_tokens=12, max_sequences=9))
    assert [window.piece.source.column("key").to_pylist() for window in found] == [[0, 100], [100, 200]]
    assert [window.piece.rows.chunk.tolist() for window in found] == [[0, 0, 1], [2, 3, 0]]
    assert [window.piece.first_row for window in found] == [0, 1]
    assert [window.piece.new_rows for window in found] == [2, 1]


def test_a_shard_without_rows_is_one_empty_window_that_opens_and_closes():
    (window,) = windows([], WindowLimits(max_tokens=5, max_sequences=5))
    assert (window.opens, window.closes, window.piece.num_rows, window.end_row) == (True, True, 0, 0)
    assert window.piece.source.schema.names == ["key", "text"]


def test_a_stream_that_ends_inside_a_shard_says_so():
    *_, last = windows([[3]] * 10, WindowLimits(max_tokens=100, max_sequences=100), stop=64)
    assert (last.at_end, last.end_row) == (True, 10)
    *_, last = windows([[3]] * 10, WindowLimits(max_tokens=100, max_sequences=100), stop=10)
    assert (last.at_end, last.end_row) == (False, 10)


def test_rows_are_named_by_their_position_in_the_source():
    lengths = [[1]] * 5
    source, tokenizer = ListSource(lengths, [2]), FakeTokenizer(lengths * 100)
    limits = WindowLimits(max_tokens=9, max_sequences=9)
    list(windows_of(0, 0, 5, source, tokenizer, limits, (), lambda row: 40 * row))
    assert tokenizer.positions == [0, 1, 80, 81, 160]  # the first row of each batch is asked for


def test_a_read_holds_about_as_many_bytes_as_it_should_however_long_the_rows_are():
    lengths = [[1]] * 3000
    for bytes_a_row, most in ((1, MAX_READ_ROWS), (100_000, READ_BYTES // 100_000 + 1)):
        source, tokenizer = ListSource(lengths, [10**6], bytes_a_row), FakeTokenizer(lengths)
        limits = WindowLimits(max_tokens=10**6, max_sequences=10**6)
        for _ in windows_of(0, 0, 300 if bytes_a_row > 1 else 3000, source, tokenizer, limits, (), lambda row: row):
            pass
        assert max(stop - start for start, stop in source.reads) <= most


def test_a_row_of_a_hundred_thousand_chunks_is_cut_into_windows_without_copies_of_the_whole():
    """Its own ids are held once; what comes on top stays small, and time does not grow with the square."""
    lengths = [[3], [128] * 100_000, [3]]
    whole = 4 * 128 * 100_000
    source, tokenizer = ListSource(lengths, [64]), FakeTokenizer(lengths)
    limits = WindowLimits(max_tokens=65_536, max_sequences=8192)
    found, peak_after_first = [], 0
    tracemalloc.start()
    for window in windows_of(0, 0, 3, source, tokenizer, limits, ("key",), lambda row: row):
        found.append((len(window.piece.rows.outcome), window.piece.new_rows))
        if len(found) == 2:
            tracemalloc.reset_peak()
    _, peak_after_first = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(count for count, _ in found) == 100_002
    assert sum(rows for _, rows in found) == 3
    assert len(found) == 196
    assert peak_after_first < 1.5 * whole
