"""The micro-batches that one thread each runs, as index arrays: from rows, what is kept, and where to cut.

All arrays of a pass are made at once, numbered through, and sliced: nothing here costs time per token or per sequence
beyond numpy's. What is shared and where to cut was decided before.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from extract.cpu.kernels import Sequences
from extract.cpu.sharing import Rows, paths
from extract.packing import token_positions
from extract.records import Int32, Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Tokens that one thread carries through all layers.

    Attributes:
        input_ids: int32 [n], the tokens to compute.
        positions: int32 [n], each one's position in its row.
        sequences: queries (all n tokens) and keys of every layer but the last one of a pooled kind.
        wanted: int32 [w], rows whose state is asked for; `None`: all n.
        wanted_sequences: queries (the w wanted rows, in their order, one sequence each) and keys of the last layer;
            `None` where `wanted` is.
        first_output: place of its first state among the outputs of the pass.
    """

    input_ids: Int32
    positions: Int32
    sequences: Sequences
    wanted: Int32 | None
    wanted_sequences: Sequences | None
    first_output: int

    @property
    def num_outputs(self) -> int:
        """States that this micro-batch gives."""
        return len(self.input_ids if self.wanted is None else self.wanted)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassPlan:
    """How one token batch is computed.

    Attributes:
        kept: computed first, alone; its keys and values of each layer are kept for the others (`None`: nothing is).
        micro_batches: independent of each other once `kept` is done.
        num_computed: tokens computed in all.
        num_outputs: states computed in all.
        output_index: int32 [T] for kind "tokens" and "mean", else [B]: which output is each token's (sequence's) state;
            `None`: output i is state i.
    """

    kept: MicroBatch | None
    micro_batches: tuple[MicroBatch, ...]
    num_computed: int
    num_outputs: int
    output_index: Int32 | None


def lay_out(rows: Rows, kept: Int64, starts: Int64, states: Literal["all", "last"]) -> PassPlan:
    """Plan a pass whose cuts are known.

    Args:
        rows: U rows, in the order of their ids where they share.
        kept: int64 [U], leading tokens of each row that are computed first and kept.
        starts: int64 [M], first row of each micro-batch, ascending from 0.
        states: which are wanted: each token's, or each row's last one.
    """
    lengths = rows.lengths
    begin = np.maximum(rows.shared, kept)
    begin[starts] = kept[starts]  # what a first row shares beyond the kept tokens lies in another micro-batch
    count = lengths - begin
    num_kept = int(np.maximum(kept - rows.shared, 0).sum())
    first = num_kept + np.cumsum(count) - count  # number of each row's first computed token, kept ones counted before
    path = paths(rows, kept, begin, first)
    position = np.arange(len(path)) - np.repeat(rows.offsets[:-1], lengths)
    computed = position >= np.repeat(begin, lengths)
    input_ids, positions = rows.input_ids[computed], position[computed].astype(np.int32)

    active = np.flatnonzero(count)
    cuts = np.append(np.searchsorted(active, starts), len(active))
    opens = np.append(first[starts], num_kept + len(input_ids))
    before = np.repeat(opens[:-1], np.diff(cuts))  # number of the first token of each active row's micro-batch
    keys = path if len(active) == len(count) else path[np.repeat(count > 0, lengths)]
    local = np.where(keys < num_kept, keys, keys - np.repeat(before - num_kept, lengths[active])).astype(np.int32)
    cu_keys = _cumulative(lengths[active])
    query_start, query_count = (first[active] - before).astype(np.int32), count[active].astype(np.int32)

    wanted = np.sort(path[rows.offsets[1:] - 1]) if states == "last" else None
    spans = zip(*(ends.tolist() for ends in (cuts[:-1], cuts[1:], opens[:-1], opens[1:])), strict=True)
    micro_batches = [
        _micro_batch(
            input_ids[start - num_kept : stop - num_kept],
            positions[start - num_kept : stop - num_kept],
            Sequences(
                query_start=query_start[low:high],
                query_count=query_count[low:high],
                cu_keys=cu_keys[low : high + 1] - cu_keys[low],
                key_index=local[cu_keys[low] : cu_keys[high]],
                num_kept=num_kept,
            ),
            states,
            first_output,
        )
        for (low, high, start, stop), first_output in zip(spans, _outputs(opens[:-1], wanted).tolist(), strict=True)
    ]
    micro_batches.sort(key=lambda batch: -len(batch.input_ids))
    return PassPlan(
        kept=_kept_batch(rows, kept, path, position, states) if num_kept else None,
        micro_batches=tuple(micro_batches),
        num_computed=int(opens[-1]),
        num_outputs=int(opens[-1]) if wanted is None else len(wanted),
        output_index=_output_index(rows, path, wanted),
    )


def _micro_batch(
    input_ids: Int32, positions: Int32, sequences: Sequences, states: Literal["all", "last"], first_output: int
) -> MicroBatch:
    """Each sequence ends with a query of its own, whose state is wanted for "last"."""
    wanted = wanted_sequences = None
    if states == "last":
        wanted = sequences.query_start + sequences.query_count - np.int32(1)
        wanted_sequences = _one_query_each(sequences.cu_keys, sequences.key_index, sequences.num_kept)
    return MicroBatch(
        input_ids=input_ids,
        positions=positions,
        sequences=sequences,
        wanted=wanted,
        wanted_sequences=wanted_sequences,
        first_output=first_output,
    )


def _kept_batch(rows: Rows, kept: Int64, path: Int64, position: Int64, states: Literal["all", "last"]) -> MicroBatch:
    adds = np.flatnonzero(kept > rows.shared)  # rows whose tokens are kept under their own name
    seen = position < np.repeat(np.where(kept > rows.shared, kept, 0), rows.lengths)
    own = seen & (position >= np.repeat(rows.shared, rows.lengths))
    count = (kept - rows.shared)[adds].astype(np.int32)
    ends = np.cumsum(count, dtype=np.int32)
    sequences = Sequences(
        query_start=ends - count,
        query_count=count,
        cu_keys=_cumulative(kept[adds]),
        key_index=path[seen].astype(np.int32),
    )
    batch = _micro_batch(rows.input_ids[own], position[own].astype(np.int32), sequences, states, 0)
    if batch.wanted is None:
        return batch
    whole = kept[adds] == rows.lengths[adds]  # rows that others merely go on with: only their last token ends a row
    keys = sequences.key_index[np.repeat(whole, kept[adds])]
    return replace(
        batch,
        wanted=batch.wanted[whole],
        wanted_sequences=_one_query_each(_cumulative(kept[adds][whole]), keys, num_kept=0),
    )


def _one_query_each(cu_keys: Int32, key_index: Int32, num_kept: int) -> Sequences:
    """Sequences of which only the last position asks; query i is row i."""
    count = len(cu_keys) - 1
    return Sequences(
        query_start=np.arange(count, dtype=np.int32),
        query_count=np.ones(count, dtype=np.int32),
        cu_keys=cu_keys,
        key_index=key_index,
        num_kept=num_kept,
    )


def _outputs(tokens: Int64, wanted: Int64 | None) -> Int64:
    """Outputs are the computed tokens in order, or the wanted ones of them."""
    return tokens if wanted is None else np.searchsorted(wanted, tokens)


def _output_index(rows: Rows, path: Int64, wanted: Int64 | None) -> Int32 | None:
    if rows.row_of is None:
        return None
    asked = token_positions(rows.offsets, rows.row_of) if wanted is None else rows.offsets[rows.row_of + 1] - 1
    found = _outputs(path[asked], wanted).astype(np.int32)
    return None if np.array_equal(found, np.arange(len(found))) else found


def _cumulative(counts: Int64) -> Int32:
    cumulative = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cumulative[1:])
    return cumulative
