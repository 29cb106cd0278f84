"""The rows that a training view hands out: which shards, which rows of them, which columns, as what type.

Plain values, fixed when the view is made: a worker process gets a copy and opens its own files, and shards that are
finished later do not change an epoch under way. How many rows there are is read from the commit records, so no shard is
opened to know it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from extract.commits import Commit
from extract.errors import BadValue, SpecError
from extract.job import StoredJob
from extract.records import STATELESS, Int64
from extract.shards.shard_file import DamagedShard, ShardFile
from extract.spec import StatesSpec
from extract.training_views.columns import TrainingColumns, training_columns

StateType = Literal["stored", "float32", "bfloat16"]
"""Not float16: what is stored as something else may not fit it."""


class NotFinished(SpecError):
    """A shard is asked for that is not there (yet)."""

    template = "{path}: shard {shard} is not finished, or no shard of this job. Finished: {known}."


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """What is handed out.

    Attributes:
        job: whose output it is.
        commits: of the shards, in order.
        columns: what of each row.
        dtype: type of the states; "stored" is the stored one, and float32 for int8.
        with_states_only: leave out rows that have no states.
    """

    job: StoredJob
    commits: tuple[Commit, ...]
    columns: TrainingColumns
    dtype: StateType
    with_states_only: bool

    @property
    def spec(self) -> StatesSpec:
        """What was written."""
        return self.job.spec.states

    @cached_property
    def ends(self) -> Int64:
        """int64 [shards]: where the rows of each shard end, all shards in order."""
        return np.cumsum([self.num_rows_of(commit) for commit in self.commits], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """All of them."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def num_rows_of(self, commit: Commit) -> int:
        """Rows of a shard."""
        if not self.with_states_only:
            return commit.num_rows_out
        return sum(count for outcome, count in commit.outcomes.items() if outcome not in STATELESS)

    def open(self, commit: Commit, *, copy_on_write: bool = False) -> tuple[ShardFile, list[Int64]]:
        """A shard with what is needed of it, and the places of its rows in each record batch.

        Raises:
            DamagedShard: it does not open, or holds other rows than were committed.
        """
        file = ShardFile(self.job, commit, columns=self.columns.stored, copy_on_write=copy_on_write)
        places = file.places(with_states_only=self.with_states_only)
        found, expected = sum(map(len, places)), self.num_rows_of(commit)
        if found != expected:
            problem = f"{found:,} rows to train on found, {expected:,} were committed"
            raise DamagedShard(path=file.path, problem=problem, root=self.job.directory.root)
        return file, places


def training_rows(
    job: StoredJob,
    commits: Sequence[Commit],
    columns: Sequence[str] | None,
    *,
    dtype: StateType,
    with_states_only: bool,
    shards: Collection[int] | None,
) -> TrainingRows:
    """Choose rows and columns.

    Raises:
        NotInOutput: a column that is not there.
        NotFinished: a shard that is not there.
        BadValue: another type.
    """
    if dtype not in get_args(StateType):
        raise BadValue(
            where="torch_dataset", key="dtype", found=f'"{dtype}"', expected='"stored", "float32", "bfloat16"'
        )
    known = {commit.shard: commit for commit in commits}
    for shard in shards or ():
        if shard not in known:
            raise NotFinished(path=job.directory.root, shard=shard, known=f"{len(known):,} of {job.num_shards or '?'}")
    chosen = known if shards is None else {shard: known[shard] for shard in sorted(set(shards))}
    return TrainingRows(
        job=job,
        commits=tuple(chosen.values()),
        columns=training_columns(job.directory.root, job.schema, job.spec.states, columns),
        dtype=dtype,
        with_states_only=with_states_only,
    )
