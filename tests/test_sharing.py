"""Shared rows: every row finds its tokens among those computed before it, and what is kept is what many need."""

from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.cpu.sharing import kept_prefixes, paths, plain_rows, shared_rows

UNHURRIED = settings(deadline=None)

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=20)


def batch(rows):
    cu_seqlens = np.array([0, *accumulate(map(len, rows))], np.int32)
    return np.array([token for row in rows for token in row], np.int32), cu_seqlens


def shared(rows, min_shared=1):
    return shared_rows(*batch(rows), min_shared)


def token_lists(rows):
    return [rows.input_ids[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]


def paths_alone(rows, kept):
    """Paths if all rows are one micro-batch, and the token that each number stands for."""
    begin = np.maximum(rows.shared, kept)
    count = rows.lengths - begin
    num_kept = int(np.maximum(kept - rows.shared, 0).sum())
    path = paths(rows, kept, begin, num_kept + np.cumsum(count) - count)
    return [path[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)], num_kept


@UNHURRIED
@given(ROWS)
def test_every_different_prefix_is_computed_once(rows):
    prefixes = {tuple(row[:stop]) for row in rows for stop in range(1, len(row) + 1)}
    assert shared(rows).num_own == len(prefixes)


@UNHURRIED
@given(ROWS, st.integers(1, 9))
def test_rows_are_the_different_sequences_in_order_and_each_sequence_knows_its_row(rows, min_shared):
    found = shared(rows, min_shared)
    assert token_lists(found) == sorted(list(row) for row in {*map(tuple, rows)})
    assert [token_lists(found)[place] for place in found.row_of] == rows


@UNHURRIED
@given(ROWS, st.integers(1, 9))
def test_a_common_prefix_shorter_than_the_least_is_not_shared(rows, min_shared):
    counts = shared(rows, min_shared).shared
    assert ((counts == 0) | (counts >= min_shared)).all()


def test_plain_rows_are_the_sequences_as_they_are():
    rows = [[3, 1], [2], [2], [1, 1, 1]]
    found = plain_rows(*batch(rows))
    assert token_lists(found) == rows
    assert found.num_own == 7 and found.row_of is None


@UNHURRIED
@given(ROWS, st.integers(1, 6), st.integers(0, 20))
def test_equal_prefixes_are_one_token_and_others_are_not(rows, num_runs, max_kept):
    found = shared(rows)
    kept = kept_prefixes(found, num_runs=num_runs, threads=1, max_kept=max_kept)
    numbers, num_kept = paths_alone(found, kept)
    token_of = {}
    for row, path, keeps in zip(token_lists(found), numbers, kept, strict=True):
        for place, number in enumerate(path):
            assert token_of.setdefault(number, row[: place + 1]) == row[: place + 1]
            assert (number < num_kept) == (place < keeps)
    assert sorted(token_of) == list(range(found.num_own))
    assert num_kept <= max_kept


def test_a_row_shares_with_all_rows_before_it_through_the_one_just_before_it():
    found = shared([[1, 2, 3], [1, 2, 4, 4], [1, 2, 4, 5], [1, 6]])
    numbers, _ = paths_alone(found, np.zeros(4, np.int64))
    assert numbers == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 5], [0, 6]]


def test_what_as_many_runs_as_threads_need_is_kept():
    rows = shared([[1] * 10 + [place] for place in range(12)] + [[2] * 10 + [place] for place in range(12)])
    for threads, keeps in ((1, 10), (2, 10), (3, 0)):
        found = kept_prefixes(rows, num_runs=4, threads=threads, max_kept=100)
        assert found.tolist() == [keeps] * 24


def test_nothing_is_kept_for_one_run():
    rows = shared([[1] * 10 + [place] for place in range(12)])
    assert kept_prefixes(rows, num_runs=1, threads=1, max_kept=100).tolist() == [0] * 12


def test_the_tokens_of_most_rows_are_kept_where_room_is_scarce():
    few, many = (
        [[1] * 10 + [0] * 10 + [place] for place in range(30)],
        [[1] * 10 + [1 + place] for place in range(60)],
    )
    rows = shared(few + many)
    assert kept_prefixes(rows, num_runs=20, threads=2, max_kept=15).tolist() == [15] * 30 + [10] * 60


def test_a_group_within_a_group_takes_room_only_for_what_it_shares_beyond():
    outer = [[1] * 10 + [place] for place in range(2, 32)]
    inner = [[1] * 10 + [40] * 10 + [place] for place in range(30)]
    rows = shared([*outer, *inner, [2]])
    assert kept_prefixes(rows, num_runs=20, threads=2, max_kept=20).tolist() == [10] * 30 + [20] * 30 + [0]
