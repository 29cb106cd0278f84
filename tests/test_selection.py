"""Row ranges: text and positions say the same, and a job on some rows keeps their places in the source."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from job_rig import Engines, errors, ids_of, job, output_table, parquet, reference, run, stored, texts

from extract.jobs import plan
from extract.output import NoSuchRow, open_output
from extract.selection import BadSelection, format_selection, parse_selection
from extract.text.tokens import RowRefused

positions = st.lists(st.one_of(st.integers(0, 60), st.integers(0, 2**40)), min_size=1, unique=True).map(sorted)

ADVICE = 'Write ascending positions and ranges, such as "0-99,250".'


@settings(deadline=None)
@given(positions)
@example([0])
@example([0, 1, 2, 5, 7, 8])
def test_positions_survive_being_written_and_read(rows):
    selection = parse_selection(format_selection(np.array(rows)))
    assert selection.positions(0, selection.num_rows).tolist() == rows
    assert selection.num_rows == len(rows)


@settings(deadline=None)
@given(positions, st.data())
def test_an_index_and_its_position_are_inverse(rows, data):
    selection = parse_selection(format_selection(np.array(rows)))
    first = data.draw(st.integers(0, len(rows)))
    last = data.draw(st.integers(first, len(rows)))
    found = selection.positions(first, last).tolist()
    assert found == rows[first:last]
    assert [selection.index_of(row) for row in found] == list(range(first, last))
    for row in (rows[0] - 1, rows[-1] + 1, *(row + 1 for row in rows)):
        assert row in rows or selection.index_of(row) is None


def test_ranges_include_their_ends_and_may_touch():
    selection = parse_selection("0-2,3, 7 ,9-9,10-11")
    assert selection.positions(0, selection.num_rows).tolist() == [0, 1, 2, 3, 7, 9, 10, 11]
    assert format_selection(selection.positions(0, 8)) == "0-3,7,9-11"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", '"" is neither a position nor a range'),
        ("1,", '"" is neither a position nor a range'),
        ("a-b", '"a-b" is neither a position nor a range'),
        ("-5", '"-5" is neither a position nor a range'),
        ("5-", '"5-" is neither a position nor a range'),
        ("1-2-3", '"1-2-3" is neither a position nor a range'),
        ("1.5", '"1.5" is neither a position nor a range'),
        ("1" * 30, f'"{"1" * 30}" is neither a position nor a range'),
        ("5-3", '"5-3" does not come after what is before it'),
        ("4,4", '"4" does not come after what is before it'),
        ("0-9,5", '"5" does not come after what is before it'),
        ("9,1", '"1" does not come after what is before it'),
    ],
)
def test_what_is_no_selection_is_refused_with_the_part_that_is_wrong(text, problem):
    with pytest.raises(BadSelection) as error:
        parse_selection(text)
    assert str(error.value) == f'source.rows is "{text}": {problem}. {ADVICE}'
    assert error.value.exit_code == 2


# --- jobs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    table = {"text": texts(200), "n": list(range(200))}
    return parquet(tmp_path_factory.mktemp("rows") / "in.parquet", table, row_group_size=13)


@pytest.mark.parametrize("rows", ["0", "199", "7-12,14,60-99,150,198-199", "0-199"])
def test_a_job_on_some_rows_keeps_their_positions_and_states(engines: Engines, source, tmp_path, rows):
    chosen = parse_selection(rows).positions(0, parse_selection(rows).num_rows).tolist()
    summary = run(job(engines.engine("llama"), source, tmp_path / "out", rows=rows, rows_per_shard=20, carry=("n",)))
    table = output_table(tmp_path / "out")
    assert table.column("row").to_pylist() == table.column("n").to_pylist() == chosen
    assert summary.totals.num_rows == len(chosen)
    ids = ids_of(engines.checkpoint("llama"), [texts(200)[row] for row in chosen])
    assert errors(stored(tmp_path / "out"), reference(engines.checkpoint("llama"), ids)).max() <= 1e-5
    output = open_output(tmp_path / "out")
    assert [output.row(row).row for row in chosen[:3]] == chosen[:3]


def test_rows_that_were_not_selected_are_not_there(engines: Engines, source, tmp_path):
    run(job(engines.engine("llama"), source, tmp_path / "out", rows="3-5,9"))
    output = open_output(tmp_path / "out")
    for row in (0, 6, 8, 10, 500):
        with pytest.raises(NoSuchRow) as error:
            output.row(row)
        assert str(error.value) == (
            f"{tmp_path / 'out'}: no row {row}: it is not among the 4 rows that the job selected."
        )


def test_a_selection_counts_within_the_limit(engines: Engines, source, tmp_path):
    run(job(engines.engine("llama"), source, tmp_path / "out", rows="3-5,9", limit=10))
    assert output_table(tmp_path / "out").column("row").to_pylist() == [3, 4, 5, 9]


@pytest.mark.parametrize("options", [{"rows": "5,200"}, {"rows": "0-10", "limit": 10}])
def test_a_position_past_the_source_is_refused_by_plan_and_run(engines: Engines, source, tmp_path, options):
    spec = job(engines.engine("llama"), source, tmp_path / "out", **options)
    last = {"5,200": (200, 199), "0-10": (10, 9)}[options["rows"]]
    for refuse in (plan, run):
        with pytest.raises(BadSelection) as error:
            refuse(spec)
        problem = f"position {last[0]} lies past the source's last row, {last[1]}"
        assert str(error.value) == f'source.rows is "{options["rows"]}": {problem}. {ADVICE}'
    assert not (tmp_path / "out").exists()


def test_messages_name_the_position_in_the_source(engines: Engines, tmp_path):
    source = parquet(tmp_path / "in.parquet", {"text": ["a", None, "b", "c", None]})
    with pytest.raises(RowRefused, match=r"^row 4: null\. "):
        run(job(engines.engine("llama"), source, tmp_path / "out", rows="0,2-4", on_null="error"))
