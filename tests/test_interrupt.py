"""SIGINT and SIGTERM: a clean stop with exit code 130, at any moment, and the same command goes on."""

import os
import signal
import subprocess
import sys
import threading
import time

import crash_rig
import pytest
import warm_command

from extract.runners.local import StopRequested, run
from extract.settings import parse
from extract.spec import JobSpec

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def unbroken(tiny_engine, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert warm_command.call(*crash_rig.arguments(tiny_engine, rows, out)).code == 0
    return out


def message(out, done: object) -> str:
    return (
        f"extract: interrupted: {done} shards are committed in {out}; what was in flight was dropped. "
        "Run the same command again to go on.\n"
    )


@BOTH
@pytest.mark.parametrize("twin", ["--overlap", "--sequential"])
def test_a_signal_drops_the_shard_in_flight_and_nothing_else(number, twin, tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    command = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out, twin))
    command.until(lambda: crash_rig.num_commits(out) >= 4)
    command.signal(number)
    ended = command.wait()
    done = crash_rig.num_commits(out)
    assert 4 <= done < crash_rig.NUM_SHARDS
    assert (ended.code, ended.out, ended.err) == (130, "", message(out, f"{done} of {crash_rig.NUM_SHARDS}"))
    assert not list((out / "tmp").iterdir())
    before = crash_rig.committed(out)
    assert len(list((out / "data").iterdir())) == done
    resumed = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out, twin))
    assert resumed.summary["num_shards_made"] == crash_rig.NUM_SHARDS - done
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    assert crash_rig.names(out) == crash_rig.expected_names(out)


def test_two_signals_stop_at_once_and_without_a_traceback(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    command = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
    command.until(lambda: crash_rig.num_commits(out) >= 4)
    command.signal(signal.SIGINT)
    command.signal(signal.SIGTERM)
    command.signal(signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130
    assert ended.err.count("\n") == 1 and ended.err.startswith("extract: interrupted"), ended.err
    assert warm_command.call(*crash_rig.arguments(tiny_engine, rows, out)).code == 0
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    assert crash_rig.names(out) == crash_rig.expected_names(out)


def test_a_signal_before_the_first_shard_is_a_clean_stop_too(tiny_engine, rows, tmp_path):
    out = tmp_path / "out"
    command = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
    command.until(lambda: (out / "job.json").exists())
    command.signal(signal.SIGTERM)
    ended = command.wait()
    assert (ended.code, ended.err) == (130, message(out, f"0 of {crash_rig.NUM_SHARDS}"))


def spec_of(engine, rows, out, **run_table) -> JobSpec:
    table = {
        "source": {"path": str(rows), "id_column": "key"},
        "states": {"rows_per_shard": crash_rig.ROWS_PER_SHARD, "reserve_bytes": 0},
        "run": {"threads": 1, **run_table},
        "engine": str(engine),
        "output": str(out),
    }
    return parse(JobSpec, table, "test")


@BOTH
@pytest.mark.parametrize("place", ["open_job", "prepare", "estimate", "complete"])
def test_a_signal_at_any_other_time_stops_the_same_way(place, number, tiny_engine, rows, tmp_path, monkeypatch):
    import extract.runners.session as session
    from extract.engine.runtimes import load_runtime

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), number)
        return real(*arguments, **options)

    real = getattr(session, place)
    monkeypatch.setattr(session, place, interrupted)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    out = tmp_path / "out"
    with pytest.raises(StopRequested) as stopped:
        run(spec_of(tiny_engine, rows, out), runtime=load_runtime(tiny_engine, threads=1))
    done = {"open_job": "0", "prepare": "0", "estimate": "0 of 25", "complete": "25 of 25"}[place]
    assert f"extract: {stopped.value}\n" == message(out, done)
    assert stopped.value.exit_code == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_run_outside_of_the_main_thread_leaves_signals_alone(tiny_engine, rows, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(run(spec_of(tiny_engine, rows, tmp_path / "out"))))
    thread.start()
    while thread.is_alive():
        assert signal.getsignal(signal.SIGINT) is before
        time.sleep(0.01)
    thread.join()
    assert summaries[0].complete


def test_a_second_signal_does_not_wait_for_a_read_that_hangs(tiny_engine, rows, tmp_path, monkeypatch):
    import extract.pipeline
    from extract.engine.runtimes import load_runtime

    monkeypatch.setattr(extract.pipeline, "GRACE_S", 0.2)
    reading, released, ended = threading.Event(), threading.Event(), threading.Event()
    real = extract.pipeline.windows_of

    def hangs(shard, *arguments):
        if shard == 3:
            reading.set()
            released.wait()
        yield from real(shard, *arguments)

    monkeypatch.setattr(extract.pipeline, "windows_of", hangs)

    def interrupt():
        assert reading.wait(60)
        for _ in range(2):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        if not ended.wait(60):
            released.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    out = tmp_path / "out"
    try:
        with pytest.raises(StopRequested) as stopped:
            run(spec_of(tiny_engine, rows, out), runtime=load_runtime(tiny_engine, threads=1))
        assert not released.is_set(), "it waited for the read"
    finally:
        ended.set()
        released.set()
        thread.join()
    assert f"extract: {stopped.value}\n" == message(out, f"{crash_rig.num_commits(out)} of 25")


@pytest.mark.slow
def test_a_process_of_its_own_stops_with_130(tiny_engine, rows, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "extract", *crash_rig.arguments(tiny_engine, rows, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    warm_command.wait_until(lambda: crash_rig.num_commits(out) >= 2)
    process.send_signal(signal.SIGTERM)
    written, said = process.communicate(timeout=240)
    done = crash_rig.num_commits(out)
    assert (process.returncode, written, said) == (130, "", message(out, f"{done} of {crash_rig.NUM_SHARDS}"))
