"""The end of a job: the manifest, and nothing left of workers that died.

A killed worker can leave a temporary file, or a data file that it had published but not recorded. Neither counts, so
they may wait until the job is complete: then no worker needs a file that no record names, and they can go without
asking whose they are. A finished job that is run again is not touched at all.
"""

import time
from contextlib import suppress
from pathlib import Path

from extract.claims import Claims
from extract.commits import SHARD_TENS, Commit
from extract.job import JobDirectory, read_job
from extract.manifest import finalize
from extract.record_sums import Totals
from extract.storage import ObjectPath, Place
from extract.store import clear_write_errors, names_in, sync_directory

ABANDONED_S = 3600.0
"""Where a file system has no locks, a file must not have been written for this long before it is removed."""


def complete(directory: JobDirectory) -> Totals:
    """Write the manifest if it is not there, and remove what dead workers left. Needs every shard to be committed.

    Holds a `Claims` of its own, so the caller's must be closed.

    Returns:
        What the commit records add up to.

    Raises:
        NotTiled: a shard is missing.
    """
    job, strays = read_job(directory.root), Strays(directory)
    found: Totals | None = None
    if directory.manifest.is_file():
        found = finalize(job, strays.named_by)  # nothing is written unless the manifest is another one
        if not strays.paths():
            return found
    claims = Claims(directory.claims)
    try:
        claims.wait_for_end_of_job()
        with clear_write_errors(directory.root):
            for folder in (directory.data, directory.commits):  # their last change may be that of a worker that died
                sync_directory(folder)
        if found is None:
            found = finalize(job, strays.named_by)
        before = time.time() - (0.0 if claims.supported else ABANDONED_S)
        with clear_write_errors(directory.root):
            for path in strays.paths():
                if not claims.supported and _written_after(path, before):
                    continue
                path.unlink(missing_ok=True)
            if claims.supported:
                with suppress(OSError):  # gone, or another worker has just begun to look for the end of a stream
                    directory.tmp.rmdir()
    finally:
        claims.close()
    return found


class Strays:
    """Files of a complete job that no record names. Only names that `extract` gives are looked at.

    The files are listed first and the records shown afterwards, so that none is taken for a stray whose record was
    still to come.
    """

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self._data = {
            name
            for name in names_in(directory.data, SHARD_TENS)
            if name.startswith("shard-") and name.endswith(".arrow")
        }

    def named_by(self, commit: Commit) -> None:
        """A record; its file is none."""
        self._data.discard(commit.data)

    def paths(self) -> list[Place]:
        """All of them, once every record was shown."""
        directory = self._directory
        written = [directory.tmp / name for name in names_in(directory.tmp) if name.startswith("shard-")]
        return [*_half_written(directory), *written, *(directory.data / name for name in sorted(self._data))]


def _half_written(directory: JobDirectory) -> list[Path]:
    """Temporary names beside those that they were to become; an object store has none."""
    root, commits = directory.root, directory.commits
    if isinstance(root, ObjectPath) or isinstance(commits, ObjectPath):
        return []
    beside_job = [path for name in ("job", "manifest") for path in root.glob(f".{name}.json.*")]
    return [*beside_job, *(commits / name for name in names_in(commits) if name.startswith(".shard-"))]


def _written_after(path: Place, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except FileNotFoundError:
        return True
