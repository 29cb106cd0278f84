"""Confidence intervals of means over tokens, by resampling rows: tokens of one row are not independent of each other.

All figures and groups are resampled together, so that the difference of two means has an interval of its own, which is
far narrower than what the intervals of the two would suggest.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from extract.fidelity_check.results import Group, Interval, Spread, Verdict
from extract.fidelity_check.token_figures import Float64, Int64, TokenFigures

NUM_RESAMPLES = 2000
LEVEL = 0.95
FEWEST_ROWS = 5
"""Of a group of which anything is said: resampling fewer rows tells nothing of the rows that were not seen."""

BLOCK = 2**22
"""Row weights that are drawn at a time."""

EDGES = (0, 1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""First positions of the groups by position."""

Mask = npt.NDArray[np.bool_]
FIGURES = ("rel_error", "cosine", "kl", "same")


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """Figures over all tokens and by group."""

    rel_error: Spread
    cosine: Spread
    kl: Spread | None
    top1: Interval | None
    by_position: tuple[Group, ...]
    by_length: tuple[Group, ...]


def summarise(tokens: TokenFigures, *, seed: int, num_resamples: int = NUM_RESAMPLES) -> Summary:
    """Means with intervals, quantiles and groups of the tokens whose states are finite.

    `seed` decides the resamples: the same tokens and seed give the same figures.
    """
    kept = tokens.finite
    _, row = np.unique(tokens.row[kept], return_inverse=True)
    values = {name: getattr(tokens, name)[kept] for name in FIGURES}
    has_head = bool(len(row)) and not np.isnan(values["kl"]).any()
    positions = _groups(tokens.position[kept], 0)
    lengths = _groups(tokens.length[kept], 1)
    masks = [np.ones(len(row), np.bool_), *(mask for _, mask in positions), *(mask for _, mask in lengths)]
    means = _Means(row, masks, values, seed, num_resamples)
    by = {
        "position": _described(positions, means, 1, row, has_head),
        "length": _described(lengths, means, 1 + len(positions), row, has_head),
    }
    return Summary(
        rel_error=_spread(values["rel_error"], means.interval(0, "rel_error"), 0.99),
        cosine=_spread(values["cosine"], means.interval(0, "cosine"), 0.01),
        kl=_spread(values["kl"], means.interval(0, "kl"), 0.99) if has_head else None,
        top1=means.interval(0, "same") if has_head else None,
        by_position=by["position"],
        by_length=by["length"],
    )


class _Means:
    """Means of each figure over each mask, as they are and in every resample of the rows."""

    def __init__(self, row: Int64, masks: list[Mask], values: dict[str, Float64], seed: int, resamples: int) -> None:
        num_rows = int(row.max()) + 1 if len(row) else 0
        columns = [np.bincount(row, mask, num_rows) for mask in masks]
        for name in FIGURES:
            columns += [np.bincount(row, np.where(mask, values[name], 0.0), num_rows) for mask in masks]
        totals = np.stack(columns, axis=1)  # [R, masks of counts, then masks of each figure]
        draw = np.random.Generator(np.random.PCG64(seed))
        drawn = [totals.sum(axis=0)[None]]
        step = max(1, BLOCK // max(1, num_rows))
        for start in range(0, resamples, step):
            weights = draw.multinomial(num_rows, np.full(num_rows, 1 / num_rows), min(step, resamples - start))
            with np.errstate(invalid="ignore"):
                drawn.append(weights @ totals)
        sums = np.concatenate(drawn).reshape(resamples + 1, 1 + len(FIGURES), len(masks))
        with np.errstate(invalid="ignore", divide="ignore"):
            self._means = sums[:, 1:] / sums[:, :1]  # [1 + resamples, figures, masks]; NaN where a mask drew no row

    def interval(self, mask: int, figure: str) -> Interval:
        values = self._means[:, FIGURES.index(figure), mask]
        low, high = _bounds(values[1:], 1 - LEVEL)
        return Interval(mean=float(values[0]), low=low, high=high)

    def difference(self, mask: int, figure: str, doubt: float) -> tuple[float, float]:
        """Interval of the mask's mean less the mean over all tokens."""
        means = self._means[1:, FIGURES.index(figure)]
        with np.errstate(invalid="ignore"):
            return _bounds(means[:, mask] - means[:, 0], doubt)


def _bounds(values: Float64, doubt: float) -> tuple[float, float]:
    seen = values[~np.isnan(values)]
    if not len(seen):
        return float("nan"), float("nan")
    with np.errstate(invalid="ignore"):  # an infinite divergence is possible
        low, high = np.quantile(seen, [doubt / 2, 1 - doubt / 2])
    return float(low), float(high)


def _groups(values: Int64, first: int) -> list[tuple[str, Mask]]:
    """Tokens by size of `values`, in the ranges of `EDGES` moved up by `first`; ranges without a token are left out."""
    groups = []
    for place, edge in enumerate(EDGES):
        low = edge + first
        high = EDGES[place + 1] + first if place + 1 < len(EDGES) else None
        mask = (values >= low) & (values < high) if high is not None else values >= low
        if mask.any():
            name = f"{low}+" if high is None else str(low) if high == low + 1 else f"{low}-{high - 1}"
            groups.append((name, mask))
    return groups


def _described(
    groups: list[tuple[str, Mask]], means: _Means, first: int, row: Int64, has_head: bool
) -> tuple[Group, ...]:
    described = []
    for place, (name, mask) in enumerate(groups, first):
        num_rows = len(np.unique(row[mask]))
        described.append(
            Group(
                name=name,
                num_rows=num_rows,
                num_tokens=int(mask.sum()),
                rel_error=means.interval(place, "rel_error"),
                cosine=means.interval(place, "cosine"),
                kl=means.interval(place, "kl") if has_head else None,
                top1=means.interval(place, "same") if has_head else None,
                verdict=_verdict(means, place, "kl" if has_head else "rel_error", num_rows, len(groups)),
            )
        )
    return tuple(described)


def _verdict(means: _Means, mask: int, figure: str, num_rows: int, num_groups: int) -> Verdict:
    if num_groups == 1:
        return "all"
    if num_rows < FEWEST_ROWS:
        return "few rows"
    low, high = means.difference(mask, figure, (1 - LEVEL) / num_groups)  # one false alarm in twenty tables, not rows
    if low > 0:
        return "higher"
    return "lower" if high < 0 else "noise"


def _spread(values: Float64, mean: Interval, tail: float) -> Spread:
    if not len(values):
        return Spread(mean=mean, median=float("nan"), tail=float("nan"), worst=float("nan"))
    low_is_bad = tail < 0.5
    found: Any = np.quantile(values, [0.5, tail])
    worst = values.min() if low_is_bad else values.max()
    return Spread(mean=mean, median=float(found[0]), tail=float(found[1]), worst=float(worst))
