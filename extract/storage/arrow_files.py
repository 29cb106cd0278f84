"""Objects as files that Arrow reads by ranges: only the footer, columns and batches that are asked for travel."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from extract.storage import ObjectPath, Place
from extract.storage.bucket import PATIENT, check_not_forked, client_options

BUFFER_BYTES = 2**20
"""Asked for at once, at least."""


def arrow_file(place: Place) -> pa.NativeFile:
    """A file for reading at any position: mapped, or read by ranges. The caller closes it.

    Raises:
        FileNotFoundError: nothing there.
    """
    if isinstance(place, Path):
        return pa.memory_map(str(place))
    return pa.PythonFile(RangeFile(place), mode="r")


def arrow_filesystem(place: ObjectPath) -> pa.fs.FileSystem:
    """The store as Arrow's datasets want it; its paths are `BUCKET/KEY`."""
    from obstore.fsspec import FsspecStore

    check_not_forked(place)
    scheme = place.bucket.url.partition("://")[0]
    options: dict[str, Any] = {"client_options": client_options(), "retry_config": PATIENT, "skip_instance_cache": True}
    store: Any = FsspecStore(scheme, **options)  # type: ignore[call-overload]
    return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(store))


class RangeFile(io.RawIOBase):
    """An object as a binary file; every request goes through its bucket, so that errors are ours."""

    def __init__(self, path: ObjectPath) -> None:
        self._bucket, self._path = path.bucket, path
        self._reader: Any = path.opened(BUFFER_BYTES)

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes, without a request."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """See `io.IOBase`."""
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        """See `io.IOBase`."""
        return int(self._reader.tell())

    def read(self, size: int | None = -1) -> bytes:
        """See `io.RawIOBase`."""
        count, position = None if size is None or size < 0 else size, self.tell()

        def read(client: object) -> bytes:
            if self.tell() != position:  # an answer broke off
                self.seek(position)
            return bytes(self._reader.read(count))

        return self._bucket.ask(self._path, read, reads=True)

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
