"""Whole runs over hostile tables: text of row i gives states of row i, in order, beside the values it came with."""

from dataclasses import replace

import job_rig
import pyarrow as pa
import pytest
from arrow_shapes import FORMATS, HOSTILE, TEXT_ENCODINGS, columns, encoded, values, write
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from extract.errors import ExtractError


@pytest.fixture(scope="module")
def engine(engines):
    return engines.engine("llama")


@settings(HOSTILE, max_examples=12)
@given(data=st.data())
def test_each_text_of_a_drawn_data_set_gives_its_own_states_and_keeps_its_values(
    data, engine, engines, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("run")
    form = data.draw(st.sampled_from(FORMATS))
    written: list[str | None] = []
    carried: list[str] = []
    kept = data.draw(columns(10))
    assume("dictionary<" not in str(kept.type))
    for index in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(0, 5))
        part = [None if index + row == 3 else text for row, text in enumerate(job_rig.texts(count, seed=index))]
        column = kept[index : index + count]
        how = data.draw(st.sampled_from(TEXT_ENCODINGS))
        table = pa.table({"more": column, "text": encoded(part, how)})
        assume(write(directory / f"{index}.{form}", table, data.draw(st.integers(1, 4))))
        written += part
        carried += [values(column[row : row + 1]) for row in range(count)]
    output = directory / "out"
    spec = job_rig.job(engine, directory, output, carry=("more",), rows_per_shard=data.draw(st.integers(1, 6)))
    job_rig.run(spec)
    table = job_rig.output_table(output)
    assert table["row"].to_pylist() == [*range(len(written))]
    assert [values(table["more"][row : row + 1]) for row in range(len(written))] == carried
    checkpoint = engines.checkpoint("llama")
    with_tokens = [row for row, text in enumerate(written) if text]
    found = job_rig.stored(output)
    assert [row for row, states in enumerate(found) if states is not None] == with_tokens
    expected = job_rig.reference(checkpoint, job_rig.ids_of(checkpoint, [written[row] for row in with_tokens]))
    if with_tokens:
        assert job_rig.errors([found[row] for row in with_tokens], expected).max() < 1e-5


REFUSALS = {
    "no such column": (pa.table({"txet": ["a"]}), {}, 3),
    "numbers as text": (pa.table({"text": [1]}), {}, 3),
    "a name of the output": (pa.table({"text": ["a"], "row": [1]}), {"carry": ("row",)}, 2),
    "a union": (
        pa.table(
            {"text": ["a"], "u": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1]), pa.array(["a"])])}
        ),
        {"carry": ("u",)},
        2,
    ),
    "a null to be refused": (pa.table({"text": ["a", None]}), {"on_null": "error"}, 3),
    "no ids of the model": (pa.table({"ids": [[1], [10**9]]}), {"column": "ids", "input": "input_ids"}, 3),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_a_run_refuses_it_refuses_before_it_loads_the_engine(what, engine, tmp_path, monkeypatch):
    from extract.engine import runtimes
    from extract.runners import local

    def load_runtime(*arguments: object, **options: object) -> None:
        raise AssertionError("the engine was loaded")

    monkeypatch.setattr(runtimes, "load_runtime", load_runtime)
    table, keys, code = REFUSALS[what]
    write(tmp_path / "rows.arrow", table)
    with pytest.raises(ExtractError) as caught:
        local.run(job_rig.job(engine, tmp_path / "rows.arrow", tmp_path / "out", **keys))
    assert caught.value.exit_code == code
    write(tmp_path / "fine.arrow", pa.table({"text": ["a"]}))
    with pytest.raises(AssertionError, match="the engine was loaded"):
        local.run(job_rig.job(engine, tmp_path / "fine.arrow", tmp_path / "other"))


@pytest.mark.parametrize("form", [*FORMATS, "jsonl", "saved data set"])
def test_a_source_of_no_rows_ends_complete_with_a_schema_and_no_row(form, engine, tmp_path):
    source = tmp_path / f"rows.{form}"
    none = pa.table({"text": pa.array([], pa.string()), "n": pa.array([], pa.int64())})
    if form == "jsonl":
        source.write_bytes(b"")
    elif form == "saved data set":
        import datasets

        datasets.Dataset(none).save_to_disk(source)
    else:
        write(source, none)
    summary = job_rig.run(job_rig.job(engine, source, tmp_path / "out", carry=("n",), kind="last"))
    table = job_rig.output_table(tmp_path / "out")
    assert summary.complete and len(table) == 0
    assert {"row", "n", "outcome", "hidden_state"} <= {*table.schema.names}


def test_a_limit_over_several_files_takes_the_first_rows_in_order_and_the_job_says_so(engine, tmp_path):
    from extract.jobs import open_job

    for name in ("b", "a"):
        write(tmp_path / f"{name}.parquet", pa.table({"text": [f"{name}{row}" for row in range(4)]}))
    paths = (str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet"))
    spec = job_rig.job(engine, "any", tmp_path / "out")
    spec = replace(spec, source=replace(spec.source, path=paths, limit=6))
    for _ in range(2):  # nothing is drawn: the rows are the same each time
        opened = open_job(spec)
        rows = [row["text"] for batch in opened.source.read(0, None, 9) for row in batch.to_pylist()]
        assert rows == ["b0", "b1", "b2", "b3", "a0", "a1"]
        assert opened.plan.record.identity["source"]["limit"] == 6
        assert [file["name"] for file in opened.plan.record.fingerprint["files"]] == ["b.parquet", "a.parquet"]
        opened.source.close()
