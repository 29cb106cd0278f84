"""What a job of a million shards costs beside its work: each command on as many commit records as asked for.

Records are synthetic but valid, beside empty files with the names of shards; all but five are there at first. Then each
command runs in a process of its own, as long as nothing is computed: `plan`, `status`, the start of a resumed `run`
until its engine would be loaded, the start of one worker of a thousand, the end of the run (five shards, then the
manifest), and of the finished job `status`, `finalize` after its manifest was taken away, and `run` again. Wall seconds
are those of the whole process, imports too; what binds is system calls and one Python thread that reads records.

With `--store` the output lies on an S3 server on this machine (moto, in Python, which answers some hundred requests a
second and so binds): what counts there is the number of requests, and this side's CPU seconds for them.

    make long-run             or: python tests/bench/bookkeeping.py --shards 1000000
                                  python tests/bench/bookkeeping.py --shards 10000 --store
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "object_store")]

import many_shards  # noqa: E402

from extract.spec import JobSpec  # noqa: E402
from extract.storage import locate  # noqa: E402

LEFT = 5
WORKERS = 1000
MAX_SECONDS, MAX_MB = 60.0, 1000.0
STORE = "s3://states/job"


class WouldCompute(Exception):
    """The run has come to its first shard."""


def plan(spec: JobSpec, num_shards: int) -> None:
    """`extract plan`."""
    from extract.jobs import plan

    assert plan(spec).estimate.num_shards == num_shards


def status(spec: JobSpec, num_shards: int) -> None:
    """`extract status`."""
    from extract.status import status

    found = status(locate(spec.output))
    assert found.done.num_shards == num_shards - (0 if found.complete else LEFT)


def start_of_run(spec: JobSpec, num_shards: int) -> None:
    """Everything that a resumed run does before it loads the engine."""
    from extract.runners.session import run_job

    def make(session):
        assert [*session.todo.left()] == [*range(num_shards - LEFT, num_shards)]
        raise WouldCompute

    try:
        run_job(spec, None, make)
    except WouldCompute:
        return
    raise AssertionError("nothing was left to compute")


def start_of_worker(spec: JobSpec, num_shards: int) -> None:
    """The same of one worker of an array job."""
    from extract.runners.session import opened
    from extract.runners.todo import Stripe

    stripe = Stripe(1, min(WORKERS, num_shards // 2))
    with opened(spec, None, stripe) as session:
        assert len(session.todo.done) >= len(stripe.shards(num_shards)) - 1


def end_of_run(spec: JobSpec, num_shards: int) -> None:
    """`extract run` from its start to the manifest: the engine is loaded and the last shards are made."""
    from extract.runners.local import run

    assert run(spec).num_shards_made == LEFT


def finalize(spec: JobSpec, num_shards: int) -> None:
    """`extract finalize` of a job that has no manifest."""
    from extract.runners.finalizing import finalize_output

    out = locate(spec.output)
    (out / "manifest.json").unlink()
    assert finalize_output(out).totals.num_shards == num_shards


def run_again(spec: JobSpec, num_shards: int) -> None:
    """`extract run` of a finished job."""
    from extract.runners.local import run

    assert run(spec).num_shards_made == 0


STEPS: dict[str, Callable[[JobSpec, int], None]] = {
    "plan": plan,
    "status": status,
    "start of run": start_of_run,
    "start of worker": start_of_worker,
    "end of run": end_of_run,
    "status, finished": status,
    "finalize": finalize,
    "run again": run_again,
}


def alone(name: str, folder: Path, engine: Path, num_shards: int, output: str) -> dict[str, float]:
    """One step in a process of its own."""
    command = [sys.executable, __file__, "--shards", str(num_shards), "--step", name, "--step-in", str(folder)]
    clock = time.perf_counter()
    command += ["--engine", str(engine), "--output", output]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"seconds": round(time.perf_counter() - clock, 2), **json.loads(done.stdout.splitlines()[-1])}


def do_step(name: str, spec: JobSpec, num_shards: int) -> dict[str, float]:
    """One step in this process, and what the process has taken."""
    from extract.storage.bucket import Bucket

    asked, real = [0], Bucket.ask

    def ask(*arguments, **options):
        asked[0] += 1
        return real(*arguments, **options)

    Bucket.ask = ask
    STEPS[name](spec, num_shards)
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage counts what the parent had, too
    (peak_kb,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return {
        "cpu_s": round(time.process_time(), 2),
        "peak_mb": round(peak_kb * 1024 / 1e6, 1),
        "requests": asked[0],
    }


@contextmanager
def place_for_output(folder: Path, on_store: bool) -> Iterator[str]:
    """Where the output goes: a directory, or an address on a server that runs as long."""
    if not on_store:
        yield str(folder / "out")
        return
    import moto_rig

    with moto_rig.moto_server() as endpoint:
        os.environ |= {**moto_rig.KEYS, "AWS_ENDPOINT_URL": endpoint, "TMPDIR": str(folder)}
        moto_rig.create_bucket(endpoint, "states")
        yield STORE


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shards", type=int, default=1_000_000)
    arguments.add_argument("--store", action="store_true", help="on an S3 server on this machine")
    arguments.add_argument("--engine", type=Path, help="an engine to use; by default a tiny one is built")
    arguments.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    arguments.add_argument("--step-in", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--output", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.step:
        spec = replace(many_shards.spec_of(given.engine, given.step_in, given.shards), output=given.output)
        print(json.dumps(do_step(given.step, spec, given.shards)))
        return 0
    print(f"device   {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="extract-bookkeeping-") as scratch:
        folder, engine = Path(scratch), given.engine
        if engine is None:
            from chaos.campaign import tiny_engine

            engine = tiny_engine(folder)
        with place_for_output(folder, given.store) as output:
            found = measure(folder, engine, given.shards, output)
    print(json.dumps(found))
    return 1 if found["beyond"] else 0


def measure(folder: Path, engine: Path, num_shards: int, output: str) -> dict:
    """Prepare the records and take all steps; returns their figures."""
    clock = time.perf_counter()
    spec = replace(many_shards.spec_of(engine, folder, num_shards), output=output)
    many_shards.commit_all_but(LEFT, spec, data_files=True)
    print(f"{num_shards:,} shards prepared in {time.perf_counter() - clock:,.0f} s")
    print(f"{'command':18} {'seconds':>9} {'CPU s':>8} {'peak MB':>9} {'requests':>9}")
    commands = {}
    for name in STEPS:
        one = commands[name] = alone(name, folder, engine, num_shards, output)
        print(f"{name:18} {one['seconds']:9.1f} {one['cpu_s']:8.1f} {one['peak_mb']:9.0f} {one['requests']:9,}")
    manifest_mb = (locate(output) / "manifest.json").stat().st_size / 1e6
    print(f"manifest {manifest_mb:,.1f} MB")
    beyond = [
        f"{name}: {one['seconds']} s, {one['peak_mb']} MB"
        for name, one in commands.items()
        if one["seconds"] > MAX_SECONDS or one["peak_mb"] > MAX_MB
    ]
    return {"shards": num_shards, "output": output, "manifest_mb": manifest_mb, "commands": commands, "beyond": beyond}


if __name__ == "__main__":
    sys.exit(main())
