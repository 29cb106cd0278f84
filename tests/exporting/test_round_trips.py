"""Every target, opened with its own loaders: the numbers are those that are stored, bit for bit."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exporting_rig import DTYPES, KINDS, assert_same, output, stored

from extract import export
from extract.output import open_output
from extract.shards import schema as names


@pytest.fixture(params=[(kind, dtype) for kind in KINDS for dtype in DTYPES], ids="-".join)
def out(request, tmp_path):
    return output(tmp_path, *request.param)


def name_of(out):
    return names.states_name(open_output(out).spec)


def cells(column):
    """Arrow cells as arrays."""
    from extract.exporting.parquet import cell_values

    return [cell_values(cell) for chunk in column.chunks for cell in chunk]


# --- parquet --------------------------------------------------------------------------------------------------------


def test_parquet_through_pyarrow(out, tmp_path):
    made = export(out, tmp_path / "pq", kind="parquet")
    table = pq.read_table(tmp_path / "pq" / "data")
    assert_same(cells(table[name_of(out)]), stored(out))
    expected = open_output(out).table()
    for name in expected.column_names:
        assert table[name].to_pylist() == expected[name].to_pylist()
    assert table.schema.metadata[b"extract.dtype"] == open_output(out).dtype.encode()
    assert (made.rows, made.parts_made) == (21, 3)
    assert len(list((tmp_path / "pq" / "data").iterdir())) == 3


def test_parquet_states_are_byte_stream_split_and_others_are_not(out, tmp_path):
    export(out, tmp_path / "pq", kind="parquet")
    found = pq.ParquetFile(tmp_path / "pq" / "data" / "part-00000.parquet").metadata.row_group(0)
    split = {}
    for place in range(found.num_columns):
        column = found.column(place)
        split[column.path_in_schema.split(".")[0]] = "BYTE_STREAM_SPLIT" in column.encodings
        assert column.compression == "ZSTD"
    assert [name for name, yes in split.items() if yes] == [name_of(out)]


def test_parquet_through_pandas_and_polars(out, tmp_path):
    import pandas
    import polars

    export(out, tmp_path / "pq", kind="parquet")
    frame = pandas.read_parquet(tmp_path / "pq" / "data")
    expected = stored(out)
    found = [None if cell is None else np.stack(list(cell)) for cell in frame[name_of(out)]]
    # pandas makes float64 of integers in a column that has nulls; the numbers are the same
    assert_same([one if one is None else one.astype(expected[0].dtype) for one in found], expected)
    rows = polars.read_parquet(tmp_path / "pq" / "data" / "*.parquet")[name_of(out)]
    found = [None if cell is None else cell.to_numpy() for cell in rows]
    assert_same(found, stored(out))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parquet_through_duckdb(kind, dtype, tmp_path):
    """It reads no byte-stream-split halves; float32, and bits of bfloat16, it reads."""
    import duckdb

    out = output(tmp_path, kind, dtype)
    export(out, tmp_path / "pq", kind="parquet")
    rows = duckdb.sql(f"select {name_of(out)} from '{tmp_path}/pq/data/*.parquet' order by row").fetchall()
    storage = np.float32 if dtype == "float32" else np.uint16
    assert_same([None if one is None else np.array(one, storage) for (one,) in rows], stored(out))


def test_parquet_through_datasets(out, tmp_path):
    import datasets

    export(out, tmp_path / "pq", kind="parquet")
    rows = datasets.load_dataset(
        "parquet", data_dir=str(tmp_path / "pq" / "data"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert_same(cells(rows.with_format("arrow")[:][name_of(out)]), stored(out))


# --- npy ------------------------------------------------------------------------------------------------------------


def test_npy_is_mapped(out, tmp_path):
    export(out, tmp_path / "npy", kind="npy")
    states = np.load(tmp_path / "npy" / "states.npy", mmap_mode="r")
    expected = stored(out, with_states_only=True)
    assert isinstance(states, np.memmap)
    if open_output(out).kind == "tokens":
        offsets = np.load(tmp_path / "npy" / "offsets.npy")
        assert len(offsets) == len(expected) + 1
        assert_same([states[a:b] for a, b in itertools.pairwise(offsets)], expected)
        assert offsets[-1] == len(states)
    else:
        assert_same(list(states), expected)
        assert not (tmp_path / "npy" / "offsets.npy").exists()


def test_npy_rows_stand_beside_their_states(out, tmp_path):
    export(out, tmp_path / "npy", kind="npy")
    rows = pq.read_table(tmp_path / "npy" / "rows")
    whole = open_output(out).table()
    kept = whole.filter(pa.compute.is_valid(whole[name_of(out)])).drop_columns([name_of(out)])
    for name in kept.column_names:
        assert rows[name].to_pylist() == kept[name].to_pylist()
    assert rows.column_names == kept.column_names


# --- safetensors ----------------------------------------------------------------------------------------------------


def test_safetensors_through_torch(out, tmp_path):
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    export(out, tmp_path / "st", kind="safetensors", rows_per_file=2)
    opened, found, ids, rows = open_output(out), [], [], []
    files = sorted((tmp_path / "st").glob("*.safetensors"))
    assert len(files) == 9
    for file in files:
        tensors = load_file(file)
        assert len(tensors["row"]) <= 2
        states = tensors["states"]
        assert states.dtype == getattr(torch, opened.dtype)
        states = (states.view(torch.int16) if opened.dtype == "bfloat16" else states).numpy()
        states = states.view(np.uint16) if opened.dtype == "bfloat16" else states
        ends = tensors["offsets" if opened.kind == "tokens" else "id_offsets"].tolist()
        spans = list(itertools.pairwise(ends))
        found += [states[a:b] for a, b in spans] if opened.kind == "tokens" else list(states)
        ids += [tensors["input_ids"][a:b].tolist() for a, b in spans]
        rows += tensors["row"].tolist()
        with safe_open(file, "pt") as handle:
            assert json.loads(handle.metadata()["extract"])["extract.dtype"] == opened.dtype
    assert_same(found, stored(out, with_states_only=True))
    kept = [row for row in opened if row.states is not None]
    assert ids == [row.input_ids.tolist() for row in kept]
    assert rows == [row.row for row in kept]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_safetensors_through_numpy(dtype, tmp_path):
    from safetensors.numpy import load_file

    out = output(tmp_path, "last", dtype)
    export(out, tmp_path / "st", kind="safetensors")
    files = sorted((tmp_path / "st").glob("*.safetensors"))
    assert_same([state for file in files for state in load_file(file)["states"]], stored(out, with_states_only=True))


# --- hf and lance ---------------------------------------------------------------------------------------------------


def test_hf_through_load_from_disk(out, tmp_path):
    import datasets

    export(out, tmp_path / "hf", kind="hf")
    rows = datasets.load_from_disk(str(tmp_path / "hf"))
    opened = open_output(out)
    feature = rows.features[name_of(out)]
    vector = feature.feature if opened.kind == "tokens" else feature
    assert vector == datasets.List(datasets.Value("uint16" if opened.dtype == "bfloat16" else opened.dtype), length=48)
    assert_same(cells(rows.with_format("arrow")[:][name_of(out)]), stored(out))
    assert rows["id"] == opened.table()["id"].to_pylist()
    assert rows["input_ids"] == opened.table()["input_ids"].to_pylist()
    assert rows["outcome"] == opened.table()["outcome"].to_pylist()


def test_hf_goes_to_parquet_as_push_to_hub_does(tmp_path):
    import datasets

    out = output(tmp_path, "tokens", "float16")
    export(out, tmp_path / "hf", kind="hf")
    datasets.load_from_disk(str(tmp_path / "hf")).to_parquet(tmp_path / "pushed.parquet")
    assert_same(cells(pq.read_table(tmp_path / "pushed.parquet")["hidden_states"]), stored(out))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lance_through_its_dataset(kind, dtype, tmp_path):
    lance = pytest.importorskip("lance", reason="pylance is not installed")
    out = output(tmp_path, kind, dtype)
    export(out, tmp_path / "ln", kind="lance")
    table = lance.dataset(str(tmp_path / "ln" / "rows.lance")).to_table()
    assert_same(cells(table[name_of(out)]), stored(out))
    assert table["meta_url"].to_pylist() == open_output(out).table()["meta.url"].to_pylist()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lance_finds_the_nearest_state(dtype, tmp_path):
    lance = pytest.importorskip("lance", reason="pylance is not installed")
    out = output(tmp_path, "last", dtype)
    export(out, tmp_path / "ln", kind="lance")
    wanted = open_output(out).row(12)
    found = lance.dataset(str(tmp_path / "ln" / "rows.lance")).to_table(
        nearest={"column": "hidden_state", "q": wanted.states, "k": 1}
    )
    assert found["row"].to_pylist() == [12]


@pytest.mark.parametrize("kind", ["npy", "parquet", "specforge"])
def test_shards_of_several_record_batches_come_out_in_order(kind, tmp_path):
    import torch

    out = output(tmp_path, "tokens", "float32", num_shards=2, rows_per_shard=42)
    assert open_output(out).shard(0).num_batches > 2
    options = {"layers": ("final",), "loss_mask": "all"} if kind == "specforge" else {}
    export(out, tmp_path / "to", kind=kind, **options)
    if kind == "parquet":
        assert_same(cells(pq.read_table(tmp_path / "to" / "data")["hidden_states"]), stored(out))
        return
    expected = stored(out, with_states_only=True)
    if kind == "npy":
        offsets = np.load(tmp_path / "to" / "offsets.npy")
        states = np.load(tmp_path / "to" / "states.npy")
        found = [states[a:b] for a, b in itertools.pairwise(offsets)]
    else:
        files = [tmp_path / "to" / "rows_0-5000" / f"data_{n}.ckpt" for n in range(len(expected))]
        found = [torch.load(file)["hidden_state"][0].numpy() for file in files]
    assert_same(found, expected)


# --- what an export says of itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "npy", "safetensors", "hf", "lance", "saelens"])
def test_the_two_lines_of_an_export_run(kind, tmp_path):
    if kind == "lance":
        pytest.importorskip("lance", reason="pylance is not installed")
    out = output(tmp_path, "tokens", "float32")
    made = export(out, tmp_path / "to", kind=kind)
    scope: dict = {}
    exec(made.reading, scope)
    record = json.loads((tmp_path / "to" / "export.json").read_bytes())
    assert record["made_from"]["job"] == open_output(out).job.job_id
    assert record["rows_read_back"] > 0
    assert record["read"] in (tmp_path / "to" / "README.md").read_text()
    assert len(made.reading.splitlines()) == 2
