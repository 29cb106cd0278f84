"""Outputs made from outputs, without the model: what is kept, what a cast or a pool may change, and resuming."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import rig
from job_rig import Engines, data_of, errors, job, output_table, parquet, run, runtime, snapshot, stored, texts

from extract import derivation
from extract.derivation import Change, NothingToPool, SameDirectory, Unfinished, derive
from extract.job import OtherJob
from extract.output import open_output
from extract.shards.sink import NonFiniteStates
from extract.verification import verify

STEP = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 2e-2}
"""What a stored type adds, relative to the largest value of a row."""

OWN = ("outcome", "num_tokens", "num_tokens_original", "input_ids")


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine("llama")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    rows = [*texts(45), None, "", "all of it, " * 20, *texts(4, seed=1)]
    table = {"text": rows, "key": [f"k{n}" for n in range(52)], "n": [None, *range(51)], "chunk": ["own"] * 52}
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", table)


@pytest.fixture(scope="module")
def outputs(engine, source, tmp_path_factory) -> Path:
    """A float32 output of each kind, with ids and carried columns, and one of chunks; do not change their files."""
    root = tmp_path_factory.mktemp("outputs")
    options = {"rows_per_shard": 20, "id_column": "key", "carry": ("n", "chunk")}
    for kind in ("tokens", "last", "first", "mean"):
        run(job(engine, source, root / kind, kind=kind, **options))
    chunked = {**options, "carry": ("n",), "on_long": "chunk", "chunk_overlap": 2, "max_input_tokens": 8}
    run(job(engine, source, root / "chunked", **chunked))
    run(job(engine, source, root / "chunked-last", kind="last", **chunked))
    return root


def kept(output: Path) -> pa.Table:
    """Everything but the states."""
    names = [name for name in output_table(output).column_names if not name.startswith("hidden_state")]
    return output_table(output).select(names).replace_schema_metadata(None).combine_chunks()


def worst(output: Path, other: Path) -> float:
    found, expected = stored(output), stored(other)
    assert [one is None for one in found] == [one is None for one in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    return float(errors([a for a, _ in pairs], [b for _, b in pairs]).max())


# --- casts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "last"])
def test_every_stored_type_casts_to_every_other_within_their_rounding(outputs, tmp_path, kind):
    for dtype in STEP:
        derive(outputs / kind, tmp_path / dtype, Change(dtype=dtype))
        assert worst(tmp_path / dtype, outputs / kind) <= STEP[dtype]
    for first, second in itertools.permutations(STEP, 2):
        derive(tmp_path / first, tmp_path / f"{first}-{second}", Change(dtype=second))
        assert worst(tmp_path / f"{first}-{second}", outputs / kind) <= 1.01 * (STEP[first] + STEP[second])
        assert kept(tmp_path / f"{first}-{second}").equals(kept(outputs / kind))


def test_a_cast_to_a_wider_type_and_back_gives_the_same_bytes(outputs, tmp_path):
    for dtype in ("float16", "bfloat16"):
        derive(outputs / "tokens", tmp_path / dtype, Change(dtype=dtype))
        derive(tmp_path / dtype, tmp_path / f"{dtype}-wide", Change(dtype="float32"))
        derive(tmp_path / f"{dtype}-wide", tmp_path / f"{dtype}-back", Change(dtype=dtype))
        one, other = (output_table(tmp_path / name) for name in (dtype, f"{dtype}-back"))
        assert one.replace_schema_metadata(None).equals(other.replace_schema_metadata(None))


def test_a_cast_gives_what_a_run_with_that_type_gives(engine, source, outputs, tmp_path):
    options = {"rows_per_shard": 20, "id_column": "key", "carry": ("n", "chunk")}
    for dtype in ("float16", "bfloat16", "int8"):
        run(job(engine, source, tmp_path / "run", dtype=dtype, **options))
        derive(outputs / "tokens", tmp_path / "cast", Change(dtype=dtype))
        one, other = (output_table(tmp_path / name) for name in ("run", "cast"))
        assert one.replace_schema_metadata(None).equals(other.replace_schema_metadata(None))
        for name in ("run", "cast"):
            shutil.rmtree(tmp_path / name)


# --- pooling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["last", "first", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_pooled_output_equals_a_run_of_that_kind(outputs, tmp_path, kind, dtype):
    derive(outputs / "tokens", tmp_path / "cast", Change(dtype=dtype))
    derive(tmp_path / "cast", tmp_path / "pooled", Change(pool=kind))
    assert worst(tmp_path / "pooled", outputs / kind) <= 1e-6 + 4 * STEP[dtype]
    assert kept(tmp_path / "pooled").equals(kept(outputs / kind))
    assert open_output(tmp_path / "pooled").schema.field("hidden_state").type == pa.list_(
        pa.field("item", pa.from_numpy_dtype(dtype), nullable=False), 64
    )


def test_every_chunk_is_pooled_by_itself(outputs, tmp_path):
    derive(outputs / "chunked", tmp_path / "pooled", Change(pool="last"))
    assert worst(tmp_path / "pooled", outputs / "chunked-last") <= 1e-5
    assert kept(tmp_path / "pooled").equals(kept(outputs / "chunked-last"))


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens", "mean", "chunked"])
@pytest.mark.parametrize("rows_per_shard", [1, 7, 20, 1000])
def test_other_shards_hold_the_same_rows_in_the_same_order(outputs, tmp_path, name, rows_per_shard):
    derive(outputs / name, tmp_path / "out", Change(rows_per_shard=rows_per_shard))
    assert (
        output_table(tmp_path / "out")
        .replace_schema_metadata(None)
        .equals(output_table(outputs / name).replace_schema_metadata(None))
    )
    found = verify(tmp_path / "out")
    assert (found.complete, found.num_shards) == (True, -(-52 // rows_per_shard))


def test_totals_stay_what_they_were(outputs, tmp_path):
    before = run_totals(outputs / "chunked")
    made = derive(outputs / "chunked", tmp_path / "out", Change(rows_per_shard=7, dtype="int8"))
    assert run_totals(tmp_path / "out") == before
    assert made.totals.num_tokens == before["num_tokens"]


def run_totals(output: Path) -> dict:
    totals = json.loads((output / "manifest.json").read_bytes())["totals"]
    return {name: totals[name] for name in totals if name not in ("num_shards", "num_bytes")}


def test_a_change_of_everything_at_once(outputs, tmp_path):
    change = Change(dtype="int8", pool="mean", rows_per_shard=9, compression="lz4")
    derive(outputs / "tokens", tmp_path / "out", change)
    assert worst(tmp_path / "out", outputs / "mean") <= STEP["int8"]
    assert verify(tmp_path / "out").num_shards == 6


def test_selected_rows_keep_their_positions(engine, source, tmp_path):
    run(job(engine, source, tmp_path / "out", rows="3-9,40-51", rows_per_shard=5, id_column="key"))
    derive(tmp_path / "out", tmp_path / "again", Change(rows_per_shard=8, pool="last"))
    assert output_table(tmp_path / "again").column("row").to_pylist() == [*range(3, 10), *range(40, 52)]
    assert kept(tmp_path / "again").equals(kept(tmp_path / "out"))
    assert verify(tmp_path / "again").complete


def test_an_empty_output_can_be_derived_from(engine, tmp_path):
    rows = parquet(tmp_path / "in.parquet", {"text": pa.array([], pa.string())})
    run(job(engine, rows, tmp_path / "out"))
    made = derive(tmp_path / "out", tmp_path / "again", Change(pool="mean", dtype="int8"))
    assert (made.totals.num_rows, output_table(tmp_path / "again").num_rows) == (0, 0)
    assert verify(tmp_path / "again").complete


# --- rows without states --------------------------------------------------------------------------------------------


@pytest.fixture
def with_overflow(engine, tmp_path, monkeypatch) -> Path:
    """A float32 output in which row 1 has a value beyond float16, and row 3 a NaN that is recorded."""
    ids = [[10, 11], [77], [12], [78, 13], [14]]
    source = parquet(tmp_path / "in.parquet", {"ids": ids})
    loaded = runtime(str(engine))
    plain = loaded.hidden_states

    def edited(batch, kind):
        states = plain(batch, kind).copy()
        states[batch.input_ids == 77, 5] = 1e5
        states[batch.input_ids == 78, 6] = np.nan
        return states

    monkeypatch.setattr(loaded, "hidden_states", edited)
    run(job(engine, source, tmp_path / "wide", column="ids", input="input_ids", rows_per_shard=2))
    assert output_table(tmp_path / "wide").column("outcome").to_pylist() == ["ok", "ok", "ok", "non_finite", "ok"]
    return tmp_path / "wide"


@pytest.mark.parametrize("pool", [None, "last", "mean"])
def test_rows_without_finite_states_stay_so_and_keep_their_ids(with_overflow, tmp_path, pool):
    derive(with_overflow, tmp_path / "out", Change(rows_per_shard=3, pool=pool))
    assert kept(tmp_path / "out").equals(kept(with_overflow))
    assert output_table(tmp_path / "out").column("input_ids").to_pylist()[3] == [78, 13]
    assert stored(tmp_path / "out")[3] is None
    assert verify(tmp_path / "out").complete


def test_states_too_large_for_the_new_type_become_non_finite_and_are_counted(with_overflow, tmp_path):
    made = derive(with_overflow, tmp_path / "out", Change(dtype="float16"))
    assert output_table(tmp_path / "out").column("outcome").to_pylist() == [
        "ok",
        "non_finite",
        "ok",
        "non_finite",
        "ok",
    ]
    assert made.totals.overflowed == 1
    assert verify(tmp_path / "out").complete


def test_a_job_that_stops_at_such_states_also_stops_a_cast(engine, tmp_path, monkeypatch):
    source = parquet(tmp_path / "in.parquet", {"ids": [[10, 11], [77], [12]]})
    loaded = runtime(str(engine))
    plain = loaded.hidden_states
    monkeypatch.setattr(loaded, "hidden_states", lambda batch, kind: 1e4 * plain(batch, kind))
    options = {"column": "ids", "input": "input_ids", "on_non_finite": "error"}
    run(job(engine, source, tmp_path / "wide", **options))
    with pytest.raises(NonFiniteStates) as error:
        derive(tmp_path / "wide", tmp_path / "out", Change(dtype="float16"))
    assert "cannot be stored as float16" in str(error.value)
    assert not list((tmp_path / "out" / "data").iterdir())


# --- what is said of where it came from -----------------------------------------------------------------------------


def test_the_schema_says_what_it_was_made_from_and_with_which_engine(outputs, tmp_path):
    derive(outputs / "tokens", tmp_path / "1", Change(dtype="int8"))
    derive(tmp_path / "1", tmp_path / "2", Change(pool="mean", dtype="float32"))
    first, second, third = (open_output(path) for path in (outputs / "tokens", tmp_path / "1", tmp_path / "2"))
    for name in (b"extract.engine", b"extract.checkpoint", b"extract.module", b"extract.tokens"):
        assert third.schema.metadata[name] == first.schema.metadata[name]
    assert third.job.derived_from == {
        "job": second.job.job_id,
        "dtype": "int8",
        "kind": "tokens",
        "derived_from": {"job": first.job.job_id, "dtype": "float32", "kind": "tokens", "derived_from": None},
    }
    assert b'"dtype":"int8"' in third.schema.metadata[b"extract.derived_from"]


# --- refusals and resuming ------------------------------------------------------------------------------------------


def test_pooled_states_cannot_be_pooled(outputs, tmp_path):
    with pytest.raises(NothingToPool) as error:
        derive(outputs / "last", tmp_path / "out", Change(pool="mean"))
    assert str(error.value) == (
        f'{outputs / "last"}: holds one state a row (last), so it cannot be pooled to "mean". '
        "Pool an output of kind tokens."
    )
    assert error.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_an_output_is_never_changed_in_place(outputs, tmp_path):
    before = snapshot(outputs)
    (tmp_path / "link").symlink_to(outputs / "tokens")
    for target in (outputs / "tokens", tmp_path / "link", outputs / "last" / ".." / "tokens"):
        with pytest.raises(SameDirectory):
            derive(outputs / "tokens", target, Change(dtype="int8"))
    derive(outputs / "tokens", tmp_path / "out", Change(dtype="int8"))
    assert snapshot(outputs) == before


def test_an_unfinished_output_is_refused(outputs, tmp_path):
    shutil.copytree(outputs / "tokens", tmp_path / "in")
    (tmp_path / "in" / "commits" / "shard-00001.json").unlink()
    with pytest.raises(Unfinished) as error:
        derive(tmp_path / "in", tmp_path / "out", Change(dtype="int8"))
    assert str(error.value) == (
        f"{tmp_path / 'in'}: shard 1 is missing. Finish this job first: run the same `extract run` command again."
    )


def test_a_killed_derivation_goes_on_and_leaves_finished_shards_alone(outputs, tmp_path, monkeypatch):
    derive(outputs / "tokens", tmp_path / "whole", Change(dtype="int8", rows_per_shard=9))
    made = derivation._make

    def killed(origin, record, directory, shard, progress):
        if shard == 3:
            (directory.tmp).mkdir(exist_ok=True)
            (directory.tmp / "shard-00003.1-dead").write_bytes(b"half")
            raise KeyboardInterrupt
        return made(origin, record, directory, shard, progress)

    monkeypatch.setattr(derivation, "_make", killed)
    with pytest.raises(KeyboardInterrupt):
        derive(outputs / "tokens", tmp_path / "out", Change(dtype="int8", rows_per_shard=9))
    monkeypatch.undo()
    before = [data_of(tmp_path / "out", shard).stat().st_mtime_ns for shard in range(3)]
    again = derive(outputs / "tokens", tmp_path / "out", Change(dtype="int8", rows_per_shard=9))
    assert again.num_shards_made == 3
    assert [data_of(tmp_path / "out", shard).stat().st_mtime_ns for shard in range(3)] == before
    assert snapshot(tmp_path / "out" / "data") == snapshot(tmp_path / "whole" / "data")
    assert not (tmp_path / "out" / "tmp").exists()
    assert derive(outputs / "tokens", tmp_path / "out", Change(dtype="int8", rows_per_shard=9)).num_shards_made == 0


@pytest.mark.parametrize("fate", ["commits it", "dies"])
def test_a_shard_that_another_process_holds_is_waited_for(outputs, tmp_path, monkeypatch, fate):
    derive(outputs / "tokens", tmp_path / "whole", Change(dtype="int8"))
    asked: list[int] = []

    class Shared(derivation.Claims):
        def claim(self, shard: int) -> bool:
            asked.append(shard)
            if shard == 1 and asked.count(1) <= 2:
                return False
            if fate == "commits it" and shard == 1:
                for folder in ("data", "commits"):
                    shutil.copytree(tmp_path / "whole" / folder, tmp_path / "out" / folder, dirs_exist_ok=True)
            return super().claim(shard)

    monkeypatch.setattr(derivation, "Claims", Shared)
    monkeypatch.setattr(derivation, "POLL_S", 0.0)
    made = derive(outputs / "tokens", tmp_path / "out", Change(dtype="int8"))
    assert asked == [0, 1, 2, 1, 1]
    assert made.num_shards_made == (2 if fate == "commits it" else 3)
    assert snapshot(tmp_path / "out" / "data") == snapshot(tmp_path / "whole" / "data")
    assert verify(tmp_path / "out").complete


def test_another_change_does_not_go_on_in_the_same_directory(outputs, tmp_path):
    derive(outputs / "tokens", tmp_path / "out", Change(dtype="int8"))
    with pytest.raises(OtherJob) as error:
        derive(outputs / "tokens", tmp_path / "out", Change(dtype="float16"))
    assert str(error.value) == (
        f'{tmp_path / "out"}: this directory holds a job whose states.dtype is "int8"; you asked for "float16". '
        "Ask for the same again to go on with it, or choose another output directory with -o."
    )


def test_ids_are_not_needed(engine, tmp_path):
    source = parquet(tmp_path / "in.parquet", {"ids": rig.random_sequences([4, 9, 5])})
    run(job(engine, source, tmp_path / "out", column="ids", input="input_ids", input_ids=False))
    derive(tmp_path / "out", tmp_path / "again", Change(pool="last", rows_per_shard=2))
    table = output_table(tmp_path / "again")
    assert "input_ids" not in table.column_names
    assert pc.sum(table.column("num_tokens")).as_py() == 18
    assert all(
        np.array_equal(one, many[-1])
        for one, many in zip(stored(tmp_path / "again"), stored(tmp_path / "out"), strict=True)
    )
