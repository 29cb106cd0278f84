"""A whole job: rows of token ids in Parquet -> shards on local disk, and what each stage takes.

Uncompressed or not, shards go through the same pipeline as `extract run`. The loaded engine is handed in; its contract
is the benchmark's, so the job is real but for the proof of the engine.
"""

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

from gpu import ours
from gpu.rows import rows_of
from gpu.shapes import Shape
from gpu.time_box import Deadline


def measure(shape: Shape, device: Any, folder: Path, deadline: Deadline, *, tiny: bool) -> dict[str, Any]:
    """Tokens/s of jobs for every token and for the last one, and the disk's own rate."""
    from extract.engine.contract import write_contract

    try:
        engine, _ = ours.working(ours.made(shape, device, folder), shape, "bfloat16", device)
    except ours.NotHere as reason:
        return {"skipped": str(reason)}
    found: dict[str, Any] = {"disk_gb_per_s": disk_rate(folder.parent, 2**20 if tiny else 2**30) / 1e9}
    data = folder.parent / "rows.parquet"
    try:
        contract = engine.runtime.contract
        limits = dataclasses.replace(contract.limits, max_tokens=2 * engine.runtime.pass_tokens)
        engine.runtime.contract = dataclasses.replace(contract, limits=limits)
        write_contract(folder, engine.runtime.contract)
        sizes = {"last": 16, "tokens": 16} if tiny else {"last": 16_384, "tokens": 4096}
        rows = rows_of("mixed", max(sizes.values()), shape.vocabulary)
        _write_rows(data, rows)
        for kind, size in sizes.items():
            alone = None
            if deadline.affords(0.1 if tiny else 3.0, f"the engine alone, {kind}"):
                alone = ours.rate(engine, ours.batch_of(rows[:size]), kind, deadline, tiny=tiny)
                found[f"the engine alone, {kind}, tokens/s"] = alone
            for compression in ("none", "zstd"):
                label = f"{kind}, {compression}"
                if deadline.affords(0.2 if tiny else 8.0, f"job of {label}"):
                    found[label] = _job(engine, folder, data, kind, compression, size)
                    if alone is not None:
                        found[label]["of the engine alone"] = found[label]["tokens_per_s"] / alone
    finally:
        engine.close()
        (folder / "contract.json").unlink(missing_ok=True)
    return found


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes/s of a file written and flushed."""
    block = os.urandom(min(num_bytes, 64 * 2**20))
    path = folder / "disk-rate"
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return num_bytes / seconds


def _job(engine: Any, folder: Path, data: Path, kind: str, compression: str, size: int) -> dict[str, Any]:
    from extract.progress import Progress
    from extract.runners.local import run
    from extract.spec import JobSpec, SourceSpec, StatesSpec

    output = folder.parent / f"job-{kind}-{compression}"
    spec = JobSpec(
        engine=str(folder),
        source=SourceSpec(path=str(data), input="input_ids", column="input_ids", limit=size),
        states=StatesSpec(
            kind=kind, dtype="bfloat16", compression=compression, rows_per_shard=max(16, size // 4), reserve_bytes=0
        ),
        output=str(output),
    )
    started = time.perf_counter()
    summary = run(spec, progress=Progress(quiet=True), runtime=engine.runtime)
    seconds = time.perf_counter() - started
    tokens = int(summary.tokens_computed)
    written = sum(path.stat().st_size for path in (output / "data").iterdir())
    shutil.rmtree(output)
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "written_gb_per_s": written / seconds / 1e9,
        "stages": summary.stage_shares,
    }


def _write_rows(path: Path, rows: list[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        pq.write_table(pa.table({"input_ids": pa.array([row.tolist() for row in rows], pa.list_(pa.int32()))}), path)
