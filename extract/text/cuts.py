"""Cut the content ids of rows to the limit and put the special ids around each piece.

Knows numpy and no text: content ids are what a tokenizer gives without special tokens, so one rule (which window of a
row is kept) serves truncation from either side, chunks and skipped rows. Exactly equal to a tokenizer's own truncation
for tokenizers whose special ids are a constant prefix and suffix; the export proves that before it is relied on.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from extract.records import NOT_COUNTED, OUTCOME_CODE, Int32, Int64, Outcome, TokenRows, UInt8
from extract.spec import OnLong


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentIds:
    """Ids of R rows before any cut, without special tokens.

    Attributes:
        outcome: uint8 [R], code of `OK` where there are ids, else of `EMPTY`, `NULL` or `BAD_TEXT`.
        num_tokens: int64 [R], ids of the whole row; `NOT_COUNTED` where only enough of the first ones were made to
            know that the row is too long.
        offsets: int64 [R + 1], row r is `input_ids[offsets[r]:offsets[r + 1]]`.
        input_ids: int32 [T].
        faults: why each bad row (index into R) cannot be read.
    """

    outcome: UInt8
    num_tokens: Int64
    offsets: Int64
    input_ids: Int32
    faults: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRule:
    """At most `max_input_tokens` ids a sequence, of which `prefix_ids` and `suffix_ids` are around every one."""

    max_input_tokens: int
    on_long: OnLong
    truncation_side: str
    overlap: int
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    bos_id: int | None

    @property
    def room(self) -> int:
        """Content ids that fit."""
        return self.max_input_tokens - len(self.prefix_ids) - len(self.suffix_ids)

    @property
    def first_ids_decide(self) -> bool:
        """Whether the first `room` ids of a long row, and that there are more, are all that the rule needs."""
        return self.on_long != "chunk" and not (self.on_long == "truncate" and self.truncation_side == "left")

    def cut(self, contents: ContentIds) -> TokenRows:
        """Token rows of R rows of content ids. Rows that are not `OK` keep their outcome and get no ids."""
        length = np.diff(contents.offsets)
        is_long = (contents.num_tokens > self.room) | (contents.num_tokens == NOT_COUNTED)
        outcome = contents.outcome.copy()
        source_index = np.arange(len(length), dtype=np.int64)
        chunk = np.zeros_like(source_index)
        start = np.zeros_like(source_index)
        if self.on_long == "chunk":
            step = self.room - self.overlap
            num_windows = np.where(is_long, 1 - (self.room - length) // step, 1)
            source_index = np.repeat(source_index, num_windows)
            chunk = np.arange(len(source_index)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
            start = chunk * step
            taken = np.minimum(length[source_index] - start, self.room)
        elif self.on_long == "truncate":
            outcome[is_long] = OUTCOME_CODE[Outcome.TRUNCATED]
            taken = np.minimum(length, self.room)
            if self.truncation_side == "left":
                start = length - taken
        else:
            outcome[is_long] = OUTCOME_CODE[Outcome.TOO_LONG]
            taken = np.where(is_long, 0, length)
        offsets, input_ids = self._assemble(contents.input_ids, contents.offsets[source_index] + start, taken)
        num_special = len(self.prefix_ids) + len(self.suffix_ids)
        counted = np.where(contents.num_tokens > 0, contents.num_tokens + num_special, contents.num_tokens)
        return TokenRows(
            source_index=source_index.astype(np.int32),
            chunk=chunk.astype(np.int32),
            outcome=outcome[source_index],
            num_tokens_original=counted[source_index].astype(np.int32),
            offsets=offsets,
            input_ids=input_ids,
            doubled_bos=self._doubled_bos(offsets, input_ids),
        )

    def _assemble(self, ids: Int32, first: npt.NDArray[np.int64], taken: npt.NDArray[np.int64]) -> tuple[Int64, Int32]:
        """Spans `ids[first:first + taken]`, each between the special ids; an empty span stays empty."""
        num_prefix, num_suffix = len(self.prefix_ids), len(self.suffix_ids)
        filled = taken > 0
        offsets = np.zeros(len(taken) + 1, dtype=np.int64)
        np.cumsum(taken + filled * (num_prefix + num_suffix), out=offsets[1:])
        out = np.empty(offsets[-1], dtype=np.int32)
        before = np.cumsum(taken) - taken
        flat = np.arange(taken.sum(), dtype=np.int64)
        out[flat + np.repeat(offsets[:-1] + num_prefix - before, taken)] = ids[flat + np.repeat(first - before, taken)]
        for position, special in enumerate(self.prefix_ids):
            out[offsets[:-1][filled] + position] = special
        for position, special in enumerate(self.suffix_ids):
            out[offsets[1:][filled] - num_suffix + position] = special
        return offsets, out

    def _doubled_bos(self, offsets: Int64, input_ids: Int32) -> int:
        if self.bos_id is None:
            return 0
        first = offsets[:-1][np.diff(offsets) >= 2]
        return int(np.sum((input_ids[first] == self.bos_id) & (input_ids[first + 1] == self.bos_id)))
