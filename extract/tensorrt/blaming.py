"""The vendor's package raises whatever its parts do: here it becomes one of our errors, with the last word it said.

Our own errors go through as they are. Knows nothing of what was being done: the error's class says that.
"""

import contextlib
from collections.abc import Callable, Iterator

from extract.errors import ExtractError

MAX_CHARACTERS = 300


@contextlib.contextmanager
def blaming(made: Callable[[str], ExtractError]) -> Iterator[None]:
    """Raise `made(problem)` instead of an exception that is not ours."""
    try:
        yield
    except ExtractError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {lines[-1] if lines else 'without a word'}"
        raise made(said[:MAX_CHARACTERS].rstrip(".")) from error
