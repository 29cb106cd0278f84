"""A disk that is too small, fills up or cannot be written: exit code, whole message, and that the job goes on after it.

The full disk is a tmpfs of a few megabytes, the read-only one a bind mount; both need root, and a container that lets
root mount.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import crash_rig
import pytest
import warm_command

from extract.estimate import DiskTooSmall
from extract.publishing import ReserveReached
from extract.runners.local import run
from extract.settings import parse
from extract.spec import JobSpec
from extract.store import CannotWrite

DISK_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def runtime(tiny_engine):
    from extract.engine.runtimes import load_runtime

    return load_runtime(tiny_engine, threads=1)


@pytest.fixture(scope="module")
def unbroken(tiny_engine, rows, runtime, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    run(spec_of(tiny_engine, rows, out), runtime=runtime)
    return out


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """A mount point, while the block runs; skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none") as disk:
        yield disk


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """The directory, where nobody can write, not even root."""
    with mounted(path, "--bind", str(path)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(path)], check=True)
        yield


def spec_of(engine: Path, rows: Path, out: Path, **states: object) -> JobSpec:
    table = {
        "source": {"path": str(rows), "id_column": "key"},
        "states": {"rows_per_shard": crash_rig.ROWS_PER_SHARD, "reserve_bytes": 0, **states},
        "run": {"threads": 1},
        "engine": str(engine),
        "output": str(out),
    }
    return parse(JobSpec, table, "test")


def fill(disk: Path, leave: int) -> Path:
    """Fill a disk but for some bytes, also while others write to it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > leave:
            file.write(bytes(min(free - leave, 2**16)))
    return ballast


def check_goes_on(engine: Path, rows: Path, out: Path, runtime: object, unbroken: Path, before: dict) -> None:
    done = len(before) // 2
    summary = run(spec_of(engine, rows, out), runtime=runtime)
    assert summary.num_shards_made == crash_rig.NUM_SHARDS - done
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    assert crash_rig.names(out) == crash_rig.expected_names(out)


# --- refused before anything is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_job_that_will_not_fit_is_refused_before_weights_load(command, tiny_engine, rows, small_disk, monkeypatch):
    import extract.engine.runtimes
    from extract.jobs import plan

    monkeypatch.setattr(extract.engine.runtimes, "load_runtime", None)
    fill(small_disk, leave=200_000)
    out = small_disk / "out"
    with pytest.raises(DiskTooSmall) as refused:
        {"plan": plan, "run": run}[command](spec_of(tiny_engine, rows, out, reserve_bytes=100_000))
    facts = refused.value.facts
    assert 200_000 < facts["needed"] < 2_000_000
    assert facts["free"] <= 200_000
    assert refused.value.exit_code == 8
    assert str(refused.value) == (
        f"{out}: the job needs about {facts['needed']:,} bytes more and leaves 100,000 free, but only "
        f"{facts['free']:,} are free. Choose another disk with -o, a smaller output (--dtype int8, --kind last), or "
        "lower the reserve."
    )


def test_what_is_committed_already_needs_no_room_again(tiny_engine, rows, small_disk, runtime, unbroken):
    out = small_disk / "out"
    shutil.copytree(unbroken, out)
    (out / "manifest.json").unlink()
    from extract.commits import commit_path

    commit_path(out / "commits", 24).unlink()
    before = crash_rig.committed(out)
    fill(small_disk, leave=200_000)
    check_goes_on(tiny_engine, rows, out, runtime, unbroken, before)


# --- a disk that fills up during the run ----------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sequential"])
def test_a_disk_that_fills_up_during_the_run_ends_it_cleanly(
    overlap, tiny_engine, rows, small_disk, runtime, unbroken, monkeypatch
):
    out = small_disk / "out"
    filled = []

    class Filling:
        contract = runtime.contract
        arithmetic = runtime.arithmetic

        def hidden_states(self, batch, kind):
            if crash_rig.num_commits(out) >= 5 and not filled:
                filled.append(fill(small_disk, leave=4096))
            return runtime.hidden_states(batch, kind)

    spec = spec_of(tiny_engine, rows, out)
    spec = parse(JobSpec, {**_table(spec), "run": {"threads": 1, "overlap": overlap}}, "test")
    from extract.store import DiskFull

    with pytest.raises(DiskFull) as refused:
        run(spec, runtime=Filling())
    path = refused.value.facts["path"]
    assert path.is_relative_to(out)
    assert refused.value.exit_code == 8
    assert str(refused.value) == (
        f"{path}: no space left ({refused.value.facts['free']:,} bytes free). What is committed stays: make room, then "
        "run the same command again."
    )
    assert not list((out / "tmp").iterdir())
    before = crash_rig.committed(out)
    assert 5 <= len(before) // 2 < crash_rig.NUM_SHARDS
    filled[0].unlink()
    check_goes_on(tiny_engine, rows, out, runtime, unbroken, before)


def test_a_full_disk_at_the_command_line_is_one_message_and_exit_code_8(tiny_engine, rows, small_disk):
    out = small_disk / "out"
    command = warm_command.start(*crash_rig.arguments(tiny_engine, rows, out))
    command.until(lambda: crash_rig.num_commits(out) >= 2)
    with command.held():
        fill(small_disk, leave=0)
    ended = command.wait()
    assert (ended.code, ended.out) == (8, "")
    lines = ended.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"extract: {out}/")
    assert lines[0].endswith(" bytes free). What is committed stays: make room, then run the same command again.")


def test_the_reserve_stops_a_run_before_the_disk_is_full(tiny_engine, rows, small_disk, runtime, unbroken):
    out, reserve = small_disk / "out", 1_000_000
    filled = []

    class Filling:
        contract = runtime.contract
        arithmetic = runtime.arithmetic

        def hidden_states(self, batch, kind):
            if crash_rig.num_commits(out) >= 5 and not filled:
                filled.append(fill(small_disk, leave=reserve - 4096))
            return runtime.hidden_states(batch, kind)

    with pytest.raises(ReserveReached) as stopped:
        run(spec_of(tiny_engine, rows, out, reserve_bytes=reserve), runtime=Filling())
    assert stopped.value.exit_code == 8
    free = stopped.value.facts["free"]
    assert reserve - 500_000 < free < reserve
    assert str(stopped.value) == (
        f"{out}: {free:,} bytes free, less than the reserve of 1,000,000. What is committed stays: make room (or lower "
        "states.reserve_bytes), then run the same command again."
    )
    before = crash_rig.committed(out)
    check_goes_on(tiny_engine, rows, out, runtime, unbroken, before)  # with a lower reserve


@pytest.mark.parametrize("limit", [10_000, 2_000], ids=["in a shard", "in job.json"])
def test_a_limit_on_the_size_of_a_file_is_named(limit, tiny_engine, rows, tmp_path):
    out = tmp_path / "out"
    ended = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out), file_bytes=limit)
    assert (ended.code, ended.out) == (8, "")
    path, _, rest = ended.err.removeprefix("extract: ").partition(": ")
    assert Path(path).is_relative_to(out)
    problem, _, advice = rest.partition(" (ulimit -f) or the file system can hold (")
    assert problem == "a file larger than this process may write"
    assert advice.endswith(" bytes free). What is committed stays: make room, then run the same command again.\n")
    assert ended.err.count("\n") == 1
    assert not [path for path in out.rglob("*") if path.name.startswith(".job") or path.parent.name == "tmp"]
    assert warm_command.call(*crash_rig.arguments(tiny_engine, rows, out)).code == 0


# --- a disk that nobody can write ------------------------------------------------------------------------------------


def test_an_output_directory_that_cannot_be_written_is_named(tiny_engine, rows, tmp_path):
    parent = tmp_path / "parent"
    with read_only(_made(parent)):
        out = parent / "out"
        ended = warm_command.call(*crash_rig.arguments(tiny_engine, rows, out))
        assert (ended.code, ended.out, ended.err) == (
            2,
            "",
            f"extract: {out}: cannot be written: Read-only file system. Choose another place with -o.\n",
        )


def test_an_unfinished_job_on_a_read_only_disk_says_so(tiny_engine, rows, runtime, unbroken, tmp_path):
    from extract.commits import commit_path

    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    commit_path(out / "commits", 3).unlink()
    with read_only(out), pytest.raises(CannotWrite) as refused:
        run(spec_of(tiny_engine, rows, out), runtime=runtime)
    assert refused.value.exit_code == 2
    assert str(refused.value) == (
        f"{out / '.claims'}: cannot be written: Read-only file system. Choose another place with -o."
    )


def test_a_finished_job_on_a_read_only_disk_is_complete(tiny_engine, rows, unbroken, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    with read_only(out):
        assert run(spec_of(tiny_engine, rows, out)).num_shards_made == 0


def test_an_output_that_is_a_file_is_named(tiny_engine, rows, tmp_path):
    out = tmp_path / "out"
    out.write_text("a file")
    with pytest.raises(CannotWrite) as refused:
        run(spec_of(tiny_engine, rows, out))
    assert str(refused.value) == (f"{out}: cannot be written: File exists. Choose another place with -o.")
    assert out.read_text() == "a file"


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _table(spec: JobSpec) -> dict:
    from extract.spec import as_table

    return as_table(spec)
