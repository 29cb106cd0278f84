"""Which shard goes to whom when one driver hands them out: attempts, nodes to avoid, and stragglers. Pure.

It decides nothing about what is done: a shard may be handed out twice, or be made by somebody else, and its commit
record alone counts. A worker may get its next shard ahead of time; but a shard that has failed before is made alone,
so that the next failure shows which one is to blame. Knows nothing of Ray.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LOOK_AHEAD = 64
"""How far into the queue a shard is looked for that has not failed on this node yet."""
REMEMBERED = 200


@dataclass(slots=True)
class _Trouble:
    attempts: int = 0
    nodes: set[str] = field(default_factory=set)


class Dispatch:
    """Shards that wait, that are being made, and that failed.

    Args:
        shards: to be made, in order.
        max_attempts: of one shard.
        straggler_factor: a shard that takes so many times the median may be made a second time beside the first.
    """

    def __init__(self, shards: Iterable[int], *, max_attempts: int, straggler_factor: float) -> None:
        self._queue = deque(shards)
        self._max_attempts, self._straggler_factor = max_attempts, straggler_factor
        self._running: dict[int, list[float]] = {}
        self._trouble: dict[int, _Trouble] = {}
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self.failed: dict[int, str] = {}

    @property
    def num_open(self) -> int:
        """Shards that wait or are being made."""
        return len(self._queue) + len(self._running)

    def take(self, node: str, now: float) -> int | None:
        """The next shard for a worker on `node`, preferably one that has not failed there; `None`: nothing to do.

        When nothing waits, it may be a shard that another worker has been at for very long.
        """
        for place, shard in zip(range(LOOK_AHEAD), self._queue, strict=False):
            if shard not in self._trouble or node not in self._trouble[shard].nodes:
                del self._queue[place]
                return self._hand_out(shard, now)
        if self._queue:
            return self._hand_out(self._queue.popleft(), now)
        return self._straggler(now)

    def take_ahead(self, beside: int, node: str, num_workers: int, now: float) -> int | None:
        """The next shard for a worker on `node` that is still at the shard `beside`; `None`: better not yet.

        There is none while fewer shards wait than there are workers, for another one may be free before this one; none
        beside a shard that has failed; and none while such a shard waits that this worker may take next.
        """
        if len(self._queue) < num_workers or self._has_failed(beside):
            return None
        if self._has_failed(self._queue[0]) and node not in self._trouble[self._queue[0]].nodes:
            return None
        for place, shard in zip(range(LOOK_AHEAD), self._queue, strict=False):
            if not self._has_failed(shard):
                del self._queue[place]
                return self._hand_out(shard, now)
        return None

    def began(self, shard: int, now: float) -> None:
        """A shard that was handed out ahead of time is the next one of its worker: its time counts from now."""
        started = self._running.get(shard)
        if started is not None and len(started) == 1:
            started[0] = now

    def done(self, shard: int, now: float) -> None:
        """A shard is committed, by whichever attempt."""
        if started := self._running.pop(shard, None):
            self._durations.append(now - started[0])
        self._trouble.pop(shard, None)
        self.failed.pop(shard, None)

    def lost(self, shard: int, node: str, reason: str, *, counts: bool = True) -> bool:
        """An attempt has failed, or nobody knows how it ended. True: the shard has failed for good.

        Args:
            shard: which.
            node: where.
            reason: for the report.
            counts: as an attempt; it does not where a machine was taken away, or another shard was to blame.
        """
        copies = self._running.get(shard)
        if copies is None:  # committed, or given up
            return False
        trouble = self._trouble.setdefault(shard, _Trouble())
        if counts:
            trouble.nodes.add(node)
            trouble.attempts += 1
        copies.pop()
        if copies:
            return False
        del self._running[shard]
        if trouble.attempts >= self._max_attempts:
            self.failed[shard] = reason
            return True
        self._queue.appendleft(shard)
        return False

    def _has_failed(self, shard: int) -> bool:
        return shard in self._trouble and self._trouble[shard].attempts > 0

    def _hand_out(self, shard: int, now: float) -> int:
        self._running[shard] = [now]
        return shard

    def _straggler(self, now: float) -> int | None:
        if len(self._durations) < 3:
            return None
        longest = self._straggler_factor * statistics.median(self._durations)
        for shard, started in self._running.items():
            if len(started) == 1 and now - started[0] > longest:
                started.append(now)
                return shard
        return None
