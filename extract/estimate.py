"""What a job will cost, before weights load: rows, tokens, truncations, bytes, time, from a sample that is tokenised.

The sample is blocks of consecutive rows at even distances over the source (all rows of a small one), so it is the same
each time. Bytes are predicted by writing sampled rows with a real shard writer; only the states themselves, which would
need the model, enter by the compression that the build measured.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from extract.errors import OutOfSpace
from extract.planning import Plan, carried_columns
from extract.records import NOT_COUNTED, OUTCOMES, Int32, TokenRows
from extract.shards.sink import ShardWriter
from extract.shards.values import value_type
from extract.sources import Source
from extract.storage import ObjectPath, Place, scratch_folder
from extract.store import free_bytes
from extract.text.tokens import Example, RowTokenizer

SHARDS_AT_ONCE = 2
"""Of a process that writes to an object store, on the local disk: one written, one on its way."""
NUM_BLOCKS = 32
BLOCK_ROWS = 64
STREAM_ROWS = 1024
WRITTEN_BYTES = 32 * 2**20
"""Of ids and carried columns of the sample, which are written to the disk for temporary files."""
BATCH_BYTES = 1536
"""What Arrow spends on describing one record batch and padding its buffers, about."""
COMPRESSION_WINDOW = {"zstd": 2**19, "lz4": 2**16, "none": 0}
"""How far back, in bytes, a compressor of a low level finds a repetition."""
USUAL_RATIO = {"float16": 0.9, "float32": 0.9, "bfloat16": 0.77, "int8": 0.9}


class DiskTooSmall(OutOfSpace):
    """The output does not fit."""

    template = (
        "{path}: the job needs about {needed:,} bytes more and leaves {reserve:,} free, but only {free:,} are free. "
        "Choose another disk with -o, a smaller output (--dtype int8, --kind last), or lower the reserve."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A job's size. With `exact` every row was looked at; else counts are scaled up from `sampled_rows`.

    Attributes:
        num_rows: `None` for a stream; then the counts are those of the sample.
        outcomes: output rows by outcome, as far as text decides it.
        num_tokens: tokens that go through the model; `num_tokens_original` before any cut.
        num_bytes: of the shard files.
        seconds: at the speed that the build measured on its machine.
        example: the first row that has tokens.
    """

    num_rows: int | None
    num_shards: int | None
    rows_per_shard: int
    sampled_rows: int
    exact: bool
    outcomes: dict[str, int]
    num_rows_out: int
    num_tokens: int
    num_tokens_original: int
    doubled_bos: int
    num_bytes: int
    seconds: float | None
    free_bytes: int
    example: Example | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def estimate(plan: Plan, source: Source, tokenizer: RowTokenizer, output: Place | None) -> Estimate:
    """Read and tokenise a sample of the job's rows and scale it up.

    Raises:
        RowRefused: a row that an `error` policy stops at. With such a policy every row is read, so that the job is
            refused before compute, not in its middle.
    """
    tally = _Tally(plan, tokenizer)
    for batch, first_row in _sample(plan, source):
        tally.add(batch, first_row)
    exact = plan.num_rows is not None and tally.sampled_rows >= plan.num_rows
    scale = 1.0 if exact or plan.num_rows is None or not tally.sampled_rows else plan.num_rows / tally.sampled_rows
    num_tokens = round(tally.num_tokens * scale)
    speed = plan.engine.measured.tokens_per_s
    return Estimate(
        num_rows=plan.num_rows,
        num_shards=plan.num_shards,
        rows_per_shard=plan.record.rows_per_shard,
        sampled_rows=tally.sampled_rows,
        exact=exact,
        outcomes={str(OUTCOMES[code]): round(count * scale) for code, count in sorted(tally.outcomes.items())},
        num_rows_out=round(tally.num_rows_out * scale),
        num_tokens=num_tokens,
        num_tokens_original=round(tally.num_tokens_original * scale),
        doubled_bos=round(tally.doubled_bos * scale),
        num_bytes=_bytes(plan, tally, scale),
        seconds=num_tokens / speed if speed else None,
        free_bytes=free_bytes(output if output is not None else Path()),
        example=tally.example,
    )


def check_space(found: Estimate, plan: Plan, output: Place, done_bytes: int = 0) -> None:
    """Refuse a job that will not fit on the disk; of one that goes to an object store, a few shards lie there.

    Raises:
        DiskTooSmall: what is still to write and the reserve exceed what is free.
    """
    needed, reserve = max(0, found.num_bytes - done_bytes), plan.spec.states.reserve_bytes
    if isinstance(output, ObjectPath):
        needed = min(needed, SHARDS_AT_ONCE * found.num_bytes // max(1, found.num_shards or 1))
        output = scratch_folder(output)
    if needed + reserve > found.free_bytes:
        raise DiskTooSmall(path=output, needed=needed, reserve=reserve, free=found.free_bytes)


class _Tally:
    """Counts over the sampled rows, and those of them that are kept for writing."""

    def __init__(self, plan: Plan, tokenizer: RowTokenizer) -> None:
        self.plan, self.tokenizer = plan, tokenizer
        self.sampled_rows = self.num_rows_out = self.num_tokens = self.num_tokens_original = self.doubled_bos = 0
        self.num_sequences = 0
        self.prefix: Int32 | None = None
        """Ids that all sequences begin with: their states are the same in every row."""
        self.outcomes: Counter[int] = Counter()
        self.kept: list[tuple[TokenRows, pa.RecordBatch]] = []
        self.kept_rows = self.kept_bytes = 0
        self.example: Example | None = None

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        rows = self.tokenizer.tokenize(batch.column(0), first_row)
        self.sampled_rows += batch.num_rows
        self.num_rows_out += len(rows.outcome)
        self.num_tokens += len(rows.input_ids)
        self.num_sequences += int(np.count_nonzero(np.diff(rows.offsets)))
        self.prefix = _common_prefix(rows, self.prefix)
        counted = (rows.chunk == 0) & (rows.num_tokens_original != NOT_COUNTED)
        self.num_tokens_original += int(rows.num_tokens_original[counted].sum(dtype=np.int64))
        self.doubled_bos += rows.doubled_bos
        self.outcomes.update(rows.outcome.tolist())
        if self.example is None and len(rows.input_ids):
            index = int(rows.source_index[np.argmax(np.diff(rows.offsets) > 0)])
            self.example = self.tokenizer.example(batch.column(0).slice(index, 1), first_row + index)
        if self.kept_bytes < WRITTEN_BYTES and batch.num_rows:
            carried = carried_columns(self.plan.spec.source)
            columns = [batch.column(name) for name in carried]
            fields = [batch.schema.field(name) for name in carried]
            kept = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
            self.kept.append((rows, kept))
            self.kept_rows += batch.num_rows
            self.kept_bytes += kept.nbytes + rows.input_ids.nbytes + rows.offsets.nbytes


def _common_prefix(rows: TokenRows, known: Int32 | None) -> Int32 | None:
    """The ids of `known` (or of the first sequence) that all sequences of `rows` begin with."""
    lengths = np.diff(rows.offsets)
    first = rows.offsets[:-1][lengths > 0]
    if not len(first):
        return known
    shortest = int(lengths[lengths > 0].min())
    prefix = rows.input_ids[first[0] : first[0] + shortest] if known is None else known[:shortest]
    same = rows.input_ids[first[:, None] + np.arange(len(prefix))] == prefix
    return prefix[np.logical_and.accumulate(same.all(axis=0))]


def _sample(plan: Plan, source: Source) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Batches of sampled rows, each with the position in the source of its first row."""
    text, total = plan.spec.text, plan.num_rows
    stops = "error" in (text.on_long, text.on_null, text.on_empty, text.on_bad_text)
    if total is None:
        spans = [(0, STREAM_ROWS)]
    elif stops or total <= NUM_BLOCKS * BLOCK_ROWS:
        spans = [(0, total)]
    else:
        starts = [place * (total - BLOCK_ROWS) // (NUM_BLOCKS - 1) for place in range(NUM_BLOCKS)]
        spans = [(start, start + BLOCK_ROWS) for start in starts]
    for start, stop in spans:
        row = start
        for batch in source.read(start, stop, BLOCK_ROWS):
            yield batch, plan.record.position_of(row)
            row += batch.num_rows


def _bytes(plan: Plan, tally: _Tally, scale: float) -> int:
    """Everything but the states by writing sampled rows without any; the states by their size and usual compression."""
    spec, width = plan.spec.states, plan.engine.output.width
    stored = value_type(spec.dtype)
    ratio = 1.0
    if spec.compression == "zstd":
        ratio = plan.engine.measured.stored_ratio.get(spec.dtype, USUAL_RATIO[spec.dtype])
    raw = width * stored.bytes_per_value
    columns = 1 + len(spec.layers)
    raw *= columns
    per_state = raw * ratio + (4 * columns if stored.scaled else 0)
    count = tally.num_rows_out
    if spec.kind == "tokens":
        count = tally.num_tokens
        if (
            columns * raw * count < COMPRESSION_WINDOW[spec.compression] * tally.num_sequences
            and tally.prefix is not None
        ):
            count -= tally.num_sequences * len(tally.prefix)  # each row's first states repeat those of the row before
    state_bytes = per_state * count
    if not tally.kept_rows:
        return round(state_bytes * scale) + 4096
    empty, rest = _written_bytes(plan, tally)
    files = plan.num_shards or 1
    batches = max(files, state_bytes * scale / spec.record_batch_bytes)
    return round(
        state_bytes * scale
        + rest * tally.sampled_rows / tally.kept_rows * scale
        + empty * files
        + BATCH_BYTES * batches
    )


def _written_bytes(plan: Plan, tally: _Tally) -> tuple[int, int]:
    """Bytes of a file without rows, and what the kept rows add to it with their states left out."""
    with tempfile.TemporaryDirectory(prefix="extract-") as folder:
        empty = _write(plan, Path(folder) / "empty", [])
        rows = _write(plan, Path(folder) / "rows", tally.kept)  # one record batch for each sampled one
        return empty, max(0, rows - empty - BATCH_BYTES * len(tally.kept))


def _write(plan: Plan, path: Path, kept: list[tuple[TokenRows, pa.RecordBatch]]) -> int:
    """Size of a file with these rows, their ids, and states of a width of 1 that compress to nothing."""
    from extract.shards.schema import output_schema

    spec = replace(plan.spec.states, dtype="float16", normalize=False)
    extra = [field for field in plan.record.schema if field.name in plan.spec.source.carry]
    id_type = plan.record.schema.field("id").type if plan.spec.source.id_column is not None else None
    schema = output_schema(spec, 1, id_type, extra, plan.spec.text.on_long == "chunk", {})
    schema = schema.with_metadata(plan.record.schema.metadata)  # of the length that it will have
    writer = ShardWriter(path, schema, spec, 1, 0)
    try:
        for rows, source in kept:
            count = len(rows.input_ids) if spec.kind == "tokens" else int(np.count_nonzero(np.diff(rows.offsets)))
            states = np.zeros((count, 1), np.float32)
            writer.write(rows, source, np.arange(len(rows.source_index)), states, [states] * len(spec.layers))
        return writer.close().num_bytes
    finally:
        writer.abort()
