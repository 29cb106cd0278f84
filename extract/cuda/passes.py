"""A token batch -> the passes that a card runs: cut by whole sequences, common prefixes computed once in each pass.

A batch may be far larger than what a card holds between two layers, so it runs in several passes of at most
`pass_tokens` tokens; sequences are short and products are at full speed from a few thousand tokens on, so cutting costs
nothing that could be measured, and a pass is exact where tiles inside layers would need care. The cut is a function of
the batch and of the engine's contract, never of the memory that happens to be free: the same batch gives the same
passes on every worker.

All layers of a pass run in step, so sequences of one pass share without anything being computed beforehand; a prefix
that sequences of two passes share is computed in both.
"""

from dataclasses import dataclass

import numpy as np

from extract.cpu.sharing import Rows, paths, plain_rows, shared_rows
from extract.packing import MIN_SAVING, MIN_SHARED, token_positions
from extract.records import Int32, Int64
from extract.spec import OutputKind

MAX_KEYS_PER_TOKEN = 4
"""Keys that a pass gathers for shared prefixes, by `pass_tokens`: its memory is planned for so many."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One forward pass over B sequences.

    Attributes:
        input_ids, positions: int32 [n], the tokens that it computes.
        cu_queries: int32 [B + 1], cumulative numbers of tokens computed for each sequence, its last ones.
        cu_keys: int32 [B + 1], cumulative lengths; `None`: nothing is shared, keys are the tokens.
        key_index: int32 [cu_keys[B]], the computed token of each position of each sequence; `None` where `cu_keys` is.
        longest: length of the longest sequence.
        first_output: place of its first state among the outputs of the batch.
    """

    input_ids: Int32
    positions: Int32
    cu_queries: Int32
    cu_keys: Int32 | None
    key_index: Int32 | None
    longest: int
    first_output: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """How a token batch is computed.

    Attributes:
        passes: in order.
        num_computed: tokens computed in all.
        num_outputs: states in all: of the computed tokens, or one for each different sequence.
        output_index: int32 [T] for kind "tokens", else [B], which output is whose; `None`: output i is state i.
    """

    passes: tuple[Pass, ...]
    num_computed: int
    num_outputs: int
    output_index: Int32 | None


def plan_batch(
    input_ids: Int32,
    cu_seqlens: Int32,
    kind: OutputKind,
    *,
    pass_tokens: int,
    share: bool,
    min_shared: int = MIN_SHARED,
) -> BatchPlan:
    """Plan one token batch of a causal model. A function of its arguments alone.

    Args:
        input_ids: int32 [T].
        cu_seqlens: int32 [B + 1], cumulative lengths; no sequence is empty.
        kind: which states are asked for; "first" computes nothing but first tokens.
        pass_tokens: most tokens that a pass computes; a longer sequence runs alone.
        share: compute common prefixes and exact duplicates once where that saves `MIN_SAVING` of all tokens.
        min_shared: shorter common prefixes are not shared.
    """
    if kind == "first":
        input_ids = input_ids[cu_seqlens[:-1]]
        cu_seqlens = np.arange(len(cu_seqlens), dtype=np.int32)
    if share and len(cu_seqlens) > 2:
        rows = shared_rows(input_ids, cu_seqlens, min_shared)
        if rows.num_own <= (1 - MIN_SAVING) * len(input_ids):
            plan = _laid_out(rows, kind, pass_tokens)
            if plan.num_computed <= (1 - MIN_SAVING) * len(input_ids):
                return plan
    return _laid_out(plain_rows(input_ids, cu_seqlens), kind, pass_tokens)


def _laid_out(rows: Rows, kind: OutputKind, pass_tokens: int) -> BatchPlan:
    starts = _starts(rows, pass_tokens)
    begin = rows.shared.copy()
    begin[starts] = 0  # what a first row shares lies in another pass
    count = rows.lengths - begin
    first = np.cumsum(count) - count
    path = paths(rows, np.zeros(len(count), np.int64), begin, first)
    position = np.arange(len(path)) - np.repeat(rows.offsets[:-1], rows.lengths)
    computed = position >= np.repeat(begin, rows.lengths)
    input_ids, positions = rows.input_ids[computed], position[computed].astype(np.int32)
    one_each = kind in ("last", "mean")
    passes = []
    for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(count)], strict=True):
        opens, closes = int(first[low]), int(first[high - 1] + count[high - 1])
        shares = bool(begin[low:high].any())
        keys = slice(int(rows.offsets[low]), int(rows.offsets[high]))
        passes.append(
            Pass(
                input_ids=input_ids[opens:closes],
                positions=positions[opens:closes],
                cu_queries=_cumulative(count[low:high]),
                cu_keys=_cumulative(rows.lengths[low:high]) if shares else None,
                key_index=(path[keys] - opens).astype(np.int32) if shares else None,
                longest=int(rows.lengths[low:high].max()),
                first_output=low if one_each else opens,
            )
        )
    return BatchPlan(
        passes=tuple(passes),
        num_computed=len(input_ids),
        num_outputs=len(count) if one_each else len(input_ids),
        output_index=_output_index(rows, path, one_each),
    )


def _starts(rows: Rows, pass_tokens: int) -> Int64:
    """First row of each pass: as many rows as its tokens, and the keys of its shared rows, leave room for."""
    starts: list[int] = []
    tokens = keys = 0
    for row, (length, shared) in enumerate(zip(rows.lengths.tolist(), rows.shared.tolist(), strict=True)):
        tokens, keys = tokens + length - shared, keys + length
        if not starts or tokens > pass_tokens or (keys > tokens and keys > MAX_KEYS_PER_TOKEN * pass_tokens):
            starts.append(row)
            tokens = keys = length
    return np.array(starts, np.int64)


def _output_index(rows: Rows, path: Int64, one_each: bool) -> Int32 | None:
    if rows.row_of is None:
        return None
    asked = rows.row_of if one_each else path[token_positions(rows.offsets, rows.row_of)]
    return None if np.array_equal(asked, np.arange(len(asked))) else asked.astype(np.int32)


def _cumulative(counts: Int64) -> Int32:
    cumulative = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cumulative[1:])
    return cumulative
