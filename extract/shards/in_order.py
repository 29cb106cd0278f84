"""A function over items by several threads, with the results in the order of the items and few of them at once.

For work that releases the interpreter's lock (numpy on large arrays, compressing). With one thread it is a plain `map`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def in_order(work: Callable[[A], B], items: Iterable[A], threads: int) -> Iterator[B]:
    """`map(work, items)`, where up to `threads` items are worked on ahead of who takes the results.

    An exception of `work` comes out where its result would have; what was begun after it is waited for.
    """
    if threads == 1:
        yield from map(work, items)
        return
    todo = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="extract-encode") as pool:
        begun: deque[Future[B]] = deque(pool.submit(work, item) for item in islice(todo, threads))
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(work, item) for item in islice(todo, 1))
            yield result
