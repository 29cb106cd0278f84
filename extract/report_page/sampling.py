"""Rows with their states from all over an output, by whole record batches: how many are read is bounded beforehand.

A batch is the least that a compressed file gives, so rows come from evenly spaced batches of evenly spaced shards, one
drawn from each of equal parts of a batch: even distances alone would meet only the same rows of data that repeats. A
small output is read whole. The same output gives the same sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from extract.commits import Commit
from extract.errors import ExtractError
from extract.job import StoredJob
from extract.records import Int32, Int64
from extract.report_page.state_figures import StateTally
from extract.shards import schema as names
from extract.shards.shard_file import ShardFile
from extract.shards.values import Float32, value_type
from extract.shards.views import BatchView

MAX_BATCHES = 128
SLICE_VALUES = 1 << 22
"""Values decoded at once: 16 MiB of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStates:
    """N sampled rows that have states, in order.

    Attributes:
        row, chunk, num_tokens: [N].
        outcomes, ids: [N]; the job's id column as text, or `None`.
        input_ids: token ids of each row, or `None` where they are not stored.
        carried_text: the input column, where it was carried to the output.
        states: float32 [N, H], the last state of each row, or its only one.
        tally: figures over all states of these rows.
    """

    row: Int64
    chunk: Int64
    num_tokens: Int64
    outcomes: list[str]
    ids: list[str | None]
    input_ids: list[Int32 | None]
    carried_text: list[str | None] | None
    states: Float32
    tally: StateTally
    num_batches: int
    num_shards: int


def sample_rows(
    job: StoredJob, commits: Sequence[Commit], num_rows: int, width: int, notes: list[str]
) -> SampledStates | None:
    """Read about `num_rows` rows; `None` if no row that was looked at has a state.

    Args:
        job: the job.
        commits: records of shards that can be read.
        num_rows: the most rows.
        width: H.
        notes: what cannot be read is said here.
    """
    collected = _Collected(job, width)
    batches = list(_chosen_batches(job, commits, num_rows, notes))
    shards = set()
    for done, (commit, number) in enumerate(batches):
        left = num_rows - collected.num_rows
        quota = -(-left // (len(batches) - done))
        try:
            draw = np.random.default_rng([commit.shard, number])
            if collected.take(ShardFile(job, commit).batch(number), quota, draw):
                shards.add(commit.shard)
        except ExtractError as error:
            notes.append(str(error))
    return collected.done(len(batches), len(shards)) if collected.num_rows else None


def _chosen_batches(
    job: StoredJob, commits: Sequence[Commit], num_rows: int, notes: list[str]
) -> Iterator[tuple[Commit, int]]:
    """Evenly spaced record batches; all of them where the output has no more rows than are asked for."""
    filled = [commit for commit in commits if commit.num_rows_out]
    whole = sum(commit.num_rows_out for commit in filled) <= num_rows
    kept = len(filled) if whole else min(MAX_BATCHES, len(filled))
    each = MAX_BATCHES // max(1, kept)
    for place in range(kept):
        commit = filled[place * len(filled) // kept]
        try:
            batches = ShardFile(job, commit).num_batches
        except ExtractError as error:
            notes.append(str(error))
            continue
        chosen = batches if whole else min(batches, each)
        # batches of a shard are counted from another place in each, or large shards would only show their first rows
        shift = (place * batches // kept) % max(1, batches // max(1, chosen)) if chosen < batches else 0
        for part in range(chosen):
            yield commit, part * batches // chosen + shift


class _Collected:
    """Sampled rows as they come in."""

    def __init__(self, job: StoredJob, width: int) -> None:
        self._job = job
        self._spec = job.spec.states
        columns = names.state_columns(self._spec)
        self._states_columns = {*columns, *(name + names.SCALE_SUFFIX for name in columns)}
        self._tally = StateTally(width)
        self._numbers: list[Int64] = [np.zeros((0, 3), np.int64)]
        self._outcomes: list[str] = []
        self._ids: list[str | None] = []
        self._input_ids: list[Int32 | None] = []
        self._texts: list[str | None] | None = [] if job.spec.source.column in job.spec.source.carry else None
        self._states: list[Float32] = [np.zeros((0, width), np.float32)]
        self.num_rows = 0

    def take(self, batch: BatchView, quota: int, draw: np.random.Generator) -> int:
        """Take at most `quota` rows of a batch, one from each of equal parts; says how many."""
        spans = batch.state_spans
        lengths = spans.stops - spans.starts
        with_states = np.flatnonzero(lengths)
        count = min(quota, len(with_states))
        if count <= 0:
            return 0
        edges = np.arange(count + 1) * len(with_states) // count
        places = with_states[draw.integers(edges[:-1], edges[1:])]
        narrow = [name for name in batch.arrow.schema.names if name not in self._states_columns]
        arrow = batch.arrow.select(narrow).take(places)
        chunk = np.asarray(arrow.column(names.CHUNK)) if self._job.chunked else np.zeros(count, np.int64)
        self._numbers.append(np.stack([batch.row[places], chunk, batch.num_tokens[places]], axis=1).astype(np.int64))
        self._outcomes += batch.outcomes[places].tolist()
        has_id = self._job.spec.source.id_column is not None
        self._ids += [str(value) for value in arrow.column(names.ID).to_pylist()] if has_id else [None] * count
        self._input_ids += [
            batch.input_ids[batch.id_spans[place]] if self._spec.input_ids else None for place in places.tolist()
        ]
        if self._texts is not None:
            values = arrow.column(self._job.spec.source.column).to_pylist()
            self._texts += [value if isinstance(value, str) else None for value in values]
        for part in _slices(lengths[places], batch.values.shape[1]):
            self._take_states(batch, spans.starts[places[part]], lengths[places[part]])
        self.num_rows += count
        return count

    def _take_states(self, batch: BatchView, starts: Int64, lengths: Int64) -> None:
        """Decode all states of some rows, count them, and keep the last one of each row."""
        ends = np.cumsum(lengths)
        flat = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        scales = batch.scales
        stored = value_type(self._spec.dtype)
        states = stored.decode(batch.values[flat], None if scales is None else scales[flat])
        self._tally.add(states)
        self._states.append(states[ends - 1].copy())

    def done(self, num_batches: int, num_shards: int) -> SampledStates:
        numbers = np.concatenate(self._numbers)
        return SampledStates(
            row=numbers[:, 0],
            chunk=numbers[:, 1],
            num_tokens=numbers[:, 2],
            outcomes=self._outcomes,
            ids=self._ids,
            input_ids=self._input_ids,
            carried_text=self._texts,
            states=np.concatenate(self._states),
            tally=self._tally,
            num_batches=num_batches,
            num_shards=num_shards,
        )


def _slices(lengths: Int64, width: int) -> Iterator[slice]:
    """Runs of rows with about `SLICE_VALUES` values together, at least one row each."""
    group = np.cumsum(lengths) * width // SLICE_VALUES
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(lengths)]
    for start, stop in pairwise(cuts):
        yield slice(start, stop)
