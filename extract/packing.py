"""Sequences to token batches under a budget. Knows token ids and lengths, and nothing of text, models or files.

Sequences are taken longest first (ties in row order), so that equal lengths lie together, which is what makes packed
attention fast, and so that the largest pass comes first and a lack of memory shows at once. For an engine that computes
shared tokens once they are taken in the order of their ids instead, where that saves something: rows that begin alike
then meet in one pass. The composition is a function of the rows and the budget alone: the same shard gives the same
batches on any worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from extract.records import Int32, Int64, TokenBatch, TokenRows

MIN_SHARED = 16
"""Shorter common prefixes are computed again: attention over pieces would cost more than they save."""

MIN_SAVING = 0.02
"""Part of the tokens that sharing must save to be worth another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The most that one forward pass may hold.

    Attributes:
        max_tokens: a single sequence longer than this still runs, alone: it is never split and never waits for ever.
        max_sequences: sequences of one pass.
        equal_length: only sequences of one length share a pass (engines with the dense layout).
        shared: the engine computes common prefixes and exact duplicates within a pass once. No effect on dense layouts.
    """

    max_tokens: int
    max_sequences: int
    equal_length: bool = False
    shared: bool = False


def pack(rows: TokenRows, budget: TokenBudget) -> Iterator[TokenBatch]:
    """Group the non-empty sequences of `rows` into token batches.

    Yields batches with `input_ids` int32 [T] and `cu_seqlens` int32 [B + 1]; T <= budget.max_tokens unless B = 1, and
    B <= budget.max_sequences. Every non-empty sequence is in exactly one batch; `members` says which one it is.
    """
    lengths = np.diff(rows.offsets)
    order = _order(rows, lengths, budget)
    ends = np.cumsum(lengths[order])
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + budget.max_tokens, side="right"))
        stop = max(start + 1, min(stop, start + budget.max_sequences))
        if budget.equal_length:
            same = lengths[order[start:stop]] == lengths[order[start]]
            stop = start + int(np.count_nonzero(same))
        yield _batch(rows, order[start:stop], lengths)
        start = stop


def shared_prefixes(
    input_ids: Int32, offsets: Int64, members: Int64, min_shared: int = MIN_SHARED
) -> tuple[Int64, Int64]:
    """Sequences in the order of their ids, and how much each shares with the one before it.

    Args:
        input_ids: int32 [T], none negative.
        offsets: int64 [N + 1], sequence n is `input_ids[offsets[n]:offsets[n + 1]]`.
        members: int64 [B], the sequences to order; none is empty.
        min_shared: shorter common prefixes count as nothing, except that an exact duplicate always shares all.

    Returns:
        `members` in lexicographic order (a proper prefix first, ties as given), and leading tokens that each has in
        common with its predecessor: int64 [B] each. The sum of the latter is what computing shared tokens once saves.
    """
    # Big-endian bytes compare as their numbers do, at the speed of memcmp and without padding to the longest row.
    flat = input_ids.astype(">u4").tobytes()
    starts, stops = (4 * offsets[members]).tolist(), (4 * offsets[members + 1]).tolist()
    keys = [flat[start:stop] for start, stop in zip(starts, stops, strict=True)]
    order = members[np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)]
    lengths = offsets[order + 1] - offsets[order]
    common = np.zeros(len(order), np.int64)
    common[1:] = _common_prefixes(input_ids, offsets[order], lengths)
    counts = (common >= min_shared) | (common == lengths)
    return order, np.where(counts, common, 0)


def token_positions(offsets: Int64, members: Int64) -> Int64:
    """Positions in the flat token array of the tokens of `members`, in their order: int64 [sum of their lengths]."""
    lengths = offsets[members + 1] - offsets[members]
    ends = np.cumsum(lengths)
    shift = np.repeat(offsets[members] - (ends - lengths), lengths)
    positions: Int64 = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + shift
    return positions


def _order(rows: TokenRows, lengths: Int64, budget: TokenBudget) -> Int64:
    if budget.shared and not budget.equal_length:
        order, shared = shared_prefixes(rows.input_ids, rows.offsets, np.flatnonzero(lengths))
        if shared.sum() >= max(1, MIN_SAVING * lengths.sum()):
            return order
    order = np.argsort(-lengths, kind="stable")
    return order[: int(np.count_nonzero(lengths))]


def _common_prefixes(input_ids: Int32, starts: Int64, lengths: Int64) -> Int64:
    """Leading tokens that each sequence but the first has in common with the one before it: int64 [B - 1]."""
    compared = np.minimum(lengths[:-1], lengths[1:])
    ends = np.cumsum(compared)
    begins = ends - compared
    total = int(ends[-1]) if len(ends) else 0
    left = np.arange(total, dtype=np.int64) + np.repeat(starts[:-1] - begins, compared)
    right = left + np.repeat(starts[1:] - starts[:-1], compared)
    differ = np.append(np.flatnonzero(input_ids[left] != input_ids[right]), total)
    common: Int64 = np.minimum(differ[np.searchsorted(differ, begins)] - begins, compared)
    return common


def _batch(rows: TokenRows, members: Int64, lengths: Int64) -> TokenBatch:
    cu_seqlens = np.zeros(len(members) + 1, dtype=np.int32)
    np.cumsum(lengths[members], out=cu_seqlens[1:])
    input_ids = rows.input_ids[token_positions(rows.offsets, members)]
    return TokenBatch(input_ids=input_ids, cu_seqlens=cu_seqlens, members=members.astype(np.int64))
