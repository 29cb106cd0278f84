"""A plan is arithmetic on spec, contract and layout: the split of the rows, what is resolved, and what is refused."""

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_rig import LIMIT, Engines, job, parquet, run, texts

from extract.engine.contract import Contract, read_contract
from extract.job import OtherJob
from extract.jobs import Missing, open_job, plan
from extract.planning import (
    MAX_ROWS_PER_SHARD,
    TARGET_SHARD_BYTES,
    TARGET_SHARD_TOKENS,
    BeyondEngine,
    make_plan,
)
from extract.report import plan_text
from extract.sources.base import SourceLayout
from extract.spec import JobSpec, RunSpec, SourceSpec, StatesSpec, TextSpec

SCHEMA = pa.schema([("text", pa.large_string()), ("key", pa.int64())])


@pytest.fixture(scope="module")
def contract(engines: Engines) -> Contract:
    return read_contract(engines.engine("llama"))


def layout(num_rows: int | None = 100) -> SourceLayout:
    return SourceLayout(format="parquet", num_rows=num_rows, schema=SCHEMA, fingerprint={"digest": "these"})


def spec(**sections) -> JobSpec:
    return JobSpec(source=sections.pop("source", SourceSpec(path="in.parquet")), **sections)


def with_limits(contract: Contract, **limits) -> Contract:
    return dataclasses.replace(contract, limits=dataclasses.replace(contract.limits, **limits))


def with_width(contract: Contract, width: int, device: str = "cpu") -> Contract:
    output = dataclasses.replace(contract.output, width=width)
    return dataclasses.replace(contract, output=output, device=dataclasses.replace(contract.device, type=device))


# --- the split ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 120))
def test_shards_tile_the_rows(contract, num_rows, rows_per_shard):
    made = make_plan(spec(states=StatesSpec(rows_per_shard=rows_per_shard)), contract, layout(num_rows))
    ranges = [made.rows_of(shard) for shard in range(made.num_shards)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(num_rows))
    assert all(stop - start == rows_per_shard for start, stop in ranges[:-1])
    assert ranges[-1][1] - ranges[-1][0] > 0 or num_rows == 0


def test_a_source_without_rows_has_one_empty_shard(contract):
    made = make_plan(spec(), contract, layout(0))
    assert (made.num_shards, made.rows_of(0)) == (1, (0, 0))


def test_a_stream_has_shards_without_end(contract):
    made = make_plan(spec(states=StatesSpec(rows_per_shard=10)), contract, layout(None))
    assert (made.num_rows, made.num_shards, made.rows_of(7)) == (None, None, (70, 80))


def test_a_plan_of_ten_thousand_million_rows_is_as_small_as_any(contract):
    made = make_plan(spec(), contract, layout(10**10))
    assert made.num_shards == -(-(10**10) // made.record.rows_per_shard)
    assert made.rows_of(made.num_shards - 1)[1] == 10**10


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "device", "expected"),
    [
        ("tokens", "float16", 64, "cpu", TARGET_SHARD_TOKENS["cpu"] // LIMIT),
        ("tokens", "float16", 8192, "cpu", TARGET_SHARD_BYTES // (LIMIT * 8192 * 2)),
        ("tokens", "float32", 8192, "cpu", TARGET_SHARD_BYTES // (LIMIT * 8192 * 4)),
        ("tokens", "int8", 8192, "cpu", TARGET_SHARD_BYTES // (LIMIT * 8192)),
        ("last", "float16", 8192, "cpu", TARGET_SHARD_TOKENS["cpu"] // LIMIT),
        ("last", "float16", 8192, "cuda", TARGET_SHARD_BYTES // (8192 * 2)),
        ("last", "float16", 64, "cuda", MAX_ROWS_PER_SHARD),
    ],
)
def test_a_shard_is_bounded_by_bytes_tokens_and_rows_of_the_longest_texts(
    contract, kind, dtype, width, device, expected
):
    made = make_plan(
        spec(states=StatesSpec(kind=kind, dtype=dtype)), with_width(contract, width, device), layout(10**6)
    )
    assert made.record.rows_per_shard == expected


def test_a_row_larger_than_a_shard_is_a_shard_of_its_own(contract):
    made = make_plan(spec(), with_width(contract, 10**9), layout(3))
    assert made.num_shards == 3


# --- what is resolved and what is refused ---------------------------------------------------------------------------


def test_what_is_not_asked_for_is_the_engines_limit(contract):
    made = make_plan(spec(), contract, layout())
    assert (made.max_input_tokens, made.max_sequences, made.max_tokens) == (LIMIT, 8192, 16_384)
    asked = spec(text=TextSpec(max_input_tokens=7), run=RunSpec(max_sequences=3, max_tokens=20))
    made = make_plan(asked, contract, layout())
    assert (made.max_input_tokens, made.max_sequences, made.max_tokens) == (7, 3, 20)


def test_a_budget_smaller_than_a_row_is_no_error(contract):
    assert make_plan(spec(run=RunSpec(max_tokens=1)), contract, layout()).max_tokens == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"text": TextSpec(max_input_tokens=33)},
            "text.max_input_tokens is 33, more than the engine's 32 (the recipe). Ask for less, or build an engine "
            "with a higher limit: extract build ... --max-input-tokens 33",
        ),
        (
            {"run": RunSpec(max_sequences=8193)},
            "run.max_sequences is 8193, more than the engine's 8192 (the recipe). Ask for less, or build an engine "
            "with a higher limit: extract build ... --max-sequences 8193",
        ),
        (
            {"run": RunSpec(max_tokens=20_000)},
            "run.max_tokens is 20000, more than the engine's 16384 (the recipe). Ask for less, or build an engine "
            "with a higher limit: extract build ... --max-tokens 20000",
        ),
    ],
)
def test_more_than_the_engine_was_built_for_is_refused_with_the_reason(contract, asked, message):
    with pytest.raises(BeyondEngine) as error:
        make_plan(spec(**asked), contract, layout())
    assert str(error.value) == message
    assert error.value.exit_code == 2


# --- identity -------------------------------------------------------------------------------------------------------

SAME = {
    "where the rows lie": {"source": SourceSpec(path="moved.parquet", format="parquet")},
    "batch size": {"run": RunSpec(max_tokens=5, max_sequences=5)},
    "threads and overlap": {"run": RunSpec(threads=7, overlap=False)},
    "the reserve": {"states": StatesSpec(reserve_bytes=5)},
    "record batches": {"states": StatesSpec(record_batch_bytes=2**20)},
    "the limit, written out": {"text": TextSpec(max_input_tokens=LIMIT)},
}

OTHER = {
    "limit": {"source": SourceSpec(path="in.parquet", limit=5)},
    "column": {"source": SourceSpec(path="in.parquet", column="key")},
    "id column": {"source": SourceSpec(path="in.parquet", id_column="key")},
    "carried columns": {"source": SourceSpec(path="in.parquet", carry=("key",))},
    "rows": {"source": SourceSpec(path="in.parquet", rows="0-5")},
    "limit of tokens": {"text": TextSpec(max_input_tokens=5)},
    "what is done with long rows": {"text": TextSpec(on_long="skip")},
    "special tokens": {"text": TextSpec(special_tokens="none")},
    "prefix": {"text": TextSpec(prefix="query: ")},
    "kind": {"states": StatesSpec(kind="last")},
    "stored type": {"states": StatesSpec(dtype="int8")},
    "compression": {"states": StatesSpec(compression="lz4")},
    "ids": {"states": StatesSpec(input_ids=False)},
    "shard size": {"states": StatesSpec(rows_per_shard=5)},
}


@pytest.mark.parametrize("name", SAME)
def test_how_the_work_is_done_makes_no_other_job(contract, name):
    one, other = (make_plan(asked, contract, layout()) for asked in (spec(), spec(**SAME[name])))
    assert one.record.job_id == other.record.job_id


@pytest.mark.parametrize("name", OTHER)
def test_what_would_change_the_output_makes_another_job(contract, name):
    one, other = (make_plan(asked, contract, layout()) for asked in (spec(), spec(**OTHER[name])))
    assert one.record.job_id != other.record.job_id


def test_other_rows_and_another_engine_make_another_job(contract):
    one = make_plan(spec(), contract, layout()).record.job_id
    changed = dataclasses.replace(layout(), fingerprint={"digest": "others"})
    assert make_plan(spec(), contract, changed).record.job_id != one
    assert make_plan(spec(), contract, layout(99)).record.job_id != one
    assert make_plan(spec(), with_limits(contract, max_input_tokens=31), layout()).record.job_id != one


def test_the_schema_says_which_job_engine_and_tokens(contract):
    made = make_plan(spec(text=TextSpec(prefix="q: ")), contract, layout())
    metadata = made.record.schema.metadata
    assert metadata[b"extract.job"].decode() == made.record.job_id
    assert metadata[b"extract.engine"].decode() == contract.engine_id
    assert metadata[b"extract.checkpoint"].decode() == contract.checkpoint.sha256
    assert b'"prefix":"q: "' in metadata[b"extract.tokens"]
    assert b'"prefix_ids":[1]' in metadata[b"extract.tokens"]


# --- plan, the command's function -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", {"text": texts(50)})


def test_a_plan_shows_what_will_be_done(engines: Engines, source, tmp_path):
    found = plan(job(engines.engine("llama"), source, tmp_path / "out", rows_per_shard=20))
    lines = dict(line.split(None, 1) for line in plan_text(found).splitlines() if not line.startswith(" "))
    assert lines["job"] == found.job
    assert lines["engine"] == "llama (LlamaModel), float32 on cpu, packed"
    assert lines["output"] == "every token's state, width 64, float32, zstd 1"
    assert lines["limits"] == "32 tokens a row; 16,384 tokens, 8,192 sequences a pass"
    assert lines["rows"] == "50 in 3 shards of 20"
    assert found.as_json()["estimate"]["num_rows"] == 50
    assert not (tmp_path / "out").exists()


def test_a_plan_and_the_run_after_it_are_of_one_job(engines: Engines, source, tmp_path):
    asked = job(engines.engine("llama"), source, tmp_path / "out")
    assert plan(asked).job == run(asked).job == plan(asked).job


def test_a_plan_refuses_the_place_of_another_job(engines: Engines, source, tmp_path):
    run(job(engines.engine("llama"), source, tmp_path / "out"))
    with pytest.raises(OtherJob) as error:
        plan(job(engines.engine("llama"), source, tmp_path / "out", kind="last"))
    assert str(error.value) == (
        f'{tmp_path / "out"}: this directory holds a job whose states.kind is "tokens"; you asked for "last". '
        "Ask for the same again to go on with it, or choose another output directory with -o."
    )
    assert error.value.exit_code == 5


def test_an_earlier_shard_size_is_kept_though_the_default_is_another_one_now(
    engines: Engines, source, tmp_path, monkeypatch
):
    asked = job(engines.engine("llama"), source, tmp_path / "out")
    before = run(asked).job
    monkeypatch.setattr("extract.planning.MAX_ROWS_PER_SHARD", 7)
    assert plan(asked).job == before
    assert plan(dataclasses.replace(asked, output=str(tmp_path / "other"))).job != before


@pytest.mark.parametrize("missing", ["engine", "output"])
def test_a_job_without_an_engine_or_an_output_says_how_to_name_one(engines: Engines, source, tmp_path, missing):
    asked = dataclasses.replace(job(engines.engine("llama"), source, tmp_path / "out"), **{missing: None})
    with pytest.raises(Missing) as error:
        run(asked) if missing == "output" else plan(asked)
    what, key = ("engine", "engine") if missing == "engine" else ("output directory", "output")
    option = "--engine DIRECTORY" if missing == "engine" else "-o DIRECTORY"
    assert str(error.value) == (
        f'the job names no {what}. Put {key} = "DIRECTORY" into the job spec, or give {option}.'
    )


def test_planning_loads_no_weights(engines: Engines, source, tmp_path, monkeypatch):
    monkeypatch.setattr("extract.engine.torch_runtime.load_engine_model", None)
    plan(job(engines.engine("llama"), source, tmp_path / "out"))
    opened = open_job(job(engines.engine("llama"), source, tmp_path / "out"))
    opened.source.close()
