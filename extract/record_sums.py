"""Sums over commit records, and whether they cover the source: added up as records pass by, none of which is kept.

Records come in the order of shards. What they miss is said once all have passed, by the first thing that is wrong.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from extract.commits import Commit
from extract.job import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over commit records."""

    num_shards: int
    num_rows: int
    num_rows_out: int
    num_tokens: int
    num_tokens_original: int
    num_bytes: int
    outcomes: dict[str, int]
    doubled_bos: int
    overflowed: int


class RecordSums:
    """What the records of a job add up to."""

    def __init__(self, job: JobRecord, commits: Iterable[Commit] = ()) -> None:
        self._job = job
        self._num_shards = self._num_rows = self._num_rows_out = self._num_tokens = self._num_tokens_original = 0
        self._num_bytes = self._doubled_bos = self._overflowed = 0
        self._outcomes: Counter[str] = Counter()
        self._next_row = 0
        self._last: Commit | None = None
        self._problem: str | None = None
        for commit in commits:
            self.add(commit)

    def add(self, commit: Commit) -> None:
        """The next record."""
        if self._problem is None:
            self._problem = self._misplaced(commit)
        self._num_shards += 1
        self._num_rows += commit.num_rows
        self._num_rows_out += commit.num_rows_out
        self._num_tokens += commit.num_tokens
        self._num_tokens_original += commit.num_tokens_original
        self._num_bytes += commit.num_bytes
        self._doubled_bos += commit.doubled_bos
        self._overflowed += commit.overflowed
        for outcome, count in commit.outcomes.items():
            self._outcomes[outcome] += count
        self._next_row, self._last = commit.stop_row, commit

    @property
    def totals(self) -> Totals:
        """Sums until now."""
        return Totals(
            num_shards=self._num_shards,
            num_rows=self._num_rows,
            num_rows_out=self._num_rows_out,
            num_tokens=self._num_tokens,
            num_tokens_original=self._num_tokens_original,
            num_bytes=self._num_bytes,
            outcomes=dict(sorted(self._outcomes.items())),
            doubled_bos=self._doubled_bos,
            overflowed=self._overflowed,
        )

    @property
    def problem(self) -> str | None:
        """What keeps these records, if there are no more, from covering every source row exactly once."""
        if self._problem is not None:
            return self._problem
        job = self._job
        if self._last is None or (job.num_shards is not None and self._num_shards < job.num_shards):
            return f"shard {self._num_shards} is missing"
        if job.num_rows is not None and self._next_row != job.num_rows:
            return f"the shards cover {self._next_row:,} rows, the source had {job.num_rows:,}"
        if not self._last.last:
            return f"shard {self._num_shards} is missing (the source did not end in shard {self._last.shard})"
        return None

    def _misplaced(self, commit: Commit) -> str | None:
        number = self._num_shards
        if commit.shard != number:
            return f"shard {number} is missing"
        if commit.first_row != self._next_row:
            return f"shard {number} begins at row {commit.first_row:,}, {self._next_row:,} expected"
        if sum(commit.outcomes.values()) != commit.num_rows_out:
            return f"shard {number} has {commit.num_rows_out:,} rows, its outcomes add up to another number"
        return None
