"""Outcomes by source file and lengths of rows, from the four narrow columns of the shards; states are not read.

Exact for as many shards as a person waits for, and from evenly spaced ones beyond that. Memory is bounded by the number
of source files and of bins, never by rows.
"""

from collections.abc import Sequence

import numpy as np

from extract.commits import Commit
from extract.errors import ExtractError
from extract.job import StoredJob
from extract.records import OUTCOMES, Int64
from extract.report_page.facts import FileOutcomes, Lengths, RowCounts
from extract.shards import schema as names
from extract.shards.shard_file import ShardFile

MAX_SHARDS = 4_000
MAX_ROWS = 50_000_000
MAX_FILES = 200
MAX_COUNTED_LENGTH = 1 << 20
"""Longer rows are counted as this long."""
MAX_BINS = 64


def count_rows(job: StoredJob, commits: Sequence[Commit], notes: list[str]) -> RowCounts:
    """Read `row`, `outcome` and the numbers of tokens of the committed shards.

    Args:
        job: the job.
        commits: records of shards that can be read.
        notes: what cannot be read is said here.
    """
    chosen = _spread(commits)
    files = source_files(job)
    starts = np.cumsum([0, *(rows for _, rows in files[:-1])])
    by_file = np.zeros((len(files), len(OUTCOMES)), np.int64)
    stored, original = np.zeros(1, np.int64), np.zeros(1, np.int64)
    not_counted = read = longest = 0
    for commit in chosen:
        try:
            for batch in ShardFile(job, commit).columns(*_columns(job)):
                outcome = batch.column(names.OUTCOME).indices.to_numpy().astype(np.int64)
                file = np.searchsorted(starts, batch.column(names.ROW).to_numpy(), side="right") - 1
                flat = np.bincount(file * len(OUTCOMES) + outcome, minlength=by_file.size)
                by_file += flat.reshape(by_file.shape)
                stored = _added(stored, batch.column(names.NUM_TOKENS).to_numpy())
                before = batch.column(names.NUM_TOKENS_ORIGINAL)
                if job.chunked:  # a whole row counts once
                    before = before.filter(np.asarray(batch.column(names.CHUNK)) == 0)
                not_counted += before.null_count
                counted = before.drop_null().to_numpy()
                longest = max(longest, int(counted.max(initial=0)))
                original = _added(original, counted)
            read += 1
        except ExtractError as error:
            notes.append(str(error))
    return RowCounts(
        files=_most_troubled([name for name, _ in files], by_file),
        num_files=len(files),
        lengths=_lengths(stored, original, longest, not_counted, job.spec.text.max_input_tokens),
        num_shards_read=read,
        num_shards=len(commits),
    )


def source_files(job: StoredJob) -> list[tuple[str, int]]:
    """Name and rows of each file of the source, in order; one entry for a source that is not made of files."""
    entries = job.fingerprint.get("files") or ()
    files = [
        (str(entry["name"]), entry.get("rows")) for entry in entries if isinstance(entry, dict) and "name" in entry
    ]
    known = [(name, int(rows)) for name, rows in files if rows is not None]
    if not known or len(known) < len(files):
        return [(", ".join(job.spec.source.paths), job.num_rows or 0)]
    return known


def _columns(job: StoredJob) -> tuple[str, ...]:
    chunk = (names.CHUNK,) if job.chunked else ()
    return (names.ROW, *chunk, names.OUTCOME, names.NUM_TOKENS, names.NUM_TOKENS_ORIGINAL)


def _spread(commits: Sequence[Commit]) -> Sequence[Commit]:
    """All records, or evenly spaced ones of very many."""
    rows = sum(commit.num_rows_out for commit in commits)
    kept = min(MAX_SHARDS, len(commits), max(1, len(commits) * MAX_ROWS // max(1, rows)))
    return [commits[place * len(commits) // kept] for place in range(kept)]


def _added(counts: Int64, lengths: np.ndarray) -> Int64:
    """Counts by length, grown as needed."""
    more = np.bincount(np.minimum(lengths, MAX_COUNTED_LENGTH), minlength=len(counts))
    more[: len(counts)] += counts
    return more


def _most_troubled(files: list[str], by_file: Int64) -> tuple[FileOutcomes, ...]:
    rows = by_file.sum(axis=1)
    seen = np.flatnonzero(rows)
    order = seen[np.argsort(-(1 - by_file[seen, 0] / rows[seen]), kind="stable")][:MAX_FILES]
    return tuple(
        FileOutcomes(
            name=files[index],
            num_rows=int(rows[index]),
            outcomes={str(name): int(count) for name, count in zip(OUTCOMES, by_file[index], strict=True) if count},
        )
        for index in order
    )


def _lengths(stored: Int64, original: Int64, longest: int, not_counted: int, limit: int | None) -> Lengths | None:
    """Counts by number of tokens as bins of equal width, the last one open: a few giants must not squeeze the rest."""
    if not stored.sum():
        return None
    usual = max(limit or 0, len(stored) - 1, _quantile(original, 0.98))
    width = max(1, -(-(usual + 1) // MAX_BINS))
    bins = usual // width + 1
    binned = []
    for counts in (stored, original):
        places = np.minimum(np.arange(len(counts)) // width, bins - 1)
        binned.append(tuple(int(count) for count in np.bincount(places, counts, minlength=bins)))
    return Lengths(
        starts=tuple(range(0, bins * width, width)),
        width=width,
        stored=binned[0],
        original=binned[1],
        limit=limit,
        longest_original=longest,
        median_stored=_quantile(stored, 0.5),
        median_original=_quantile(original, 0.5),
        num_not_counted=not_counted,
    )


def _quantile(counts: Int64, share: float) -> int:
    """The least length that at least this share of the rows do not exceed."""
    total = np.cumsum(counts)
    return int(np.searchsorted(total, share * total[-1])) if total[-1] else 0
