"""The loop of every worker: claim a shard, make it, commit it; over what is left, until nothing is.

`make_shards` is what all runners share: in this process, in worker processes, in Ray's actors and in array jobs.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from extract.claims import Claims
from extract.commits import commit_path, read_commit
from extract.job import JobDirectory
from extract.pipeline import Computed, ShardBroke, Worker, run_stages
from extract.publishing import Finished, remove_leftovers, written
from extract.runners.todo import Todo

POLL_S = 0.5


class Watcher(Protocol):
    """Who is told what happens to single shards."""

    def began(self, shard: int) -> None:
        """This process has taken a shard."""

    def broke(self, shard: int, reason: str) -> None:
        """A shard raised what nobody foresaw."""


class Unwatched:
    """Nobody is told."""

    def began(self, shard: int) -> None:
        """Nothing."""

    def broke(self, shard: int, reason: str) -> None:
        """Nothing."""


def make_shards(
    worker: Worker, directory: JobDirectory, shards: Iterable[int], *, leave: Callable[[], None] = lambda: None
) -> Iterator[Finished]:
    """Make shards, whoever else makes them: the first record of each counts.

    Args:
        worker: opened parts.
        directory: where shards go.
        shards: taken ahead of time, in a background thread.
        leave: is called when no further shard is wanted, and wakes `shards` where they wait for a next one.

    Raises:
        ShardBroke: one of them; what follows it was not made.
        KeyboardInterrupt: the worker's `stop` was set; the shard in flight is dropped.
    """

    def write(items: Iterable[Computed]) -> Iterator[Finished]:
        try:
            yield from written(worker, directory, items)
        finally:
            leave()

    return run_stages(worker, shards, write)


def make_what_is_left(
    worker: Worker,
    directory: JobDirectory,
    todo: Todo,
    claims: Claims,
    watcher: Watcher,
    *,
    among: Iterable[int] | None = None,
    wait: bool = True,
) -> Iterator[Finished]:
    """Commits as they come, over as many passes through what is left as it takes.

    Args:
        worker: opened parts.
        directory: where shards go.
        todo: what is left; commits of others are noted there as they are seen.
        claims: locks of this process.
        watcher: is told of shards that begin and break.
        among: only these shards.
        wait: for shards that other processes hold; else they are left to them.
    """
    among = None if among is None else tuple(among)
    while next(todo.left(among), None) is not None:
        claimed = _Claimed(directory, todo, claims, worker.stop, watcher, among)
        try:
            for finished in make_shards(worker, directory, claimed):
                claims.release(finished.commit.shard)
                if finished.beyond:
                    todo.note_end_before(finished.commit.shard)
                    continue
                todo.note(finished.commit)
                worker.progress.wrote(finished.commit.num_bytes)
                yield finished
        except ShardBroke as error:
            claims.release(error.shard)
            todo.broke(error.shard, error.reason)
            watcher.broke(error.shard, error.reason)
            worker.progress.say(f"shard {error.shard} broke: {error.reason}")
            continue
        if not claimed.any and next(todo.left(among), None) is not None:  # others hold all that is left
            if not wait:
                return
            if worker.stop.wait(POLL_S):
                raise KeyboardInterrupt


class _Claimed(Iterable[int]):
    """Shards that this process may work on now; those of others are passed over, those they committed are noted."""

    def __init__(
        self,
        directory: JobDirectory,
        todo: Todo,
        claims: Claims,
        stop: threading.Event,
        watcher: Watcher,
        among: Iterable[int] | None,
    ) -> None:
        self._directory, self._todo, self._claims, self._stop = directory, todo, claims, stop
        self._watcher, self._among = watcher, among
        self.any = False

    def __iter__(self) -> Iterator[int]:
        for shard in self._todo.left(self._among):
            if self._stop.is_set():
                return
            if not self._claims.claim(shard):
                continue
            path = commit_path(self._directory.commits, shard)
            if path.exists():
                self._todo.note(read_commit(path))
                self._claims.release(shard)
                continue
            if self._claims.supported:
                remove_leftovers(self._directory, shard)
            self.any = True
            self._watcher.began(shard)
            yield shard
