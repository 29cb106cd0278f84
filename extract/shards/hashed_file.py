"""A file to append to, with the sha256 and the count of what went in.

Written to by pyarrow. A thread of its own may do the hashing, a few pieces behind: that is about half as much work as
compressing, and neither waits for the other then.
"""

import hashlib
import os
import queue
import threading
from pathlib import Path
from typing import Any

PIECES_BEHIND = 8
"""Pieces that may wait to be hashed; they are kept in memory so long."""


class HashedFile:
    """An open file; see the module's docstring.

    Attributes:
        num_bytes: written so far.
    """

    def __init__(self, path: Path, *, ahead: bool = False) -> None:
        """Open `path`, replacing what is there; `ahead`: hash in another thread."""
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()
        self.num_bytes = 0
        self._behind: queue.Queue[Any] | None = None
        if ahead:
            self._behind = queue.Queue(PIECES_BEHIND)
            self._thread = threading.Thread(target=self._hash, args=(self._behind,), name="extract-hash", daemon=True)
            self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._file.closed

    @property
    def sha256(self) -> str:
        """Of everything written; ask once nothing more is written."""
        self._catch_up()
        return self._sha256.hexdigest()

    def write(self, data: Any) -> int:
        """Append bytes, which nobody changes afterwards."""
        if self._behind is None:
            self._sha256.update(data)
        else:
            self._behind.put(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def close(self) -> None:
        """Closed by `sync_and_close` alone, so that a failed sync is not lost in pyarrow."""

    def sync_and_close(self) -> None:
        """Make it durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def drop(self) -> None:
        """Close without a care for what is still buffered."""
        self._catch_up()
        try:
            self._file.close()
        except OSError:  # the disk that made the caller give up is still full
            return

    def _catch_up(self) -> None:
        """Wait for the thread, and end it."""
        if self._behind is not None:
            self._behind.put(None)
            self._thread.join()
            self._behind = None

    def _hash(self, behind: "queue.Queue[Any]") -> None:
        while (data := behind.get()) is not None:
            self._sha256.update(data)
