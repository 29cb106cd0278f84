"""A job to an object store gives what the same job gives to a directory, and can be worked with like it."""

import json
import os
import shutil

import crash_rig
import job_rig
import numpy as np
import object_rig
import pytest
import warm_command
from command_line import extract

from extract.commits import commit_path
from extract.derivation import Change, derive
from extract.job import ForeignDirectory, OtherJob
from extract.output import open_output
from extract.pipeline import Worker
from extract.reprocessing import respec
from extract.spec import JobSpec
from extract.status import status
from extract.storage import ObjectPath, locate
from extract.verification import BadShards, verify


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def embedded(tiny_engine, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("embedded") / "out"
    job_rig.run(spec_of(tiny_engine, rows, out))
    return out


def spec_of(engine, rows, out, **settings) -> JobSpec:
    options = {"rows_per_shard": crash_rig.ROWS_PER_SHARD, "id_column": "key", **settings}
    return job_rig.job(engine, rows, out, **options)


def test_a_job_to_an_object_store_gives_what_one_to_a_directory_gives(tiny_engine, rows, embedded, address, place):
    summary = job_rig.run(spec_of(tiny_engine, rows, address))
    assert (summary.path, summary.num_shards_made) == (address, crash_rig.NUM_SHARDS)
    assert object_rig.content(place) == crash_rig.content(embedded)


def test_it_reads_back_like_a_directory(tiny_engine, rows, embedded, address):
    job_rig.run(spec_of(tiny_engine, rows, address))
    remote, local = open_output(address), open_output(embedded)
    assert remote.table().equals(local.table())
    assert np.array_equal(remote.states(57), local.states(57))
    assert verify(locate(address)).complete
    assert status(locate(address)).complete


def test_a_finished_job_is_seen_from_listings_alone(tiny_engine, rows, address, place, monkeypatch):
    job_rig.run(spec_of(tiny_engine, rows, address))
    before, reads = object_rig.everything(place), reads_from_now(monkeypatch)
    assert job_rig.run(spec_of(tiny_engine, rows, address)).num_shards_made == 0
    assert status(place).complete
    assert set(reads) == {"job.json", "manifest.json"}
    assert object_rig.everything(place) == before


def reads_from_now(monkeypatch) -> list[str]:
    """Names of the objects that are read from now on, as they are."""
    reads = []
    for name in ("read_bytes", "chunks"):
        real = getattr(ObjectPath, name)
        monkeypatch.setattr(ObjectPath, name, lambda path, real=real: reads.append(path.name) or real(path))
    return reads


def test_a_job_is_gone_on_with_from_listings_alone(tiny_engine, rows, address, place, monkeypatch):
    """Until it computes: a million records would be a million requests."""
    job_rig.run(spec_of(tiny_engine, rows, address))
    commit_path(place / "commits", 7).unlink()
    (place / "manifest.json").unlink()
    reads = reads_from_now(monkeypatch)
    seen = []
    monkeypatch.setattr("extract.runners.local.Worker", lambda **parts: seen.extend(reads) or Worker(**parts))
    assert job_rig.run(spec_of(tiny_engine, rows, address)).num_shards_made == 1
    assert {name for name in seen if not name.startswith(".probe")} == {"job.json"}


@pytest.mark.parametrize("damage", [lambda content: content[:-600], lambda content: b"{", lambda content: b"\xff" * 40])
def test_a_status_asks_for_the_records_that_a_damaged_manifest_does_not_give(
    damage, tiny_engine, rows, address, place, monkeypatch
):
    job_rig.run(spec_of(tiny_engine, rows, address))
    whole = status(place).done
    (place / "manifest.json").replace(damage((place / "manifest.json").read_bytes()))
    reads = reads_from_now(monkeypatch)
    assert status(place).done == whole
    assert sum(name.startswith("shard-") for name in reads) in range(1, crash_rig.NUM_SHARDS + 1)


def test_a_status_counts_no_record_that_is_gone_though_the_manifest_repeats_it(tiny_engine, rows, address, place):
    job_rig.run(spec_of(tiny_engine, rows, address))
    commit_path(place / "commits", 7).unlink()
    found = status(place)
    assert (found.done.num_shards, found.problem) == (crash_rig.NUM_SHARDS - 1, "shard 7 is missing")


def test_an_interrupted_job_goes_on_where_it_was(tiny_engine, rows, embedded, address, place):
    partial = job_rig.run(spec_of(tiny_engine, rows, address))
    assert partial.complete
    for shard in (0, 7, 24):
        commit_path(place / "commits", shard).unlink()
    (place / "manifest.json").unlink()
    kept = object_rig.attempts(place)
    assert job_rig.run(spec_of(tiny_engine, rows, address)).num_shards_made == 3
    assert object_rig.content(place) == crash_rig.content(embedded)
    assert kept.items() <= object_rig.attempts(place).items()


def test_a_local_output_copied_to_a_store_is_gone_on_with_from_elsewhere(
    tiny_engine, rows, embedded, address, place, tmp_path, monkeypatch
):
    """Half of a job in a directory, the rest in the store, from another folder, home and machine's cache."""
    half = tmp_path / "half"
    shutil.copytree(embedded, half)
    (half / "manifest.json").unlink()
    for shard in range(12, 25):
        record = commit_path(half / "commits", shard)
        (half / "data" / json.loads(record.read_bytes())["data"]).unlink()
        record.unlink()
    object_rig.upload(half, place)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(elsewhere))
    assert job_rig.run(spec_of(tiny_engine, rows, address)).num_shards_made == 13
    assert object_rig.content(place) == crash_rig.content(embedded)
    back = object_rig.download(place, tmp_path / "back")
    assert verify(back).complete
    assert job_rig.run(spec_of(tiny_engine, rows, back)).num_shards_made == 0


def test_another_job_is_refused_there(tiny_engine, rows, address):
    job_rig.run(spec_of(tiny_engine, rows, address, limit=8))
    with pytest.raises(OtherJob):
        job_rig.run(spec_of(tiny_engine, rows, address, limit=9))


def test_a_prefix_that_holds_something_else_is_refused(tiny_engine, rows, address, place):
    (place / "chapters" / "thesis.tex").replace(b"years of work")
    with pytest.raises(ForeignDirectory):
        job_rig.run(spec_of(tiny_engine, rows, address))
    assert [path.name for path, _ in place.walk()] == ["thesis.tex"]


def test_what_another_process_tries_there_does_not_make_a_prefix_foreign(tiny_engine, rows, address, place):
    (place / ".probe-0123456789abcdef").replace(b"first")
    assert job_rig.run(spec_of(tiny_engine, rows, address, limit=8)).complete


def test_verify_names_a_shard_with_a_flipped_byte_and_repair_makes_it_anew(tiny_engine, rows, embedded, address, place):
    job_rig.run(spec_of(tiny_engine, rows, address))
    damaged = sorted((place / "data").iterdir(), key=str)[3]
    content = damaged.read_bytes()
    damaged.replace(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    open_output(address).row(0)
    with pytest.raises(BadShards) as refused:
        verify(place)
    assert f"shard 3: data/{damaged.name} has sha256" in str(refused.value)
    with pytest.raises(BadShards):
        verify(place, repair=True)
    assert sorted(path.name.partition("-")[2] for path in (place / "quarantine").iterdir()) == sorted(
        ["manifest.json", "shard-00003.json", damaged.name]
    )
    assert job_rig.run(spec_of(tiny_engine, rows, address)).num_shards_made == 1
    assert object_rig.content(place) == crash_rig.content(embedded)
    assert verify(place).complete


def test_another_output_is_made_from_it_and_into_a_store(tiny_engine, rows, embedded, address, place, tmp_path):
    job_rig.run(spec_of(tiny_engine, rows, address))
    derive(place, tmp_path / "pooled", Change(pool="last"))
    derive(embedded, tmp_path / "expected", Change(pool="last"))
    derive(place, place.parent / "pooled", Change(pool="last"))
    assert crash_rig.content(tmp_path / "pooled") == crash_rig.content(tmp_path / "expected")
    assert object_rig.content(place.parent / "pooled") == crash_rig.content(tmp_path / "expected")


def test_some_rows_are_computed_again(tiny_engine, rows, address, place, tmp_path):
    job_rig.run(spec_of(tiny_engine, rows, address))
    job_rig.run(respec(place, locate(str(tmp_path / "again")), shards="3,5"))
    again = job_rig.output_table(tmp_path / "again")
    assert again["row"].to_pylist() == [*range(12, 16), *range(20, 24)]


def test_the_local_folder_holds_nothing_when_a_job_is_done(tiny_engine, rows, address, tmp_path):
    job_rig.run(spec_of(tiny_engine, rows, address))
    files = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    assert [path.name for path in files] == [".claims"]


def test_the_cache_of_shards_is_bounded(tiny_engine, rows, address, tmp_path, monkeypatch):
    job_rig.run(spec_of(tiny_engine, rows, address))
    output = open_output(address)
    largest = max(commit.num_bytes for commit in output.shards)
    monkeypatch.setenv("EXTRACT_CACHE_BYTES", str(3 * largest))
    assert len(list(output)) == crash_rig.NUM_ROWS
    kept = list((tmp_path / "cache" / "shards").iterdir())
    assert 0 < sum(path.stat().st_size for path in kept) <= 3 * largest


def test_inspect_shows_a_row_of_it(tiny_engine, rows, address, capsys):
    job_rig.run(spec_of(tiny_engine, rows, address))
    ended = extract(capsys, "inspect", address, "--row", "7")
    assert ended.code == 0 and "row 7" in ended.out
    assert extract(capsys, "status", address).code == 0


def test_two_processes_of_one_machine_share_the_work(tiny_engine, rows, embedded, address, place):
    arguments = crash_rig.arguments(tiny_engine, rows, address, "--dtype", "float32")
    first, second = (warm_command.start(*arguments, environment=os.environ) for _ in range(2))
    ended = [first.wait(), second.wait()]
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    assert sum(one.summary["num_shards_made"] for one in ended) == crash_rig.NUM_SHARDS
    assert object_rig.content(place) == crash_rig.content(embedded)


def test_it_is_exported_and_drawn_like_a_directory(tiny_engine, rows, address, capsys, tmp_path):
    job_rig.run(spec_of(tiny_engine, rows, address, kind="last"))
    assert extract(capsys, "export", address, "--to", "npy", "-o", tmp_path / "npy").code == 0
    assert extract(capsys, "report", address, "-o", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").stat().st_size > 1000
