"""Files that are replaced, rewritten or grown while they are read: the rows of the plan, or an error that says so."""

import os
from pathlib import Path

import job_rig
import pyarrow as pa
import pytest
from arrow_shapes import write

from extract.cpu.runtime import CpuRuntime
from extract.errors import SourceError
from extract.sources import file_source, open_source
from extract.spec import SourceSpec

ROWS = 3_000
BEFORE = pa.table({"text": [f"before {row}" for row in range(ROWS)]})
AFTER = pa.table({"text": [f"after! {row}" for row in range(ROWS)]})


def replace(path: Path, table: pa.Table) -> None:
    """As a careful program does: a new file takes the name."""
    fresh = path.with_name(f".fresh{path.suffix}")
    write(fresh, table, 100)
    fresh.rename(path)


def rewrite(path: Path, table: pa.Table) -> None:
    """As a careless one does: other bytes in the same file."""
    fresh = path.with_name(f".fresh{path.suffix}")
    write(fresh, table, 100)
    path.write_bytes(fresh.read_bytes())


def grow(path: Path, table: pa.Table) -> None:
    """As a log does."""
    with path.open("ab") as file:
        file.write(b"more")


def shorten(path: Path, table: pa.Table) -> None:
    """As a disk does that is full."""
    os.truncate(path, path.stat().st_size // 2)


CHANGES = [replace, rewrite, grow, shorten]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["parquet", "arrow", "arrows"])
def test_a_file_that_changes_while_it_is_read_gives_no_row_of_the_other_content(form, change, tmp_path, monkeypatch):
    monkeypatch.setattr(file_source, "DECODE_ROWS", 100)
    path = tmp_path / f"rows.{form}"
    write(path, BEFORE, 100)
    os.utime(path, (1, 1))  # two files of one size within a tick of the clock cannot be told apart by their times
    source = open_source(SourceSpec(path=str(path)))
    rows = source.read(0, None, 50)
    found = next(rows).to_pylist()
    change(path, AFTER)
    with pytest.raises(SourceError) as caught:
        for batch in rows:
            found += batch.to_pylist()
    assert str(caught.value).startswith(f"{path}: changed while the job ran (")
    assert found == BEFORE.to_pylist()[: len(found)]
    source.close()


@pytest.mark.parametrize("form", ["parquet", "arrow", "arrows"])
def test_a_file_that_is_only_touched_while_it_is_read_is_read_on_and_hashed_once(form, tmp_path, monkeypatch):
    from extract.sources import fingerprints

    path = tmp_path / f"rows.{form}"
    write(path, BEFORE, 100)
    source = open_source(SourceSpec(path=str(path)))
    rows = source.read(0, None, 50)
    found = next(rows).to_pylist()
    os.utime(path, (1, 1))
    hashed = []
    digest = fingerprints.file_digest
    monkeypatch.setattr(fingerprints, "file_digest", lambda file: hashed.append(file) or digest(file))
    for batch in rows:
        found += batch.to_pylist()
    assert found == BEFORE.to_pylist()
    assert len(hashed) == 1
    source.close()


@pytest.mark.parametrize("change", [rewrite, grow])
def test_a_run_whose_source_changes_stops_and_goes_on_once_it_is_restored(change, engines, tmp_path, monkeypatch):
    engine = engines.engine("llama")
    path = tmp_path / "rows.parquet"
    rows = job_rig.texts(40, seed=3, characters=30)
    table = pa.table({"text": rows})
    write(path, table, 5)
    whole, at = path.read_bytes(), path.stat().st_mtime_ns
    spec = job_rig.job(engine, path, tmp_path / "out", kind="last", rows_per_shard=10, overlap=False)
    passes: list[int] = []
    forward = CpuRuntime.hidden_states

    def hidden_states(self, batch, kind):
        passes.append(1)
        if len(passes) == 2:
            change(path, pa.table({"text": rows[::-1]}))
        return forward(self, batch, kind)

    monkeypatch.setattr(CpuRuntime, "hidden_states", hidden_states)
    with pytest.raises(SourceError, match=f"^{path}: changed while the job ran"):
        job_rig.run(spec)
    path.write_bytes(whole)
    os.utime(path, ns=(at, at))
    assert job_rig.run(spec).complete
    checkpoint = engines.checkpoint("llama")
    expected = job_rig.reference(checkpoint, job_rig.ids_of(checkpoint, rows), "last")
    assert job_rig.errors(job_rig.stored(tmp_path / "out"), expected).max() < 1e-5
