"""Which sampled rows have similar states: the nearest ones of each, and pairs that are almost the same.

Every pair is compared, block by block, so nothing is missed and memory is a block's.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extract.records import Int64
from extract.report_page.facts import Pair
from extract.shards.values import Float32, unit_length

NUM_NEIGHBOURS = 5
PAIR_COSINE = 0.99
MAX_PAIRS = 24
BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Similar rows of N.

    Attributes:
        nearest: [N, k], positions, nearest first; k is smaller than `NUM_NEIGHBOURS` in a small sample.
        cosines: float32 [N, k].
        pairs: the most similar pairs, each row in one at most.
        num_pairs: all pairs of `PAIR_COSINE` or above.
        typical: mean cosine over all pairs, or `None` for a single row.
    """

    nearest: Int64
    cosines: Float32
    pairs: tuple[Pair, ...]
    num_pairs: int
    typical: float | None


def directions(states: Float32) -> Float32:
    """States [N, H] scaled to length 1; states of zeros stay."""
    return unit_length(states)[0]


def find_neighbours(unit: Float32) -> Neighbours:
    """Compare all pairs of rows.

    Args:
        unit: float32 [N, H] of length 1, N at least 1.
    """
    count = len(unit)
    kept = min(NUM_NEIGHBOURS, count - 1)
    nearest = np.zeros((count, kept), np.int64)
    cosines = np.zeros((count, kept), np.float32)
    close = np.zeros((0, 3))
    num_pairs = 0
    for start in range(0, count, BLOCK_ROWS):
        block = np.clip(unit[start : start + BLOCK_ROWS] @ unit.T, -1, 1)
        own = np.arange(len(block))
        block[own, start + own] = -2
        if kept:
            top = np.argpartition(-block, kept - 1, axis=1)[:, :kept]
            order = np.argsort(-np.take_along_axis(block, top, axis=1), axis=1, kind="stable")
            top = np.take_along_axis(top, order, axis=1)
            nearest[start : start + len(block)] = top
            cosines[start : start + len(block)] = np.take_along_axis(block, top, axis=1)
        close, found = _closest(block, start, close)
        num_pairs += found
    total = unit.sum(axis=0, dtype=np.float64)
    own_total = float(np.einsum("nh,nh->", unit, unit, dtype=np.float64))
    return Neighbours(
        nearest=nearest,
        cosines=cosines,
        pairs=_each_row_once(close),
        num_pairs=num_pairs,
        typical=(float(total @ total) - own_total) / (count * (count - 1)) if count > 1 else None,
    )


def _closest(block: Float32, start: int, before: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], int]:
    """The closest pairs [P, 3] (first, second, cosine) so far, and how many near ones this block holds."""
    first, second = np.nonzero(block >= PAIR_COSINE)
    once = second > first + start
    first, second = first[once], second[once]
    new = np.stack([first + start, second, block[first, second]], axis=1)
    both = np.concatenate([before, new])
    # rounded, so that pairs of equal states stay in order of rows
    order = np.lexsort((both[:, 1], both[:, 0], -np.round(both[:, 2], 6)))
    return both[order[: 200 * MAX_PAIRS]], len(first)


def _each_row_once(close: npt.NDArray[np.float64]) -> tuple[Pair, ...]:
    """The first pairs, leaving out rows that were shown: a hundred equal rows are one finding, not 4,950."""
    seen: set[int] = set()
    pairs: list[Pair] = []
    for first, second, cosine in close.tolist():
        if len(pairs) < MAX_PAIRS and first not in seen and second not in seen:
            pairs.append(Pair(first=int(first), second=int(second), cosine=round(cosine, 6)))
            seen |= {first, second}
    return tuple(pairs)
