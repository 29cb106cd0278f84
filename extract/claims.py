"""Which of several processes on one output directory works on which shard: a lock on one byte of one file a shard.

Only a courtesy that saves double work: the commit record alone decides. The kernel drops the locks of a process that
dies. Where a file system has no locks, every claim is granted and two workers may do the same shard; one of them wins.
"""

import errno
import fcntl
import os
from pathlib import Path


class Claims:
    """Locks of this process on one output directory."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.supported = True

    def claim(self, shard: int) -> bool:
        """True if no other process works on this shard (or nobody can tell)."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, shard)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            self.supported = False
        return True

    def release(self, shard: int) -> None:
        """Let others take the shard."""
        if self.supported:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, shard)

    def close(self) -> None:
        """Release all."""
        os.close(self._file)
