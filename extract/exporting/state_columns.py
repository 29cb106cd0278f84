"""States of one record batch as one array, from the column of the final norm or from that of another layer.

An output may hold columns `layer_<i>` beside its own states, of the same shape: the state after decoder layer i (1 is
the first), before any norm. `final` is the name of the output's own states here, those after the final norm.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from extract.records import Int64
from extract.shards import schema as names
from extract.shards.views import BatchView, Spans
from extract.spec import StatesSpec

FINAL = "final"
LAYER = re.compile(r"layer_(\d+)")


@dataclass(frozen=True, slots=True)
class StoredStates:
    """States of N rows end to end.

    Attributes:
        values: [K, H] as stored (uint16 holds bfloat16 bits), no row's states missing between others.
        offsets: int64 [N + 1]: row n has `values[offsets[n]:offsets[n + 1]]`.
        spans: the same before they were moved together.
    """

    values: npt.NDArray[Any]
    offsets: Int64
    spans: Spans


def layer_names(schema: pa.Schema) -> tuple[str, ...]:
    """Columns of other layers, by ascending layer."""
    found = [name for name in schema.names if LAYER.fullmatch(name) and _is_states(schema.field(name).type)]
    return tuple(sorted(found, key=lambda name: int(name.removeprefix("layer_"))))


def state_columns(schema: pa.Schema, spec: StatesSpec) -> tuple[str, ...]:
    """Every column of states in a schema, the output's own first."""
    return names.states_name(spec), *layer_names(schema)


def read_states(batch: BatchView, spec: StatesSpec, name: str = FINAL) -> StoredStates:
    """States of a batch by the name of their layer: "final" or "layer_<i>"."""
    view = batch
    if name != FINAL:
        column = batch.arrow.column(name)
        view = BatchView(pa.RecordBatch.from_arrays([column], names=[names.states_name(spec)]), spec)
    spans = view.state_spans
    lengths = spans.stops - spans.starts
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    values = view.values
    if len(values) != offsets[-1] or not np.array_equal(spans.starts[lengths > 0], offsets[:-1][lengths > 0]):
        places = np.arange(offsets[-1]) + np.repeat(spans.starts - offsets[:-1], lengths)
        values = values[places]
    return StoredStates(values, offsets, spans)


def as_torch(values: npt.NDArray[Any], dtype: str) -> Any:
    """Stored values as a torch tensor of their type, bfloat16 too; a copy, so that it may be written to."""
    import torch

    tensor = torch.from_numpy(values.view(np.int16).copy() if dtype == "bfloat16" else values.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _is_states(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_fixed_size_list(kind))
