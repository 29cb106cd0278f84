"""Rows of record batches, end to end in arrays: what one training batch holds.

Knows record batches and places in them, nothing of files or torch. Rows that lie together in one record batch are
handed on as views of it; others are copied once, into the array that is handed on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from extract.errors import SpecError
from extract.records import Int32, Int64
from extract.shards import schema as names
from extract.shards.values import value_type
from extract.shards.views import BatchView, Spans
from extract.spec import StatesSpec
from extract.training_views.columns import TrainingColumns

CU_SEQLENS = "cu_seqlens"
BFLOAT16_NAN = 0x7FC0


class NoNumber(SpecError):
    """A column of whole numbers or truth values has none in some row."""

    template = (
        'row {row}: no value in column "{name}", which tensors of whole numbers and truth values have no place for. '
        "Leave the column out of columns, or fill it in the source."
    )


class ReadBatch:
    """A record batch with a view of each column of states; what is derived from it is kept."""

    def __init__(self, batch: BatchView, spec: StatesSpec, columns: TrainingColumns) -> None:
        self.batch, self.spec = batch, spec
        self.states = {name: BatchView(batch.arrow, spec, name) for name in columns.states}
        self._numbers: dict[str, npt.NDArray[Any]] = {}

    @cached_property
    def num_tokens(self) -> Int32:
        """int32 [N]."""
        return self.batch.num_tokens

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """[N]: int64, bool, or the floating type of the column, in which a null is NaN.

        Raises:
            NoNumber: a null among others.
        """
        if name not in self._numbers:
            column = self.batch.arrow.column(name)
            if column.null_count and not pa.types.is_floating(column.type):
                place = int(np.flatnonzero(np.asarray(column.is_null()))[0])
                raise NoNumber(row=int(self.batch.row[place]), name=name)
            values = column.to_numpy(zero_copy_only=False)
            self._numbers[name] = values.astype(np.int64) if values.dtype.kind in "iu" else values
        return self._numbers[name]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one record batch.

    Attributes:
        batch: the record batch.
        places: int64 [n], ascending.
    """

    batch: ReadBatch
    places: Int64


def gathered(pieces: Sequence[Piece], columns: TrainingColumns, spec: StatesSpec) -> dict[str, Any]:
    """B rows by column, in the order of the pieces.

    Returns:
        Columns of states: [T, H] for kind "tokens", [B, H] for pooled kinds, of the stored type (uint16 holds bfloat16
        bits), int8 decoded to float32; a state that is not there is NaN. `input_ids`: int32 [T]. `cu_seqlens`: int32
        [B + 1], row n has T from `cu_seqlens[n]` to `cu_seqlens[n + 1]`. Numbers: [B]. Others: lists of B values.
    """
    found: dict[str, Any] = {}
    for name in columns.numbers:
        found[name] = _joined([piece.batch.numbers(name)[_index(piece.places)] for piece in pieces])
    for name in columns.others:
        found[name] = [value for piece in pieces for value in _values(piece, name)]
    ragged = columns.input_ids or (columns.states and spec.kind == "tokens")
    lengths = _joined([piece.batch.num_tokens[_index(piece.places)] for piece in pieces]) if ragged else None
    if columns.input_ids:
        found[names.INPUT_IDS] = _joined(
            [part for piece in pieces for part in _cut(piece.batch.batch.input_ids, piece.batch.batch.id_spans, piece)]
        )
    for name in columns.states:
        found[name] = (
            _pooled(pieces, name, spec)
            if lengths is None or spec.kind != "tokens"
            else (_token_states(pieces, name, spec, lengths))
        )
    if lengths is not None:
        found[CU_SEQLENS] = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    return found


def _token_states(pieces: Sequence[Piece], name: str, spec: StatesSpec, lengths: Int32) -> npt.NDArray[Any]:
    """[T, H]."""
    views = [(piece.batch.states[name], piece) for piece in pieces]
    values = _joined([part for view, piece in views for part in _cut(view.values, view.state_spans, piece)])
    if value_type(spec.dtype).scaled:
        scales = [part for view, piece in views for part in _cut(_scales(view), view.state_spans, piece)]
        values = value_type(spec.dtype).decode(values, _joined(scales))
    num_states = np.concatenate([_lengths(view.state_spans, piece.places) for view, piece in views])
    if not np.array_equal(num_states, lengths):  # a row with tokens and no states: they were not finite
        spread = _missing((int(lengths.sum()), values.shape[1]), values.dtype)
        spread[np.repeat(num_states > 0, lengths)] = values
        values = spread
    return values


def _pooled(pieces: Sequence[Piece], name: str, spec: StatesSpec) -> npt.NDArray[Any]:
    """[B, H]."""
    parts = []
    for piece in pieces:
        view, index = piece.batch.states[name], _index(piece.places)
        values = view.values[index]
        if value_type(spec.dtype).scaled:
            values = value_type(spec.dtype).decode(values, _scales(view)[index])
        missing = _lengths(view.state_spans, piece.places) == 0
        if missing.any():
            values = values.copy()
            values[missing] = _missing((1, values.shape[1]), values.dtype)
        parts.append(values)
    return _joined(parts)


def _cut(flat: npt.NDArray[Any], spans: Spans, piece: Piece) -> Iterable[npt.NDArray[Any]]:
    """Slices of `flat` that hold the rows of a piece, in order: one for each run of rows without a gap between them."""
    starts, stops = spans.starts[piece.places], spans.stops[piece.places]
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    if not len(breaks):
        return [flat[starts[0] : stops[-1]]]
    firsts = np.concatenate([starts[:1], starts[breaks + 1]]).tolist()
    lasts = np.concatenate([stops[breaks], stops[-1:]]).tolist()
    return [flat[first:last] for first, last in zip(firsts, lasts, strict=True)]


def _values(piece: Piece, name: str) -> list[Any]:
    column, index = piece.batch.batch.arrow.column(name), _index(piece.places)
    part = column[index] if isinstance(index, slice) else column.take(pa.array(index))
    values: list[Any] = part.to_pylist()
    return values


def _index(places: Int64) -> slice | Int64:
    """The places as a slice where they are one: what it selects is a view."""
    first, count = int(places[0]), len(places)
    return slice(first, first + count) if int(places[-1]) - first == count - 1 else places


def _lengths(spans: Spans, places: Int64) -> Int64:
    lengths: Int64 = spans.stops[places] - spans.starts[places]
    return lengths


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scales(view: BatchView) -> npt.NDArray[np.float32]:
    scales = view.scales
    assert scales is not None
    return scales


def _missing(shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """States that are not there."""
    return np.full(shape, BFLOAT16_NAN if dtype == np.uint16 else np.nan, dtype)
