"""The record of a finished job: every shard, the totals, and that the shards tile the source exactly.

It holds nothing that depends on who ran the job or how often it was interrupted, so an unbroken run and one that was
killed ten times write the same manifest.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields

from extract.commits import Commit, read_commits
from extract.errors import SpecError, VerificationFailed
from extract.job import JobDirectory, StoredJob
from extract.settings import parse
from extract.storage import ObjectPath
from extract.store import replace_file

FORMAT = "extract-manifest"
VERSION = 1


class NotTiled(VerificationFailed):
    """Shards overlap or leave a gap."""

    template = "{path}: {problem}. Run the job again to make what is missing, or: extract verify {path}"


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


def totals(commits: list[Commit]) -> Totals:
    """Add up records."""
    outcomes: Counter[str] = Counter()
    for commit in commits:
        outcomes.update(commit.outcomes)
    return Totals(
        num_shards=len(commits),
        num_rows=sum(commit.num_rows for commit in commits),
        num_rows_out=sum(commit.num_rows_out for commit in commits),
        num_tokens=sum(commit.num_tokens for commit in commits),
        num_tokens_original=sum(commit.num_tokens_original for commit in commits),
        num_bytes=sum(commit.num_bytes for commit in commits),
        outcomes=dict(sorted(outcomes.items())),
        doubled_bos=sum(commit.doubled_bos for commit in commits),
        overflowed=sum(commit.overflowed for commit in commits),
    )


def tiling_problem(job: StoredJob, commits: list[Commit]) -> str | None:
    """What keeps these records from covering every source row exactly once, or `None`."""
    row = 0
    for number, commit in enumerate(commits):
        if commit.shard != number:
            return f"shard {number} is missing"
        if commit.first_row != row:
            return f"shard {number} begins at row {commit.first_row:,}, {row:,} expected"
        row = commit.stop_row
        if sum(commit.outcomes.values()) != commit.num_rows_out:
            return f"shard {number} has {commit.num_rows_out:,} rows, its outcomes add up to another number"
    if not commits or (job.num_shards is not None and len(commits) < job.num_shards):
        return f"shard {len(commits)} is missing"
    if job.num_rows is not None and row != job.num_rows:
        return f"the shards cover {row:,} rows, the source had {job.num_rows:,}"
    if not commits[-1].last:
        return f"shard {len(commits)} is missing (the source did not end in shard {commits[-1].shard})"
    return None


def manifest_bytes(job: StoredJob, commits: list[Commit] | None = None) -> bytes:
    """What `manifest.json` must hold, from the commit records (read if they are not given).

    Raises:
        NotTiled: a shard is missing, or the ranges do not cover every row exactly once.
    """
    if commits is None:
        commits = read_commits(job.directory.commits)
    problem = tiling_problem(job, commits)
    if problem is not None:
        raise NotTiled(path=job.directory.root, problem=problem)
    head = {"format": FORMAT, "version": VERSION, "job": job.job_id, "totals": asdict(totals(commits)), "shards": []}
    before, _, after = json.dumps(head, indent=1, ensure_ascii=False).rpartition("[]")
    return f"{before}[\n{_entries(commits)}\n ]{after}\n".encode()


def finalize(job: StoredJob, commits: list[Commit] | None = None) -> None:
    """Write `manifest.json`; does nothing if the same one is there.

    Raises:
        NotTiled: see `manifest_bytes`.
    """
    content = manifest_bytes(job, commits)
    if not is_written(job, content):
        replace_file(job.directory.manifest, content)


def recorded(directory: JobDirectory) -> list[Commit]:
    """The commits that a manifest in an object store repeats, without what passes: no request for each record.

    Only for who wants to know what is done; a manifest that does not read says nothing.
    """
    path = directory.manifest
    if not isinstance(path, ObjectPath):
        return []
    try:
        return [parse(Commit, entry, str(path)) for entry in json.loads(path.read_bytes())["shards"]]
    except (FileNotFoundError, ValueError, LookupError, TypeError, SpecError):
        return []


def is_written(job: StoredJob, content: bytes) -> bool:
    """Whether `manifest.json` holds exactly this; one of another size is not even read."""
    path = job.directory.manifest
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def _entries(commits: list[Commit]) -> str:
    """The records without what passes, as `json.dumps(..., indent=1)` writes them, which takes seconds for 100,000."""
    opening = "".join(f'\n   "{name}": %s,' for name in _KEPT)
    return ",\n".join(
        "  {" + (opening % tuple(_json(getattr(commit, name)) for name in _KEPT))[:-1] + "\n  }" for commit in commits
    )


_KEPT = tuple(field.name for field in fields(Commit) if field.name not in ("seconds", "attempt", "worker"))


def _json(value: str | int | dict[str, int]) -> str:
    if isinstance(value, dict):
        lines = ",\n".join(f"    {_string(name)}: {count}" for name, count in value.items())
        return f"{{\n{lines}\n   }}" if lines else "{}"
    if isinstance(value, str):
        return _string(value)
    return str(value) if not isinstance(value, bool) else "true" if value else "false"


_string = json.encoder.encode_basestring
