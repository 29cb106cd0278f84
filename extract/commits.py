"""The record that makes a shard count: one small JSON file, created once, never changed.

Its last key, `check`, is a digest of all that stands before it, so that a bit that flipped anywhere in a record is seen
like one that flipped in a data file. A record without that key is believed: earlier versions wrote none.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from extract.canonical import canonical_json
from extract.errors import ExtractError, VerificationFailed
from extract.settings import parse
from extract.storage import ObjectPath, Place
from extract.store import create_once

PlaceT = TypeVar("PlaceT", Path, ObjectPath, Place)

MAX_RECORD_BYTES = 1 << 20
_USUAL_BYTES = 1 << 14
"""Read at once; asking for the most that a record may have would cost a megabyte of fresh memory each."""
RECORD_NAME = re.compile(r"shard-([0-9]{5}|[1-9][0-9]{5,17})\.json")
DATA_NAME = re.compile(r"shard-[-.\w]+", re.ASCII)
"""Names of one file in `data/`: nothing that leads elsewhere."""


class BadRecord(VerificationFailed):
    """A commit record or manifest is not what `extract` wrote."""

    template = "{path}: {problem}. Restore it from a copy, or make the shard again: extract verify --repair {job}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What is known of one finished shard.

    Attributes:
        first_row, num_rows: the source rows it covers.
        last: the source ended inside or right after this shard.
        num_rows_out: rows in the file (more than `num_rows` when texts were chunked).
        data: file name under `data/`.
        outcomes: rows out by outcome.
        num_tokens: tokens with a stored or pooled state; `num_tokens_original` before any cut, where counted.
        worker: engine id, device, versions and token budget that made it: equal workers make equal bytes.
        seconds: busy seconds by stage.
    """

    shard: int
    first_row: int
    num_rows: int
    last: bool
    num_rows_out: int
    data: str
    sha256: str
    num_bytes: int
    num_tokens: int
    num_tokens_original: int
    outcomes: dict[str, int] = field(default_factory=dict)
    doubled_bos: int = 0
    overflowed: int = 0
    worker: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    attempt: str = ""

    @property
    def stop_row(self) -> int:
        """One past the last source row."""
        return self.first_row + self.num_rows


def shard_name(shard: int) -> str:
    """`shard-00012`: sorts as numbers do up to 99,999 and stays unique beyond."""
    return f"shard-{shard:05d}"


def commit_path(commits: PlaceT, shard: int) -> PlaceT:
    """Where a shard's record lies."""
    return commits / f"{shard_name(shard)}.json"


def write_commit(commits: Place, commit: Commit) -> bool:
    """Create the record; False if another worker's was there first."""
    return create_once(commit_path(commits, commit.shard), record_bytes(commit))


def record_bytes(commit: Commit) -> bytes:
    """What a record holds."""
    body = canonical_json(asdict(commit))
    return body[:-1] + _CHECK % _digest(body)


def read_commit(path: Place) -> Commit:
    """Read one record.

    Raises:
        BadRecord: not JSON, unknown or missing fields, absurd size, or a data name that points elsewhere.
    """
    if isinstance(path, ObjectPath):
        return _parse(str(path), _object_bytes(path), {})
    return _read(str(path), {})


def _object_bytes(path: ObjectPath) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _bad(str(path), "no such object") from None


def _read(path: str, workers: dict[str, dict[str, Any]]) -> Commit:
    """Read one record of a directory; see `_parse`."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  (100,000 of them: no Path for each)
            raw = file.read(_USUAL_BYTES)
            if len(raw) == _USUAL_BYTES:
                raw += file.read(MAX_RECORD_BYTES)
        if len(raw) > MAX_RECORD_BYTES:
            raise _bad(path, f"{os.stat(path).st_size:,} bytes, absurdly many for a record")  # noqa: PTH116
    except OSError as error:
        raise _bad(path, f"cannot be read ({error})") from None
    return _parse(path, raw, workers)


def _parse(path: str, raw: bytes, workers: dict[str, dict[str, Any]]) -> Commit:
    """Understand one record; equal `worker` tables of several records become one object by way of `workers`."""
    try:
        table = json.loads(raw)
        check = table.pop("check", None) if isinstance(table, dict) else None
        commit = parse(Commit, table, path)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"cannot be read ({error})") from None
    except BadRecord:
        raise
    except ExtractError as error:
        raise _bad(path, str(error).removeprefix(f"{path}: ").rstrip(".")) from None
    name = shard_name(commit.shard)
    if not (commit.data.startswith(name) and DATA_NAME.fullmatch(commit.data)):
        raise _bad(path, f"its data name {commit.data[:80]!r} is not one of this shard")
    if os.path.basename(path) != f"{name}.json":  # noqa: PTH119
        raise _bad(path, f"it is the record of shard {commit.shard}")
    if check is not None and not _is_as_written(raw, check):  # last, for the others say more
        raise _bad(path, "it is not as it was written: its digest differs")
    shared = workers.setdefault(repr(commit.worker), commit.worker)
    if shared is not commit.worker:
        object.__setattr__(commit, "worker", shared)
    return commit


def _bad(path: str, problem: str) -> BadRecord:
    return BadRecord(path=path, problem=problem, job=os.path.dirname(os.path.dirname(path)) or ".")  # noqa: PTH120


_CHECK = b',"check":"%b"}\n'
_CHECK_BYTES = len(_CHECK % bytes(16))


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def _is_as_written(raw: bytes, check: object) -> bool:
    """Whether the digest that a record ends with is that of the rest."""
    digest = _digest(raw[:-_CHECK_BYTES] + b"}")
    return raw[-_CHECK_BYTES:] == _CHECK % digest and check == digest.decode()


def committed_shards(commits: Place) -> set[int]:
    """Numbers of the shards that are done, from one listing and no reads."""
    try:
        names = commits.names() if isinstance(commits, ObjectPath) else os.listdir(commits)  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {int(found[1]) for name in names if (found := RECORD_NAME.fullmatch(name))}


def read_commits(commits: Place, known: Iterable[Commit] = ()) -> list[Commit]:
    """All records, by shard number; those of `known` are not read again, for a record never changes."""
    folder, workers = str(commits), dict[str, dict[str, Any]]()
    before = {commit.shard: commit for commit in known}
    if isinstance(commits, ObjectPath):  # a request each: many at a time
        listed = sorted(committed_shards(commits))
        missing = [shard for shard in listed if shard not in before]
        names = [f"{shard_name(shard)}.json" for shard in missing]
        for name, raw in zip(names, commits.read_all(names), strict=True):
            commit = _parse(f"{folder}/{name}", raw, workers)
            before[commit.shard] = commit
        return [before[shard] for shard in listed]
    return [
        before.get(shard) or _read(f"{folder}/{shard_name(shard)}.json", workers)
        for shard in sorted(committed_shards(commits))
    ]
