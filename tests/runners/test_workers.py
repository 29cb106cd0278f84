"""`extract run --workers`: the bytes of one process, whoever dies; one progress, one end, one word on Ctrl-C."""

import random
import re
import signal
import time

import crash_rig
import psutil
import pytest
import runner_rig
import warm_command
from runner_rig import check_finished, with_faults, workers_of

from extract.engine.contract import read_contract
from extract.runners.patience import Patience
from extract.runners.workers import MAX_DEATHS, TooManyWorkers, cards_of_all, threads_of_each


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def command(tiny_engine, rows, out):
    """`extract run --workers 2` of a job of 25 shards."""
    return crash_rig.arguments(tiny_engine, rows, out, "--workers", 2)


def test_two_workers_give_the_bytes_of_one_process_and_share_the_work(command, out, unbroken):
    ended = warm_command.call(*command, prepare=with_faults(slow=0.05))
    assert (ended.code, ended.err) == (0, "")
    check_finished(out, unbroken)
    summary = ended.summary
    parts = summary["workers"]
    assert [part["worker"] for part in parts] == [0, 1]
    assert [part["num_starts"] for part in parts] == [1, 1]
    assert summary["num_shards_made"] == sum(part["num_shards"] for part in parts) == crash_rig.NUM_SHARDS
    assert sum(part["num_rows"] for part in parts) == crash_rig.NUM_ROWS
    assert sum(part["num_tokens"] for part in parts) == summary["tokens_computed"] == summary["totals"]["num_tokens"]
    for part in parts:
        assert part["num_shards"] > 0
        assert part["tokens_per_s"] == pytest.approx(part["num_tokens"] / part["seconds"], rel=0.01)
        assert 0 < part["idle_share"] < 1


def test_progress_is_one_line_for_all_workers(command, out):
    ended = warm_command.call(*(one for one in command if one not in ("--quiet", "--json")))
    lines = ended.err.splitlines()
    assert lines[0] == "reading the layout of the source"
    assert lines[1].startswith("starting 2 workers")
    assert len(lines) == 3
    assert lines[2].startswith("98 of 98 rows (100 %) | ")
    assert ended.out.count("\nworker ") == 2


@pytest.mark.slow
def test_workers_that_are_killed_cost_the_shards_in_flight_and_are_replaced(command, out, unbroken):
    draw = random.Random(7)
    running = warm_command.start(*command, prepare=with_faults(slow=0.25))
    for least in (2, 7, 13):
        running.until(lambda least=least: crash_rig.num_commits(out) >= least)
        before = crash_rig.committed(out)
        draw.choice(workers_of(running.pid)).kill()
    ended = running.wait()
    assert ended.code == 0, ended.err
    check_finished(out, unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    assert sum(part["num_starts"] for part in ended.summary["workers"]) == 5
    assert ended.summary["num_shards_made"] == crash_rig.NUM_SHARDS


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed_and_the_same_command_goes_on(command, out, unbroken):
    for least in (3, 9):
        running = warm_command.start(*command, prepare=with_faults(slow=0.2))
        running.until(lambda least=least: crash_rig.num_commits(out) >= least)
        workers = workers_of(running.pid)
        assert len(workers) == 2
        running.kill()
        gone, alive = psutil.wait_procs(workers, timeout=30)
        assert (len(gone), alive) == (2, [])
    before = crash_rig.committed(out)
    assert warm_command.call(*command).code == 0
    check_finished(out, unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before


def test_a_shard_that_kills_its_workers_fails_alone_and_the_rest_is_made(command, out, unbroken):
    ended = warm_command.call(*command, prepare=with_faults(dies=[5]))
    assert (ended.code, ended.out) == (6, "")
    message = ended.err.splitlines()[-1]
    assert message.startswith(f"extract: {out}: shards are missing, for workers died: shard 5: worker ")
    assert message.endswith(" died (signal 9). Run again to try them again.")
    assert {path.stem for path in (out / "commits").glob("shard-*")} == {
        f"shard-{shard:05d}" for shard in range(crash_rig.NUM_SHARDS) if shard != 5
    }
    assert not (out / "manifest.json").exists()
    assert warm_command.call(*command).summary["num_shards_made"] == 1
    check_finished(out, unbroken)


def test_a_worker_that_hangs_is_ended_and_its_shards_made_again(command, out, unbroken, tmp_path):
    faults = with_faults(hangs=[5], once=str(tmp_path / "once"))
    talking = [one for one in command if one != "--quiet"]
    ended = warm_command.call(*talking, "--stall-timeout", 3, prepare=faults)
    assert ended.code == 0, ended.err
    assert re.search(r"^worker \d was ended: no progress for 3 s; in flight: .*\b5\b", ended.err, re.MULTILINE)
    check_finished(out, unbroken)


@pytest.mark.parametrize(
    ("loading", "has_work", "silent_s", "reason"),
    [
        (True, False, 10.1, "its engine was not loaded after 10 s"),
        (True, False, 9.9, None),
        (False, True, 3.1, "no progress for 3 s"),
        (False, True, 2.9, None),
        (False, False, 1e9, None),
    ],
)
def test_who_has_nothing_to_do_may_be_silent(loading, has_work, silent_s, reason):
    patience = Patience(boot_timeout_s=10, stall_timeout_s=3)
    assert patience.lost_with(loading=loading, has_work=has_work, silent_s=silent_s) == reason


def test_a_shard_that_raises_is_tried_twice_by_all_workers_together(command, out):
    ended = warm_command.call(*command, prepare=with_faults(breaks=[5], slow=0.05))
    assert (ended.code, ended.err) == (
        6,
        f"extract: {out}: 1 of 25 shards failed twice and are missing: shard 5: RuntimeError: a bit flipped. "
        "Run again to try them again.\n",
    )
    assert crash_rig.num_commits(out) == crash_rig.NUM_SHARDS - 1


def test_workers_that_never_get_ready_are_given_up(command, out):
    ended = warm_command.call(*command, prepare=with_faults(loading="dies"))
    assert (ended.code, ended.out) == (6, "")
    assert ended.err.startswith(f"extract: {out}: shards are missing, for workers died: shard 0: no worker was left; ")
    assert crash_rig.num_commits(out) == 0


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_a_signal_stops_every_worker_and_two_stop_them_at_once(number, times, command, out, unbroken):
    running = warm_command.start(*command, prepare=with_faults(slow=0.2, hangs=[20] if times == 2 else []))
    running.until(lambda: crash_rig.num_commits(out) >= (20 if times == 2 else 4))
    workers = workers_of(running.pid)
    clock = time.monotonic()
    for _ in range(times):
        running.signal(number)
        time.sleep(0.5)
    ended = running.wait()
    seconds = time.monotonic() - clock
    done = crash_rig.num_commits(out)
    assert (ended.code, ended.out, ended.err) == (
        130,
        "",
        f"extract: interrupted: {done} of 25 shards are committed in {out}; what was in flight was dropped. "
        "Run the same command again to go on.\n",
    )
    assert not any(runner_rig.is_worker(worker) for worker in workers)
    if times == 2:  # one of them hangs in a read, and is not waited for
        assert seconds < 4
    else:
        assert not list((out / "tmp").iterdir())
    assert warm_command.call(*command).code == 0
    check_finished(out, unbroken)


def test_an_error_of_one_worker_that_nothing_can_help_ends_the_run_in_its_words(command, out, tiny_engine, tmp_path):
    import shutil

    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    weights = max(engine.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    ended = warm_command.call(*(str(engine) if one == str(tiny_engine) else one for one in command))
    assert (ended.code, ended.out) == (4, "")
    assert ended.err.startswith(f"extract: {engine}: engine file {weights.name} has size ")


def test_a_finished_job_starts_no_worker(tiny_engine, rows, unbroken):
    before = crash_rig.everything(unbroken)
    ended = warm_command.call(
        *crash_rig.arguments(tiny_engine, rows, unbroken, "--workers", 2), prepare=with_faults(loading="dies")
    )
    assert (ended.code, ended.summary["num_shards_made"], ended.summary["workers"]) == (0, 0, [])
    assert crash_rig.everything(unbroken) == before


class TestShares:
    def test_threads_are_shared_out_unless_they_are_asked_for(self, tiny_engine, monkeypatch):
        contract = read_contract(tiny_engine)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
        assert [threads_of_each(None, contract, workers) for workers in (1, 3, 16, 40)] == [16, 5, 1, 1]
        assert threads_of_each(7, contract, 4) == 7

    def test_each_worker_sees_one_card_of_those_that_the_run_may_use(self, tiny_engine, monkeypatch):
        contract = on_a_card(read_contract(tiny_engine))
        monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert cards_of_all(contract, 2) == ["0", "1"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,GPU-7f")
        assert cards_of_all(contract, 3) == ["5", "2", "GPU-7f"]
        assert threads_of_each(None, contract, 3) is None

    def test_more_workers_than_cards_are_refused(self, tiny_engine, monkeypatch):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        with pytest.raises(TooManyWorkers) as refused:
            cards_of_all(on_a_card(read_contract(tiny_engine)), 2)
        assert str(refused.value) == (
            "2 workers were asked for; this engine needs a card for each, and there are 1. Start one worker a card."
        )


def on_a_card(contract):
    from dataclasses import replace

    return replace(
        contract,
        device=replace(contract.device, type="cuda"),
        runtime=replace(contract.runtime, decoder="transformers"),
    )


def test_a_shard_is_given_up_after_a_few_deaths():
    assert MAX_DEATHS == 3
