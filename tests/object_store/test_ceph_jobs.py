"""Jobs through a real store, Ceph's gateway: races, a gateway that is killed and comes back, workers that are killed.

Skipped, with the reason, where its packages are not installed; `make test-distributed` installs them.
"""

import os
import secrets
import threading
import time
from dataclasses import replace

import ceph_rig
import crash_rig
import moto_rig
import object_rig
import pytest
import test_object_commits
import warm_command

from extract.commits import commit_path, committed_shards, read_commit, write_commit
from extract.storage import ObjectPath, locate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(ceph_rig.missing() is not None, reason=str(ceph_rig.missing())),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with ceph_rig.ceph_gateway(tmp_path_factory.mktemp("ceph")) as started:
        moto_rig.create_bucket(started.endpoint, "states")
        yield started


@pytest.fixture
def place(gateway, monkeypatch, tmp_path) -> ObjectPath:
    for name, value in {**moto_rig.KEYS, "AWS_ENDPOINT_URL": gateway.endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EXTRACT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = locate(f"s3://states/{secrets.token_hex(6)}/job")
    assert isinstance(found, ObjectPath)
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def unbroken(tiny_engine, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert warm_command.call(*crash_rig.arguments(tiny_engine, rows, out)).code == 0
    return out


def start(tiny_engine, rows, place, scratch=None, **options):
    """A run in a process of its own; another `scratch` is another machine: it sees no claims."""
    environment = {**os.environ, **({"TMPDIR": str(scratch)} if scratch is not None else {})}
    return warm_command.start(*crash_rig.arguments(tiny_engine, rows, place), environment=environment, **options)


def test_of_sixteen_writers_exactly_one_wins(place):
    for shard in range(5):
        gate, won = threading.Barrier(16), []

        def write(attempt, shard=shard, gate=gate, won=won):
            mine = replace(test_object_commits.COMMIT, shard=shard, data=f"shard-{shard:05d}-x.arrow", attempt=attempt)
            commits = locate(f"{place}/commits")
            gate.wait()
            if write_commit(commits, mine):
                won.append(attempt)

        threads = [threading.Thread(target=write, args=(str(n),)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [read_commit(commit_path(place / "commits", shard)).attempt] == won


def test_the_store_proves_itself(place):
    place.probe()
    assert list(place.walk()) == []


def test_a_job_through_it_gives_what_one_to_a_directory_gives(tiny_engine, rows, unbroken, place):
    ended = start(tiny_engine, rows, place).wait()
    assert ended.code == 0, ended.err
    assert object_rig.content(place) == crash_rig.content(unbroken)


def test_a_gateway_that_is_killed_and_comes_back_costs_no_shard(tiny_engine, rows, unbroken, place, gateway):
    running = start(tiny_engine, rows, place)
    for wanted in (3, 12):
        running.until(lambda wanted=wanted: len(committed_shards(place / "commits")) >= wanted)
        gateway.kill()
        time.sleep(1)
        gateway.start()
    ended = running.wait()
    assert ended.code == 0, ended.err
    assert ended.summary["num_shards_made"] == crash_rig.NUM_SHARDS
    assert object_rig.content(place) == crash_rig.content(unbroken)


def test_machines_that_know_nothing_of_each_other_lose_and_double_nothing(tiny_engine, rows, unbroken, place, tmp_path):
    """Three machines race for every shard; one is killed in the middle."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    machines = [start(tiny_engine, rows, place, folder) for folder in folders]
    machines[0].until(lambda: len(committed_shards(place / "commits")) >= 4)
    machines[0].kill()
    ended = [machine.wait() for machine in machines[1:]]
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    assert object_rig.content(place) == crash_rig.content(unbroken)


def test_a_worker_killed_between_its_file_and_its_record_is_made_good(tiny_engine, rows, unbroken, place):
    killed = start(tiny_engine, rows, place, fault="between data and record", at=3).wait()
    assert killed.code == -9
    ended = start(tiny_engine, rows, place).wait()
    assert ended.code == 0, ended.err
    assert object_rig.content(place) == crash_rig.content(unbroken)
