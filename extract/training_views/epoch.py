"""The rows of one epoch in their order, read from shard files by whoever goes forward through a part of them.

A shard is open while its rows are asked for, and of a compressed one those record batches are held whose rows are
mixed. Each shard is mapped copy-on-write: what is handed out without a copy may be written to, and the file never
changes.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from extract.commits import Commit
from extract.records import Int64
from extract.training_views.gathering import Piece, ReadBatch
from extract.training_views.order import record_batch_order, row_order, shard_order
from extract.training_views.rows import TrainingRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """How rows are mixed.

    Attributes:
        seed, epoch: what the order is made from.
        mix: record batches whose rows are mixed.
    """

    seed: int
    epoch: int
    mix: int


class EpochRows:
    """Rows by their place in the sequence of an epoch."""

    def __init__(self, rows: TrainingRows, shuffle: Shuffle | None) -> None:
        self._rows, self._shuffle = rows, shuffle
        self._order = np.arange(len(rows.commits), dtype=np.int64)
        if shuffle is not None:
            self._order = shard_order(len(rows.commits), shuffle.seed, shuffle.epoch)
        counts = np.diff(rows.ends, prepend=0)
        self._ends: list[int] = np.cumsum(counts[self._order]).tolist()
        self._open: tuple[int, _ShardRows] | None = None

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """The rows from place `first` up to `last` in the sequence."""
        while first < last:
            turn = bisect_right(self._ends, first)
            begin = self._ends[turn - 1] if turn else 0
            stop = min(last, self._ends[turn])
            yield from self._shard(turn).pieces(first - begin, stop - begin)
            first = stop

    def _shard(self, turn: int) -> "_ShardRows":
        if self._open is None or self._open[0] != turn:
            self._open = None  # before the next one is opened: one at a time
            self._open = turn, _ShardRows(self._rows, self._rows.commits[self._order[turn]], self._shuffle)
        return self._open[1]


class _ShardRows:
    """Rows of one shard by their place in its order: blocks of some record batches, the rows of a block mixed."""

    def __init__(self, rows: TrainingRows, commit: Commit, shuffle: Shuffle | None) -> None:
        self._rows, self._shard, self._shuffle = rows, commit.shard, shuffle
        self._file, self._places = rows.open(commit, copy_on_write=True)
        order = np.arange(len(self._places), dtype=np.int64)
        if shuffle is not None:
            order = record_batch_order(len(order), shuffle.seed, shuffle.epoch, commit.shard)
        size = 1 if shuffle is None else shuffle.mix
        self._blocks = [order[start : start + size].tolist() for start in range(0, len(order), size)]
        sizes = [sum(len(self._places[number]) for number in block) for block in self._blocks]
        self._ends: list[int] = np.cumsum(sizes).tolist()
        self._current = -1
        self._read: dict[int, ReadBatch] = {}
        self._owners: Int64 = np.zeros(0, np.int64)
        self._own_places: Int64 = np.zeros(0, np.int64)

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """The rows from place `first` up to `last`; within a block those of one record batch come together."""
        while first < last:
            block = bisect_right(self._ends, first)
            begin = self._ends[block - 1] if block else 0
            stop = min(last, self._ends[block])
            self._enter(block)
            own = slice(first - begin, stop - begin)
            if self._shuffle is None:
                yield Piece(self._batch(self._blocks[block][0]), self._own_places[own])
            else:
                owners, places = self._owners[own], self._own_places[own]
                for number in np.unique(owners).tolist():
                    yield Piece(self._batch(number), np.sort(places[owners == number]))
            first = stop

    def _enter(self, block: int) -> None:
        """Order the rows of a block; its record batches are read when a row of them is asked for."""
        if block == self._current:
            return
        numbers = self._blocks[block]
        places = [self._places[number] for number in numbers]
        owners = np.repeat(np.array(numbers, np.int64), [len(part) for part in places])
        joined = np.concatenate(places)
        if self._shuffle is not None:
            order = row_order(len(joined), self._shuffle.seed, self._shuffle.epoch, self._shard, block)
            owners, joined = owners[order], joined[order]
        self._current, self._owners, self._own_places, self._read = block, owners, joined, {}

    def _batch(self, number: int) -> ReadBatch:
        if number not in self._read:
            self._read[number] = ReadBatch(self._file.batch(number), self._rows.spec, self._rows.columns)
        return self._read[number]
