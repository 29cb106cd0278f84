"""Long runs: what grows over millions of rows or with a hundred thousand shards, and should not.

First a job of many tiny rows through the whole pipeline with a tiny model, watched from a thread: resident memory and
open files must stay where they were after a tenth of the job (less than 5 % growth), and the rate of the last tenth
must be that of the second (0.95 or more, in rows a second of CPU time, so that other work here counts less).
Then plan, status and resume of a job whose shards are nearly all committed, each in a process of its own at several
sizes: seconds and memory must grow no faster than the number of shards. No physical limit binds; this is about slopes.

    make long-run             or: python tests/bench/long_run.py --rows 2000000 --shards 100000
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
SHARES = (0.1, 0.5, 1.0)
"""Parts of `--shards` that are measured, to see the slope."""
LEFT = 5
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


def many_shards(folder: Path, engine: Path, num_shards: int) -> dict:
    """Plan, status, resume and a finished job's rerun at several sizes, each in a process of its own."""
    from many_shards import commit_all_but, spec_of

    figures: dict[str, dict[str, list[float]]] = {}
    sizes = [max(10 * LEFT, round(num_shards * share)) for share in SHARES]
    print(f"{'shards':>9} {'command':12} {'seconds':>9} {'CPU s':>8} {'peak RSS MB':>12}")
    for size in sizes:
        place = folder / str(size)
        place.mkdir()
        commit_all_but(LEFT, spec_of(engine, place, size))
        for what in ("nothing", "plan", "status", "resume", "run again"):
            figure = alone(what, place, engine, "--shards", str(size))
            print(f"{size:9,} {what:12} {figure['seconds']:9.2f} {figure['cpu_s']:8.2f} {figure['rss'] / 1e6:12.1f}")
            for name, value in figure.items():
                figures.setdefault(what, {}).setdefault(name, []).append(value)
    return {"shards": sizes, **figures}


def alone(what: str, folder: Path, engine: Path, *options: str) -> dict:
    """One step in a process of its own; what it prints before its figures is passed on."""
    command = [sys.executable, __file__, "--step", what, "--step-in", str(folder), "--engine", str(engine), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *before, last = done.stdout.splitlines()
    if before:
        print("\n".join(before))
    return json.loads(last)


def step(what: str, folder: Path, engine: Path, num_shards: int) -> None:
    """One command on a prepared directory, timed inside of its process."""
    from many_shards import spec_of

    from extract.engine.runtimes import load_runtime
    from extract.jobs import plan
    from extract.runners.local import run
    from extract.status import status

    spec = spec_of(engine, folder, num_shards)
    runtime = load_runtime(engine, threads=1)
    clock, cpu = time.perf_counter(), time.process_time()
    if what == "plan":
        plan(spec)
    elif what == "status":
        assert status(folder / "out").done.num_shards == num_shards - LEFT
    elif what == "resume":
        assert run(spec, runtime=runtime).num_shards_made == LEFT
    elif what == "run again":
        assert run(spec, runtime=runtime).num_shards_made == 0
    seconds, cpu_s = time.perf_counter() - clock, time.process_time() - cpu
    status_lines = Path("/proc/self/status").read_text().splitlines()  # getrusage counts what the parent had, too
    (rss,) = (1024 * int(line.split()[1]) for line in status_lines if line.startswith("VmHWM:"))
    print(json.dumps({"seconds": round(seconds, 3), "cpu_s": round(cpu_s, 3), "rss": rss}))


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=2_000_000)
    arguments.add_argument("--rows-per-shard", type=int, default=10_000)
    arguments.add_argument("--shards", type=int, default=100_000)
    arguments.add_argument("--step", help=argparse.SUPPRESS)
    arguments.add_argument("--step-in", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.step == "rows":
        print(json.dumps(many_rows(given.step_in, given.engine, given.rows, given.rows_per_shard)))
        return 0
    if given.step:
        step(given.step, given.step_in, given.engine, given.shards)
        return 0
    print(f"device   {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}")
    found: dict = {}
    with tempfile.TemporaryDirectory(prefix="extract-long-run-") as scratch:
        from chaos.campaign import tiny_engine

        folder = Path(scratch)
        engine = tiny_engine(folder)
        if given.rows:
            sizes = ["--rows", str(given.rows), "--rows-per-shard", str(given.rows_per_shard)]
            found["rows"] = alone("rows", folder, engine, *sizes)
        if given.shards:
            found["shards"] = many_shards(folder, engine, given.shards)
    found["problems"] = problems(found)
    print(json.dumps(found))
    return 1 if found["problems"] else 0


def problems(found: dict) -> list[str]:
    """What grew that should not."""
    wrong = []
    rows, shards = found.get("rows"), found.get("shards")
    if rows:
        if rows["rss_growth"] >= 0.05:
            wrong.append(f"memory grew by {100 * rows['rss_growth']:.1f} %")
        if rows["files_growth"] > 0:
            wrong.append(f"{rows['files_growth']} more open files")
        if rows["last_tenth_over_second"] < 0.95:
            wrong.append(f"the last tenth ran at {rows['last_tenth_over_second']:.2f} of the second one's rate")
    if shards:
        sizes = shards["shards"]
        for what in ("plan", "status", "resume", "run again"):
            few, many = shards[what]["cpu_s"][1], shards[what]["cpu_s"][2]
            if many > 1.5 * few * sizes[2] / sizes[1] and many > 1:
                wrong.append(f"{what}: {few} CPU s for {sizes[1]:,} shards, {many} for {sizes[2]:,}")
        if shards["resume"]["cpu_s"][2] > 10 * max(1.0, sizes[2] / 100_000):
            wrong.append(f"resume: {shards['resume']['cpu_s'][2]} CPU s for {sizes[2]:,} shards")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
