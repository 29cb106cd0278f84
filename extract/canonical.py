"""One way to turn a value into bytes and a file into a digest, so that equal things have equal names."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

READ_BYTES = 2**20
"""Read at once by each thread that hashes: it stays in the cache of its core."""


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8, no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file's bytes, read at the speed of the disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blocks_digest(path: Path, block_bytes: int, threads: int | None = None) -> str:
    """sha256 (hex) of the sha256s of a file's blocks, one after the other: as strong as `file_digest`, and parallel.

    One sha256 over a file takes a core a second for each 1 to 2 GB, however many cores there are and however fast the
    disk is. A file without bytes has no blocks.

    Args:
        path: a file.
        block_bytes: of all blocks but the last.
        threads: that hash side by side; `None`: as many as this process may use.
    """
    starts = range(0, path.stat().st_size, block_bytes)
    with path.open("rb") as file, ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        digests = pool.map(lambda start: _block(file.fileno(), start, block_bytes), starts)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _block(file: int, start: int, size: int) -> bytes:
    """sha256 of the bytes from `start` on, `size` of them or as many as there are."""
    found, buffer = hashlib.sha256(), bytearray(min(READ_BYTES, size))
    view, stop = memoryview(buffer), start + size
    while start < stop and (count := os.preadv(file, [view[: stop - start]], start)):
        found.update(view[:count])
        start += count
    return found.digest()
