"""States are written where the output lies and nowhere else: no staging in a temporary directory or shared memory."""

import ast
import resource
import tempfile
from pathlib import Path

import crash_rig
import pytest

import extract
from extract.runners.local import run
from extract.settings import parse
from extract.spec import JobSpec
from extract.store import DiskFull


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return crash_rig.write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet")


def spec_of(engine, rows, out):
    table = {
        "source": {"path": str(rows)},
        "states": {"rows_per_shard": 50, "reserve_bytes": 0, "dtype": "float32", "compression": "none"},
        "run": {"threads": 1},
        "engine": str(engine),
        "output": str(out),
    }
    return parse(JobSpec, table, "test")


def sizes_of_temporary_files(monkeypatch) -> list[int]:
    """Bytes of each file that a plan writes for a look at its size."""
    import extract.estimate

    seen, real = [], extract.estimate._write

    def watched(plan, path, kept):
        seen.append(real(plan, path, kept))
        return seen[-1]

    monkeypatch.setattr(extract.estimate, "_write", watched)
    return seen


def test_the_temporary_directory_holds_a_small_part_of_what_is_written(tiny_engine, rows, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    seen = sizes_of_temporary_files(monkeypatch)
    summary = run(spec_of(tiny_engine, rows, tmp_path / "out"))
    assert summary.totals.num_bytes > 400_000
    assert 0 < sum(seen) < summary.totals.num_bytes / 10
    assert not list(scratch.iterdir())


def test_a_temporary_directory_without_room_is_named(tiny_engine, rows, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    real = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, real[1]))
    try:
        with pytest.raises(DiskFull) as refused:
            extract.plan(spec_of(tiny_engine, rows, tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, real)
    assert Path(refused.value.facts["path"]).is_relative_to(scratch)
    assert refused.value.exit_code == 8
    assert not list(scratch.iterdir())


def test_no_process_pool_and_no_shared_memory_is_used():
    for path in sorted(Path(extract.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                parts = {"multiprocessing", "shared_memory", "ProcessPoolExecutor"} & set(name.split("."))
                parts -= {"multiprocessing"} if name.startswith("multiprocessing.connection") else set()  # a socket
                assert not parts, f"{path}:{node.lineno}"
