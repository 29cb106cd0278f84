"""Reading a job's output back: rows by position, record batches in order, or all of it as an Arrow table.

Works on an unfinished job with what is committed. Opening reads `job.json` alone; a row is found from its position, its
shard's commit record and that file's `row` column, so nothing else is read however many shards there are. Compressed
batches are decoded one at a time; uncompressed ones are views of the mapped file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.dataset

from extract.commits import Commit, commit_path, read_commit, read_commits
from extract.errors import SpecError
from extract.job import StoredJob, read_job
from extract.records import Int32
from extract.shards import schema as names
from extract.shards.shard_file import ShardFile
from extract.shards.values import Float32
from extract.shards.views import BatchView
from extract.spec import OutputKind, StatesSpec, ValueType
from extract.storage import ObjectPath, Place, locate
from extract.storage.arrow_files import arrow_filesystem


class NoSuchRow(SpecError, IndexError):
    """A row that the output does not hold (yet)."""

    template = "{path}: no row {row}: {problem}."


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

    __getitem__ = row

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
