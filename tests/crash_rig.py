"""Small jobs of many shards, and what must be the same after a crash.

`content` is what a job promises to give however often it was interrupted; `committed` is what may never be touched
again once it is there.
"""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import rig

NUM_ROWS, ROWS_PER_SHARD = 98, 4
NUM_SHARDS = 25


def texts(count: int = NUM_ROWS) -> list[str]:
    """Texts of 1 to about 30 tokens, all different."""
    words = " ".join(rig.passages()).split()
    return [f"{n} " + " ".join(words[7 * n : 7 * n + n % 9]) for n in range(count)]


def write_rows(path: Path, rows: list[str] | None = None) -> Path:
    """A Parquet file with a text column and an id column."""
    rows = texts() if rows is None else rows
    pq.write_table(pa.table({"text": rows, "key": [f"row {n}" for n in range(len(rows))]}), path, compression="none")
    return path


def arguments(engine: Path, rows: Path, out: Path, *options: object) -> list[str]:
    """`extract run` of a job of `NUM_SHARDS` shards."""
    job = ["run", "--engine", engine, "--data", rows, "-o", out, "--rows-per-shard", ROWS_PER_SHARD]
    fixed = ["--id-column", "key", "--threads", 1, "--reserve-bytes", 0, "--quiet", "--json"]
    return [str(argument) for argument in (*job, *fixed, *options)]


def content(out: Path) -> dict[str, str]:
    """sha256 by name of the shard files and the manifest."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted([*(out / "data").iterdir(), out / "manifest.json"])
    }


def committed(out: Path) -> dict[str, tuple[int, int, str]]:
    """Inode, modification time and sha256 of every commit record and of the file that it names."""
    files = []
    for record in sorted((out / "commits").glob("shard-*.json")):
        files += [record, out / "data" / json.loads(record.read_bytes())["data"]]
    return {str(path.relative_to(out)): _state(path) for path in files}


def everything(out: Path) -> dict[str, tuple[int, int, str]]:
    """Inode, modification time and sha256 of every file."""
    return {str(path.relative_to(out)): _state(path) for path in sorted(out.rglob("*")) if path.is_file()}


def num_commits(out: Path) -> int:
    """How many shards are committed."""
    return len(list((out / "commits").glob("shard-*.json")))


def names(out: Path) -> set[str]:
    """Every name below the directory, hidden ones too; a complete job has nothing but the ones it documents."""
    return {str(path.relative_to(out)) for path in out.rglob("*")}


def expected_names(out: Path) -> set[str]:
    """What a complete job holds, by its manifest."""
    shards = json.loads((out / "manifest.json").read_bytes())["shards"]
    return (
        {"job.json", "manifest.json", ".claims", "data", "commits"}
        | {f"data/{shard['data']}" for shard in shards}
        | {f"commits/shard-{shard['shard']:05d}.json" for shard in shards}
    )


def stored_keys(out: Path) -> list[str]:
    """The id column over all shards, in order."""
    shards = json.loads((out / "manifest.json").read_bytes())["shards"]
    keys: list[str] = []
    for shard in shards:
        with pa.ipc.open_file(out / "data" / shard["data"]) as file:
            keys += file.read_all().column("id").to_pylist()
    return keys


def _state(path: Path) -> tuple[int, int, str]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()
