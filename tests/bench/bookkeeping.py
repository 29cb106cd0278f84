"""What a job of a million shards costs beside its work: each command on as many commit records as asked for.

Records are synthetic but valid, beside empty files with the names of shards; all but five are there at first. Then each
command runs in a process of its own, as long as nothing is computed: `plan`, `status`, the start of a resumed `run`
until its engine would be loaded, the start of one worker of a thousand, the end of the run (five shards, then the
manifest), and of the finished job `status`, `finalize` after its manifest was taken away, and `run` again. Wall seconds
are those of the whole process, imports too; what binds is system calls and one Python thread that reads records.

    make long-run             or: python tests/bench/bookkeeping.py --shards 1000000
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

LEFT = 5
WORKERS = 1000
MAX_SECONDS, MAX_MB = 60.0, 1000.0


class WouldCompute(Exception):
    """The run has come to its first shard."""


def start_of_run(folder: Path, engine: Path, num_shards: int) -> None:
    """Everything that a resumed run does before it loads the engine."""
    from many_shards import spec_of

    from extract.runners.session import run_job

    def make(session):
        assert [*session.todo.left()] == [*range(num_shards - LEFT, num_shards)]
        raise WouldCompute

    try:
        run_job(spec_of(engine, folder, num_shards), None, make)
    except WouldCompute:
        return
    raise AssertionError("nothing was left to compute")


def start_of_worker(folder: Path, engine: Path, num_shards: int) -> None:
    """The same of one worker of an array job."""
    from many_shards import spec_of

    from extract.runners.session import opened
    from extract.runners.todo import Stripe

    stripe = Stripe(1, min(WORKERS, num_shards // 2))
    with opened(spec_of(engine, folder, num_shards), None, stripe) as session:
        assert len(session.todo.done) >= len(stripe.shards(num_shards)) - 1


def plan(folder: Path, engine: Path, num_shards: int) -> None:
    """`extract plan`."""
    from many_shards import spec_of

    from extract.jobs import plan

    assert plan(spec_of(engine, folder, num_shards)).estimate.num_shards == num_shards


def status(folder: Path, engine: Path, num_shards: int) -> None:
    """`extract status`."""
    from extract.status import status

    found = status(folder / "out")
    assert found.done.num_shards == num_shards - (0 if found.complete else LEFT)


def end_of_run(folder: Path, engine: Path, num_shards: int) -> None:
    """`extract run` from its start to the manifest: the engine is loaded and the last shards are made."""
    from many_shards import spec_of

    from extract.runners.local import run

    assert run(spec_of(engine, folder, num_shards)).num_shards_made == LEFT


def finalize(folder: Path, engine: Path, num_shards: int) -> None:
    """`extract finalize` of a job that has no manifest."""
    from extract.runners.finalizing import finalize_output

    (folder / "out" / "manifest.json").unlink()
    assert finalize_output(folder / "out").totals.num_shards == num_shards


def run_again(folder: Path, engine: Path, num_shards: int) -> None:
    """`extract run` of a finished job."""
    from many_shards import spec_of

    from extract.runners.local import run

    assert run(spec_of(engine, folder, num_shards)).num_shards_made == 0


STEPS: dict[str, Callable[[Path, Path, int], None]] = {
    "plan": plan,
    "status": status,
    "start of run": start_of_run,
    "start of worker": start_of_worker,
    "end of run": end_of_run,
    "status, finished": status,
    "finalize": finalize,
    "run again": run_again,
}


def alone(name: str, folder: Path, engine: Path, num_shards: int) -> dict[str, float]:
    """One step in a process of its own."""
    command = [sys.executable, __file__, "--shards", str(num_shards), "--step", name, "--step-in", str(folder)]
    clock = time.perf_counter()
    done = subprocess.run([*command, "--engine", str(engine)], stdout=subprocess.PIPE, text=True, check=True)
    return {"seconds": round(time.perf_counter() - clock, 2), **json.loads(done.stdout.splitlines()[-1])}


def measured() -> dict[str, float]:
    """What this process has taken."""
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage counts what the parent had, too
    (peak_kb,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return {"cpu_s": round(time.process_time(), 2), "peak_mb": round(peak_kb * 1024 / 1e6, 1)}


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shards", type=int, default=1_000_000)
    arguments.add_argument("--engine", type=Path, help="an engine to use; by default a tiny one is built")
    arguments.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    arguments.add_argument("--step-in", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.step:
        STEPS[given.step](given.step_in, given.engine, given.shards)
        print(json.dumps(measured()))
        return 0
    from many_shards import commit_all_but, spec_of

    print(f"device   {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}")
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="extract-bookkeeping-") as scratch:
        folder, engine = Path(scratch), given.engine
        if engine is None:
            from chaos.campaign import tiny_engine

            engine = tiny_engine(folder)
        clock = time.perf_counter()
        commit_all_but(LEFT, spec_of(engine, folder, given.shards), data_files=True)
        print(f"{given.shards:,} shards prepared in {time.perf_counter() - clock:,.0f} s")
        print(f"{'command':18} {'seconds':>9} {'CPU s':>8} {'peak MB':>9}")
        for name in STEPS:
            figures = found[name] = alone(name, folder, engine, given.shards)
            print(f"{name:18} {figures['seconds']:9.1f} {figures['cpu_s']:8.1f} {figures['peak_mb']:9.0f}")
        manifest_mb = (folder / "out" / "manifest.json").stat().st_size / 1e6
        print(f"manifest {manifest_mb:,.1f} MB")
    beyond = [
        f"{name}: {figures['seconds']} s, {figures['peak_mb']} MB"
        for name, figures in found.items()
        if figures["seconds"] > MAX_SECONDS or figures["peak_mb"] > MAX_MB
    ]
    print(json.dumps({"shards": given.shards, "manifest_mb": manifest_mb, "commands": found, "beyond": beyond}))
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
