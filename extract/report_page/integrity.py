"""A quick check of an output for its page: files of the right size and hash, ranges that tile the source, a manifest.

`extract verify` looks inside every file; this looks at them from outside, and hashes only as many bytes as a person
waits for. A record that does not read is a problem to show, never one to stop at.
"""

from pathlib import Path

from extract.canonical import file_digest
from extract.commits import Commit, commit_path, committed_shards, read_commit
from extract.errors import ExtractError
from extract.job import StoredJob
from extract.manifest import Draft
from extract.report_page.facts import Integrity
from extract.storage import ObjectPath
from extract.storage.local_copies import DamagedObject, local_copy

MAX_HASHED_BYTES = 4 * 2**30
"""A disk and a hash at about 1 GB/s: a few seconds."""
MAX_SHOWN = 20


def readable_commits(job: StoredJob) -> tuple[list[Commit], list[str]]:
    """The records that read, by shard, and what is wrong with the others."""
    commits, problems = [], []
    for shard in sorted(committed_shards(job.directory.commits)):
        try:
            commits.append(read_commit(commit_path(job.directory.commits, shard)))
        except ExtractError as error:
            problems.append(str(error))
    return commits, problems


def quick_check(job: StoredJob, commits: list[Commit], problems: list[str]) -> tuple[Integrity, frozenset[int]]:
    """What the files look like from outside, and the shards that are not to be read.

    Args:
        job: the job.
        commits: its readable records.
        problems: what is wrong with other records.
    """
    found, bad = list(problems), set()
    num_bytes = sum(commit.num_bytes for commit in commits)
    hash_them = num_bytes <= MAX_HASHED_BYTES
    for commit in commits:
        problem = _file_problem(job, commit, hash_them)
        if problem is not None:
            found.append(f"shard {commit.shard}: {problem}")
            bad.add(commit.shard)
    draft = Draft(job)
    for commit in commits:
        draft.add(commit)
    if job.directory.manifest.is_file() and not found:
        gap = draft.sums.problem
        if gap is not None:
            found.append(f"manifest.json says that the job was complete, but {gap}")
        elif not draft.is_written():
            found.append("manifest.json does not agree with the commit records")
    checked = Integrity(
        state="problems" if found else "verified" if hash_them else "unhashed",
        num_files=len(commits),
        num_bytes=num_bytes,
        num_hashed=len(commits) - len(bad) if hash_them else 0,
        problems=tuple(found[:MAX_SHOWN]),
        num_problems=len(found),
        command=f"extract verify {job.directory.root}",
    )
    return checked, frozenset(bad)


def _file_problem(job: StoredJob, commit: Commit, hash_it: bool) -> str | None:
    path = job.directory.data / commit.data
    if path.is_symlink() or not path.is_file():
        return f"data/{commit.data} is missing"
    size = path.stat().st_size
    if size != commit.num_bytes:
        return f"data/{commit.data} has {size:,} bytes, {commit.num_bytes:,} were written"
    if hash_it and isinstance(path, ObjectPath):
        return _object_problem(path, commit)
    if hash_it and isinstance(path, Path) and file_digest(path) != commit.sha256:
        return f"data/{commit.data} has another sha256 than was written"
    return None


def _object_problem(path: ObjectPath, commit: Commit) -> str | None:
    try:
        local_copy(path, commit.sha256, commit.num_bytes, again=True)
    except DamagedObject as error:
        return f"data/{commit.data} has {error.facts['problem']}"
    return None
