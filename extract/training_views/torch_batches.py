"""The rows of an output as an iterable torch dataset of whole batches: everything once an epoch, in order or shuffled.

Worker processes and ranks share the batches of an epoch without talking to each other: each makes those that are its
own by number (see `order.py`). So every row comes exactly once, and the order does not depend on how many workers there
are.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from extract.errors import BadValue
from extract.training_views.epoch import EpochRows, Shuffle
from extract.training_views.gathering import gathered
from extract.training_views.order import BatchPlan, num_batches
from extract.training_views.rows import TrainingRows
from extract.training_views.torch_tensors import as_tensors

LANES = 8
"""Of a rank, where rows are shuffled: 1, 2, 4 and 8 workers then read each record batch once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How rows become batches; see `Output.torch_iterable`."""

    batch_size: int
    shuffle: bool
    seed: int
    mix: int
    lanes: int | None
    drop_last: bool
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "seed": 0, "mix": 1, "lanes": 1, "rank": 0, "world_size": 1}
        for key, lowest in least.items():
            value = getattr(self, key)
            if value is not None and value < lowest:
                raise BadValue(where="torch_iterable", key=key, found=value, expected=f"{lowest} or more")
        if self.rank >= self.world_size:
            raise BadValue(where="torch_iterable", key="rank", found=self.rank, expected="less than world_size")

    @property
    def num_lanes(self) -> int:
        """L; without shuffling 1, which is the order of the source."""
        return self.lanes or (LANES * self.world_size if self.shuffle else 1)


class TrainingBatches(IterableDataset[dict[str, Any]]):
    """Batches of rows, for `DataLoader(batches, batch_size=None, num_workers=...)`.

    A batch is a dictionary by column name: token states [T, H] and `input_ids` int32 [T] end to end without padding,
    with `cu_seqlens` int32 [B + 1]; pooled states [B, H]; numbers [B]; anything else as a list of B values. Tensors
    may be written to: files never change.
    """

    def __init__(self, rows: TrainingRows, settings: BatchSettings) -> None:
        self._rows, self._settings = rows, settings
        # In shared memory, so that workers that stay alive from epoch to epoch see it.
        epoch: Any = torch.zeros(2, dtype=torch.int64)
        self._epoch: torch.Tensor = epoch.share_memory_()

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, over all ranks; with `drop_last` some of the last ones are left out."""
        return self._rows.num_rows

    def __len__(self) -> int:
        """Batches of an epoch that this rank makes, over all of its workers."""
        settings, (_, first) = self._settings, self._epoch.tolist()
        return len(range(first + settings.rank, self._num_batches, settings.world_size))

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Say which epoch comes next; each has an order of its own where rows are shuffled.

        Without it, every pass is epoch 0. All ranks say the same.

        Args:
            epoch: 0 or more.
            first_batch: begin with this batch of the epoch, counted over all ranks: to go on where training stopped.
                What comes before it is not read.
        """
        for key, value in (("epoch", epoch), ("first_batch", first_batch)):
            if value < 0:
                raise BadValue(where="set_epoch", key=key, found=value, expected="0 or more")
        self._epoch[0], self._epoch[1] = epoch, first_batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        settings, (epoch, first) = self._settings, self._epoch.tolist()
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        stride = settings.world_size * num_workers
        if worker == settings.rank == 0:
            self._warn_of_repeated_work(stride)
        plan = BatchPlan(
            num_rows=self._rows.num_rows,
            batch_size=settings.batch_size,
            lanes=settings.num_lanes,
            num_batches=self._num_batches,
        )
        shuffle = Shuffle(seed=settings.seed, epoch=epoch, mix=settings.mix) if settings.shuffle else None
        lanes: dict[int, EpochRows] = {}
        for number in range(first + settings.rank + settings.world_size * worker, self._num_batches, stride):
            lane = number % plan.lanes
            if lane not in lanes:
                lanes[lane] = EpochRows(self._rows, shuffle)
            pieces = list(lanes[lane].pieces(*plan.rows(number)))
            yield as_tensors(gathered(pieces, self._rows.columns, self._rows.spec), self._rows)

    @property
    def _num_batches(self) -> int:
        """Of an epoch, over all ranks."""
        settings = self._settings
        return num_batches(
            self._rows.num_rows, settings.batch_size, drop_last=settings.drop_last, world_size=settings.world_size
        )

    def _warn_of_repeated_work(self, stride: int) -> None:
        lanes = self._settings.num_lanes
        times = stride // math.gcd(stride, lanes)
        if times > 1 and self._rows.spec.compression != "none":
            better = -(-lanes // stride) * stride
            warnings.warn(
                f"each record batch is decompressed by {times} of {stride} workers: lanes is {lanes}, which is no "
                f"multiple of {stride}. With lanes={better} each is decompressed once; the order of batches changes.",
                stacklevel=2,
            )
