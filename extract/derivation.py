"""Make one output from another without a model: cast the stored type, pool token states, split into other shards.

The new output is a job of its own, with the same commit protocol, so a kill costs one shard and the same command goes
on. What is lost stays lost: casting int8 to float32 gives float32 numbers of int8's precision, and the metadata says
from which output they came.
"""

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from extract.canonical import canonical_json
from extract.claims import Claims
from extract.commits import Commit, commit_path, committed_shards, shard_name
from extract.completion import complete
from extract.errors import ResumeRefused, SpecError
from extract.job import JobDirectory, JobRecord, StoredJob, job_id, prepare, read_job
from extract.output import Output
from extract.progress import Progress
from extract.publishing import commit_file, commit_of, remove_leftovers
from extract.record_sums import RecordSums, Totals
from extract.records import NOT_COUNTED, OUTCOME_CODE, STATELESS, Outcome, TokenRows
from extract.shards import schema as names
from extract.shards.batches import as_stored, bytes_by_row, encoded_rows, record_batch
from extract.shards.schema import output_schema
from extract.shards.sink import ShardFacts, ShardWriter
from extract.shards.values import Float32
from extract.shards.views import BatchView
from extract.spec import Compression, OutputKind, StatesSpec, ValueType
from extract.storage import Place
from extract.store import clear_write_errors

POLL_S = 0.5
KEPT_METADATA = ("engine", "checkpoint", "checkpoint_name", "module", "computed_in", "tokens")
"""What the first output says about where its numbers came from stays true of the second."""


class NothingToPool(SpecError):
    """Pooling needs every token's state."""

    template = (
        '{path}: holds one state a row ({found}), so it cannot be pooled to "{expected}". '
        "Pool an output of kind tokens."
    )


class Unfinished(ResumeRefused):
    """An output that is not complete cannot be made into another one."""

    template = "{path}: {problem}. Finish this job first: run the same `extract run` command again."


class SameDirectory(SpecError):
    """Never in place."""

    template = "{path}: the output would overwrite what it is made from. Choose another directory with -o."


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is different in the new output; `None` keeps what was."""

    dtype: ValueType | None = None
    pool: OutputKind | None = None
    rows_per_shard: int | None = None
    compression: Compression | None = None
    compression_level: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What was made."""

    path: str
    job: str
    made_from: str
    num_shards_made: int
    totals: Totals
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Recast:
    """The batches of an output as `derive` would store them, one after another and without writing anything.

    Attributes:
        spec: what the changed batches hold.
        schema: of the changed batches; its job is the one that `derive` would make.
    """

    def __init__(self, origin: Output, change: Change) -> None:
        self._origin, self._record = origin, _record(origin, change)
        self.spec: StatesSpec = self._record.spec.states
        self.schema: pa.Schema = self._record.schema

    def __call__(self, batch: BatchView) -> Iterator[BatchView]:
        """One batch of the origin, changed; rows whose states the new type cannot hold end as non_finite."""
        if not batch.num_rows:
            return
        rows, source, positions, (states, *layers) = _as_window(batch, self._origin, self._record)
        source = as_stored(source, self.schema)
        for part in encoded_rows(rows, states, self.spec, bytes_by_row(source, batch.num_rows), layers):
            yield BatchView(record_batch(part, rows, source, positions, self.spec, self.schema), self.spec)


def derive(root: Place, target: Place, change: Change, progress: Progress | None = None) -> Derived:
    """Write `target` from the finished output `root`; or go on with it.

    Raises:
        Unfinished: `root` is not complete.
        NothingToPool: it holds pooled states already.
        OtherJob: `target` was made from something else, or in another way.
    """
    started = time.perf_counter()
    if target.resolve() == root.resolve():
        raise SameDirectory(path=target)
    origin = Output(read_job(root))
    problem = RecordSums(origin.job, origin.shards).problem
    if problem is not None:
        raise Unfinished(path=root, problem=problem)
    record = _record(origin, change)
    directory = prepare(target, record)
    progress = progress if progress is not None else Progress(quiet=True)
    made = 0
    claims = Claims(directory.claims)
    try:
        done = committed_shards(directory.commits)
        before = sum(last - first for first, last in (_rows_of(record, shard) for shard in done))
        progress.expect(record.num_rows, before)
        with progress:
            for shard in _left(record, directory, claims):
                progress.wrote(_make(origin, record, directory, shard, progress))
                made += 1
    finally:
        claims.close()
    totals = complete(directory)
    return Derived(
        path=str(target),
        job=record.job_id,
        made_from=str(root),
        num_shards_made=made,
        totals=totals,
        seconds=round(time.perf_counter() - started, 3),
    )


def _left(record: JobRecord, directory: JobDirectory, claims: Claims) -> Iterator[int]:
    """Shards to make here, until every one is committed by this process or by others that share the work."""
    while True:
        done = committed_shards(directory.commits)
        left = [shard for shard in range(record.num_shards or 1) if shard not in done]
        if not left:
            return
        worked = False
        for shard in left:
            if not claims.claim(shard):
                continue
            worked = True
            if not commit_path(directory.commits, shard).exists():
                if claims.supported:
                    remove_leftovers(directory, shard)
                yield shard
            claims.release(shard)
        if not worked:
            time.sleep(POLL_S)


def _record(origin: Output, change: Change) -> JobRecord:
    job = origin.job
    if change.pool is not None and origin.kind != "tokens":
        raise NothingToPool(path=origin.path, found=origin.kind, expected=change.pool)
    states = replace(
        origin.spec,
        kind=change.pool or origin.kind,
        dtype=change.dtype or origin.spec.dtype,
        rows_per_shard=change.rows_per_shard or job.rows_per_shard,
        compression=change.compression or origin.spec.compression,
        compression_level=change.compression_level or origin.spec.compression_level,
    )
    num_rows = origin.num_rows
    derived_from = {
        "job": job.job_id,
        "dtype": origin.dtype,
        "kind": origin.kind,
        "derived_from": job.derived_from,
    }
    identity = {"derived_from": derived_from, "states": states.identity}
    rows_per_shard = states.rows_per_shard
    assert rows_per_shard is not None  # set above
    return JobRecord(
        spec=replace(job.spec, states=states),
        identity=identity,
        fingerprint=job.fingerprint,
        num_rows=num_rows,
        rows_per_shard=rows_per_shard,
        schema=_schema(job, states, identity),
        contract=job.contract,
        derived_from=derived_from,
    )


def _schema(job: StoredJob, states: StatesSpec, identity: dict[str, Any]) -> pa.Schema:
    between = list(job.schema)[1 : job.schema.get_field_index(names.OUTCOME)]
    has_id = job.spec.source.id_column is not None
    id_type = between.pop(0).type if has_id else None
    carried = [field for field in between if not (job.chunked and field.name == names.CHUNK)]
    kept = {key: job.schema.metadata.get(f"{names.METADATA_PREFIX}{key}".encode()) for key in KEPT_METADATA}
    metadata = {key: value.decode() for key, value in kept.items() if value is not None}
    metadata |= {"job": job_id(identity), "derived_from": canonical_json(identity["derived_from"]).decode()}
    return output_schema(states, Output(job).width, id_type, carried, job.chunked, metadata)


def _rows_of(record: JobRecord, shard: int) -> tuple[int, int]:
    assert record.num_rows is not None  # an origin is complete
    start = shard * record.rows_per_shard
    return start, min(start + record.rows_per_shard, record.num_rows)


def _make(origin: Output, record: JobRecord, directory: JobDirectory, shard: int, progress: Progress) -> int:
    clock = time.perf_counter()
    start, stop = _rows_of(record, shard)
    with clear_write_errors(directory.tmp):
        directory.tmp.mkdir(exist_ok=True)
    path = directory.tmp / f"{shard_name(shard)}.{os.getpid()}-{secrets.token_hex(4)}"
    positions = record.rows_at(start, stop)
    writer = ShardWriter(path, record.schema, record.spec.states, origin.width, shard, record.spec.text.on_non_finite)
    try:
        if len(positions):
            for batch in _batches(origin, int(positions[0]), int(positions[-1])):
                rows, source, at, (states, *layers) = _as_window(batch, origin, record)
                writer.write(rows, source, at, states, layers)
                progress.begin_window(int(np.unique(batch.row).size), 0)
        facts = writer.close()
    except BaseException:
        writer.abort()
        raise
    seconds = round(time.perf_counter() - clock, 3)
    commit_file(directory, writer.path, _commit(record, shard, facts, seconds))
    return facts.num_bytes


def _commit(record: JobRecord, shard: int, facts: ShardFacts, seconds: float) -> Commit:
    start, stop = _rows_of(record, shard)
    return commit_of(
        shard,
        facts,
        first_row=start,
        num_rows=stop - start,
        last=stop == record.num_rows,
        worker={"derived_from": record.derived_from},
        seconds={"write": seconds},
    )


def _batches(origin: Output, first: int, last: int) -> Iterator[BatchView]:
    """The origin's rows from position `first` to `last` (inclusive), in batches cut to them."""
    low, high = origin.job.shard_of(first), origin.job.shard_of(last)
    assert low is not None and high is not None  # both rows are in the output
    for number in range(low, high + 1):
        shard = origin.shard(number)
        for part in range(shard.num_batches):
            batch = shard.batch(part)
            rows = batch.row
            start, stop = np.searchsorted(rows, first, "left"), np.searchsorted(rows, last, "right")
            if start < stop:
                yield (
                    batch
                    if stop - start == len(rows)
                    else BatchView(batch.arrow.slice(start, stop - start), origin.spec)
                )


def _as_window(
    batch: BatchView, origin: Output, record: JobRecord
) -> tuple[TokenRows, pa.RecordBatch, Any, list[Float32]]:
    """A stored batch as the writer takes it; rows that had no finite state get NaN, so that they end as before.

    The states are those of each column, the final one first.

    Each chunk of a row comes with its own copy of the row's carried values, as it is stored.
    """
    arrow = batch.arrow
    rows = batch.row
    codes = arrow.column(names.OUTCOME).indices.to_numpy().astype(np.uint8)
    lengths = batch.num_tokens.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    original = arrow.column(names.NUM_TOKENS_ORIGINAL).fill_null(NOT_COUNTED).to_numpy()
    chunk = arrow.column(names.CHUNK).to_numpy() if record.chunked else np.zeros(len(rows), np.int32)
    ids = batch.input_ids if origin.spec.input_ids else np.zeros(int(offsets[-1]), np.int32)
    if origin.spec.input_ids:
        spans = batch.id_spans
        ids = ids[int(spans.starts[0]) : int(spans.stops[-1])] if len(rows) else ids[:0]
    token_rows = TokenRows(
        source_index=np.arange(len(rows), dtype=np.int32),
        chunk=chunk,
        outcome=codes,
        num_tokens_original=original,
        offsets=offsets,
        input_ids=ids,
    )
    between = [
        name
        for name in arrow.schema.names[1 : arrow.schema.get_field_index(names.OUTCOME)]
        if not (name == names.CHUNK and record.chunked)
    ]
    kind = record.spec.states.kind
    columns = (batch, *map(batch.layer, origin.spec.layers))
    states = [_states(column, origin.kind, kind, lengths, codes) for column in columns]
    return token_rows, arrow.select(between), rows, states


def _states(batch: BatchView, had: OutputKind, kind: OutputKind, lengths: Any, codes: Any) -> Float32:
    stateless = np.isin(codes, [OUTCOME_CODE[outcome] for outcome in STATELESS])
    lost = stateless & (lengths > 0)  # non_finite rows: they had tokens and have no states
    assert set(np.unique(codes[lost]).tolist()) <= {OUTCOME_CODE[Outcome.NON_FINITE]}
    width = batch.values.shape[1]
    spans = batch.state_spans
    wanted = lengths if kind == "tokens" else (lengths > 0).astype(np.int64)
    states = np.full((int(wanted.sum()), width), np.nan, np.float32)
    at = 0
    decoded = batch.states
    for n in range(batch.num_rows):
        span = spans[n]
        if span.start < span.stop:
            own = decoded[span]
            if had == kind:
                states[at : at + wanted[n]] = own
            else:
                states[at] = {"last": own[-1], "first": own[0], "mean": own.mean(axis=0)}[kind]
        at += int(wanted[n])
    return states
