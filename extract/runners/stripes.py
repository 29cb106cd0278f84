"""One worker of many that know nothing of each other: it makes every N-th shard, waits for nobody, writes no manifest.

For array jobs: whatever starts the workers (Slurm, Kubernetes, a shell loop) needs no driver and no network between
them. `extract finalize` ends the job when all have ended. No estimate is made and no commit record is read, so that a
thousand workers may begin at once; the reserve of the disk is still kept before each shard.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

from extract.errors import SpecError
from extract.progress import Progress
from extract.runners.local import maker
from extract.runners.patience import USUAL_PATIENCE, Patience
from extract.runners.session import Made, Session, failure, opened
from extract.runners.summary import WorkerPart
from extract.runners.todo import Stripe
from extract.spec import JobSpec


class NoSuchStripe(SpecError):
    """An index that no worker of that many has."""

    template = "--worker-index is {index}, expected 0 to {last} with --worker-count {count}."


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeSummary:
    """What one worker of an array job did.

    Attributes:
        num_shards: of its stripe.
        num_shards_left: that another process holds, such as an earlier start of the same worker.
    """

    path: str
    job: str
    worker_index: int
    worker_count: int
    num_shards: int
    num_shards_made: int
    num_shards_before: int
    num_shards_left: int
    num_rows: int
    tokens_computed: int
    seconds: float
    tokens_per_s: float
    workers: tuple[WorkerPart, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_stripe(
    spec: JobSpec,
    index: int,
    count: int,
    *,
    progress: Progress | None = None,
    workers: int = 1,
    patience: Patience = USUAL_PATIENCE,
) -> StripeSummary:
    """Make the shards k with k % count == index that are not committed.

    Args:
        spec: the job, the same for all workers.
        index: of this worker, from 0.
        count: of all workers.
        progress: where to show how far it is.
        workers: processes that share this part.
        patience: with them.

    Raises:
        NoSuchStripe: `index` is not below `count`.
        StreamHasNoShards: the source is a stream of unknown length.
        ShardsFailed: the rest of the part is done, but some shards broke twice.
        ResumeRefused, OutOfSpace, Interrupted: as `run`.
    """
    if not 0 <= index < count:
        raise NoSuchStripe(index=index, last=count - 1, count=count)
    started = time.perf_counter()
    with opened(spec, progress, Stripe(index, count)) as session:
        plan, todo = session.plan, session.todo
        assert plan.num_shards is not None and todo.stripe is not None  # `opened` has asked
        shards = todo.stripe.shards(plan.num_shards)
        before = [shard for shard in shards if shard in todo.done]
        session.progress.expect(_rows(session, shards), _rows(session, before))
        made = Made() if todo.is_empty() else maker(workers, patience)(session)
        if todo.failed:
            raise failure(session, made)
        return StripeSummary(
            path=str(session.directory.root),
            job=plan.record.job_id,
            worker_index=index,
            worker_count=count,
            num_shards=len(shards),
            num_shards_made=made.num_shards,
            num_shards_before=len(before),
            num_shards_left=sum(1 for _ in todo.left()),
            num_rows=made.num_rows,
            tokens_computed=session.progress.tokens,
            seconds=round(time.perf_counter() - started, 3),
            tokens_per_s=round(session.progress.tokens_per_s, 1) if made.num_shards else 0.0,
            workers=made.parts,
        )


def _rows(session: Session, shards: range | list[int]) -> int:
    return sum(stop - start for start, stop in map(session.plan.rows_of, shards))
