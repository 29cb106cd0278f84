"""One committed shard file, mapped into memory: a record batch by number, or by the source row it holds.

Knows nothing of other shards. Where a row lies is read from the `row` column alone, a few kilobytes a shard, instead of
from an index file that could disagree with the data. A file in an object store is copied here before it is mapped.
"""

import mmap
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from extract.commits import Commit
from extract.errors import VerificationFailed
from extract.job import StoredJob
from extract.records import OUTCOME_CODE, STATELESS, Int64
from extract.shards import schema as names
from extract.shards.views import BatchView
from extract.storage import Place
from extract.storage.local_copies import local_copy


class DamagedShard(VerificationFailed):
    """A committed file is missing or does not open."""

    template = "{path}: {problem}. See what else is wrong: extract verify {root}"


class ShardFile:
    """An open shard. Not safe to share between threads."""

    def __init__(
        self,
        job: StoredJob,
        commit: Commit,
        *,
        columns: Sequence[str] | None = None,
        copy_on_write: bool = False,
    ) -> None:
        """Open a shard.

        Args:
            job: whose shard it is.
            commit: its record.
            columns: what its batches hold; `None`: everything. Others are neither read nor decompressed.
            copy_on_write: memory of its batches may be written to, which the file never sees.

        Raises:
            DamagedShard: missing, of another size, or no Arrow file.
        """
        self.commit = commit
        self._spec = job.spec.states
        self._root = job.directory.root
        self._latest: tuple[int, BatchView] | None = None
        self._path = job.directory.data / commit.data
        try:
            if self._path.is_symlink():
                raise self._damaged("a link, not the file that was written")
            local = local_copy(self._path, commit.sha256, commit.num_bytes)
            found = local.stat().st_size
            if found != commit.num_bytes:
                raise self._damaged(f"{found:,} bytes found, {commit.num_bytes:,} were written")
            self._mapped = _private_map(local) if copy_on_write else pa.memory_map(str(local))
            self._file = pa.ipc.open_file(self._mapped)
            self._schema = self._file.schema
            if columns is not None:
                self._file = self._projected(columns)
        except (OSError, ValueError) as error:  # Arrow's own are both
            raise self._damaged(f"cannot be opened ({error})") from None

    @property
    def path(self) -> Place:
        """Where the file lies."""
        return self._path

    @property
    def num_batches(self) -> int:
        """Record batches in the file."""
        return int(self._file.num_record_batches)

    def batch(self, number: int) -> BatchView:
        """One record batch; the latest one is kept."""
        if self._latest is None or self._latest[0] != number:
            self._latest = None  # its memory is for the next one
            self._latest = number, BatchView(self._read(self._file, number), self._spec)
        return self._latest[1]

    def find(self, row: int, chunk: int = 0) -> tuple[BatchView, int] | None:
        """The batch that holds a source row and the row's place in it; `None` if there is no such row or chunk."""
        rows, ends = self._row_index
        place = int(np.searchsorted(rows, row)) + chunk
        if place >= len(rows) or rows[place] != row:
            return None
        number = int(np.searchsorted(ends, place, side="right"))
        return self.batch(number), place - (int(ends[number - 1]) if number else 0)

    @cached_property
    def with_states(self) -> Int64:
        """Places in the file of the rows that have states, from the outcome column alone."""
        _, ends = self._row_index
        places = self.places(with_states_only=True)
        starts = ends - np.diff(ends, prepend=0)
        return np.concatenate([np.zeros(0, np.int64), *(s + p for s, p in zip(starts, places, strict=True))])

    def places(self, *, with_states_only: bool) -> list[Int64]:
        """Places in each record batch of its rows, or of those that have states, from the outcome column alone."""
        stateless = [OUTCOME_CODE[outcome] for outcome in STATELESS] if with_states_only else []
        codes = [column.indices.to_numpy() for column in self._column(names.OUTCOME)]
        return [np.flatnonzero(~np.isin(column, stateless)).astype(np.int64) for column in codes]

    @cached_property
    def _row_index(self) -> tuple[Int64, Int64]:
        """Positions of all rows, and where each batch ends, from the first column alone."""
        columns = [column.to_numpy() for column in self._column(names.ROW)]
        ends = np.cumsum([len(column) for column in columns], dtype=np.int64)
        return np.concatenate([np.zeros(0, np.int64), *columns]), ends

    def columns(self, *wanted: str) -> Iterator[pa.RecordBatch]:
        """Only these columns, in the order of the schema, by record batch; no other is read from the disk."""
        file = self._projected(wanted)
        for number in range(file.num_record_batches):
            yield self._read(file, number)

    def _projected(self, wanted: Sequence[str]) -> pa.ipc.RecordBatchFileReader:
        fields = sorted(self._schema.get_field_index(name) for name in wanted)
        return pa.ipc.open_file(self._mapped, options=pa.ipc.IpcReadOptions(included_fields=fields))

    def _column(self, name: str) -> Iterator[pa.Array]:
        for batch in self.columns(name):
            yield batch.column(0)

    def _read(self, file: pa.ipc.RecordBatchFileReader, number: int) -> pa.RecordBatch:
        try:
            return file.get_batch(number)
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(f"record batch {number} cannot be read ({error})") from None

    def _damaged(self, problem: str) -> DamagedShard:
        return DamagedShard(path=self._path, problem=problem, root=self._root)


def _private_map(path: Path) -> pa.NativeFile:
    """The file in memory that can be written to: pages that are written to are copied first, the file stays."""
    with path.open("rb") as file:
        return pa.BufferReader(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))
