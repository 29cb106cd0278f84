"""Figures of many states, slice by slice: their lengths, and the mean and variance of each dimension.

Sums are float64 and merged by Chan's formula, so that a large mean does not swallow a small variance.
"""

import numpy as np
import numpy.typing as npt

from extract.report_page.facts import Dimension, StateFigures
from extract.shards.values import Float32

MAX_NORM_BINS = 40
OUTLIER_FACTOR = 5.0
"""A dimension so many times as large as the median one is an outlier."""
DEAD_SHARE = 1e-6
"""A dimension with less than this share of the median spread never changes: what is left is rounding."""
MAX_NAMED = 24


class StateTally:
    """Running figures of states with H dimensions."""

    def __init__(self, width: int) -> None:
        self.num_states = 0
        self._mean = np.zeros(width)
        self._squares = np.zeros(width)
        self._norms: list[Float32] = [np.zeros(0, np.float32)]

    def add(self, states: Float32) -> None:
        """Count states [K, H], which must be finite."""
        if not len(states):
            return
        wide = states.astype(np.float64)
        self._norms.append(np.sqrt(np.einsum("kh,kh->k", wide, wide)).astype(np.float32))
        count = len(wide)
        mean = wide.mean(axis=0)
        wide -= mean
        total = self.num_states + count
        step = mean - self._mean
        self._squares += np.einsum("kh,kh->h", wide, wide) + step**2 * (self.num_states * count / total)
        self._mean += step * (count / total)
        self.num_states = total

    def figures(self) -> StateFigures:
        """The figures of at least one state."""
        variance = self._squares / self.num_states
        norms = np.concatenate(self._norms).astype(np.float64)
        low, high = float(norms.min()), float(norms.max())
        if high - low <= 1e-6 * high:  # unit length, say: one bar, not the rounding in forty
            low, high = low - 0.005 * max(high, 1e-9), high + 0.005 * max(high, 1e-9)
        counts, edges = np.histogram(norms, bins=min(MAX_NORM_BINS, max(5, len(norms) // 4)), range=(low, high))
        least, fifth, median, most, largest = np.quantile(norms, [0, 0.05, 0.5, 0.95, 1])
        dead, outliers = self._unusual(variance)
        return StateFigures(
            num_states=self.num_states,
            width=len(variance),
            norm_edges=tuple(map(_short, edges)),
            norm_counts=tuple(map(int, counts)),
            norm_quantiles=(_short(least), _short(fifth), _short(median), _short(most), _short(largest)),
            mean=tuple(map(_short, self._mean)),
            variance=tuple(map(_short, variance)),
            dead=tuple(self._dimension(index, variance) for index in dead[:MAX_NAMED]),
            num_dead=len(dead),
            outliers=tuple(self._dimension(index, variance) for index in outliers[:MAX_NAMED]),
            num_outliers=len(outliers),
            outlier_factor=OUTLIER_FACTOR,
        )

    def _unusual(self, variance: npt.NDArray[np.float64]) -> tuple[list[int], list[int]]:
        """Dimensions that never change, and those that are far larger than the others."""
        if self.num_states < 2:
            return [], []
        spread = np.sqrt(variance)
        dead = np.flatnonzero(spread <= DEAD_SHARE * np.median(spread))
        size = np.sqrt(variance + self._mean**2)
        large = np.flatnonzero((size > OUTLIER_FACTOR * np.median(size)) & (size > 0))
        return dead.tolist(), large[np.argsort(-size[large], kind="stable")].tolist()

    def _dimension(self, index: int, variance: npt.NDArray[np.float64]) -> Dimension:
        return Dimension(index=index, mean=_short(self._mean[index]), std=_short(variance[index] ** 0.5))


def _short(value: float) -> float:
    """Six significant digits, which is more than a stored state has."""
    return float(f"{float(value):.6g}")
