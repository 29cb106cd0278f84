"""Reading a job's output back: rows by position, record batches in order, or all of it as an Arrow table.

Works on an unfinished job with what is committed. Opening reads `job.json` alone; a row is found from its position, its
shard's commit record and that file's `row` column, so nothing else is read however many shards there are. Compressed
batches are decoded one at a time; uncompressed ones are views of the mapped file.

A row's key is its position in the source, here and everywhere: `output[7]` is the source's row 7, also where rows
before it were not selected, are not finished or were cut into several chunks. Iterating, `len` and the training views
go over the rows that are there.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from extract.commits import Commit, commit_path, read_commit, read_commits
from extract.errors import SpecError
from extract.job import StoredJob, read_job
from extract.record_sums import RecordSums
from extract.records import Int32
from extract.shards import schema as names
from extract.shards.shard_file import ShardFile
from extract.shards.values import Float32
from extract.shards.views import BatchView
from extract.spec import OutputKind, StatesSpec, ValueType
from extract.storage import ObjectPath, Place, locate
from extract.storage.arrow_files import arrow_filesystem
from extract.training_views.rows import StateType, TrainingRows, training_rows

if TYPE_CHECKING:
    from extract.training_views.torch_batches import TrainingBatches
    from extract.training_views.torch_rows import TrainingDataset


class NoSuchRow(SpecError, IndexError):
    """A row that the output does not hold (yet)."""

    template = "{path}: no row {row}: {problem}."


class RanksMayDiffer(SpecError):
    """An output that is not finished, for several ranks."""

    template = (
        "{path}: not finished ({problem}), so ranks that open it at different times would train on different rows. "
        "Finish the job first, or say which shards to train on with shards=[...]."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One output row.

    Attributes:
        row: position in the source.
        chunk: 0, or which chunk of a long text.
        num_tokens_original: `None` if it was not counted.
        input_ids: int32 [L]; `None` if the row has no tokens, or ids are not stored.
        states: float32 [L, H], or [H] for pooled kinds; `None` where the outcome has none.
        layers: the same of each layer that is stored beside the final state, by its number; empty where `states` is
            `None`.
        columns: id and carried columns.
    """

    row: int
    chunk: int
    outcome: str
    num_tokens: int
    num_tokens_original: int | None
    input_ids: Int32 | None
    states: Float32 | None
    layers: dict[int, Float32]
    columns: dict[str, Any]


def open_output(path: str | Place) -> "Output":
    """Open an output directory, or its address in an object store, finished or not.

    Raises:
        NotAJob: it is none.
    """
    return Output(read_job(locate(path)))


class Output:
    """The committed rows of a job. Not safe to share between threads; opening it again is cheap."""

    def __init__(self, job: StoredJob) -> None:
        self.job = job
        self.path = job.directory.root
        self._shard: ShardFile | None = None

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of every shard; its metadata says how to read the numbers."""
        return self.job.schema

    @property
    def spec(self) -> StatesSpec:
        """What was asked to be written."""
        return self.job.spec.states

    @property
    def kind(self) -> OutputKind:
        """Which states are stored: "tokens", "last", "mean" or "first"."""
        return self.spec.kind

    @property
    def dtype(self) -> ValueType:
        """Stored value type."""
        return self.spec.dtype

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers whose states are stored beside the final one (0: the embeddings), ascending."""
        return self.spec.layers

    @property
    def width(self) -> int:
        """H."""
        column = self.schema.field(names.states_name(self.spec)).type
        return int((column.value_type if self.kind == "tokens" else column).list_size)

    @cached_property
    def shards(self) -> list[Commit]:
        """Commit records of the finished shards, in order; read once."""
        return read_commits(self.job.directory.commits)

    @property
    def num_rows(self) -> int:
        """Source rows in the finished shards."""
        return sum(commit.num_rows for commit in self.shards)

    @property
    def num_rows_out(self) -> int:
        """Rows in the finished shards; more than `num_rows` where texts were chunked."""
        return sum(commit.num_rows_out for commit in self.shards)

    def row(self, row: int, chunk: int = 0) -> Row:
        """The row at position `row` of the source. Opens its shard only, and decodes its states only.

        Raises:
            NoSuchRow: outside the source, in a shard that is not finished, or no such chunk.
        """
        return self._row_of(*self._find(row, chunk))

    @overload
    def __getitem__(self, row: int) -> Row: ...

    @overload
    def __getitem__(self, row: slice) -> "Rows": ...

    def __getitem__(self, row: int | slice) -> "Row | Rows":
        """`output[7]`: the source's row 7 (its first chunk). `output[-1]`: its last row. `output[5:9]`: lazily, those.

        Raises:
            NoSuchRow: see `row`; also an IndexError.
        """
        if isinstance(row, slice):
            return Rows(self, self._positions(row))
        if row < 0:
            num_rows = self._source_rows()
            if row + num_rows < 0:
                raise NoSuchRow(path=self.path, row=row, problem=f"there are {num_rows:,} rows")
            return self.row(self.job.position_of(row + num_rows))
        return self.row(row)

    def __len__(self) -> int:
        """Rows that iterating gives: those of the finished shards, each chunk of a long text counted."""
        return self.num_rows_out

    def __contains__(self, row: object) -> bool:
        """Whether the source's row of that position is there."""
        if not isinstance(row, int | np.integer):
            return False
        shard = self.job.shard_of(int(row))
        if shard is None or not commit_path(self.job.directory.commits, shard).exists():
            return False
        return self.shard(shard).find(int(row)) is not None

    __reversed__ = None  # by the sequence protocol it would miss chunks and what was not selected

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process opens the output itself."""
        return open_output, (self.path,)

    def states(self, row: int, chunk: int = 0, *, layer: int | None = None) -> Float32 | None:
        """float32 [L, H] (or [H] for pooled kinds) of a row, final or of a `layer`; `None` where its outcome has none.

        Raises:
            NoSuchRow: see `row`.
            NotStored: the output does not hold that layer.
        """
        batch, n = self._find(row, chunk)
        return (batch if layer is None else batch.layer(layer)).state(n)

    def __iter__(self) -> Iterator[Row]:
        for batch in self.batches():
            for n in range(batch.num_rows):
                yield self._row_of(batch, n)

    def batches(self) -> Iterator[BatchView]:
        """Record batches of all finished shards, in source order, one in memory at a time."""
        for commit in self.shards:
            shard = ShardFile(self.job, commit)
            for number in range(shard.num_batches):
                yield shard.batch(number)

    def shard(self, number: int) -> ShardFile:
        """One finished shard; the last one opened stays open."""
        if self._shard is None or self._shard.commit.shard != number:
            self._shard = ShardFile(self.job, read_commit(commit_path(self.job.directory.commits, number)))
        return self._shard

    def rows_of_shard(self, number: int, places: Sequence[int]) -> Iterator[Row]:
        """Some rows of a finished shard, by their ascending places in its file."""
        shard = self.shard(number)
        before = part = 0
        for place in places:
            while place - before >= shard.batch(part).num_rows:
                before += shard.batch(part).num_rows
                part += 1
            yield self._row_of(shard.batch(part), place - before)

    def torch_dataset(
        self,
        columns: Sequence[str] | None = None,
        *,
        dtype: StateType = "stored",
        with_states_only: bool = True,
        shards: Collection[int] | None = None,
    ) -> "TrainingDataset":
        """The rows as a map-style torch dataset, for a DataLoader with a sampler of its own.

        Args:
            columns: names of output columns, such as "hidden_states", "layer_3" or "label". `None`: everything but
                `outcome`, the token counts and the states of other layers.
            dtype: of the states, "stored", "float32" or "bfloat16". Stored int8 is decoded to float32.
            with_states_only: leave out rows without states (empty, null, ...); else their states are NaN.
            shards: train on these finished shards only, such as all but the last as training data.

        Raises:
            NotInOutput, NotFinished, BadValue: what is asked for is not there.

        Example:
            >>> data = extract.open_output("out").torch_dataset()
            >>> loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, collate_fn=data.collate)
        """
        from extract.training_views.torch_rows import TrainingDataset

        return TrainingDataset(self._training_rows(columns, dtype, with_states_only, shards))

    def torch_iterable(
        self,
        columns: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        mix: int = 4,
        lanes: int | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dtype: StateType = "stored",
        with_states_only: bool = True,
        shards: Collection[int] | None = None,
    ) -> "TrainingBatches":
        """The rows as an iterable torch dataset of whole batches, each row once an epoch.

        The order is a function of `seed`, epoch, `batch_size`, `mix` and `lanes`: the same for any number of workers.
        `shuffle` is no uniform permutation of all rows, which would read a record batch for each: shards come in random
        order, the record batches of a shard too, the rows of `mix` record batches at a time are permuted, and
        consecutive batches come from `lanes` distant places. A batch holds rows of `mix` record batches of one shard.

        Args:
            columns: as of `torch_dataset`.
            batch_size: rows of a batch.
            shuffle: mix rows; else they come in the order of the source.
            seed: of the shuffling, 0 or more; all ranks give the same.
            mix: record batches (16 MiB each unless the job said otherwise) whose rows are mixed.
            lanes: places of the epoch that are read in turn. The default is 8 times `world_size` with `shuffle`, else
                1. A multiple of `world_size` times the number of workers reads each record batch once. `lanes * mix`
                record batches are in memory, over all workers of all ranks.
            drop_last: leave out the last, smaller batch, and what does not give all ranks equally many batches.
            rank: of `torch.distributed`; each rank gets batches of its own.
            world_size: how many ranks there are.
            dtype: as of `torch_dataset`.
            with_states_only: as of `torch_dataset`.
            shards: as of `torch_dataset`.

        Raises:
            NotInOutput, NotFinished, BadValue: what is asked for is not there.
            RanksMayDiffer: several ranks, and an output that is not finished.

        Example:
            >>> batches = extract.open_output("out").torch_iterable(batch_size=64, shuffle=True)
            >>> loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=4)
        """
        from extract.training_views.torch_batches import BatchSettings, TrainingBatches

        settings = BatchSettings(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            mix=mix,
            lanes=lanes,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        if world_size > 1 and shards is None:
            problem = RecordSums(self.job, self.shards).problem
            if problem is not None:
                raise RanksMayDiffer(path=self.path, problem=problem)
        return TrainingBatches(self._training_rows(columns, dtype, with_states_only, shards), settings)

    def dataset(self) -> "pyarrow.dataset.Dataset":
        """All finished shards as a pyarrow dataset: scanned lazily, filtered and projected; states as stored."""
        data = self.job.directory.data
        if isinstance(data, ObjectPath):
            bucket = data.bucket.url.partition("://")[2]
            keys = [f"{bucket}/{(data / commit.data).key}" for commit in self.shards]
            return pyarrow.dataset.dataset(keys, format="ipc", schema=self.schema, filesystem=arrow_filesystem(data))
        files = [str(data / commit.data) for commit in self.shards]
        return pyarrow.dataset.dataset(files, format="ipc", schema=self.schema)

    def table(self, columns: Sequence[str] | None = None, *, decoded: bool = False) -> pa.Table:
        """Rows of all finished shards in memory.

        Args:
            columns: which ones; all by default.
            decoded: states as float32, for readers without half floats (DuckDB), bfloat16 or scales.
        """
        if not decoded:
            return self.dataset().to_table(columns=None if columns is None else list(columns))
        empty = BatchView(pa.RecordBatch.from_pylist([], schema=self.schema), self.spec).decoded()
        batches = [batch.decoded() for batch in self.batches()]
        table = pa.Table.from_batches(batches, schema=empty.schema)
        return table if columns is None else table.select(list(columns))

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """A pandas data frame; states are float32 arrays, [L, H] or [H] in each row, `None` where there are none."""
        states = dict(zip(names.state_columns(self.spec), (None, *self.layers), strict=True))
        scales = {name + names.SCALE_SUFFIX for name in states}
        asked = [name for name in self.schema.names if name not in scales] if columns is None else list(columns)
        frame = self.table([name for name in asked if name not in states]).to_pandas()
        for name in set(asked) & set(states):
            layer = states[name]
            views = (batch if layer is None else batch.layer(layer) for batch in self.batches())
            frame[name] = [view.state(n) for view in views for n in range(view.num_rows)]
        return frame[asked]

    def _row_of(self, batch: BatchView, n: int) -> Row:
        arrow = batch.arrow
        between = arrow.schema.names[1 : arrow.schema.get_field_index(names.OUTCOME)]
        columns = {name: arrow.column(name)[n].as_py() for name in between}
        chunked = self.job.spec.text.on_long == "chunk"
        span = batch.id_spans[n] if self.spec.input_ids else slice(0, 0)
        layers = {layer: batch.layer(layer).state(n) for layer in self.layers}
        return Row(
            row=int(batch.row[n]),
            chunk=columns.pop(names.CHUNK) if chunked else 0,
            outcome=arrow.column(names.OUTCOME)[n].as_py(),
            num_tokens=int(batch.num_tokens[n]),
            num_tokens_original=arrow.column(names.NUM_TOKENS_ORIGINAL)[n].as_py(),
            input_ids=batch.input_ids[span] if span.start < span.stop else None,
            states=batch.state(n),
            layers={layer: states for layer, states in layers.items() if states is not None},
            columns=columns,
        )

    def _find(self, row: int, chunk: int) -> tuple[BatchView, int]:
        """The batch that holds a row, and the row's place in it."""
        shard = self.shard(self._shard_of(row))
        found = shard.find(row, chunk)
        if found is None:
            problem = f"it has no chunk {chunk}" if shard.find(row, 0) else "the source ends before it"
            raise NoSuchRow(path=self.path, row=row, problem=problem)
        return found

    def _training_rows(
        self, columns: Sequence[str] | None, dtype: StateType, with_states_only: bool, shards: Collection[int] | None
    ) -> TrainingRows:
        return training_rows(
            self.job, self.shards, columns, dtype=dtype, with_states_only=with_states_only, shards=shards
        )

    def _source_rows(self) -> int:
        """Rows that the job reads, to count from the end."""
        if self.job.num_rows is not None:
            return self.job.num_rows
        if self.shards and self.shards[-1].last:
            return self.shards[-1].stop_row
        raise NoSuchRow(path=self.path, row=-1, problem="the end of the source is not reached yet")

    def _positions(self, asked: slice) -> Sequence[int]:
        """Source positions of a slice, as Python slices a sequence; those that the job did not select are left out."""
        if self.job.selection is None:
            return range(self._source_rows())[asked]
        chosen = self.job.rows_at(0, self._source_rows())
        start, stop, step = asked.indices(int(chosen[-1]) + 1 if len(chosen) else 0)
        if step < 0:
            chosen = chosen[(chosen <= start) & (chosen > stop)][::-1]
        else:
            chosen = chosen[(chosen >= start) & (chosen < stop)]
        found: list[int] = chosen[(chosen - start) % step == 0].tolist()
        return found

    def _shard_of(self, row: int) -> int:
        shard = self.job.shard_of(row)
        if shard is None:
            rows = "?" if self.job.num_rows is None else f"{self.job.num_rows:,}"
            problem = f"the source has {rows} rows, counted from 0"
            if self.job.selection is not None:
                problem = f"it is not among the {rows} rows that the job selected"
            raise NoSuchRow(path=self.path, row=row, problem=problem)
        if not commit_path(self.job.directory.commits, shard).exists():
            raise NoSuchRow(path=self.path, row=row, problem=f"shard {shard} is not finished; run the job again")
        return shard


class Rows(Sequence[Row]):
    """Some rows of an output by ascending or descending positions; each is read when it is asked for."""

    def __init__(self, output: Output, positions: Sequence[int]) -> None:
        self._output, self.positions = output, positions

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> "Rows": ...

    def __getitem__(self, place: int | slice) -> "Row | Rows":
        if isinstance(place, slice):
            return Rows(self._output, self.positions[place])
        return self._output.row(self.positions[place])
