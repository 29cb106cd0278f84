"""Shard files read with plain pyarrow, pandas, polars, DuckDB and datasets, none of which knows this package.

The numbers must come out the same in all of them. Two limits are the readers' own, and are tested as such so that the
day they go is seen: DuckDB has no half floats, and `datasets.Dataset.from_file` reads Arrow streams only (its
`load_dataset("arrow", ...)` reads files).
"""

import numpy as np
import pyarrow as pa
import pytest
import shard_rig as rig

from extract.output import open_output
from extract.shards.schema import BFLOAT16_EXTENSION
from extract.shards.values import value_type
from extract.spec import StatesSpec

KINDS = ("tokens", "last", "mean", "first")
DTYPES = ("float16", "float32", "bfloat16", "int8")


def name_of(kind):
    return "hidden_states" if kind == "tokens" else "hidden_state"


@pytest.fixture(params=[(kind, dtype) for kind in KINDS for dtype in DTYPES], ids="-".join)
def shard(request, tmp_path):
    """A shard file, its spec, and the stored numbers of each row (`None` where there are none)."""
    kind, dtype = request.param
    spec = StatesSpec(kind=kind, dtype=dtype, record_batch_bytes=2**16)
    rows = rig.token_rows(rig.LENGTHS * 3)
    states = rig.random_states(rows, kind)
    path = tmp_path / "shard.arrow"
    rig.write_shard(path, spec, rows, states)
    values, stored, place = value_type(dtype).encode(states).values, [], 0
    for length in np.diff(rows.offsets):
        count = int(length) if kind == "tokens" else min(1, int(length))
        part = values[place : place + count]
        stored.append(None if not count else part if kind == "tokens" else part[0])
        place += count
    return path, spec, stored


def assert_same(found, stored):
    """`found` are nested lists or arrays by row."""
    assert len(found) == len(stored)
    for one, other in zip(found, stored, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            one = np.stack(list(one)) if other.ndim == 2 else np.asarray(one)
            assert one.shape == other.shape
            assert (one.astype(other.dtype) == other).all()


def outcomes_of(stored):
    return ["empty" if states is None else "ok" for states in stored]


def test_pyarrow_reads_every_kind_and_type(shard):
    path, spec, stored = shard
    table = rig.read_shard(path)
    assert table["outcome"].to_pylist() == outcomes_of(stored)
    assert_same(table[name_of(spec.kind)].to_pylist(), stored)
    table.validate(full=True)


def test_pyarrow_datasets_scan_every_kind_and_type(shard):
    import pyarrow.dataset

    path, spec, stored = shard
    dataset = pyarrow.dataset.dataset(path, format="ipc")
    found = dataset.to_table(columns=[name_of(spec.kind)], filter=pyarrow.dataset.field("row") == 3)
    assert_same(found[name_of(spec.kind)].to_pylist(), stored[3:4])


def test_pandas_reads_every_kind_and_type(shard):
    import pandas

    path, spec, stored = shard
    frame = pandas.read_feather(path)
    assert frame["outcome"].tolist() == outcomes_of(stored)
    assert_same(list(frame[name_of(spec.kind)]), stored)


def test_polars_reads_every_kind_and_type(shard):
    import polars

    path, spec, stored = shard
    frame = polars.read_ipc(path)
    assert frame["outcome"].to_list() == outcomes_of(stored)
    assert_same(frame[name_of(spec.kind)].to_list(), stored)
    assert_same(
        polars.scan_ipc(path).filter(polars.col("row") == 3).collect()[name_of(spec.kind)].to_list(), stored[3:4]
    )


def test_duckdb_reads_every_kind_and_type(shard):
    import duckdb

    path, spec, stored = shard
    table = rig.read_shard(path)
    if spec.dtype == "float16":
        with pytest.raises(duckdb.NotImplementedException):
            duckdb.arrow(table)
        index = table.schema.get_field_index(name_of(spec.kind))
        wide = rig.schema_for(StatesSpec(kind=spec.kind, dtype="float32")).field(name_of(spec.kind))
        table = table.set_column(index, wide, table.column(index).cast(wide.type))
    found = duckdb.arrow(table).query("rows", f"select outcome, {name_of(spec.kind)} from rows order by row").fetchall()
    assert [outcome for outcome, _ in found] == outcomes_of(stored)
    assert_same([states for _, states in found], stored)


def test_datasets_reads_every_kind_and_type(shard, tmp_path):
    import datasets

    path, spec, stored = shard
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("arrow", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["outcome"] == outcomes_of(stored)
    assert_same(rows[name_of(spec.kind)], stored)
    streamed = datasets.load_dataset(
        "arrow", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"), streaming=True
    )
    assert_same([row[name_of(spec.kind)] for row in streamed], stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_duckdb_reads_a_decoded_table_of_any_type(tmp_path, kind, dtype):
    import duckdb

    rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype=dtype))
    out = open_output(tmp_path / "out")
    found = duckdb.arrow(out.table(["row", name_of(kind)], decoded=True)).order("row").fetchall()
    assert_same([states for _, states in found], [out.states(row) for row, _ in found])


def test_the_extension_name_of_bfloat16_reaches_those_who_look(tmp_path):
    import polars

    rig.write_shard(tmp_path / "s.arrow", StatesSpec(dtype="bfloat16"))
    values = rig.read_shard(tmp_path / "s.arrow").schema.field("hidden_states").type.value_type.value_field
    assert values.metadata[b"ARROW:extension:name"].decode() == BFLOAT16_EXTENSION
    assert BFLOAT16_EXTENSION in str(polars.read_ipc(tmp_path / "s.arrow")["hidden_states"].dtype)


def test_datasets_from_file_reads_streams_only(tmp_path):
    import datasets

    rig.write_shard(tmp_path / "s.arrow", StatesSpec())
    with pytest.raises(pa.ArrowInvalid):
        datasets.Dataset.from_file(str(tmp_path / "s.arrow"))


def test_a_parquet_copy_keeps_the_numbers(shard, tmp_path):
    import pyarrow.parquet

    path, spec, stored = shard
    pyarrow.parquet.write_table(rig.read_shard(path), tmp_path / "copy.parquet")
    assert_same(pyarrow.parquet.read_table(tmp_path / "copy.parquet")[name_of(spec.kind)].to_pylist(), stored)


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
def test_any_compression_reads_the_same(tmp_path, compression):
    import pandas
    import polars

    rows = rig.token_rows()
    states = rig.random_states(rows, "mean")
    path = tmp_path / "s.arrow"
    rig.write_shard(path, StatesSpec(kind="mean", dtype="float32", compression=compression), rows, states)
    for found in (
        rig.read_shard(path)["hidden_state"].to_pylist(),
        list(pandas.read_feather(path)["hidden_state"]),
        polars.read_ipc(path)["hidden_state"].to_list(),
    ):
        assert np.array([state for state in found if state is not None], np.float32).tobytes() == states.tobytes()
