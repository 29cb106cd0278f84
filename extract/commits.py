"""The record that makes a shard count: one small JSON file, created once, never changed.

Its last key, `check`, is a digest of all that stands before it, so that a bit that flipped anywhere in a record is seen
like one that flipped in a data file. A record without that key is believed: earlier versions wrote none.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from extract.canonical import canonical_json
from extract.errors import ExtractError, VerificationFailed
from extract.settings import parse
from extract.store import create_once

MAX_RECORD_BYTES = 1 << 20


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


def commit_path(commits: Path, shard: int) -> Path:
    """Where a shard's record lies."""
    return commits / f"{shard_name(shard)}.json"


def write_commit(commits: Path, commit: Commit) -> bool:
    """Create the record; False if another worker's was there first."""
    return create_once(commit_path(commits, commit.shard), record_bytes(commit))


def record_bytes(commit: Commit) -> bytes:
    """What a record holds."""
    body = canonical_json(asdict(commit))
    return body[:-1] + _CHECK % _digest(body)


def read_commit(path: Path) -> Commit:
    """Read one record.

    Raises:
        BadRecord: not JSON, unknown or missing fields, absurd size, or a data name that points elsewhere.
    """
    job = path.parent.parent
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise BadRecord(path=path, problem=f"{path.stat().st_size:,} bytes, absurdly many for a record", job=job)
        raw = path.read_bytes()
        table = json.loads(raw)
        check = table.pop("check", None) if isinstance(table, dict) else None
        commit = parse(Commit, table, str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRecord(path=path, problem=f"cannot be read ({error})", job=job) from None
    except BadRecord:
        raise
    except ExtractError as error:
        raise BadRecord(path=path, problem=str(error).removeprefix(f"{path}: ").rstrip("."), job=job) from None
    if Path(commit.data).name != commit.data or not commit.data.startswith(shard_name(commit.shard)):
        raise BadRecord(path=path, problem=f"its data name {commit.data!r} is not one of this shard", job=job)
    if path.name != f"{shard_name(commit.shard)}.json":
        raise BadRecord(path=path, problem=f"it is the record of shard {commit.shard}", job=job)
    if check is not None and not _is_as_written(raw, check):  # last, for the others say more
        raise BadRecord(path=path, problem="it is not as it was written: its digest differs", job=job)
    return commit


_CHECK = b',"check":"%b"}\n'
_CHECK_BYTES = len(_CHECK % bytes(16))


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def _is_as_written(raw: bytes, check: object) -> bool:
    """Whether the digest that a record ends with is that of the rest."""
    digest = _digest(raw[:-_CHECK_BYTES] + b"}")
    return raw[-_CHECK_BYTES:] == _CHECK % digest and check == digest.decode()


def committed_shards(commits: Path) -> set[int]:
    """Numbers of the shards that are done, from one listing and no reads."""
    done = set()
    if commits.is_dir():
        for entry in commits.iterdir():
            stem = entry.name.removeprefix("shard-").removesuffix(".json")
            if stem.isdigit() and entry.name == f"{shard_name(int(stem))}.json":
                done.add(int(stem))
    return done


def read_commits(commits: Path) -> list[Commit]:
    """All records, by shard number."""
    return [read_commit(commit_path(commits, shard)) for shard in sorted(committed_shards(commits))]
