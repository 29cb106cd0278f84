"""Local copies of committed shard files that lie in an object store, by content: fetched once, read like any file.

A copy is named by its sha256 and was hashed as it came, so one copy serves every output that holds the same bytes. The
folder is bounded: whatever was not used for longest goes first. Nothing here is needed again; it may be removed.
"""

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from extract.errors import BadValue, VerificationFailed
from extract.storage import ObjectPath, Place
from extract.store import clear_write_errors

DEFAULT_BYTES = 20 * 2**30
"""Unless EXTRACT_CACHE_BYTES says otherwise."""


class DamagedObject(VerificationFailed):
    """An object holds other bytes than were committed."""

    template = "{path}: {problem}. See what else is wrong: extract verify {root}"


def cache_folder() -> Path:
    """Where this user's copies lie: EXTRACT_CACHE, or `extract` in the user's folder for caches."""
    own = os.environ.get("EXTRACT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "extract")


def local_copy(path: Place, sha256: str, num_bytes: int, *, again: bool = False) -> Path:
    """A local file with the bytes of `path`: itself, or a copy.

    Args:
        path: a committed shard file.
        sha256: what was committed.
        num_bytes: its size.
        again: fetch it even if there is a copy, to see what the store holds now.

    Raises:
        FileNotFoundError: there is none.
        DamagedObject: other bytes than were committed.
    """
    if isinstance(path, Path):
        return path
    folder = cache_folder() / "shards"
    copy = folder / sha256
    if not again and copy.is_file() and copy.stat().st_size == num_bytes:
        with suppress(OSError):  # another user's copy serves as well
            os.utime(copy)
        return copy
    with clear_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _make_room(folder, num_bytes)
    temporary = folder / f".{sha256[:16]}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        found, size = download(path, temporary)
        if (found, size) != (sha256, num_bytes):
            raise DamagedObject(path=path, problem=_difference(found, size, sha256, num_bytes), root=path.parent.parent)
        with clear_write_errors(copy):
            temporary.rename(copy)
    finally:
        temporary.unlink(missing_ok=True)
    return copy


def download(path: ObjectPath, target: Path) -> tuple[str, int]:
    """Copy an object to a new local file, durably; returns its sha256 and size.

    Raises:
        FileNotFoundError: no such object.
    """
    digest, size = hashlib.sha256(), 0
    with clear_write_errors(target):
        file = target.open("xb")
    with file:
        for chunk in path.chunks():
            digest.update(chunk)
            size += len(chunk)
            with clear_write_errors(target):
                file.write(chunk)
        with clear_write_errors(target):
            file.flush()
            os.fsync(file.fileno())
    return digest.hexdigest(), size


def _difference(found: str, size: int, sha256: str, num_bytes: int) -> str:
    if size != num_bytes:
        return f"{size:,} bytes found, {num_bytes:,} were written"
    return f"sha256 {found[:12]} found, {sha256[:12]} was written"


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove what was not used for longest until `num_bytes` more are within the bound; who has one open keeps it."""
    copies = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process makes room, too
            facts = path.stat()
            copies.append((facts.st_mtime_ns, facts.st_size, path))
    left = sum(size for _, size, _ in copies)
    for _, size, path in sorted(copies):
        if left + num_bytes <= _bound():
            return
        path.unlink(missing_ok=True)
        left -= size


def _bound() -> int:
    said = os.environ.get("EXTRACT_CACHE_BYTES", str(DEFAULT_BYTES))
    if not said.isdigit():
        raise BadValue(where="environment", key="EXTRACT_CACHE_BYTES", found=f'"{said}"', expected="a number of bytes")
    return int(said)
