"""The commit protocol: publish data under a name made from its content, then create its record once.

A shard is done when its record exists. On a file system the record is created by a hard link, which fails when the name
is there; in an object store by one conditional write. So of any number of racing workers exactly one wins, and nothing
that was recorded is ever changed. Knows nothing of Arrow.
"""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from extract.errors import ExtractError, OutOfSpace
from extract.storage import ObjectPath, Place, make_scratch_folder, scratch_folder
from extract.storage.many_objects import list_names

NO_SPACE = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file larger than this process may write (ulimit -f) or the file system can hold",
}


class DiskFull(OutOfSpace):
    """A write failed for lack of space."""

    template = (
        "{path}: {problem} ({free:,} bytes free). What is committed stays: make room, then run the same command again."
    )


class CannotWrite(ExtractError):
    """The output cannot be written."""

    exit_code = 2
    template = "{path}: cannot be written: {problem}. Choose another place with -o."


class NoHardLinks(ExtractError):
    """The file system cannot create a name only if it is absent."""

    exit_code = 2
    template = (
        "{path}: this file system offers no hard links ({problem}), which commit records need. "
        "Choose an output directory on a local disk or NFS."
    )


@contextmanager
def clear_write_errors(path: Place) -> Iterator[None]:
    """Turn what the operating system says about a failed write into one of our errors; stores speak for themselves."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise DiskFull(path=path, problem=NO_SPACE[error.errno], free=free_bytes(path)) from error
        raise CannotWrite(path=path, problem=error.strerror or error) from error


def free_bytes(path: Place) -> int:
    """Bytes that may still be written where `path` lies (or its nearest parent that exists).

    An object store does not say; there it is what the temporary files of its shards may take.
    """
    if isinstance(path, ObjectPath):
        path = scratch_folder(path)
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def names_in(path: Place, apart: Sequence[str] = ()) -> Iterator[str]:
    """Names of what lies right in a directory or under an address, as they come; none if there is no such place.

    Args:
        path: where.
        apart: beginnings of names, in order, that are there equally often: an object store lists between them at once.
    """
    if isinstance(path, ObjectPath):
        yield from list_names(path, apart)
        return
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            yield entry.name


def sync_directory(path: Place) -> None:
    """Make the names in a directory survive a power failure; a store's answer says that they do."""
    if isinstance(path, ObjectPath):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, and let all of their names survive a power failure.

    The name of the last one that is there is synced too: whoever made it may have been killed before doing so.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    with suppress(PermissionError):  # a directory above that is not ours to read is not ours to have made
        sync_directory(missing[-1].parent.parent)
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def create_once(path: Place, content: bytes) -> bool:
    """Create `path` holding `content`, whole and durable, if the name is free.

    Returns:
        True if this call created it, False if it was there; what was there is never touched. Over a network a repeated
        request can say False of a name that this very call created: who cares compares the content.
    """
    if isinstance(path, ObjectPath):
        return path.create(content)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with clear_write_errors(path):
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                if path.exists():  # whoever finished the job swept our temporary file away
                    return False
                raise
            except OSError as error:
                if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise NoHardLinks(path=path.parent, problem=error.strerror) from None
                raise
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
    return True


def replace_file(path: Place, content: bytes) -> None:
    """Write `path` whole and durable, in place of what was there (only for files that can be derived again)."""
    if isinstance(path, ObjectPath):
        path.replace(content)
        return
    with replacing_file(path) as file:
        file.write(content)


@contextmanager
def replacing_file(path: Place) -> Iterator[IO[bytes]]:
    """A file to write what is too large for memory; when the block ends well it takes the place of what was there."""
    if isinstance(path, ObjectPath):
        with tempfile.NamedTemporaryFile(dir=make_scratch_folder(path.parent)) as file:
            with clear_write_errors(path):
                yield file
                file.flush()
            path.publish(Path(file.name))
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with clear_write_errors(path):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)


def move_aside(path: Place, target: Place) -> None:
    """Give a file another name of the same directory or store."""
    if isinstance(path, ObjectPath):
        assert isinstance(target, ObjectPath)  # both lie in one output
        path.rename(target)
    else:
        path.rename(str(target))


def publish(temporary: Path, path: Place) -> None:
    """Give a finished, synced temporary file its name, which is made from its content: replacing changes nothing."""
    if isinstance(path, ObjectPath):
        with clear_write_errors(temporary):
            path.publish(temporary)
            temporary.unlink(missing_ok=True)
        return
    with clear_write_errors(path):
        temporary.rename(path)
        sync_directory(path.parent)
