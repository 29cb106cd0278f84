"""A worker on a Ray cluster: one engine on one device, one shard at a time. Knows nothing of other workers.

Ray builds it and calls it; this module needs no Ray. `load` does what may fail, so that the driver knows on which node
it failed; `counts` and `stop` are called beside `make`, from another thread.
"""

import os
import platform
import threading
from dataclasses import dataclass, field, replace

from extract.commits import Commit, commit_path, read_commit
from extract.errors import ExtractError
from extract.job import JobDirectory, check_same, read_job
from extract.jobs import open_job
from extract.pipeline import ShardBroke, Worker
from extract.progress import Counts, Progress
from extract.runners.loading import load_engine
from extract.runners.shard_loop import make_shards
from extract.spec import JobSpec
from extract.storage import locate


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is in memory."""

    host: str
    device: str
    engine: str
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt at a shard ended: a record, or a reason.

    Attributes:
        won: this attempt's record is the one that counts.
        error: one of ours, which says that this worker cannot go on; `reason` alone: something unforeseen.
        counts: what the worker has done until now.
    """

    commit: Commit | None = None
    won: bool = False
    reason: str | None = None
    error: ExtractError | None = None
    counts: Counts = field(default_factory=Counts)


class ShardMaker:
    """See the module."""

    def __init__(self, spec: JobSpec, threads: int | None) -> None:
        self._spec, self._threads = spec, threads
        if threads is not None:
            os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # of the tokenizer
        self._stop = threading.Event()
        self._progress = Progress(quiet=True)
        self._worker: Worker | None = None

    def load(self) -> Loaded | ExtractError:
        """Open the job and load the engine; what is wrong here is an answer, not an exception."""
        assert self._spec.output is not None  # the driver has opened it
        try:
            job = open_job(self._spec)
            self._directory = JobDirectory(locate(self._spec.output))
            check_same(read_job(self._directory.root), job.plan.record)  # which also tells that this node sees it
            loaded = load_engine(job, lambda message: None, threads=self._threads)
        except ExtractError as error:
            return error
        self._worker = Worker(
            plan=loaded.plan,
            source=job.source,
            tokenizer=job.tokenizer,
            runtime=loaded.runtime,
            progress=self._progress,
            stop=self._stop,
        )
        return Loaded(platform.node(), loaded.plan.engine.device.name, str(loaded.path), loaded.runtime.arithmetic)

    def make(self, shard: int) -> Outcome:
        """Make a shard, unless its record is there."""
        return replace(self._made(shard), counts=self._progress.counts())

    def _made(self, shard: int) -> Outcome:
        worker = self._worker
        assert worker is not None  # the driver has seen it loaded
        record = commit_path(self._directory.commits, shard)
        try:
            if record.exists():
                return Outcome(commit=read_commit(record))
            for finished in make_shards(worker, self._directory, [shard]):
                self._progress.wrote(finished.commit.num_bytes)
                return Outcome(commit=finished.commit, won=finished.won)
        except ShardBroke as error:
            return Outcome(reason=error.reason)
        except ExtractError as error:
            return Outcome(reason=str(error), error=error)
        except KeyboardInterrupt:
            pass
        return Outcome(reason="asked to stop")

    def counts(self) -> Counts:
        """What it has done; an answer is a sign of life."""
        return self._progress.counts()

    def stop(self) -> None:
        """Drop what is in flight."""
        self._stop.set()
