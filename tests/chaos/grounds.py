"""Where the rounds of a campaign take place: on the disk of this machine, in an object store, on a Ray cluster."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crash_rig
import warm_command

from chaos.disk import shim
from chaos.faults import KINDS, WITH_SHIM, Job
from chaos.stores import BUCKET, STORE_KINDS, Store, StoreJob, store
from extract.storage import Place, locate

OUTPUTS, RUNNERS = ("directory", "s3"), ("local", "ray")


@dataclass(kw_only=True)
class Ground:
    """One of them.

    Attributes:
        kinds: of fault.
        untried: kinds that cannot be had here, with the reason.
        preload: library that warm commands are started with.
        where: the output of a round, by its folder.
        job: a job, by its arguments, output, an unbroken run's seconds and a source of chance.
        tidy: is called after each round.
    """

    kinds: dict[str, Callable[[Any], None]]
    untried: str = ""
    preload: str = ""
    most_faults: int = 3
    where: Callable[[Path], Place]
    job: Callable[[list[str], Place, float, random.Random], Job]
    tidy: Callable[[Job], None] = lambda job: None


def on_disk() -> Ground:
    """A directory, and the command on this machine; faults of the disk by the shim."""
    preload, why_not = shim()

    def job(arguments: list[str], out: Place, seconds: float, draw: random.Random) -> Job:
        return Job(arguments=arguments, out=out, seconds=seconds, shim=preload, draw=draw)

    return Ground(
        kinds={**KINDS, **(WITH_SHIM if preload else {})},
        untried=f"{', '.join(WITH_SHIM)}: {why_not}" if why_not else "",
        preload=preload,
        where=lambda folder: folder / "deep" / "out",
        job=job,
    )


@contextmanager
def in_store(folder: Path, which: str) -> Iterator[Ground]:
    """A prefix of a bucket, and the command on this machine, which may stand for several."""
    with store(folder / "store", which) as found:

        def job(arguments: list[str], out: Place, seconds: float, draw: random.Random) -> Job:
            scratch = folder / "scratch" / str(out).rpartition("/")[2]
            scratch.mkdir(parents=True)
            return StoreJob(
                arguments=arguments, out=out, seconds=seconds, shim="", draw=draw, store=found, scratch=scratch
            )

        yield Ground(kinds=dict(STORE_KINDS), where=_prefix, job=job)


@contextmanager
def on_ray(folder: Path, which: str | None) -> Iterator[Ground]:
    """A cluster of a few nodes, with outputs in a store or, without one, in directories."""
    import ray_rig

    from chaos.clusters import NUM_NODES, RAY_KINDS, SLOW_S, WITH_STORE, RayJob

    with ExitStack() as stack:
        found: Store | None = None if which is None else stack.enter_context(store(folder / "store", which))
        cluster = stack.enter_context(ray_rig.cluster(folder))
        cluster.faults(slow=SLOW_S)
        for _ in range(NUM_NODES):
            cluster.add_node()

        def job(arguments: list[str], out: Place, seconds: float, draw: random.Random) -> Job:
            environment = {} if found is None else found.environment
            return RayJob(
                arguments=arguments,
                out=out,
                seconds=seconds,
                shim="",
                draw=draw,
                cluster=cluster,
                store=found,
                beside=environment,
            )

        yield Ground(
            kinds={**RAY_KINDS, **(WITH_STORE if found is not None else {})},
            most_faults=1,
            where=(lambda out: out / "out") if found is None else _prefix,
            job=job,
            tidy=lambda job: job.tidy() if isinstance(job, RayJob) else None,
        )


def _prefix(folder: Path) -> Place:
    return locate(f"s3://{BUCKET}/{folder.name}")


@contextmanager
def ground(folder: Path, output: str, runner: str, which: str = "auto") -> Iterator[Ground]:
    """The one that was asked for.

    Args:
        folder: for what it needs.
        output: one of OUTPUTS.
        runner: one of RUNNERS.
        which: store: "moto", "ceph", or "auto" for Ceph where it is installed.
    """
    with ExitStack() as stack:
        if runner == "ray":
            yield stack.enter_context(on_ray(folder, which if output == "s3" else None))
        elif output == "s3":
            yield stack.enter_context(in_store(folder, which))
        else:
            yield on_disk()


def seconds_of_an_unbroken_run(found: Ground, folder: Path, engine: Path, rows: Path) -> float:
    """Measured once, after what is warmed up by the first one."""
    arguments = crash_rig.arguments(engine, rows, found.where(folder))
    job = found.job(arguments, found.where(folder), 1.0, random.Random(0))
    warm_command.call("--version", preload=job.shim)
    clock = time.perf_counter()
    ended = job.start().wait()
    assert ended.code == 0, ended.err
    return time.perf_counter() - clock
