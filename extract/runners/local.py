"""Run a job in this process: load the engine, make every shard that is not committed.

A second process on the same directory shares the work through claims; a kill at any moment costs the shard in flight.
"""

from collections.abc import Callable
from functools import partial

from extract.claims import Claims
from extract.engine.contract import Runtime
from extract.pipeline import Worker
from extract.progress import Progress
from extract.runners.interrupts import StopRequested
from extract.runners.loading import load_engine
from extract.runners.patience import USUAL_PATIENCE, Patience
from extract.runners.session import Made, Session, run_job
from extract.runners.shard_loop import Unwatched, make_what_is_left
from extract.runners.summary import SomeShardsFailed, Summary
from extract.spec import JobSpec

__all__ = ["SomeShardsFailed", "StopRequested", "Summary", "run"]


def run(
    spec: JobSpec,
    *,
    progress: Progress | None = None,
    runtime: Runtime | None = None,
    workers: int = 1,
    patience: Patience = USUAL_PATIENCE,
) -> Summary:
    """Run a job, or go on with it.

    Args:
        spec: the job; `engine` and `output` must be set.
        progress: where to show how far it is; `None` shows nothing.
        runtime: an engine that is loaded already; `None` loads the one that `spec` names, if there is work to do.
        workers: how many processes make shards; 1 is this one, and each of several loads an engine of its own.
        patience: with several workers, until one that does not load its engine or makes no progress is replaced.

    Raises:
        ResumeRefused: the output directory belongs to another job.
        OutOfSpace: the disk is full or below the reserve.
        Interrupted: SIGINT or SIGTERM.
        ShardsFailed: the rest is done, but some shards broke twice.
    """
    return run_job(spec, progress, maker(workers, patience, runtime))


def maker(workers: int, patience: Patience, runtime: Runtime | None = None) -> Callable[[Session], Made]:
    """Who makes the shards of a run on this machine: this process, or several."""
    if workers > 1:
        from extract.runners.workers import make_with_workers

        return partial(make_with_workers, num_workers=workers, patience=patience)
    return partial(make_here, runtime=runtime)


def make_here(session: Session, *, runtime: Runtime | None = None) -> Made:
    """Make the shards that are missing, in this process."""
    plan = session.plan
    if runtime is None:
        loaded = load_engine(session.job, session.progress.say, threads=plan.spec.run.threads)
        plan, runtime = loaded.plan, loaded.runtime
    worker = Worker(
        plan=plan,
        source=session.job.source,
        tokenizer=session.job.tokenizer,
        runtime=runtime,
        progress=session.progress,
        stop=session.interrupts.stop,
    )
    made = Made()
    claims = Claims(session.directory.claims)
    try:
        with session.making():
            wait = session.todo.stripe is None
            for finished in make_what_is_left(worker, session.directory, session.todo, claims, Unwatched(), wait=wait):
                if finished.won:
                    made.add(finished.commit)
    finally:
        claims.close()
    return made
