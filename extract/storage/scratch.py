"""Where the shards of an output in an object store are written before they go there.

One folder for each address and user, so that processes of one machine find each other's claims. It lies under the
folder for temporary files (TMPDIR), which should be a local disk with room for a few shards.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from extract.errors import ExtractError
from extract.storage.object_path import ObjectPath


class ForeignScratch(ExtractError):
    """The folder for temporary files belongs to somebody else."""

    exit_code = 2
    template = "{path}: belongs to another user. Remove it, or set TMPDIR to a folder of your own."


class NoScratch(ExtractError):
    """The folder for temporary files cannot be made."""

    exit_code = 2
    template = "{path}: cannot be made: {problem}. Set TMPDIR to a local folder with room for a few shards."


def scratch_folder(place: ObjectPath) -> Path:
    """The folder of an address; it need not be there."""
    mark = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"extract-{os.getuid()}", mark)


def make_scratch_folder(place: ObjectPath) -> Path:
    """Make it, for this user alone.

    Raises:
        ForeignScratch, NoScratch: it cannot be had.
    """
    path = scratch_folder(place)
    try:
        for folder in (path.parent, path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise ForeignScratch(path=folder)
    except OSError as error:
        raise NoScratch(path=path, problem=error.strerror) from error
    return path
