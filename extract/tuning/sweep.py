"""Curves one after another until time is up: their points, and what is left over with the reason.

Which point is the best one is asked here, too, since the sweep over tiers of tensorrt-llm asks the same.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from extract.errors import CheckpointRefused, EngineRefused, SpecError
from extract.tuning.engines import Engines
from extract.tuning.growth import GAIN, Curve, grow
from extract.tuning.results import Difference, Point, Unmeasured
from extract.tuning.trials import Trial
from extract.tuning.workload import Workload

NO_TIME = "time did not suffice"


class Sweep:
    """Measures curves of precision x threads over the token budget.

    Attributes:
        points, unmeasured: so far.
        arithmetic: which kernels computed.
    """

    def __init__(self, engines: Engines, work: Workload, *, deadline: float, say: Callable[[str], None]) -> None:
        self.points: list[Point] = []
        self.unmeasured: list[Unmeasured] = []
        self.arithmetic = ""
        self._engines, self._work, self._deadline, self._say = engines, work, deadline, say
        self._differences: dict[str, Difference | None] = {}
        self._refused: dict[str, str] = {}
        self._pass_tokens: dict[Point, int] = {}

    def measure(self, precision: str, threads: int | None) -> None:
        """One curve. A precision that cannot be built, or comes too late, is noted and not an error."""
        if self.points and not self._affords(0.0):
            self._leave(precision, threads, None, NO_TIME)
            return
        if precision in self._refused:
            return
        try:
            engine = self._engines.of(precision)
            if precision not in self._differences:
                self._differences[precision] = self._engines.difference(precision)
        except (CheckpointRefused, EngineRefused, SpecError) as error:
            self._refused[precision] = str(error).rstrip(".")
            self._leave(precision, None, None, self._refused[precision])
            return
        trial = Trial(engine, self._work, threads)
        try:
            curve = grow(self._budgets(trial, precision), trial.run, self._affords)
        finally:
            trial.close()
        self.arithmetic = trial.arithmetic or self.arithmetic
        self._add(curve, trial, precision)

    def pass_tokens(self, point: Point) -> int:
        """Token budget of a pass that keeps the point's threads busy."""
        return self._pass_tokens[point]

    def _budgets(self, trial: Trial, precision: str) -> list[int]:
        """All of them for a precision's first curve; on fewer threads from a quarter of its best budget up."""
        before = [point for point in self.points if point.precision == precision and point.tokens_per_s is not None]
        best = max(before, key=lambda point: point.tokens_per_s or 0.0).budget if before else 0
        return [budget for budget in trial.budgets() if budget >= best // 4]

    def _add(self, curve: Curve, trial: Trial, precision: str) -> None:
        found = [
            point_of(
                curve,
                budget,
                precision,
                trial.threads,
                trial.memory_bytes.get(budget),
                self._differences[precision],
                trial.expected_bytes.get(budget),
            )
            for budget in (*curve.runs, *([] if curve.refused is None else [curve.refused]))
        ]
        self.points += found
        self._pass_tokens |= {point: trial.pass_tokens(point.budget) for point in found}
        if curve.next_budget is not None:
            self._leave(precision, trial.threads, curve.next_budget, NO_TIME)
        rates = "  ".join(f"{point.budget:,}: {point.tokens_per_s or 0:,.0f}" for point in found)
        self._say(f"{found[0].curve} (tokens: tokens/s)  {rates}")

    def _leave(self, precision: str, threads: int | None, from_budget: int | None, reason: str) -> None:
        left = Unmeasured(precision=precision, threads=threads, from_budget=from_budget, reason=reason)
        self.unmeasured.append(left)

    def _affords(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self._deadline


def point_of(
    curve: Curve,
    budget: int,
    precision: str,
    threads: int | None,
    memory_bytes: int | None,
    difference: Difference | None,
    expected_bytes: int | None = None,
) -> Point:
    """A row of the table: the runs of one budget."""
    rates = [run.tokens / run.seconds for run in curve.runs.get(budget, [])]
    median = statistics.median(rates) if rates else None
    return Point(
        precision=precision,
        threads=threads,
        budget=budget,
        tokens_per_s=median and round(median, 1),
        slowest=round(min(rates), 1) if rates else None,
        fastest=round(max(rates), 1) if rates else None,
        spread=round((max(rates) - min(rates)) / median, 4) if median else None,
        runs=len(rates),
        memory_bytes=memory_bytes,
        difference=difference,
        expected_bytes=expected_bytes,
    )


def choose(points: Iterable[Point], precisions: Sequence[str]) -> Point | None:
    """The fastest point in one of `precisions`, or a more modest one of the same curve that is as fast but for `GAIN`.

    A smaller budget takes less memory, and a difference that small is noise.
    """
    measured = [point for point in points if point.tokens_per_s is not None and point.precision in precisions]
    if not measured:
        return None
    fastest = max(measured, key=_rate)
    alike = (fastest.precision, fastest.threads)
    near = [point for point in measured if _rate(point) * (1 + GAIN) >= _rate(fastest)]
    return min((point for point in near if (point.precision, point.threads) == alike), key=lambda point: point.budget)


def _rate(point: Point) -> float:
    return point.tokens_per_s or 0.0
