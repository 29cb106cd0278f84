"""A job of a million shards on a thousand workers that fail, played through by the driver's own dispatch.

Simulated time, real bookkeeping: queue, attempts and stragglers are `extract.runners.dispatch`, so the memory and the
seconds that it takes are measured; how long shards take, what fails and how long it stays away is assumed and printed.
Workers fail one by one, nodes with all workers on them, and the driver with everything that is in flight: what was in
flight is lost, what was committed stays. Nothing is computed; listings and commit records are measured elsewhere
(`bookkeeping.py`), and their seconds enter as assumptions.

    python tests/bench/simulate_scale.py --shards 1000000 --workers 1000
"""

import argparse
import heapq
import json
import platform
import random
import resource
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import count

from extract.runners.dispatch import Dispatch

SLOW_FACTOR = 20
LOOK_EVERY_S = 10.0
"""Idle workers ask again for a straggler."""


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What the simulation does not know.

    Attributes:
        shard_seconds: of one shard, usually; spread by a tenth.
        restart_seconds: until a worker is replaced and has loaded its engine.
        node_away_seconds: until a node that was lost is replaced, its workers included.
        driver_seconds: until a driver that died is started again and has listed what is done.
    """

    shards: int
    workers: int
    workers_per_node: int
    shard_seconds: float
    restart_seconds: float
    node_away_seconds: float
    driver_seconds: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What goes wrong.

    Attributes:
        slow: part of the attempts that take twenty times as long.
        worker_hours, node_hours: mean time between failures of one worker, and of one node.
        straggler_factor: times the median of a shard's time, after which an idle worker makes it a second time.
    """

    name: str
    slow: float = 1e-4
    worker_hours: float = 1e9
    node_hours: float = 1e9
    driver_dies_at_hours: tuple[float, ...] = ()
    straggler_factor: float = 3.0


class Job:
    """One job in simulated time."""

    def __init__(self, assumed: Assumed, scenario: Scenario) -> None:
        self.assumed, self.scenario = assumed, scenario
        self._draw = random.Random(1)
        self._now, self._order = 0.0, count()
        self._events: list[tuple[float, int, str, int, int]] = []
        self._idle = list(reversed(range(assumed.workers)))
        self._making: dict[int, int] = {}
        self._in_flight: Counter[int] = Counter()
        self._attempt = [0] * assumed.workers
        """Of each worker; events of earlier ones are about what was lost."""
        self._done = bytearray(assumed.shards)
        self._lost_at: dict[int, float] = {}
        self._commits: Counter[int] = Counter()
        self._delays: list[float] = []
        self._driver_back = 0.0
        self._copies = self._lost = 0
        self._handed_out_last = 0.0
        self._dispatch = self._new_dispatch()
        for node in range(-(-assumed.workers // assumed.workers_per_node)):
            self._at(self._after_hours(scenario.node_hours), "node dies", node)
        for hours in scenario.driver_dies_at_hours:
            self._at(hours * 3600, "driver dies", 0)

    def play(self) -> dict[str, float | str]:
        """Until every shard is committed."""
        clock = time.process_time()
        while self._dispatch.num_open or self._now < self._driver_back:
            self._hand_out()
            self._now, _, kind, which, attempt = heapq.heappop(self._events)
            self._happens(kind, which, attempt)
        mean = 1.005 * (1 + (SLOW_FACTOR - 1) * self.scenario.slow)  # of the spread, and of the slow ones
        ideal = self.assumed.shards * self.assumed.shard_seconds * mean / self.assumed.workers
        return {
            "scenario": self.scenario.name,
            "hours": self._now / 3600,
            "over_ideal": self._now / ideal - 1,
            "tail_seconds": self._now - self._handed_out_last,
            "lost": self._lost,
            "second_copies": self._copies,
            "failed": len(self._dispatch.failed),
            "delay_mean_s": sum(self._delays) / max(1, len(self._delays)),
            "delay_max_s": max(self._delays, default=0.0),
            "commits_per_s": self.assumed.shards / self._now,
            "commits_in_worst_s": max(self._commits.values()),
            "driver_cpu_s": time.process_time() - clock,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    def _happens(self, kind: str, which: int, attempt: int) -> None:
        match kind:
            case "made" | "fails":
                if self._attempt[which] == attempt:
                    self._ends(which, well=kind == "made")
            case "back":
                if self._attempt[which] == attempt:
                    self._idle.append(which)
            case "node dies":
                self._node_dies(which)
            case "driver dies":
                self._driver_dies()
            case "driver back":
                self._dispatch = self._new_dispatch()
        if self._idle and self._now >= self._driver_back and kind != "look":
            self._at(self._now + LOOK_EVERY_S, "look", 0)

    def _hand_out(self) -> None:
        if self._now < self._driver_back:
            return
        while self._idle:
            worker = self._idle[-1]
            shard = self._dispatch.take(str(self._node(worker)), self._now)
            if shard is None:
                return
            self._idle.pop()
            self._handed_out_last = self._now
            self._copies += shard in self._in_flight
            self._in_flight[shard] += 1
            self._making[worker] = shard
            seconds = self._draw.lognormvariate(0.0, 0.1) * self.assumed.shard_seconds
            if self._draw.random() < self.scenario.slow:
                seconds *= SLOW_FACTOR
            failure = self._after_hours(self.scenario.worker_hours) - self._now
            end = ("made", seconds) if failure >= seconds else ("fails", failure)
            self._at(self._now + end[1], end[0], worker, self._attempt[worker])

    def _ends(self, worker: int, *, well: bool) -> None:
        if not well:
            self._loses(worker, self.assumed.restart_seconds)
            return
        shard = self._landed(worker)
        assert shard is not None
        self._done[shard] = 1
        self._commits[int(self._now)] += 1
        self._dispatch.done(shard, self._now)
        if shard in self._lost_at:
            self._delays.append(self._now - self._lost_at.pop(shard))
        self._idle.append(worker)

    def _loses(self, worker: int, seconds: float) -> None:
        """A worker is gone, with what it has in flight, and comes back later."""
        shard = self._landed(worker)
        if shard is not None:
            self._lost += 1
            self._lost_at.setdefault(shard, self._now)
            self._dispatch.lost(shard, str(self._node(worker)), "lost")
        self._attempt[worker] += 1
        self._at(self._now + seconds, "back", worker, self._attempt[worker])

    def _landed(self, worker: int) -> int | None:
        """What a worker had in flight is so no longer."""
        shard = self._making.pop(worker, None)
        if shard is not None:
            self._in_flight[shard] -= 1
            if not self._in_flight[shard]:
                del self._in_flight[shard]
        return shard

    def _node_dies(self, node: int) -> None:
        first = node * self.assumed.workers_per_node
        here = range(first, min(self.assumed.workers, first + self.assumed.workers_per_node))
        self._idle = [worker for worker in self._idle if worker not in here]
        for worker in here:
            self._loses(worker, self.assumed.node_away_seconds)
        back = self._now + self.assumed.node_away_seconds
        self._at(back + self._after_hours(self.scenario.node_hours) - self._now, "node dies", node)

    def _driver_dies(self) -> None:
        """Everything in flight is lost, for a cluster ends the workers of a driver that is gone."""
        self._driver_back = self._now + self.assumed.driver_seconds
        self._idle.clear()
        for worker in range(self.assumed.workers):
            self._loses(worker, self.assumed.driver_seconds + self.assumed.restart_seconds)
        self._at(self._driver_back, "driver back", 0)

    def _new_dispatch(self) -> Dispatch:
        left = (shard for shard in range(self.assumed.shards) if not self._done[shard])
        return Dispatch(left, max_attempts=4, straggler_factor=self.scenario.straggler_factor)

    def _at(self, moment: float, kind: str, which: int, attempt: int = 0) -> None:
        heapq.heappush(self._events, (moment, next(self._order), kind, which, attempt))

    def _after_hours(self, mean: float) -> float:
        return self._now + self._draw.expovariate(1 / (mean * 3600))

    def _node(self, worker: int) -> int:
        return worker // self.assumed.workers_per_node


def main() -> None:
    """Print a table, and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--workers-per-node", type=int, default=8)
    parser.add_argument("--shard-seconds", type=float, default=60.0)
    parser.add_argument("--restart-seconds", type=float, default=120.0)
    parser.add_argument("--node-away-seconds", type=float, default=1800.0)
    parser.add_argument("--driver-seconds", type=float, default=300.0)
    assumed = Assumed(**vars(parser.parse_args()))
    hours = assumed.shards * assumed.shard_seconds / assumed.workers / 3600
    scenarios = (
        Scenario(name="nothing fails"),
        Scenario(name="a worker every 100 hours", worker_hours=100.0),
        Scenario(name="a worker every 10 hours", worker_hours=10.0),
        Scenario(name="a node every 100 hours", node_hours=100.0),
        Scenario(name="the driver, at half", driver_dies_at_hours=(hours / 2,)),
        Scenario(name="ten times the stragglers", slow=1e-3),
        Scenario(name="the same, waited for", slow=1e-3, straggler_factor=1e9),
        Scenario(name="all failures", worker_hours=10.0, node_hours=100.0, driver_dies_at_hours=(hours / 2,)),
    )
    print(f"Python {platform.python_version()}; assumed: {assumed}")
    found = []
    for scenario in scenarios:
        found.append(Job(assumed, scenario).play())
        print(
            "  ".join(
                f"{key} {value if isinstance(value, str) else f'{value:,.3g}'}" for key, value in found[-1].items()
            )
        )
    print(json.dumps({"assumed": asdict(assumed), "found": found}))


if __name__ == "__main__":
    main()
