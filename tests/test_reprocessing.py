"""Rows of an output computed again: chosen shards, rows or outcomes, with the same states as the first time."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from job_rig import Engines, errors, job, output_table, parquet, run, runtime, stored, texts

from extract.derivation import Change, derive
from extract.job import OtherJob
from extract.output import open_output
from extract.reprocessing import NothingChosen, respec
from extract.selection import BadSelection
from extract.verification import verify

ROWS = 95


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine("llama")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    rows = pa.array([None if n % 17 == 3 else text for n, text in enumerate(texts(ROWS))])
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", {"text": rows, "n": list(range(ROWS))})


@pytest.fixture(scope="module")
def first(engine, source, tmp_path_factory) -> Path:
    """A job of 10 shards with limits of its own; do not change its files."""
    output = tmp_path_factory.mktemp("first") / "out"
    run(job(engine, source, output, rows_per_shard=10, max_tokens=100, max_sequences=7, carry=("n",)))
    return output


def rows_of(output: Path) -> list[int]:
    return output_table(output).column("row").to_pylist()


def part(output: Path, rows: list[int]) -> pa.Table:
    table = output_table(output).replace_schema_metadata(None)
    return table.filter(pa.compute.is_in(table.column("row"), pa.array(rows))).combine_chunks()


@pytest.mark.parametrize(
    ("shards", "rows"),
    [
        ("3", range(30, 40)),
        ("0,4-5", [*range(10), *range(40, 60)]),
        ("2,9", [*range(20, 30), *range(90, 95)]),
        ("0-9", range(95)),
    ],
)
def test_chosen_shards_come_out_bit_for_bit(first, tmp_path, shards, rows):
    run(respec(first, tmp_path / "again", shards=shards))
    assert rows_of(tmp_path / "again") == list(rows)
    assert open_output(tmp_path / "again").job.rows_per_shard == 10  # so that passes are composed as before
    assert part(tmp_path / "again", list(rows)).equals(part(first, list(rows)))
    assert verify(tmp_path / "again", recompute=5).complete


def test_chosen_rows_come_out_within_the_rounding_of_another_pass(first, tmp_path):
    run(respec(first, tmp_path / "again", rows="4,17-19,33-61,94"))
    rows = [4, *range(17, 20), *range(33, 62), 94]
    assert rows_of(tmp_path / "again") == rows
    one, other = stored(tmp_path / "again"), [stored(first)[row] for row in rows]
    assert [a is None for a in one] == [b is None for b in other]
    assert errors([a for a in one if a is not None], [b for b in other if b is not None]).max() <= 1e-5
    names = [name for name in output_table(first).column_names if name != "hidden_states"]
    assert part(tmp_path / "again", rows).select(names).equals(part(first, rows).select(names))


def test_chosen_outcomes_are_all_rows_that_ended_so(first, tmp_path):
    run(respec(first, tmp_path / "nulls", outcomes=["null"]))
    assert rows_of(tmp_path / "nulls") == [n for n in range(ROWS) if n % 17 == 3]
    run(respec(first, tmp_path / "others", outcomes=["ok", "truncated"]))
    assert rows_of(tmp_path / "others") == [n for n in range(ROWS) if n % 17 != 3]


def test_shards_rows_and_outcomes_narrow_each_other(first, tmp_path):
    run(respec(first, tmp_path / "again", shards="1-4", rows="18-40", outcomes=["null"]))
    assert rows_of(tmp_path / "again") == [20, 37]


def test_an_unfinished_output_gives_what_it_has(engine, source, first, tmp_path):
    shutil.copytree(first, tmp_path / "half")
    for shard in (1, 9):
        (tmp_path / "half" / "commits" / f"shard-0000{shard}.json").unlink()
    run(respec(tmp_path / "half", tmp_path / "again", rows="5-25"))
    assert rows_of(tmp_path / "again") == [*range(5, 10), *range(20, 26)]


def test_rows_of_a_selection_keep_their_positions(engine, source, tmp_path):
    run(job(engine, source, tmp_path / "out", rows="10-19,50-69", rows_per_shard=8))
    run(respec(tmp_path / "out", tmp_path / "again", shards="1"))
    assert rows_of(tmp_path / "again") == [18, 19, *range(50, 56)]
    assert part(tmp_path / "again", rows_of(tmp_path / "again")).equals(
        part(tmp_path / "out", [18, 19, *range(50, 56)])
    )


def test_a_row_lost_to_float16_is_whole_in_float32(engine, source, tmp_path, monkeypatch):
    loaded = runtime(str(engine))
    plain = loaded.hidden_states

    def large(batch, kind):
        states = plain(batch, kind).copy()
        states[batch.input_ids % 40 == 5] *= 1e5
        return states

    monkeypatch.setattr(loaded, "hidden_states", large)
    run(job(engine, source, tmp_path / "out", dtype="float16"))
    lost = [row.row for row in open_output(tmp_path / "out") if row.outcome == "non_finite"]
    assert 0 < len(lost) < ROWS
    run(respec(tmp_path / "out", tmp_path / "again", outcomes=["non_finite"], change=Change(dtype="float32")))
    assert rows_of(tmp_path / "again") == lost
    assert all(np.isfinite(states).all() for states in stored(tmp_path / "again"))


def test_another_kind_and_another_engine(engines: Engines, first, tmp_path):
    run(respec(first, tmp_path / "last", shards="2", change=Change(pool="last", rows_per_shard=4)))
    every = stored(first)[20:30]
    pairs = [(a, b[-1]) for a, b in zip(stored(tmp_path / "last"), every, strict=True) if b is not None]
    assert errors([a for a, _ in pairs], [b for _, b in pairs]).max() <= 1e-5
    spec = respec(first, tmp_path / "gpt2", shards="2", engine=str(engines.engine("gpt2")))
    assert (spec.run.max_tokens, spec.run.max_sequences) == (None, None)  # these were the first engine's
    run(spec)
    assert rows_of(tmp_path / "gpt2") == list(range(20, 30))


def test_a_pooled_output_made_from_another_one_is_computed_as_it_is(first, tmp_path):
    derive(first, tmp_path / "mean", Change(pool="mean", dtype="float16", rows_per_shard=40))
    run(respec(tmp_path / "mean", tmp_path / "again", rows="0-9"))
    assert open_output(tmp_path / "again").kind == "mean"
    one, other = stored(tmp_path / "again"), stored(tmp_path / "mean")[:10]
    assert errors([a for a in one if a is not None], [b for b in other if b is not None]).max() <= 2**-9


def test_a_stream_is_read_by_position_the_second_time(engine, source, tmp_path):
    spec = job(engine, source.parent, tmp_path / "out", format="hf", streaming=True, rows_per_shard=10)
    run(spec)
    run(respec(tmp_path / "out", tmp_path / "again", shards="3"))
    assert part(tmp_path / "again", list(range(30, 40))).equals(part(tmp_path / "out", list(range(30, 40))))


def test_the_first_output_is_never_the_place_of_the_second(first):
    with pytest.raises(OtherJob):
        run(respec(first, first, shards="0"))


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ({"shards": "12"}, "in shards 12"),
        ({"rows": "95-99"}, "in rows 95-99"),
        ({"outcomes": ["empty", "bad_text"]}, "empty, bad_text"),
        ({"shards": "1", "rows": "0-5", "outcomes": ["null"]}, "in shards 1 and in rows 0-5 and null"),
    ],
)
def test_a_choice_of_nothing_is_refused(first, tmp_path, choice, asked):
    with pytest.raises(NothingChosen) as error:
        respec(first, tmp_path / "again", **choice)
    assert str(error.value) == f"{first}: no row is {asked}, so there is nothing to do again."
    assert error.value.exit_code == 2


def test_ranges_that_do_not_parse_are_refused(first, tmp_path):
    for choice in ({"shards": "x"}, {"rows": "5-3"}):
        with pytest.raises(BadSelection):
            respec(first, tmp_path / "again", **choice)
