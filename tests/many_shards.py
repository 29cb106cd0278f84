"""A job of as many shards as asked, nearly all of them committed, without computing any: records alone, no data files.

What costs time per shard in planning, resuming and asking for the state shows here at 100,000 shards in a minute.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from extract.commits import Commit, commit_path, record_bytes, shard_name
from extract.job import JobDirectory, prepare
from extract.jobs import open_job
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec
from extract.storage import ObjectPath, Place, locate

WORKER = {
    "engine": "e" * 64,
    "device": "a device with a name of usual length",
    "runtime": "torch 2.13.0",
    "arithmetic": "native avx512",
    "max_tokens": 512,
    "max_sequences": 8192,
}


def spec_of(engine: Path, folder: Path, num_shards: int) -> JobSpec:
    """A job of one row a shard over `folder/rows.parquet`, which is written if it is not there."""
    rows = folder / "rows.parquet"
    if not rows.exists():
        pq.write_table(pa.table({"text": [f"row {n}" for n in range(num_shards)]}), rows)
    return JobSpec(
        engine=str(engine),
        output=str(folder / "out"),
        source=SourceSpec(path=str(rows)),
        states=StatesSpec(kind="last", rows_per_shard=1, reserve_bytes=0),
        run=RunSpec(threads=1),
    )


def commit_all_but(left: int, spec: JobSpec, *, data_files: bool = False) -> JobDirectory:
    """The output directory as a run leaves it that was killed when `left` shards were still to make.

    With `data_files` each record's file is there, too, and empty.
    """
    job = open_job(spec)
    try:
        directory = prepare(locate(str(spec.output)), job.plan.record)
        num_shards = job.plan.num_shards
    finally:
        job.source.close()
    assert num_shards is not None
    model = Commit(
        shard=0,
        first_row=0,
        num_rows=1,
        last=False,
        num_rows_out=1,
        data="",
        sha256="0123abcd" * 8,
        num_bytes=3210,
        num_tokens=4,
        num_tokens_original=4,
        outcomes={"ok": 1},
        worker=WORKER,
        seconds={"read+tokenise": 0.011, "forward": 0.102, "write": 0.021},
        attempt="0011223344556677",
    )

    def make(shard: int) -> None:
        named = f"{shard_name(shard)}-0123abcd.arrow"
        commit = replace(model, shard=shard, first_row=shard, data=named, last=shard == num_shards - 1)
        _write(commit_path(directory.commits, shard), record_bytes(commit))
        if data_files:
            _write(directory.data / named, b"")

    if isinstance(directory.root, ObjectPath):
        with ThreadPoolExecutor(8) as pool:
            deque(pool.map(make, range(num_shards - left)), maxlen=0)
    else:
        deque(map(make, range(num_shards - left)), maxlen=0)
    return directory


def _write(path: Place, content: bytes) -> None:
    if isinstance(path, ObjectPath):
        path.replace(content)
    else:
        path.write_bytes(content)
