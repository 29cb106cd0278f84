"""Texts, slice by slice, to the content ids of a block of rows: what is null, empty or no text, and what is too long.

The one place where rows are Python objects, because a tokenizer takes strings; ids leave it as flat arrays. White space
is ordinary text: only a row of zero characters, or one that the tokenizer turns into no ids at all, is `empty`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa

from extract.records import NOT_COUNTED, OUTCOME_CODE, Outcome
from extract.text.cuts import ContentIds
from extract.text.encoders import Encoder
from extract.text.id_column import BadTokenId
from extract.text.precut import LONG_TEXT_CHARACTERS
from extract.text.text_column import TextSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReader:
    """Encodes the texts of a column.

    Attributes:
        slices: turns a column into texts: as they stand, or rendered conversations.
        encoder: the engine's tokenizer.
        prefix: put before each text that is not empty.
        precut_room: content ids that are kept of a text, if the first ones decide; None to encode every text whole.
        vocab_size: rows of the model's embedding.
    """

    slices: Callable[[pa.Array], Iterable[TextSlice]]
    encoder: Encoder
    prefix: str
    precut_room: int | None
    vocab_size: int

    def read(self, column: pa.Array, first_row: int) -> ContentIds:
        """Content ids of R rows; `first_row` is the source position of the first, for messages.

        Raises:
            WrongColumnType: the column cannot hold such texts.
            BadTokenId: the tokenizer gives an id that the model was not given.
        """
        outcome = np.zeros(len(column), np.uint8)
        num_tokens = np.zeros(len(column), np.int64)
        lengths = np.zeros(len(column), np.int64)
        faults: dict[int, str] = {}
        flat = [np.zeros(0, np.int32)]
        for part in self.slices(column):
            span = slice(part.first, part.first + len(part.texts))
            ids, counts = self._ids_of(part.texts)
            lengths[span] = np.fromiter(map(len, ids), np.int64, len(ids))
            num_tokens[span] = counts
            flat.append(np.fromiter(chain.from_iterable(ids), np.int32, int(lengths[span].sum())))
            is_null = np.fromiter((text is None for text in part.texts), bool, len(ids))
            outcome[span] = np.where(is_null, OUTCOME_CODE[Outcome.NULL], OUTCOME_CODE[Outcome.EMPTY])
            faults.update(part.faults)
        outcome[lengths > 0] = OUTCOME_CODE[Outcome.OK]
        outcome[list(faults)] = OUTCOME_CODE[Outcome.BAD_TEXT]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        input_ids = np.concatenate(flat)
        self._check_vocabulary(input_ids, offsets, first_row)
        return ContentIds(outcome=outcome, num_tokens=num_tokens, offsets=offsets, input_ids=input_ids, faults=faults)

    def first_text(self, column: pa.Array) -> str | None:
        """The text of a column's first row, as the tokenizer gets it."""
        text = next((text for part in self.slices(column[:1]) for text in part.texts), None)
        return self.prefix + text if text else text

    def _ids_of(self, texts: list[str | None]) -> tuple[list[list[int]], list[int]]:
        """Content ids and number of tokens of each text of a slice; none for null and empty ones."""
        ids: list[list[int]] = [[] for _ in texts]
        counts = [0] * len(texts)
        whole: list[int] = []
        for index, text in enumerate(texts):
            if text:
                first = self._first_ids(text)
                if first is None:
                    whole.append(index)
                else:
                    ids[index], counts[index] = first, NOT_COUNTED
        encoded = self.encoder.encode([f"{self.prefix}{texts[index]}" for index in whole]) if whole else []
        for index, found in zip(whole, encoded, strict=True):
            ids[index], counts[index] = found, len(found)
        return ids, counts

    def _first_ids(self, text: str) -> list[int] | None:
        if self.precut_room is None or self.encoder.precut is None:
            return None
        if len(self.prefix) + len(text) <= LONG_TEXT_CHARACTERS:
            return None
        return self.encoder.precut.first_ids(self.prefix + text, self.precut_room)

    def _check_vocabulary(self, input_ids: np.ndarray, offsets: np.ndarray, first_row: int) -> None:
        if not len(input_ids) or input_ids.max() < self.vocab_size:
            return
        index = int(np.argmax(input_ids >= self.vocab_size))
        row = int(np.searchsorted(offsets, index, side="right")) - 1
        raise BadTokenId(
            row=first_row + row,
            position=index - int(offsets[row]),
            found=int(input_ids[index]),
            last=self.vocab_size - 1,
            advice="The tokenizer has tokens that the model was not given: leave such rows out of the source.",
        )
