"""Computed windows -> one committed shard: encode, compress, hash, publish under the content's name, record once."""

import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extract.commits import Commit, commit_path, read_commit, shard_name, write_commit
from extract.errors import OutOfSpace
from extract.job import JobDirectory
from extract.pipeline import Computed, Worker, blaming
from extract.progress import STAGES
from extract.shards.sink import ShardFacts, ShardWriter
from extract.store import clear_write_errors, free_bytes, publish


class ReserveReached(OutOfSpace):
    """The disk holds less than the reserve that the job leaves free."""

    template = (
        "{path}: {free:,} bytes free, less than the reserve of {reserve:,}. What is committed stays: make room "
        "(or lower states.reserve_bytes), then run the same command again."
    )


MOST_ENCODERS = 4
"""More do not help: hashing, which is one thread's work, is slower than so many."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A shard that is done.

    Attributes:
        won: false when another worker had committed it first.
        beyond: a stream ended before this shard, so there is no such shard and nothing was committed.
    """

    commit: Commit
    won: bool
    beyond: bool = False


def written(worker: Worker, directory: JobDirectory, items: Iterable[Computed]) -> Iterator[Finished]:
    """Write the shards that `items` run through.

    A shard left half-way leaves nothing behind but its temporary file, which is removed here, or, after a kill, by the
    next worker that claims the shard.
    """
    writer: ShardWriter | None = None
    try:
        for item in items:
            window, piece = item.window, item.window.piece
            clock = time.perf_counter()
            positions = worker.plan.record.rows_at(piece.first_row, piece.first_row + piece.num_rows)
            with blaming(window.shard):
                if window.opens:
                    _keep_reserve(worker, directory)
                    writer = _open_writer(worker, directory, window.shard)
                    seconds = dict.fromkeys(STAGES, 0.0)
                    doubled_bos = 0
                assert writer is not None  # the first window of a shard opens it
                writer.write(piece.rows, piece.source, positions, item.states, item.layers, item.finite)
                facts = writer.close() if window.closes else None
            spent = time.perf_counter() - clock
            worker.progress.spent("write", spent)
            doubled_bos += piece.rows.doubled_bos
            for stage, more in zip(STAGES, (window.seconds, item.seconds, spent), strict=True):
                seconds[stage] += more
            if facts is not None:
                commit = _record(worker, item, facts, seconds, doubled_bos)
                if worker.plan.num_rows is None and _is_beyond(directory, commit):
                    finished = Finished(commit, won=False, beyond=True)
                else:
                    finished = commit_file(directory, writer.path, commit)
                writer.abort()  # nothing is left to remove, unless the file was not published
                writer = None
                yield finished
    finally:
        if writer is not None:
            writer.abort()


def _record(worker: Worker, last: Computed, facts: ShardFacts, seconds: dict[str, float], doubled_bos: int) -> Commit:
    window, plan = last.window, worker.plan
    start, _ = plan.rows_of(window.shard)
    return commit_of(
        window.shard,
        facts,
        first_row=start,
        num_rows=window.end_row - start,
        last=window.at_end or window.end_row == plan.num_rows,
        doubled_bos=doubled_bos,
        worker={
            "engine": plan.engine.engine_id,
            "device": plan.engine.device.name,
            "runtime": f"{plan.engine.runtime.name} {plan.engine.runtime.version}",
            "arithmetic": worker.runtime.arithmetic,
            "max_tokens": last.max_tokens,
            "max_sequences": plan.spec.run.max_sequences,
        },
        seconds={stage: round(spent, 3) for stage, spent in seconds.items()},
    )


def commit_of(
    shard: int,
    facts: ShardFacts,
    *,
    first_row: int,
    num_rows: int,
    last: bool,
    worker: dict[str, Any],
    seconds: dict[str, float],
    doubled_bos: int = 0,
) -> Commit:
    """The record of a written shard file, named by its content, as a new attempt."""
    return Commit(
        shard=shard,
        first_row=first_row,
        num_rows=num_rows,
        last=last,
        num_rows_out=facts.num_rows,
        data=f"{shard_name(shard)}-{facts.sha256[:8]}.arrow",
        sha256=facts.sha256,
        num_bytes=facts.num_bytes,
        num_tokens=facts.num_tokens,
        num_tokens_original=facts.num_tokens_original,
        outcomes=facts.outcomes,
        overflowed=facts.overflowed,
        doubled_bos=doubled_bos,
        worker=worker,
        seconds=seconds,
        attempt=secrets.token_hex(8),
    )


def _is_beyond(directory: JobDirectory, commit: Commit) -> bool:
    """An empty shard of a stream says that the stream ended right after the shard before it, if that one is full.

    Otherwise several workers on one stream would each commit the empty shard that they found behind the end.
    """
    if commit.num_rows or commit.shard == 0:
        return False
    before = commit_path(directory.commits, commit.shard - 1)
    return not before.exists() or read_commit(before).last


def remove_leftovers(directory: JobDirectory, shard: int) -> None:
    """Remove temporary files of a shard that this process has locked: whoever wrote them is gone."""
    with clear_write_errors(directory.tmp):
        if directory.tmp.is_dir():
            for path in directory.tmp.glob(f"{shard_name(shard)}.*"):
                path.unlink(missing_ok=True)


def _open_writer(worker: Worker, directory: JobDirectory, shard: int) -> ShardWriter:
    with clear_write_errors(directory.tmp):
        directory.tmp.mkdir(exist_ok=True)
    path = directory.tmp / f"{shard_name(shard)}.{os.getpid()}-{secrets.token_hex(4)}"
    plan = worker.plan
    return ShardWriter(
        path,
        plan.record.schema,
        plan.spec.states,
        plan.engine.output.width,
        shard,
        plan.spec.text.on_non_finite,
        threads=_encoders(worker),
    )


def _encoders(worker: Worker) -> int:
    """Threads that encode and compress: a card outruns one; an engine on the CPU needs the CPU itself."""
    if worker.plan.engine.device.type == "cpu" or not worker.plan.spec.run.overlap:
        return 1
    return max(1, min(MOST_ENCODERS, len(os.sched_getaffinity(0)) // 2))


def _keep_reserve(worker: Worker, directory: JobDirectory) -> None:
    free, reserve = free_bytes(directory.root), worker.plan.spec.states.reserve_bytes
    if free < reserve:
        raise ReserveReached(path=directory.root, free=free, reserve=reserve)


def commit_file(directory: JobDirectory, path: Path, commit: Commit) -> Finished:
    """Publish a finished shard file and create its record, unless another worker's record is there.

    A file that is recorded is not even replaced by the same bytes: the record is looked for before publishing, too.
    """
    record = commit_path(directory.commits, commit.shard)
    if record.exists():
        with clear_write_errors(path):
            path.unlink(missing_ok=True)
        return Finished(read_commit(record), won=False)
    publish(path, directory.data / commit.data)
    if write_commit(directory.commits, commit):
        return Finished(commit, won=True)
    winner = read_commit(record)
    if winner.data != commit.data:
        with clear_write_errors(directory.data):
            (directory.data / commit.data).unlink(missing_ok=True)
    return Finished(winner, won=winner.attempt == commit.attempt)
