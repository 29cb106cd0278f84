"""Who may go on with a job: the same rows, numbers and columns; everything else is refused, and the field named."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import crash_rig
import numpy as np
import pytest
import rig

from extract.commits import commit_path
from extract.engine.contract import read_contract
from extract.errors import ResumeRefused
from extract.job import NotAJob, read_job
from extract.output import open_output
from extract.runners.local import run
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec, TextSpec

NUM_ROWS = 30


def build_engine(checkpoint: Path, engine: Path) -> Path:
    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    build(checkpoint, engine, Recipe(dtype="float32", device="cpu", max_input_tokens=32, max_tokens=512))
    return engine


def spec_of(engine: Path, rows: Path, out: Path, **sections) -> JobSpec:
    given = {
        "text": TextSpec(),
        "states": StatesSpec(rows_per_shard=4, reserve_bytes=0),
        "run": RunSpec(threads=1),
        **sections,
    }
    return JobSpec(source=SourceSpec(path=str(rows), id_column="key"), engine=str(engine), output=str(out), **given)


@pytest.fixture(scope="module")
def runtime(tiny_engine):
    from extract.engine.runtimes import load_runtime

    return load_runtime(tiny_engine, threads=1)


@pytest.fixture(scope="module")
def base(tiny_engine, runtime, tmp_path_factory):
    """A finished job and its rows; copied before it is changed."""
    folder = tmp_path_factory.mktemp("resume")
    rows = crash_rig.write_rows(folder / "rows.parquet", crash_rig.texts(NUM_ROWS))
    run(spec_of(tiny_engine, rows, folder / "out"), runtime=runtime)
    return folder


@pytest.fixture
def unfinished(base, tmp_path):
    """A copy of the job that lacks two of its eight shards, and of its rows."""
    shutil.copytree(base, tmp_path / "job")
    out = tmp_path / "job" / "out"
    for shard in (2, 7):
        commit_path(out / "commits", shard).unlink()
        next((out / "data").glob(f"shard-{shard:05d}-*")).unlink()
    (out / "manifest.json").unlink()
    return tmp_path / "job"


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """An engine of other weights of the same shapes, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    return build_engine(rig.tiny_checkpoint(folder / "checkpoint", "llama", seed=1), folder / "engine")


@pytest.fixture(scope="module")
def other_tokenizer(llama_checkpoint, tmp_path_factory):
    """An engine of the same weights with a tokenizer that also ends a text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copytree(llama_checkpoint, folder / "checkpoint")
    rig.tiny_tokenizer(eos=True).save_pretrained(folder / "checkpoint")
    return build_engine(folder / "checkpoint", folder / "engine")


def refusal(spec: JobSpec) -> str:
    """The message that a resume is refused with, and that nothing was touched by it."""
    out = Path(spec.output)
    before = crash_rig.everything(out)
    with pytest.raises(ResumeRefused) as refused:
        run(spec)
    assert refused.value.exit_code == 5
    assert crash_rig.everything(out) == before
    return str(refused.value)


def message(out: Path, field: str, found: object, expected: object) -> str:
    return (
        f"{out}: this directory holds a job whose {field} is {found}; you asked for {expected}. "
        "Ask for the same again to go on with it, or choose another output directory with -o."
    )


def digests(found: str, expected: str) -> tuple[str, str]:
    """As a message shows two long values."""
    return f'"{found[:56]}...', f'"{expected[:56]}...'


# --- job.json lost --------------------------------------------------------------------------------------------------


def lost(job: Path) -> Path:
    """The output without its job.json, which is returned."""
    return (job / "out" / "job.json").rename(job / "lost.json")


def test_a_lost_job_file_is_written_again_by_the_same_command(unfinished, base, tiny_engine, runtime):
    before = lost(unfinished)
    run(spec_of(tiny_engine, unfinished / "rows.parquet", unfinished / "out"), runtime=runtime)
    assert read_job(unfinished / "out").identity == json.loads(before.read_text())["identity"]
    assert data(unfinished / "out") == data(base / "out")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]"], ids=["empty", "cut", "something else"])
def test_a_damaged_job_file_is_named_with_the_way_back(damage, unfinished, base, tiny_engine, runtime):
    (unfinished / "out" / "job.json").write_bytes(damage)
    spec = spec_of(tiny_engine, unfinished / "rows.parquet", unfinished / "out")
    with pytest.raises(NotAJob) as refused:
        run(spec, runtime=runtime)
    assert str(refused.value).endswith(
        ". Move it away and run the command that the job was started with: it is written again if the shards are "
        "that job's."
    )
    lost(unfinished)
    run(spec, runtime=runtime)
    assert data(unfinished / "out") == data(base / "out")


def test_a_lost_job_file_is_written_by_no_other_job(unfinished, tiny_engine, other_weights):
    rows, out = unfinished / "rows.parquet", unfinished / "out"
    stored = read_job(out)
    lost(unfinished)
    checkpoint = stored.contract["checkpoint"]["sha256"]
    asked = read_contract(other_weights).checkpoint.sha256
    assert refusal(spec_of(other_weights, rows, out)) == message(out, "checkpoint", *digests(checkpoint, asked))
    longer = StatesSpec(rows_per_shard=5, reserve_bytes=0)
    assert refusal(spec_of(tiny_engine, rows, out, states=longer)) == message(out, "states.rows_per_shard", 4, 5)
    pooled = StatesSpec(kind="last", rows_per_shard=4, reserve_bytes=0)
    assert f'whose job is "{stored.job_id}"' in refusal(spec_of(tiny_engine, rows, out, states=pooled))
    assert "whose tokens is" in refusal(spec_of(tiny_engine, rows, out, text=TextSpec(on_long="drop")))


def test_a_lost_job_file_beside_one_damaged_shard_is_written_again(unfinished, base, tiny_engine, runtime):
    lost(unfinished)
    first = next((unfinished / "out" / "data").glob("shard-00000-*"))
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    run(spec_of(tiny_engine, unfinished / "rows.parquet", unfinished / "out"), runtime=runtime)
    first.write_bytes(whole)
    assert data(unfinished / "out") == data(base / "out")


def data(out: Path) -> dict[str, bytes]:
    """Every data file by its name."""
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}


# --- refused --------------------------------------------------------------------------------------------------------


def test_another_checkpoint_of_the_same_shapes_is_refused(unfinished, other_weights):
    out = unfinished / "out"
    found, expected = read_job(out).identity["checkpoint"], _contract(other_weights).checkpoint.sha256
    assert found != expected
    spec = spec_of(other_weights, unfinished / "rows.parquet", out)
    assert refusal(spec) == message(out, "checkpoint", *digests(found, expected))


def test_another_tokenizer_is_refused(unfinished, other_tokenizer):
    out = unfinished / "out"
    found, expected = read_job(out).identity["tokenizer"], _contract(other_tokenizer).tokenizer.sha256
    assert _contract(other_tokenizer).checkpoint.sha256 == read_job(out).identity["checkpoint"]
    spec = spec_of(other_tokenizer, unfinished / "rows.parquet", out)
    assert refusal(spec) == message(out, "tokenizer", *digests(found, expected))


@pytest.mark.parametrize(
    ("section", "key", "value", "found", "expected"),
    [
        ("text", "max_input_tokens", 16, "32", "16"),
        ("text", "on_long", "skip", '"truncate"', '"skip"'),
        ("text", "prefix", "query: ", '""', '"query: "'),
        ("states", "dtype", "float32", '"float16"', '"float32"'),
        ("states", "kind", "last", '"tokens"', '"last"'),
        ("states", "input_ids", False, "true", "false"),
        ("states", "rows_per_shard", 5, "4", "5"),
        ("states", "compression", "none", '"zstd"', '"none"'),
        ("source", "column", "key", '"text"', '"key"'),
        ("source", "id_column", None, '"key"', "null"),
        ("source", "limit", 29, "30", "29"),
    ],
)
def test_a_job_that_asks_for_something_else_is_refused(section, key, value, found, expected, unfinished, tiny_engine):
    out = unfinished / "out"
    spec = spec_of(tiny_engine, unfinished / "rows.parquet", out)
    spec = replace(spec, **{section: replace(getattr(spec, section), **{key: value})})
    field = "source.num_rows" if key == "limit" else f"{section}.{key}"
    assert refusal(spec) == message(out, field, found, expected)


def test_a_row_added_on_top_is_refused(unfinished, tiny_engine):
    out, rows = unfinished / "out", unfinished / "rows.parquet"
    crash_rig.write_rows(rows, ["a new first row", *crash_rig.texts(NUM_ROWS)])
    assert refusal(spec_of(tiny_engine, rows, out)) == message(out, "source.num_rows", 30, 31)


def test_a_changed_row_is_refused(unfinished, tiny_engine):
    out, rows = unfinished / "out", unfinished / "rows.parquet"
    found = read_job(out).identity["source"]["files"][0]["sha256"]
    content = rows.read_bytes()
    at = content.index(b"row 17")
    rows.write_bytes(content[:at] + b"ROW 17" + content[at + 6 :])
    from extract.canonical import file_digest

    expected = file_digest(rows)
    spec = spec_of(tiny_engine, rows, out)
    assert refusal(spec) == message(out, "source.files[0].sha256", *digests(found, expected))


def test_a_source_with_a_file_more_is_refused(unfinished, tiny_engine):
    out, rows = unfinished / "out", unfinished / "rows.parquet"
    crash_rig.write_rows(unfinished / "more.parquet", [])
    spec = spec_of(tiny_engine, rows, out)
    spec = replace(spec, source=replace(spec.source, path=(str(rows), str(unfinished / "more.parquet"))))
    assert refusal(spec).startswith(f"{out}: this directory holds a job whose source.files")


def test_a_directory_of_something_else_is_refused(tiny_engine, base, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert refusal(spec_of(tiny_engine, base / "rows.parquet", out)) == (
        f"{out}: the directory is not empty and holds no job.json. Choose another output directory with -o."
    )


def test_plan_refuses_what_run_refuses(unfinished, tiny_engine):
    from extract.jobs import plan

    out = unfinished / "out"
    spec = spec_of(tiny_engine, unfinished / "rows.parquet", out, text=TextSpec(on_long="chunk"))
    with pytest.raises(ResumeRefused) as refused:
        plan(spec)
    assert str(refused.value) == message(out, "text.on_long", '"truncate"', '"chunk"')


# --- allowed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        RunSpec(threads=2),
        RunSpec(threads=1, max_sequences=3),
        RunSpec(threads=1, max_tokens=64),
        RunSpec(threads=1, overlap=False),
    ],
    ids=["threads", "max_sequences", "max_tokens", "sequential"],
)
def test_a_resume_may_do_the_work_in_another_way(how, unfinished, base, tiny_engine, runtime):
    out = unfinished / "out"
    before = crash_rig.committed(out)
    summary = run(spec_of(tiny_engine, unfinished / "rows.parquet", out, run=how), runtime=runtime)
    assert (summary.num_shards_before, summary.num_shards_made) == (6, 2)
    after = crash_rig.committed(out)
    assert {name: after[name] for name in before} == before
    check_equal_within_rounding(out, base / "out")


def test_a_resume_may_read_the_same_bytes_from_another_folder(unfinished, base, tiny_engine, runtime):
    moved = unfinished / "elsewhere" / "rows.parquet"
    moved.parent.mkdir()
    shutil.move(unfinished / "rows.parquet", moved)
    moved.touch()
    assert run(spec_of(tiny_engine, moved, unfinished / "out"), runtime=runtime).num_shards_made == 2
    assert crash_rig.content(unfinished / "out") == crash_rig.content(base / "out")


def test_a_resume_may_use_a_copy_of_the_engine(unfinished, base, tiny_engine):
    engine = unfinished / "engine"
    shutil.copytree(tiny_engine, engine)
    assert run(spec_of(engine, unfinished / "rows.parquet", unfinished / "out")).num_shards_made == 2
    assert crash_rig.content(unfinished / "out") == crash_rig.content(base / "out")


def test_a_resume_may_leave_the_disk_another_reserve(unfinished, base, tiny_engine, runtime):
    states = StatesSpec(rows_per_shard=4, reserve_bytes=1)
    spec = spec_of(tiny_engine, unfinished / "rows.parquet", unfinished / "out", states=states)
    assert run(spec, runtime=runtime).num_shards_made == 2
    assert crash_rig.content(unfinished / "out") == crash_rig.content(base / "out")


def test_a_moved_output_goes_on_where_it_lies_now(unfinished, base, tiny_engine, runtime):
    moved = unfinished / "moved"
    shutil.move(unfinished / "out", moved)
    assert run(spec_of(tiny_engine, unfinished / "rows.parquet", moved), runtime=runtime).num_shards_made == 2
    assert crash_rig.content(moved) == crash_rig.content(base / "out")


def test_a_resume_without_a_shard_size_takes_the_one_of_the_job(unfinished, base, tiny_engine, runtime):
    states = StatesSpec(reserve_bytes=0)
    spec = spec_of(tiny_engine, unfinished / "rows.parquet", unfinished / "out", states=states)
    assert run(spec, runtime=runtime).num_shards_made == 2
    assert crash_rig.content(unfinished / "out") == crash_rig.content(base / "out")


def test_rows_without_states_are_not_tried_again(tiny_engine, runtime, tmp_path):
    rows = crash_rig.write_rows(tmp_path / "rows.parquet", ["", "word " * 100, "", ""])
    text = TextSpec(on_long="skip")
    spec = spec_of(tiny_engine, rows, tmp_path / "out", text=text)
    assert run(spec, runtime=runtime).totals.outcomes == {"empty": 3, "too_long": 1}
    before = crash_rig.everything(tmp_path / "out")
    again = run(spec, runtime=Broken())
    assert (again.num_shards_made, again.totals.outcomes) == (0, {"empty": 3, "too_long": 1})
    assert crash_rig.everything(tmp_path / "out") == before


# --- a finished job -------------------------------------------------------------------------------------------------


class Broken:
    """A runtime that must not be asked for anything."""

    contract = None

    def hidden_states(self, batch, kind):
        raise AssertionError("a forward pass")


def test_a_finished_job_is_not_touched_and_loads_no_engine(base, tiny_engine, monkeypatch):
    import extract.engine.runtimes

    monkeypatch.setattr(extract.engine.runtimes, "load_runtime", None)
    monkeypatch.setattr("extract.runners.session.estimate", None)
    out = base / "out"
    before = crash_rig.everything(out)
    clock = time.perf_counter()
    summary = run(spec_of(tiny_engine, base / "rows.parquet", out))
    seconds = time.perf_counter() - clock
    assert (summary.complete, summary.num_shards_made, summary.num_shards_before) == (True, 0, 8)
    assert summary.tokens_computed == 0
    assert crash_rig.everything(out) == before
    assert seconds < 3.0


def test_a_finished_job_without_its_manifest_gets_it_back(base, tiny_engine, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    (out / "manifest.json").unlink()
    assert run(spec_of(tiny_engine, base / "rows.parquet", out)).num_shards_made == 0
    assert crash_rig.content(out) == crash_rig.content(base / "out")


def test_a_resume_reads_each_record_at_most_once(tiny_engine, runtime, tmp_path, monkeypatch):
    """Of 150 shards of one row: for the manifest, once all of them are there."""
    import extract.commits

    rows = crash_rig.write_rows(tmp_path / "rows.parquet", ["text"] * 150)
    out = tmp_path / "out"
    states = StatesSpec(rows_per_shard=1, reserve_bytes=0, kind="last")
    spec = spec_of(tiny_engine, rows, out, states=states)
    monkeypatch.setattr("os.fsync", lambda handle: None)  # hundreds of them are not what this is about
    run(spec, runtime=runtime)
    for shard in range(140, 150):
        commit_path(out / "commits", shard).unlink()
    reads = []
    real = extract.commits._read

    def counted(path):
        reads.append(path)
        return real(path)

    monkeypatch.setattr(extract.commits, "_read", counted)
    assert run(spec, runtime=runtime).num_shards_made == 10
    assert len(reads) == len(set(reads)) == 150
    reads.clear()
    assert run(spec, runtime=Broken()).num_shards_made == 0
    assert len(reads) == 150


def check_equal_within_rounding(out: Path, reference: Path) -> None:
    """Equal columns; states equal within the rounding of float16."""
    found, expected = (open_output(path) for path in (out, reference))
    columns = ["row", "id", "outcome", "num_tokens", "num_tokens_original", "input_ids"]
    assert found.table(columns) == expected.table(columns)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.states - other.states).max() <= 2**-9 * np.abs(other.states).max()


def _contract(engine: Path):
    from extract.engine.contract import read_contract

    return read_contract(engine)
