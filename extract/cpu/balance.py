"""Weighted rows -> contiguous runs under a budget, as equal as possible, a multiple of the threads. Knows numbers only.

Threads never meet within a pass, so all of them end together only if what they are given is equal. A run that begins in
the middle of rows that share tokens computes these once more, so such places are cut only where nothing else helps.
"""

from bisect import bisect_left, bisect_right
from math import ceil

import numpy as np

from extract.records import Int64

LEAST_TOKENS = 16
"""No more runs than the budget asks for if they had fewer tokens each: reading the weights would cost more."""

FAIR_SHARES = 1.5
"""Sharers stay together up to so many times what one thread should get: halving them costs more than it evens."""


def equal_runs(weights: Int64, entry: Int64, *, budget: int, threads: int) -> Int64:
    """Cut rows into runs.

    Args:
        weights: int64 [N], tokens of each row, at least 1.
        entry: int64 [N], tokens that a run computes besides if it begins at this row.
        budget: most tokens of a run; a row of more runs alone.
        threads: the number of runs is a multiple of it where rows and tokens are enough.

    Returns:
        First row of each run: int64 [M], ascending from 0. The largest run is as small as M runs allow, and where
        `entry` is 0 two runs differ by at most the largest row.
    """
    if len(weights) == 0:
        return np.zeros(0, np.int64)
    blocks = _blocks(weights, entry, min(budget, ceil(FAIR_SHARES * int(weights.sum()) / threads)))
    # Clipped to the budget, a longer row fills a run and so is alone in it.
    sizes = np.minimum(np.add.reduceat(weights, blocks) + entry[blocks], budget)
    cuts = _Cuts(sizes)
    wanted = num_runs(cuts.count(budget), cuts.total, threads)
    return blocks[cuts.equal(min(wanted, len(blocks)), budget)]


def num_runs(least: int, total: int, threads: int) -> int:
    """`least` runs or a few more, so that each of the threads gets as many, if `total` tokens are enough for that."""
    return min(-(-least // threads) * threads, max(least, total // LEAST_TOKENS))


class _Cuts:
    """Cuts of a sequence of sizes; place k is before element k."""

    def __init__(self, sizes: Int64) -> None:
        self.largest = int(sizes.max())
        self.ends = [0, *np.cumsum(sizes).tolist()]
        self.total = self.ends[-1]
        self.num_sizes = len(sizes)

    def count(self, cap: int) -> int:
        """Fewest runs of at most `cap`, which is at least the largest size."""
        place = runs = 0
        while place < self.num_sizes:
            place = bisect_right(self.ends, self.ends[place] + cap) - 1
            runs += 1
        return runs

    def equal(self, num_runs: int, budget: int) -> list[int]:
        """First element of each of `num_runs` runs; every two differ by at most the largest size.

        Such a partition always exists, also with the smallest possible largest run. Seen from the front, the places
        where run k may end are neighbours (a size never exceeds the slack), so first and last of them say it all.
        """
        cap = bisect_left(
            range(budget),
            True,
            lo=max(self.largest, ceil(self.total / num_runs)),
            key=lambda c: self.count(c) <= num_runs,
        )
        slack = cap - self.largest
        reach = [(0, 0)]
        for _ in range(num_runs - 1):
            first, last = reach[-1]
            first = max(first + 1, bisect_left(self.ends, self.ends[min(first, self.num_sizes)] + slack))
            last = bisect_right(self.ends, self.ends[last] + cap) - 1
            reach.append((first, last))
        places = [self.num_sizes]
        for run in range(num_runs - 1, 0, -1):
            end = self.ends[places[-1]]
            first = max(reach[run][0], bisect_left(self.ends, end - cap))
            last = min(reach[run][1], bisect_right(self.ends, end - slack) - 1, places[-1] - 1)
            places.append(self._nearest(self.total * run / num_runs, first, last))
        return [0, *reversed(places[1:])]

    def _nearest(self, target: float, first: int, last: int) -> int:
        place = bisect_left(self.ends, target, lo=first, hi=last)
        return place - 1 if place > first and target - self.ends[place - 1] < self.ends[place] - target else place


def _blocks(weights: Int64, entry: Int64, most: int) -> Int64:
    """First row of each block of rows that stay in one run: int64 [.], ascending from 0.

    Blocks begin where a run may begin at no cost. One of more than `most` tokens is halved, where recomputing and
    inequality together cost least, until it fits or is one row.
    """
    free = entry == 0
    free[0] = True
    firsts = np.flatnonzero(free)
    if len(firsts) == len(weights):
        return firsts
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(weights)])
    found = []
    todo = list(zip(firsts.tolist(), [*firsts[1:].tolist(), len(weights)], strict=True))
    while todo:
        start, stop = todo.pop()
        if stop - start == 1 or ends[stop] - ends[start] + entry[start] <= most:
            found.append(start)
            continue
        inner = slice(start + 1, stop)
        uneven = np.abs(ends[start] + ends[stop] - 2 * ends[inner]) // 2
        middle = start + 1 + int(np.argmin(entry[inner] + uneven))
        todo += [(start, middle), (middle, stop)]
    return np.array(sorted(found), np.int64)
