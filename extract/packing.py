"""Sequences to token batches under a budget. Knows lengths and nothing of text, models or files.

Sequences are taken longest first (ties in row order), so that equal lengths lie together, which is what makes packed
attention fast, and so that the largest pass comes first and a lack of memory shows at once. The composition is a
function of the lengths and the budget alone: the same shard gives the same batches on any worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from extract.records import Int64, TokenBatch, TokenRows


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The most that one forward pass may hold.

    Attributes:
        max_tokens: a single sequence longer than this still runs, alone: it is never split and never waits for ever.
        max_sequences: sequences of one pass.
        equal_length: only sequences of one length share a pass (engines with the dense layout).
    """

    max_tokens: int
    max_sequences: int
    equal_length: bool = False


def pack(rows: TokenRows, budget: TokenBudget) -> Iterator[TokenBatch]:
    """Group the non-empty sequences of `rows` into token batches.

    Yields batches with `input_ids` int32 [T] and `cu_seqlens` int32 [B + 1]; T <= budget.max_tokens unless B = 1, and
    B <= budget.max_sequences. Every non-empty sequence is in exactly one batch; `members` says which one it is.
    """
    lengths = np.diff(rows.offsets)
    order = np.argsort(-lengths, kind="stable")
    order = order[: int(np.count_nonzero(lengths))]
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


def token_positions(offsets: Int64, members: Int64) -> Int64:
    """Positions in the flat token array of the tokens of `members`, in their order: int64 [sum of their lengths]."""
    lengths = offsets[members + 1] - offsets[members]
    ends = np.cumsum(lengths)
    shift = np.repeat(offsets[members] - (ends - lengths), lengths)
    positions: Int64 = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + shift
    return positions


def _batch(rows: TokenRows, members: Int64, lengths: Int64) -> TokenBatch:
    cu_seqlens = np.zeros(len(members) + 1, dtype=np.int32)
    np.cumsum(lengths[members], out=cu_seqlens[1:])
    input_ids = rows.input_ids[token_positions(rows.offsets, members)]
    return TokenBatch(input_ids=input_ids, cu_seqlens=cu_seqlens, members=members.astype(np.int64))
