"""Data sets of several files whose schemas differ a little: joined without a guess, or refused by file and column."""

import job_rig
import pyarrow as pa
import pytest
from arrow_shapes import FORMATS, HOSTILE, TEXT_ENCODINGS, Refused, as_text, encoded, rows_or_refusal, texts, write
from hypothesis import assume, given
from hypothesis import strategies as st

from extract.errors import SourceError
from extract.sources import open_source
from extract.spec import SourceSpec


@pytest.fixture(scope="module")
def engine(engines):
    return engines.engine("llama")


NUMBERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.null())


@HOSTILE
@given(data=st.data())
def test_files_that_store_one_column_in_several_ways_are_read_as_one(data, engine, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drift")
    form = data.draw(st.sampled_from(FORMATS))
    expected: list[tuple[str | None, int | None, str | None]] = []
    for index in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(0, 4))
        written, carried = data.draw(texts(count)), data.draw(texts(count))
        kind = data.draw(st.sampled_from(NUMBERS))
        numbers = [None] * count if pa.types.is_null(kind) else [*range(count)]
        columns = {
            "text": encoded(written, data.draw(st.sampled_from(TEXT_ENCODINGS))),
            "n": pa.array(numbers, kind),
            "tag": encoded(carried, data.draw(st.sampled_from(TEXT_ENCODINGS[:-1]))),
            f"extra{index}": pa.nulls(count),
        }
        order = data.draw(st.permutations(list(columns)))
        assume(write(directory / f"{index}.{form}", pa.table({name: columns[name] for name in order})))
        expected += zip(written, numbers, carried, strict=True)
    found = rows_or_refusal(job_rig.job(engine, directory, directory / "out", id_column="n", carry=("tag",)))
    assert not isinstance(found, Refused), found
    rows = zip(as_text(found["text"]), found["n"].to_pylist(), found["tag"].to_pylist(), strict=True)
    assert [*rows] == expected


@HOSTILE
@given(data=st.data())
def test_values_that_one_type_cannot_hold_are_found_before_an_engine_is_loaded(data, engine, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drift")
    form = data.draw(st.sampled_from(FORMATS))
    wide = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=8))
    other = data.draw(
        st.sampled_from([pa.array([0.5]), pa.array([2**40], pa.uint64()), pa.array([2**63], pa.uint64())])
    )
    write(directory / f"0.{form}", pa.table({"text": ["a"] * len(wide), "n": pa.array(wide, pa.int64())}))
    write(directory / f"1.{form}", pa.table({"text": ["b"], "n": other}))
    found = rows_or_refusal(job_rig.job(engine, directory, directory / "out", carry=("n",)))
    if isinstance(found, Refused):
        bad = 0 if pa.types.is_floating(other.type) else 1
        assert found.code == 3 and found.message.startswith(f'{directory}/{bad}.{form}: column "n" does not fit ')
        assert any(abs(value) > 2**53 for value in wide) if bad == 0 else other[0].as_py() == 2**63
    else:
        assert found["n"].to_pylist() == [*wide, *other.to_pylist()]


@pytest.mark.parametrize("form", FORMATS)
def test_a_value_that_does_not_fit_deep_in_a_file_is_found_before_an_engine_is_loaded(form, engine, tmp_path):
    count, bad = 300_000, 5_000  # in a row group that no block of an estimate touches
    numbers = [0] * bad + [2**60 + 1] + [0] * (count - bad - 1)
    write(tmp_path / f"0.{form}", pa.table({"text": ["a"] * count, "n": numbers}), 4_000)
    write(tmp_path / f"1.{form}", pa.table({"text": ["b"], "n": [0.5]}))
    spec = job_rig.job(engine, tmp_path, tmp_path / "out", carry=("n",))
    found = rows_or_refusal(spec)
    assert isinstance(found, Refused) and found.code == 3
    assert found.message == (
        f'{tmp_path}/0.{form}: column "n" does not fit double, its type over all files: Integer value '
        "1152921504606846977 not in range: -9007199254740992 to 9007199254740992. "
        "Convert the file, or leave the column out."
    )
    limited = job_rig.job(engine, tmp_path, tmp_path / "out", carry=("n",), limit=bad)
    assert not isinstance(rows_or_refusal(limited), Refused)


@pytest.mark.parametrize("form", FORMATS)
def test_text_in_one_file_and_numbers_in_another_are_refused_by_both_names(form, engine, tmp_path):
    write(tmp_path / f"0.{form}", pa.table({"text": ["a"], "n": ["1"]}))
    write(tmp_path / f"1.{form}", pa.table({"text": ["a"], "n": [1]}))
    assert rows_or_refusal(job_rig.job(engine, tmp_path, tmp_path / "out", carry=("n",))) == Refused(
        3,
        f'column "n" is string in {tmp_path}/0.{form} and int64 in {tmp_path}/1.{form}; '
        "one type cannot hold both. Convert the files, or leave the column out.",
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("missing", ["text", "n"])
def test_a_column_that_one_file_lacks_is_refused_by_that_files_name(form, missing, engine, tmp_path):
    table = pa.table({"text": ["a"], "n": [1], "other": [1]})
    write(tmp_path / f"0.{form}", table)
    write(tmp_path / f"1.{form}", table.drop_columns([missing]))
    others = ", ".join(name for name in table.schema.names if name != missing)
    assert rows_or_refusal(job_rig.job(engine, tmp_path, tmp_path / "out", carry=("n",))) == Refused(
        3, f'{tmp_path}/1.{form}: no column "{missing}". Columns: {others}.'
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("column", ["text", "note"])
def test_a_string_that_is_no_text_is_never_copied_to_where_no_reader_could_open_it(form, column, tmp_path):
    """The input column marks such a row; copied as it is, it would make the whole output column unreadable."""
    bad = pa.array([b"a", b"b", b"\xff", b"d"]).view(pa.string())
    write(tmp_path / f"0.{form}", pa.table({"text": ["x"] * 3, "note": ["y"] * 3}))
    write(tmp_path / f"1.{form}", pa.table({"text": ["x"] * 4, "note": ["y"] * 4, column: bad}))
    source = open_source(SourceSpec(path=str(tmp_path), carry=("text", "note")))
    rows = source.read(0, None, 2)
    next(rows)
    with pytest.raises(SourceError) as caught:
        list(rows)
    assert str(caught.value) == (
        f'{tmp_path}/1.{form}: column "{column}" holds a string that is not valid UTF-8 (row 5), and is to be copied '
        "to the output. Repair the file, store the column as bytes, or leave it out of source.carry and "
        "source.id_column."
    )
    if column == "text":
        assert sum(batch.num_rows for batch in open_source(SourceSpec(path=str(tmp_path))).read(0, None, 9)) == 7
