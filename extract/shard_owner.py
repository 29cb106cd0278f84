"""Whose shards an output directory holds, where its `job.json` is lost: each file says so in its metadata.

So a lost `job.json` can be written again by whoever asks for the same job, and by nobody else.
"""

import json

import pyarrow as pa

from extract.commits import Commit, commit_path, committed_shards, read_commit
from extract.errors import ExtractError
from extract.shards.schema import METADATA_PREFIX
from extract.storage import Place
from extract.storage.local_copies import local_copy

MOST_SHOWN = 60
"""Characters of a value."""
TELLING = ("checkpoint", "engine", "tokens")
"""Facts in a file's metadata that say why its job is another one."""


def known_shard(commits: Place, data: Place) -> tuple[Commit, pa.Schema] | None:
    """The first committed shard that can be opened: its record and the schema of its file; `None`: there is none."""
    for shard in sorted(committed_shards(commits)):
        try:
            commit = read_commit(commit_path(commits, shard))
            with pa.memory_map(str(local_copy(data / commit.data, commit.sha256, commit.num_bytes))) as file:
                return commit, pa.ipc.open_file(file).schema
        except (ExtractError, OSError, ValueError):  # `verify` is who names it
            continue
    return None


def job_difference(
    commit: Commit, found: pa.Schema, expected: pa.Schema, rows_per_shard: int
) -> tuple[str, str, str] | None:
    """What tells a shard's job from another one, with both values as JSON; `None`: it is the same job.

    Args:
        commit: of the shard.
        found: schema of its file.
        expected: schema of the job that is asked for.
        rows_per_shard: of that job.
    """
    theirs, ours = _facts(found), _facts(expected)
    pairs: dict[str, tuple[object, object]] = {name: (theirs.get(name), ours.get(name)) for name in TELLING}
    pairs["states.rows_per_shard"] = _rows_per_shard(commit, rows_per_shard), rows_per_shard
    pairs["job"] = theirs.get("job"), ours.get("job")
    for field, (one, other) in pairs.items():
        if one != other:
            return field, _shown(one), _shown(other)
    same = found.equals(expected, check_metadata=True)
    return None if same else ("schema", _shown(str(found)), _shown(str(expected)))


def _facts(schema: pa.Schema) -> dict[str, str]:
    """What a file's metadata says of its job."""
    metadata: dict[bytes, bytes] = schema.metadata or {}
    return {key.decode().removeprefix(METADATA_PREFIX): value.decode() for key, value in metadata.items()}


def _rows_per_shard(commit: Commit, expected: int) -> int:
    """Of the shard's job, as far as one shard tells: the last one may be short."""
    if not commit.last:
        return commit.num_rows
    return commit.first_row // commit.shard if commit.shard else expected


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
