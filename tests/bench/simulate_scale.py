"""A job of a million shards on a thousand workers that fail, played through by the driver's own dispatch.

Simulated time, real bookkeeping: queue, attempts and stragglers are `extract.runners.dispatch`, so the memory and the
seconds that it takes are measured; how long shards and restarts take is assumed and printed. Nothing is computed.

    python tests/bench/simulate_scale.py --shards 1000000 --workers 1000
"""

import argparse
import heapq
import json
import platform
import random
import resource
import time

from extract.runners.dispatch import Dispatch


def simulate(given: argparse.Namespace, mtbf_hours: float, straggler_factor: float) -> dict[str, float]:
    """One job; `mtbf_hours` is the mean time between failures of one worker."""
    draw = random.Random(1)
    clock = time.perf_counter()
    dispatch = Dispatch(range(given.shards), max_attempts=4, straggler_factor=straggler_factor)
    now, idle = 0.0, [(0.0, worker) for worker in range(given.workers)]
    events: list[tuple[float, int, int, bool]] = []
    done, doubled, lost, last_handed_out = set[int](), 0, 0, 0.0
    while dispatch.num_open:
        while idle and idle[0][0] <= now:
            shard = dispatch.take(f"node-{idle[0][1] // 8}", now)
            if shard is None:
                break
            _, worker = heapq.heappop(idle)
            last_handed_out = now
            seconds = draw.lognormvariate(0.0, 0.1) * given.shard_seconds
            if draw.random() < given.slow:
                seconds *= 20
            failure = draw.expovariate(1 / (mtbf_hours * 3600))
            heapq.heappush(events, (now + min(seconds, failure), worker, shard, failure >= seconds))
        moments = [events[0][0]] if events else []
        moments += [idle[0][0]] if idle and idle[0][0] > now else []
        now = min(moments) if moments else now + 1.0
        while events and events[0][0] <= now:
            _, worker, shard, well = heapq.heappop(events)
            if well:
                doubled += shard in done
                done.add(shard)
                dispatch.done(shard, now)
            else:
                lost += 1
                dispatch.lost(shard, f"node-{worker // 8}", "lost")
            heapq.heappush(idle, (now if well else now + given.restart_seconds, worker))
    ideal = given.shards * given.shard_seconds * 1.005 / given.workers  # mean of the spread
    return {
        "mtbf_hours": mtbf_hours,
        "straggler_factor": straggler_factor,
        "hours": now / 3600,
        "over_ideal": now / ideal - 1,
        "tail_seconds": now - last_handed_out,
        "attempts_lost": lost,
        "made_twice": doubled,
        "failed": len(dispatch.failed),
        "driver_seconds": time.perf_counter() - clock,
        "commits_per_s": given.shards / now,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Print a table, and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--shard-seconds", type=float, default=60.0)
    parser.add_argument("--restart-seconds", type=float, default=120.0)
    parser.add_argument("--slow", type=float, default=1e-4, help="Part of the attempts that take twenty times as long.")
    given = parser.parse_args()
    found = [simulate(given, hours, factor) for hours, factor in ((1e9, 3.0), (100.0, 3.0), (10.0, 3.0), (10.0, 1e9))]
    print(f"Python {platform.python_version()}: {given.shards:,} shards, {given.workers:,} workers")
    for one in found:
        print("  ".join(f"{name} {value:,.3g}" for name, value in one.items()))
    print(json.dumps({"settings": vars(given), "found": found}))


if __name__ == "__main__":
    main()
