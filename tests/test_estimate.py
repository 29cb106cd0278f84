"""A plan's numbers against those of the run that follows: exact for few rows, within a tenth in bytes for all."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from job_rig import Engines, edit_contract, job, output_table, parquet, run, texts

from extract.engine.contract import read_contract
from extract.estimate import DiskTooSmall
from extract.jobs import plan
from extract.report import plan_text
from extract.runners import local
from extract.text.tokens import RowRefused

TOLERANCE = 0.1


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine("llama")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    rows = [*texts(290), None, None, "", "all of it, " * 30, *texts(6, seed=2)]
    table = {"text": rows, "key": [f"id-{n}" for n in range(300)], "n": list(range(300))}
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", table)


@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_a_few_hundred_rows_are_counted_exactly_and_their_bytes_within_a_tenth(engine, source, tmp_path, kind, dtype):
    for compression in ("zstd", "lz4", "none"):
        options = {"kind": kind, "dtype": dtype, "compression": compression, "rows_per_shard": 100}
        options |= {"id_column": "key", "carry": ("text", "n")}
        spec = job(engine, source, tmp_path / compression, **options)
        found, made = plan(spec).estimate, run(spec).totals
        assert found.exact
        assert found.sampled_rows == found.num_rows == made.num_rows
        assert found.outcomes == made.outcomes
        assert (found.num_tokens, found.num_tokens_original) == (made.num_tokens, made.num_tokens_original)
        assert (found.num_rows_out, found.num_shards) == (made.num_rows_out, made.num_shards)
        assert abs(found.num_bytes / made.num_bytes - 1) <= TOLERANCE, compression


@pytest.mark.parametrize("options", [{"on_long": "chunk", "max_input_tokens": 24}, {"prefix": "Read this text: "}])
def test_chunks_and_a_shared_beginning_are_counted_as_they_are_stored(engine, source, tmp_path, options):
    spec = job(engine, source, tmp_path / "out", dtype="float16", **options)
    found, made = plan(spec).estimate, run(spec).totals
    assert (found.num_rows_out, found.num_tokens) == (made.num_rows_out, made.num_tokens)
    assert abs(found.num_bytes / made.num_bytes - 1) <= TOLERANCE


def test_twenty_thousand_rows_are_sampled_and_come_within_a_tenth(engine, tmp_path):
    """Lengths drift over the source, as in a sorted one, so that a sample of its beginning would be far off."""
    rows = [text[: 2 + n // 400] for n, text in enumerate(texts(20_000, characters=60))]
    source = parquet(tmp_path / "in.parquet", {"text": rows, "key": [f"id-{n}" for n in range(20_000)]})
    spec = job(engine, source, tmp_path / "out", kind="last", dtype="float16", id_column="key")
    found, made = plan(spec).estimate, run(spec).totals
    assert (found.num_rows, found.num_rows_out, found.sampled_rows, found.exact) == (20_000, 20_000, 2048, False)
    assert abs(found.num_tokens / made.num_tokens - 1) <= 0.03
    assert abs(found.num_bytes / made.num_bytes - 1) <= TOLERANCE
    assert "from 2,048 sampled rows" in plan_text(plan(spec))


def test_the_same_sample_is_taken_each_time(engine, tmp_path):
    source = parquet(tmp_path / "in.parquet", {"text": texts(5000, characters=20)})
    spec = job(engine, source, tmp_path / "out")
    one, other = (dataclasses.replace(plan(spec).estimate, free_bytes=0) for _ in range(2))
    assert one == other


def test_no_rows_cost_next_to_nothing(engine, tmp_path):
    source = parquet(tmp_path / "in.parquet", {"text": pa.array([], pa.string())})
    spec = job(engine, source, tmp_path / "out")
    found = plan(spec).estimate
    assert (found.num_rows, found.num_tokens, found.outcomes, found.exact) == (0, 0, {}, True)
    assert (found.num_shards, found.example, found.seconds) == (1, None, 0)
    assert found.num_bytes < 10_000
    assert run(spec).totals.num_bytes < 10_000


def test_a_stream_has_the_counts_of_its_first_rows(engine, source, tmp_path):
    spec = job(engine, source.parent, tmp_path / "out", format="hf", streaming=True)
    found = plan(spec).estimate
    assert (found.num_rows, found.num_shards, found.exact, found.sampled_rows) == (None, None, False, 300)
    assert "a stream of unknown length" in plan_text(plan(spec))


def test_the_example_is_the_first_row_that_has_tokens(engine, tmp_path):
    source = parquet(tmp_path / "in.parquet", {"text": [None, "", "hello there", "more"]})
    found = plan(job(engine, source, tmp_path / "out")).estimate.example
    assert (found.row, found.text, found.outcome) == (2, "hello there", "ok")
    assert "".join(found.pieces[1:]) == "hello there"
    (row,) = run_ids(engine, source, tmp_path)
    assert list(found.input_ids) == row


def run_ids(engine: Path, source: Path, tmp_path: Path) -> list[list[int]]:
    run(job(engine, source, tmp_path / "run", rows="2"))
    return output_table(tmp_path / "run").column("input_ids").to_pylist()


def test_the_example_of_selected_rows_has_its_position_in_the_source(engine, source, tmp_path):
    assert plan(job(engine, source, tmp_path / "out", rows="7,9")).estimate.example.row == 7


def test_the_time_is_that_of_the_speed_seen_at_build(engine, source, tmp_path):
    shutil.copytree(engine, tmp_path / "engine")
    edit_contract(tmp_path / "engine", measured={"tokens_per_s": 100.0, "stored_ratio": {}})
    found = plan(job(tmp_path / "engine", source, tmp_path / "out")).estimate
    assert found.seconds == found.num_tokens / 100
    edit_contract(tmp_path / "engine", measured={"tokens_per_s": 0.0, "stored_ratio": {}})
    assert plan(job(tmp_path / "engine", source, tmp_path / "out")).estimate.seconds is None


def test_an_error_policy_reads_every_row_before_the_job_begins(engine, tmp_path):
    rows = texts(5000, characters=12)
    rows[4250] = ""
    source = parquet(tmp_path / "in.parquet", {"text": rows})
    with pytest.raises(RowRefused, match=r"^row 4250: empty"):
        plan(job(engine, source, tmp_path / "out", on_empty="error"))


def test_carried_columns_count(engine, tmp_path):
    draw = np.random.default_rng(0)
    blobs = [draw.bytes(2000) for _ in range(300)]
    source = parquet(tmp_path / "in.parquet", {"text": texts(300), "blob": blobs})
    spec = job(engine, source, tmp_path / "out", kind="last", carry=("blob",))
    found, made = plan(spec).estimate, run(spec).totals
    assert made.num_bytes > 600_000
    assert abs(found.num_bytes / made.num_bytes - 1) <= TOLERANCE


# --- the disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(monkeypatch):
    """A disk with so many bytes free."""

    def set_free(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))

    return set_free


def test_plan_and_run_refuse_a_disk_that_is_too_small_before_weights_load(
    engine, source, tmp_path, small_disk, monkeypatch
):
    spec = job(engine, source, tmp_path / "out", reserve_bytes=1_000_000)
    needed = plan(spec).estimate.num_bytes
    small_disk(needed + 999_999)
    expected = (
        f"{tmp_path / 'out'}: the job needs about {needed:,} bytes more and leaves 1,000,000 free, but only "
        f"{needed + 999_999:,} are free. Choose another disk with -o, a smaller output (--dtype int8, --kind last), "
        "or lower the reserve."
    )
    monkeypatch.setattr("extract.engine.runtimes.load_runtime", None)
    for refuse in (plan, local.run):
        with pytest.raises(DiskTooSmall) as error:
            refuse(spec)
        assert str(error.value) == expected
        assert error.value.exit_code == 8
    small_disk(needed + 1_000_000)
    plan(spec)


def test_what_is_committed_already_needs_no_more_room(engine, source, tmp_path, small_disk):
    spec = job(engine, source, tmp_path / "out", rows_per_shard=100)
    run(spec)
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "commits" / "shard-00002.json").unlink()
    small_disk(plan(spec).estimate.num_bytes // 2)
    assert run(spec).num_shards_made == 1


def test_the_estimate_holds_for_a_job_without_an_output_directory(engine, source):
    spec = dataclasses.replace(job(engine, source, Path("unused")), output=None)
    assert plan(spec).estimate.free_bytes > 0
    assert read_contract(engine).limits.max_input_tokens == plan(spec).spec.text.max_input_tokens
