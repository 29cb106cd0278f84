"""Kill the command anywhere: the same command finishes the job, and the result is that of an unbroken run.

Kills are SIGKILL of a real process. Most of them run in forks of a warm process (see `warm_command`), some in a process
of their own, started as a user does.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import crash_rig
import pytest
import warm_command

SEED = 19
NUM_KILLS = 20


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def unbroken(tiny_engine, rows, tmp_path_factory):
    """An output that was made in one go, and the seconds it took."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    warm_command.call("--version")
    clock = time.perf_counter()
    ended = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
    seconds = time.perf_counter() - clock
    assert ended.code == 0, ended.err
    assert crash_rig.num_commits(out) == crash_rig.NUM_SHARDS
    return out, seconds


def check_finished(out: Path, unbroken: Path, before: dict) -> None:
    """The same content, nothing that was committed touched, each row once, nothing else left."""
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    assert crash_rig.stored_keys(out) == [f"row {n}" for n in range(crash_rig.NUM_ROWS)]
    assert crash_rig.names(out) == crash_rig.expected_names(out)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_duplicate_and_rewrite_nothing(
    tiny_engine, rows, unbroken, tmp_path, capsys
):
    """Prints its moments: `20 kills at random moments (seed 19): 0 lost, 0 duplicated, 0 rewritten; ...`.

    A moment is a random shard and a random part of a shard's time after it was committed (or of the start-up), so that
    moments spread over the job whatever else the machine does.
    """
    reference, seconds = unbroken
    draw = random.Random(SEED)
    moments, shards_at_kill, too_late = [], [], 0
    while len(moments) < NUM_KILLS:
        out = tmp_path / f"out-{len(moments)}-{too_late}"
        shard, delay = draw.randrange(-4, crash_rig.NUM_SHARDS), draw.random() * seconds / crash_rig.NUM_SHARDS
        clock = time.perf_counter()
        command = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
        if shard > 0:
            command.until(lambda out=out, shard=shard: crash_rig.num_commits(out) >= shard)
        time.sleep(delay if shard > 0 else (shard + 4) * seconds / 20 + delay)
        ended = command.kill()
        if ended.code == 0:
            too_late += 1
            assert too_late < NUM_KILLS, "most kills come too late to mean anything"
            continue
        assert ended.code == -signal.SIGKILL, ended.err
        moments.append(time.perf_counter() - clock)
        before = crash_rig.committed(out)
        done = crash_rig.num_commits(out)
        shards_at_kill.append(done)

        resumed = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
        assert resumed.code == 0, f"kill at {moments[-1]:.3f} s, {done} shards: {resumed.err}"
        assert resumed.summary["num_shards_before"] == done
        assert resumed.summary["num_shards_made"] == crash_rig.NUM_SHARDS - done
        check_finished(out, reference, before)
        shutil.rmtree(out)
    assert len(set(shards_at_kill)) > NUM_KILLS // 4, "the kills all fell on the same moment"
    shards = ", ".join(map(str, sorted(shards_at_kill)))
    times = ", ".join(f"{moment:.2f}" for moment in sorted(moments))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NUM_KILLS} kills at random moments (seed {SEED}): 0 lost, 0 duplicated, 0 rewritten; "
            f"shards committed when killed: {shards} of {crash_rig.NUM_SHARDS}; "
            f"seconds after the start: {times} of {seconds:.2f}\n"
        )


def test_three_kills_in_a_row_cost_the_shards_in_flight_alone(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    before: dict = {}
    for at_least in (3, 9, 16):
        command = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
        command.until(lambda least=at_least: crash_rig.num_commits(out) >= least)
        assert command.kill().code == -signal.SIGKILL
        now = crash_rig.committed(out)
        assert {name: now[name] for name in before} == before
        before = now
    done = crash_rig.num_commits(out)
    resumed = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
    assert resumed.summary["num_shards_made"] == crash_rig.NUM_SHARDS - done
    check_finished(out, unbroken[0], before)


@pytest.mark.parametrize("at", [1, crash_rig.NUM_SHARDS])
@pytest.mark.parametrize(
    "fault",
    [
        "before the data is published",
        "between data and record",
        "before the record is linked",
        "right after the record is linked",
    ],
)
def test_a_kill_at_each_step_of_the_commit_of_a_shard_is_made_good(fault, at, tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    ended = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out), fault=fault, at=at)
    assert ended.code == -signal.SIGKILL
    done = at if fault == "right after the record is linked" else at - 1
    assert crash_rig.num_commits(out) == done
    before = crash_rig.committed(out)
    resumed = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
    assert resumed.summary["num_shards_made"] == crash_rig.NUM_SHARDS - done
    check_finished(out, unbroken[0], before)


@pytest.mark.parametrize(
    "fault",
    ["before job.json is linked", "between the last record and the manifest", "before the manifest is renamed"],
)
def test_a_kill_at_the_beginning_or_the_end_of_a_job_is_made_good(fault, tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    ended = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out), fault=fault)
    assert ended.code == -signal.SIGKILL
    done = 0 if "job.json" in fault else crash_rig.NUM_SHARDS
    assert crash_rig.num_commits(out) == done
    assert not (out / "manifest.json").exists()
    before = crash_rig.committed(out)
    resumed = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
    assert resumed.summary["num_shards_made"] == crash_rig.NUM_SHARDS - done
    check_finished(out, unbroken[0], before)


def test_a_resume_with_another_token_budget_leaves_no_file_of_the_first_one(tiny_engine, rows, tmp_path):
    out = tmp_path / "out"
    small = ("--max-tokens", 24)
    ended = warm_command.call(
        *crash_rig.arguments(tiny_engine, rows, out, *small), fault="between data and record", at=4
    )
    assert ended.code == -signal.SIGKILL
    (orphan,) = {path.name for path in (out / "data").glob("shard-00003-*")}
    resumed = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
    assert resumed.code == 0, resumed.err
    assert crash_rig.names(out) == crash_rig.expected_names(out)
    assert orphan is not None
    assert crash_rig.stored_keys(out) == [f"row {n}" for n in range(crash_rig.NUM_ROWS)]


def test_what_a_killed_run_has_committed_verifies(tiny_engine, rows, tmp_path):
    out = tmp_path / "out"
    command = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
    command.until(lambda: crash_rig.num_commits(out) >= 5)
    command.kill()
    done = crash_rig.num_commits(out)
    verified = warm_command.call("verify", out, "--json")
    assert verified.code == 0, verified.err
    assert (verified.summary["complete"], verified.summary["num_shards"]) == (False, done)


@pytest.mark.slow
def test_a_process_of_its_own_that_is_killed_twice_is_made_good_by_a_third(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "extract", *crash_rig.arguments(tiny_engine, rows, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before: dict = {}
    for least in (1, 12):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        warm_command.wait_until(lambda least=least: crash_rig.num_commits(out) >= least)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        now = crash_rig.committed(out)
        assert {name: now[name] for name in before} == before
        before = now
    done = crash_rig.num_commits(out)
    assert 12 <= done < crash_rig.NUM_SHARDS
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f'"num_shards_made": {crash_rig.NUM_SHARDS - done},' in ended.stdout
    check_finished(out, unbroken[0], before)
