"""A job whose output goes to an object store on loopback against the same job to the local disk.

Measures seconds of whole jobs with an engine that stays loaded, in turns: `disk`, to a directory; `store`, to an S3
server on this machine (moto, or any at AWS_ENDPOINT_URL). Shards are written to a local file first in both, and go up
beside the next shard's forward passes, so the limit is the engine: a job that computes should take at most 5 % longer.
The server shares this machine's cores with the engine, which a real one does not.

    python tests/bench/bench_object_store.py --engine demo/engine --data demo/passages.parquet --limit 500
"""

import argparse
import json
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import obstore
import torch

from extract.engine.runtimes import load_runtime
from extract.runners.local import run
from extract.spec import JobSpec, SourceSpec, StatesSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "object_store"))
import moto_rig

BUCKET = "bench"
TARGET_PERCENT = 5.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--engine", required=True)
    arguments.add_argument("--data", required=True)
    arguments.add_argument("--limit", type=int, default=None)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rows-per-shard", type=int, default=50)
    given = arguments.parse_args()
    own = os.environ.get("AWS_ENDPOINT_URL")
    with nullcontext(own) if own else moto_rig.moto_server() as endpoint, tempfile.TemporaryDirectory() as folder:
        if not own:
            os.environ.update(moto_rig.KEYS, AWS_ENDPOINT_URL=endpoint)
            moto_rig.create_bucket(endpoint, BUCKET)
        _compare(given, endpoint, Path(folder))


def _compare(given: argparse.Namespace, endpoint: str, folder: Path) -> None:
    threads = len(os.sched_getaffinity(0))
    runtime = load_runtime(Path(given.engine), threads=threads)

    def seconds(output: str) -> tuple[float, int]:
        spec = JobSpec(
            engine=given.engine,
            output=output,
            source=SourceSpec(path=given.data, limit=given.limit),
            states=StatesSpec(rows_per_shard=given.rows_per_shard, reserve_bytes=0),
        )
        began = time.perf_counter()
        summary = run(spec, runtime=runtime)
        return time.perf_counter() - began, summary.totals.num_bytes

    print(f"device   {runtime.contract.device.name}, {threads} threads, {platform.machine()}")
    print(f"versions obstore {obstore.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    seconds(str(folder / "warm"))
    found: dict[str, list[float]] = {"disk": [], "store": []}
    num_bytes = 0
    for _ in range(given.rounds):
        for way in found:
            name = secrets.token_hex(6)
            spent, num_bytes = seconds(str(folder / name) if way == "disk" else f"s3://{BUCKET}/{name}")
            found[way].append(spent)
    disk, store = (min(found[way]) for way in ("disk", "store"))  # others use the machine, too
    overhead = 100 * (store / disk - 1)
    print(f"output   {num_bytes:,} bytes a job, to {endpoint}")
    for way, spent in found.items():
        rounds = ", ".join(f"{one:.2f}" for one in spent)
        print(f"{way:8} {min(spent):8.2f} s at best, median {statistics.median(spent):.2f}   ({rounds})")
    print(f"overhead {overhead:+.1f} %, at most {TARGET_PERCENT:.0f} % wanted")
    print(json.dumps({"disk_s": disk, "store_s": store, "overhead_percent": overhead, "num_bytes": num_bytes}))


if __name__ == "__main__":
    main()
