"""Many small objects of one prefix: their names, whether some are there, what they hold, with many requests at a time.

A store answers a request in tens of milliseconds and a thousand of them in little more, but lists only a thousand names
at a time, each page after the one before it: so a long listing is split, and its parts are asked for at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

from extract.storage.object_path import ObjectPath

J = TypeVar("J")
T = TypeVar("T")

REQUESTS_AT_ONCE = 64
PAGE_NAMES = 1000
"""That stores list in one request."""


def list_names(prefix: ObjectPath, apart: Sequence[str] = ()) -> Iterator[str]:
    """Names of the objects right under a prefix, from listings alone.

    Args:
        prefix: where.
        apart: beginnings of names, in order, to split a listing of more than one page at.
    """
    page: list[str] = []
    for name in _names(prefix, "", None):
        yield name
        page.append(name)
        if apart and len(page) == PAGE_NAMES:
            break
    else:
        return
    bounds = [page[-1], *(bound for bound in apart if bound > page[-1]), None]
    for names in _at_once(pairwise(bounds), lambda part: [*_names(prefix, part[0] or "", part[1])]):
        yield from names


def read_all(prefix: ObjectPath, names: Iterable[str]) -> Iterator[bytes]:
    """What small objects hold, in the order asked for.

    Raises:
        FileNotFoundError: one of them is not there.
    """
    return _at_once(names, lambda name: (prefix / name).read_bytes())


def are_there(prefix: ObjectPath, names: Iterable[str]) -> Iterator[bool]:
    """Whether there are such objects, in the order asked for."""
    return _at_once(names, lambda name: (prefix / name).exists())


def _names(prefix: ObjectPath, after: str, before: str | None) -> Iterator[str]:
    """Names that sort after one and before another."""
    start = len(prefix.key) + 1 if prefix.key else 0
    for key in prefix.keys(after):
        name = key[start:]
        if before is not None and name >= before:
            return
        if "/" not in name:
            yield name


def _at_once(jobs: Iterable[J], do: Callable[[J], T]) -> Iterator[T]:
    """Answers in order; no more than REQUESTS_AT_ONCE are asked for, or wait to be taken."""
    jobs = iter(jobs)
    for first in jobs:
        yield do(first)  # which says whether the store is there at all
        break
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        waiting = deque[Future[T]]()
        for job in jobs:
            waiting.append(pool.submit(do, job))
            if len(waiting) > REQUESTS_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
