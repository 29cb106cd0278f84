"""Run rows of an output again with an engine, into another output: chosen shards, row ranges or outcomes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from extract.derivation import Change
from extract.errors import SpecError
from extract.job import read_job
from extract.output import Output
from extract.records import Int64
from extract.selection import format_selection, parse_selection
from extract.spec import JobSpec
from extract.storage import Place


class NothingChosen(SpecError):
    """No row of the output is what was asked for."""

    template = "{path}: no row is {asked}, so there is nothing to do again."


def respec(
    root: Place,
    target: Place,
    *,
    shards: str | None = None,
    rows: str | None = None,
    outcomes: Sequence[str] = (),
    engine: str | None = None,
    change: Change | None = None,
) -> JobSpec:
    """The job that computes the chosen rows of `root` again and writes them to `target`.

    With the same engine, passes and shards are as large as they were: whole shards come out with the same states, bit
    for bit, and other choices of rows within the rounding of another pass.

    Args:
        root: an output, finished or not.
        target: another directory.
        shards: ranges such as "3,5-7".
        rows: ranges of source positions; with `shards` given too, a row must be in both.
        outcomes: only rows that ended so.
        engine: another engine than the one that made `root`.
        change: another stored type, kind or shard size.

    Raises:
        NothingChosen: no such row.
        BadSelection: a range that does not parse.
    """
    job = read_job(root)
    output = Output(job)
    wanted = None if shards is None else parse_selection(shards)
    numbers = [commit.shard for commit in output.shards]
    chosen = [_ended_so(output, n, outcomes) for n in numbers if wanted is None or wanted.index_of(n) is not None]
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *chosen]))
    if rows is not None:
        ranges = parse_selection(rows)
        group = np.searchsorted(ranges.stops, found, side="right")
        inside = group < len(ranges.starts)
        inside[inside] = found[inside] >= ranges.starts[group[inside]]
        found = found[inside]
    if not len(found):
        parts = [f"in shards {shards}" if shards else "", f"in rows {rows}" if rows else "", ", ".join(outcomes)]
        raise NothingChosen(path=root, asked=" and ".join(part for part in parts if part) or "there")
    change = change if change is not None else Change()
    states = replace(
        job.spec.states,
        kind=change.pool or output.kind,
        dtype=change.dtype or output.dtype,
        rows_per_shard=change.rows_per_shard or job.rows_per_shard,
        compression=change.compression or output.spec.compression,
        compression_level=change.compression_level or output.spec.compression_level,
    )
    spec = replace(
        job.spec,
        output=str(target),
        source=replace(job.spec.source, rows=format_selection(found), limit=None, streaming=False),
        states=states,
    )
    if engine is not None:  # which may have other limits
        run = replace(spec.run, max_tokens=None, max_sequences=None)
        spec = replace(spec, engine=engine, run=run)
    return spec


def _ended_so(output: Output, shard: int, outcomes: Sequence[str]) -> Int64:
    """Positions of a shard's rows that ended in one of `outcomes` (in any, if none are given)."""
    file = output.shard(shard)
    found = [np.zeros(0, np.int64)]
    for number in range(file.num_batches):
        batch = file.batch(number)
        if outcomes:
            found.append(batch.row[np.isin(batch.outcomes, outcomes)])
        else:
            found.append(batch.row)
    return np.concatenate(found)
