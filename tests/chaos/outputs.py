"""Where a round's output lies, a directory or a prefix of an object store, and what is committed there."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import crash_rig
import object_rig

from extract.commits import committed_shards
from extract.storage import ObjectPath, Place


def num_commits(out: Place) -> int:
    """How many shards are committed."""
    return len(committed_shards(out / "commits"))


def committed(out: Place) -> dict[str, tuple[object, ...]]:
    """Every commit record and the file that it names, each with what changes if it is written again."""
    return dict(object_rig.committed(out) if isinstance(out, ObjectPath) else crash_rig.committed(out))


@contextmanager
def as_directory(out: Place) -> Iterator[Path]:
    """The output as a directory, to be looked at."""
    if not isinstance(out, ObjectPath):
        yield out
        return
    folder = Path(tempfile.mkdtemp(prefix="extract-chaos-copy-"))
    try:
        yield object_rig.download(out, folder)
    finally:
        shutil.rmtree(folder)
