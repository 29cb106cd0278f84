"""Rows of a shard -> windows: runs of consecutive output rows that are tokenised, computed and written together.

A window bounds memory whatever the shard, the texts or the chunking do, and is long enough for its sequences to be
sorted into full token batches. Where windows are cut depends on the shard's rows and the limits alone, never on how the
source happened to hand rows out: that is what makes the same shard give the same bytes again.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from extract.records import TokenRows
from extract.sources.base import Source
from extract.text.tokens import RowTokenizer

READ_BYTES = 8 * 2**20
MAX_READ_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """A window ends before it would exceed either; a single sequence is never split."""

    max_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive output rows with what they need from the source.

    Attributes:
        first_row: position of the first source row that it begins or goes on with.
        num_rows: R, how many source rows that is.
        new_rows: of these, the ones that no piece before it had (a row cut between two chunks is in both).
        rows: token rows; `source_index` counts from `first_row`.
        source: id and carried columns of the R rows (no columns: no rows).
    """

    first_row: int
    num_rows: int
    new_rows: int
    rows: TokenRows
    source: pa.RecordBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A piece of one shard.

    Attributes:
        opens, closes: this is the shard's first, last window (one window can be both).
        end_row: one past the last source row read so far.
        at_end: the source ended here.
        seconds: time spent reading and tokenising.
    """

    shard: int
    piece: Piece
    opens: bool
    closes: bool
    end_row: int
    at_end: bool
    seconds: float


def windows_of(
    shard: int,
    start: int,
    stop: int,
    source: Source,
    tokenizer: RowTokenizer,
    limits: WindowLimits,
    carried: tuple[str, ...],
    position_of: Callable[[int], int],
) -> Iterator[Window]:
    """Read rows `start` to `stop`, tokenise them and cut windows; always yields at least one, and the last `closes`.

    `carried` are the source columns that go to the output, id first; the input column is dropped once it is tokenised.
    `position_of` turns a row's count into its position in the source, for messages.
    """
    layout = source.layout().schema
    pending = _Pending(start, pa.schema([layout.field(name) for name in carried]))
    opens, row, read_rows, ended = True, start, 64, False
    clock = time.perf_counter()
    while row < stop and not ended:
        want = min(stop - row, read_rows)
        got = 0
        for batch in source.read(row, row + want, want):
            pending.add(batch, tokenizer.tokenize(batch.column(0), position_of(row + got)))
            got += batch.num_rows
            read_rows = _next_read(batch)
        row += got
        ended = got < want
        while pending.exceeds(limits):
            piece = pending.cut(limits)
            seconds = time.perf_counter() - clock
            yield Window(
                shard=shard, piece=piece, opens=opens, closes=False, end_row=row, at_end=False, seconds=seconds
            )
            opens, clock = False, time.perf_counter()
    piece = pending.rest()
    seconds = time.perf_counter() - clock
    yield Window(shard=shard, piece=piece, opens=opens, closes=True, end_row=row, at_end=ended, seconds=seconds)


def _next_read(batch: pa.RecordBatch) -> int:
    """Rows to ask for next, so that a read holds about READ_BYTES however long the texts are."""
    num_bytes, num_rows = int(batch.nbytes), int(batch.num_rows)
    return max(1, min(MAX_READ_ROWS, READ_BYTES * num_rows // max(1, num_bytes)))


class _Pending:
    """Token rows and carried columns read but not yet handed on."""

    def __init__(self, first_row: int, schema: pa.Schema) -> None:
        self.first_row = first_row
        self.schema = schema
        self.blocks: list[TokenRows] = []
        self.carried: list[pa.RecordBatch] = []
        self.num_source_rows = 0
        self.seen = 0  # leading source rows that an earlier piece has counted: 0 or 1
        self.num_tokens = 0
        self.num_sequences = 0

    def add(self, batch: pa.RecordBatch, rows: TokenRows) -> None:
        self.blocks.append(_shifted(rows, self.num_source_rows))
        self.carried.append(
            pa.RecordBatch.from_arrays([batch.column(n) for n in self.schema.names], schema=self.schema)
        )
        self.num_source_rows += batch.num_rows
        self.num_tokens += len(rows.input_ids)
        self.num_sequences += len(rows.outcome)

    def exceeds(self, limits: WindowLimits) -> bool:
        """A whole piece can be cut off and something is left after it."""
        return self.num_tokens > limits.max_tokens or self.num_sequences > limits.max_sequences

    def cut(self, limits: WindowLimits) -> Piece:
        rows = _joined(self.blocks)
        fits = int(np.searchsorted(rows.offsets, limits.max_tokens, side="right")) - 1
        return self._take(rows, max(1, min(fits, limits.max_sequences)))

    def rest(self) -> Piece:
        rows = _joined(self.blocks)
        return self._take(rows, len(rows.outcome))

    def _take(self, rows: TokenRows, count: int) -> Piece:
        head, tail = _sliced(rows, 0, count), _sliced(rows, count, len(rows.outcome))
        carried = pa.concat_batches([_empty(self.schema), *self.carried])
        used = int(head.source_index[-1]) + 1 if count else 0
        kept = int(tail.source_index[0]) if len(tail.outcome) else used
        piece = Piece(
            first_row=self.first_row,
            num_rows=used,
            new_rows=used - self.seen,
            rows=head,
            source=carried.slice(0, used),
        )
        self.blocks = [_shifted(tail, -kept)]
        self.carried = [carried.slice(kept)]
        self.first_row += kept
        self.seen = used - kept
        self.num_source_rows -= kept
        self.num_tokens, self.num_sequences = len(tail.input_ids), len(tail.outcome)
        return piece


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _shifted(rows: TokenRows, by: int) -> TokenRows:
    return replace(rows, source_index=rows.source_index + np.int32(by))


def _sliced(rows: TokenRows, start: int, stop: int) -> TokenRows:
    offsets = rows.offsets[start : stop + 1]
    return TokenRows(
        source_index=rows.source_index[start:stop],
        chunk=rows.chunk[start:stop],
        outcome=rows.outcome[start:stop],
        num_tokens_original=rows.num_tokens_original[start:stop],
        offsets=offsets - offsets[0],
        input_ids=rows.input_ids[offsets[0] : offsets[-1]],
        doubled_bos=rows.doubled_bos if start == 0 else 0,
    )


def _joined(blocks: list[TokenRows]) -> TokenRows:
    if len(blocks) == 1:
        return blocks[0]  # copying the rest of a row of 100,000 chunks at each cut would cost their square
    none = np.zeros(0, np.int32)
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(block.offsets) for block in blocks)])
    return TokenRows(
        source_index=np.concatenate([none, *(block.source_index for block in blocks)]),
        chunk=np.concatenate([none, *(block.chunk for block in blocks)]),
        outcome=np.concatenate([none.astype(np.uint8), *(block.outcome for block in blocks)]),
        num_tokens_original=np.concatenate([none, *(block.num_tokens_original for block in blocks)]),
        offsets=np.cumsum(lengths),
        input_ids=np.concatenate([none, *(block.input_ids for block in blocks)]),
        doubled_bos=sum(block.doubled_bos for block in blocks),
    )
