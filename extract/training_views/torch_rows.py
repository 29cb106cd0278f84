"""The rows of an output as a map-style torch dataset: any row at any time.

For a DataLoader with its own sampler, which is how a true random order over all rows is had. A row costs the
decompression of its record batch, so rows of a batch that lie together are read together; a store without compression
has no such cost. `torch_batches` reads everything once and is what large outputs want.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from extract.records import Int64
from extract.shards.shard_file import ShardFile
from extract.training_views.gathering import Piece, ReadBatch, gathered
from extract.training_views.rows import TrainingRows
from extract.training_views.torch_tensors import as_tensors, collate, single_row

MAX_OPEN_SHARDS = 16


class TrainingDataset(Dataset[dict[str, Any]]):
    """Rows by their index among those that are handed out, in the order of the source.

    `dataset[i]` is a dictionary by column name: states [L, H] (or [H] for pooled kinds) and `input_ids` int32 [L] as
    tensors with memory of their own, numbers as tensors without dimensions, anything else as a Python value. Where rows
    without states are left out, `dataset[i]["row"]` says which row of the source it is. Give a DataLoader
    `collate_fn=dataset.collate`. Each worker process opens its own files. Not safe to share between threads.
    """

    collate = staticmethod(collate)

    def __init__(self, rows: TrainingRows) -> None:
        self._rows = rows
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        """Rows that are handed out."""
        return self._rows.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row; negative indices count from the end.

        Raises:
            IndexError: there is no such index.
            DamagedShard: see `extract verify`.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, as a DataLoader asks for them; those that lie together are read together."""
        asked = [self._checked(index) for index in indices]
        found: dict[int, dict[str, Any]] = {}
        for index in sorted(set(asked)):
            found[index] = self._row(index)
        return [dict(found[index]) for index in asked]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _checked(self, index: int) -> int:
        index = int(index)
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} of {len(self):,} rows")
        return place

    def _row(self, index: int) -> dict[str, Any]:
        place = int(np.searchsorted(self._rows.ends, index, side="right"))
        begin = int(self._rows.ends[place - 1]) if place else 0
        piece = self._shard(place).piece(index - begin)
        return single_row(as_tensors(gathered([piece], self._rows.columns, self._rows.spec), self._rows), self._rows)

    def _shard(self, place: int) -> "_OpenShard":
        if self._process != os.getpid():  # a worker that was forked has a copy of what was open there
            self._open, self._process = OrderedDict(), os.getpid()
        if place in self._open:
            self._open.move_to_end(place)
        else:
            self._open[place] = _OpenShard(self._rows, *self._rows.open(self._rows.commits[place]))
            while len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
        return self._open[place]


class _OpenShard:
    """A shard and the record batch of it that was read last."""

    def __init__(self, rows: TrainingRows, file: ShardFile, places: list[Int64]) -> None:
        self._rows, self._file, self._places = rows, file, places
        self._ends = np.cumsum([len(part) for part in places])
        self._latest: tuple[int, ReadBatch] | None = None

    def piece(self, index: int) -> Piece:
        """The row of an index among those of this shard."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        begin = int(self._ends[number - 1]) if number else 0
        if self._latest is None or self._latest[0] != number:
            self._latest = number, ReadBatch(self._file.batch(number), self._rows.spec, self._rows.columns)
        return Piece(self._latest[1], self._places[number][index - begin : index - begin + 1])
