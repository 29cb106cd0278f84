"""A directory that appears under its name only when it is whole: filled as a hidden neighbour, then renamed.

Whatever stops the filling, an error or a kill, nothing stands under the name; a draft that a kill left behind is hidden
and never taken for anything.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from extract.store import clear_write_errors, sync_directory


@contextmanager
def whole_directory(output: Path) -> Iterator[Path]:
    """Give a draft to fill; it becomes `output` when the block ends, and is removed when an error leaves it.

    Args:
        output: absent, or an empty directory, which is replaced.

    Raises:
        OutOfSpace, CannotWrite: the draft cannot be made or renamed.
    """
    with clear_write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        draft = output.parent / f".{output.name}.{os.getpid()}-{secrets.token_hex(4)}"
        draft.mkdir()
    try:
        yield draft
        with clear_write_errors(output):
            if output.exists():
                output.rmdir()
            draft.rename(output)
            sync_directory(output.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
