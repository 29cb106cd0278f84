"""A column of conversations as rendered text, by the chat template of the engine.

Rendering is transformers' own, so that the ids equal `apply_chat_template(tokenize=True)`: the template writes the
special tokens and nothing is added to them. A conversation that the template refuses, or that has no roles, is a fault
of its row; a template that does not compile is the engine's.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from extract.errors import SpecError
from extract.text.encoders import CHAT_TEMPLATE_FILE, SlowEncoder, TokenizerUnreadable, load_with_transformers
from extract.text.text_column import TextSlice, WrongColumnType, is_text, plain, read_texts

ROWS_PER_SLICE = 256
MAX_FAULT_CHARACTERS = 200


class NoChatTemplate(SpecError):
    """Conversations, but nothing that says how to write them down."""

    template = (
        '{path}: source.input = "messages", but the engine\'s tokenizer has no chat template. Build the engine from '
        'the chat or instruct checkpoint, or render the conversations to text and use source.input = "text".'
    )


class _NotAConversation(ValueError):
    """Says what is wrong with one row."""


class ChatRenderer:
    """Renders conversations with the engine's tokenizer."""

    def __init__(self, directory: Path, encoder: Any, *, add_generation_prompt: bool) -> None:
        import jinja2

        self._tokenizer = encoder.tokenizer if isinstance(encoder, SlowEncoder) else load_with_transformers(directory)
        if self._tokenizer.chat_template is None:
            raise TokenizerUnreadable(path=directory, problem=f"{CHAT_TEMPLATE_FILE} is missing")
        self._add_generation_prompt = add_generation_prompt
        self.reads_clock = "strftime_now" in self._tokenizer.chat_template
        """The template writes the date, so another day gives other ids."""
        self._refusals = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
        try:
            self._render([{"role": "user", "content": "Hello"}])
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerUnreadable(path=directory, problem=f"{CHAT_TEMPLATE_FILE}: {error}") from error
        except self._refusals:
            pass  # some templates want a system message first: each row is judged on its own

    def read_chats(self, column: pa.Array) -> Iterator[TextSlice]:
        """Rendered rows; an empty conversation is an empty text.

        Reads lists of `role`, `content` structs or maps, or strings that hold the same as JSON.

        Raises:
            WrongColumnType: the column cannot hold conversations.
        """
        column = plain(column)
        if is_text(column.type):
            for piece in read_texts(column):
                yield self._rendered(piece.first, piece.texts, dict(piece.faults))
            return
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
            pa.types.is_struct(kind.value_type) or pa.types.is_map(kind.value_type) or pa.types.is_null(kind.value_type)
        ):
            expected = "lists of role, content structs or maps, or the same as JSON text"
            raise WrongColumnType(found=kind, input="messages", expected=expected)
        for first in range(0, len(column), ROWS_PER_SLICE):
            yield self._rendered(first, list(column.slice(first, ROWS_PER_SLICE)), {})

    def assistant_turns(self, column: pa.Array) -> tuple[str, list[tuple[int, int]] | None]:
        """The first row's rendered text, and which of its characters (from, up to) the assistant wrote.

        A turn begins after the opening that the template writes for the assistant and ends with what it writes after
        the message. `None` where the template writes the whole differently than it writes the turns up to some
        message, so that nothing tells the turns apart.
        """
        value = plain(column)[0]
        stored = value.as_py() if is_text(value.type) else value
        conversation = _conversation(stored.decode() if isinstance(stored, bytes) else stored)
        if not conversation:
            return "", None
        whole, turns = self._render(conversation), []
        for position, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            try:
                before = self._render(conversation[:position], opening=True) if position else ""
                upto = self._render(conversation[: position + 1], opening=False)
            except self._refusals:
                return whole, None
            if not whole.startswith(before) or not whole.startswith(upto) or len(upto) < len(before):
                return whole, None
            turns.append((len(before), len(upto)))
        return whole, turns

    def _rendered(self, first: int, rows: list[Any], faults: dict[int, str]) -> TextSlice:
        texts: list[str | None] = []
        for row, value in enumerate(rows, start=first):
            text = None
            try:
                conversation = _conversation(value)
                if conversation is not None:
                    text = self._render(conversation) if conversation else ""
                    text.encode()  # JSON may hold lone surrogates
            except UnicodeError as error:
                faults[row] = (
                    f"a message is not valid Unicode ({error.reason})" if hasattr(error, "reason") else str(error)
                )
                text = None
            except (*self._refusals, RecursionError) as error:
                faults[row] = f"not a conversation that the chat template takes: {_cut(error)}"
                text = None
            texts.append(text)
        return TextSlice(first=first, texts=texts, faults=faults)

    def _render(self, conversation: list[dict[str, Any]], *, opening: bool | None = None) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=self._add_generation_prompt if opening is None else opening,
        )
        return rendered


def _conversation(value: Any) -> list[dict[str, Any]] | None:
    """The messages of one row, from an Arrow scalar or JSON text; None for null."""
    messages = value.as_py(maps_as_pydicts="strict") if isinstance(value, pa.Scalar) else value
    if isinstance(messages, str):
        messages = json.loads(messages)
    elif messages is None:
        return None
    if not isinstance(messages, list):
        raise _NotAConversation(f"a list of messages is expected, this is a {type(messages).__name__}")
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _NotAConversation(f"message {position} is not an object with role and content")
        if not isinstance(message.get("role"), str):
            raise _NotAConversation(f"message {position} has no role")
        if not any(value is not None for key, value in message.items() if key != "role"):
            raise _NotAConversation(f"message {position} has no content")
    return messages


def _cut(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= MAX_FAULT_CHARACTERS else text[: MAX_FAULT_CHARACTERS - 3] + "..."
