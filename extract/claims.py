"""Which of several processes on one output directory works on which shard: a lock on one byte of one file a shard.

Only a courtesy that saves double work: the commit record alone decides. The kernel drops the locks of a process that
dies. Where a file system has no locks, every claim is granted and two workers may do the same shard; one of them wins.
"""

import errno
import fcntl
import os
from pathlib import Path

from extract.store import clear_write_errors

END_OF_JOB = 2**62
"""The byte that is locked while a finished job is tidied up; no shard has this number."""


class Claims:
    """Locks of this process on one output directory.

    One object at a time: closing any of them would drop the locks of all, for that is how POSIX locks work.

    Attributes:
        supported: false as soon as a lock could not be had for another reason than that somebody holds it.
    """

    def __init__(self, path: Path) -> None:
        with clear_write_errors(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.supported = True

    def claim(self, shard: int) -> bool:
        """True if no other process works on this shard (or nobody can tell)."""
        return self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, shard)

    def wait_for_end_of_job(self) -> None:
        """Wait until no other process tidies up this directory (or nobody can tell)."""
        self._lock(fcntl.LOCK_EX, END_OF_JOB)

    def release(self, shard: int) -> None:
        """Let others take the shard."""
        if self.supported:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, shard)

    def close(self) -> None:
        """Release all."""
        os.close(self._file)

    def _lock(self, how: int, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, how, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            self.supported = False
        return True
