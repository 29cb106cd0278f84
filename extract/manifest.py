"""The record of a finished job: every shard, the totals, and that the shards tile the source exactly.

It holds nothing that depends on who ran the job or how often it was interrupted, so an unbroken run and one that was
killed ten times write the same manifest. A million shards make one of several hundred megabytes, whose totals stand at
its beginning: it is drafted record by record, in a file without a name or as a digest, and never lies in memory whole.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

from extract.commits import FIELD_TYPES, Commit, committed_shards, each_commit
from extract.errors import SpecError, VerificationFailed
from extract.job import StoredJob
from extract.record_sums import RecordSums, Totals
from extract.settings import parse
from extract.storage import ObjectPath, Place, make_scratch_folder
from extract.store import clear_write_errors, replacing_file

FORMAT = "extract-manifest"
VERSION = 1
PIECE_BYTES = 2**20


class NotTiled(VerificationFailed):
    """Shards overlap or leave a gap."""

    template = "{path}: {problem}. Run the job again to make what is missing, or: extract verify {path}"


class Draft:
    """What `manifest.json` must hold, from records that are added in the order of shards.

    Args:
        job: whose records they are.
        spool: where the part between the totals and the end is put, if it is to be written.
    """

    def __init__(self, job: StoredJob, spool: IO[bytes] | None = None) -> None:
        self.sums = RecordSums(job)
        self._job, self._spool = job, spool
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def add(self, commit: Commit) -> None:
        """The next record."""
        self.sums.add(commit)
        entry = f"{',' if self._num_bytes else ''}\n{_entry(commit)}".encode()
        self._num_bytes += len(entry)
        self._digest.update(entry)
        if self._spool is not None:
            self._spool.write(entry)

    def is_written(self) -> bool:
        """Whether `manifest.json` holds exactly this; one of another size is not even read."""
        path, (before, after) = self._job.directory.manifest, self._frame()
        size = len(before) + self._num_bytes + len(after)
        if not path.is_file() or path.stat().st_size != size:
            return False
        with _opened(path) as file:
            same = file.read(len(before)) == before
            found, left = hashlib.sha256(), self._num_bytes
            while same and left and (piece := file.read(min(left, PIECE_BYTES))):
                found.update(piece)
                left -= len(piece)
            return same and found.digest() == self._digest.digest() and file.read() == after

    def write(self) -> None:
        """Write `manifest.json`, whole and durable."""
        assert self._spool is not None
        before, after = self._frame()
        self._spool.seek(0)
        with replacing_file(self._job.directory.manifest) as file:
            file.write(before)
            shutil.copyfileobj(self._spool, file, PIECE_BYTES)
            file.write(after)

    def _frame(self) -> tuple[bytes, bytes]:
        """What stands before the records and after them."""
        totals = asdict(self.sums.totals)
        head = {"format": FORMAT, "version": VERSION, "job": self._job.job_id, "totals": totals, "shards": []}
        before, _, after = json.dumps(head, indent=1, ensure_ascii=False).rpartition("]")
        return before.encode(), f"\n ]{after}\n".encode()


def finalize(job: StoredJob, passing: Callable[[Commit], object] = lambda commit: None) -> Totals:
    """Write `manifest.json`; does nothing if the same one is there.

    Args:
        job: whose records are all there.
        passing: is shown every record.

    Raises:
        NotTiled: a shard is missing, or the ranges do not cover every row exactly once.
        BadRecord: a record is damaged.
    """
    if job.directory.manifest.is_file():
        draft = _drafted(Draft(job), job, passing)
        if draft.is_written():
            return draft.sums.totals
    with clear_write_errors(job.directory.root), tempfile.TemporaryFile(dir=_scratch(job)) as spool:
        draft = _drafted(Draft(job, spool), job, passing)
        draft.write()
    return draft.sums.totals


def _drafted(draft: Draft, job: StoredJob, passing: Callable[[Commit], object]) -> Draft:
    for commit in each_record(job):
        passing(commit)
        draft.add(commit)
    if draft.sums.problem is not None:
        raise NotTiled(path=job.directory.root, problem=draft.sums.problem)
    return draft


def each_record(job: StoredJob) -> Iterator[Commit]:
    """The records of a job by shard, for who wants to know what is done.

    In an object store those that a manifest repeats are taken from there, without what passes: one request instead of
    one for each. Where it does not read, or records were taken away since, the rest is asked for.

    Raises:
        BadRecord: a record is damaged.
    """
    commits, manifest = job.directory.commits, job.directory.manifest
    if not isinstance(manifest, ObjectPath):
        yield from each_commit(commits)
        return
    shards = sorted(committed_shards(commits))
    repeated = 0
    with _opened(manifest) as file:
        for shard, commit in zip(shards, _repeated(file, str(manifest)), strict=False):
            if commit.shard != shard:
                break
            yield commit
            repeated += 1
    yield from each_commit(commits, shards[repeated:])


def _repeated(file: IO[bytes], where: str) -> Iterator[Commit]:
    """The records that a manifest repeats, up to the first thing in it that does not read as `write` wrote it."""
    begun, lines = False, list[bytes]()
    for line in file:
        if not begun:
            begun = line == b' "shards": [\n'
        elif line.startswith(b"  }"):
            try:
                yield parse(Commit, json.loads(b"".join(lines) + b"}"), where)
            except (ValueError, RecursionError, SpecError):
                return
            lines.clear()
        else:
            lines.append(line)


@contextmanager
def _opened(path: Place) -> Iterator[IO[bytes]]:
    """A manifest, for reading; one of an object store is fetched into a file without a name, empty if it is gone."""
    if not isinstance(path, ObjectPath):
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as copy:
        with clear_write_errors(Path(tempfile.gettempdir())), suppress(FileNotFoundError):
            for piece in path.chunks():
                copy.write(piece)
        copy.seek(0)
        yield copy


def _scratch(job: StoredJob) -> Path:
    root = job.directory.root
    return make_scratch_folder(root) if isinstance(root, ObjectPath) else root


def _entry(commit: Commit) -> str:
    """A record without what passes, as `json.dumps(..., indent=1)` writes it, which takes a minute for a million."""
    return _ENTRY % tuple([write(value) for write, value in zip(_WRITE, _kept(commit), strict=True)])


def _table(counts: dict[str, int]) -> str:
    lines = ",\n".join([f"    {_string(name)}: {count}" for name, count in counts.items()])
    return f"{{\n{lines}\n   }}" if lines else "{}"


_string = json.encoder.encode_basestring
_KEPT = {name: kind for name, kind in FIELD_TYPES.items() if name not in ("seconds", "attempt", "worker")}
_kept = attrgetter(*_KEPT)
_WRITE_TYPE: dict[type, Callable[[Any], str]] = {
    str: _string,
    int: str,
    bool: ("false", "true").__getitem__,
    dict: _table,
}
_WRITE = [_WRITE_TYPE[kind] for kind in _KEPT.values()]
_ENTRY = "  {" + ",".join(f'\n   "{name}": %s' for name in _KEPT) + "\n  }"
