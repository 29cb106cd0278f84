"""Keep what the vendor's libraries print away from stdout, which is for results.

They print from Python when they are imported, and from C++ whenever they like. Python's prints during the import are
turned to stderr; the process's file descriptor 1 is turned there for good, and `sys.stdout` keeps the old one.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def vendor_output_on_stderr() -> Iterator[None]:
    """Import the vendor's packages inside. Leaves a `sys.stdout` that somebody replaced as it is."""
    _keep_stdout()
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _keep_stdout() -> None:
    stdout: Any = sys.stdout
    replaced = bool(stdout is not sys.__stdout__)
    if replaced or stdout is None or sys.stderr is None:
        return
    try:
        if stdout.fileno() != 1 or sys.stderr.fileno() != 2:
            return
        stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # closed, or no file
        return
    buffering = 1 if stdout.line_buffering else -1
    results: Any = os.fdopen(kept, "w", encoding=stdout.encoding, errors=stdout.errors, buffering=buffering)
    # Both names: a package that puts the original back means this one.
    sys.stdout = sys.__stdout__ = results  # type: ignore[misc]
