"""The run in one process: both twins give the same bytes; what breaks one shard or one pass does not end the job."""

import io
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import crash_rig
import numpy as np
import pytest

from extract.commits import commit_path, read_commits
from extract.completion import ABANDONED_S, Strays, complete
from extract.engine.contract import PassOutOfMemory
from extract.job import JobDirectory, read_job
from extract.manifest import NotTiled
from extract.output import open_output
from extract.pipeline import ahead
from extract.progress import Progress
from extract.runners.local import SomeShardsFailed, run
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec

NUM_ROWS, NUM_SHARDS = 40, 10


@pytest.fixture(scope="module")
def runtime(tiny_engine):
    from extract.engine.runtimes import load_runtime

    return load_runtime(tiny_engine, threads=1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    texts = [f"{n} " + text for n, text in enumerate(crash_rig.texts(NUM_ROWS))]
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet", texts)


@pytest.fixture(scope="module")
def spec(tiny_engine, rows):
    return JobSpec(
        source=SourceSpec(path=str(rows), id_column="key"),
        engine=str(tiny_engine),
        states=StatesSpec(dtype="float32", rows_per_shard=4, reserve_bytes=0),  # float16 would round differences away
        run=RunSpec(threads=1),
    )


@pytest.fixture(scope="module")
def unbroken(spec, runtime, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    run(replace(spec, output=str(out)), runtime=runtime)
    return out


class Unreliable:
    """A runtime with faults: `fault(shard)` is called before each pass, and may raise.

    A shard is told by its ids: each sequence of these tests is in one shard alone.
    """

    def __init__(self, runtime, out: Path, unbroken: Path, fault) -> None:
        self.contract, self.arithmetic = runtime.contract, runtime.arithmetic
        self._runtime, self._fault = runtime, fault
        self._shard_of = {}
        table = open_output(unbroken).table(["row", "input_ids"])
        for row, ids in zip(table.column("row").to_pylist(), table.column("input_ids").to_pylist(), strict=True):
            assert tuple(ids) not in self._shard_of
            self._shard_of[tuple(ids)] = row // 4
        self.passes: list[tuple[int, int]] = []  # shard, tokens

    def hidden_states(self, batch, kind):
        shard = self._shard_of[tuple(batch.input_ids[: batch.cu_seqlens[1]].tolist())]
        self.passes.append((shard, batch.num_tokens))
        self._fault(shard)
        return self._runtime.hidden_states(batch, kind)


def twins(spec: JobSpec) -> list[JobSpec]:
    return [replace(spec, run=replace(spec.run, overlap=overlap)) for overlap in (True, False)]


BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sequential"])


# --- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "last", "mean", "first"])
def test_the_sequential_twin_gives_the_same_bytes(kind, spec, runtime, tmp_path):
    spec = replace(spec, states=replace(spec.states, kind=kind))
    for twin, name in zip(twins(spec), ("overlapped", "sequential"), strict=True):
        assert run(replace(twin, output=str(tmp_path / name)), runtime=runtime).complete
    assert crash_rig.content(tmp_path / "overlapped") == crash_rig.content(tmp_path / "sequential")


@pytest.mark.parametrize(("window_tokens", "num_batches"), [(1, 22), (128, 7), (2**16, 1)])
def test_both_twins_cut_long_shards_into_the_same_windows(
    window_tokens, num_batches, spec, runtime, tmp_path, monkeypatch
):
    """From one pass a window to one window of many passes."""
    monkeypatch.setattr("extract.pipeline.WINDOW_TOKENS", window_tokens)
    spec = replace(spec, states=replace(spec.states, rows_per_shard=40), run=replace(spec.run, max_tokens=48))
    for twin, name in zip(twins(spec), ("overlapped", "sequential"), strict=True):
        run(replace(twin, output=str(tmp_path / name)), runtime=runtime)
    assert crash_rig.content(tmp_path / "overlapped") == crash_rig.content(tmp_path / "sequential")
    found = open_output(tmp_path / "overlapped")
    assert found.shard(0).num_batches == num_batches
    assert [row.columns["id"] for row in found] == [f"row {n}" for n in range(NUM_ROWS)]


def test_a_run_again_elsewhere_gives_the_same_bytes(spec, runtime, unbroken, tmp_path):
    run(replace(spec, output=str(tmp_path / "out")), runtime=runtime)
    assert crash_rig.content(tmp_path / "out") == crash_rig.content(unbroken)


@pytest.mark.parametrize("max_tokens", [1, 33, 512])
def test_another_token_budget_gives_equal_content_within_rounding(max_tokens, spec, runtime, unbroken, tmp_path):
    out = tmp_path / "out"
    run(replace(spec, output=str(out), run=replace(spec.run, max_tokens=max_tokens)), runtime=runtime)
    found, expected = open_output(out), open_output(unbroken)
    columns = ["row", "id", "outcome", "num_tokens", "input_ids"]
    assert found.table(columns) == expected.table(columns)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.states - other.states).max() <= 1e-5 * np.abs(other.states).max()


# --- a shard that breaks --------------------------------------------------------------------------------------------


@BOTH
def test_a_shard_that_breaks_twice_is_named_and_the_rest_is_made(overlap, spec, runtime, unbroken, tmp_path):
    out = tmp_path / "out"
    spec = replace(spec, output=str(out), run=replace(spec.run, overlap=overlap))

    def fault(shard):
        if shard == 3:
            raise RuntimeError("a bit flipped")

    broken = Unreliable(runtime, out, unbroken, fault)
    with pytest.raises(SomeShardsFailed) as failed:
        run(spec, runtime=broken)
    assert failed.value.exit_code == 6
    assert str(failed.value) == (
        f"{out}: 1 of 10 shards failed twice and are missing: shard 3: RuntimeError: a bit flipped. "
        "Run again to try them again."
    )
    assert sum(shard == 3 for shard, _ in broken.passes) == 2
    assert sorted(path.stem for path in (out / "commits").glob("*.json")) == [
        f"shard-{shard:05d}" for shard in range(NUM_SHARDS) if shard != 3
    ]
    assert not (out / "manifest.json").exists()
    assert not list((out / "tmp").iterdir())
    before = crash_rig.committed(out)
    again = run(spec, runtime=runtime)
    assert (again.num_shards_before, again.num_shards_made) == (9, 1)
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before


@BOTH
def test_a_shard_that_breaks_once_is_made_in_the_same_run(overlap, spec, runtime, unbroken, tmp_path):
    out = tmp_path / "out"
    faults = [RuntimeError("a bit flipped")]

    def fault(shard):
        if shard == 3 and faults:
            raise faults.pop()

    said = io.StringIO()
    summary = run(
        replace(spec, output=str(out), run=replace(spec.run, overlap=overlap)),
        runtime=Unreliable(runtime, out, unbroken, fault),
        progress=Progress(stream=said),
    )
    assert (summary.complete, summary.num_shards_made) == (True, NUM_SHARDS)
    assert "shard 3 broke: RuntimeError: a bit flipped" in said.getvalue().splitlines()
    assert crash_rig.content(out) == crash_rig.content(unbroken)
    assert crash_rig.names(out) == crash_rig.expected_names(out)


def test_every_shard_may_break_and_all_are_named_up_to_five(spec, runtime, unbroken, tmp_path):
    out = tmp_path / "out"

    def fault(shard):
        raise RuntimeError(f"no luck with {shard}")

    with pytest.raises(SomeShardsFailed) as failed:
        run(replace(spec, output=str(out)), runtime=Unreliable(runtime, out, unbroken, fault))
    named = "; ".join(f"shard {shard}: RuntimeError: no luck with {shard}" for shard in range(5))
    assert str(failed.value) == (
        f"{out}: 10 of 10 shards failed twice and are missing: {named}. Run again to try them again."
    )


@BOTH
def test_a_writer_that_breaks_is_blamed_on_its_shard(overlap, spec, runtime, tmp_path, monkeypatch):
    import extract.publishing

    out = tmp_path / "out"
    real = extract.publishing.ShardWriter.write

    def write(writer, *arguments):
        if writer.path.name.startswith("shard-00004."):
            raise ValueError("cannot write that")
        real(writer, *arguments)

    monkeypatch.setattr(extract.publishing.ShardWriter, "write", write)
    with pytest.raises(SomeShardsFailed) as failed:
        run(replace(spec, output=str(out), run=replace(spec.run, overlap=overlap)), runtime=runtime)
    assert str(failed.value) == (
        f"{out}: 1 of 10 shards failed twice and are missing: shard 4: ValueError: cannot write that. "
        "Run again to try them again."
    )
    assert not list((out / "tmp").iterdir())


@BOTH
def test_a_reader_that_breaks_is_blamed_on_its_shard(overlap, spec, runtime, tmp_path, monkeypatch):
    import extract.pipeline

    out = tmp_path / "out"
    real = extract.pipeline.windows_of

    def windows_of(shard, *arguments):
        if shard == 9:
            raise ValueError("cannot read that")
        yield from real(shard, *arguments)

    monkeypatch.setattr(extract.pipeline, "windows_of", windows_of)
    with pytest.raises(SomeShardsFailed) as failed:
        run(replace(spec, output=str(out), run=replace(spec.run, overlap=overlap)), runtime=runtime)
    assert str(failed.value) == (
        f"{out}: 1 of 10 shards failed twice and are missing: shard 9: ValueError: cannot read that. "
        "Run again to try them again."
    )
    assert len(read_commits(out / "commits")) == 9


# --- a pass that does not fit ---------------------------------------------------------------------------------------


@BOTH
def test_a_lack_of_memory_halves_the_token_budget_once_and_says_so(overlap, spec, runtime, unbroken, tmp_path):
    out = tmp_path / "out"
    errors = [PassOutOfMemory(tokens="64", sequences="4", device="a small card")]

    def fault(shard):
        if shard == 2 and errors:
            raise errors.pop()

    said = io.StringIO()
    summary = run(
        replace(spec, output=str(out), run=RunSpec(threads=1, max_tokens=64, overlap=overlap)),
        runtime=Unreliable(runtime, out, unbroken, fault),
        progress=Progress(stream=said),
    )
    assert (summary.complete, summary.num_shards_made) == (True, NUM_SHARDS)
    assert (
        "a forward pass of 64 tokens in 4 sequences ran out of memory on a small card. Run again with a smaller "
        "--max-tokens. Going on with 32 tokens a pass."
    ) in said.getvalue().splitlines()
    budgets = [commit.worker["max_tokens"] for commit in read_commits(out / "commits")]
    assert budgets == [64] * 2 + [32] * 8
    assert [row.columns["id"] for row in open_output(out)] == [f"row {n}" for n in range(NUM_ROWS)]


@BOTH
@pytest.mark.parametrize("second", [2, 6], ids=["of the same shard", "of a later shard"])
def test_a_second_lack_of_memory_ends_the_run_with_what_to_do(second, overlap, spec, runtime, unbroken, tmp_path):
    out = tmp_path / "out"
    spec = replace(spec, output=str(out), run=RunSpec(threads=1, max_tokens=64, overlap=overlap))
    left = [2, second]

    def fault(shard):
        if shard in left:
            left.remove(shard)
            raise PassOutOfMemory(tokens="32", sequences="2", device="a small card")

    with pytest.raises(PassOutOfMemory) as failed:
        run(
            spec, runtime=Unreliable(runtime, out, unbroken, fault), progress=Progress(stream=io.StringIO(), quiet=True)
        )
    assert failed.value.exit_code == 8
    assert str(failed.value) == (
        "a forward pass of 32 tokens in 2 sequences ran out of memory on a small card. "
        "Run again with a smaller --max-tokens."
    )
    assert [commit.shard for commit in read_commits(out / "commits")] == list(range(second))
    again = run(replace(spec, run=RunSpec(threads=1, max_tokens=16)), runtime=runtime)
    assert again.num_shards_made == NUM_SHARDS - second


# --- the end of a job -----------------------------------------------------------------------------------------------


def test_a_job_that_lacks_a_shard_gets_no_manifest(spec, runtime, tmp_path):
    out = tmp_path / "out"
    run(replace(spec, output=str(out)), runtime=runtime)
    (out / "manifest.json").unlink()
    commit_path(out / "commits", 4).unlink()
    with pytest.raises(NotTiled) as refused:
        complete(JobDirectory(out))
    assert str(refused.value) == (
        f"{out}: shard 4 is missing. Run the job again to make what is missing, or: extract verify {out}"
    )
    assert not (out / "manifest.json").exists()


@pytest.fixture
def littered(spec, runtime, tmp_path):
    """A finished job with everything that dead workers can leave, and one file of the user's own."""
    out = tmp_path / "out"
    run(replace(spec, output=str(out)), runtime=runtime)
    litter = [
        out / ".job.json.12-abcd",
        out / ".manifest.json.12-abcd",
        out / "commits" / ".shard-00003.json.12-abcd",
        out / "tmp" / "shard-00003.12-abcd",
        out / "data" / "shard-00003-00000000.arrow",
    ]
    (out / "tmp").mkdir()
    for path in litter:
        path.write_text("left by a dead worker")
    (out / "notes.txt").write_text("my own")
    return out, litter


def test_what_dead_workers_left_is_removed_and_nothing_else(littered, spec, runtime):
    out, litter = littered
    before = crash_rig.committed(out)
    strays = Strays(JobDirectory(out))
    for commit in read_commits(out / "commits"):
        strays.named_by(commit)
    assert sorted(strays.paths()) == sorted(litter)
    assert run(replace(spec, output=str(out)), runtime=runtime).num_shards_made == 0
    assert crash_rig.names(out) == crash_rig.expected_names(out) | {"notes.txt"}
    assert crash_rig.committed(out) == before


def test_where_locks_do_not_work_only_what_is_old_is_removed(littered, spec, runtime, monkeypatch):
    import fcntl
    import os

    def lockf(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    out, litter = littered
    old = [litter[0], litter[3]]
    for path in old:
        os.utime(path, times=(path.stat().st_mtime - ABANDONED_S - 1,) * 2)
    run(replace(spec, output=str(out)), runtime=runtime)
    assert [path for path in litter if not path.exists()] == old


def test_where_locks_do_not_work_a_file_that_another_worker_may_be_writing_is_left_alone(
    spec, runtime, unbroken, tmp_path, monkeypatch
):
    import fcntl

    def lockf(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    commit_path(out / "commits", 3).unlink()
    (out / "tmp").mkdir()
    others = out / "tmp" / "shard-00003.12-abcd"
    others.write_text("half a shard")
    assert run(replace(spec, output=str(out)), runtime=runtime).num_shards_made == 1
    assert others.read_text() == "half a shard"


def test_the_manifest_knows_nothing_of_who_made_the_job(spec, runtime, unbroken, tmp_path):
    out = tmp_path / "out"
    run(replace(spec, output=str(out), run=RunSpec(threads=1, overlap=False)), runtime=runtime)
    attempts = [[commit.attempt for commit in read_commits(path / "commits")] for path in (out, unbroken)]
    assert not set(attempts[0]) & set(attempts[1])
    assert (out / "manifest.json").read_bytes() == (unbroken / "manifest.json").read_bytes()
    assert read_job(out).job_id == read_job(unbroken).job_id


# --- the background threads -----------------------------------------------------------------------------------------


def test_items_come_in_order_and_at_most_so_many_are_made_ahead():
    made = []

    def items():
        for n in range(50):
            made.append(n)
            yield n

    with ahead(items(), depth=2) as ready:
        for n, item in enumerate(ready):
            assert item == n
            assert len(made) <= n + 5  # handed over, 2 in the queue, one waiting for room, one being made


def test_an_exception_comes_out_where_the_items_do():
    def items():
        yield 1
        raise ZeroDivisionError("here")

    with ahead(items(), depth=2) as ready:
        assert next(ready) == 1
        with pytest.raises(ZeroDivisionError, match="here"):
            next(ready)


def test_leaving_early_closes_the_iterator_and_ends_its_thread():
    closed = threading.Event()

    def items():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    before = threading.active_count()
    with ahead(items(), depth=2) as ready:
        next(ready)
    assert closed.is_set()
    assert threading.active_count() <= before
