"""The end of a job: the manifest, and nothing left of workers that died.

A killed worker can leave a temporary file, or a data file that it had published but not recorded. Neither counts, so
they may wait until the job is complete: then no worker needs a file that no record names, and they can go without
asking whose they are. A finished job that is run again is not touched at all.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from extract.claims import Claims
from extract.commits import Commit, read_commits
from extract.job import JobDirectory, read_job
from extract.manifest import finalize
from extract.storage import ObjectPath, Place
from extract.store import clear_write_errors, sync_directory

ABANDONED_S = 3600.0
"""Where a file system has no locks, a file must not have been written for this long before it is removed."""


def complete(directory: JobDirectory, known: Iterable[Commit] = ()) -> list[Commit]:
    """Write the manifest if it is not there, and remove what dead workers left. Needs every shard to be committed.

    Holds a `Claims` of its own, so the caller's must be closed. Records that the caller has read already (`known`) are
    not read again: they never change.

    Returns:
        All commit records, by shard.

    Raises:
        NotTiled: a shard is missing.
    """
    job, commits = read_job(directory.root), read_commits(directory.commits, known)
    if directory.manifest.is_file() and not leftovers(directory, commits):
        finalize(job, commits)  # nothing is written unless the manifest is another one
        return commits
    claims = Claims(directory.claims)
    try:
        claims.wait_for_end_of_job()
        with clear_write_errors(directory.root):
            for folder in (directory.data, directory.commits):  # their last change may be that of a worker that died
                sync_directory(folder)
        finalize(job, commits)
        before = time.time() - (0.0 if claims.supported else ABANDONED_S)
        with clear_write_errors(directory.root):
            for path in leftovers(directory, commits):
                if not claims.supported and _written_after(path, before):
                    continue
                path.unlink(missing_ok=True)
            if claims.supported:
                with suppress(OSError):  # gone, or another worker has just begun to look for the end of a stream
                    directory.tmp.rmdir()
    finally:
        claims.close()
    return commits


def leftovers(directory: JobDirectory, commits: list[Commit]) -> list[Place]:
    """Files of a complete job that no record names. Only names that `extract` gives are looked at."""
    known = {commit.data for commit in commits}
    return [
        *_half_written(directory),
        *directory.tmp.glob("shard-*"),
        *(path for path in directory.data.glob("shard-*.arrow") if path.name not in known),
    ]


def _half_written(directory: JobDirectory) -> list[Path]:
    """Temporary names beside those that they were to become; an object store has none."""
    root, commits = directory.root, directory.commits
    if isinstance(root, ObjectPath) or isinstance(commits, ObjectPath):
        return []
    beside_job = [path for name in ("job", "manifest") for path in root.glob(f".{name}.json.*")]
    return [*beside_job, *commits.glob(".shard-*.json.*")]


def _written_after(path: Place, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except FileNotFoundError:
        return True
