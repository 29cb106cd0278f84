"""Reading back: any row without the others, views without copies, and refusals that say which file."""

import gc
import json
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import shard_rig as rig

from extract.commits import BadRecord
from extract.job import NotAJob
from extract.output import NoSuchRow, open_output
from extract.shards.shard_file import DamagedShard
from extract.shards.values import bfloat16_bits, value_type
from extract.spec import StatesSpec

KINDS = ("tokens", "last", "mean", "first")
DTYPES = ("float16", "float32", "bfloat16", "int8")


def through(dtype, states):
    """What float32 states are after a trip through a stored type."""
    rows = states if states.ndim == 2 else states[None]
    encoded = value_type(dtype).encode(rows)
    return value_type(dtype).decode(encoded.values, encoded.scales).reshape(states.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_every_row_is_found_by_its_position(tmp_path, kind, dtype, compression):
    expected = rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype=dtype, compression=compression))
    out = open_output(tmp_path / "out")
    for row in (20, 0, 5, 13, 1, 8, 7):
        states = out.states(row)
        if expected[row] is None:
            assert states is None
        else:
            assert states.dtype == np.float32
            assert states.tobytes() == through(dtype, expected[row]).tobytes()


def test_a_row_has_its_ids_outcome_and_columns(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec())
    row = open_output(tmp_path / "out")[7 + 3]
    assert (row.row, row.chunk, row.outcome, row.num_tokens, row.num_tokens_original) == (10, 0, "ok", 5, 5)
    assert row.input_ids.tolist() == [4, 5, 6, 7, 8]
    assert row.columns == {"id": "id/3", "meta.url": "http://3", "score": 1.5}
    empty = open_output(tmp_path / "out")[7 + 1]
    assert (empty.outcome, empty.num_tokens, empty.input_ids, empty.states) == ("empty", 0, None, None)


def test_the_output_says_what_it_holds(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec(kind="mean", dtype="int8"))
    out = open_output(tmp_path / "out")
    assert (out.kind, out.dtype, out.width, out.num_rows, out.num_rows_out) == ("mean", "int8", rig.WIDTH, 21, 21)
    assert [commit.shard for commit in out.shards] == [0, 1, 2]
    assert out.schema.metadata[b"extract.checkpoint_name"] == b"tiny"


def test_iterating_gives_every_row_in_order(tmp_path):
    expected = rig.write_output(tmp_path / "out", StatesSpec(dtype="float32"))
    rows = list(open_output(tmp_path / "out"))
    assert [row.row for row in rows] == list(range(21))
    assert all((row.states is None) == (expected[row.row] is None) for row in rows)


def test_batches_hold_all_states_flat_with_a_span_for_each_row(tmp_path):
    for kind in KINDS:
        expected = rig.write_output(tmp_path / kind, StatesSpec(kind=kind, dtype="float32"))
        for batch in open_output(tmp_path / kind).batches():
            assert batch.outcomes.tolist() == ["ok" if length else "empty" for length in rig.LENGTHS]
            for n, row in enumerate(batch.row):
                states = batch.states[batch.state_spans[n]]
                wanted = expected[int(row)]
                assert states.tobytes() == (b"" if wanted is None else wanted.tobytes())
                assert len(batch.input_ids[batch.id_spans[n]]) == rig.LENGTHS[n]


def test_one_row_of_many_shards_opens_one_shard(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec(), num_shards=60)
    wanted = open_output(tmp_path / "out").states(7 * 41 + 5)
    for folder in ("data", "commits"):
        for path in (tmp_path / "out" / folder).iterdir():
            if not path.name.startswith("shard-00041"):
                path.write_bytes(b"not what was written")
    assert open_output(tmp_path / "out").states(7 * 41 + 5).tobytes() == wanted.tobytes()


def test_the_right_batch_of_a_shard_is_read(tmp_path):
    spec = StatesSpec(dtype="float32", record_batch_bytes=2**16)
    expected = rig.write_output(tmp_path / "out", spec, num_shards=2, rows_per_shard=50)
    out = open_output(tmp_path / "out")
    assert out.shard(1).num_batches > 3
    for row in range(99, -1, -1):
        wanted = expected[row]
        assert (out.states(row) is None) == (wanted is None)
        assert wanted is None or out.states(row).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_an_uncompressed_file_are_views_of_the_file(tmp_path, kind, dtype):
    rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype=dtype, compression="none"))
    gc.collect()  # what other tests left must not be freed in between
    before = pa.total_allocated_bytes()
    values = [batch.values for batch in open_output(tmp_path / "out").batches()]
    assert pa.total_allocated_bytes() == before
    assert all(not value.flags.owndata and not value.flags.writeable for value in values)
    assert {value.dtype for value in values} == {value_type(dtype).storage}


def test_float32_states_are_not_copied_to_be_decoded(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec(dtype="float32", compression="none"))
    for batch in open_output(tmp_path / "out").batches():
        assert np.shares_memory(batch.states, batch.values)
        assert np.shares_memory(batch.state(0), batch.values)


@pytest.mark.parametrize("kind", ["tokens", "mean"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_share_the_memory_and_have_the_stored_type(tmp_path, kind, dtype):
    import torch

    rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype=dtype))
    for batch in open_output(tmp_path / "out").batches():
        tensor = batch.torch()
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.data_ptr() == batch.values.ctypes.data
        assert batch.torch(1) is None  # an empty row
        row = batch.torch(3)
        assert (row.dtype, row.data_ptr()) == (tensor.dtype, batch.row_values(3).ctypes.data)
        assert torch.equal(row, tensor[batch.state_spans[3]] if kind == "tokens" else tensor[3])
        if dtype == "bfloat16":
            assert tensor.float().numpy().tobytes() == batch.states.tobytes()
        else:
            assert tensor.numpy().tobytes() == batch.values.tobytes()


@pytest.mark.parametrize("kind", ["tokens", "last"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoded_table_has_float32_states(tmp_path, kind, dtype):
    expected = rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype=dtype))
    name = "hidden_states" if kind == "tokens" else "hidden_state"
    table = open_output(tmp_path / "out").table(decoded=True)
    assert name + "_scale" not in table.column_names
    for row, found in zip(table["row"].to_pylist(), table[name].to_pylist(), strict=True):
        wanted = expected[row]
        assert (found is None) == (wanted is None)
        assert wanted is None or np.array(found, np.float32).tobytes() == through(dtype, wanted).tobytes()


def test_a_table_is_projected_as_asked(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec())
    out = open_output(tmp_path / "out")
    assert out.table(["row", "num_tokens"]).column_names == ["row", "num_tokens"]
    assert out.table(["row"], decoded=True).column_names == ["row"]
    assert out.table().schema.equals(out.schema)
    assert out.dataset().count_rows() == 21


@pytest.mark.parametrize("kind", ["tokens", "last"])
def test_a_data_frame_has_one_array_a_row(tmp_path, kind):
    expected = rig.write_output(tmp_path / "out", StatesSpec(kind=kind, dtype="int8"))
    name = "hidden_states" if kind == "tokens" else "hidden_state"
    frame = open_output(tmp_path / "out").to_pandas()
    assert name + "_scale" not in frame.columns
    assert frame["row"].tolist() == list(range(21))
    for row, found in zip(frame["row"], frame[name], strict=True):
        assert expected[row] is None if found is None else found.shape == expected[row].shape
    assert list(open_output(tmp_path / "out").to_pandas([name]).columns) == [name]


def test_chunks_of_a_row_are_found_by_number(tmp_path):
    spec = StatesSpec(dtype="float32")
    root = tmp_path / "out"
    rig.write_output(root, spec, num_shards=1, rows_per_shard=3, chunked=True)
    rows = rig.token_rows((4, 4, 2, 0, 3), source_index=[0, 0, 0, 1, 2], chunk=[0, 1, 2, 0, 0])
    rig.replace_shard(root, 0, spec, rows, chunked=True)
    out = open_output(root)
    assert [len(out.states(0, chunk)) for chunk in (0, 1, 2)] == [4, 4, 2]
    assert out.row(0, 2).chunk == 2
    assert (out.num_rows, out.num_rows_out) == (3, 5)
    assert len(out.states(2)) == 3
    with pytest.raises(NoSuchRow) as refused:
        out.row(0, 3)
    assert str(refused.value) == f"{root}: no row 0: it has no chunk 3."


def test_an_unfinished_job_is_read_as_far_as_it_is_committed(tmp_path):
    root = tmp_path / "out"
    rig.write_output(root, StatesSpec(), missing=(1,))
    out = open_output(root)
    assert out.num_rows == 14
    assert [row.row for row in out] == [*range(7), *range(14, 21)]
    assert out[20].row == 20
    with pytest.raises(NoSuchRow) as refused:
        out[7]
    assert str(refused.value) == f"{root}: no row 7: shard 1 is not finished; run the job again."


def test_a_job_without_any_shard_yet_opens_and_is_empty(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec(), missing=(0, 1, 2))
    out = open_output(tmp_path / "out")
    assert (out.num_rows, list(out), out.width) == (0, [], rig.WIDTH)
    assert out.table().num_rows == 0
    assert out.table(decoded=True).num_rows == 0


@pytest.mark.parametrize("row", [21, 10**12])
def test_a_row_outside_the_source_is_an_index_error(tmp_path, row):
    rig.write_output(tmp_path / "out", StatesSpec())
    with pytest.raises(IndexError) as refused:
        open_output(tmp_path / "out")[row]
    assert str(refused.value) == f"{tmp_path / 'out'}: no row {row}: the source has 21 rows, counted from 0."


def test_rows_are_counted_from_the_end_too(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec())
    out = open_output(tmp_path / "out")
    assert [out[row].row for row in (-1, -21)] == [20, 0]
    with pytest.raises(NoSuchRow) as refused:
        out[-22]
    assert str(refused.value) == f"{tmp_path / 'out'}: no row -22: there are 21 rows."
    with pytest.raises(NoSuchRow):
        out.row(-1)  # a position is a position


def test_a_slice_reads_its_rows_when_they_are_asked_for(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec(), missing=(1,))
    out = open_output(tmp_path / "out")
    assert [row.row for row in out[:3]] == [0, 1, 2]
    assert [row.row for row in out[-1:13:-3]] == [20, 17, 14]
    part = out[2:20]  # shard 1 is not there: reading a row of it says so, asking for others does not
    assert (len(part), part[0].row, part[-1].row, part[1:][0].row) == (18, 2, 19, 3)
    with pytest.raises(NoSuchRow, match="shard 1 is not finished"):
        part[5]


def test_the_rows_of_a_selection_are_sliced_by_their_positions(tmp_path):
    root = tmp_path / "out"
    rig.write_output(root, StatesSpec())
    table = json.loads((root / "job.json").read_text())
    table["spec"]["source"]["rows"] = "3-9,20-30,50-52"
    (root / "job.json").write_text(json.dumps(table))
    out = open_output(root)
    assert list(out[:].positions) == [*range(3, 10), *range(20, 31), 50, 51, 52]
    assert list(out[5:22].positions) == [5, 6, 7, 8, 9, 20, 21]
    assert list(out[-3:].positions) == [50, 51, 52]
    assert list(out[28:6:-2].positions) == [28, 26, 24, 22, 20, 8]


def test_an_output_is_as_long_as_iterating_it_and_knows_what_it_holds(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec(), missing=(1,))
    out = open_output(tmp_path / "out")
    assert len(out) == len(list(out)) == 14
    assert [row in out for row in (0, 6, 7, 13, 14, 20, 21, -1, "0")] == [1, 1, 0, 0, 1, 1, 0, 0, 0]
    with pytest.raises(TypeError):
        reversed(out)


def test_an_output_travels_to_another_process_without_its_open_files(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec())
    out = open_output(tmp_path / "out")
    other = pickle.loads(pickle.dumps((out[0], out)))[1]
    assert other.states(0).tobytes() == out.states(0).tobytes()


def test_a_directory_without_a_job_is_refused(tmp_path):
    with pytest.raises(NotAJob) as refused:
        open_output(tmp_path)
    assert str(refused.value) == f"{tmp_path}: not an output directory (it holds no job.json)."


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "shard-00000/../../x", "..", ""])
def test_a_record_that_points_outside_the_data_directory_is_refused(tmp_path, name):
    root = tmp_path / "out"
    rig.write_output(root, StatesSpec())
    record = root / "commits" / "shard-00000.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "data": name}))
    with pytest.raises(BadRecord, match=r"shard-00000\.json: its data name .* is not one of this shard"):
        open_output(root)[0]
    with pytest.raises(BadRecord):
        list(open_output(root))


def shard_file(root, shard):
    return next((root / "data").glob(f"shard-{shard:05d}-*.arrow"))


def test_a_missing_shard_file_is_named(tmp_path):
    root = tmp_path / "out"
    rig.write_output(root, StatesSpec())
    path = shard_file(root, 0)
    path.unlink()
    with pytest.raises(DamagedShard) as refused:
        open_output(root)[0]
    assert str(refused.value) == (
        f"{path}: cannot be opened ([Errno 2] No such file or directory: '{path}'). "
        f"See what else is wrong: extract verify {root}"
    )
    assert refused.value.exit_code == 7


def test_a_truncated_shard_file_is_named(tmp_path):
    root = tmp_path / "out"
    rig.write_output(root, StatesSpec())
    path = shard_file(root, 1)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedShard) as refused:
        open_output(root)[7]
    assert str(refused.value) == (
        f"{path}: {size - 100:,} bytes found, {size:,} were written. See what else is wrong: extract verify {root}"
    )


def test_a_shard_file_of_other_bytes_is_named(tmp_path):
    root = tmp_path / "out"
    rig.write_output(root, StatesSpec())
    path = shard_file(root, 1)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedShard, match="cannot be opened"):
        open_output(root)[7]


def test_a_damaged_compressed_batch_is_an_error_of_ours(tmp_path):
    root = tmp_path / "out"
    rig.write_output(root, StatesSpec())
    path = shard_file(root, 0)
    data = bytearray(path.read_bytes())
    start = data.index(b"\x28\xb5\x2f\xfd")  # a zstd frame
    data[start : start + 4] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(DamagedShard, match="cannot be read"):
        open_output(root)[0]


def test_reading_imports_no_torch(tmp_path):
    rig.write_output(tmp_path / "out", StatesSpec())
    code = (
        "import sys; from extract.output import open_output; "
        f"out = open_output({str(tmp_path / 'out')!r}); out.states(0); out.table(decoded=True); "
        "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_metadata_recipe_decodes_the_column(tmp_path):
    for kind in ("tokens", "last"):
        for dtype in DTYPES:
            root = tmp_path / f"{kind}-{dtype}"
            rig.write_output(root, StatesSpec(kind=kind, dtype=dtype))
            for batch in open_output(root).batches():
                variables = {"numpy": np, "values": batch.values, "scale": batch.scales}
                exec(batch.arrow.schema.metadata[b"extract.read"].decode(), variables)
                assert np.allclose(variables["states"], batch.states, rtol=1e-5, atol=1e-5)


def test_bfloat16_of_the_engine_comes_back_as_the_same_numbers(tmp_path):
    rows = rig.token_rows()
    bits = bfloat16_bits(rig.random_states(rows))
    root = tmp_path / "out"
    spec = StatesSpec(dtype="bfloat16")
    rig.write_output(root, spec, num_shards=1)
    rig.replace_shard(root, 0, spec, rows, bits)
    assert b"".join(batch.values.tobytes() for batch in open_output(root).batches()) == bits.tobytes()
