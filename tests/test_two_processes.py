"""Several processes on one output directory: they share the work, and none needs another to stay alive."""

import json
import signal

import crash_rig
import pytest
import warm_command


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def unbroken(tiny_engine, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert warm_command.call(*crash_rig.arguments(tiny_engine, rows, out)).code == 0
    return out


def check_finished(out, unbroken):
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    assert crash_rig.names(out) == crash_rig.expected_names(out)


def test_two_processes_share_the_shards_and_both_succeed(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    commands = [warm_command.start(*crash_rig.arguments(tiny_engine, rows, out)) for _ in range(2)]
    ended = [command.wait() for command in commands]
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 2
    assert sum(one.summary["num_shards_made"] for one in ended) == crash_rig.NUM_SHARDS
    assert [one.summary["totals"]["num_rows"] for one in ended] == [crash_rig.NUM_ROWS] * 2
    # Not a token went through the model twice.
    assert sum(one.summary["tokens_computed"] for one in ended) == ended[0].summary["totals"]["num_tokens"]
    check_finished(out, unbroken)


def test_one_goes_on_when_the_other_is_killed(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    survivor, victim = (warm_command.start(*crash_rig.arguments(tiny_engine, rows, out)) for _ in range(2))
    victim.until(lambda: crash_rig.num_commits(out) >= 6)
    assert victim.kill().code == -signal.SIGKILL
    before = crash_rig.committed(out)
    ended = survivor.wait()
    assert (ended.code, ended.err) == (0, "")
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    check_finished(out, unbroken)


@pytest.mark.parametrize("fate", ["goes on", "is killed", "is interrupted"])
def test_one_waits_for_the_shard_that_another_holds(fate, tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    slow = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
    slow.until(lambda: crash_rig.num_commits(out) >= 2)
    with slow.held():
        held = crash_rig.num_commits(out)
        other = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
        # What the first one has taken, at most one shard in each stage and queue, is left.
        other.until(lambda: crash_rig.num_commits(out) >= crash_rig.NUM_SHARDS - 7)
        if fate == "is killed":
            slow.signal(signal.SIGKILL)
        elif fate == "is interrupted":
            slow.signal(signal.SIGINT)
    ended, first = other.wait(), slow.wait()
    assert (ended.code, ended.err) == (0, "")
    assert first.code == {"goes on": 0, "is killed": -signal.SIGKILL, "is interrupted": 130}[fate]
    assert ended.summary["num_shards_made"] <= crash_rig.NUM_SHARDS - held
    if fate == "goes on":
        made = ended.summary["num_shards_made"] + first.summary["num_shards_made"]
        assert made == crash_rig.NUM_SHARDS
    check_finished(out, unbroken)


def test_many_processes_may_begin_a_job_at_once(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "not" / "there" / "out"
    commands = [warm_command.start(*crash_rig.arguments(tiny_engine, rows, out)) for _ in range(5)]
    ended = [command.wait() for command in commands]
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 5
    assert sum(one.summary["num_shards_made"] for one in ended) == crash_rig.NUM_SHARDS
    check_finished(out, unbroken)


def test_another_job_is_refused_beside_a_running_one(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    running = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
    running.until(lambda: crash_rig.num_commits(out) >= 1)
    other = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out, "--kind", "last"))
    assert (other.code, other.out, other.err) == (
        5,
        "",
        f'extract: {out}: this directory holds a job whose states.kind is "tokens"; you asked for "last". '
        "Ask for the same again to go on with it, or choose another output directory with -o.\n",
    )
    assert running.wait().code == 0
    check_finished(out, unbroken)


def test_without_locks_work_is_doubled_and_nothing_else(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    commands = [
        warm_command.start(*crash_rig.arguments(tiny_engine, rows, out), fault="without locks") for _ in range(2)
    ]
    ended = [command.wait() for command in commands]
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 2
    assert sum(one.summary["num_shards_made"] for one in ended) == crash_rig.NUM_SHARDS  # each has one winner
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    assert crash_rig.names(out) - {"tmp"} == crash_rig.expected_names(out)


def test_a_kill_without_locks_is_made_good_too(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    arguments = crash_rig.arguments(tiny_engine, rows, out)
    killed = warm_command.start(*arguments, fault="without locks")
    killed.until(lambda: crash_rig.num_commits(out) >= 4)
    killed.kill()
    before = crash_rig.committed(out)
    ended = warm_command.call(*arguments, fault="without locks")
    assert ended.code == 0, ended.err
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    assert crash_rig.content(out) == crash_rig.content(unbroken)


# --- streams of unknown length --------------------------------------------------------------------------------------


def stream_arguments(engine, folder, out):
    return [*crash_rig.arguments(engine, folder, out), "--format", "hf", "--streaming"]


@pytest.fixture(scope="module", params=[97, 100], ids=["ends inside a shard", "ends right after a shard"])
def stream(request, tmp_path_factory):
    """A folder that `datasets` streams, and its number of rows."""
    folder = tmp_path_factory.mktemp("stream")
    lines = [json.dumps({"text": text, "key": f"row {n}"}) for n, text in enumerate(crash_rig.texts(request.param))]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder, request.param


@pytest.fixture(scope="module")
def unbroken_stream(stream, tiny_engine, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken-stream") / "out"
    ended = warm_command.call(*stream_arguments(tiny_engine, stream[0], out))
    assert ended.code == 0, ended.err
    return out


def check_stream(out, unbroken, num_rows):
    check_finished(out, unbroken)
    assert crash_rig.stored_keys(out) == [f"row {n}" for n in range(num_rows)]


def test_a_stream_that_is_killed_inside_a_shard_gives_each_row_once(stream, unbroken_stream, tiny_engine, tmp_path):
    folder, num_rows = stream
    out = tmp_path / "out"
    for least in (3, 11):
        command = warm_command.start(*stream_arguments(tiny_engine, folder, out))
        command.until(lambda least=least: crash_rig.num_commits(out) >= least)
        command.kill()
    before, done = crash_rig.committed(out), crash_rig.num_commits(out)
    ended = warm_command.call(*stream_arguments(tiny_engine, folder, out))
    assert ended.summary["num_shards_made"] == len(list((unbroken_stream / "commits").iterdir())) - done
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    check_stream(out, unbroken_stream, num_rows)


def test_three_processes_on_a_stream_agree_on_where_it_ends(stream, unbroken_stream, tiny_engine, tmp_path):
    folder, num_rows = stream
    out = tmp_path / "out"
    commands = [warm_command.start(*stream_arguments(tiny_engine, folder, out)) for _ in range(3)]
    ended = [command.wait() for command in commands]
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 3
    check_stream(out, unbroken_stream, num_rows)


def test_a_finished_stream_is_not_read_again(stream, unbroken_stream, tiny_engine):
    folder, num_rows = stream
    before = crash_rig.everything(unbroken_stream)
    ended = warm_command.call(*stream_arguments(tiny_engine, folder, unbroken_stream))
    assert (ended.code, ended.summary["num_shards_made"]) == (0, 0)
    assert ended.summary["totals"]["num_rows"] == num_rows
    assert crash_rig.everything(unbroken_stream) == before
