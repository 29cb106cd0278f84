"""One run of a job from opening to summary; who makes the shards in the middle is a function that is given.

Nothing needed for correctness lives here, in a worker or in a queue: a shard is done when its commit record exists, so
every runner may be killed at any moment, and they may be mixed on one output directory.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from extract.commits import Commit, committed_shards
from extract.completion import complete
from extract.errors import ShardsFailed, SpecError
from extract.estimate import check_space, estimate
from extract.job import JobDirectory, prepare, read_job
from extract.jobs import Missing, OpenJob, open_job
from extract.planning import Plan
from extract.progress import Progress
from extract.record_sums import Totals
from extract.runners.interrupts import Interrupts, StopRequested, interruptible
from extract.runners.summary import SomeShardsFailed, Summary, WorkerPart, first_reasons
from extract.runners.todo import Stripe, Todo
from extract.spec import JobSpec
from extract.storage import locate


class StreamHasNoShards(SpecError):
    """Shards of a stream are handed out before anybody knows how many there are."""

    template = (
        "{what} needs a source of known length, this one is a stream. Give --limit ROWS, do without --streaming, "
        "or start the plain command several times."
    )


@dataclass(kw_only=True)
class Made:
    """What a runner did: the shards and rows whose records it won, and each worker's part where there are several."""

    num_shards: int = 0
    num_rows: int = 0
    parts: tuple[WorkerPart, ...] = ()
    error: ShardsFailed | None = None
    """Why shards are missing, where that needs other words than the usual ones."""

    def add(self, commit: Commit) -> None:
        """A record was won. It is not kept: there may be a million, and the manifest is made of what the disk holds."""
        self.num_shards += 1
        self.num_rows += commit.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A job, opened, with something left to do."""

    job: OpenJob
    directory: JobDirectory
    todo: Todo
    progress: Progress
    interrupts: Interrupts

    @property
    def plan(self) -> Plan:
        """Of the job."""
        return self.job.plan

    @contextmanager
    def making(self) -> Iterator[None]:
        """While shards are made: progress is shown, and the first signal asks for a clean stop."""
        with self.interrupts.gentle(), self.progress:
            yield


def run_job(spec: JobSpec, progress: Progress | None, make: Callable[[Session], Made]) -> Summary:
    """Open a job, let `make` make what is missing, and write the manifest.

    Raises:
        ResumeRefused: the output directory belongs to another job.
        OutOfSpace: the disk is full or below the reserve.
        Interrupted: SIGINT or SIGTERM.
        ShardsFailed: the rest is done, but some shards could not be made.
    """
    with opened(spec, progress) as session:
        return _run(session, make)


@contextmanager
def opened(spec: JobSpec, progress: Progress | None, stripe: Stripe | None = None) -> Iterator[Session]:
    """Open a job and its output directory, or a part of it; a signal becomes `StopRequested`."""
    if spec.output is None:
        raise Missing(what="output directory", key='output = "DIRECTORY"', option="-o DIRECTORY")
    directory = JobDirectory(locate(spec.output))
    if progress is None:
        progress = Progress(quiet=True)
    progress.say("reading the layout of the source")
    with interruptible() as interrupts:
        try:
            job = open_job(spec)
            try:
                prepare(directory.root, job.plan.record)
                if stripe is not None and job.plan.num_shards is None:
                    raise StreamHasNoShards(what="--worker-index")
                todo = Todo(job.plan, directory, stripe)
                yield Session(job=job, directory=directory, todo=todo, progress=progress, interrupts=interrupts)
            finally:
                job.source.close()
        except KeyboardInterrupt:
            raise StopRequested(committed=_count(directory), path=directory.root) from None


def _run(session: Session, make: Callable[[Session], Made]) -> Summary:
    started = time.perf_counter()
    directory, todo = session.directory, session.todo
    before = len(todo.done)
    if todo.is_empty():
        return _summary(session, complete(directory), before, Made(), started)
    check_room(session)
    made = make(session)
    if todo.failed:
        raise failure(session, made)
    return _summary(session, complete(directory), before, made, started)


def failure(session: Session, made: Made) -> ShardsFailed:
    """The error of a run with shards that could not be made."""
    failed = session.todo.failed
    return made.error or SomeShardsFailed(
        path=session.directory.root,
        failed=len(failed),
        shards=session.plan.num_shards or "all",
        details=first_reasons(failed),
    )


def check_room(session: Session) -> None:
    """Refuse a job that will not fit on the disk, and tell the progress how many rows there are.

    What is done counts by its rows, so no record is opened: a job may be resumed with a million of them.

    Raises:
        OutOfSpace: what is missing would leave less than the reserve.
    """
    plan, rows_before = session.plan, session.todo.rows_done()
    found = estimate(plan, session.job.source, session.job.tokenizer, session.directory.root)
    check_space(found, plan, session.directory.root, found.num_bytes * rows_before // max(1, plan.num_rows or 1))
    session.progress.expect(plan.num_rows, rows_before)


def _count(directory: JobDirectory) -> str:
    """How many shards are committed, such as 3 of 10, or 3 where nobody knows of how many."""
    committed = len(committed_shards(directory.commits))
    total = read_job(directory.root).num_shards if directory.job_file.is_file() else None
    return f"{committed:,}" if total is None else f"{committed:,} of {total:,}"


def _summary(session: Session, totals: Totals, before: int, made: Made, started: float) -> Summary:
    progress = session.progress
    return Summary(
        path=str(session.directory.root),
        job=session.plan.record.job_id,
        complete=True,
        num_shards_total=session.plan.num_shards or totals.num_shards,
        num_shards_made=made.num_shards,
        num_shards_before=before,
        totals=totals,
        tokens_computed=progress.tokens,
        seconds=round(time.perf_counter() - started, 3),
        tokens_per_s=round(progress.tokens_per_s, 1) if made.num_shards else 0.0,
        stage_shares={stage: round(share, 4) for stage, share in progress.shares().items()} if made.num_shards else {},
        workers=made.parts,
    )
