"""`stream`: the rows that a job would write, in order and lazily, without a file."""

import doctest
import itertools
from pathlib import Path
from typing import Any

import job_rig
import numpy as np
import pytest
import rig

import extract
from extract import streaming, streaming_input
from extract.errors import BadValue, UnknownKey
from extract.spec import TextSpec
from extract.text.tokens import RowRefused

TEXTS = [*job_rig.texts(30), None, "", "a lone \ud800 surrogate", b"no \xff text", *rig.passages(8)]


def streamed(engine: Path, texts: Any = TEXTS, **options: Any) -> list[streaming.StreamedRow]:
    runtime = job_rig.runtime(str(engine))
    return [row for batch in extract.stream(engine, texts, runtime=runtime, **options) for row in batch]


def as_bytes(texts: list[Any]) -> list[bytes | None]:
    return [text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text for text in texts]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "tokens"},
        {"kind": "tokens", "on_long": "chunk", "chunk_overlap": 3, "dtype": "float16"},
        {"kind": "last", "normalize": True, "prefix": "query: "},
        {"kind": "mean", "on_long": "skip", "max_input_tokens": 20},
        {"kind": "first", "special_tokens": "none", "truncation_side": "left"},
    ],
    ids=lambda options: options["kind"],
)
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_rows_are_those_that_a_job_writes(engines, tmp_path, options, name):
    engine = engines.engine(name)
    source = job_rig.parquet(tmp_path / "rows.parquet", {"text": as_bytes(TEXTS)})
    job_rig.run(job_rig.job(engine, source, tmp_path / "out", **options))
    expected = list(extract.open_output(tmp_path / "out"))
    found = streamed(engine, rows_per_batch=7, **options)
    assert [(row.row, row.chunk, row.outcome) for row in found] == [
        (row.row, row.chunk or 0, row.outcome) for row in expected
    ]
    assert {row.outcome for row in found} >= {"ok", "null", "empty", "bad_text"}
    ids = [None if row.states is None else row.input_ids.tolist() for row in found]
    assert ids == [None if row.states is None else list(row.input_ids) for row in expected]
    filled = [row.states for row in found if row.states is not None]
    assert {states.dtype.name for states in filled} == {options.get("dtype", "float32")}
    bound = 2e-3 if "dtype" in options else 1e-5
    assert job_rig.errors(filled, [row.states for row in expected if row.states is not None]).max() < bound


def test_texts_are_taken_only_when_a_batch_is_asked_for(engines):
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield f"text {number}"

    engine = engines.engine("llama")
    batches = extract.stream(engine, endless(), kind="last", rows_per_batch=4, runtime=job_rig.runtime(str(engine)))
    assert taken == []
    for number in range(1, 4):
        assert len(next(batches)) == 4
        assert len(taken) == 4 * number


def test_a_batch_holds_no_more_states_than_its_bound_whatever_a_text_is(engines, monkeypatch):
    monkeypatch.setattr(streaming, "MAX_STATE_BYTES", 4 * 64 * 40)
    monkeypatch.setattr(streaming_input, "MAX_BYTES", 300)
    engine = engines.engine("llama")
    runtime = job_rig.runtime(str(engine))
    bound = max(40, runtime.contract.limits.max_tokens)
    text = "word " * 10_000
    batches = list(extract.stream(engine, [text, *TEXTS], on_long="chunk", rows_per_batch=600, runtime=runtime))
    tokens = [sum(len(row.input_ids) for row in batch) for batch in batches]
    assert bound - 32 < max(tokens) <= bound < sum(tokens)
    chunks = [row.chunk for batch in batches for row in batch if row.row == 0]
    assert chunks == list(range(len(chunks)))
    assert max(len(batch) for batch in batches) <= 600


def test_a_state_that_the_type_cannot_hold_is_an_outcome_or_an_error(engines):
    class Huge:
        contract = job_rig.runtime(str(engines.engine("llama"))).contract

        def hidden_states(self, batch, kind):
            states = np.ones((batch.num_sequences, 64), np.float32)
            states[batch.lengths > 10] = 1e6
            return states

    texts = ["short", "a text that has a good many more tokens than the other one"]
    options = {"kind": "last", "dtype": "float16", "runtime": Huge()}
    rows = [row for batch in extract.stream(engines.engine("llama"), texts, **options) for row in batch]
    assert [(row.outcome, row.states is None) for row in rows] == [("ok", False), ("non_finite", True)]
    with pytest.raises(RowRefused, match="row 1: its states cannot be given as float16"):
        list(extract.stream(engines.engine("llama"), texts, on_non_finite="error", **options))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kind": "all"}, BadValue),
        ({"dtype": "int8"}, BadValue),
        ({"rows_per_batch": 0}, BadValue),
        ({"max_input_tokens": 33}, BadValue),
        ({"normalize": True}, BadValue),
        ({"prefx": "a"}, UnknownKey),
    ],
)
def test_what_does_not_go_is_refused_before_a_text_is_taken(engines, options, error):
    with pytest.raises(error):
        extract.stream(engines.engine("llama"), iter([]), **options)


def test_a_value_that_is_no_text_is_refused_with_its_position(engines):
    with pytest.raises(BadValue, match=r"texts: text 1 is int, expected a str, bytes or None\."):
        streamed(engines.engine("llama"), ["a", 7])


def test_the_policy_that_stops_at_a_row_stops_the_stream(engines):
    with pytest.raises(RowRefused, match="row 30: null"):
        streamed(engines.engine("llama"), on_null="error", rows_per_batch=8)


def test_no_texts_give_no_batches(engines):
    assert streamed(engines.engine("llama"), []) == []


def test_every_key_of_the_text_policy_may_be_given(engines):
    given = {name: getattr(TextSpec(), name) for name in TextSpec.__dataclass_fields__ if name != "max_input_tokens"}
    assert len(streamed(engines.engine("llama"), ["a"], **given)) == 1


def test_the_example_of_the_docstring_runs(engines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").symlink_to(engines.engine("llama"))
    (example,) = doctest.DocTestFinder().find(extract.stream, "stream", globs={"extract": extract})
    (part,) = example.examples
    shown: list[str] = []
    exec(part.source, {"extract": extract, "print": lambda *values: shown.append(" ".join(map(str, values)))})
    assert [line.split()[:2] for line in shown] == [["0", "ok"], ["1", "ok"], ["2", "null"]]
    assert shown[2] == "2 null 0 False"


CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
CHATS = [
    [{"role": "user", "content": "What is a row?"}, {"role": "assistant", "content": "One input record."}],
    [{"role": "user", "content": "A second one", "name": "only here"}],
    None,
    [],
    [{"content": "no role"}],
]


@pytest.fixture(scope="module")
def chat_engine(tmp_path_factory):
    from extract.engine.recipe import Recipe

    folder = tmp_path_factory.mktemp("chat")
    rig.tiny_checkpoint(folder / "checkpoint", tokenizer=rig.tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    extract.build(str(folder / "checkpoint"), str(folder / "engine"), Recipe(device="cpu", max_input_tokens=96))
    return folder / "engine"


def test_conversations_are_written_down_by_the_engines_template(chat_engine):
    rows = streamed(chat_engine, (chat for chat in CHATS), input="messages", rows_per_batch=2)
    assert [row.outcome for row in rows] == ["ok", "ok", "null", "empty", "bad_text"]
    tokenizer = rig.tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    expected = [tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"] for chat in CHATS[:2]]
    assert [row.input_ids.tolist() for row in rows[:2]] == expected
    assert all(row.states.shape == (len(row.input_ids), 64) for row in rows[:2])


@pytest.mark.parametrize("form", ["lists", "arrays", "tensors", "matrix", "arrow"])
def test_ready_ids_come_in_any_form(engines, form):
    import pyarrow as pa
    import torch

    ids = [[5, 6, 7], [8, 9, 10], [300, 5, 6]]
    given = {
        "lists": [*ids, None, []],
        "arrays": [*(np.array(row, np.uint16) for row in ids), None, np.array([])],
        "tensors": [*map(torch.tensor, ids), None, torch.tensor([])],
        "matrix": torch.tensor(ids),
        "arrow": pa.chunked_array([pa.array(ids[:1]), pa.array([*ids[1:], None, []])]),
    }[form]
    rows = streamed(engines.engine("llama"), given, input="input_ids")
    assert [row.input_ids.tolist() for row in rows[:3]] == ids
    assert [row.outcome for row in rows[3:]] == ([] if form == "matrix" else ["null", "empty"])


def test_texts_come_from_columns_too(engines):
    import pandas as pd
    import pyarrow as pa

    texts = ["one", "two", None]
    expected = [row.input_ids.tolist() for row in streamed(engines.engine("llama"), texts)]
    for given in (pa.array(texts), pa.chunked_array([texts]), pd.Series(texts, dtype=object), np.array(texts, object)):
        assert [row.input_ids.tolist() for row in streamed(engines.engine("llama"), given)] == expected


@pytest.mark.parametrize(
    ("texts", "input", "found"),
    [
        ("one text", "text", "one str, expected a list or another iterable of texts"),
        (b"one text", "text", "one bytes, expected a list or another iterable of texts"),
        ({"text": "a"}, "text", "one dict, expected a list or another iterable of texts"),
        (np.array([["a", "b"]]), "text", "one ndarray, expected a list or another iterable of texts"),
        (7, "text", "one int, expected a list or another iterable of texts"),
        ({"role": "user"}, "messages", "one dict, expected a list or another iterable of conversations"),
        (np.array(7), "input_ids", "one ndarray, expected a list or another iterable of rows"),
    ],
)
def test_what_iterates_over_something_else_than_rows_is_refused(engines, texts, input, found):
    with pytest.raises(BadValue, match=f"stream: texts is {found}"):
        extract.stream(engines.engine("llama"), texts, input=input)


@pytest.mark.parametrize(
    ("row", "input", "found"),
    [
        ([5, 6], "text", "list, expected a str, bytes or None"),
        ({"role": "user", "content": "a"}, "messages", "dict, expected a list of dictionaries with role and content"),
        ([{"role": "user", "content": object()}], "messages", r"no conversation \("),
        ("5 6", "input_ids", "str, expected a list, array or tensor of whole numbers"),
        ([0.5], "input_ids", "list, expected a list, array or tensor of whole numbers"),
        ([[5], [6]], "input_ids", "list, expected a list, array or tensor of whole numbers"),
        ([5, None], "input_ids", "list, expected a list, array or tensor of whole numbers"),
    ],
)
def test_a_row_of_another_kind_is_refused_with_its_position(engines, chat_engine, row, input, found):
    engine = chat_engine if input == "messages" else engines.engine("llama")
    with pytest.raises(BadValue, match=f"texts: text 1 is {found}"):
        streamed(engine, [None, row], input=input)


def test_a_stream_that_is_left_closes_its_engine_and_what_it_reads(engines, monkeypatch):
    from extract.engine import runtimes

    closed = []

    def texts():
        try:
            yield from itertools.repeat("a text")
        finally:
            closed.append("texts")

    def load(engine, **_):
        runtime = job_rig.runtime(str(engine))
        monkeypatch.setattr(runtime, "close", lambda: closed.append("engine"), raising=False)
        return runtime

    monkeypatch.setattr(runtimes, "load_runtime", load)
    batches = extract.stream(engines.engine("llama"), texts(), rows_per_batch=2)
    batches.close()
    assert closed == []  # nothing was opened yet
    for _ in extract.stream(engines.engine("llama"), texts(), rows_per_batch=2):
        break
    assert sorted(closed) == ["engine", "texts"]


def test_an_engine_that_is_loaded_must_be_the_one_that_is_named(engines):
    with pytest.raises(BadValue, match=r"stream: runtime is engine [0-9a-f]{12}, expected .*gpt2-auto"):
        extract.stream(engines.engine("gpt2"), [], runtime=job_rig.runtime(str(engines.engine("llama"))))


def test_a_public_engine_is_loaded_by_a_name_that_is_text(engines):
    runtime = extract.load_runtime(str(engines.engine("llama")), threads=1)
    rows = [row for batch in extract.stream(str(engines.engine("llama")), ["a"], runtime=runtime) for row in batch]
    runtime.close()
    assert rows[0].outcome == "ok"
