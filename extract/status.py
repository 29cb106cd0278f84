"""How far a job is, from one listing and its commit records. Reads no data files and needs no engine.

In an object store the records of a finished job are taken from its manifest, which does not repeat how long they took.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from extract.job import read_job
from extract.manifest import each_record
from extract.record_sums import RecordSums, Totals
from extract.storage import Place
from extract.store import free_bytes, names_in

SAY_EVERY = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of an output directory.

    Attributes:
        num_rows: of the source; `None` for a stream that has not ended.
        complete: every shard is committed and the manifest is written.
        problem: what is missing, or `None`.
        num_temporary: files of shards that are being written, or were when a worker died.
        busy_seconds: by stage; `None` where the records that were read do not say.
    """

    path: str
    job: str
    complete: bool
    problem: str | None
    num_rows: int | None
    num_shards: int | None
    done: Totals
    num_temporary: int
    busy_seconds: dict[str, float] | None
    free_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def status(root: Place, say: Callable[[str], None] = lambda message: None) -> Status:
    """The state of an output directory.

    Args:
        root: the output directory.
        say: called with a line now and then, if there is much to read.

    Raises:
        NotAJob: it is none.
        BadRecord: a commit record does not parse.
    """
    job = read_job(root)
    sums, seconds = RecordSums(job), defaultdict[str, float](float)
    for done, commit in enumerate(each_record(job), 1):
        if done % SAY_EVERY == 0:
            say(f"{done:,} commit records read")
        sums.add(commit)
        for stage, spent in commit.seconds.items():
            seconds[stage] += spent
    problem = sums.problem
    if problem is None and not job.directory.manifest.is_file():
        problem = "the manifest is not written yet"
    busy = {stage: round(spent, 1) for stage, spent in seconds.items()}
    return Status(
        path=str(root),
        job=job.job_id,
        complete=problem is None,
        problem=problem,
        num_rows=job.num_rows,
        num_shards=job.num_shards,
        done=sums.totals,
        num_temporary=sum(1 for _ in names_in(job.directory.tmp)),
        busy_seconds=busy if busy or sums.totals.num_shards == 0 else None,
        free_bytes=free_bytes(root),
    )
