"""A worker on a Ray cluster: one engine on one device, the shards that it is handed. Knows nothing of other workers.

Ray builds it and calls it; this module needs no Ray. `load` does what may fail, so that the driver knows on which node
it failed. A call of `make` is out until its shard is done; a second one beside it is the next shard, which one loop
over both reads while the first is computed. `counts` and `stop` are called beside them, from another thread.
"""

import os
import platform
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from extract.commits import Commit, commit_path, read_commit
from extract.errors import ExtractError
from extract.job import JobDirectory, check_same, read_job
from extract.jobs import open_job
from extract.pipeline import ShardBroke, Worker
from extract.progress import Counts, Progress
from extract.runners.loading import load_engine
from extract.runners.outstanding import Outstanding
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
        self._outstanding: Outstanding[Outcome] = Outstanding()

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
        worker = Worker(
            plan=loaded.plan,
            source=job.source,
            tokenizer=job.tokenizer,
            runtime=loaded.runtime,
            progress=self._progress,
            stop=self._stop,
        )
        threading.Thread(target=self._keep_making, args=(worker,), name="extract-shards", daemon=True).start()
        return Loaded(platform.node(), loaded.plan.engine.device.name, str(loaded.path), loaded.runtime.arithmetic)

    def make(self, shard: int) -> Outcome:
        """Make a shard, unless its record is there; after those that came before it."""
        return replace(self._outstanding.wait_for(shard), counts=self._progress.counts())

    def counts(self) -> Counts:
        """What it has done; an answer is a sign of life."""
        return self._progress.counts()

    def stop(self) -> None:
        """Drop what is in flight."""
        self._stop.set()
        self._outstanding.close(STOPPED)

    def _keep_making(self, worker: Worker) -> None:
        """The shard loop; a shard that breaks it costs the others nothing but what was read ahead."""
        outstanding = self._outstanding
        while outstanding.wait_for_work():
            handed = outstanding.new_pass()
            try:
                for finished in make_shards(worker, self._directory, self._not_done(handed), leave=handed.leave):
                    self._progress.wrote(finished.commit.num_bytes)
                    outstanding.answer(finished.commit.shard, Outcome(commit=finished.commit, won=finished.won))
            except ShardBroke as error:
                outstanding.answer(error.shard, Outcome(reason=error.reason))
            except ExtractError as error:  # it does not say which shard it is about
                outstanding.answer_all(Outcome(reason=str(error), error=error))
            except KeyboardInterrupt:
                break
            except Exception as error:
                outstanding.answer_all(Outcome(reason=f"{type(error).__name__}: {error}"))
        outstanding.answer_all(STOPPED)

    def _not_done(self, shards: Iterator[int]) -> Iterator[int]:
        """Those that nobody has committed until now: a shard may have waited here for long."""
        for shard in shards:
            record = commit_path(self._directory.commits, shard)
            if record.exists():
                self._outstanding.answer(shard, Outcome(commit=read_commit(record)))
            else:
                yield shard


STOPPED = Outcome(reason="asked to stop")
