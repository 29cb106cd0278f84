"""Every row of the source ends in exactly one outcome, in source order, and the totals say how many of each."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import rig
from job_rig import (
    LIMIT,
    Engines,
    errors,
    ids_of,
    job,
    output_table,
    parquet,
    reference,
    rewrite_shard,
    run,
    runtime,
    stored,
    texts,
)

from extract.errors import SpecError
from extract.manifest import NotTiled
from extract.output import open_output
from extract.records import OUTCOMES
from extract.report import summary_text
from extract.shards.schema import ColumnTaken
from extract.shards.sink import NonFiniteStates
from extract.text.tokens import RowRefused

EXACT = 1e-5
LONG = "all of it, " * 40


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine("llama")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """1,000 rows of bytes: nulls at rows 3 and 900, empty, white space, too long and no UTF-8 among usual texts."""
    rows: list[bytes | None] = [text.encode() for text in texts(1000, characters=20)]
    rows[3] = rows[900] = None
    rows[10] = b""
    rows[11], rows[12] = b"  ", b"\n"
    rows[500] = rows[999] = LONG.encode()
    rows[600] = b"good until \xff here"
    rows[601] = b"\xed\xa0\x80"  # a lone surrogate
    path = tmp_path_factory.mktemp("mixed") / "rows.parquet"
    return parquet(path, {"text": pa.array(rows, pa.binary())})


def outcomes(output: Path) -> list[str]:
    return output_table(output).column("outcome").to_pylist()


# --- outcomes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "last", "mean"])
def test_every_row_has_one_outcome_in_source_order_and_the_totals_add_up(engine, mixed, tmp_path, kind):
    summary = run(job(engine, mixed, tmp_path / "out", kind=kind, rows_per_shard=300))
    table = output_table(tmp_path / "out")
    assert table.column("row").to_pylist() == list(range(1000))
    special = {3: "null", 900: "null", 10: "empty", 500: "truncated", 999: "truncated", 600: "bad_text"}
    special[601] = "bad_text"
    assert outcomes(tmp_path / "out") == [special.get(row, "ok") for row in range(1000)]
    assert summary.totals.outcomes == {"bad_text": 2, "empty": 1, "null": 2, "ok": 993, "truncated": 2}
    assert summary.totals.num_rows == summary.totals.num_rows_out == 1000
    assert summary.totals.num_tokens == pc.sum(table.column("num_tokens")).as_py()
    assert summary.totals.num_tokens_original == pc.sum(table.column("num_tokens_original")).as_py()
    stateless = [row for row in range(1000) if special.get(row) in ("null", "empty", "bad_text")]
    states = stored(tmp_path / "out")
    assert [row for row, one in enumerate(states) if one is None] == stateless
    assert all(np.isfinite(one).all() for one in states if one is not None)
    assert [table.column("num_tokens")[row].as_py() for row in stateless] == [0] * len(stateless)


def test_the_rows_beside_the_special_ones_keep_their_states(engines: Engines, engine, mixed, tmp_path):
    run(job(engine, mixed, tmp_path / "out", kind="last", rows_per_shard=300))
    near = [2, 4, 9, 11, 12, 13, 499, 500, 501, 599, 602, 899, 901, 999]
    rows = [open_output(tmp_path / "out").row(row) for row in near]
    source = pa.parquet.read_table(mixed).column("text").to_pylist()
    ids = ids_of(engines.checkpoint("llama"), [source[row].decode() for row in near])
    assert [row.input_ids.tolist() for row in rows] == ids
    assert errors([row.states for row in rows], reference(engines.checkpoint("llama"), ids, "last")).max() <= EXACT


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_white_space_is_text_and_only_a_row_without_characters_is_empty(engines: Engines, tmp_path, name):
    rows = ["one", "", "  ", "\n", "two"]
    run(job(engines.engine(name), parquet(tmp_path / "in.parquet", {"text": rows}), tmp_path / "out", kind="mean"))
    assert outcomes(tmp_path / "out") == ["ok", "empty", "ok", "ok", "ok"]
    ids = ids_of(engines.checkpoint(name), [row for row in rows if row])
    found = [one for one in stored(tmp_path / "out") if one is not None]
    assert errors(found, reference(engines.checkpoint(name), ids, "mean")).max() <= EXACT


def test_a_source_of_nothing_but_special_rows_needs_no_pass(engine, tmp_path):
    rows = parquet(tmp_path / "in.parquet", {"text": pa.array([None, "", None], pa.string())})
    summary = run(job(engine, rows, tmp_path / "out"))
    assert outcomes(tmp_path / "out") == ["null", "empty", "null"]
    assert (summary.totals.num_tokens, summary.tokens_computed) == (0, 0)


def test_lengths_around_the_limit_are_told_apart(engines: Engines, engine, tmp_path):
    """31, 32, 33 and 200 tokens at a limit of 32."""
    ids = rig.random_sequences([LIMIT - 1, LIMIT, LIMIT + 1, 200], seed=1)
    rows = parquet(tmp_path / "in.parquet", {"ids": ids})
    run(job(engine, rows, tmp_path / "out", column="ids", input="input_ids"))
    table = output_table(tmp_path / "out")
    assert outcomes(tmp_path / "out") == ["ok", "ok", "truncated", "truncated"]
    assert table.column("num_tokens").to_pylist() == [31, 32, 32, 32]
    assert table.column("num_tokens_original").to_pylist() == [31, 32, 33, 200]
    expected = reference(engines.checkpoint("llama"), [one[:LIMIT] for one in ids])
    assert errors(stored(tmp_path / "out"), expected).max() <= EXACT


def test_a_cut_row_still_ends_with_the_eos_that_its_tokenizer_adds(engines: Engines, tmp_path):
    run(job(engines.engine("bloom"), parquet(tmp_path / "in.parquet", {"text": [LONG, "short"]}), tmp_path / "out"))
    rows = list(open_output(tmp_path / "out"))
    assert [(row.outcome, row.num_tokens, row.input_ids[0], row.input_ids[-1]) for row in rows] == [
        ("truncated", LIMIT, 1, 2),
        ("ok", rows[1].num_tokens, 1, 2),
    ]


def test_too_long_rows_are_kept_without_states_when_they_are_to_be_skipped(engines: Engines, engine, mixed, tmp_path):
    run(job(engine, mixed, tmp_path / "out", on_long="skip", kind="last"))
    assert [row for row, outcome in enumerate(outcomes(tmp_path / "out")) if outcome == "too_long"] == [500, 999]
    row = open_output(tmp_path / "out").row(500)
    (whole,) = ids_of(engines.checkpoint("llama"), [LONG], limit=10_000)
    assert (row.states, row.num_tokens, row.num_tokens_original) == (None, 0, len(whole))


# --- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_chunks_are_numbered_cover_the_row_and_repeat_the_overlap(engines: Engines, tmp_path, name, overlap):
    rows = [texts(1)[0], LONG, "", LONG[:150], texts(2)[1]]
    source = parquet(tmp_path / "in.parquet", {"text": rows, "key": ["a", "b", "c", "d", "e"]})
    options = {"on_long": "chunk", "chunk_overlap": overlap, "id_column": "key", "rows_per_shard": 2}
    summary = run(job(engines.engine(name), source, tmp_path / "out", **options))
    found = list(open_output(tmp_path / "out"))
    whole = ids_of(engines.checkpoint(name), rows, limit=10_000, add_special_tokens=False)
    with_special = ids_of(engines.checkpoint(name), rows, limit=10_000)
    for row, ids in enumerate(whole):
        own = [one for one in found if one.row == row]
        assert [one.chunk for one in own] == list(range(len(own)))
        assert {one.columns["id"] for one in own} == {"abcde"[row]}
        assert {one.num_tokens_original for one in own} == {len(with_special[row]) if ids else 0}
        joined: list[int] = []
        for one in own:
            if one.input_ids is not None:
                content = [token for token in one.input_ids.tolist() if token not in (1, 2)]
                assert not joined or not overlap or joined[-overlap:] == content[:overlap]
                joined += content[overlap if joined else 0 :]
        assert joined == ids
    assert [one.row for one in found] == sorted(one.row for one in found)
    assert (summary.totals.num_rows, summary.totals.num_rows_out) == (5, len(found))
    assert sum(summary.totals.outcomes.values()) == len(found)
    assert summary.totals.num_tokens_original == sum(map(len, with_special)) - len(with_special[2])
    with_states = [one for one in found if one.states is not None]
    expected = reference(engines.checkpoint(name), [one.input_ids.tolist() for one in with_states])
    assert errors([one.states for one in with_states], expected).max() <= EXACT


# --- error policies -------------------------------------------------------------------------------------------------


ERRORS = [
    (
        {"on_null": "error"},
        'row 3: null. Leave such rows out of the source, or set text.on_null = "record" to have them marked.',
    ),
    (
        {"on_empty": "error"},
        "row 10: empty, no tokens. Leave such rows out of the source, "
        'or set text.on_empty = "record" to have them marked.',
    ),
    (
        {"on_bad_text": "error"},
        "row 600: byte 11 (0xff) is not valid UTF-8. Repair the source, "
        'or set text.on_bad_text = "record" to have such rows marked.',
    ),
    (
        {"on_long": "error"},
        'row 500: {long} tokens, the limit is 32. Set text.on_long to "truncate", "chunk" or "skip", '
        "or build an engine with a higher limit.",
    ),
]


@pytest.mark.parametrize(("policy", "message"), ERRORS, ids=[next(iter(policy)) for policy, _ in ERRORS])
def test_an_error_policy_stops_before_compute_and_names_the_row(
    engines: Engines, engine, mixed, tmp_path, monkeypatch, policy, message
):
    def computed(*arguments):
        raise AssertionError("a pass was run")

    (long,) = ids_of(engines.checkpoint("llama"), [LONG], limit=10_000)

    monkeypatch.setattr(runtime(str(engine)), "hidden_states", computed)
    with pytest.raises(RowRefused) as error:
        run(job(engine, mixed, tmp_path / "out", rows_per_shard=100, **policy))
    assert str(error.value) == message.format(long=len(long))
    assert error.value.exit_code == 3
    assert not list((tmp_path / "out" / "commits").iterdir())


# --- odd sources ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "last"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_source_without_rows_gives_an_empty_output_that_pyarrow_reads(engine, tmp_path, kind, chunked):
    rows = parquet(tmp_path / "in.parquet", {"text": pa.array([], pa.string()), "key": pa.array([], pa.int64())})
    on_long = "chunk" if chunked else "truncate"
    summary = run(job(engine, rows, tmp_path / "out", kind=kind, on_long=on_long, id_column="key", dtype="int8"))
    table = output_table(tmp_path / "out")
    assert (summary.complete, summary.totals.num_rows, summary.totals.num_shards, table.num_rows) == (True, 0, 1, 0)
    assert table.schema.equals(open_output(tmp_path / "out").schema, check_metadata=True)
    assert list(open_output(tmp_path / "out")) == []


def test_an_empty_file_among_others_loses_nothing(engine, tmp_path):
    for name, rows in {"a": ["one", "two"], "b": [], "c": ["three"]}.items():
        parquet(tmp_path / f"{name}.parquet", {"text": pa.array(rows, pa.string())})
    run(job(engine, tmp_path / "*.parquet", tmp_path / "out", carry=("text",)))
    assert output_table(tmp_path / "out").column("text").to_pylist() == ["one", "two", "three"]


def test_a_hundred_and_three_rows_in_shards_of_ten_are_all_there_once(engines: Engines, engine, tmp_path):
    rows = [f"row number {n}" for n in range(103)]
    source = parquet(tmp_path / "in.parquet", {"text": rows}, row_group_size=7)
    summary = run(job(engine, source, tmp_path / "out", carry=("text",), rows_per_shard=10, kind="last"))
    table = output_table(tmp_path / "out")
    assert summary.totals.num_shards == 11
    assert table.column("row").to_pylist() == list(range(103))
    assert table.column("text").to_pylist() == rows
    expected = reference(engines.checkpoint("llama"), ids_of(engines.checkpoint("llama"), rows), "last")
    assert errors(stored(tmp_path / "out"), expected).max() <= EXACT


def test_the_input_column_may_lie_inside_a_struct(engine, tmp_path):
    inner = pa.array([{"text": "one", "n": 1}, None, {"text": None, "n": 2}, {"text": "four", "n": 3}])
    rows = parquet(tmp_path / "in.parquet", pa.table({"doc": inner, "tags": pa.array([["x"], [], None, ["y"]])}))
    run(job(engine, rows, tmp_path / "out", column="doc.text", carry=("doc.n", "tags", "doc.text")))
    table = output_table(tmp_path / "out")
    assert outcomes(tmp_path / "out") == ["ok", "null", "null", "ok"]
    assert table.column("doc.n").to_pylist() == [1, None, 2, 3]
    assert table.column("tags").to_pylist() == [["x"], [], None, ["y"]]
    assert table.column("doc.text").to_pylist() == ["one", None, None, "four"]


# --- ids and carried columns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(["a", "a", "x/y", "..", "", "n" * 300, None, "/etc/passwd", "\n"]),
        pa.array([5, 5, -1, 2**62, 0, None, 1, 2, 3]),
        pa.array([b"\x00", b"\xff", b"", None, b"a", b"a", b"b", b"c", b"d"]),
    ],
    ids=["strings", "ints", "bytes"],
)
def test_ids_of_any_kind_are_kept_as_values_and_never_become_names(engine, tmp_path, ids):
    rows = parquet(tmp_path / "in.parquet", {"text": texts(9), "key": ids})
    before = {path for path in tmp_path.rglob("*") if path != rows}
    run(job(engine, rows, tmp_path / "out", id_column="key", rows_per_shard=4))
    assert output_table(tmp_path / "out").column("id").to_pylist() == ids.to_pylist()
    made = {str(path.relative_to(tmp_path / "out")) for path in {*tmp_path.rglob("*")} - before - {rows}} - {"."}
    shards = {f"commits/shard-0000{n}.json" for n in range(3)} | {
        f"data/{json.loads((tmp_path / 'out' / f'commits/shard-0000{n}.json').read_text())['data']}" for n in range(3)
    }
    assert made == {"job.json", "manifest.json", ".claims", "commits", "data", *shards}


def test_the_input_column_and_the_id_column_can_be_carried_too(engine, tmp_path):
    table = {"text": texts(9), "key": list(range(9)), "n": [None, *range(8)]}
    rows = parquet(tmp_path / "in.parquet", table)
    run(job(engine, rows, tmp_path / "out", id_column="key", carry=("n", "text", "key"), rows_per_shard=4))
    found = output_table(tmp_path / "out")
    assert found.column("id").to_pylist() == found.column("key").to_pylist() == table["key"]
    assert found.column("text").to_pylist() == table["text"]
    assert found.column("n").to_pylist() == table["n"]


def test_the_input_column_can_be_the_id(engine, tmp_path):
    rows = parquet(tmp_path / "in.parquet", {"text": texts(9)})
    run(job(engine, rows, tmp_path / "out", id_column="text", carry=("text",)))
    found = output_table(tmp_path / "out")
    assert found.column("id").to_pylist() == found.column("text").to_pylist() == texts(9)


@pytest.mark.parametrize(
    ("carry", "message"),
    [
        (
            ("n", "n"),
            'source.carry: column "n" would appear twice in the output, because it is listed twice. '
            "Leave it out of source.carry, or rename it in the source.",
        ),
        (
            ("row",),
            'source.carry: column "row" would appear twice in the output, which has a column of that name itself. '
            "Leave it out of source.carry, or rename it in the source.",
        ),
    ],
)
def test_a_column_that_would_appear_twice_is_refused_by_name(engine, tmp_path, carry, message):
    rows = parquet(tmp_path / "in.parquet", {"text": ["a"], "n": [1], "row": [7]})
    with pytest.raises(ColumnTaken) as error:
        run(job(engine, rows, tmp_path / "out", carry=carry))
    assert str(error.value) == message
    assert isinstance(error.value, SpecError)
    assert not (tmp_path / "out").exists()


# --- states that cannot be stored -----------------------------------------------------------------------------------


HOT = 77
"""The token whose state a float16 cannot hold."""


@pytest.fixture(scope="module")
def hot_engine(engines: Engines, tmp_path_factory) -> Path:
    """A Llama whose final norm is large and whose last layer points one token along a single dimension."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    from extract.engine.builder import build
    from extract.engine.recipe import Recipe

    root = tmp_path_factory.mktemp("hot")
    checkpoint = rig.tiny_checkpoint(root / "checkpoint", "llama")
    weights = load_file(checkpoint / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[HOT] = 0
    embedding[HOT, 5] = 1e4  # a state of one dimension: its norm is sqrt(H) there, 8 times the usual
    weights["model.norm.weight"] *= 0.5 * 65504 / 8 / weights["model.norm.weight"].max()
    weights["model.norm.weight"][5] = 1.5 * 65504 / 8
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert AutoTokenizer.from_pretrained(checkpoint).convert_ids_to_tokens(HOT)
    assert torch.isfinite(weights["model.norm.weight"]).all()
    build(checkpoint, root / "engine", Recipe(dtype="float32", device="cpu", max_input_tokens=LIMIT))
    return root / "engine"


@pytest.fixture(scope="module")
def hot_rows(tmp_path_factory) -> Path:
    ids = [[10, 11], [12, HOT, 13], [14], [HOT], [15, 16, 17]]
    return parquet(tmp_path_factory.mktemp("hot-rows") / "in.parquet", {"ids": ids})


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("tokens", {1, 3}), ("first", {3}), ("mean", {3})],  # the mean over [12, HOT, 13] fits again
)
def test_a_state_too_large_for_float16_marks_its_row_alone_and_is_counted(hot_engine, hot_rows, tmp_path, kind, lost):
    options = {"column": "ids", "input": "input_ids", "dtype": "float16", "kind": kind}
    summary = run(job(hot_engine, hot_rows, tmp_path / "out", **options))
    assert outcomes(tmp_path / "out") == ["non_finite" if row in lost else "ok" for row in range(5)]
    states = stored(tmp_path / "out")
    assert {row for row, one in enumerate(states) if one is None} == lost
    assert all(np.isfinite(one).all() for one in states if one is not None)
    assert output_table(tmp_path / "out").column("input_ids").to_pylist()[1] == [12, HOT, 13]
    assert summary.totals.overflowed == len(lost)
    assert (
        f"warning    {len(lost)} rows have states too large for the stored type: they are non_finite. "
        "Store float32 or bfloat16 instead"
    ) in summary_text(summary).splitlines()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_wider_type_holds_the_same_rows(hot_engine, hot_rows, tmp_path, dtype):
    summary = run(job(hot_engine, hot_rows, tmp_path / "out", column="ids", input="input_ids", dtype=dtype))
    assert summary.totals.outcomes == {"ok": 5}
    assert summary.totals.overflowed == 0
    assert "warning" not in summary_text(summary)


def test_a_state_that_cannot_be_stored_stops_the_job_when_it_is_to_be_an_error(hot_engine, hot_rows, tmp_path):
    options = {"column": "ids", "input": "input_ids", "dtype": "float16", "on_non_finite": "error"}
    with pytest.raises(NonFiniteStates) as error:
        run(job(hot_engine, hot_rows, tmp_path / "out", rows_per_shard=1, **options))
    assert str(error.value) == (
        "shard 00001, row 1, token 1: 1 of 64 values cannot be stored as float16 (0 NaN, 0 inf, 1 beyond 65504). "
        'Nothing was written for this shard. Store states.dtype = "bfloat16" or "float32", '
        'or set text.on_non_finite = "record" to go on without such rows.'
    )
    assert error.value.exit_code == 6
    assert [path.name for path in (tmp_path / "out" / "commits").iterdir()] == ["shard-00000.json"]
    assert not list((tmp_path / "out").glob("tmp/*"))


def test_totals_that_do_not_add_up_are_an_error_and_not_a_summary(engine, tmp_path):
    """A record that says another number of rows than its outcomes is found when the job is closed."""
    rows = parquet(tmp_path / "in.parquet", {"text": texts(9)})
    run(job(engine, rows, tmp_path / "out", rows_per_shard=3))
    with pytest.raises(NotTiled) as error:
        rewrite_shard(tmp_path / "out", 1, lambda table: table, num_rows_out=4)
    assert str(error.value) == (
        f"{tmp_path / 'out'}: shard 1 has 4 rows, its outcomes add up to another number. "
        f"Run the job again to make what is missing, or: extract verify {tmp_path / 'out'}"
    )
    assert error.value.exit_code == 7


def test_the_outcomes_are_seven_and_stand_in_the_schema(engine, tmp_path):
    rows = parquet(tmp_path / "in.parquet", {"text": ["a"]})
    run(job(engine, rows, tmp_path / "out"))
    column = output_table(tmp_path / "out").column("outcome")
    assert column.chunk(0).dictionary.to_pylist() == [str(outcome) for outcome in OUTCOMES]
    assert len(OUTCOMES) == 7
