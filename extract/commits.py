"""The record that makes a shard count: one small JSON file, created once, never changed.

Its last key, `check`, is a digest of all that stands before it, so that a bit that flipped anywhere in a record is seen
like one that flipped in a data file. A record without that key is believed: earlier versions wrote none.

There may be a million of them. So who only asks what is done opens none, who wants sums takes them one at a time, and a
record whose digest is right is not taken apart value by value: it is what `write_commit` wrote.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import compress, tee
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from extract.canonical import canonical_json
from extract.errors import ExtractError, VerificationFailed
from extract.settings import parse
from extract.storage import ObjectPath, Place
from extract.storage.many_objects import are_there, read_all
from extract.store import create_once, names_in

PlaceT = TypeVar("PlaceT", Path, ObjectPath, Place)

MAX_RECORD_BYTES = 1 << 20
_USUAL_BYTES = 1 << 13
"""Of a record, at most: asking for the most that one may have would cost a megabyte of fresh memory each."""
RECORD_NAME = re.compile(r"shard-([0-9]{5}|[1-9][0-9]{5,17})\.json")
DATA_NAME = re.compile(r"shard-[-.\w]+", re.ASCII)
"""Names of one file in `data/`: nothing that leads elsewhere."""
SHARD_TENS = tuple(f"shard-{tens:02d}" for tens in range(100))
"""How the names of records and data files begin, in a hundred parts of about equally many."""


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


FIELD_TYPES: dict[str, type] = {name: get_origin(kind) or kind for name, kind in get_type_hints(Commit).items()}
"""Of a record: str, int, bool or dict, by name in the order of the class."""


def shard_name(shard: int) -> str:
    """`shard-00012`: sorts as numbers do up to 99,999 and stays unique beyond."""
    return f"shard-{shard:05d}"


def commit_path(commits: PlaceT, shard: int) -> PlaceT:
    """Where a shard's record lies."""
    return commits / _record_name(shard)


def _record_name(shard: int) -> str:
    return f"{shard_name(shard)}.json"


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
        try:
            return _understood(str(path), path.read_bytes())
        except FileNotFoundError:
            raise _bad(str(path), "no such object") from None
    return _read(str(path))


def each_commit(commits: Place, shards: Iterable[int] | None = None) -> Iterator[Commit]:
    """Records by shard number, one in memory at a time: those of `shards`, or all that are there.

    Raises:
        BadRecord: see `read_commit`.
    """
    if shards is None:
        shards = sorted(committed_shards(commits))
    folder, names = str(commits), (_record_name(shard) for shard in shards)
    if isinstance(commits, ObjectPath):  # a request each: many at a time
        asked, told = tee(names)
        try:
            for name, raw in zip(told, read_all(commits, asked), strict=True):
                yield _understood(f"{folder}/{name}", raw)
        except FileNotFoundError as error:
            raise _bad(str(error), "no such object") from None
        return
    for name in names:
        yield _read(f"{folder}/{name}")


def read_commits(commits: Place) -> list[Commit]:
    """All records by shard number, for who needs them at once; equal `worker` tables of them are one object."""
    workers: dict[str, dict[str, Any]] = {}
    found = []
    for commit in each_commit(commits):
        object.__setattr__(commit, "worker", workers.setdefault(repr(commit.worker), commit.worker))
        found.append(commit)
    return found


def _read(path: str) -> Commit:
    """Read one record of a directory; what is unusual about it is looked at again, at leisure."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            raw = os.read(file, _USUAL_BYTES)
        finally:
            os.close(file)
    except OSError:
        raw = b""
    return _as_written(path, raw) or _parse(path, _file_bytes(path))


def _understood(path: str, raw: bytes) -> Commit:
    return _as_written(path, raw) or _parse(path, raw)


def _as_written(path: str, raw: bytes) -> Commit | None:
    """A record that is byte for byte what `write_commit` wrote under this name, or `None`."""
    body = raw[:-_CHECK_BYTES] + b"}"
    if raw[-_CHECK_BYTES:] != _CHECK % _digest(body):
        return None
    try:
        table, end = _decode(body.decode())
    except (ValueError, RecursionError):
        return None
    if type(table) is not dict or end != len(body) or tuple(table) != _KEYS:
        return None
    if tuple(map(type, table.values())) != _TYPES:
        return None
    commit = object.__new__(Commit)
    for fill, value in zip(_FILL, table.values(), strict=True):
        fill(commit, value)
    return None if _belongs_elsewhere(path, commit) else commit


def _file_bytes(path: str) -> bytes:
    """All of a record's file."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            raw = file.read(MAX_RECORD_BYTES + 1)
        if len(raw) > MAX_RECORD_BYTES:
            raise _bad(path, f"{os.stat(path).st_size:,} bytes, absurdly many for a record")  # noqa: PTH116
    except OSError as error:
        raise _bad(path, f"cannot be read ({error})") from None
    return raw


def _parse(path: str, raw: bytes) -> Commit:
    """Understand one record value by value, and say what is wrong with it."""
    try:
        table = json.loads(raw)
        check = table.pop("check", None) if isinstance(table, dict) else None
        commit = parse(Commit, table, path)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"cannot be read ({error})") from None
    except ExtractError as error:
        raise _bad(path, str(error).removeprefix(f"{path}: ").rstrip(".")) from None
    problem = _belongs_elsewhere(path, commit)
    if problem is not None:
        raise _bad(path, problem)
    if check is not None and not _is_as_written(raw, check):  # last, for the others say more
        raise _bad(path, "it is not as it was written: its digest differs")
    return commit


def _belongs_elsewhere(path: str, commit: Commit) -> str | None:
    """Why a record is not one of the shard that its name says, or `None`."""
    name = shard_name(commit.shard)
    if not (commit.data.startswith(name) and DATA_NAME.fullmatch(commit.data)):
        return f"its data name {commit.data[:80]!r} is not one of this shard"
    return None if path.rpartition("/")[2] == f"{name}.json" else f"it is the record of shard {commit.shard}"


def _bad(path: str, problem: str) -> BadRecord:
    return BadRecord(path=path, problem=problem, job=os.path.dirname(os.path.dirname(path)) or ".")  # noqa: PTH120


_KEYS = tuple(sorted(FIELD_TYPES))
"""In the order in which `canonical_json` writes them."""
_TYPES = tuple(FIELD_TYPES[key] for key in _KEYS)
_FILL = tuple(getattr(Commit, key).__set__ for key in _KEYS)
"""Each fills its slot, as `Commit(...)` would; that takes a frozen class three times as long."""
_decode = json.JSONDecoder().raw_decode

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
    return {int(found[1]) for name in names_in(commits, SHARD_TENS) if (found := RECORD_NAME.fullmatch(name))}


def committed_among(commits: Place, shards: Iterable[int]) -> set[int]:
    """Those of `shards` that are done, by asking for each: no listing, however many others there are."""
    if isinstance(commits, ObjectPath):
        shards = [*shards]
        return {*compress(shards, are_there(commits, map(_record_name, shards)))}
    folder = str(commits)
    return {shard for shard in shards if os.path.exists(f"{folder}/{_record_name(shard)}")}  # noqa: PTH110
