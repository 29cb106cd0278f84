"""Rows of text or ids become token rows under the text policy (`extract.text.tokens` and the modules it is made of)."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import rig
from tokenizer_engines import Exported, export, exported, ids_of, outcomes_of

from extract.engine.contract import TokenizerIdentity
from extract.records import TokenRows
from extract.spec import TextSpec
from extract.text import text_column
from extract.text.encoders import TokenizerChanged, TokenizerUnreadable
from extract.text.id_column import BadTokenId
from extract.text.policy import DoesNotApply, NoRoom, NoSuchSpecialToken, describe_policy
from extract.text.text_column import WrongColumnType
from extract.text.tokens import NoTokenizer, RowRefused, RowTokenizer, open_tokenizer

KINDS = ["bpe", "unigram", "wordpiece"]
BOS_ID, EOS_ID = 1, 2


def words(count: int) -> str:
    """A text of exactly `count` content tokens with the tiny byte-pair tokenizer."""
    return "7" * count


def original_ids(engine: Exported, texts: list[str], side: str, limit: int) -> list[list[int]]:
    tokenizer = engine.original
    before = tokenizer.truncation_side
    tokenizer.truncation_side = side
    try:
        return tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
    finally:
        tokenizer.truncation_side = before


def open_ids(text: TextSpec | None = None, *, limit: int = 8) -> RowTokenizer:
    return open_tokenizer(
        exported().directory,
        TokenizerIdentity(kind="none"),
        text or TextSpec(),
        max_input_tokens=limit,
        input="input_ids",
        vocab_size=100,
    )


# --- equal to the tokenizer itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_the_original_tokenizers_own_truncation(kind: Any, side: Any) -> None:
    engine = exported(kind, eos=True)
    texts = rig.passages()
    assert ids_of(engine.rows(texts, TextSpec(truncation_side=side))) == original_ids(engine, texts, side, 128)


def test_the_test_texts_have_the_length_that_they_claim() -> None:
    assert [len(ids) - 1 for ids in ids_of(exported().rows([words(n) for n in (1, 7, 99)]))] == [1, 7, 99]


def test_truncation_keeps_the_special_tokens_and_the_auto_side_is_the_tokenizers() -> None:
    engine = exported(eos=True, truncation_side="left")
    [ids] = ids_of(engine.rows(["abc" + words(500)]))
    assert (len(ids), ids[0], ids[-1]) == (128, BOS_ID, EOS_ID)
    assert set(ids[1:-1]) == {ids[1]}  # only the end of the text is left
    assert engine.open().rule.truncation_side == "left"


def test_no_special_token_is_added_to_a_tokenizer_that_adds_none() -> None:
    [ids] = ids_of(exported(bos=False).rows([words(3)]))
    assert len(ids) == 3 and BOS_ID not in ids


def test_a_length_in_the_tokenizers_files_is_no_limit() -> None:
    tokenizer = rig.tiny_tokenizer()
    tokenizer.model_max_length = 5
    assert export(tokenizer).rows([words(50)]).num_tokens.tolist() == [51]


def test_tokenizers_of_several_threads_do_not_disturb_each_other() -> None:
    from concurrent.futures import ThreadPoolExecutor

    texts = rig.passages()
    alone = [ids_of(exported(kind).rows(texts, limit=limit)) for kind, limit in (("bpe", 9), ("unigram", 128))]
    with ThreadPoolExecutor(2) as pool:
        opened = [exported(kind).open(limit=limit) for kind, limit in (("bpe", 9), ("unigram", 128))]
        together = list(pool.map(lambda tokenizer: ids_of(tokenizer.tokenize(pa.array(texts), 0)), opened))
    assert together == alone


# --- too long --------------------------------------------------------------------------------------------------------


def test_a_truncated_row_says_so_and_keeps_its_original_length() -> None:
    rows = exported().rows([words(n - 1) for n in (127, 128, 129, 500)])
    assert outcomes_of(rows) == ["ok", "ok", "truncated", "truncated"]
    assert rows.num_tokens.tolist() == [127, 128, 128, 128]
    assert rows.num_tokens_original.tolist() == [127, 128, 129, 500]


def test_a_skipped_row_has_no_ids_and_its_neighbours_are_untouched() -> None:
    rows = exported().rows([words(3), words(300), words(4)], TextSpec(on_long="skip"))
    assert outcomes_of(rows) == ["ok", "too_long", "ok"]
    assert rows.num_tokens.tolist() == [4, 0, 5]
    assert rows.num_tokens_original.tolist() == [4, 301, 5]


def test_a_long_row_stops_a_job_that_asked_for_it() -> None:
    with pytest.raises(RowRefused) as caught:
        exported().rows([words(3), words(128)], TextSpec(on_long="error"), first_row=70)
    assert str(caught.value) == (
        'row 71: 129 tokens, the limit is 128. Set text.on_long to "truncate", "chunk" or "skip", or build an engine '
        "with a higher limit."
    )
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("overlap", [0, 3])
def test_chunks_hold_every_token_with_the_overlap_and_the_special_tokens(overlap: int) -> None:
    engine = exported(eos=True)
    texts = ["", rig.passages()[0], words(5), words(8), words(9), "abc"]
    content = engine.original(texts, add_special_tokens=False)["input_ids"]
    rows = engine.rows(texts, TextSpec(on_long="chunk", chunk_overlap=overlap), limit=10)
    for index, expected in enumerate(content):
        mine = [ids for ids, source in zip(ids_of(rows), rows.source_index, strict=True) if source == index]
        assert rows.chunk[rows.source_index == index].tolist() == list(range(len(mine)))
        if not expected:
            assert mine == [[]]
            continue
        assert all(ids[0] == BOS_ID and ids[-1] == EOS_ID and len(ids) <= 10 for ids in mine)
        parts = [ids[1:-1] for ids in mine]
        assert all(before[len(before) - overlap :] == after[:overlap] for before, after in pairwise(parts))
        assert parts[0] + [token for part in parts[1:] for token in part[overlap:]] == expected
        assert set(rows.num_tokens_original[rows.source_index == index]) == {len(expected) + 2}
    assert set(outcomes_of(rows)) == {"ok", "empty"}


# --- null, empty, not text -------------------------------------------------------------------------------------------


def test_a_null_row_is_null_and_the_rows_keep_their_places() -> None:
    texts: list[str | None] = [f"row {n}" for n in range(1000)]
    texts[3] = texts[900] = None
    rows = exported().rows(texts)
    assert [index for index, outcome in enumerate(outcomes_of(rows)) if outcome == "null"] == [3, 900]
    assert rows.source_index.tolist() == list(range(1000))
    assert rows.num_tokens[[3, 900]].tolist() == rows.num_tokens_original[[3, 900]].tolist() == [0, 0]


@pytest.mark.parametrize("bos", [True, False])
def test_only_a_row_without_content_ids_is_empty(bos: bool) -> None:
    bytes_pairs = exported(bos=bos).rows(["a", "", "  ", "\n", "b"])
    assert outcomes_of(bytes_pairs) == ["ok", "empty", "ok", "ok", "ok"]
    word_pieces = exported("wordpiece", bos=bos).rows(["a", "", "  ", "\n", "b"])  # which drops white space
    assert outcomes_of(word_pieces) == ["ok", "empty", "empty", "empty", "ok"]
    assert word_pieces.num_tokens.tolist() == [1 + bos, 0, 0, 0, 1 + bos]
    assert word_pieces.num_tokens_original.tolist() == [1 + bos, 0, 0, 0, 1 + bos]


def test_bytes_that_are_not_utf8_are_bad_text_and_the_other_rows_are_right() -> None:
    lone_surrogate = "x\ud800y".encode("utf-8", "surrogatepass")
    column = pa.array([b"good", lone_surrogate, None, b"ab\xff", b"", "naïve".encode()])
    rows = exported().rows(column)
    assert outcomes_of(rows) == ["ok", "bad_text", "null", "bad_text", "empty", "ok"]
    assert [ids_of(rows)[0], ids_of(rows)[5]] == ids_of(exported().rows(["good", "naïve"]))


def test_bad_text_stops_a_job_that_asked_for_it_and_the_first_bad_byte_is_named() -> None:
    column = pa.array([b"good", b"ab\xffc\xfe"])
    with pytest.raises(RowRefused) as caught:
        exported().rows(column, TextSpec(on_bad_text="error"), first_row=10)
    assert str(caught.value) == (
        'row 11: byte 2 (0xff) is not valid UTF-8. Repair the source, or set text.on_bad_text = "record" to have such '
        "rows marked."
    )


def test_a_string_column_is_not_trusted_to_be_utf8() -> None:
    buffers = [None, pa.py_buffer(np.array([0, 2, 4], np.int32)), pa.py_buffer(b"ab\xff\xfe")]
    assert outcomes_of(exported().rows(pa.Array.from_buffers(pa.string(), 2, buffers))) == ["ok", "bad_text"]


@pytest.mark.parametrize(
    ("policy", "column", "message"),
    [
        (
            TextSpec(on_null="error"),
            ["a", None],
            "row 6: null. Leave such rows out of the source, or set text.on_null = ",
        ),
        (TextSpec(on_empty="error"), ["a", ""], "row 6: empty, no tokens. Leave such rows out of the source, or set "),
    ],
)
def test_null_and_empty_rows_stop_a_job_that_asked_for_it(policy: TextSpec, column: list[Any], message: str) -> None:
    with pytest.raises(RowRefused) as caught:
        exported().rows(column, policy, first_row=5)
    assert str(caught.value).startswith(message)


def test_the_first_refused_row_is_the_one_named() -> None:
    policy = TextSpec(on_null="error", on_bad_text="error", on_long="error")
    with pytest.raises(RowRefused, match=r"^row 1: 501 tokens"):
        exported().rows(pa.array([b"a", words(500).encode(), b"\xff", None]), policy)


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()], ids=str
)
def test_every_type_of_text_column_gives_the_same_ids(kind: pa.DataType) -> None:
    texts = ["first", None, "", "naïve 中文 🙂", "last"]
    column = pa.array(texts).cast(pa.binary()).cast(kind) if "view" not in str(kind) else pa.array(texts).cast(kind)
    assert ids_of(exported().rows(column)) == ids_of(exported().rows(texts))
    assert ids_of(exported().rows(column[2:])) == ids_of(exported().rows(texts[2:]))


def test_dictionary_run_end_and_extension_columns_are_text_too() -> None:
    texts = ["a", "a", None, "b", "a"]
    expected = ids_of(exported().rows(texts))
    assert ids_of(exported().rows(pa.array(texts).dictionary_encode())) == expected
    assert ids_of(exported().rows(pc.run_end_encode(pa.array(texts)))) == expected
    assert ids_of(exported().rows(pa.array(texts, pa.json_()))) == expected


def test_a_column_of_type_null_is_all_null_and_a_column_without_rows_gives_none() -> None:
    assert outcomes_of(exported().rows(pa.nulls(2))) == ["null", "null"]
    nothing = exported().rows([])
    assert (len(nothing.outcome), nothing.offsets.tolist(), nothing.input_ids.tolist()) == (0, [0], [])


def test_a_column_of_numbers_is_refused_even_without_rows() -> None:
    with pytest.raises(WrongColumnType) as caught:
        exported().rows(pa.array([], pa.int64()))
    assert str(caught.value) == (
        'the input column has type int64; source.input = "text" reads strings or bytes. '
        "Name another source.column or another source.input."
    )


def test_slices_bound_what_is_in_hand_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    column = pa.array([text.encode() for text in rig.passages(60)] + [None, b"", b"\xff", b"end"])
    whole = exported().rows(column)
    monkeypatch.setattr(text_column, "SLICE_BYTES", 300)
    slices = list(text_column.read_texts(column))
    assert all(len(part.texts) == 1 or sum(len(text or "") for text in part.texts) <= 300 for part in slices)
    assert len(slices) > 20
    sliced = exported().rows(column)
    assert all(
        np.array_equal(getattr(whole, name), getattr(sliced, name)) for name in ("outcome", "offsets", "input_ids")
    )


# --- special tokens, prefix ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("special_tokens", "expected"),
    [
        ("tokenizer", [BOS_ID, None]),
        ("none", [None]),
        ("bos", [BOS_ID, None]),
        ("eos", [None, EOS_ID]),
        ("bos+eos", [BOS_ID, None, EOS_ID]),
    ],
)
def test_special_tokens_are_those_asked_for(special_tokens: Any, expected: list[int | None]) -> None:
    [ids] = ids_of(exported().rows([words(1)], TextSpec(special_tokens=special_tokens)))
    assert [token if token in (BOS_ID, EOS_ID) else None for token in ids] == expected


def test_a_special_token_that_the_tokenizer_does_not_have_is_refused() -> None:
    engine = exported()
    with pytest.raises(NoSuchSpecialToken) as caught:
        replace(engine, identity=replace(engine.identity, eos_id=None)).open(TextSpec(special_tokens="bos+eos"))
    assert str(caught.value) == (
        'text.special_tokens is "bos+eos", but the engine\'s tokenizer has no EOS token. Use "tokenizer" (what it adds '
        'by itself: 1 before and 0 after a text) or "none".'
    )


def test_special_tokens_written_in_a_text_are_control_ids_unless_split() -> None:
    text = "a</s>b"
    [ids] = ids_of(exported().rows([text]))
    [split] = ids_of(exported().rows([text], TextSpec(split_special_tokens=True)))
    assert ids == exported().original(text)["input_ids"] and EOS_ID in ids
    assert split == exported().original(text, split_special_tokens=True)["input_ids"] and EOS_ID not in split


def test_a_doubled_bos_is_counted_and_not_altered() -> None:
    rows = exported().rows(["<s>a", "a", "<s><s>b"])
    assert rows.doubled_bos == 2
    assert ids_of(rows) == exported().original(["<s>a", "a", "<s><s>b"])["input_ids"]
    assert exported().rows(["<s>a"], TextSpec(special_tokens="none")).doubled_bos == 0


def test_the_prefix_is_part_of_every_text_that_is_not_empty() -> None:
    rows = exported().rows(["a", "", None], TextSpec(prefix="query: "))
    assert ids_of(rows) == [exported().original("query: a")["input_ids"], [], []]
    assert outcomes_of(rows) == ["ok", "empty", "null"]


def test_an_id_that_the_model_was_not_given_is_refused() -> None:
    engine = exported()
    tokenizer = open_tokenizer(
        engine.directory, engine.identity, TextSpec(), max_input_tokens=8, input="text", vocab_size=5
    )
    found = engine.original("a", add_special_tokens=False)["input_ids"][0]
    with pytest.raises(BadTokenId) as caught:
        tokenizer.tokenize(pa.array(["", "</s>a"]), 40)
    assert str(caught.value) == (
        f"row 41, token 1: {found} is not a token id of the model (0 to 4). The tokenizer has tokens that the model "
        "was not given: leave such rows out of the source."
    )


# --- ready ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int8()), pa.list_(pa.int32()), pa.large_list(pa.uint64()), pa.list_(pa.int64(), 2)],
    ids=str,
)
def test_ready_ids_are_taken_as_they_are(kind: pa.DataType) -> None:
    column = pa.array([[9, 9], [5, 6], None, [7, 8]], kind)[1:]
    rows = open_ids().tokenize(column, 0)
    assert ids_of(rows) == [[5, 6], [], [7, 8]]
    assert outcomes_of(rows) == ["ok", "null", "ok"]


def test_ready_ids_under_a_null_row_are_not_read() -> None:
    offsets, values = pa.array([0, 2, 4], pa.int32()), pa.array([5, 6, 999, 999])
    column = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True]))
    assert ids_of(open_ids().tokenize(column, 0)) == [[5, 6], []]


def test_an_empty_list_is_empty_and_long_lists_follow_the_policy() -> None:
    column = pa.array([[], list(range(10)), [1]], pa.list_(pa.int32()))
    right = open_ids().tokenize(column, 0)
    assert outcomes_of(right) == ["empty", "truncated", "ok"]
    assert ids_of(right) == [[], list(range(8)), [1]]
    assert ids_of(open_ids(TextSpec(truncation_side="left")).tokenize(column, 0))[1] == list(range(2, 10))
    assert ids_of(open_ids(TextSpec(on_long="chunk")).tokenize(column, 0)) == [[], list(range(8)), [8, 9], [1]]
    assert outcomes_of(open_ids(TextSpec(on_long="skip")).tokenize(column, 0)) == ["empty", "too_long", "ok"]


@pytest.mark.parametrize("bad", [-1, 100, None, 2**63 + 5])
def test_an_id_outside_the_vocabulary_names_row_and_position(bad: int | None) -> None:
    kind = pa.list_(pa.uint64() if bad and bad > 100 else pa.int32())
    with pytest.raises(BadTokenId) as caught:
        open_ids().tokenize(pa.array([[1, 2], None, [], [3, 4, bad]], kind), 1000)
    assert str(caught.value) == (
        f"row 1003, token 2: {'null' if bad is None else bad} is not a token id of the model (0 to 99). "
        "Were these ids made with this model's tokenizer?"
    )


@pytest.mark.parametrize("column", [pa.array(["1 2"]), pa.array([[1.0]]), pa.array([1])], ids=str)
def test_ids_are_not_read_from_text_or_fractions(column: pa.Array) -> None:
    with pytest.raises(WrongColumnType, match=r'source.input = "input_ids" reads lists of integers'):
        open_ids().tokenize(column, 0)


# --- opening ---------------------------------------------------------------------------------------------------------


def test_an_engine_without_a_tokenizer_takes_only_ids() -> None:
    engine = replace(exported(), identity=TokenizerIdentity(kind="none"))
    with pytest.raises(NoTokenizer) as caught:
        engine.open()
    assert str(caught.value) == (
        f'{engine.directory}: source.input = "text", but this engine was built without a tokenizer. Use source.input = '
        '"input_ids", or build the engine from a checkpoint with tokenizer files.'
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("limit", "overlap"), [(2, 0), (5, 3)])
def test_a_limit_without_room_for_text_is_refused(limit: int, overlap: int) -> None:
    with pytest.raises(NoRoom) as caught:
        exported(eos=True).open(TextSpec(on_long="chunk", chunk_overlap=overlap), limit=limit)
    assert str(caught.value) == (
        f"max_input_tokens is {limit}, of which 2 are special tokens, and chunk_overlap is {overlap}: no room for new "
        "text. Raise the first or lower the others."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TextSpec(prefix="q: "), 'text.prefix is "q: "'),
        (TextSpec(special_tokens="bos"), 'text.special_tokens is "bos"'),
        (TextSpec(split_special_tokens=True), "text.split_special_tokens is true"),
        (TextSpec(add_generation_prompt=True), "text.add_generation_prompt is true"),
    ],
)
def test_a_setting_that_means_nothing_for_ready_ids_is_refused(text: TextSpec, message: str) -> None:
    with pytest.raises(DoesNotApply) as caught:
        open_ids(text)
    assert str(caught.value) == f'{message}, which does not apply to source.input = "input_ids". Leave it out.'


def test_a_tokenizer_that_gives_other_ids_than_at_build_is_refused() -> None:
    engine = exported()
    ids = engine.identity.probe_ids
    changed = replace(engine, identity=replace(engine.identity, probe_ids=(*ids[:4], 7, *ids[5:])))
    with pytest.raises(TokenizerChanged) as caught:
        changed.open()
    assert str(caught.value) == (
        f"{engine.directory}: the tokenizer turns the contract's probe text into other ids than at build: token 4 is "
        f"{ids[4]}, expected 7. Install the tokenizers version that the engine was built with, or rebuild it."
    )
    assert caught.value.exit_code == 4


def test_missing_tokenizer_files_are_named(tmp_path: Any) -> None:
    with pytest.raises(TokenizerUnreadable, match="the tokenizer does not load"):
        replace(exported(), directory=tmp_path).open()


def test_the_policy_is_json_and_says_what_was_resolved() -> None:
    identity = exported(eos=True, truncation_side="left").identity
    policy = json.loads(json.dumps(describe_policy(identity, TextSpec(prefix="é", max_input_tokens=128), "text")))
    assert (policy["prefix"], policy["max_input_tokens"], policy["truncation_side"]) == ("é", 128, "left")
    assert (policy["prefix_ids"], policy["suffix_ids"]) == ([1], [2])


def test_the_example_shows_text_ids_and_pieces() -> None:
    example = exported().open(TextSpec(prefix="> ")).example(pa.array(["naïve", "other"]), 12)
    assert (example.row, example.text, example.outcome.value) == (12, "> naïve", "ok")
    assert example.input_ids == tuple(exported().original("> naïve")["input_ids"])
    assert example.pieces[0] == "<s>" and len(example.pieces) == len(example.input_ids) == example.num_tokens_original


def test_the_example_of_ready_ids_shows_pieces_where_there_is_a_tokenizer() -> None:
    column = pa.array([[1, 2]])
    assert exported().open(kind="input_ids").example(column, 0).pieces == ("<s>", "</s>")
    assert open_ids().example(column, 0).pieces == ()


# --- a worker's process ----------------------------------------------------------------------------------------------

WORKER = """
import os, sys
from dataclasses import asdict
from pathlib import Path
import pyarrow as pa
from extract.engine.contract import TokenizerIdentity
from extract.spec import TextSpec
from extract.text.tokens import open_tokenizer
identity = TokenizerIdentity(**eval(sys.argv[2]))
tokenizer = open_tokenizer(Path(sys.argv[1]), identity, TextSpec(), max_input_tokens=8, input="text", vocab_size=400)
def count():
    return int(tokenizer.tokenize(pa.array(["some text"] * 200), 0).num_tokens.sum())
first = count()
if os.environ["TOKENIZERS_PARALLELISM"] == "false":  # with the library's threads a fork hangs, for ever
    child = os.fork()
    if not child:
        os._exit(0 if count() == first else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
print(heavy, os.environ["TOKENIZERS_PARALLELISM"])
"""


def run_worker(**environment: str) -> str:
    from dataclasses import asdict

    engine = exported()
    command = [sys.executable, "-W", "error", "-c", WORKER, str(engine.directory), repr(asdict(engine.identity))]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_tokenising_text_imports_neither_torch_nor_transformers_and_survives_a_fork() -> None:
    assert run_worker(PYTHONPATH=":".join(filter(None, sys.path))) == "[] false"


def test_a_users_own_setting_of_tokenizer_threads_is_left_alone() -> None:
    assert run_worker(PYTHONPATH=":".join(filter(None, sys.path)), TOKENIZERS_PARALLELISM="true") == "[] true"


def test_token_rows_have_the_promised_types() -> None:
    rows = exported().rows(["a", None])
    found = {name: str(getattr(rows, name).dtype) for name in TokenRows.__slots__ if name != "doubled_bos"}
    assert found == {
        "source_index": "int32",
        "chunk": "int32",
        "outcome": "uint8",
        "num_tokens_original": "int32",
        "offsets": "int64",
        "input_ids": "int32",
    }
