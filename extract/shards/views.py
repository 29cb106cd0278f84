"""One record batch of a shard as numpy arrays and torch tensors, without copying.

Knows the output schema and nothing of files. Arrays are views of Arrow's read-only memory (the mapped file itself where
it is not compressed); only `states` makes new numbers, because it decodes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from extract.errors import SpecError
from extract.records import Int32, Int64
from extract.shards import schema as names
from extract.shards.tensors import shared_tensor
from extract.shards.values import Float32, value_type
from extract.spec import StatesSpec


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the values of each row lie in a flat array: row n has `[starts[n], stops[n])`, empty where it has none."""

    starts: Int64
    stops: Int64

    def __getitem__(self, n: int) -> slice:
        return slice(int(self.starts[n]), int(self.stops[n]))


class NotStored(SpecError):
    """States of a layer that the output does not hold."""

    template = "the output holds no states of layer {layer} (layers beside the final state: {known})."


class BatchView:
    """N rows of a shard. Letters: K stored states, T token ids, H hidden size."""

    def __init__(self, arrow: pa.RecordBatch, spec: StatesSpec, column: str | None = None) -> None:
        """View a batch.

        Args:
            arrow: with the columns of the output schema.
            spec: what was written.
            column: whose states are viewed; `None`: the final ones.
        """
        self.arrow = arrow
        """All columns as they are stored."""
        self._spec = spec
        self._column = column if column is not None else names.states_name(spec)

    def layer(self, number: int) -> "BatchView":
        """The same rows, with the states after decoder layer `number` in place of the final ones.

        Raises:
            NotStored: the output does not hold them.
        """
        if number not in self._spec.layers:
            raise NotStored(layer=number, known=", ".join(map(str, self._spec.layers)) or "none")
        return BatchView(self.arrow, self._spec, names.layer_name(number))

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.arrow.num_rows)

    @property
    def row(self) -> Int64:
        """int64 [N]: positions in the source."""
        return _flat(self.arrow.column(names.ROW))

    @property
    def outcomes(self) -> npt.NDArray[np.str_]:
        """Str [N]: how each row ended."""
        column = self.arrow.column(names.OUTCOME)
        labels: npt.NDArray[np.str_] = np.array(column.dictionary.to_pylist())[_flat(column.indices)]
        return labels

    @property
    def num_tokens(self) -> Int32:
        """int32 [N]: length of each sequence."""
        return _flat(self.arrow.column(names.NUM_TOKENS))

    @property
    def input_ids(self) -> Int32:
        """int32 [T]: token ids of all rows end to end; `id_spans` says which are whose."""
        return _flat(self.arrow.column(names.INPUT_IDS).values)

    @cached_property
    def id_spans(self) -> Spans:
        """Spans of `input_ids` by row."""
        return _list_spans(self.arrow.column(names.INPUT_IDS))

    @cached_property
    def values(self) -> npt.NDArray[Any]:
        """[K, H]: the stored numbers (uint16 holds bfloat16 bits, int8 wants `scales`); `state_spans` says whose."""
        column = self._states_column
        lists = column.values if self._spec.kind == "tokens" else column
        width = lists.type.list_size
        first = lists.offset * width
        return _flat(lists.values)[first : first + len(lists) * width].reshape(-1, width)

    @cached_property
    def scales(self) -> Float32 | None:
        """float32 [K]: what int8 values are multiplied by, else `None`. Zero where a pooled row has no state."""
        if not value_type(self._spec.dtype).scaled:
            return None
        column = self.arrow.column(self._column + names.SCALE_SUFFIX)
        scales: Float32 = _flat(column.values) if self._spec.kind == "tokens" else _flat(column.fill_null(0))
        return scales

    @cached_property
    def state_spans(self) -> Spans:
        """Spans of `values` and `states` by row: a state a token, or one a row."""
        column = self._states_column
        if self._spec.kind == "tokens":
            return _list_spans(column)
        starts = np.arange(len(column), dtype=np.int64)
        return Spans(starts, starts + np.asarray(column.is_valid()))

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some row has no state."""
        return bool(self._states_column.null_count)

    @cached_property
    def states(self) -> Float32:
        """float32 [K, H]: decoded; a view where float32 is stored."""
        return value_type(self._spec.dtype).decode(self.values, self.scales)

    def state(self, n: int) -> Float32 | None:
        """float32 [L, H] (or [H] for pooled kinds) of row n of this batch, decoding no other; `None` if it has none."""
        span = self.state_spans[n]
        if span.start == span.stop:
            return None
        scales = self.scales
        states = value_type(self._spec.dtype).decode(self.values[span], None if scales is None else scales[span])
        return states if self._spec.kind == "tokens" else states[0]

    def row_values(self, n: int) -> npt.NDArray[Any] | None:
        """Stored numbers of row n of this batch, as a view: [L, H], or [H] for pooled kinds; `None` if it has none."""
        span = self.state_spans[n]
        if span.start == span.stop:
            return None
        return self.values[span] if self._spec.kind == "tokens" else self.values[span.start]

    def torch(self, n: int | None = None) -> Any:
        """`values` as a torch tensor of the stored type (bfloat16 too), sharing memory: only read from it.

        Args:
            n: of row n of this batch alone, [L, H] or [H]; `None` if it has no states.
        """
        values = self.values if n is None else self.row_values(n)
        return None if values is None else shared_tensor(values, bfloat16=self._spec.dtype == "bfloat16")

    def decoded(self) -> pa.RecordBatch:
        """The batch with float32 states instead of the stored type, for readers that have no such type."""
        batch = self.arrow
        for name in names.state_columns(self._spec):
            batch = BatchView(batch, self._spec, name)._decoded_column()
        return batch

    def _decoded_column(self) -> pa.RecordBatch:
        name = self._column
        column, width = self._states_column, self.values.shape[1]
        flat = pa.FixedSizeListArray.from_arrays(pa.array(self.states.reshape(-1)), width)
        if self._spec.kind == "tokens":
            flat = pa.ListArray.from_arrays(column.offsets, flat, mask=column.is_null() if column.null_count else None)
        elif column.null_count:
            flat = pa.FixedSizeListArray.from_arrays(flat.values, width, mask=column.is_null())
        batch = self.arrow.set_column(self.arrow.schema.get_field_index(name), name, flat)
        return batch.drop_columns([name + names.SCALE_SUFFIX]) if value_type(self._spec.dtype).scaled else batch

    @property
    def _states_column(self) -> pa.Array:
        return self.arrow.column(self._column)


def _flat(array: pa.Array) -> npt.NDArray[Any]:
    view: npt.NDArray[Any] = array.to_numpy(zero_copy_only=True)
    return view


def _list_spans(column: pa.Array) -> Spans:
    offsets = _flat(column.offsets)
    starts = offsets[:-1].astype(np.int64)
    stops = np.where(np.asarray(column.is_valid()), offsets[1:], starts)
    return Spans(starts, stops.astype(np.int64))
