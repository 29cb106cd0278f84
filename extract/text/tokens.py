"""A column of rows -> token ids with an outcome each, under the job's text policy.

Knows Arrow columns and the engine's tokenizer, nothing of batches or models. Rows are encoded whole, without special
tokens, and then cut with numpy: what a tokenizer's own truncation gives, but with the uncut length known and without a
hidden state. The exception are texts past 32,768 characters, which are cut before they are encoded where the engine's
contract says that this is exact (`precut`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
from extract.text.text_column import read_texts
from extract.text.text_ids import TextReader

MAX_EXAMPLE_CHARACTERS = 2_000


class NoTokenizer(SpecError):
    """Text, but an engine that only takes ids."""

    template = (
        '{path}: source.input = "{input}", but this engine was built without a tokenizer. '
        'Use source.input = "input_ids", or build the engine from a checkpoint with tokenizer files.'
    )


class NoSuchSpecialToken(SpecError):
    """A special token is asked for that the tokenizer does not have."""

    template = (
        'text.special_tokens is "{found}", but the engine\'s tokenizer has no {missing} token. '
        'Use "tokenizer" (what it adds by itself: {adds}) or "none".'
    )


class DoesNotApply(SpecError):
    """A text setting that means nothing for this kind of input."""

    template = 'text.{key} is {found}, which does not apply to source.input = "{input}". Leave it out.'


class NoRoom(SpecError):
    """The limit leaves no token for the text itself."""

    template = (
        "max_input_tokens is {max_input_tokens}, of which {num_special} are special tokens, and chunk_overlap is "
        "{overlap}: no room for new text. Raise the first or lower the others."
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
    described: dict[str, Any] = field(default_factory=dict)

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

    def policy(self) -> dict[str, Any]:
        """Everything that decides the ids, as JSON values for schema metadata."""
        return dict(self.described)

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
    _check_applies(text, input)
    if identity.kind == "none" and input != "input_ids":
        raise NoTokenizer(path=engine_directory, input=input)
    if input == "messages" and not identity.chat_template:
        raise NoChatTemplate(path=engine_directory)
    prefix_ids, suffix_ids = special_ids(identity, text, input)
    rule = CutRule(
        max_input_tokens=max_input_tokens,
        on_long=text.on_long,
        truncation_side=truncation_side(identity, text),
        overlap=text.chunk_overlap,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        bos_id=identity.bos_id,
    )
    if rule.room - rule.overlap < 1:
        num_special = len(prefix_ids) + len(suffix_ids)
        raise NoRoom(max_input_tokens=max_input_tokens, num_special=num_special, overlap=rule.overlap)
    described: dict[str, Any] = {
        "input": input,
        "max_input_tokens": max_input_tokens,
        "on_long": text.on_long,
        "truncation_side": rule.truncation_side,
        "chunk_overlap": text.chunk_overlap,
        "special_tokens": text.special_tokens,
        "prefix_ids": list(prefix_ids),
        "suffix_ids": list(suffix_ids),
        "split_special_tokens": text.split_special_tokens,
        "prefix": text.prefix,
        "on_null": text.on_null,
        "on_empty": text.on_empty,
        "on_bad_text": text.on_bad_text,
        "add_generation_prompt": text.add_generation_prompt,
        "tokenizer_kind": identity.kind,
        "tokenizer_sha256": identity.sha256,
    }
    opened = partial(open_encoder, engine_directory, identity, split_special_tokens=text.split_special_tokens)
    refused = _refused(text)
    if input == "input_ids":
        return RowTokenizer(
            read=partial(read_ids, vocab_size=vocab_size),
            rule=rule,
            refused=refused,
            text_reader=None,
            encoder=None if identity.kind == "none" else opened,
            described=described,
        )
    encoder = opened()
    slices = read_texts
    if input == "messages":
        renderer = ChatRenderer(engine_directory, encoder, add_generation_prompt=text.add_generation_prompt)
        slices = renderer.read_chats
        described["chat_template_reads_clock"] = renderer.reads_clock
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
        described=described,
    )


def describe_example(tokenizer: RowTokenizer, column: pa.Array, row: int) -> Example:
    """One row (the first of `column`, row `row` of the source) as text, ids and pieces, for a plan to print."""
    return tokenizer.example(column, row)


def _check_applies(text: TextSpec, input: InputKind) -> None:
    """Settings that would change nothing for this input are refused, so that none is believed to work."""
    only_for_text = {
        "special_tokens": text.special_tokens not in ("tokenizer", "none"),
        "split_special_tokens": text.split_special_tokens,
        "prefix": bool(text.prefix),
    }
    misplaced = [key for key, given in only_for_text.items() if given and input != "text"]
    if text.add_generation_prompt and input != "messages":
        misplaced.append("add_generation_prompt")
    for key in misplaced:
        raise DoesNotApply(key=key, found=json.dumps(getattr(text, key), ensure_ascii=False), input=input)


def truncation_side(identity: TokenizerIdentity, text: TextSpec) -> str:
    """The side of a long row that is cut off: the one asked for, or the tokenizer's own."""
    return identity.truncation_side if text.truncation_side == "auto" else text.truncation_side


def special_ids(
    identity: TokenizerIdentity, text: TextSpec, input: InputKind
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that are put before and after every row.

    Raises:
        NoSuchSpecialToken: the job asks for one that the tokenizer does not have.
    """
    if input != "text" or identity.kind == "none":
        return (), ()
    if text.special_tokens == "tokenizer":
        return identity.prefix_ids, identity.suffix_ids
    around: dict[str, tuple[int, ...]] = {"bos": (), "eos": ()}
    for name, token_id in (("bos", identity.bos_id), ("eos", identity.eos_id)):
        if name not in text.special_tokens.split("+"):
            continue
        if token_id is None:
            adds = f"{len(identity.prefix_ids)} before and {len(identity.suffix_ids)} after a text"
            raise NoSuchSpecialToken(found=text.special_tokens, missing=name.upper(), adds=adds)
        around[name] = (token_id,)
    return around["bos"], around["eos"]


def _refused(text: TextSpec) -> frozenset[Outcome]:
    actions = {
        Outcome.NULL: text.on_null,
        Outcome.EMPTY: text.on_empty,
        Outcome.BAD_TEXT: text.on_bad_text,
        Outcome.TOO_LONG: text.on_long,
    }
    return frozenset(outcome for outcome, action in actions.items() if action == "error")
