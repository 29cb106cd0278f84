"""How far a job is, from one listing and its commit records. Reads no data files and needs no engine."""

from dataclasses import asdict, dataclass
from typing import Any

from extract.commits import read_commits
from extract.job import read_job
from extract.manifest import Totals, tiling_problem, totals
from extract.storage import Place
from extract.store import free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of an output directory.

    Attributes:
        num_rows: of the source; `None` for a stream that has not ended.
        complete: every shard is committed and the manifest is written.
        problem: what is missing, or `None`.
        num_temporary: files of shards that are being written, or were when a worker died.
    """

    path: str
    job: str
    complete: bool
    problem: str | None
    num_rows: int | None
    num_shards: int | None
    done: Totals
    num_temporary: int
    busy_seconds: dict[str, float]
    free_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def status(root: Place) -> Status:
    """The state of an output directory.

    Raises:
        NotAJob: it is none.
        BadRecord: a commit record does not parse.
    """
    job = read_job(root)
    commits = read_commits(job.directory.commits)
    problem = tiling_problem(job, commits)
    if problem is None and not job.directory.manifest.is_file():
        problem = "the manifest is not written yet"
    seconds: dict[str, float] = {}
    for commit in commits:
        for stage, spent in commit.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
    return Status(
        path=str(root),
        job=job.job_id,
        complete=problem is None,
        problem=problem,
        num_rows=job.num_rows,
        num_shards=job.num_shards,
        done=totals(commits),
        num_temporary=len(list(job.directory.tmp.iterdir())) if job.directory.tmp.is_dir() else 0,
        busy_seconds={stage: round(spent, 1) for stage, spent in seconds.items()},
        free_bytes=free_bytes(root),
    )
