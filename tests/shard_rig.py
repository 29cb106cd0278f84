"""Windows, shard files and whole output directories from seeds, without an engine or a source."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from extract.commits import Commit, shard_name, write_commit
from extract.records import NOT_COUNTED, OUTCOME_CODE, Outcome, TokenRows
from extract.shards.schema import output_schema
from extract.shards.sink import ShardFacts, ShardWriter
from extract.shards.values import bfloat16_bits
from extract.spec import JobSpec, SourceSpec, StatesSpec, TextSpec

WIDTH = 48
LENGTHS = (3, 0, 1, 5, 0, 128, 2)
"""Two rows without tokens, one of a single token, one of the longest length."""

METADATA = {"job": "0123456789abcdef", "engine": "e" * 64, "checkpoint": "c" * 64, "checkpoint_name": "tiny"}

COMMIT = Commit(
    shard=12,
    first_row=48,
    num_rows=4,
    last=False,
    num_rows_out=4,
    data="shard-00012-0123abcd.arrow",
    sha256="0123abcd" * 8,
    num_bytes=1000,
    num_tokens=40,
    num_tokens_original=50,
    outcomes={"ok": 3, "truncated": 1},
    worker={"engine": "e" * 64, "max_tokens": 512},
    seconds={"forward": 0.5},
    attempt="0011223344556677",
)
"""A whole commit record, of a shard that nobody made."""


def token_rows(lengths=LENGTHS, *, source_index=None, chunk=None) -> TokenRows:
    """Rows of the given lengths with ids 0, 1, 2, ...; a row without tokens is `empty`, others `ok`."""
    lengths = np.asarray(lengths, np.int64)
    count = len(lengths)
    outcome = np.where(lengths > 0, OUTCOME_CODE[Outcome.OK], OUTCOME_CODE[Outcome.EMPTY]).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenRows(
        source_index=np.arange(count, dtype=np.int32) if source_index is None else np.asarray(source_index, np.int32),
        chunk=np.zeros(count, np.int32) if chunk is None else np.asarray(chunk, np.int32),
        outcome=outcome,
        num_tokens_original=lengths.astype(np.int32),
        offsets=offsets,
        input_ids=np.arange(offsets[-1], dtype=np.int32),
    )


def not_counted(rows: TokenRows, row: int) -> TokenRows:
    """The rows with one whose original length is not known."""
    original = rows.num_tokens_original.copy()
    original[row] = NOT_COUNTED
    return dataclasses.replace(rows, num_tokens_original=original)


def random_states(rows: TokenRows, kind="tokens", *, width=WIDTH, dtype="float32", seed=0) -> np.ndarray:
    """States as an engine hands them over: one a token, or one a row with tokens."""
    count = len(rows.input_ids) if kind == "tokens" else int(np.count_nonzero(np.diff(rows.offsets)))
    states = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    return bfloat16_bits(states) if dtype == "bfloat16" else states.astype(dtype)


def carried(count: int) -> pa.RecordBatch:
    """An id column and two carried ones, one of them with a dotted name."""
    return pa.record_batch(
        {
            "key": pa.array([f"id/{n}" for n in range(count)], pa.string()),
            "meta.url": pa.array([None if n % 3 == 1 else f"http://{n}" for n in range(count)], pa.string()),
            "score": pa.array(np.arange(count) / 2),
        }
    )


def schema_for(spec: StatesSpec, *, width=WIDTH, with_columns=True, chunked=False, id_type=None) -> pa.Schema:
    """The schema for `carried` rows (id type string), or for none."""
    fields = list(carried(1).schema)[1:] if with_columns else []
    if with_columns and id_type is None:
        id_type = pa.string()
    return output_schema(spec, width, id_type, fields, chunked, METADATA)


def write_shard(
    path: Path, spec: StatesSpec, rows=None, states=None, *, first_row=0, source=None, shard=0, **schema_options: Any
) -> ShardFacts:
    """One shard of one window."""
    rows = token_rows() if rows is None else rows
    states = random_states(rows, spec.kind) if states is None else states
    source = carried(int(rows.source_index[-1]) + 1) if source is None else source
    writer = ShardWriter(path, schema_for(spec, **schema_options), spec, states.shape[1], shard)
    num_rows = int(rows.source_index[-1]) + 1 if len(rows.source_index) else 0
    writer.write(rows, source, np.arange(first_row, first_row + num_rows), states)
    return writer.close()


def read_shard(path: Path) -> pa.Table:
    """The file through pyarrow alone."""
    with pa.ipc.open_file(path) as file:
        return file.read_all()


def write_output(
    root: Path,
    spec: StatesSpec,
    *,
    num_shards=3,
    rows_per_shard=7,
    chunked=False,
    missing=(),
    num_rows=None,
    lengths=LENGTHS,
    width=WIDTH,
) -> dict[int, Any]:
    """An output directory as a job leaves it; shards in `missing` are not committed. `lengths` are repeated.

    Returns:
        float32 states (or `None`) by source row.
    """
    schema = schema_for(spec, chunked=chunked, width=width)
    for folder in ("data", "commits"):
        (root / folder).mkdir(parents=True)
    job = JobSpec(
        source=SourceSpec(path="rows.parquet", id_column="key", carry=("meta.url", "score")),
        states=dataclasses.replace(spec, rows_per_shard=rows_per_shard),
        text=TextSpec(on_long="chunk" if chunked else "truncate"),
    )
    table = {
        "format": "extract-job",
        "version": 1,
        "spec": dataclasses.asdict(job),
        "identity": {},
        "source": {},
        "num_rows": num_shards * rows_per_shard if num_rows is None else num_rows,
        "rows_per_shard": rows_per_shard,
        "schema": base64.b64encode(schema.serialize().to_pybytes()).decode(),
        "contract": {},
        "derived_from": None,
    }
    (root / "job.json").write_text(json.dumps(table))
    expected: dict[int, Any] = {}
    for shard in range(num_shards):
        first_row = shard * rows_per_shard
        rows = token_rows(np.resize(lengths, rows_per_shard))
        states = random_states(rows, spec.kind, seed=shard, width=width)
        counts = np.diff(rows.offsets) if spec.kind == "tokens" else (np.diff(rows.offsets) > 0).astype(int)
        parts = np.split(states, np.cumsum(counts)[:-1])
        for n, part in enumerate(parts):
            expected[first_row + n] = None if not len(part) else part if spec.kind == "tokens" else part[0]
        if shard in missing:
            continue
        options = {"first_row": first_row, "last": shard == num_shards - 1, "chunked": chunked, "width": width}
        commit_shard(root, shard, spec, rows, states, **options)
    return expected


def replace_shard(root: Path, shard: int, spec: StatesSpec, rows: TokenRows, states=None, **options: Any) -> None:
    """Put other rows in the place of a committed shard, which must be the only one."""
    for path in (*(root / "data").iterdir(), *(root / "commits").iterdir()):
        path.unlink()
    commit_shard(root, shard, spec, rows, states, first_row=0, last=True, **options)


def commit_shard(
    root: Path,
    shard: int,
    spec: StatesSpec,
    rows: TokenRows,
    states,
    *,
    first_row: int,
    last: bool,
    chunked=False,
    width=WIDTH,
) -> None:
    """Write one shard and its record."""
    temporary = root / "data" / "tmp"
    options = {"first_row": first_row, "shard": shard, "chunked": chunked, "width": width}
    facts = write_shard(temporary, spec, rows, states, **options)
    name = f"{shard_name(shard)}-{facts.sha256[:8]}.arrow"
    temporary.rename(root / "data" / name)
    commit = Commit(
        shard=shard,
        first_row=first_row,
        num_rows=int(rows.source_index[-1]) + 1,
        last=last,
        num_rows_out=facts.num_rows,
        data=name,
        sha256=facts.sha256,
        num_bytes=facts.num_bytes,
        num_tokens=facts.num_tokens,
        num_tokens_original=facts.num_tokens_original,
        outcomes=facts.outcomes,
    )
    write_commit(root / "commits", commit)
