"""The output directory of a job: `job.json` written once, and the names of everything beside it.

In an object store all of it lies under one prefix, but for `tmp/` and `.claims`: shards are written here first, and
processes of this machine share the work. Across machines only the commit record decides.

job.json    the resolved spec, its identity, the source as planned, the engine's id; never changed
data/       shard files, named by their content
commits/    one record a finished shard
tmp/        shards being written; nothing there counts
.claims     byte k is locked by the process that works on shard k
manifest.json   all records and totals, written by finalize
"""

import base64
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from extract.canonical import digest
from extract.errors import ExtractError, ResumeRefused
from extract.records import Int64
from extract.selection import Selection, parse_selection
from extract.settings import parse
from extract.shard_owner import job_difference, known_shard
from extract.spec import JobSpec, as_table
from extract.storage import ObjectPath, Place, make_scratch_folder, scratch_folder
from extract.store import clear_write_errors, create_once, make_directory, sync_directory

FORMAT = "extract-job"
VERSION = 1
MAX_JOB_BYTES = 256 * 2**20


class NotAJob(ExtractError):
    """A directory that is no output of `extract`."""

    exit_code = 2
    template = "{path}: not an output directory ({problem})."


class DamagedJob(NotAJob):
    """A `job.json` that is there and cannot be read."""

    template = (
        "{path}: job.json cannot be read ({problem}). Move it away and run the command that the job was started with: "
        "it is written again if the shards are that job's."
    )


class ForeignDirectory(ResumeRefused):
    """Something else lies where the output should go."""

    template = "{path}: the directory is not empty and holds no job.json. Choose another output directory with -o."


class OtherJob(ResumeRefused):
    """The directory holds another job's output."""

    template = (
        "{path}: this directory holds a job whose {field} is {found}; you asked for {expected}. "
        "Ask for the same again to go on with it, or choose another output directory with -o."
    )


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """Names inside one output directory."""

    root: Place

    @property
    def scratch(self) -> Path:
        """The local directory that `tmp` and `claims` lie in."""
        return scratch_folder(self.root) if isinstance(self.root, ObjectPath) else self.root

    @property
    def job_file(self) -> Place:
        """`job.json`."""
        return self.root / "job.json"

    @property
    def data(self) -> Place:
        """Shard files."""
        return self.root / "data"

    @property
    def commits(self) -> Place:
        """Commit records."""
        return self.root / "commits"

    @property
    def tmp(self) -> Path:
        """Shards being written."""
        return self.scratch / "tmp"

    @property
    def claims(self) -> Path:
        """File whose bytes are locked by the workers."""
        return self.scratch / ".claims"

    @property
    def manifest(self) -> Place:
        """`manifest.json`."""
        return self.root / "manifest.json"


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What `job.json` holds.

    Attributes:
        spec: resolved: nothing in it depends on who runs the job.
        identity: what a resume must find unchanged, by field.
        fingerprint: the source as it was planned.
        num_rows: rows to read; `None` for a stream, whose last shard's commit record says that it was the last.
        contract: the parts of the engine's contract that readers and `verify` need.
        derived_from: job id and checkpoint of the output that this one was made from without a model, or `None`.
    """

    spec: JobSpec
    identity: dict[str, Any]
    fingerprint: dict[str, Any]
    num_rows: int | None
    rows_per_shard: int
    schema: pa.Schema
    contract: dict[str, Any]
    derived_from: dict[str, Any] | None = None

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The engines that may make a shard of this job."""
        return tuple(self.contract.get("engines") or [str(self.contract.get("engine_id"))])

    @property
    def job_id(self) -> str:
        """First 16 hex digits of the identity's digest."""
        return job_id(self.identity)

    @property
    def num_shards(self) -> int | None:
        """How many shards there will be; `None` for a stream that has not ended."""
        return None if self.num_rows is None else max(1, -(-self.num_rows // self.rows_per_shard))

    @property
    def chunked(self) -> bool:
        """Whether a row may have several chunks; a source may have a column of that name of its own."""
        return self.spec.text.on_long == "chunk"

    @cached_property
    def selection(self) -> Selection | None:
        """Which rows of the source; `None` means all, from 0 on."""
        return None if self.spec.source.rows is None else parse_selection(self.spec.source.rows)

    def rows_at(self, first: int, last: int) -> Int64:
        """Source positions of the rows that shards count as `first` to `last` (exclusive): int64 [last - first]."""
        chosen = self.selection
        return np.arange(first, last, dtype=np.int64) if chosen is None else chosen.positions(first, last)

    def position_of(self, index: int) -> int:
        """Source position of the row that shards count as `index`."""
        return index if self.selection is None else int(self.selection.positions(index, index + 1)[0])

    def shard_of(self, row: int) -> int | None:
        """The shard that holds a source position, or `None` if no shard does."""
        chosen = self.selection
        index = row if chosen is None else chosen.index_of(row)
        if index is None or index < 0 or (self.num_rows is not None and index >= self.num_rows):
            return None
        return index // self.rows_per_shard


@dataclass(frozen=True, kw_only=True)
class StoredJob(JobRecord):
    """`job.json` as read back, and where it lies."""

    directory: JobDirectory


def job_id(identity: dict[str, Any]) -> str:
    """First 16 hex digits of the identity's digest."""
    return digest(identity)[:16]


def prepare(root: Place, record: JobRecord) -> JobDirectory:
    """Create the output directory for a job, or check that it holds the same one.

    A `job.json` that was lost is written again where the shards beside it are of this job.

    Raises:
        DamagedJob: its `job.json` cannot be read.
        OtherJob: it holds another one; the message names the first field that differs.
        ForeignDirectory: it holds something else.
        NoConditionalWrites: an object store that would let two workers commit one shard.
    """
    directory = JobDirectory(root)
    if isinstance(root, ObjectPath):
        _prepare_objects(root, directory, record)
        return directory
    if not directory.job_file.exists():
        with clear_write_errors(root):
            others = [path for path in root.iterdir() if not path.name.startswith(".")] if root.is_dir() else []
            if others and not directory.job_file.exists():  # else another process has just begun the same job
                _check_whose(directory, record)
            make_directory(root)
        create_once(directory.job_file, _job_json(record))
    check_same(read_job(root), record)
    with clear_write_errors(root):
        for folder in (directory.data, directory.commits):
            folder.mkdir(exist_ok=True)
        sync_directory(root)  # also what a process that was killed here made, and did not sync
    return directory


def _prepare_objects(root: ObjectPath, directory: JobDirectory, record: JobRecord) -> None:
    """Create `job.json` once; the store proves first that it can do that, unless there is nothing left to write."""
    if not directory.manifest.exists():
        root.probe()
    if not directory.job_file.exists():
        others = any(not path.name.startswith(".") for path in root.iterdir())  # a probe is another process's
        if others and not directory.job_file.exists():
            _check_whose(directory, record)
        create_once(directory.job_file, _job_json(record))
    check_same(read_job(root), record)
    make_scratch_folder(root)


def _check_whose(directory: JobDirectory, record: JobRecord) -> None:
    """Refuse a directory without `job.json` unless its shards are of this job."""
    shard = known_shard(directory.commits, directory.data)
    if shard is None:
        raise ForeignDirectory(path=directory.root)
    difference = job_difference(*shard, record.schema, record.rows_per_shard)
    if difference is not None:
        field, found, expected = difference
        raise OtherJob(path=directory.root, field=field, found=found, expected=expected)


def read_job(root: Place) -> StoredJob:
    """Read `job.json`.

    Raises:
        NotAJob: missing, absurdly large, or of another format version.
        DamagedJob: it does not parse.
    """
    directory = JobDirectory(root)
    path = directory.job_file
    if isinstance(root, Path) and not root.is_dir():
        raise NotAJob(path=root, problem="not a directory" if root.exists() else "no such directory")
    if not path.is_file():
        raise NotAJob(path=root, problem="it holds no job.json")
    if path.stat().st_size > MAX_JOB_BYTES:
        raise NotAJob(path=root, problem=f"job.json has {path.stat().st_size:,} bytes, absurdly many")
    try:
        table = json.loads(path.read_bytes())
        if table["format"] != FORMAT or table["version"] != VERSION:
            raise NotAJob(path=root, problem=f"job.json is version {table['version']!r}, {VERSION} expected")
        return StoredJob(
            directory=directory,
            spec=parse(JobSpec, table["spec"], f"{path} [spec]"),
            identity=table["identity"],
            fingerprint=table["source"],
            num_rows=table["num_rows"],
            rows_per_shard=int(table["rows_per_shard"]),
            schema=pa.ipc.read_schema(pa.BufferReader(base64.b64decode(table["schema"]))),
            contract=table["contract"],
            derived_from=table["derived_from"],
        )
    except NotAJob:
        raise
    except ExtractError as error:
        raise DamagedJob(path=root, problem=str(error)) from None
    except (ValueError, KeyError, TypeError, RecursionError, OSError, pa.ArrowException) as error:
        raise DamagedJob(path=root, problem=f"{type(error).__name__}: {error}") from None


def check_same(stored: StoredJob, record: JobRecord) -> None:
    """Refuse unless the stored job and this one ask for the same rows, numbers and columns.

    Raises:
        OtherJob: naming the first field that differs, with both values.
    """
    difference = first_difference(stored.identity, json.loads(json.dumps(record.identity)))
    if difference is not None:
        field, found, expected = difference
        raise OtherJob(path=stored.directory.root, field=field, found=found, expected=expected)


def first_difference(found: Any, expected: Any, field: str = "") -> tuple[str, str, str] | None:
    """Dotted name and both values of the first place where two JSON values differ, or `None`.

    A key that is missing counts as null, so that a later version may add settings that are null by default.
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            inner = first_difference(found.get(key), expected.get(key), f"{field}.{key}" if field else key)
            if inner is not None:
                return inner
        return None
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            inner = first_difference(one, other, f"{field}[{place}]")
            if inner is not None:
                return inner
        return None
    return None if found == expected else (field, *_short(found, expected))


def _short(found: Any, expected: Any) -> tuple[str, str]:
    """Two values as JSON, cut to where they begin to differ if they are long."""
    one, other = (json.dumps(value, ensure_ascii=False) for value in (found, expected))
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if same > 40:
        one, other = f"...{one[same - 20 :]}", f"...{other[same - 20 :]}"
    return _cut(one), _cut(other)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _job_json(record: JobRecord) -> bytes:
    table = {
        "format": FORMAT,
        "version": VERSION,
        "job": record.job_id,
        "spec": as_table(record.spec),
        "identity": record.identity,
        "source": record.fingerprint,
        "num_rows": record.num_rows,
        "rows_per_shard": record.rows_per_shard,
        "schema": base64.b64encode(record.schema.serialize().to_pybytes()).decode(),
        "contract": record.contract,
        "derived_from": record.derived_from,
    }
    return json.dumps(table, indent=1, ensure_ascii=False).encode() + b"\n"
