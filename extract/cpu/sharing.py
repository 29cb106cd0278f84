"""Which tokens of a token batch are the same computation, and where each position's key lies. Knows no layers.

In the order of ids a row needs only its tokens from its common prefix with the row before it on; its earlier positions
point at tokens that rows before it computed. That alone covers groups within groups, rows that are a prefix of others
and exact duplicates, so no tree is ever built: a row is the list of the tokens of its positions, its *path*.
"""

from dataclasses import dataclass

import numpy as np

from extract.packing import shared_prefixes
from extract.records import Int32, Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The U different sequences of a token batch, or all of them where nothing is shared.

    Attributes:
        input_ids: int32 [T], row u is `input_ids[offsets[u]:offsets[u + 1]]`.
        offsets: int64 [U + 1].
        shared: int64 [U], leading tokens that row u takes from row u - 1; less than its length.
        row_of: int64 [B], the row of each sequence; `None`: row i is sequence i.
    """

    input_ids: Int32
    offsets: Int64
    shared: Int64
    row_of: Int64 | None

    @property
    def lengths(self) -> Int64:
        """int64 [U]."""
        lengths: Int64 = np.diff(self.offsets)
        return lengths

    @property
    def num_own(self) -> int:
        """Tokens computed if every row finds what it shares."""
        return int(self.offsets[-1] - self.shared.sum())


def plain_rows(input_ids: Int32, cu_seqlens: Int32) -> Rows:
    """Every sequence as it is, in its order."""
    offsets = cu_seqlens.astype(np.int64)
    return Rows(input_ids=input_ids, offsets=offsets, shared=np.zeros(len(offsets) - 1, np.int64), row_of=None)


def shared_rows(input_ids: Int32, cu_seqlens: Int32, min_shared: int) -> Rows:
    """The different sequences in the order of their ids; common prefixes shorter than `min_shared` are not shared."""
    offsets = cu_seqlens.astype(np.int64)
    order, shared = shared_prefixes(input_ids, offsets, np.arange(len(offsets) - 1), min_shared)
    lengths = offsets[order + 1] - offsets[order]
    new = shared < lengths  # the others are exact duplicates of the row before
    row_of = np.empty(len(order), np.int64)
    row_of[order] = np.cumsum(new) - 1
    starts, lengths, shared = offsets[order][new], lengths[new], shared[new]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    taken = np.arange(int(ends[-1])) + np.repeat(starts - ends[:-1], lengths)
    return Rows(input_ids=input_ids[taken], offsets=ends, shared=shared, row_of=row_of)


def kept_prefixes(rows: Rows, *, num_runs: int, threads: int, max_kept: int) -> Int64:
    """Leading tokens of each row that are computed before all others and kept: int64 [U].

    A token that rows of r runs need costs all threads its time if it is kept, and r of them if each run computes it for
    itself: it is kept where r is at least `threads`. Of more than `max_kept` such tokens those that most rows need are.

    Args:
        rows: in the order of their ids.
        num_runs: equal contiguous runs that the rows will be cut into.
        threads: that work side by side.
        max_kept: most tokens kept.
    """
    own = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows.lengths - rows.shared)])
    least = max(2, threads) * int(own[-1]) / num_runs
    groups = _groups(rows.shared.tolist(), own.tolist(), least)
    kept = np.zeros(len(rows.shared), np.int64)
    room = max_kept
    # Who needs a token needs the ones before it: these weigh as much at least, so they are taken before it.
    for _, low, start, high, stop in sorted(groups):
        taken = min(high - low, room)
        kept[start:stop] = np.maximum(kept[start:stop], low + taken)
        room -= taken
        if not room:
            break
    return kept


def _groups(shared: list[int], own: list[int], least: float) -> list[tuple[int, int, int, int, int]]:
    """Positions `low` to `high` that rows `start` to `stop` have in common and no larger set of rows has.

    Returns:
        (-weight, low, start, high, stop) where the weight, all tokens of these rows, is `least` or more.
    """
    found = []
    opened = [(0, 0)]  # (tokens in common, first row) of the groups that the row at hand belongs to, outermost first
    for row, common in enumerate([*shared[1:], 0], start=1):
        start = row - 1
        while opened[-1][0] > common:
            high, start = opened.pop()
            weight = own[row] - own[start]
            if weight >= least:
                found.append((-weight, max(common, opened[-1][0]), start, high, row))
        if common > opened[-1][0]:
            opened.append((common, start))
    return found


def paths(rows: Rows, kept: Int64, begin: Int64, first: Int64) -> Int64:
    """Which computed token each position of each row is: int64 [T], laid out as `rows.input_ids`.

    Kept tokens are numbered from 0 in the order of rows, then all others.

    Args:
        rows: R in order.
        kept: int64 [U], kept leading tokens of each row.
        begin: int64 [U], first position that the row computes itself, beside what it adds to the kept ones.
        first: int64 [U], number of the token at that position.
    """
    found = np.arange(int(rows.offsets[-1])) + np.repeat(first - begin - rows.offsets[:-1], rows.lengths)
    offsets, shared, keeps, begins = (array.tolist() for array in (rows.offsets, rows.shared, kept, begin))
    kept_path = np.zeros(int(kept.max(initial=0)), np.int64)
    num_kept = 0
    for row in np.flatnonzero(begin).tolist():
        at, have, keep, end = offsets[row], shared[row], keeps[row], begins[row]
        if keep > have:
            kept_path[have:keep] = np.arange(num_kept, num_kept + keep - have)
            num_kept += keep - have
        found[at : at + keep] = kept_path[:keep]
        if end > keep:
            before = offsets[row - 1]
            found[at + keep : at + end] = found[before + keep : before + end]
    return found
