"""Workers that know nothing of each other: every N-th shard each, whatever is missing is said, and one end for all."""

import crash_rig
import job_rig
import psutil
import pytest
import warm_command
from runner_rig import check_finished, with_faults, workers_of

from extract.runners.finalizing import ranges
from extract.runners.stripes import run_stripe


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def worker(tiny_engine, rows, out):
    """Run worker I of N to its end."""

    def run(index, count, *options, **settings):
        stripe = ["--worker-index", index, "--worker-count", count]
        return warm_command.call(*crash_rig.arguments(tiny_engine, rows, out, *stripe, *options), **settings)

    return run


def shards_in(out):
    return sorted(int(path.stem.removeprefix("shard-")) for path in (out / "commits").glob("shard-*.json"))


def test_a_worker_makes_every_nth_shard_and_nothing_else(worker, out):
    ended = worker(1, 3)
    assert (ended.code, ended.err) == (0, "")
    assert shards_in(out) == list(range(1, 25, 3))
    summary = ended.summary
    assert (summary["num_shards"], summary["num_shards_made"], summary["num_shards_left"]) == (8, 8, 0)
    assert summary["num_rows"] == 8 * crash_rig.ROWS_PER_SHARD
    assert not (out / "manifest.json").exists()


def test_a_missing_worker_is_told_by_its_shards_and_made_good(worker, out, unbroken):
    for index in (0, 2, 3):
        assert worker(index, 4).code == 0
    ended = warm_command.call("finalize", out)
    assert (ended.code, ended.out, ended.err) == (
        6,
        "",
        f"extract: {out}: 6 of 25 shards are missing: 1, 5, 9, 13, 17, 21. "
        "Start the workers again that should make them.\n",
    )
    assert not (out / "manifest.json").exists()
    assert worker(1, 4).summary["num_shards_made"] == 6
    ended = warm_command.call("finalize", out, "--json")
    assert ended.summary["totals"]["num_rows"] == crash_rig.NUM_ROWS
    check_finished(out, unbroken)
    before = crash_rig.everything(out)
    assert warm_command.call("finalize", out).code == 0
    assert crash_rig.everything(out) == before


def test_another_number_of_threads_or_of_workers_gives_the_same_bytes(worker, out, unbroken):
    assert worker(0, 2, "--threads", 2).code == 0
    before = crash_rig.committed(out)
    assert worker(0, 3, "--threads", 1).summary["num_shards_before"] > 0
    assert worker(1, 2, "--threads", 1).code == 0
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    assert warm_command.call("finalize", out).code == 0
    check_finished(out, unbroken)


def test_a_stripe_may_have_several_processes_of_its_own(worker, out):
    summary = worker(0, 2, "--workers", 2).summary
    assert shards_in(out) == list(range(0, 25, 2))
    assert sum(part["num_shards"] for part in summary["workers"]) == 13


def test_a_worker_leaves_what_another_process_holds_and_says_so(worker, tiny_engine, rows, out, tmp_path):
    arguments = crash_rig.arguments(tiny_engine, rows, out, "--sequential", "--workers", 2)
    other = warm_command.start(*arguments, prepare=with_faults(hangs=[6], once=str(tmp_path / "once")))
    other.until(lambda: crash_rig.num_commits(out) == crash_rig.NUM_SHARDS - 1)
    summary = worker(0, 2).summary
    processes = workers_of(other.pid)
    other.kill()
    assert (summary["num_shards_before"], summary["num_shards_made"], summary["num_shards_left"]) == (12, 0, 1)
    psutil.wait_procs(processes, timeout=60)
    assert worker(0, 2).summary["num_shards_made"] == 1


def test_a_worker_whose_part_is_done_loads_no_engine(tiny_engine, rows, out, monkeypatch):
    spec = job_rig.job(tiny_engine, rows, out, rows_per_shard=crash_rig.ROWS_PER_SHARD)
    assert run_stripe(spec, 1, 2).num_shards_made == 12
    monkeypatch.setattr("extract.runners.local.load_engine", None)
    summary = run_stripe(spec, 1, 2)
    assert (summary.num_shards_made, summary.num_shards_before) == (0, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--worker-index", 4, "--worker-count", 4],
            "--worker-index is 4, expected 0 to 3 with --worker-count 4.",
        ),
        (
            ["--worker-index", 4],
            "--worker-index and --worker-count go together. See extract run --help",
        ),
        (["--stall-timeout", 5], "--stall-timeout goes with --workers 2 or more, or --on ray. See extract run --help"),
        (
            ["--workers", 2, "--boot-timeout", 0],
            "--boot-timeout is more than 0 seconds. See extract run --help",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message, tiny_engine, rows, out):
    ended = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out, *options))
    assert (ended.code, ended.err) == (2, f"extract: {message}\n")
    assert not out.exists()


def test_a_stream_of_unknown_length_has_no_stripes(tiny_engine, out, tmp_path):
    (tmp_path / "stream").mkdir()
    (tmp_path / "stream" / "train.jsonl").write_text('{"text": "a", "key": "b"}\n')
    stream = ["--format", "hf", "--streaming", "--worker-index", 0, "--worker-count", 2]
    ended = warm_command.call(*crash_rig.arguments(tiny_engine, tmp_path / "stream", out, *stream))
    assert ended.code == 2
    assert ended.err.endswith(
        "extract: --worker-index needs a source of known length, this one is a stream. Give --limit ROWS, do without "
        "--streaming, or start the plain command several times.\n"
    )


def test_a_list_of_shards_is_short():
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10"
    assert ranges(range(0, 200, 2)).endswith("98, and more")
