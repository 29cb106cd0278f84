"""`finalize`: the manifest of a job whose shards were made by workers that know nothing of each other."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from extract.commits import committed_shards
from extract.completion import complete
from extract.errors import ShardsFailed
from extract.job import JobDirectory, read_job
from extract.record_sums import Totals
from extract.storage import Place

MAX_RANGES = 50


class ShardsMissing(ShardsFailed):
    """The workers have ended, or not all of them, and the shards do not cover the source."""

    template = (
        "{path}: {missing} of {shards} shards are missing: {which}. Start the workers again that should make them."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalized:
    """A complete job."""

    path: str
    job: str
    totals: Totals

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def finalize_output(root: Place) -> Finalized:
    """Check that the shards cover every row once, write the manifest, and remove what dead workers left.

    Raises:
        NotAJob: no output directory.
        ShardsMissing: with the list.
        NotTiled, BadRecord: the records do not fit together.
    """
    job = read_job(root)
    if job.num_shards is not None:
        done = committed_shards(job.directory.commits)
        missing = [shard for shard in range(job.num_shards) if shard not in done]
        if missing:
            raise ShardsMissing(path=root, missing=len(missing), shards=job.num_shards, which=ranges(missing))
    return Finalized(path=str(root), job=job.job_id, totals=complete(JobDirectory(root)))


def ranges(numbers: Iterable[int]) -> str:
    """`3, 7, 10-15`; cut after MAX_RANGES of them."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found[:MAX_RANGES])
    return shown if len(found) <= MAX_RANGES else f"{shown}, and more"
