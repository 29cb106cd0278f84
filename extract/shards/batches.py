"""Rows and their states as Arrow record batches of bounded size.

Knows the output schema and nothing of files. Columns are built from offsets and flat buffers, never from Python values.
A batch is bounded by all of its columns, so neither many states nor long carried texts can overflow an offset; a single
row larger than the bound is a batch of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from extract.records import NOT_COUNTED, OUTCOME_CODE, Int32, Int64, Outcome, States, TokenRows, UInt8
from extract.shards import schema as names
from extract.shards.values import Bool, Encoded, Fault, unit_length, value_type
from extract.spec import StatesSpec

ROW_BYTES = 32
"""About what the columns of fixed width take in a row."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows `start` to `stop` of a window, which become one record batch, and the range of their states."""

    start: int
    stop: int
    first_state: int
    last_state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Consecutive rows of a window, with their states encoded.

    Attributes:
        start, stop: which rows of the window.
        states: of each column, the final one first: the states as they came in, [K, H]: one a token, or one a row that
            has tokens.
        owners: int64 [K], the row (from `start`) that each state belongs to.
        encoded: of each column, the same states as stored.
        faults: uint8 [rows], the first fault of each row, in whichever column: its states are then stored in none.
    """

    start: int
    stop: int
    states: tuple[States, ...]
    owners: Int64
    encoded: tuple[Encoded, ...]
    faults: UInt8


def encoded_rows(
    rows: TokenRows, states: States, spec: StatesSpec, source_bytes: Int64, layers: Sequence[States] = ()
) -> Iterator[EncodedRows]:
    """The parts of a window with their states encoded, one after the other; see `cuts` and `encoded_part`."""
    for cut in cuts(rows, states.shape[1], spec, source_bytes):
        yield encoded_part(cut, rows, states, spec, layers)


def cuts(rows: TokenRows, width: int, spec: StatesSpec, source_bytes: Int64) -> Iterator[Cut]:
    """Cut a window into parts of at most `spec.record_batch_bytes`, at least one row each.

    Args:
        rows: N rows with T tokens.
        width: hidden size H.
        spec: what is written.
        source_bytes: int64 [R], bytes of the carried columns of each source row.
    """
    stored, lengths = value_type(spec.dtype), np.diff(rows.offsets)
    per_row = _states_by_row(lengths, spec)
    state_bytes = (1 + len(spec.layers)) * (width * stored.bytes_per_value + (4 if stored.scaled else 0))
    row_bytes = ROW_BYTES + source_bytes[rows.source_index] + state_bytes * per_row
    if spec.input_ids:
        row_bytes += 4 * lengths
    if spec.kind != "tokens":
        row_bytes += state_bytes * (1 - per_row)  # a null in a fixed-size list takes its full width
    ends, state_ends, start = np.cumsum(row_bytes), np.cumsum(per_row), 0
    while start < len(row_bytes):
        before = ends[start] - row_bytes[start]
        stop = max(start + 1, int(np.searchsorted(ends, before + spec.record_batch_bytes, side="right")))
        yield Cut(start, stop, int(state_ends[start] - per_row[start]), int(state_ends[stop - 1]))
        start = stop


def encoded_part(
    cut: Cut,
    rows: TokenRows,
    states: States,
    spec: StatesSpec,
    layers: Sequence[States] = (),
    finite: Sequence[bool] = (),
) -> EncodedRows:
    """Encode one part of a window. Parts can be encoded side by side.

    Args:
        cut: which part.
        rows: the window.
        states: [T, H] for kind "tokens", else one state for each row that has tokens.
        spec: what is written.
        layers: the same as `states`, of each of `spec.layers`.
        finite: of `states` and each of `layers`: whether all of them are known to be finite; none: nothing is known.
    """
    own = tuple(column[cut.first_state : cut.last_state] for column in (states, *layers))
    known = finite or [False] * len(own)
    encoded = tuple(_encode(column, spec, finite=fine) for column, fine in zip(own, known, strict=True))
    lengths = np.diff(rows.offsets[cut.start : cut.stop + 1])
    owners = np.repeat(np.arange(cut.stop - cut.start), _states_by_row(lengths, spec))
    faults = np.zeros(cut.stop - cut.start, np.uint8)
    for column in encoded[::-1]:
        bad = np.flatnonzero(column.bad)[::-1]
        faults[owners[bad]] = column.faults[bad]
    return EncodedRows(start=cut.start, stop=cut.stop, states=own, owners=owners, encoded=encoded, faults=faults)


def record_batch(
    part: EncodedRows, rows: TokenRows, source: pa.RecordBatch, positions: Int64, spec: StatesSpec, schema: pa.Schema
) -> pa.RecordBatch:
    """One part as a record batch of the output schema.

    Args:
        part: rows `start` to `stop` of the window, with their states.
        rows: the window.
        source: the R source rows' id (if any) and carried columns, in the order and with the types of `schema`.
        positions: int64 [R], where the R source rows stand in the source.
        spec: what is written.
        schema: the job's output schema.
    """
    own, kept = slice(part.start, part.stop), part.faults == Fault.NONE
    index, original = rows.source_index[own], rows.num_tokens_original[own]
    offsets = rows.offsets[part.start : part.stop + 1]
    lengths = np.diff(offsets).astype(np.int32)
    outcome = np.where(kept, rows.outcome[own], OUTCOME_CODE[Outcome.NON_FINITE]).astype(np.int8)
    columns: dict[str, pa.Array] = {
        names.ROW: pa.array(positions[index]),
        names.CHUNK: pa.array(rows.chunk[own]),
        names.OUTCOME: pa.DictionaryArray.from_arrays(pa.array(outcome), names.OUTCOME_VALUES),
        names.NUM_TOKENS: pa.array(lengths),
        names.NUM_TOKENS_ORIGINAL: pa.array(original, mask=original == NOT_COUNTED),
        names.INPUT_IDS: _lists(pa.array(rows.input_ids[offsets[0] : offsets[-1]]), lengths, lengths > 0, _ID_LISTS),
        **_state_columns(part, lengths, kept & (lengths > 0), spec, schema),
    }
    if source.num_columns:
        columns |= zip(source.schema.names, _repeated(source, index).columns, strict=True)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def as_stored(source: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The source's id (first, if asked) and carried columns, under the output's names and types."""
    between = list(schema)[1 : schema.get_field_index(names.OUTCOME)]
    if len(between) > source.num_columns:
        between = [field for field in between if field.name != names.CHUNK]
    columns = [_cast(column, field.type) for column, field in zip(source.columns, between, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(between))


def bytes_by_row(source: pa.RecordBatch, num_rows: int) -> Int64:
    """int64 [R]: about how many bytes the columns of each of the `num_rows` rows take."""
    total = np.zeros(num_rows, np.int64)
    for column in source.columns:
        total += _value_bytes(column)
    return total


def _encode(states: States, spec: StatesSpec, *, finite: bool) -> Encoded:
    if not spec.normalize:
        return value_type(spec.dtype).encode(states, finite=finite)
    scaled, zero = unit_length(states)
    encoded = value_type(spec.dtype).encode(scaled)
    encoded.faults[zero] = Fault.ZERO_NORM
    return encoded


def _states_by_row(lengths: Int64, spec: StatesSpec) -> Int64:
    """int64 [rows]: how many states each row has."""
    return lengths if spec.kind == "tokens" else (lengths > 0).astype(np.int64)


_ID_LISTS = pa.list_(pa.field("item", pa.int32(), nullable=False))


def _state_columns(
    part: EncodedRows, lengths: Int32, valid: Bool, spec: StatesSpec, schema: pa.Schema
) -> dict[str, pa.Array]:
    """The columns of states, null where `valid` [rows] is false, and those of scales where there are any."""
    columns: dict[str, pa.Array] = {}
    for name, encoded in zip(names.state_columns(spec), part.encoded, strict=True):
        columns |= _state_column(name, encoded, part.owners, lengths, valid, spec, schema)
    return columns


def _state_column(
    name: str, encoded: Encoded, owners: Int64, lengths: Int32, valid: Bool, spec: StatesSpec, schema: pa.Schema
) -> dict[str, pa.Array]:
    kind = schema.field(name).type
    values, scales = encoded.values, encoded.scales
    stored = valid[owners]
    if not stored.all():
        values = values[stored]
        scales = None if scales is None else scales[stored]
    if spec.kind == "tokens":
        columns = {name: _lists(_fixed_lists(values, kind.value_type), lengths, valid, kind)}
        if scales is not None:
            scale_kind = schema.field(name + names.SCALE_SUFFIX).type
            columns[name + names.SCALE_SUFFIX] = _lists(pa.array(scales), lengths, valid, scale_kind)
        return columns
    if not valid.all():
        values = _spread(values, valid)
        scales = None if scales is None else _spread(scales, valid)
    columns = {name: _fixed_lists(values, kind, valid)}
    if scales is not None:
        columns[name + names.SCALE_SUFFIX] = pa.array(scales, mask=~valid)
    return columns


def _lists(flat: pa.Array, lengths: Int32, valid: Bool, kind: pa.DataType) -> pa.Array:
    """Lists of the given lengths over `flat`, null (and without values) where not `valid`."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.where(valid, lengths, 0), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=_mask(valid))


def _fixed_lists(values: States, kind: pa.DataType, valid: Bool | None = None) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=None if valid is None else _mask(valid))


def _mask(valid: Bool) -> pa.Array | None:
    return None if valid.all() else pa.array(~valid)


def _spread(values: npt.NDArray[Any], valid: Bool) -> npt.NDArray[Any]:
    """Values of the valid rows at their places, zeros between them."""
    spread = np.zeros((len(valid), *values.shape[1:]), values.dtype)
    spread[valid] = values
    return spread


def _repeated(source: pa.RecordBatch, index: Int32) -> pa.RecordBatch:
    """Source rows by index: a slice where each is used once, as everywhere but in chunked texts."""
    first, count = int(index[0]), len(index)
    if int(index[-1]) - first == count - 1:
        return source.slice(first, count)
    return source.take(pa.array(index))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column if column.type == kind else pc.cast(column, kind)


def _value_bytes(column: pa.Array) -> Int64:
    """int64 [rows]: bytes of each value, exact for text and for lists of numbers."""
    kind, count = column.type, len(column)
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        lengths: Int64 = np.asarray(pc.binary_length(column).fill_null(0), np.int64)
        return lengths + 8
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_bytes(column, _value_bytes(column.values))
    if pa.types.is_map(kind):
        return _list_bytes(column, _value_bytes(column.keys) + _value_bytes(column.items))
    if pa.types.is_fixed_size_list(kind) and kind.list_size:
        inner = _value_bytes(column.values.slice(column.offset * kind.list_size, count * kind.list_size))
        summed: Int64 = inner.reshape(count, kind.list_size).sum(axis=1)
        return summed
    total = np.zeros(count, np.int64)
    if pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            total += _value_bytes(column.field(index))
        return total
    total += 1 + column.nbytes // max(1, count)
    return total


def _list_bytes(column: pa.Array, inner: Int64) -> Int64:
    """int64 [rows]: sums of `inner` over the spans of a list column."""
    offsets = np.asarray(column.offsets).astype(np.int64)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(inner)])
    summed: Int64 = ends[offsets[1:]] - ends[offsets[:-1]] + 8
    return summed
