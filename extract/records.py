"""The data that flows from source to shard, with shapes. Knows numpy and nothing else.

Letters: R rows of a block, N sequences, T tokens, B sequences of one token batch, H hidden size.
Everything is columnar: no Python object per row lives between source and sink.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
States = npt.NDArray[Any]  # float32, float16, or uint16 holding the bits of bfloat16


class Outcome(StrEnum):
    """How one input row (or one chunk of it) ended. Exactly one each."""

    OK = "ok"
    TRUNCATED = "truncated"
    EMPTY = "empty"
    NULL = "null"
    BAD_TEXT = "bad_text"
    TOO_LONG = "too_long"
    NON_FINITE = "non_finite"


OUTCOMES: tuple[Outcome, ...] = tuple(Outcome)
OUTCOME_CODE: dict[Outcome, int] = {outcome: code for code, outcome in enumerate(OUTCOMES)}

STATELESS = frozenset({Outcome.EMPTY, Outcome.NULL, Outcome.BAD_TEXT, Outcome.TOO_LONG, Outcome.NON_FINITE})
"""Outcomes of rows for which no state is stored."""

NOT_COUNTED = -1
"""`num_tokens_original` of a text so long that it was cut before it was tokenised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Token ids and outcome of N output rows, made from R consecutive source rows (N >= R: chunking repeats a row).

    Attributes:
        source_index: int32 [N], index into the block of R source rows, non-decreasing, every source row at least once.
        chunk: int32 [N], 0 for the first (or only) chunk of a row.
        outcome: uint8 [N], code of `OUTCOMES`.
        num_tokens_original: int32 [N], tokens of the whole row before any cut; `NOT_COUNTED` if not known, 0 if none.
        offsets: int64 [N + 1], sequence n is `input_ids[offsets[n]:offsets[n + 1]]`; an empty span means no states.
        input_ids: int32 [T].
        doubled_bos: how many sequences begin with two beginning-of-sequence tokens.
    """

    source_index: Int32
    chunk: Int32
    outcome: UInt8
    num_tokens_original: Int32
    offsets: Int64
    input_ids: Int32
    doubled_bos: int = 0

    @property
    def num_tokens(self) -> Int32:
        """int32 [N]: length of each sequence."""
        return np.diff(self.offsets).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Sequences of one forward pass, end to end, without padding.

    Attributes:
        input_ids: int32 [T].
        cu_seqlens: int32 [B + 1], cumulative lengths, first 0, last T; no sequence is empty.
        members: int64 [B], which sequence of the window each one is.
    """

    input_ids: Int32
    cu_seqlens: Int32
    members: Int64

    @property
    def lengths(self) -> Int32:
        """int32 [B]."""
        return np.diff(self.cu_seqlens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.cu_seqlens[-1])

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1
