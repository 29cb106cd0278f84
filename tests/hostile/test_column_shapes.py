"""Tables of any columns: the rows that were written, or one clear error before an engine is loaded."""

import job_rig
import pyarrow as pa
import pytest
from arrow_shapes import (
    COLUMN_NAMES,
    FORMATS,
    HOSTILE,
    TEXT_ENCODINGS,
    Refused,
    as_text,
    columns,
    encoded,
    rows_or_refusal,
    texts,
    values,
    write,
)
from hypothesis import assume, given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def engine(engines):
    return engines.engine("llama")


@HOSTILE
@given(data=st.data())
def test_text_and_any_carried_column_are_read_as_they_were_written(data, engine, tmp_path):
    count = data.draw(st.integers(0, 9))
    source = tmp_path / f"rows.{data.draw(st.sampled_from(FORMATS))}"
    written = data.draw(texts(count))
    table = pa.table(
        {
            "id": data.draw(columns(count)),
            "carried": data.draw(columns(count)),
            "body": encoded(written, data.draw(st.sampled_from(TEXT_ENCODINGS))),
            "unread": data.draw(columns(count)),
        }
    )
    assume(write(source, table, data.draw(st.integers(1, 9))))
    spec = job_rig.job(engine, source, tmp_path / "out", column="body", id_column="id", carry=("carried",))
    found = rows_or_refusal(spec)
    if isinstance(found, Refused):
        nested_dictionary = "dictionary<" in str(table.schema.types)
        assert nested_dictionary and source.suffix == ".parquet", found  # pyarrow decodes none inside a list
        assert found.code == 3 and found.message.startswith(f"{source}: cannot be read as parquet: column ")
        return
    assert as_text(found["body"]) == written
    assert [values(found[name]) for name in ("id", "carried")] == [values(table[name]) for name in ("id", "carried")]


@HOSTILE
@given(data=st.data())
def test_a_column_is_found_by_its_exact_name_whatever_the_name(data, engine, tmp_path):
    names = data.draw(st.lists(st.sampled_from(COLUMN_NAMES), min_size=1, max_size=6, unique=True))
    asked = data.draw(st.lists(st.sampled_from(COLUMN_NAMES), min_size=1, max_size=3, unique=True))
    source = tmp_path / f"rows.{data.draw(st.sampled_from(FORMATS))}"
    write(source, pa.table({name: [f"{name} {row}" for row in range(4)] for name in names}))
    found = rows_or_refusal(job_rig.job(engine, source, tmp_path / "out", column=asked[0], carry=tuple(asked[1:])))
    missing = [name for name in asked if name not in names]
    if missing:
        assert isinstance(found, Refused)
        assert found.code == 3 and found.message.startswith(f'{source}: no column "{missing[0]}".')
        return
    assert found.to_pydict() == {name: [f"{name} {row}" for row in range(4)] for name in asked}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["row", "outcome", "num_tokens", "input_ids", "hidden_states"])
def test_a_carried_name_that_the_output_has_itself_is_refused_by_name(form, name, engine, tmp_path):
    source = tmp_path / f"rows.{form}"
    write(source, pa.table({"text": ["a"], name: [1]}))
    hint = " Or set states.input_ids = false." if name == "input_ids" else ""
    assert rows_or_refusal(job_rig.job(engine, source, tmp_path / "out", carry=(name,))) == Refused(
        2,
        f'source.carry: column "{name}" would appear twice in the output, which has a column of that name itself. '
        f"Leave it out of source.carry, or rename it in the source.{hint}",
    )


@pytest.mark.parametrize("form", FORMATS)
def test_columns_of_one_name_are_refused_only_where_they_are_asked_for(form, engine, tmp_path):
    source = tmp_path / f"rows.{form}"
    write(source, pa.table([pa.array(["1"]), pa.array(["2"]), pa.array(["3"])], names=["twice", "twice", "text"]))
    assert rows_or_refusal(job_rig.job(engine, source, tmp_path / "out")).to_pydict() == {"text": ["3"]}
    assert rows_or_refusal(job_rig.job(engine, source, tmp_path / "out", carry=("twice",))) == Refused(
        3, f'{source}: 2 columns are named "twice"; which one is meant cannot be told. Rename them in the file.'
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_without_columns_or_rows_is_told_from_one_without_rows(form, engine, tmp_path):
    source = tmp_path / f"rows.{form}"
    write(source, pa.table({}))
    assert rows_or_refusal(job_rig.job(engine, source, tmp_path / "out")) == Refused(
        3, f'{source}: no column "text". Columns: none.'
    )
    write(source, pa.table({"text": pa.array([], pa.string_view()), "n": pa.nulls(0)}))
    assert rows_or_refusal(job_rig.job(engine, source, tmp_path / "out", carry=("n",))).to_pylist() == []


MESSAGE = {"role": "user", "content": "hi", "tool_calls": None}
CONVERSATIONS = [[MESSAGE, {**MESSAGE, "role": "assistant"}], [], None, [{**MESSAGE, "content": None}]]
ROLE, VIEW = pa.dictionary(pa.int8(), pa.string()), pa.string_view()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("role", [pa.string(), pa.large_string(), VIEW, ROLE], ids=str)
@pytest.mark.parametrize("many", ["list_", "large_list", "list_view", "large_list_view"])
def test_conversations_are_read_from_any_kind_of_list(form, role, many, tmp_path):
    from extract.errors import SourceError
    from extract.sources import open_source
    from extract.spec import SourceSpec

    kind = getattr(pa, many)(pa.struct([("role", role), ("content", pa.string()), ("tool_calls", pa.null())]))
    source = tmp_path / f"rows.{form}"
    if not write(source, pa.table({"chat": pa.array(CONVERSATIONS, kind)})):
        pytest.skip("pyarrow cannot write this type")
    opened = open_source(SourceSpec(path=str(source), column="chat", input="messages"))
    try:
        assert [row for batch in opened.read(0, None, 3) for row in batch["chat"].to_pylist()] == CONVERSATIONS
    except SourceError as error:
        assert (form, role) == ("parquet", ROLE)
        assert str(error).startswith(f"{source}: cannot be read as parquet: ")


@pytest.mark.parametrize("form", FORMATS)
def test_a_column_that_no_file_can_hold_for_every_reader_is_refused_by_name(form, engine, tmp_path):
    either = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])
    source = tmp_path / f"rows.{form}"
    if not write(source, pa.table({"text": ["a", "b"], "either": either})):
        pytest.skip("Parquet has no unions")
    assert rows_or_refusal(job_rig.job(engine, source, tmp_path / "out", carry=("either",))) == Refused(
        2,
        'source: column "either" has type sparse_union<0: int64=0, 1: string=1>, which cannot be copied to the output. '
        "Leave it out.",
    )
