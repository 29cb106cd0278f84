"""Check every shard of an output, finished or not, against its commit record; and some rows against the plain model.

Each file is read once: hashed, then opened from the page cache and compared with what its record and the job say. A
problem names its shard. Nothing is changed unless `repair` is asked for, which moves bad shards aside so that the next
run makes them again.
"""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extract.canonical import file_digest
from extract.commits import SHARD_TENS, Commit, commit_path, committed_shards, read_commit
from extract.errors import ExtractError, VerificationFailed
from extract.job import StoredJob, read_job
from extract.manifest import Draft
from extract.problems import Problem
from extract.recomputation import Recomputed, recompute_rows
from extract.records import OUTCOMES, STATELESS
from extract.shards import schema as names
from extract.shards.shard_file import ShardFile
from extract.shards.views import BatchView
from extract.storage import ObjectPath, Place, locate
from extract.storage.local_copies import DamagedObject, local_copy
from extract.store import clear_write_errors, move_aside, names_in, sync_directory


class BadShards(VerificationFailed):
    """Something on disk is not what was committed."""

    template = "{path}: {count} problems:\n{problems}\n{advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was checked and found.

    Attributes:
        complete: every row of the source is covered.
        recomputed: rows compared with the plain model; `worst` is the largest relative error among them.
        recompute_bound: most that a row may differ.
        notes: what could not be checked, and why.
        quarantined: shards that `repair` moved aside.
    """

    path: str
    job: str
    complete: bool
    num_shards: int
    num_rows: int
    num_rows_out: int
    num_bytes: int
    recomputed: int = 0
    worst: float = 0.0
    recompute_bound: float = 0.0
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    quarantined: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def verify(
    root: str | Place,
    *,
    recompute: int = 0,
    repair: bool = False,
    engine: str | Place | None = None,
    reference: str | Path | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Verification:
    """Verify an output directory.

    Args:
        root: the output directory, or its address.
        recompute: how many rows to compute again with the plain model, and to tokenise again from the source.
        repair: move shards that fail aside, so that the next run makes them again.
        engine: where the job's engine lies now; by default where it was.
        reference: checkpoint or torch engine to compute rows again with; by default the engine's own weights, which
            engines of other runtimes do not have.
        say: called with a line now and then.

    Raises:
        BadShards: at least one problem; the message lists them. With `repair` they have been moved aside already.
    """
    root, engine = locate(root), None if engine is None else locate(engine)
    job = read_job(root)
    problems: list[Problem] = []
    draft, to_recompute = Draft(job), list[Commit]()
    strays = set(names_in(job.directory.data, SHARD_TENS))
    shards = sorted(committed_shards(job.directory.commits))
    for done, shard in enumerate(shards, 1):
        try:
            commit = read_commit(commit_path(job.directory.commits, shard))
            problems += [Problem(shard, what) for what in shard_problems(job, commit)]
            draft.add(commit)
            strays.discard(commit.data)
            if recompute:
                to_recompute.append(commit)
        except ExtractError as error:
            problems.append(Problem(shard, str(error)))
        if done % 1000 == 0:
            say(f"{done:,} of {len(shards):,} shards checked, {len(problems):,} problems")
    gap, notes = draft.sums.problem, _leftovers(strays)
    seen = Recomputed()
    if not problems:
        problems += _manifest_problems(job, draft)
        if gap is not None and not problems:
            notes.append(f"incomplete: {gap}; run the job again to go on")
        if to_recompute:
            seen = recompute_rows(job, to_recompute, recompute, engine, reference)
            problems += seen.problems
            notes += seen.notes
    bad = sorted({problem.shard for problem in problems if problem.shard is not None})
    total = draft.sums.totals
    found = Verification(
        path=str(root),
        job=job.job_id,
        complete=gap is None and not problems,
        num_shards=total.num_shards,
        num_rows=total.num_rows,
        num_rows_out=total.num_rows_out,
        num_bytes=total.num_bytes,
        recomputed=seen.rows,
        worst=seen.worst,
        recompute_bound=seen.bound,
        problems=tuple(problems),
        notes=tuple(notes),
        quarantined=tuple(bad) if repair else (),
    )
    if problems:
        advice = "Make them again: extract verify --repair moves them aside, then run the job again."
        if repair:
            moved = _quarantine(job, bad)
            advice = f"Moved aside: {', '.join(moved[:20])}. Run the job again to make what is missing."
        listed = "\n".join(f"  {problem}" for problem in problems[:50])
        raise BadShards(path=root, count=len(problems), problems=listed, advice=advice)
    return found


def shard_problems(job: StoredJob, commit: Commit) -> list[str]:
    """Everything that is wrong with one shard; empty if nothing is."""
    path = job.directory.data / commit.data
    if path.is_symlink() or not path.is_file():
        return [f"data/{commit.data} is missing"]
    if isinstance(path, ObjectPath):
        return _object_problems(job, commit, path)
    size = path.stat().st_size
    if size != commit.num_bytes:
        return [f"data/{commit.data} has {size:,} bytes, {commit.num_bytes:,} were written"]
    found = file_digest(path)
    if found != commit.sha256:
        return [f"data/{commit.data} has sha256 {found[:12]}, {commit.sha256[:12]} was written"]
    try:
        return _content_problems(job, commit, path)
    except (pa.ArrowInvalid, OSError) as error:
        return [f"data/{commit.data} does not read as Arrow: {error}"]


def _object_problems(job: StoredJob, commit: Commit, path: ObjectPath) -> list[str]:
    """What is wrong with a shard in an object store, fetched anew and hashed as it comes."""
    try:
        return _content_problems(job, commit, local_copy(path, commit.sha256, commit.num_bytes, again=True))
    except DamagedObject as error:
        return [f"data/{commit.data} has {error.facts['problem']}"]
    except (pa.ArrowInvalid, OSError) as error:
        return [f"data/{commit.data} does not read as Arrow: {error}"]


def _content_problems(job: StoredJob, commit: Commit, path: Path) -> list[str]:
    with pa.memory_map(str(path)) as mapped:
        schema = pa.ipc.open_file(mapped).schema
    if not schema.equals(job.schema, check_metadata=True):
        return [f"data/{commit.data} has another schema than the job"]
    file = ShardFile(job, commit)
    rows, chunks = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    outcomes = np.zeros(len(OUTCOMES), np.int64)
    num_tokens = num_original = 0
    problems = []
    made_by = commit.worker.get("engine") if job.derived_from is None else None
    if made_by is not None and made_by not in job.engine_ids:
        problems.append(f"engine {str(made_by)[:16]} made it, which is none of the job's")
    for number in range(file.num_batches):
        batch = file.batch(number)
        rows.append(batch.row)
        if job.chunked:
            chunks.append(batch.arrow.column(names.CHUNK).to_numpy())
        codes = batch.arrow.column(names.OUTCOME).indices.to_numpy()
        outcomes += np.bincount(codes, minlength=len(OUTCOMES))
        num_tokens += int(batch.num_tokens.sum(dtype=np.int64))
        num_original += _tokens_before_cuts(batch.arrow, job.chunked)
        stateless = np.isin(codes, [code for code, outcome in enumerate(OUTCOMES) if outcome in STATELESS])
        expected = np.where(stateless, 0, batch.num_tokens if job.spec.states.kind == "tokens" else 1)
        for view, where in _columns(job, batch):
            spans = view.state_spans
            lengths = spans.stops - spans.starts
            if not np.array_equal(lengths, expected):
                row = int(batch.row[np.argmax(lengths != expected)])
                problems.append(f"row {row} has another number of states than its tokens and outcome say{where}")
            if not np.isfinite(view.states).all():
                problems.append(f"record batch {number} holds values that are not finite{where}")
    if int(outcomes.sum()) != commit.num_rows_out:
        problems.append(f"{int(outcomes.sum()):,} rows found, {commit.num_rows_out:,} were written")
    counted = {str(name): int(count) for name, count in zip(OUTCOMES, outcomes, strict=True) if count}
    if counted != commit.outcomes:
        problems.append(f"outcomes {counted} found, {commit.outcomes} were written")
    if num_tokens != commit.num_tokens:
        problems.append(f"{num_tokens:,} tokens found, {commit.num_tokens:,} were written")
    if num_original != commit.num_tokens_original:
        problems.append(f"{num_original:,} tokens before cuts found, {commit.num_tokens_original:,} were written")
    if job.num_rows is not None and commit.last != (commit.stop_row == job.num_rows):
        problems.append("its record is wrong about being the last one")
    problems += _row_problems(job, commit, np.concatenate(rows), np.concatenate(chunks))
    return problems


def _columns(job: StoredJob, batch: BatchView) -> Iterator[tuple[BatchView, str]]:
    """A batch with the states of each column, and how a problem names the column."""
    yield batch, ""
    for layer in job.spec.states.layers:
        yield batch.layer(layer), f" in {names.layer_name(layer)}"


def _tokens_before_cuts(batch: pa.RecordBatch, chunked: bool) -> int:
    """Tokens of whole rows, each row once, where they were counted."""
    original = batch.column(names.NUM_TOKENS_ORIGINAL)
    if chunked:
        original = original.filter(pc.equal(batch.column(names.CHUNK), 0))
    return pc.sum(original).as_py() or 0


def _row_problems(job: StoredJob, commit: Commit, rows: Any, chunks: Any) -> list[str]:
    expected = job.rows_at(commit.first_row, commit.stop_row)
    first_of_row = np.ones(len(rows), bool)
    first_of_row[1:] = rows[1:] != rows[:-1]
    if not np.array_equal(rows[first_of_row], expected):
        return ["its rows are not the source rows that its record says, in order"]
    if not job.chunked:
        return [] if first_of_row.all() else ["a row is there twice"]
    starts = np.maximum.accumulate(np.where(first_of_row, np.arange(len(rows)), 0))
    return [] if np.array_equal(chunks, np.arange(len(rows)) - starts) else ["chunks are not numbered 0, 1, 2, ..."]


def _manifest_problems(job: StoredJob, draft: Draft) -> list[Problem]:
    """A manifest is written when a job is complete, from its records, and both stay as they were."""
    if not job.directory.manifest.is_file():
        return []
    gap = draft.sums.problem
    if gap is not None:
        return [Problem(None, f"manifest.json says that the job was complete, but {gap}")]
    if not draft.is_written():
        return [Problem(None, "manifest.json does not agree with the commit records")]
    return []


def _leftovers(strays: set[str]) -> list[str]:
    """Files that no record names: harmless, but they take space."""
    shown = ", ".join(sorted(strays)[:3])
    return [f"{len(strays):,} files in data/ belong to no committed shard ({shown})"] if strays else []


def _quarantine(job: StoredJob, shards: list[int]) -> list[str]:
    """Move the manifest, and records and files of bad shards, to `quarantine/`; says what in words.

    A record goes before its file, so the shard is no longer done.
    """
    folder = job.directory.root / "quarantine"
    moved = [f"shard {shard}" for shard in shards]
    with clear_write_errors(folder):
        folder.mkdir(exist_ok=True)
        if job.directory.manifest.is_file():
            move_aside(job.directory.manifest, folder / f"{secrets.token_hex(4)}-{job.directory.manifest.name}")
            sync_directory(job.directory.root)
            moved.append(job.directory.manifest.name)
        for shard in shards:
            record = commit_path(job.directory.commits, shard)
            try:
                data: Place | None = job.directory.data / read_commit(record).data
            except ExtractError:
                data = None
            mark = secrets.token_hex(4)
            move_aside(record, folder / f"{mark}-{record.name}")
            sync_directory(job.directory.commits)
            if data is not None and data.is_file():
                move_aside(data, folder / f"{mark}-{data.name}")
    return moved
