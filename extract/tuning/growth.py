"""Double a budget until throughput stops growing, on a machine whose speed wavers.

Pure: what a run is, is handed in. Each budget is run once at first; when the curve seems to have its peak, all are run
again, round by round, so that a slow minute of a shared machine falls on all of them. Whether there is a peak is then
asked of the medians again, and the curve goes on where there is none.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from extract.engine.contract import PassOutOfMemory

GAIN = 0.02
"""A doubling that brings less than this is no gain."""

PATIENCE = 2
"""Doublings without a gain after which a curve has had its peak."""

REPEATS = 3
"""Timed runs of each budget."""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run."""

    tokens: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Curve:
    """Runs by budget, and why the last budget is the last one.

    Attributes:
        refused: the budget that does not fit in memory.
        ended: "limit" if there was no larger budget to try.
        next_budget: the one that time did not suffice for.
    """

    runs: dict[int, list[Run]] = field(default_factory=dict)
    refused: int | None = None
    ended: Literal["peak", "memory", "time", "limit"] = "limit"
    next_budget: int | None = None

    def medians(self) -> list[float]:
        """Tokens/s of each budget."""
        return [statistics.median(run.tokens / run.seconds for run in runs) for runs in self.runs.values()]


def grow(budgets: Sequence[int], run: Callable[[int], Run], affords: Callable[[float], bool]) -> Curve:
    """Measure a curve.

    Args:
        budgets: ascending; the first one is always run.
        run: makes one timed run with a budget; `PassOutOfMemory` and `MemoryError` end the curve there.
        affords: whether so many more seconds may be spent.
    """
    curve = Curve()
    waiting = list(budgets)
    while waiting and not has_peaked(curve.medians()):
        while waiting and not has_peaked(curve.medians()):
            if curve.runs and not affords(_cost_of_another(curve)):
                curve.ended, curve.next_budget, waiting = "time", waiting[0], []
            elif not _run(curve, waiting.pop(0), run):
                waiting = []
        while lacking := [budget for budget, runs in curve.runs.items() if len(runs) < REPEATS]:
            for budget in lacking:
                if budget in curve.runs and not _run(curve, budget, run):
                    waiting = []
    if curve.ended == "limit" and has_peaked(curve.medians()):
        curve.ended = "peak"
    return curve


def has_peaked(medians: Sequence[float]) -> bool:
    """Whether the last `PATIENCE` doublings brought no gain over the best before them.

    Gains too small to count add up: they are measured from the last one that counted.
    """
    if not medians:
        return False
    best, without = medians[0], 0
    for median in medians[1:]:
        if median >= (1 + GAIN) * best:
            best, without = median, 0
        else:
            without += 1
    return without >= PATIENCE


def _run(curve: Curve, budget: int, run: Callable[[int], Run]) -> bool:
    """Add a run; where memory refuses, this budget and larger ones are dropped."""
    try:
        curve.runs.setdefault(budget, []).append(run(budget))
    except (PassOutOfMemory, MemoryError):
        curve.runs = {smaller: runs for smaller, runs in curve.runs.items() if smaller < budget}
        curve.refused, curve.ended = budget, "memory"
        return False
    return True


def _cost_of_another(curve: Curve) -> float:
    """Seconds: the runs that budgets still lack, and a new one with its warm-up, at most twice as long as the last."""
    seconds = {budget: runs[-1].seconds for budget, runs in curve.runs.items()}
    lacking = sum((REPEATS - len(runs)) * seconds[budget] for budget, runs in curve.runs.items())
    return lacking + (1 + REPEATS) * 2 * list(seconds.values())[-1]
