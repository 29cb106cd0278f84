"""Planning, status and resume of a job of thousands of shards: files are opened and listed once, nothing is squared.

Counts instead of times; `make long-run` measures a million shards.
"""

import json
import os
import sys
import tracemalloc
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import many_shards
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import extract.manifest
import extract.record_sums
from extract.commits import Commit, commit_path
from extract.jobs import open_job, plan
from extract.runners.local import run
from extract.runners.todo import Stripe, Todo
from extract.status import status
from extract.storage.bucket import Bucket

NUM_SHARDS, LEFT = 3000, 3


@pytest.fixture(scope="module")
def spec(tiny_engine, tmp_path_factory):
    return many_shards.spec_of(tiny_engine, tmp_path_factory.mktemp("many"), NUM_SHARDS)


@pytest.fixture(scope="module")
def directory(spec):
    return many_shards.commit_all_but(LEFT, spec)


@pytest.fixture
def calls(monkeypatch, directory):
    """How often each record is opened, and each directory listed, while a test runs."""
    counted: Counter[str] = Counter()

    def watch(event, arguments):
        if watching and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, os.PathLike)):
            path = os.fspath(arguments[0])
            if path.startswith(str(directory.root)):
                counted[f"{event} {path}"] += 1

    watching = [True]
    sys.addaudithook(watch)  # stays for good, so it is switched off
    yield counted
    watching.clear()


def opened(calls, directory):
    return {path: count for path, count in calls.items() if path.startswith(f"open {directory.commits}/shard-")}


def listings(calls):
    return sum(count for path, count in calls.items() if not path.startswith("open "))


def test_a_plan_opens_no_record(spec, directory, calls):
    assert plan(spec).estimate.num_shards == NUM_SHARDS
    assert not opened(calls, directory)
    assert listings(calls) == 0


def test_a_status_opens_each_record_once_and_lists_once(directory, calls):
    found = status(directory.root)
    assert found.done.num_shards == NUM_SHARDS - LEFT
    assert found.problem == f"shard {NUM_SHARDS - LEFT} is missing"
    assert set(opened(calls, directory).values()) == {1}
    assert listings(calls) <= 2  # commits and, where it is there, tmp


def test_a_status_holds_one_record_at_a_time(directory, monkeypatch):
    """What many records would take is not there at the end of them: a record is 1.5 kB in memory."""
    held = []
    real = extract.record_sums.RecordSums.add

    def add(sums, commit):
        real(sums, commit)
        if commit.shard % 100 == 99:
            held.append(tracemalloc.get_traced_memory()[0])

    monkeypatch.setattr(extract.record_sums.RecordSums, "add", add)
    tracemalloc.start()
    try:
        status(directory.root)
    finally:
        tracemalloc.stop()
    assert len(held) == NUM_SHARDS // 100 - 1
    assert held[-1] - held[0] < 20_000


def test_a_status_of_many_records_says_how_far_it_is(directory, monkeypatch):
    monkeypatch.setattr("extract.status.SAY_EVERY", 1000)
    said = []
    status(directory.root, said.append)
    assert said == ["1,000 commit records read", "2,000 commit records read"]


def test_one_worker_of_many_asks_for_its_own_records_and_lists_nothing(spec, directory, calls):
    job = open_job(spec)
    job.source.close()
    own = Todo(job.plan, directory, Stripe(5, 1000))
    assert (own.done, own.rows_done(), list(own.left())) == ({5, 1005, 2005}, 3, [])
    assert list(Todo(job.plan, directory, Stripe(999, 1000)).left()) == [NUM_SHARDS - 1]
    assert listings(calls) == 0 and not opened(calls, directory)
    few = Todo(job.plan, directory, Stripe(1, 2))
    assert len(few.done) == NUM_SHARDS - LEFT and list(few.left()) == [NUM_SHARDS - 3, NUM_SHARDS - 1]
    assert listings(calls) == 1 and not opened(calls, directory)


def test_a_resume_opens_no_record_before_it_computes(spec, directory, calls, monkeypatch):
    class Begun(Exception):
        """The engine would be loaded now."""

    def begin(*arguments, **options):
        raise Begun

    monkeypatch.setattr("extract.runners.local.load_engine", begin)
    with pytest.raises(Begun):
        run(spec)
    assert not opened(calls, directory)
    assert listings(calls) == 1


def test_a_resume_opens_each_record_once_and_lists_a_few_times(spec, directory, calls):
    from extract.engine.runtimes import load_runtime

    runtime = load_runtime(Path(spec.engine), threads=1)
    calls.clear()
    try:
        assert run(spec, runtime=runtime).num_shards_made == LEFT
        records = opened(calls, directory)
        assert len(records) == NUM_SHARDS
        assert set(records.values()) == {1}
        assert listings(calls) <= 30
        assert json.loads(directory.manifest.read_bytes())["totals"]["num_shards"] == NUM_SHARDS
    finally:
        directory.manifest.unlink(missing_ok=True)
        for shard in range(NUM_SHARDS - LEFT, NUM_SHARDS):
            commit_path(directory.commits, shard).unlink(missing_ok=True)


def test_the_measurement_of_a_million_shards_takes_every_step(tiny_engine, tmp_path, monkeypatch, capsys):
    """With a few, and in this process, whose own memory is not what it is about."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "bench")
    import bookkeeping

    def here(name, folder, engine, num_shards, output):
        spec = replace(many_shards.spec_of(engine, folder, num_shards), output=output)
        return {"seconds": 0.0, **bookkeeping.do_step(name, spec, num_shards)}

    monkeypatch.setattr(bookkeeping, "alone", here)
    monkeypatch.setattr(bookkeeping, "MAX_MB", 1e9)
    monkeypatch.setattr(Bucket, "ask", Bucket.ask)  # a step counts requests
    monkeypatch.setattr(sys, "argv", ["bookkeeping.py", "--shards", "40", "--engine", str(tiny_engine)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert bookkeeping.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["commands"]) == list(bookkeeping.STEPS)
    assert all(figures["peak_mb"] > 1 and figures["requests"] == 0 for figures in found["commands"].values())
    monkeypatch.setattr(bookkeeping, "MAX_MB", 1.0)
    assert bookkeeping.main() == 1


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    strings=some.lists(some.text(max_size=12), min_size=2, max_size=2),
    numbers=some.lists(some.integers(-(2**63), 2**63 - 1), min_size=9, max_size=9),
    outcomes=some.dictionaries(some.text(max_size=8), some.integers(0, 2**62), max_size=3),
    last=some.booleans(),
)
def test_the_entries_of_a_manifest_are_what_json_writes(strings, numbers, outcomes, last):
    names = [name for name, kind in Commit.__annotations__.items() if kind is int]
    values = dict(zip(names, numbers, strict=True))
    commit = Commit(**{**values, "last": last, "data": strings[0], "sha256": strings[1], "outcomes": outcomes})
    table = {key: value for key, value in asdict(commit).items() if key not in ("seconds", "attempt", "worker")}
    expected = json.dumps({"shards": [table, table]}, indent=1, ensure_ascii=False)
    entry = extract.manifest._entry(commit)
    assert f'{{\n "shards": [\n{entry},\n{entry}\n ]\n}}' == expected
