"""The search for a set of linears that brings a divergence under a target at little cost. Knows no models: it measures.

What single linears do alone orders the candidates and sizes the steps, no more: errors cancel and add up in ways that
no sum shows, so every set on the way is measured as a whole. Forward: the linears that do most harm for what they cost,
half of what is missing at a time, then one by one. Backward: what was put in and is worth least is tried without.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from extract.fidelity_check.ranking_results import Step
from extract.fidelity_check.results import Interval

PATIENCE = 3
"""Linears in a row that could not be left out, after which no more are tried."""


class SetSearch:
    """A set that grows and shrinks.

    Args:
        measure: divergence of the engine with a set in high precision.
        damage: of each linear alone in low precision, in the unit of the divergence.
        cost: of each linear in high precision; all together cost 1.
        note: called with each step.

    Attributes:
        chosen: the set now.
        kl: its divergence.
        path: every set that was tried, in order; one that comes again is not measured again.
    """

    def __init__(
        self,
        measure: Callable[[AbstractSet[str]], Interval],
        damage: Mapping[str, float],
        cost: Mapping[str, float],
        note: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._measure, self._damage, self._cost, self._note = measure, damage, cost, note
        self._known: dict[frozenset[str], Interval] = {}
        self._order = sorted(damage, key=lambda name: -damage[name] / cost[name])
        self.chosen: frozenset[str] = frozenset()
        self.path: list[Step] = []
        self.kl = self._try(self.chosen, "start", ())
        whole = sum(damage.values())
        self._scale = self.kl.mean / whole if whole else 1.0
        """Of the damages: together they need not do what they do one by one."""

    def forward(self, target: float) -> bool:
        """Grow until the divergence is at most `target`; whether it came to that."""
        while self.kl.mean > target:
            left = [name for name in self._order if name not in self.chosen]
            if not left:
                return False
            names = self._next(left, (self.kl.mean - target) / 2)
            self.chosen |= set(names)
            self.kl = self._try(self.chosen, "add", names)
        return True

    def prune(self, target: float) -> None:
        """Take out, one at a time, what is not needed to stay at or below `target`; what is worth least comes first."""
        failures = 0
        for name in reversed([name for name in self._order if name in self.chosen]):
            kl = self._try(self.chosen - {name}, "drop", (name,), target)
            if kl.mean <= target:
                self.chosen, self.kl, failures = self.chosen - {name}, kl, 0
            else:
                failures += 1
            if failures == PATIENCE:
                return

    def _next(self, left: list[str], wanted: float) -> tuple[str, ...]:
        """As many of the worst as should bring about `wanted`, one at least."""
        names: list[str] = []
        for name in left:
            names.append(name)
            wanted -= self._scale * self._damage[name]
            if wanted <= 0:
                break
        return tuple(names)

    def _try(
        self,
        chosen: frozenset[str],
        change: Literal["start", "add", "drop"],
        names: tuple[str, ...],
        target: float = float("inf"),
    ) -> Interval:
        kl = self._known[chosen] if chosen in self._known else self._measure(chosen)
        self._known[chosen] = kl
        step = Step(
            change=change,
            names=names,
            num_linears=len(chosen),
            cost=sum(self._cost[name] for name in chosen),
            kl=kl,
            kept=kl.mean <= target,
        )
        self.path.append(step)
        self._note(step)
        return kl
