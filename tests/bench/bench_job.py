"""The whole job (text -> shards on disk) against the engine alone, and the overlapped loop against its sequential twin.

Measures tokens/s of three things in one process, interleaved by round: `engine`, the forward passes of exactly the
batches that the job runs, with nothing beside them; `overlapped`, the job as `extract run` does it; `sequential`, its
twin without background threads. The binding limit is the engine: tokenising and writing should hide beside it, so the
ratio overlapped / engine should be near 1. The engine is loaded once and warmed up; each job starts from nothing.

    make bench-job            or: python tests/bench/bench_job.py --engine demo/engine --data demo/passages.parquet
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from extract.engine.runtimes import load_runtime
from extract.jobs import open_job
from extract.packing import TokenBudget, pack
from extract.pipeline import Worker, prepared
from extract.progress import Progress
from extract.runners.local import run
from extract.spec import JobSpec, SourceSpec, StatesSpec


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--engine", required=True)
    arguments.add_argument("--data", required=True)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--kind", default="tokens")
    arguments.add_argument("--limit", type=int, default=None)
    given = arguments.parse_args()

    threads = len(os.sched_getaffinity(0))
    runtime = load_runtime(Path(given.engine), threads=threads)
    spec = JobSpec(
        engine=given.engine,
        source=SourceSpec(path=given.data, id_column="id", limit=given.limit),
        states=StatesSpec(kind=given.kind, rows_per_shard=250, reserve_bytes=0),
    )
    batches = _batches(spec, runtime)
    num_tokens = sum(batch.num_tokens for batch in batches)
    print(f"device   {runtime.contract.device.name}, {threads} threads, {platform.machine()}")
    precision = runtime.contract.precision.activations
    print(f"versions torch {torch.__version__}, Python {platform.python_version()}, {precision}")
    print(f"work     {num_tokens:,} tokens in {len(batches)} passes, kind {given.kind}; limit: the engine's speed")
    for batch in batches[:2]:
        runtime.hidden_states(batch, given.kind)

    ways = {
        "engine": lambda: _engine_alone(runtime, batches, given.kind),
        "overlapped": lambda: _job(spec, runtime, overlap=True),
        "sequential": lambda: _job(spec, runtime, overlap=False),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(given.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            started = time.perf_counter()
            ways[name]()
            speeds[name].append(num_tokens / (time.perf_counter() - started))
    for name, seen in speeds.items():
        print(f"{name:<11}{'  '.join(f'{speed:8,.0f}' for speed in seen)} tokens/s")
    ratios = {
        f"{name}/engine": statistics.median(a / b for a, b in zip(speeds[name], speeds["engine"], strict=True))
        for name in ("overlapped", "sequential")
    }
    for name, ratio in ratios.items():
        print(f"{name:<20} {ratio:.3f}")
    print(json.dumps({"bench": "job", "tokens": num_tokens, "kind": given.kind, "speeds": speeds, "ratios": ratios}))


def _batches(spec: JobSpec, runtime) -> list:
    """Exactly the token batches that the job will run, in its order."""
    job = open_job(spec)
    plan = job.plan
    worker = Worker(
        plan=plan,
        source=job.source,
        tokenizer=job.tokenizer,
        runtime=runtime,
        progress=Progress(quiet=True),
        stop=threading.Event(),
    )
    budget = TokenBudget(
        max_tokens=plan.max_tokens,
        max_sequences=plan.max_sequences,
        equal_length=runtime.contract.runtime.layout == "dense",
        shared=runtime.contract.runtime.decoder == "own",
    )
    windows = prepared(worker, range(plan.num_shards or 1))
    found = [batch for window in windows for batch in pack(window.piece.rows, budget)]
    job.source.close()
    return found


def _engine_alone(runtime, batches: list, kind: str) -> None:
    for batch in batches:
        runtime.hidden_states(batch, kind)


def _job(spec: JobSpec, runtime, *, overlap: bool) -> None:
    folder = tempfile.mkdtemp(prefix="bench-job-")
    try:
        run(replace(spec, output=f"{folder}/out", run=replace(spec.run, overlap=overlap)), runtime=runtime)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
