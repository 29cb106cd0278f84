"""A worker that is handed shards one by one runs one loop over them: the next is read while one is computed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import crash_rig
import job_rig
import pytest

from extract import pipeline
from extract.commits import commit_path
from extract.errors import EngineRefused
from extract.job import JobDirectory, prepare
from extract.jobs import open_job
from extract.runners.outstanding import Outstanding
from extract.runners.ray_actor import Loaded, ShardMaker
from extract.spec import StatesSpec

LONG_S = 60
DTYPE = StatesSpec().dtype


@pytest.fixture
def directory(tmp_path):
    return JobDirectory(tmp_path / "out")


@pytest.fixture
def maker(tiny_engine, rows, directory):
    """A worker that has loaded its engine."""
    spec = job_rig.job(
        tiny_engine, rows, directory.root, rows_per_shard=crash_rig.ROWS_PER_SHARD, id_column="key", dtype=DTYPE
    )
    job = open_job(spec)
    prepare(directory.root, job.plan.record)
    found = ShardMaker(spec, threads=1)
    assert isinstance(found.load(), Loaded)
    yield found
    found.stop()


@pytest.fixture
def hand(maker):
    """Hand out shards as a driver does, without waiting for them."""
    with ThreadPoolExecutor(2) as calls:

        def hand(*shards):
            handed = []
            for shard in shards:
                handed.append(calls.submit(maker.make, shard))
                until(lambda shard=shard: shard in maker._outstanding.shards() or handed[-1].done())
            return handed

        yield hand
        maker.stop()


def until(happened):
    for _ in range(LONG_S * 100):
        if happened():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


@pytest.fixture
def reading(monkeypatch):
    """Shards whose reading has begun; what a test puts in for one of them is raised there."""
    began, faults, real = [], {}, pipeline.windows_of

    def windows_of(shard, *arguments):
        began.append(shard)
        if shard in faults:
            raise faults.pop(shard)
        return real(shard, *arguments)

    monkeypatch.setattr(pipeline, "windows_of", windows_of)
    return (began, faults)


@pytest.fixture
def computing(monkeypatch):
    """Set, and forward passes go on; they wait at first."""
    go_on, real = threading.Event(), pipeline.pack

    def pack(*arguments):
        assert go_on.wait(LONG_S)
        return real(*arguments)

    monkeypatch.setattr(pipeline, "pack", pack)
    yield go_on
    go_on.set()


def test_the_next_shard_is_read_while_one_is_computed(hand, reading, computing, directory, unbroken):
    first, second = hand(3, 4)
    until(lambda: reading[0] == [3, 4])
    computing.set()
    assert [call.result(LONG_S).commit.shard for call in (first, second)] == [3, 4]
    assert (third := hand(5)[0].result(LONG_S)).won
    assert third.counts.rows == 12
    made = {path.name: path.read_bytes() for path in directory.data.iterdir()}
    expected = {path.name: path.read_bytes() for path in (unbroken / "data").iterdir()}
    assert len(made) == 3
    assert made.items() <= expected.items()


def test_a_shard_that_breaks_is_answered_alone_and_the_next_is_made(hand, reading):
    reading[1][3] = RuntimeError("a bit flipped")
    first, second = hand(3, 4)
    assert (first.result(LONG_S).reason, first.result().commit) == ("RuntimeError: a bit flipped", None)
    assert second.result(LONG_S).won
    assert hand(3)[0].result(LONG_S).won


def test_an_error_that_names_no_shard_is_the_answer_for_all(hand, reading, computing):
    error = EngineRefused(message="the device is gone")
    reading[1][4] = error
    first, second = hand(3, 4)
    computing.set()
    assert first.result(LONG_S).won  # it was before that
    assert second.result(LONG_S).error is error
    reading[1][6] = error
    assert [call.result(LONG_S).error for call in hand(6)] == [error]


def test_what_was_committed_while_it_waited_is_not_computed(hand, directory, unbroken, reading):
    record = commit_path(directory.commits, 3)
    record.write_bytes(commit_path(unbroken / "commits", 3).read_bytes())
    outcome = hand(3)[0].result(LONG_S)
    assert (outcome.commit.shard, outcome.won, reading[0]) == (3, False, [])


def test_stop_drops_what_is_in_flight_and_leaves_nobody_waiting(hand, maker, reading, computing, directory):
    handed = hand(3, 4)
    until(lambda: reading[0] == [3, 4])
    maker.stop()
    assert not handed[0].done()
    computing.set()
    assert [call.result(LONG_S).reason for call in handed] == ["asked to stop"] * 2
    assert maker.make(7).reason == "asked to stop"
    assert not directory.tmp.exists() or not list(directory.tmp.iterdir())


class TestOutstanding:
    def test_a_pass_waits_for_the_next_shard_until_it_is_left(self):
        found, seen = Outstanding(), []
        handed = found.new_pass()
        thread = threading.Thread(target=lambda: seen.extend(handed))
        thread.start()
        with ThreadPoolExecutor(2) as calls:
            answers = []
            for shard in (5, 2):
                answers.append(calls.submit(found.wait_for, shard))
                until(lambda: len(seen) == len(answers))
            found.answer(2, "two")
            found.answer(5, "five")
            assert [answer.result() for answer in answers] == ["five", "two"]
        handed.leave()
        thread.join(LONG_S)
        assert (thread.is_alive(), seen) == (False, [5, 2])

    def test_a_new_pass_begins_with_what_has_no_answer_yet(self):
        found = Outstanding()
        with ThreadPoolExecutor(2) as calls:
            for number, shard in enumerate((5, 2), 1):
                calls.submit(found.wait_for, shard)
                until(lambda number=number: len(found.shards()) == number)
            handed = found.new_pass()
            assert [next(handed), next(handed)] == [5, 2]
            found.answer(5, "broken")
            assert next(found.new_pass()) == 2
            found.answer_all("broken")

    def test_a_shard_that_is_handed_in_again_comes_again(self):
        found = Outstanding()
        handed = found.new_pass()
        for answer in ("broken", "made"):
            with ThreadPoolExecutor(1) as calls:
                waiting = calls.submit(found.wait_for, 5)
                assert next(handed) == 5
                found.answer(5, answer)
                assert waiting.result() == answer

    def test_once_closed_there_is_no_work_and_one_answer(self):
        found = Outstanding()
        found.close("the end")
        assert not found.wait_for_work()
        assert list(found.new_pass()) == []
        assert found.wait_for(5) == "the end"
