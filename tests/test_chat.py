"""Conversations are rendered by the engine's chat template (`extract.text.chat`)."""

import json
from typing import Any

import pyarrow as pa
import pytest
from tokenizer_engines import CHAT_TEMPLATE, Exported, export, exported, ids_of, outcomes_of

from extract.records import TokenRows
from extract.spec import TextSpec
from extract.text.chat import ChatRenderer, NoChatTemplate
from extract.text.encoders import TokenizerUnreadable, open_encoder
from extract.text.policy import DoesNotApply
from extract.text.text_column import WrongColumnType
from extract.text.tokens import RowRefused

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve\n中文"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "Hi"}],
]
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def chatty(**options: Any) -> Exported:
    return exported(chat_template=CHAT_TEMPLATE, **options)


def tokenize(column: pa.Array, text: TextSpec | None = None, *, limit: int = 128, first_row: int = 0) -> TokenRows:
    return chatty().open(text, limit=limit, kind="messages").tokenize(column, first_row)


def original_ids(chats: list[Any], **options: Any) -> list[list[int]]:
    return [chatty().original.apply_chat_template(chat, tokenize=True, **options)["input_ids"] for chat in chats]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_ids_equal_apply_chat_template_with_one_bos(add_generation_prompt: bool) -> None:
    rows = tokenize(pa.array(CHATS, MESSAGES), TextSpec(add_generation_prompt=add_generation_prompt))
    assert ids_of(rows) == original_ids(CHATS, add_generation_prompt=add_generation_prompt)
    assert [ids.count(1) for ids in ids_of(rows)] == [1, 1, 1]
    assert rows.doubled_bos == 0


@pytest.mark.parametrize("side", ["right", "left"])
def test_long_conversations_are_cut_as_apply_chat_template_does(side: Any) -> None:
    tokenizer = chatty().original
    tokenizer.truncation_side = side
    try:
        expected = original_ids(CHATS, truncation=True, max_length=10)
    finally:
        tokenizer.truncation_side = "right"
    rows = tokenize(pa.array(CHATS, MESSAGES), TextSpec(truncation_side=side), limit=10)
    assert ids_of(rows) == expected
    assert rows.num_tokens_original.tolist() == [len(ids) for ids in original_ids(CHATS)]


def test_structs_maps_and_json_text_give_the_same_ids() -> None:
    expected = ids_of(tokenize(pa.array(CHATS, MESSAGES)))
    maps = pa.array(
        [[list(message.items()) for message in chat] for chat in CHATS], pa.list_(pa.map_("string", "string"))
    )
    assert ids_of(tokenize(maps)) == expected
    assert ids_of(tokenize(pa.array([json.dumps(chat) for chat in CHATS]))) == expected
    assert ids_of(tokenize(pa.array([json.dumps(chat) for chat in CHATS]).dictionary_encode())) == expected
    assert ids_of(tokenize(pa.array(CHATS, pa.large_list(MESSAGES.value_type)))) == expected
    assert ids_of(tokenize(pa.array([None, *CHATS], MESSAGES)[1:])) == expected


def test_fields_that_other_messages_have_are_not_there_when_null() -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    named = [[{"role": "user", "content": "a", "name": None}]]
    assert ids_of(tokenize(pa.array(named, kind))) == original_ids([[{"role": "user", "content": "a"}]])


@pytest.mark.parametrize(
    "bad",
    [
        [{"role": "wizard", "content": "a"}],
        [{"role": None, "content": "a"}],
        [{"role": "user", "content": None}],
        [None],
    ],
    ids=str,
)
def test_a_conversation_that_cannot_be_rendered_is_bad_text_alone(bad: Any) -> None:
    rows = tokenize(pa.array([CHATS[0], bad, None, [], CHATS[1]], MESSAGES))
    assert outcomes_of(rows) == ["ok", "bad_text", "null", "empty", "ok"]
    assert [ids_of(rows)[0], ids_of(rows)[4]] == original_ids(CHATS[:2])
    assert rows.num_tokens.tolist()[1:4] == [0, 0, 0]


def test_json_that_is_no_list_of_messages_is_told_so() -> None:
    with pytest.raises(RowRefused, match=r"takes: message 0 is not an object with role and content\. "):
        tokenize(pa.array(['["user"]']), TextSpec(on_bad_text="error"))


def test_a_message_without_a_role_is_bad_text_even_if_the_template_would_take_it() -> None:
    lenient = exported(
        chat_template="{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    )
    column = pa.array(['[{"content": "a"}]', '[{"role": 3, "content": "a"}]', '[{"role": "any", "content": "a"}]'])
    rows = lenient.open(kind="messages").tokenize(column, 0)
    assert outcomes_of(rows) == ["bad_text", "bad_text", "ok"]


@pytest.mark.parametrize(
    "bad",
    [
        "not JSON",
        "null",
        "3",
        '{"role": "user"}',
        '["user"]',
        '[{"role": "user", "content": "\\ud800"}]',
        "[" * 100_000,
        b"\xff",
    ],
    ids=lambda bad: repr(bad)[:30],
)
def test_json_that_is_no_conversation_is_bad_text_alone(bad: str | bytes) -> None:
    good = json.dumps(CHATS[0]).encode()
    rows = tokenize(pa.array([good, bad.encode() if isinstance(bad, str) else bad, None, b"[]", good]))
    assert outcomes_of(rows) == ["ok", "bad_text", "null", "empty", "ok"]


def test_bad_text_stops_a_job_that_asked_for_it_with_the_templates_own_words() -> None:
    column = pa.array([CHATS[0], [{"role": "wizard", "content": "a"}]], MESSAGES)
    with pytest.raises(RowRefused) as caught:
        tokenize(column, TextSpec(on_bad_text="error"), first_row=7)
    assert str(caught.value) == (
        "row 8: not a conversation that the chat template takes: no such role. Repair the source, or set "
        'text.on_bad_text = "record" to have such rows marked.'
    )


def test_an_engine_without_a_chat_template_says_so() -> None:
    engine = exported()
    with pytest.raises(NoChatTemplate) as caught:
        engine.open(kind="messages")
    assert str(caught.value) == (
        f'{engine.directory}: source.input = "messages", but the engine\'s tokenizer has no chat template. Build the '
        "engine from the chat or instruct checkpoint, or render the conversations to text and use source.input = "
        '"text".'
    )
    assert caught.value.exit_code == 2


def test_a_template_that_does_not_compile_is_the_engines_fault() -> None:
    engine = export(chatty().original)
    (engine.directory / "chat_template.jinja").write_text("{% for message in messages %}")
    with pytest.raises(TokenizerUnreadable, match=r"chat_template\.jinja: "):
        engine.open(kind="messages")


def test_a_template_file_that_is_gone_is_the_engines_fault() -> None:
    engine = export(chatty().original)
    (engine.directory / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerUnreadable, match=r"chat_template\.jinja is missing"):
        engine.open(kind="messages")


@pytest.mark.parametrize(
    "column",
    [pa.array([1]), pa.array([["text"]]), pa.array([{"role": "user", "content": "a"}])],
    ids=lambda c: str(c.type),
)
def test_other_columns_are_refused(column: pa.Array) -> None:
    with pytest.raises(WrongColumnType) as caught:
        tokenize(column)
    assert str(caught.value) == (
        f'the input column has type {column.type}; source.input = "messages" reads lists of role, content structs or '
        "maps, or the same as JSON text. Name another source.column or another source.input."
    )


@pytest.mark.parametrize(
    "text", [TextSpec(prefix="a"), TextSpec(special_tokens="bos"), TextSpec(split_special_tokens=True)]
)
def test_settings_that_would_break_the_template_are_refused(text: TextSpec) -> None:
    with pytest.raises(DoesNotApply, match=r'does not apply to source\.input = "messages"'):
        chatty().open(text, kind="messages")


def test_a_renderer_knows_of_a_template_that_writes_the_date() -> None:
    for engine, reads in (
        (chatty(), False),
        (exported(chat_template="{{ strftime_now('%Y') }}" + CHAT_TEMPLATE), True),
    ):
        encoder = open_encoder(engine.directory, engine.identity, split_special_tokens=False)
        assert ChatRenderer(engine.directory, encoder, add_generation_prompt=False).reads_clock is reads


def test_the_example_shows_the_rendered_conversation() -> None:
    example = chatty().open(kind="messages").example(pa.array(CHATS, MESSAGES), 3)
    assert example.text == "<s>[user] Hello</s>"
    assert (example.pieces[0], example.pieces[-1]) == ("<s>", "</s>")
