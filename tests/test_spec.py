"""The job spec: defaults, ranges and rules between keys; every valid one survives TOML-like tables and JSON."""

import dataclasses
import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.errors import BadValue, UnknownKey
from extract.settings import parse
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec, TextSpec, as_table, load_job

MAX_INT = 2**63 - 1

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=10)
COUNTS = st.integers(1, MAX_INT)
LIMITS = st.none() | COUNTS


def literal(cls: type[Any], key: str) -> st.SearchStrategy[str]:
    return st.sampled_from(get_args(get_type_hints(cls)[key]))


def literals(cls: type[Any], *keys: str) -> dict[str, st.SearchStrategy[str]]:
    return {key: literal(cls, key) for key in keys}


@st.composite
def sources(draw: st.DrawFn) -> SourceSpec:
    streaming = draw(st.booleans())
    return SourceSpec(
        path=draw(NAMES | st.lists(NAMES, min_size=1, max_size=3).map(tuple)),
        **{key: draw(value) for key, value in literals(SourceSpec, "format", "input").items()},
        column=draw(st.text(max_size=5)),
        id_column=draw(st.none() | NAMES),
        carry=draw(st.lists(NAMES, max_size=3).map(tuple)),
        limit=draw(st.none() | st.integers(0, MAX_INT)),
        rows=None if streaming else draw(st.none() | st.just("0-9,12")),
        name=draw(st.none() | NAMES),
        split=draw(NAMES),
        revision=draw(st.none() | NAMES),
        streaming=streaming,
    )


@st.composite
def texts(draw: st.DrawFn) -> TextSpec:
    on_long = draw(literal(TextSpec, "on_long"))
    policies = ("truncation_side", "special_tokens", "on_null", "on_empty", "on_bad_text", "on_non_finite")
    return TextSpec(
        max_input_tokens=draw(LIMITS),
        on_long=on_long,
        chunk_overlap=draw(st.integers(0, MAX_INT)) if on_long == "chunk" else 0,
        **{key: draw(value) for key, value in literals(TextSpec, *policies).items()},
        split_special_tokens=draw(st.booleans()),
        prefix=draw(st.text(max_size=5)),
        add_generation_prompt=draw(st.booleans()),
    )


@st.composite
def states(draw: st.DrawFn) -> StatesSpec:
    kind = draw(literal(StatesSpec, "kind"))
    normalize = kind != "tokens" and draw(st.booleans())
    return StatesSpec(
        kind=kind,
        **{key: draw(value) for key, value in literals(StatesSpec, "dtype", "compression").items()},
        compression_level=draw(st.integers(1, 19)),
        normalize=normalize,
        layers=() if normalize else tuple(draw(st.lists(st.integers(-9, 99), max_size=3))),
        input_ids=draw(st.booleans()),
        rows_per_shard=draw(LIMITS),
        record_batch_bytes=draw(st.integers(2**16, MAX_INT)),
        reserve_bytes=draw(st.integers(0, MAX_INT)),
    )


RUNS = st.builds(
    RunSpec,
    max_sequences=LIMITS,
    max_tokens=LIMITS,
    threads=LIMITS,
    share=st.booleans(),
    overlap=st.booleans(),
    fingerprint=literal(RunSpec, "fingerprint"),
)
JOBS = st.builds(
    JobSpec,
    source=sources(),
    engine=st.none() | NAMES,
    other_engines=st.lists(NAMES, max_size=2).map(tuple),
    output=st.none() | NAMES,
    text=texts(),
    states=states(),
    run=RUNS,
)


@settings(deadline=None)
@given(JOBS)
def test_every_job_spec_survives_a_table_and_json(spec):
    assert parse(JobSpec, as_table(spec), "") == spec
    assert parse(JobSpec, json.loads(json.dumps(as_table(spec))), "") == spec


@pytest.mark.parametrize(
    ("cls", "strategy"),
    [(SourceSpec, sources()), (TextSpec, texts()), (StatesSpec, states()), (RunSpec, RUNS)],
    ids=["source", "text", "states", "run"],
)
def test_the_strategies_above_leave_no_key_out(cls, strategy):
    seen: dict[str, set[object]] = {one.name: set() for one in dataclasses.fields(cls)}

    @settings(deadline=None)
    @given(strategy)
    def collect(spec):
        for key in seen:
            seen[key].add(getattr(spec, key))

    collect()
    assert {key for key, values in seen.items() if len(values) < 2} == set()


def test_a_table_has_the_keys_in_the_order_of_the_fields():
    table = as_table(JobSpec(source=SourceSpec(path="x")))
    assert list(table) == ["source", "engine", "other_engines", "output", "text", "states", "run"]
    assert list(table["run"]) == ["max_sequences", "max_tokens", "threads", "share", "overlap", "fingerprint"]


def refused(**tables: Any) -> str:
    source = {"path": "x", **tables.pop("source", {})}
    with pytest.raises((BadValue, UnknownKey)) as caught:
        parse(JobSpec, {"source": source, **tables}, "job.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"source": {"path": ""}}, '[source]: path is "", expected a file, a directory, a glob or a dataset name.'),
        ({"source": {"path": []}}, "[source]: path is (), expected a file, a directory, a glob or a dataset name."),
        (
            {"source": {"path": ["a", ""]}},
            "[source]: path is ('a', ''), expected a file, a directory, a glob or a dataset name.",
        ),
        ({"source": {"limit": -1}}, "[source]: limit is -1, expected a whole number, 0 or more."),
        (
            {"source": {"rows": "0-9", "streaming": True}},
            '[source]: rows is "0-9", expected left out with streaming = true, which has no random access.',
        ),
        (
            {"source": {"format": "csv"}},
            '[source]: format is "csv", expected one of "auto", "parquet", "arrow", "jsonl", "hf".',
        ),
        ({"text": {"max_input_tokens": 0}}, "[text]: max_input_tokens is 0, expected a whole number, 1 or more."),
        (
            {"text": {"on_long": "chunk", "chunk_overlap": -1}},
            "[text]: chunk_overlap is -1, expected a whole number, 0 or more.",
        ),
        ({"text": {"chunk_overlap": 3}}, '[text]: chunk_overlap is 3, expected 0 unless on_long is "chunk".'),
        (
            {"states": {"normalize": True}},
            '[states]: normalize is true, expected false unless kind is "last", "mean" or "first".',
        ),
        ({"states": {"rows_per_shard": 0}}, "[states]: rows_per_shard is 0, expected a whole number, 1 or more."),
        ({"states": {"record_batch_bytes": 9}}, "[states]: record_batch_bytes is 9, expected 65536 or more."),
        ({"states": {"reserve_bytes": -1}}, "[states]: reserve_bytes is -1, expected 0 or more."),
        ({"states": {"compression_level": 20}}, "[states]: compression_level is 20, expected 1 to 19."),
        ({"run": {"threads": 0}}, "[run]: threads is 0, expected a whole number, 1 or more."),
        ({"run": {"max_tokens": -5}}, "[run]: max_tokens is -5, expected a whole number, 1 or more."),
        ({"run": {"max_sequences": 0}}, "[run]: max_sequences is 0, expected a whole number, 1 or more."),
    ],
)
def test_a_value_outside_its_range_is_refused(tables, message):
    assert refused(**tables) == f"job.toml {message}"


@pytest.mark.parametrize("key", ["engine", "output"])
@pytest.mark.parametrize(("path", "shown"), [("", '""'), ("a\0b", '"a\0b"')])
def test_a_directory_that_is_no_path_is_refused(key, path, shown):
    assert refused(**{key: path}) == f"job.toml: {key} is {shown}, expected the path of a directory."


def test_a_path_with_a_nul_is_no_file():
    assert refused(source={"path": "a\0"}).endswith("expected a file, a directory, a glob or a dataset name.")


def test_the_compression_level_is_only_zstds():
    assert StatesSpec(compression="lz4", compression_level=0).compression_level == 0


def test_one_path_and_a_list_are_read_alike():
    assert SourceSpec(path="x").paths == SourceSpec(path=("x",)).paths == ("x",)


def test_a_job_file_is_read_whole(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        """
        engine = "e"
        output = "o"
        [source]
        path = ["a.parquet", "b.parquet"]
        carry = ["url"]
        limit = 10
        [text]
        on_long = "chunk"
        chunk_overlap = 8
        [states]
        kind = "mean"
        normalize = true
        [run]
        overlap = false
        """
    )
    assert load_job(path) == JobSpec(
        engine="e",
        output="o",
        source=SourceSpec(path=("a.parquet", "b.parquet"), carry=("url",), limit=10),
        text=TextSpec(on_long="chunk", chunk_overlap=8),
        states=StatesSpec(kind="mean", normalize=True),
        run=RunSpec(overlap=False),
    )


def test_a_mistake_names_the_file_and_the_table(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[source]\npath = "x"\n[states]\ndtyp = "int8"\n')
    with pytest.raises(UnknownKey) as caught:
        load_job(path)
    assert str(caught.value) == f"{path} [states]: unknown key \"dtyp\". Did you mean 'dtype'?"
