"""Outputs of every kind and type, as shards hold them, and what a row of an export should be."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import shard_rig

from extract.canonical import file_digest
from extract.commits import commit_path, read_commits, record_bytes
from extract.job import read_job
from extract.output import open_output
from extract.spec import StatesSpec

KINDS = ("tokens", "last")
DTYPES = ("float16", "float32", "bfloat16")
LENGTHS = (3, 0, 1, 5, 0, 128, 2)


def output(root: Path, kind: str = "tokens", dtype: str = "float16", **options: Any) -> Path:
    """An output of three shards of seven rows (two of each shard without tokens), small record batches."""
    spec = StatesSpec(kind=kind, dtype=dtype, record_batch_bytes=2**16, compression_level=1)
    shard_rig.write_output(root / "out", spec, **options)
    return root / "out"


def stored(path: Path, *, with_states_only: bool = False) -> list[np.ndarray | None]:
    """The stored numbers of every row, in order: [L, H] or [H], bfloat16 as its bits, `None` without states."""
    found: list[np.ndarray | None] = []
    opened = open_output(path)
    for batch in opened.batches():
        for n in range(batch.num_rows):
            values = batch.values[batch.state_spans[n]]
            found.append(None if not len(values) else values if opened.kind == "tokens" else values[0])
    return [one for one in found if one is not None] if with_states_only else found


def assert_same(found: list[Any], expected: list[np.ndarray | None]) -> None:
    """Bit for bit."""
    assert [one is None for one in found] == [one is None for one in expected]
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            one = np.ascontiguousarray(one)
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.tobytes() == other.tobytes()


def with_layers(out: Path, *layers: int) -> Path:
    """Add states of layers to an output: those of layer i are the stored ones, rolled by i places."""
    job = json.loads((out / "job.json").read_bytes())
    schema = read_job(out).schema
    states = schema.field("hidden_states")
    for layer in layers:
        schema = schema.append(states.with_name(f"layer_{layer}"))
    job["spec"]["states"]["layers"] = sorted(layers)
    job["schema"] = base64.b64encode(schema.serialize().to_pybytes()).decode()
    (out / "job.json").write_text(json.dumps(job))
    for commit in read_commits(out / "commits"):
        path = out / "data" / commit.data
        with pa.ipc.open_file(path) as file:
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        with pa.ipc.new_file(path.with_name("new"), schema) as file:
            for batch in batches:
                added = [rolled(batch.column("hidden_states"), layer) for layer in layers]
                file.write_batch(pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema))
        path.with_name("new").rename(path)
        size = path.stat().st_size
        record = replace(commit, sha256=file_digest(path), num_bytes=size)
        commit_path(out / "commits", commit.shard).write_bytes(record_bytes(record))
    return out


def rolled(column: pa.Array, layer: int) -> pa.Array:
    """A column of states with the values of each rolled."""
    width = column.type.value_type.list_size
    values = np.roll(column.values.values.to_numpy().reshape(-1, width), layer, axis=1)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=column.type.value_type)
    return pa.ListArray.from_arrays(column.offsets, inner, type=column.type, mask=column.is_null())
