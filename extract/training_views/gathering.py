"""Rows of record batches, end to end in arrays: what one training batch holds.

Knows record batches and places in them, nothing of files or torch. Rows that lie together in one record batch are
handed on as views of it; others are copied once, into the array that is handed on.
"""

from collections.abc import Sequence
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
        self.batch = batch
        self.states = {name: BatchView(batch.arrow, spec, name) for name in columns.states}
        self._numbers: dict[str, npt.NDArray[Any]] = {}
        self._without_gaps: dict[int, bool] = {}

    def without_gaps(self, spans: Spans) -> bool:
        """Whether every row begins where the one before it ends."""
        if id(spans) not in self._without_gaps:  # spans live as long as the views of the batch, which keep them
            self._without_gaps[id(spans)] = bool(np.array_equal(spans.starts[1:], spans.stops[:-1]))
        return self._without_gaps[id(spans)]

    @cached_property
    def num_tokens(self) -> Int32:
        """int32 [N]."""
        return self.batch.num_tokens

    @cached_property
    def input_ids(self) -> Int32:
        """int32 [T]."""
        return self.batch.input_ids

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


class Piece:
    """Rows of one record batch, by ascending places in it."""

    def __init__(self, batch: ReadBatch, places: Int64) -> None:
        self.batch, self.places = batch, places
        first, count = int(places[0]), len(places)
        # As a slice where the places are one: what it selects is a view.
        self.index: slice | Int64 = slice(first, first + count) if int(places[-1]) - first == count - 1 else places

    def cut(self, flat: npt.NDArray[Any], spans: Spans) -> list[npt.NDArray[Any]]:
        """Slices of `flat` that hold the rows, in order: one for each run of rows without a gap between them."""
        if isinstance(self.index, slice) and self.batch.without_gaps(spans):
            return [flat[spans.starts[self.index.start] : spans.stops[self.index.stop - 1]]]
        starts, stops = spans.starts[self.index], spans.stops[self.index]
        breaks = np.flatnonzero(starts[1:] != stops[:-1])
        firsts = np.concatenate([starts[:1], starts[breaks + 1]]).tolist()
        lasts = np.concatenate([stops[breaks], stops[-1:]]).tolist()
        return [flat[first:last] for first, last in zip(firsts, lasts, strict=True)]

    def lengths(self, spans: Spans) -> Int64:
        """int64 [n]."""
        lengths: Int64 = spans.stops[self.index] - spans.starts[self.index]
        return lengths

    def values(self, name: str) -> list[Any]:
        """Values of a column as Python has them."""
        column = self.batch.batch.arrow.column(name)
        part = column[self.index] if isinstance(self.index, slice) else column.take(pa.array(self.index))
        values: list[Any] = part.to_pylist()
        return values


def gathered(pieces: Sequence[Piece], columns: TrainingColumns, spec: StatesSpec) -> dict[str, Any]:
    """B rows by column, in the order of the pieces.

    Returns:
        Columns of states: [T, H] for kind "tokens", [B, H] for pooled kinds, of the stored type (uint16 holds bfloat16
        bits), int8 decoded to float32; a state that is not there is NaN. `input_ids`: int32 [T]. `cu_seqlens`: int32
        [B + 1], row n has T from `cu_seqlens[n]` to `cu_seqlens[n + 1]`. Numbers: [B]. Others: lists of B values.
    """
    found: dict[str, Any] = {}
    for name in columns.numbers:
        found[name] = _joined([piece.batch.numbers(name)[piece.index] for piece in pieces])
    for name in columns.others:
        found[name] = [value for piece in pieces for value in piece.values(name)]
    if columns.input_ids:
        ids = [part for piece in pieces for part in piece.cut(piece.batch.input_ids, piece.batch.batch.id_spans)]
        found[names.INPUT_IDS] = _joined(ids)
    if not columns.input_ids and not (columns.states and spec.kind == "tokens"):
        return found | {name: _pooled(pieces, name, spec) for name in columns.states}
    lengths = _joined([piece.batch.num_tokens[piece.index] for piece in pieces])
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    for name in columns.states:
        if spec.kind == "tokens":
            found[name] = _token_states(pieces, name, spec, lengths, int(cu_seqlens[-1]))
        else:
            found[name] = _pooled(pieces, name, spec)
    return found | {CU_SEQLENS: cu_seqlens}


def _token_states(
    pieces: Sequence[Piece], name: str, spec: StatesSpec, lengths: Int32, num_tokens: int
) -> npt.NDArray[Any]:
    """[T, H]."""
    views = [(piece.batch.states[name], piece) for piece in pieces]
    values = _joined([part for view, piece in views for part in piece.cut(view.values, view.state_spans)])
    if value_type(spec.dtype).scaled:
        scales = [part for view, piece in views for part in piece.cut(_scales(view), view.state_spans)]
        values = value_type(spec.dtype).decode(values, _joined(scales))
    if len(values) != num_tokens:  # a row with tokens and no states: they were not finite
        num_states = np.concatenate([piece.lengths(view.state_spans) for view, piece in views])
        spread = _missing((num_tokens, values.shape[1]), values.dtype)
        spread[np.repeat(num_states > 0, lengths)] = values
        values = spread
    return values


def _pooled(pieces: Sequence[Piece], name: str, spec: StatesSpec) -> npt.NDArray[Any]:
    """[B, H]."""
    parts = []
    for piece in pieces:
        view = piece.batch.states[name]
        values = view.values[piece.index]
        if value_type(spec.dtype).scaled:
            values = value_type(spec.dtype).decode(values, _scales(view)[piece.index])
        if view.has_gaps:
            missing = piece.lengths(view.state_spans) == 0
            if missing.any():
                values = values.copy()
                values[missing] = _missing((1, values.shape[1]), values.dtype)
        parts.append(values)
    return _joined(parts)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scales(view: BatchView) -> npt.NDArray[np.float32]:
    scales = view.scales
    assert scales is not None
    return scales


def _missing(shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """States that are not there."""
    return np.full(shape, BFLOAT16_NAN if dtype == np.uint16 else np.nan, dtype)
