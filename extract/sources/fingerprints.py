"""What identifies a file's rows, and the check that they are still the same when they are read.

Small files are hashed whole. Hashing terabytes before a plan can be shown would cost more than it tells, so large files
are hashed by their size, ends and evenly spaced blocks, and the fingerprint says so ("sampled"). The modification time
is only a shortcut: it is recorded to avoid hashing again, and left out of `identity`, which a resume compares.

An object is known by its size and the tag that its store gives to its content; hashing it would be to fetch it.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extract.canonical import file_digest
from extract.errors import SourceError
from extract.storage import ObjectFacts, ObjectPath, Place

WHOLE_FILE_BYTES = 256 * 2**20
WHOLE_SOURCE_BYTES = 16 * 2**30
"""In a source larger than this, files above `SMALL_FILE_BYTES` are sampled."""
SMALL_FILE_BYTES = 2**20
BLOCK_BYTES = 64 * 2**10
NUM_BLOCKS = 16


class SourceChanged(SourceError):
    """A file is not the one that the plan was made from."""

    template = (
        "{path}: changed while the job ran ({field} was {expected}, is {found}). "
        "Restore the file, or start a new job in another output directory."
    )


def describe_file(
    path: Place, name: str, rows: int | None, known: Mapping[str, Any] | None = None, source_bytes: int = 0
) -> dict[str, Any]:
    """The entry of one file in a source's fingerprint.

    `known` is this file's entry in an earlier fingerprint; its digest is taken over while size and time still match.
    `source_bytes` is the size of all files together.
    """
    if isinstance(path, ObjectPath):
        facts = path.stat()
        return {"name": name, "size": facts.st_size, "rows": rows, "e_tag": facts.e_tag}
    stat = path.stat()
    entry: dict[str, Any] = {"name": name, "size": stat.st_size, "rows": rows, "mtime_ns": stat.st_mtime_ns}
    if known is not None and all(known.get(key) == entry[key] for key in ("name", "size", "mtime_ns")):
        return entry | {"sha256": known["sha256"], "sampled": known["sampled"]}
    sampled = stat.st_size > (WHOLE_FILE_BYTES if source_bytes <= WHOLE_SOURCE_BYTES else SMALL_FILE_BYTES)
    return entry | {"sha256": _digest(path, sampled=sampled), "sampled": sampled}


def check_unchanged(path: Place, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a file with its fingerprint entry: size and time, and the digest only if the time differs.

    Returns the entry with the modification time at which the file was found to be the same.

    Raises:
        SourceChanged: gone, of another size, or of other bytes.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise SourceChanged(path=path, field="size", expected=f"{entry['size']:,}", found="gone") from None
    if stat.st_size != entry["size"]:
        raise SourceChanged(path=path, field="size", expected=f"{entry['size']:,}", found=f"{stat.st_size:,}")
    if isinstance(stat, ObjectFacts):
        if stat.e_tag != entry["e_tag"]:
            raise SourceChanged(path=path, field="e_tag", expected=entry["e_tag"], found=stat.e_tag)
        return dict(entry)
    assert isinstance(path, Path)  # or it would have had the other kind of facts
    if stat.st_mtime_ns != entry["mtime_ns"]:
        found = _digest(path, sampled=entry["sampled"])
        if found != entry["sha256"]:
            raise SourceChanged(path=path, field="sha256", expected=entry["sha256"][:12], found=found[:12])
    return {**entry, "mtime_ns": stat.st_mtime_ns}


def _digest(path: Path, *, sampled: bool) -> str:
    if not sampled:
        return file_digest(path)
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for index in range(NUM_BLOCKS + 2):  # the first block, 16 between, and the last one, where footers are
            file.seek(index * (size - BLOCK_BYTES) // (NUM_BLOCKS + 1))
            sha.update(file.read(BLOCK_BYTES))
    return sha.hexdigest()
