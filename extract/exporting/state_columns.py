"""States of one record batch as one array, from the column of the final norm or from that of another layer.

An output may hold columns `layer_<i>` beside its own states, of the same shape: the state after i decoder layers (0:
the embeddings), before any norm. `final` is the name of the output's own states here, those after the final norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.errors import SpecError
from extract.records import Int64
from extract.shards import schema as names
from extract.shards.views import BatchView, Spans
from extract.spec import StatesSpec
from extract.storage import Place

FINAL = "final"


class NoSuchLayer(SpecError):
    """States of a layer that the output does not hold."""

    template = (
        "{path}: holds no states of layer {layer} (it has: {known}). Run a job that stores {column} beside the final "
        "state, or choose with --layers among those that are there."
    )


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


def layer_names(spec: StatesSpec) -> tuple[str, ...]:
    """Columns of other layers, by ascending layer."""
    return names.state_columns(spec)[1:]


def check_stored(columns: Sequence[str], spec: StatesSpec, path: Place) -> None:
    """Refuse a column of states, "final" or "layer_<i>", that the output at `path` does not hold.

    Raises:
        NoSuchLayer: the first of them.
    """
    stored = layer_names(spec)
    for name in columns:
        if name != FINAL and name not in stored:
            known = ", ".join([*(one.removeprefix("layer_") for one in stored), FINAL])
            raise NoSuchLayer(path=path, layer=name.removeprefix("layer_"), column=name, known=known)


def read_states(batch: BatchView, spec: StatesSpec, name: str = FINAL) -> StoredStates:
    """States of a batch by the name of their layer: "final" or "layer_<i>"."""
    view = batch if name == FINAL else BatchView(batch.arrow, spec, name)
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
