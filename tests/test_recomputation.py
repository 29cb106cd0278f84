"""`verify --recompute`: the plain model, one row at a time, finds what no hash can: states or ids of something else."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import rig
from job_rig import LIMIT, Engines, job, output_table, parquet, rewrite_shard, run, texts

from extract.derivation import Change, derive
from extract.engine.builder import build
from extract.engine.contract import EngineChanged, NotAnEngine, read_contract, write_contract
from extract.engine.recipe import Recipe
from extract.recomputation import OtherEngine, OtherPlainModel
from extract.report import verification_text
from extract.verification import BadShards, verify


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine("llama")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", {"text": texts(60)})


@pytest.fixture(scope="module")
def same_length(tmp_path_factory) -> Path:
    """Twenty rows of ids, all of one length, so that rows can trade states unseen."""
    return parquet(tmp_path_factory.mktemp("ids") / "in.parquet", {"ids": rig.random_sequences([9] * 20)})


def found_by_recompute(output: Path, rows: int = 20, **options) -> list[str]:
    """The problems, none of which a plain `verify` finds."""
    verify(output)
    with pytest.raises(BadShards) as error:
        verify(output, recompute=rows, **options)
    return [line.strip() for line in str(error.value).splitlines()[1:-1]]


def swapped(table: pa.Table, name: str, one: int, other: int) -> pa.Table:
    """The table with two values of a column in each other's place."""
    order = np.arange(table.num_rows)
    order[[one, other]] = other, one
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(name), table.column(name).take(pa.array(order)))


def scaled(table: pa.Table, name: str, factors: np.ndarray) -> pa.Table:
    """The table with every state multiplied, dimension by dimension."""
    place, kind = table.schema.get_field_index(name), table.schema.field(name).type
    lists = table.column(name).combine_chunks()
    states = lists.values.flatten() if kind.value_type != pa.float32() else lists.flatten()
    flat = pa.array((states.to_numpy().reshape(-1, len(factors)) * factors).astype(np.float32).reshape(-1))
    if pa.types.is_fixed_size_list(kind):
        return table.set_column(place, table.schema.field(name), pa.FixedSizeListArray.from_arrays(flat, type=kind))
    inner = pa.FixedSizeListArray.from_arrays(flat, type=kind.value_type)
    return table.set_column(place, table.schema.field(name), pa.ListArray.from_arrays(lists.offsets, inner, type=kind))


# --- what passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "states",
    [
        {"kind": "tokens", "dtype": "float32"},
        {"kind": "tokens", "dtype": "int8"},
        {"kind": "last", "dtype": "bfloat16"},
        {"kind": "mean", "dtype": "float16"},
        {"kind": "mean", "dtype": "int8", "normalize": True},
        {"kind": "first", "dtype": "float16", "input_ids": False},
    ],
    ids=lambda states: "-".join(map(str, states.values())),
)
def test_rows_of_every_kind_and_stored_type_pass(engine, rows, tmp_path, states):
    run(job(engine, rows, tmp_path / "out", rows_per_shard=25, **states))
    found = verify(tmp_path / "out", recompute=12)
    assert found.recomputed == 12
    assert 0 < found.worst <= found.recompute_bound < 0.1
    assert found.notes == ()
    assert verification_text(found).splitlines()[-1] == (
        f"recomputed 12 rows with the plain model: largest relative error {found.worst:.1e}, "
        f"bound {found.recompute_bound:.1e}"
    )


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bloom"])
def test_rows_of_every_family_pass(engines: Engines, rows, tmp_path, name):
    run(job(engines.engine(name), rows, tmp_path / "out"))
    assert verify(tmp_path / "out", recompute=12).worst <= 1e-5


def test_chunks_and_selected_rows_pass(engine, rows, tmp_path):
    options = {"rows": "3-9,40-59", "on_long": "chunk", "chunk_overlap": 3, "max_input_tokens": 8, "rows_per_shard": 4}
    run(job(engine, rows, tmp_path / "out", **options))
    found = verify(tmp_path / "out", recompute=50)
    assert found.recomputed == min(50, output_table(tmp_path / "out").num_rows)


@pytest.mark.parametrize("steps", [[Change(dtype="int8")], [Change(dtype="bfloat16"), Change(pool="mean")]])
def test_derived_outputs_pass(engine, rows, tmp_path, steps):
    run(job(engine, rows, tmp_path / "0", dtype="float16", rows_per_shard=25))
    for number, change in enumerate(steps):
        derive(tmp_path / f"{number}", tmp_path / f"{number + 1}", change)
    assert verify(tmp_path / f"{len(steps)}", recompute=12).recomputed == 12


def test_asking_for_more_rows_than_there_are_takes_them_all(engine, rows, tmp_path):
    run(job(engine, rows, tmp_path / "out", limit=7))
    assert verify(tmp_path / "out", recompute=1000).recomputed == 7


def test_only_rows_with_states_count(engine, tmp_path):
    """Two rows in fifty have states; both are found."""
    table = [None] * 50
    table[17], table[33] = texts(2)
    rows = parquet(tmp_path / "in.parquet", {"text": pa.array(table, pa.string())})
    run(job(engine, rows, tmp_path / "out", rows_per_shard=20))
    assert verify(tmp_path / "out", recompute=2).recomputed == 2
    assert verify(tmp_path / "out", recompute=50).recomputed == 2


def test_an_output_without_any_state_has_nothing_to_compute_again(engine, tmp_path):
    rows = parquet(tmp_path / "in.parquet", {"text": pa.array([None, ""], pa.string())})
    run(job(engine, rows, tmp_path / "out"))
    assert verify(tmp_path / "out", recompute=5).recomputed == 0


def test_an_unfinished_job_is_recomputed_as_far_as_it_is(engine, rows, tmp_path):
    run(job(engine, rows, tmp_path / "out", rows_per_shard=20))
    for path in (tmp_path / "out" / "commits" / "shard-00001.json", tmp_path / "out" / "manifest.json"):
        path.unlink()
    found = verify(tmp_path / "out", recompute=8)
    assert (found.complete, found.recomputed) == (False, 8)


# --- what only a second forward finds -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "last"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_states_of_two_rows_in_each_others_place_are_found(engine, same_length, tmp_path, kind, dtype):
    options = {"column": "ids", "input": "input_ids", "kind": kind, "dtype": dtype}
    run(job(engine, same_length, tmp_path / "out", rows_per_shard=10, **options))
    name = "hidden_states" if kind == "tokens" else "hidden_state"
    rewrite_shard(tmp_path / "out", 1, lambda table: swapped(table, name, 3, 6))
    problems = found_by_recompute(tmp_path / "out")
    assert [problem.split(" differs")[0] for problem in problems] == ["shard 1: row 13:", "shard 1: row 16:"]
    assert all(problem.endswith("expected") for problem in problems)


@pytest.mark.parametrize("kind", ["tokens", "last"])
def test_states_without_the_weight_of_the_final_norm_are_found(engines: Engines, engine, rows, tmp_path, kind):
    from safetensors.numpy import load_file

    weight = load_file(engine / "model.safetensors")["norm.weight"]
    run(job(engine, rows, tmp_path / "out", kind=kind))
    name = "hidden_states" if kind == "tokens" else "hidden_state"
    rewrite_shard(tmp_path / "out", 0, lambda table: scaled(table, name, 1 / weight))
    assert len(found_by_recompute(tmp_path / "out")) == 20


def test_states_off_by_one_part_in_a_thousand_are_found(engine, rows, tmp_path):
    run(job(engine, rows, tmp_path / "out", kind="last"))
    rewrite_shard(tmp_path / "out", 0, lambda table: scaled(table, "hidden_state", np.full(64, 1.001)))
    assert len(found_by_recompute(tmp_path / "out")) == 20


def test_ids_that_are_not_those_of_the_source_are_found(engine, rows, tmp_path):
    run(job(engine, rows, tmp_path / "out"))

    def changed(table: pa.Table) -> pa.Table:
        ids = table.column("input_ids").to_pylist()
        ids[5][-1] += 1
        place = table.schema.get_field_index("input_ids")
        return table.set_column(place, table.schema.field(place), pa.array(ids, table.schema.field(place).type))

    rewrite_shard(tmp_path / "out", 0, changed)
    assert found_by_recompute(tmp_path / "out", 60) == ["shard 0: row 5: its ids are not those of the source's text"]


def test_states_of_another_number_of_tokens_than_the_source_are_found_without_stored_ids(engine, tmp_path):
    """Rows 0 and 1 trade everything but their numbers; without ids only the source tells."""
    source = parquet(tmp_path / "in.parquet", {"ids": rig.random_sequences([4, 9, 5])})
    run(job(engine, source, tmp_path / "out", column="ids", input="input_ids", input_ids=False))

    def changed(table: pa.Table) -> pa.Table:
        for name in ("num_tokens", "num_tokens_original", "hidden_states"):
            table = swapped(table, name, 0, 1)
        return table

    rewrite_shard(tmp_path / "out", 0, changed)
    assert found_by_recompute(tmp_path / "out") == [
        "shard 0: row 0: its text has 4 tokens, its states have not",
        "shard 0: row 1: its text has 9 tokens, its states have not",
    ]


def test_repair_moves_a_shard_with_wrong_states_aside_and_the_next_run_mends_it(engine, same_length, tmp_path):
    spec = job(engine, same_length, tmp_path / "out", column="ids", input="input_ids", rows_per_shard=10)
    run(spec)
    before = output_table(tmp_path / "out")
    rewrite_shard(tmp_path / "out", 1, lambda table: swapped(table, "hidden_states", 3, 6))
    found_by_recompute(tmp_path / "out", repair=True)
    assert run(spec).num_shards_made == 1
    assert verify(tmp_path / "out", recompute=20).complete
    assert output_table(tmp_path / "out").equals(before)


# --- the engine and the source --------------------------------------------------------------------------------------


def test_an_engine_that_was_moved_is_found_where_it_is_said_to_be(engine, rows, tmp_path):
    shutil.copytree(engine, tmp_path / "engine")
    run(job(tmp_path / "engine", rows, tmp_path / "out", limit=9))
    (tmp_path / "engine").rename(tmp_path / "moved")
    with pytest.raises(NotAnEngine) as error:
        verify(tmp_path / "out", recompute=3)
    assert str(error.value) == (
        f"{tmp_path / 'engine'}: not an engine directory (no such directory). "
        f"Build one: extract build CHECKPOINT -o {tmp_path / 'engine'}"
    )
    assert verify(tmp_path / "out", recompute=3, engine=tmp_path / "moved").recomputed == 3


def test_another_engine_is_refused(engines: Engines, engine, rows, tmp_path):
    run(job(engine, rows, tmp_path / "out", limit=9))
    with pytest.raises(OtherEngine) as error:
        verify(tmp_path / "out", recompute=3, engine=engines.engine("gpt2"))
    found, expected = (read_contract(path).engine_id[:16] for path in (engines.engine("gpt2"), engine))
    assert str(error.value) == (
        f"{engines.engine('gpt2')}: this engine has id {found}, the output was made by {expected}. "
        "Say where that engine lies: --engine DIR"
    )
    assert error.value.exit_code == 4


def test_an_engine_whose_weights_changed_is_no_reference(engine, rows, tmp_path):
    shutil.copytree(engine, tmp_path / "engine")
    run(job(engine, rows, tmp_path / "out", limit=9))
    weights = tmp_path / "engine" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(EngineChanged):
        verify(tmp_path / "out", recompute=3, engine=tmp_path / "engine")


@pytest.fixture(scope="module")
def int8(engines: Engines, tmp_path_factory) -> Path:
    """An int8 engine whose contract promises more than it keeps, as one does that was measured on easier rows."""
    path = tmp_path_factory.mktemp("int8") / "engine"
    build(engines.checkpoint("llama"), path, Recipe(dtype="int8", device="cpu", max_input_tokens=LIMIT))
    contract = read_contract(path)
    write_contract(path, replace(contract, fidelity=replace(contract.fidelity, bound=1e-6)))
    return path


def test_rows_that_rounding_moved_beyond_the_bound_are_right_if_the_engine_gives_them_again(int8, rows, tmp_path):
    run(job(int8, rows, tmp_path / "out", limit=9))
    found = verify(tmp_path / "out", recompute=9)
    assert found.recomputed == 9
    assert found.notes == (
        "9 of 9 rows (0, 1, 2, 3, 4) lie further from the plain model than the bound, and the engine gives them so "
        "again: int8 decides a threshold of the model otherwise there",
    )


def test_rows_in_each_others_place_are_found_whatever_the_engine_rounds(int8, same_length, tmp_path):
    run(job(int8, same_length, tmp_path / "out", column="ids", input="input_ids", kind="last"))
    rewrite_shard(tmp_path / "out", 0, lambda table: swapped(table, "hidden_state", 3, 4))
    problems = found_by_recompute(tmp_path / "out")
    assert [problem.split(":")[1].strip() for problem in problems] == ["row 3", "row 4"]


@pytest.mark.parametrize("kind", ["checkpoint", "engine"])
def test_the_plain_model_may_come_from_the_checkpoint_or_from_another_engine_of_it(engines, rows, tmp_path, kind):
    run(job(engines.engine("gemma2"), rows, tmp_path / "out", limit=9))
    where = engines.checkpoint("gemma2") if kind == "checkpoint" else engines.engine("gemma2", decoder="transformers")
    found = verify(tmp_path / "out", recompute=5, reference=where)
    assert (found.recomputed, found.worst <= 1e-5) == (5, True)


@pytest.mark.parametrize("kind", ["checkpoint", "engine"])
def test_the_plain_model_of_another_checkpoint_is_refused(engines: Engines, engine, rows, tmp_path, kind):
    run(job(engine, rows, tmp_path / "out", limit=9))
    where = engines.checkpoint("gpt2") if kind == "checkpoint" else engines.engine("gpt2")
    with pytest.raises(OtherPlainModel) as error:
        verify(tmp_path / "out", recompute=5, reference=where)
    found, expected = (read_contract(path).checkpoint.sha256[:12] for path in (engines.engine("gpt2"), engine))
    assert str(error.value) == (
        f"{where}: its checkpoint has sha256 {found}, the engine was made from {expected}. "
        "Give the checkpoint that the engine was made from: --reference CHECKPOINT"
    )


def test_without_its_source_states_are_still_held_to_the_stored_ids(engine, tmp_path):
    rows = parquet(tmp_path / "in.parquet", {"text": texts(9)})
    run(job(engine, rows, tmp_path / "out"))
    parquet(tmp_path / "in.parquet", {"text": texts(9)[::-1]})
    found = verify(tmp_path / "out", recompute=5)
    assert (found.recomputed, found.notes) == (
        5,
        ("the source has changed since: ids were not compared with its texts",),
    )
    rows.unlink()
    found = verify(tmp_path / "out", recompute=5)
    assert found.recomputed == 5
    (note,) = found.notes
    assert note.startswith("ids were not compared with the source's texts: ")


def test_the_limit_of_the_job_and_not_of_the_engine_cuts_the_texts_again(engine, rows, tmp_path):
    run(job(engine, rows, tmp_path / "out", max_input_tokens=LIMIT // 4, truncation_side="left"))
    assert verify(tmp_path / "out", recompute=20).recomputed == 20
