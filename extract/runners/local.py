"""Run a job in this process: plan, load the engine, make every shard that is not committed, write the manifest.

Nothing needed for correctness lives here. A second process on the same directory shares the work through claims; a kill
at any moment costs the shard in flight.
"""

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from extract.claims import Claims
from extract.commits import Commit, commit_path, committed_shards, read_commit, read_commits
from extract.completion import complete
from extract.engine.contract import Runtime
from extract.errors import Interrupted, ShardsFailed
from extract.estimate import check_space, estimate
from extract.job import JobDirectory, prepare, read_job
from extract.jobs import Missing, OpenJob, open_job
from extract.manifest import Totals, totals
from extract.pipeline import ShardBroke, Worker, run_stages
from extract.planning import Plan
from extract.progress import Progress
from extract.publishing import Finished, remove_leftovers, written
from extract.spec import JobSpec

MAX_ATTEMPTS = 2
POLL_S = 0.5


class StopRequested(Interrupted):
    """A signal asked the run to stop."""

    template = (
        "interrupted: {committed} shards are committed in {path}; what was in flight was dropped. "
        "Run the same command again to go on."
    )


class SomeShardsFailed(ShardsFailed):
    """Shards that broke twice."""

    template = (
        "{path}: {failed} of {shards} shards failed twice and are missing: {details}. Run again to try them again."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did, and what the output holds now."""

    path: str
    job: str
    complete: bool
    num_shards_total: int | None
    num_shards_made: int
    num_shards_before: int
    totals: Totals
    tokens_computed: int
    seconds: float
    tokens_per_s: float
    stage_shares: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run(spec: JobSpec, *, progress: Progress | None = None, runtime: Runtime | None = None) -> Summary:
    """Run a job, or go on with it.

    Args:
        spec: the job; `engine` and `output` must be set.
        progress: where to show how far it is; `None` shows nothing.
        runtime: an engine that is loaded already; `None` loads the one that `spec` names, if there is work to do.

    Raises:
        ResumeRefused: the output directory belongs to another job.
        OutOfSpace: the disk is full or below the reserve.
        Interrupted: SIGINT or SIGTERM.
        ShardsFailed: the rest is done, but some shards broke twice.
    """
    if spec.output is None:
        raise Missing(what="output directory", key='output = "DIRECTORY"', option="-o DIRECTORY")
    directory = JobDirectory(Path(spec.output))
    if progress is None:
        progress = Progress(quiet=True)
    progress.say("reading the layout of the source")
    with _interruptible() as interrupts:
        try:
            job = open_job(spec)
            try:
                prepare(directory.root, job.plan.record)
                return run_in(job, directory, progress, runtime, interrupts)
            finally:
                job.source.close()
        except KeyboardInterrupt:
            raise StopRequested(committed=_count(directory), path=directory.root) from None


def run_in(
    job: OpenJob,
    directory: JobDirectory,
    progress: Progress,
    runtime: Runtime | None,
    interrupts: "Interrupts",
) -> Summary:
    """Make the shards of an opened job that `directory` lacks."""
    started = time.perf_counter()
    plan = job.plan
    known = read_commits(directory.commits)
    done = {commit.shard for commit in known}
    before = len(done)
    todo = _Todo(plan, directory, done)
    if todo.is_empty():
        return _summary(directory, plan, complete(directory, known), before, 0, progress, started)
    found = estimate(plan, job.source, job.tokenizer, directory.root)
    check_space(found, plan, directory.root, sum(commit.num_bytes for commit in known))
    if runtime is None:
        from extract.cpu.implementations import COMPILING, compiles_first
        from extract.engine.runtimes import load_runtime

        progress.say(f"loading {job.engine}")
        if plan.engine.runtime.decoder == "own" and compiles_first():
            progress.say(COMPILING)
        runtime = load_runtime(job.engine, threads=plan.spec.run.threads, share=plan.spec.run.share)
    rows_before = sum(stop - start for start, stop in map(plan.rows_of, done)) if plan.num_rows is not None else 0
    progress.expect(plan.num_rows, rows_before)
    claims = Claims(directory.claims)
    worker = Worker(
        plan=plan, source=job.source, tokenizer=job.tokenizer, runtime=runtime, progress=progress, stop=interrupts.stop
    )
    made = 0
    try:
        with interrupts.gentle(), progress:
            for finished in _finished(worker, directory, todo, claims):
                made += finished.won
    finally:
        claims.close()
    if todo.failed:
        details = "; ".join(f"shard {shard}: {reason}" for shard, reason in sorted(todo.failed.items())[:5])
        raise SomeShardsFailed(
            path=directory.root, failed=len(todo.failed), shards=plan.num_shards or "all", details=details
        )
    return _summary(directory, plan, complete(directory, known), before, made, progress, started)


class _Todo:
    """Which shards are left, in order; for a stream, until a commit says that the source ended."""

    def __init__(self, plan: Plan, directory: JobDirectory, done: set[int]) -> None:
        self.plan, self.directory, self.done = plan, directory, done
        self.failed: dict[int, str] = {}
        self.attempts: dict[int, int] = {}
        self.last: int | None = None
        if plan.num_shards is not None:
            self.last = plan.num_shards - 1
        else:
            for shard in sorted(done, reverse=True)[:1]:
                self.note(read_commit(commit_path(directory.commits, shard)))

    def note(self, commit: Commit) -> None:
        """A shard is committed."""
        self.done.add(commit.shard)
        if self.plan.num_shards is None:
            if commit.last:
                self.last = commit.shard
            elif self.last is not None and commit.shard >= self.last:  # it is full: the end may be right behind it
                self.last = None

    def note_end_before(self, shard: int) -> None:
        """A stream has no row of this shard; the shards before it will tell whether it is needed to say so."""
        self.last = shard - 1 if self.last is None else min(self.last, shard - 1)

    def left(self) -> Iterator[int]:
        """Shards neither done nor failed."""
        shard = 0
        while self.last is None or shard <= self.last:
            if shard not in self.done and shard not in self.failed:
                yield shard
            shard += 1

    def is_empty(self) -> bool:
        """Nothing is left to do."""
        return next(self.left(), None) is None

    def broke(self, shard: int, reason: str) -> None:
        """A shard broke; after MAX_ATTEMPTS it is left out."""
        self.attempts[shard] = self.attempts.get(shard, 0) + 1
        if self.attempts[shard] >= MAX_ATTEMPTS:
            self.failed[shard] = reason


def _finished(worker: Worker, directory: JobDirectory, todo: _Todo, claims: Claims) -> Iterator[Finished]:
    """Commits as they come, over as many passes through what is left as it takes."""
    while not todo.is_empty():
        claimed = _Claimed(directory, todo, claims, worker.stop)
        try:
            for finished in run_stages(worker, claimed, lambda items: written(worker, directory, items)):
                claims.release(finished.commit.shard)
                if finished.beyond:
                    todo.note_end_before(finished.commit.shard)
                    continue
                todo.note(finished.commit)
                worker.progress.wrote(finished.commit.num_bytes)
                yield finished
        except ShardBroke as error:
            claims.release(error.shard)
            todo.broke(error.shard, error.reason)
            worker.progress.say(f"shard {error.shard} broke: {error.reason}")
            continue
        if not claimed.any and not todo.is_empty() and worker.stop.wait(POLL_S):  # others hold all that is left
            raise KeyboardInterrupt


class _Claimed(Iterable[int]):
    """Shards that this process may work on now; those of others are passed over, those they committed are noted."""

    def __init__(self, directory: JobDirectory, todo: _Todo, claims: Claims, stop: threading.Event) -> None:
        self._directory, self._todo, self._claims, self._stop = directory, todo, claims, stop
        self.any = False

    def __iter__(self) -> Iterator[int]:
        for shard in self._todo.left():
            if self._stop.is_set():
                return
            if not self._claims.claim(shard):
                continue
            path = commit_path(self._directory.commits, shard)
            if path.exists():
                self._todo.note(read_commit(path))
                self._claims.release(shard)
                continue
            if self._claims.supported:
                remove_leftovers(self._directory, shard)
            self.any = True
            yield shard


class Interrupts:
    """What SIGINT and SIGTERM do: while shards are made, the first one asks for a clean stop; else they break off."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._gentle = False

    @contextmanager
    def gentle(self) -> Iterator[None]:
        """While shards are made."""
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.stop.is_set() or not self._gentle:
            raise KeyboardInterrupt
        self.stop.set()


@contextmanager
def _interruptible() -> Iterator[Interrupts]:
    """Both signals go to `Interrupts`, where this is the main thread; elsewhere nothing can be caught."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {number: signal.signal(number, interrupts.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _count(directory: JobDirectory) -> str:
    """How many shards are committed, such as 3 of 10, or 3 where nobody knows of how many."""
    committed = len(committed_shards(directory.commits))
    total = read_job(directory.root).num_shards if directory.job_file.is_file() else None
    return f"{committed:,}" if total is None else f"{committed:,} of {total:,}"


def _summary(
    directory: JobDirectory,
    plan: Plan,
    commits: list[Commit],
    before: int,
    made: int,
    progress: Progress,
    started: float,
) -> Summary:
    return Summary(
        path=str(directory.root),
        job=plan.record.job_id,
        complete=True,
        num_shards_total=plan.num_shards or len(commits),
        num_shards_made=made,
        num_shards_before=before,
        totals=totals(commits),
        tokens_computed=progress.tokens,
        seconds=round(time.perf_counter() - started, 3),
        tokens_per_s=round(progress.tokens_per_s, 1) if made else 0.0,
        stage_shares={stage: round(share, 4) for stage, share in progress.shares().items()} if made else {},
    )
