"""The order in which rows are trained on: shards, lanes, batches. Pure; knows how many rows there are, nothing more.

An epoch is one long sequence of rows, shard after shard. Cut into L equal runs, the lanes, it is dealt out in turn:
batch k is the next of lane k modulo L. The order is a function of seed, epoch, batch size and lanes alone; who makes
which batch is not part of it. Worker w of W makes the batches w, w + W, w + 2W, ..., and a DataLoader, which takes a
batch from each of its workers in turn, hands them out in just that order: the same one for any number of workers. Lanes
are there for speed: where W divides L, no two workers read from one lane, so a record batch is decompressed once and
not W times.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from extract.records import Int64


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which rows of the sequence are in which batch.

    Attributes:
        num_rows: rows of the sequence.
        batch_size: rows of a batch; the last one has what is left.
        lanes: L.
        num_batches: as many as hold all rows, or fewer, whose rows are then the first of the sequence.
    """

    num_rows: int
    batch_size: int
    lanes: int
    num_batches: int

    def rows(self, batch: int) -> tuple[int, int]:
        """Places in the sequence of batch number `batch`: from, up to."""
        lane, turn = batch % self.lanes, batch // self.lanes
        first = self._lane_starts[lane] + turn * self.batch_size
        return first, min(first + self.batch_size, self._lane_starts[lane + 1])

    @cached_property
    def _lane_starts(self) -> list[int]:
        """[L + 1]: where each lane begins; the lane of the last batch is shorter by what that one lacks."""
        lane = np.arange(self.lanes, dtype=np.int64)
        sizes = np.maximum(0, -(-(self.num_batches - lane) // self.lanes)) * self.batch_size
        lacking = max(0, self.num_batches * self.batch_size - self.num_rows)
        if self.num_batches:
            sizes[(self.num_batches - 1) % self.lanes] -= lacking
        return [0, *np.cumsum(sizes).tolist()]


def num_batches(num_rows: int, batch_size: int, *, drop_last: bool, world_size: int) -> int:
    """Batches of an epoch over all ranks; with `drop_last` whole ones, as many for each rank."""
    if drop_last:
        return num_rows // batch_size // world_size * world_size
    return -(-num_rows // batch_size)


def shard_order(num_shards: int, seed: int, epoch: int) -> Int64:
    """int64 [num_shards]: which shard comes when."""
    return _generator(1, seed, epoch).permutation(num_shards)


def record_batch_order(num_batches: int, seed: int, epoch: int, shard: int) -> Int64:
    """int64 [num_batches]: which record batch of a shard comes when."""
    return _generator(2, seed, epoch, shard).permutation(num_batches)


def row_order(num_rows: int, seed: int, epoch: int, shard: int, block: int) -> Int64:
    """int64 [num_rows]: which row of a block comes when."""
    return _generator(3, seed, epoch, shard, block).permutation(num_rows)


def _generator(*key: int) -> np.random.Generator:
    """Numbers that depend on the key alone: the same on every machine and in every worker.

    The first number of a key says what it is for, since (1, 2) and (1, 2, 0) would be the same.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
