"""A column of rows -> token ids with an outcome each, under the job's text policy.

Knows Arrow columns and the engine's tokenizer, nothing of batches or models. Rows are encoded whole, without special
tokens, and then cut with numpy: what a tokenizer's own truncation gives, but with the uncut length known and without a
hidden state. The exception are texts past 32,768 characters, which are cut before they are encoded where the engine's
contract says that this is exact (`precut`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from extract.engine.contract import TokenizerIdentity
from extract.errors import SourceError, SpecError
from extract.records import NOT_COUNTED, OUTCOME_CODE, OUTCOMES, Outcome, TokenRows
from extract.spec import InputKind, TextSpec
from extract.text.chat import ChatRenderer, NoChatTemplate
from extract.text.cuts import ContentIds, CutRule
from extract.text.encoders import Encoder, open_encoder
from extract.text.id_column import read_ids
from extract.text.policy import check_applies, cut_rule, refused_outcomes
from extract.text.text_column import read_texts
from extract.text.text_ids import TextReader

MAX_EXAMPLE_CHARACTERS = 2_000


class NoTokenizer(SpecError):
    """Text, but an engine that only takes ids."""

    template = (
        '{path}: source.input = "{input}", but this engine was built without a tokenizer. '
        'Use source.input = "input_ids", or build the engine from a checkpoint with tokenizer files.'
    )


class RowRefused(SourceError):
    """A row that the job's policy says to stop at."""

    template = "row {row}: {problem}. {advice}"


_ADVICE = {
    Outcome.NULL: 'Leave such rows out of the source, or set text.on_null = "record" to have them marked.',
    Outcome.EMPTY: 'Leave such rows out of the source, or set text.on_empty = "record" to have them marked.',
    Outcome.BAD_TEXT: 'Repair the source, or set text.on_bad_text = "record" to have such rows marked.',
    Outcome.TOO_LONG: 'Set text.on_long to "truncate", "chunk" or "skip", or build an engine with a higher limit.',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row as the model will see it, for a plan to print."""

    row: int
    text: str | None
    """What the tokenizer gets (with prefix, or the rendered chat), its first characters if long; None for ready ids."""
    outcome: Outcome
    num_tokens_original: int
    input_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """Each id as text; empty without a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class RowTokenizer:
    """Turns blocks of rows into `TokenRows`; made by `open_tokenizer`. One thread at a time.

    Attributes:
        read: column and source position of its first row -> content ids.
        rule: how content ids are cut.
        refused: outcomes that stop the job.
    """

    read: Callable[[pa.Array, int], ContentIds]
    rule: CutRule
    refused: frozenset[Outcome]
    text_reader: TextReader | None
    encoder: Callable[[], Encoder] | None

    def tokenize(self, column: pa.Array, first_row: int) -> TokenRows:
        """Token rows of R consecutive source rows.

        Args:
            column: the input column [R]; an empty array of the column's type checks the type alone.
            first_row: position in the source of the column's first row, for messages.

        Raises:
            WrongColumnType: the column cannot be this kind of input.
            BadTokenId: an id that the model does not have.
            RowRefused: the first row that the policy says to stop at.
        """
        contents = self.read(column, first_row)
        rows = self.rule.cut(contents)
        if self.refused:
            self._stop_at_refused(rows, contents.faults, first_row)
        return rows

    def example(self, column: pa.Array, row: int) -> Example:
        """The column's first row, which is `row` of the source, as its first sequence reaches the model."""
        rows = self.tokenize(column[:1], row)
        text = None if self.text_reader is None else self.text_reader.first_text(column)
        input_ids = tuple(rows.input_ids[: rows.offsets[1]].tolist())
        return Example(
            row=row,
            text=None if text is None else text[:MAX_EXAMPLE_CHARACTERS],
            outcome=OUTCOMES[rows.outcome[0]],
            num_tokens_original=int(rows.num_tokens_original[0]),
            input_ids=input_ids,
            pieces=() if self.encoder is None else tuple(map(self.encoder().piece, input_ids)),
        )

    def _stop_at_refused(self, rows: TokenRows, faults: dict[int, str], first_row: int) -> None:
        found = np.isin(rows.outcome, [OUTCOME_CODE[outcome] for outcome in self.refused])
        if not found.any():
            return
        position = int(np.argmax(found))
        index = int(rows.source_index[position])
        outcome = OUTCOMES[rows.outcome[position]]
        count = int(rows.num_tokens_original[position])
        limit = self.rule.max_input_tokens
        problems = {
            Outcome.NULL: "null",
            Outcome.EMPTY: "empty, no tokens",
            Outcome.BAD_TEXT: faults.get(index, ""),
            Outcome.TOO_LONG: f"{f'more than {limit}' if count == NOT_COUNTED else count} tokens, the limit is {limit}",
        }
        raise RowRefused(row=first_row + index, problem=problems[outcome], advice=_ADVICE[outcome])


def open_tokenizer(
    engine_directory: Path,
    identity: TokenizerIdentity,
    text: TextSpec,
    *,
    max_input_tokens: int,
    input: InputKind,
    vocab_size: int,
) -> RowTokenizer:
    """The tokenizer of an engine under a job's text policy.

    Args:
        engine_directory: where the tokenizer files lie.
        identity: from the engine's contract.
        text: the job's policy; its own `max_input_tokens` is taken as resolved into the argument.
        max_input_tokens: the most ids of a sequence, special tokens included; no length in a tokenizer file counts.
        input: what the column holds.
        vocab_size: rows of the model's embedding; ids at or past it are refused.

    Raises:
        NoTokenizer, NoChatTemplate, NoSuchSpecialToken, DoesNotApply, NoRoom: the job asks for something impossible.
        TokenizerUnreadable, TokenizerChanged: the engine's tokenizer is not the one that the contract describes.
    """
    check_applies(text, input)
    if identity.kind == "none" and input != "input_ids":
        raise NoTokenizer(path=engine_directory, input=input)
    if input == "messages" and not identity.chat_template:
        raise NoChatTemplate(path=engine_directory)
    rule = cut_rule(identity, text, input, max_input_tokens)
    opened = partial(open_encoder, engine_directory, identity, split_special_tokens=text.split_special_tokens)
    refused = refused_outcomes(text)
    if input == "input_ids":
        return RowTokenizer(
            read=partial(read_ids, vocab_size=vocab_size),
            rule=rule,
            refused=refused,
            text_reader=None,
            encoder=None if identity.kind == "none" else opened,
        )
    encoder = opened()
    slices = read_texts
    if input == "messages":
        renderer = ChatRenderer(engine_directory, encoder, add_generation_prompt=text.add_generation_prompt)
        slices = renderer.read_chats
    reader = TextReader(
        slices=slices,
        encoder=encoder,
        prefix=text.prefix,
        precut_room=rule.room if rule.first_ids_decide else None,
        vocab_size=vocab_size,
    )
    return RowTokenizer(
        read=reader.read,
        rule=rule,
        refused=refused,
        text_reader=reader,
        encoder=lambda: encoder,
    )
