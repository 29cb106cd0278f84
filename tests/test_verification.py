"""`verify` passes on what a run wrote and names the shard for every way in which it can be something else."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from job_rig import (
    Engines,
    data_of,
    edit_record,
    job,
    output_table,
    parquet,
    record_of,
    rewrite_shard,
    run,
    snapshot,
    texts,
)

from extract.commits import commit_path
from extract.job import NotAJob
from extract.manifest import NotTiled
from extract.report import verification_text
from extract.shards.schema import OUTCOME_VALUES
from extract.verification import BadShards, verify

ADVICE = "Make them again: extract verify --repair moves them aside, then run the job again."


@pytest.fixture(scope="module")
def finished(engines: Engines, tmp_path_factory):
    """A job of 4 shards, the last with null, empty and chunked rows, and an id column; do not change its files."""
    root = tmp_path_factory.mktemp("finished")
    rows = [*texts(36, characters=12), None, "", "all of it, " * 30, "end"]
    source = parquet(root / "in.parquet", {"text": rows, "key": list(range(40)), "chunk": ["own"] * 40})
    spec = job(engines.engine("llama"), source, root / "out", rows_per_shard=10, id_column="key", on_long="chunk")
    run(spec)
    return spec


@pytest.fixture
def output(finished, tmp_path) -> Path:
    """A copy of the finished job's output."""
    shutil.copytree(finished.output, tmp_path / "out")
    return tmp_path / "out"


def problems(output: Path, **options) -> list[str]:
    with pytest.raises(BadShards) as error:
        verify(output, **options)
    first, *listed = str(error.value).splitlines()
    assert first == f"{output}: {len(listed) - 1} problems:"
    assert options.get("repair") or listed[-1] == ADVICE
    assert error.value.exit_code == 7
    return [line.strip() for line in listed[:-1]]


def only_row(table: pa.Table, place: int) -> pa.Table:
    return table.slice(place, 1)


def set_values(table: pa.Table, name: str, change) -> pa.Table:
    """The table with a column made from its Python values."""
    place = table.schema.get_field_index(name)
    values = change(table.column(name).to_pylist())
    field = table.schema.field(name)
    if pa.types.is_dictionary(field.type):
        index = [OUTCOME_VALUES.to_pylist().index(value) for value in values]
        return table.set_column(
            place, field, pa.DictionaryArray.from_arrays(pa.array(index, pa.int8()), OUTCOME_VALUES)
        )
    return table.set_column(place, field, pa.array(values, field.type))


# --- what passes ----------------------------------------------------------------------------------------------------


def test_a_finished_job_passes_and_its_numbers_are_told(output):
    table = output_table(output)
    found = verify(output)
    assert (found.complete, found.num_shards, found.num_rows, found.num_rows_out) == (True, 4, 40, table.num_rows)
    assert found.num_bytes == sum(path.stat().st_size for path in (output / "data").iterdir())
    assert (found.problems, found.notes) == ((), ())
    assert verification_text(found).splitlines()[1] == (
        "checked    hashes, sizes, schema, row order and count, outcomes, states per row, finite values, tiling, "
        "manifest"
    )


def test_verifying_changes_nothing(output):
    before = snapshot(output)
    verify(output)
    verify(output, repair=True)
    assert snapshot(output) == before


def test_an_unfinished_job_is_correct_so_far(output):
    for path in (data_of(output, 2), commit_path(output / "commits", 2), output / "manifest.json"):
        path.unlink()
    found = verify(output)
    assert not found.complete
    assert found.notes == ("incomplete: shard 2 is missing; run the job again to go on",)
    assert "correct so far, not complete" in verification_text(found)


def test_a_job_that_has_only_begun_is_correct_so_far(output):
    for path in [*(output / "data").iterdir(), *(output / "commits").iterdir(), output / "manifest.json"]:
        path.unlink()
    assert verify(output).notes == ("incomplete: shard 0 is missing; run the job again to go on",)


def test_files_that_no_record_names_are_noted_and_do_no_harm(output):
    shutil.copy(data_of(output, 0), output / "data" / "shard-00000-ffffffff.arrow")
    (output / "data" / "notes.txt").write_text("mine")
    assert verify(output).notes == (
        "2 files in data/ belong to no committed shard (notes.txt, shard-00000-ffffffff.arrow)",
    )


def test_a_source_column_called_chunk_is_no_chunk_number(engines: Engines, finished, tmp_path):
    spec = job(engines.engine("llama"), finished.source.path, tmp_path / "out", carry=("chunk",), limit=9)
    run(spec)
    assert verify(tmp_path / "out").complete
    assert output_table(tmp_path / "out").column("chunk").to_pylist() == ["own"] * 9


def test_a_directory_that_is_no_output_is_refused(tmp_path):
    with pytest.raises(NotAJob) as error:
        verify(tmp_path)
    assert str(error.value) == f"{tmp_path}: not an output directory (it holds no job.json)."


# --- damaged files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 0.3, 0.6, 0.999])
def test_one_flipped_byte_is_found_in_its_shard_wherever_it_is(output, place):
    path = data_of(output, 2)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    (problem,) = problems(output)
    assert problem.startswith(f"shard 2: data/{path.name} has sha256 ")
    assert problem.endswith(f", {record_of(output, 2).sha256[:12]} was written")


def test_a_deleted_file_is_named(output):
    name = data_of(output, 1).name
    data_of(output, 1).unlink()
    assert problems(output) == [f"shard 1: data/{name} is missing"]


def test_a_link_in_the_place_of_a_file_is_named(output, tmp_path):
    path = data_of(output, 1)
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert problems(output) == [f"shard 1: data/{path.name} is missing"]


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_cut_file_is_named_with_both_sizes(output, keep):
    path = data_of(output, 3)
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    found = f"{len(content[:keep]):,}"
    assert problems(output) == [f"shard 3: data/{path.name} has {found} bytes, {len(content):,} were written"]


def test_two_shards_whose_files_were_swapped_are_both_named(output):
    one, other = data_of(output, 0), data_of(output, 1)
    one.rename(output / "data" / "aside")
    other.rename(one)
    (output / "data" / "aside").rename(other)
    assert [problem.split(":")[0] for problem in problems(output)] == ["shard 0", "shard 1"]


def test_every_damaged_shard_is_named_at_once(output):
    for shard in (0, 2, 3):
        data_of(output, shard).unlink()
    assert [problem.split(":")[0] for problem in problems(output)] == ["shard 0", "shard 2", "shard 3"]


# --- files with the right hash and the wrong contents ---------------------------------------------------------------


CONTENTS = {
    "an extra row": (
        lambda table: pa.concat_tables([table, only_row(table, 0)]),
        "its rows are not the source rows that its record says, in order",
    ),
    "a lost row": (lambda table: table.slice(1), "its rows are not the source rows that its record says, in order"),
    "rows in another order": (
        lambda table: pa.concat_tables([only_row(table, 1), only_row(table, 0), table.slice(2)]),
        "its rows are not the source rows that its record says, in order",
    ),
    "another outcome": (
        lambda table: set_values(table, "outcome", lambda values: ["empty", *values[1:]]),
        "row 10 has another number of states than its tokens and outcome say",
    ),
    "a token less": (
        lambda table: set_values(table, "num_tokens", lambda values: [values[0] - 1, *values[1:]]),
        "row 10 has another number of states than its tokens and outcome say",
    ),
    "another length before the cut": (
        lambda table: set_values(table, "num_tokens_original", lambda values: [None, *values[1:]]),
        "tokens before cuts found",
    ),
    "a chunk number": (
        lambda table: set_values(table, "chunk", lambda values: [1, *values[1:]]),
        "chunks are not numbered 0, 1, 2, ...",
    ),
    "no states": (
        lambda table: set_values(table, "hidden_states", lambda values: [None, *values[1:]]),
        "row 10 has another number of states than its tokens and outcome say",
    ),
    "a NaN": (
        lambda table: set_values(
            table, "hidden_states", lambda values: [[[float("nan")] * 64, *values[0][1:]], *values[1:]]
        ),
        "record batch 0 holds values that are not finite",
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_that_are_wrong_are_found_though_hash_and_record_agree(output, name):
    change, expected = CONTENTS[name]
    rewrite_shard(output, 1, change)
    found = problems(output)
    assert any(expected in problem for problem in found)
    assert all(problem.startswith("shard 1: ") for problem in found)


def test_another_schema_is_found_though_hash_and_record_agree(output):
    path = data_of(output, 1)
    with pa.ipc.open_file(path) as file:
        table = file.read_all()
    with pa.ipc.new_file(path, table.schema.remove_metadata()) as file:
        file.write_table(table)
    edit_record(output, 1, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), num_bytes=path.stat().st_size)
    assert f"shard 1: data/{path.name} has another schema than the job" in problems(output)


# --- records and manifest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_row": 11}, "its rows are not the source rows that its record says, in order"),
        ({"num_rows": 9}, "its rows are not the source rows that its record says, in order"),
        ({"num_rows_out": 11}, " rows found, 11 were written"),
        ({"num_tokens": 1}, " tokens found, 1 were written"),
        ({"num_tokens_original": 1}, " tokens before cuts found, 1 were written"),
        ({"outcomes": {"ok": 9, "null": 1}}, "outcomes {'ok': 10} found, {'null': 1, 'ok': 9} were written"),
        ({"last": True}, "its record is wrong about being the last one"),
        ({"num_bytes": 5}, " bytes, 5 were written"),
        ({"sha256": "0" * 64}, ", 000000000000 was written"),
        ({"shard": 2}, "its data name"),
        ({"data": "../job.json"}, "its data name '../job.json' is not one of this shard"),
        ({"extra": 1}, 'unknown key "extra"'),
        ({"num_rows": "ten"}, 'num_rows is "ten", expected a whole number'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_edited_record_is_found_by_its_shard(output, changes, expected):
    edit_record(output, 1, **changes)
    found = problems(output)
    assert any(expected in problem for problem in found)
    assert all(problem.startswith("shard 1: ") for problem in found)


def test_the_last_record_cannot_be_told_that_it_is_not_the_last(output):
    edit_record(output, 3, last=False)
    assert problems(output) == ["shard 3: its record is wrong about being the last one"]


@pytest.mark.parametrize("changes", [{"doubled_bos": 5}, {"overflowed": 5}])
def test_what_only_a_record_knows_is_held_against_the_manifest(output, changes):
    edit_record(output, 1, **changes)
    assert problems(output) == ["manifest.json does not agree with the commit records"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"null"])
def test_a_record_that_is_no_record_is_named(output, content):
    path = commit_path(output / "commits", 1)
    path.write_bytes(content)
    (problem,) = problems(output)
    assert problem.startswith(f"shard 1: {path}: ")


def test_an_edited_manifest_is_found(output):
    path = output / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["totals"]["num_rows"] += 1
    path.write_text(json.dumps(manifest, indent=1))
    assert problems(output) == ["manifest.json does not agree with the commit records"]


def test_a_finished_job_that_lost_a_record_is_not_called_unfinished(output):
    commit_path(output / "commits", 2).unlink()
    assert problems(output) == ["manifest.json says that the job was complete, but shard 2 is missing"]


# --- repair ---------------------------------------------------------------------------------------------------------


def test_repair_moves_bad_shards_aside_and_the_next_run_makes_them_again(finished, tmp_path):
    spec = finished
    output = tmp_path / "out"
    shutil.copytree(spec.output, output)
    whole = snapshot(output)
    data_of(output, 0).unlink()
    damaged = data_of(output, 2)
    damaged.write_bytes(b"ARROW1")
    commit_path(output / "commits", 3).write_bytes(b"{}")
    with pytest.raises(BadShards) as error:
        verify(output, repair=True)
    assert str(error.value).splitlines()[-1] == (
        "Moved aside: shard 0, shard 2, shard 3, manifest.json. Run the job again to make what is missing."
    )
    aside = {path.name.partition("-")[2] for path in (output / "quarantine").iterdir()}
    records = {f"shard-0000{n}.json" for n in (0, 2, 3)}
    assert aside == {"manifest.json", damaged.name, *records}
    assert verify(output).notes[0].startswith("1 files in data/ belong to no committed shard")  # of the record {}

    summary = run(dataclasses.replace(spec, output=str(output)))
    assert (summary.num_shards_made, summary.num_shards_before) == (3, 1)
    assert verify(output).complete
    again = snapshot(output)
    for folder in ("data", "manifest"):
        assert {name: sha for name, sha in again.items() if name.startswith(folder)} == {
            name: sha for name, sha in whole.items() if name.startswith(folder)
        }


def test_repair_of_a_manifest_alone_leaves_the_shards(finished, output):
    before = snapshot(output)
    (output / "manifest.json").write_text("{}")
    problems(output, repair=True)
    assert [path.name.partition("-")[2] for path in (output / "quarantine").iterdir()] == ["manifest.json"]
    assert run(dataclasses.replace(finished, output=str(output))).num_shards_made == 0
    shutil.rmtree(output / "quarantine")
    assert snapshot(output) == before


def test_a_damaged_record_keeps_a_run_from_calling_the_job_complete(engines: Engines, finished, output):
    edit_record(output, 3, last=False)
    with pytest.raises(NotTiled):
        run(dataclasses.replace(finished, output=str(output)))
