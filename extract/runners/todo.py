"""Which shards of a job are left, in order; for a stream, until a commit says that the source ended."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from extract.commits import Commit, commit_path, committed_among, committed_shards, read_commit
from extract.job import JobDirectory
from extract.planning import Plan


@dataclass(frozen=True, slots=True)
class Stripe:
    """The part of one worker of many that know nothing of each other: shards `index`, `index + count`, and so on."""

    index: int
    count: int

    def shards(self, num_shards: int) -> range:
        """Its shards."""
        return range(self.index, num_shards, self.count)


MAX_ATTEMPTS = 2
"""Of a shard that raises: the second failure is final for this run."""
FEW = 32
"""One worker of so many asks for its own shards' records: that costs less than a listing of everybody's."""


class Todo:
    """Shards neither done, nor failed, nor left to somebody else.

    Attributes:
        done: committed, by whomever, as far as this process cares.
        failed: broke too often in this run, with the last reason.
        left_out: not for this process to touch: another one tries them alone.
        stripe: where it is given, other shards are nobody's business here. Needs a source of known length.
    """

    def __init__(self, plan: Plan, directory: JobDirectory, stripe: Stripe | None = None) -> None:
        self.plan, self.stripe = plan, stripe
        self.done = _done(plan, directory, stripe)
        self.failed: dict[int, str] = {}
        self.left_out: frozenset[int] = frozenset()
        self._attempts: dict[int, int] = {}
        self._last: int | None = None
        if plan.num_shards is not None:
            self._last = plan.num_shards - 1
        else:
            if self.done:
                self.note(read_commit(commit_path(directory.commits, max(self.done))))

    def note(self, commit: Commit) -> None:
        """A shard is committed."""
        self.done.add(commit.shard)
        if self.plan.num_shards is None:
            if commit.last:
                self._last = commit.shard
            elif self._last is not None and commit.shard >= self._last:  # it is full: the end may be right behind it
                self._last = None

    def note_end_before(self, shard: int) -> None:
        """A stream has no row of this shard; the shards before it will tell whether it is needed to say so."""
        self._last = shard - 1 if self._last is None else min(self._last, shard - 1)

    def rows_done(self) -> int:
        """Source rows of the shards that are done; of a stream, where nobody knows yet, none."""
        if self.plan.num_rows is None:
            return 0
        return sum(max(0, stop - start) for start, stop in map(self.plan.rows_of, self.done))

    def left(self, among: Iterable[int] | None = None) -> Iterator[int]:
        """Shards that are still to be made; `among` these, if they are given."""
        for shard in self._all() if among is None else among:
            if shard not in self.done and shard not in self.failed and shard not in self.left_out:
                yield shard

    def is_empty(self) -> bool:
        """Nothing is left to do."""
        return next(self.left(), None) is None

    def broke(self, shard: int, reason: str, *, most: int = MAX_ATTEMPTS) -> bool:
        """A shard broke; after `most` times it is left out, and this says True."""
        self._attempts[shard] = self._attempts.get(shard, 0) + 1
        if self._attempts[shard] < most:
            return False
        self.failed[shard] = reason
        return True

    def _all(self) -> Iterator[int]:
        if self.stripe is not None:
            assert self.plan.num_shards is not None  # asked when the run began
            yield from self.stripe.shards(self.plan.num_shards)
            return
        shard = 0
        while self._last is None or shard <= self._last:
            yield shard
            shard += 1


def _done(plan: Plan, directory: JobDirectory, stripe: Stripe | None) -> set[int]:
    """The shards that are committed, at the price of one listing, or of a request for each of the few that matter."""
    if stripe is None or stripe.count < FEW or plan.num_shards is None:
        return committed_shards(directory.commits)
    return committed_among(directory.commits, stripe.shards(plan.num_shards))
