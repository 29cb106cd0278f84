"""A long run: what grows over millions of rows, and should not.

A job of many tiny rows through the whole pipeline with a tiny model, watched from a thread: resident memory and open
files must stay where they were after a tenth of the job (less than 5 % growth), and the rate of the last tenth must be
that of the second (0.95 or more, in rows a second of CPU time, so that other work here counts less). No physical limit
binds; this is about slopes. What grows with the number of shards is measured by `bookkeeping.py`.

    make long-run             or: python tests/bench/long_run.py --rows 2000000
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

TENTHS = 10
WORDS = "a few words that make"


@dataclass(frozen=True)
class Sample:
    """One look at a run: rows done, CPU and wall seconds, resident bytes, open files."""

    rows: int
    cpu_s: float
    wall_s: float
    rss: int
    files: int


class Watch:
    """Looks at this process again and again while a job runs."""

    def __init__(self, progress, every_s: float = 0.25) -> None:
        self.samples: list[Sample] = []
        self._progress, self._every_s = progress, every_s
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._leaving.wait(self._every_s):
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            files = len(os.listdir("/proc/self/fd"))
            now = Sample(self._progress.rows_done, time.process_time(), time.perf_counter(), rss, files)
            self.samples.append(now)

    def at(self, rows: float) -> Sample:
        """The first look when so many rows were done."""
        return next((sample for sample in self.samples if sample.rows >= rows), self.samples[-1])


def write_rows(rows: Path, num_rows: int) -> None:
    """Short texts of the same lengths anywhere in the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(rows, schema) as file:
        for start in range(0, num_rows, 50_000):
            stop = min(num_rows, start + 50_000)
            texts = [WORDS[: n % len(WORDS)] + f"{n:07}"[: n % 4] for n in range(start, stop)]
            file.write_table(pa.table({"text": texts}, schema=schema))


def many_rows(folder: Path, engine: Path, num_rows: int, rows_per_shard: int) -> dict:
    """One job of many tiny rows; returns its figures."""
    from extract.engine.runtimes import load_runtime
    from extract.progress import Progress
    from extract.runners.local import run
    from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec

    rows = folder / "rows.parquet"
    write_rows(rows, num_rows)
    spec = JobSpec(
        engine=str(engine),
        output=str(folder / "out"),
        source=SourceSpec(path=str(rows)),
        states=StatesSpec(kind="last", dtype="int8", rows_per_shard=rows_per_shard, reserve_bytes=0),
        run=RunSpec(threads=1),
    )
    progress = Progress(quiet=True)
    with Watch(progress) as watch:
        summary = run(spec, progress=progress, runtime=load_runtime(engine, threads=1))
    samples = [watch.at(num_rows * tenth / TENTHS) for tenth in range(1, TENTHS)] + [watch.samples[-1]]
    rates = [
        (after.rows - before.rows) / max(1e-9, after.cpu_s - before.cpu_s)
        for before, after in itertools.pairwise(samples)
    ]
    print(f"{'rows done':>12} {'rows/s':>10} {'rows/CPU s':>11} {'RSS MB':>8} {'files':>6}")
    for before, after in itertools.pairwise(samples):
        rows_done = after.rows - before.rows
        wall = rows_done / max(1e-9, after.wall_s - before.wall_s)
        cpu = rows_done / max(1e-9, after.cpu_s - before.cpu_s)
        print(f"{after.rows:12,} {wall:10,.0f} {cpu:11,.0f} {after.rss / 1e6:8,.1f} {after.files:6}")
    assert summary.totals.num_rows == num_rows
    warm = samples[0]
    later = [sample for sample in watch.samples if sample.rows >= warm.rows]
    half = len(later) // 2
    return {
        "rows": num_rows,
        "shards": summary.totals.num_shards,
        "seconds": summary.seconds,
        "rss_growth": max(s.rss for s in later[half:]) / max(s.rss for s in later[: half or 1]) - 1,
        "files_growth": max(s.files for s in later[half:]) - max(s.files for s in later[: half or 1]),
        "last_tenth_over_second": rates[-1] / rates[0],
    }


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=2_000_000)
    arguments.add_argument("--rows-per-shard", type=int, default=10_000)
    arguments.add_argument("--run-in", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.run_in is not None:
        found = many_rows(given.run_in, given.engine, given.rows, given.rows_per_shard)
        found["problems"] = problems(found)
        print(json.dumps(found))
        return 1 if found["problems"] else 0
    print(f"device   {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="extract-long-run-") as scratch:
        from chaos.campaign import tiny_engine

        folder = Path(scratch)
        places = ["--run-in", str(folder), "--engine", str(tiny_engine(folder))]
        sys.stdout.flush()
        return subprocess.run([sys.executable, *sys.argv, *places], check=False).returncode  # without what built it


def problems(found: dict) -> list[str]:
    """What grew that should not."""
    wrong = []
    if found["rss_growth"] >= 0.05:
        wrong.append(f"memory grew by {100 * found['rss_growth']:.1f} %")
    if found["files_growth"] > 0:
        wrong.append(f"{found['files_growth']} more open files")
    if found["last_tenth_over_second"] < 0.95:
        wrong.append(f"the last tenth ran at {found['last_tenth_over_second']:.2f} of the second one's rate")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
