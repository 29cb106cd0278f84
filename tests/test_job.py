"""`job.json`: written once, read back as it was, and the gate that every resume passes."""

import base64
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as some

import extract.job
from extract.errors import ResumeRefused
from extract.job import (
    JobDirectory,
    JobRecord,
    NotAJob,
    OtherJob,
    check_same,
    first_difference,
    job_id,
    prepare,
    read_job,
)
from extract.spec import JobSpec, SourceSpec, StatesSpec

IDENTITY = {
    "checkpoint": "c" * 64,
    "source": {"num_rows": 10, "files": [{"name": "a.parquet", "size": 5}]},
    "text": {"on_long": "truncate"},
}
RECORD = JobRecord(
    spec=JobSpec(source=SourceSpec(path="rows.parquet"), states=StatesSpec(rows_per_shard=4)),
    identity=IDENTITY,
    fingerprint={"files": [{"name": "a.parquet", "size": 5, "mtime_ns": 1}]},
    num_rows=10,
    rows_per_shard=4,
    schema=pa.schema([pa.field("row", pa.int64())], metadata={"extract.job": "x"}),
    contract={"engine_id": "e" * 64},
)


def test_a_prepared_directory_holds_the_job_and_folders_for_its_shards(tmp_path):
    root = tmp_path / "a" / "b"
    directory = prepare(root, RECORD)
    assert sorted(path.name for path in root.iterdir()) == ["commits", "data", "job.json"]
    assert directory == JobDirectory(root)


def test_a_job_is_read_back_as_it_was_written(tmp_path):
    prepare(tmp_path, RECORD)
    stored = read_job(tmp_path)
    assert {name: getattr(stored, name) for name in RECORD.__dataclass_fields__} == {
        name: getattr(RECORD, name) for name in RECORD.__dataclass_fields__
    }
    assert stored.schema.equals(RECORD.schema, check_metadata=True)
    assert stored.directory == JobDirectory(tmp_path)


def test_preparing_again_writes_nothing(tmp_path):
    prepare(tmp_path, RECORD)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    prepare(tmp_path, replace(RECORD, contract={"engine_id": "elsewhere"}))
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before


def test_another_identity_is_refused_and_the_field_named(tmp_path):
    prepare(tmp_path, RECORD)
    identity = {**IDENTITY, "source": {"num_rows": 11, "files": IDENTITY["source"]["files"]}}
    with pytest.raises(OtherJob) as refused:
        prepare(tmp_path, replace(RECORD, identity=identity))
    assert refused.value.exit_code == 5
    assert str(refused.value) == (
        f"{tmp_path}: this directory holds a job whose source.num_rows is 10; you asked for 11. "
        "Ask for the same again to go on with it, or choose another output directory with -o."
    )


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ResumeRefused) as refused:
        prepare(tmp_path, RECORD)
    assert str(refused.value) == (
        f"{tmp_path}: the directory is not empty and holds no job.json. Choose another output directory with -o."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_hidden_files_do_not_make_a_directory_foreign(tmp_path):
    (tmp_path / ".job.json.123-dead").write_text("{")
    prepare(tmp_path, RECORD)
    assert read_job(tmp_path).job_id == job_id(IDENTITY)


def test_a_directory_that_another_process_prepares_right_now_is_not_foreign(tmp_path, monkeypatch):
    """Between the look for job.json and the look for other files, the other process wrote both."""
    other = tmp_path / "other"
    prepare(other, RECORD)
    real = Path.iterdir

    def overtaken(path):
        if path == tmp_path / "out" and not (path / "job.json").exists():
            shutil.copytree(other, path, dirs_exist_ok=True)
        return real(path)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "iterdir", overtaken)
    prepare(tmp_path / "out", RECORD)


def test_many_may_prepare_the_same_directory_at_once(tmp_path):
    for round_number in range(20):
        start, failed = threading.Barrier(8), []

        def race(root=tmp_path / str(round_number), start=start, failed=failed):
            start.wait()
            try:
                prepare(root, RECORD)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert sorted(path.name for path in (tmp_path / str(round_number)).iterdir()) == ["commits", "data", "job.json"]


# --- damaged --------------------------------------------------------------------------------------------------------


def refusal(root: Path) -> str:
    with pytest.raises(NotAJob) as refused:
        read_job(root)
    assert refused.value.exit_code == 2
    return str(refused.value)


def damage(root: Path, **changes: object) -> None:
    prepare(root, RECORD)
    path = root / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def test_a_directory_that_is_not_there_is_no_output(tmp_path):
    assert refusal(tmp_path / "gone") == f"{tmp_path / 'gone'}: not an output directory (no such directory)."


def test_a_directory_without_a_job_is_no_output(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path}: not an output directory (it holds no job.json)."


def test_a_job_of_another_version_is_named(tmp_path):
    damage(tmp_path, version=2)
    assert refusal(tmp_path) == f"{tmp_path}: not an output directory (job.json is version 2, 1 expected)."


def test_a_job_of_absurd_size_is_not_read(tmp_path, monkeypatch):
    prepare(tmp_path, RECORD)
    monkeypatch.setattr(extract.job, "MAX_JOB_BYTES", 10)
    size = (tmp_path / "job.json").stat().st_size
    assert refusal(tmp_path) == f"{tmp_path}: not an output directory (job.json has {size:,} bytes, absurdly many)."


def test_a_job_cut_short_is_named(tmp_path):
    prepare(tmp_path, RECORD)
    content = (tmp_path / "job.json").read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 3):
        (tmp_path / "job.json").write_bytes(content[:length])
        assert refusal(tmp_path).startswith(f"{tmp_path}: job.json cannot be read (JSONDecodeError: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "no base64!"},
        {"schema": base64.b64encode(b"no schema").decode()},
        {"rows_per_shard": None},
        {"spec": {"source": {"path": "rows.parquet", "pathh": 1}}},
        {"spec": {}},
        {"spec": []},
    ],
    ids=lambda changes: next(iter(changes.items())).__repr__()[:30],
)
def test_a_job_with_nonsense_in_it_is_refused_as_none(changes, tmp_path):
    damage(tmp_path, **changes)
    assert refusal(tmp_path).startswith(f"{tmp_path}: job.json cannot be read (")


@pytest.mark.parametrize("content", ["[]", "null", "1", '"text"', "[" * 100_000])
def test_json_that_is_no_job_is_refused_as_none(content, tmp_path):
    prepare(tmp_path, RECORD)
    (tmp_path / "job.json").write_text(content)
    assert refusal(tmp_path).startswith(f"{tmp_path}: job.json cannot be read (")


# --- differences ----------------------------------------------------------------------------------------------------

json_values = some.recursive(
    some.integers() | some.text(max_size=3) | some.text("x", min_size=50),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(json_values)
def test_a_value_does_not_differ_from_itself(value):
    assert first_difference(value, json.loads(json.dumps(value))) is None


@given(json_values, json_values)
def test_two_values_are_equal_or_differ_in_a_field_and_its_values_are_told_apart(one, other):
    difference = first_difference({"top": one}, {"top": other})
    assert (difference is None) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))
    if difference is not None:
        field, found, expected = difference
        assert field.startswith("top")
        assert found != expected


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ("a.b[1]", "2", "3")),
        ({"a": [1]}, {"a": [1, 2]}, ("a", "[1]", "[1, 2]")),
        ({"a": 1, "b": 2}, {"b": 3, "a": 1}, ("b", "2", "3")),
        ({"a": 1}, {"a": 1, "new": 2}, ("new", "null", "2")),
        ({"a": 1, "old": 2}, {"a": 1}, ("old", "2", "null")),
        ({"a": "x" * 80}, {"a": "y"}, ("a", '"' + "x" * 56 + "...", '"y"')),
        ({"a": "x" * 80 + "1"}, {"a": "x" * 80 + "2"}, ("a", "..." + "x" * 20 + '1"', "..." + "x" * 20 + '2"')),
        ({"a": 1, "old": None}, {"a": 1, "new": None}, None),
    ],
)
def test_the_first_difference_is_named_with_both_values(found, expected, difference):
    assert first_difference(found, expected) == difference


def test_only_the_identity_decides_whether_a_job_is_the_same(tmp_path):
    stored = read_job(prepare(tmp_path, RECORD).root)
    check_same(stored, replace(RECORD, fingerprint={}, contract={}, schema=pa.schema([])))
    with pytest.raises(OtherJob):
        check_same(stored, replace(RECORD, identity={**IDENTITY, "checkpoint": "d" * 64}))


# --- rows and shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "num_shards"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (None, None)])
def test_shards_cover_the_rows_and_an_empty_source_has_one(num_rows, num_shards):
    assert replace(RECORD, num_rows=num_rows).num_shards == num_shards


def test_a_row_is_in_the_shard_that_its_position_says():
    assert [RECORD.shard_of(row) for row in (0, 3, 4, 9, 10, -1)] == [0, 0, 1, 2, None, None]
    assert replace(RECORD, num_rows=None).shard_of(10**12) == 10**12 // 4


def test_selected_rows_are_counted_and_keep_their_positions():
    source = SourceSpec(path="rows.parquet", rows="2-4,8,100-104")
    record = replace(RECORD, spec=replace(RECORD.spec, source=source), num_rows=9)
    assert record.rows_at(0, 9).tolist() == [2, 3, 4, 8, 100, 101, 102, 103, 104]
    assert record.rows_at(2, 5).tolist() == [4, 8, 100]
    assert [record.position_of(index) for index in (0, 3, 8)] == [2, 8, 104]
    assert [record.shard_of(row) for row in (2, 8, 100, 104, 5, 105)] == [0, 0, 1, 2, None, None]
