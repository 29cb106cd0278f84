"""Equal runs: under the budget, as even as can be, and cut where a run begins at no cost."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extract.cpu.balance import LEAST_TOKENS, equal_runs

UNHURRIED = settings(deadline=None)

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def runs(weights, entry=None, *, budget=256, threads=2):
    """First rows, and tokens of each run."""
    weights = np.array(weights, np.int64)
    entry = np.zeros(len(weights), np.int64) if entry is None else np.array(entry, np.int64)
    starts = equal_runs(weights, entry, budget=budget, threads=threads)
    return starts.tolist(), (np.add.reduceat(weights, starts) + entry[starts]).tolist()


@UNHURRIED
@given(WEIGHTS, st.integers(1, 100), st.integers(1, 5))
@example([34, 28, 22, 30, 31, 1], 78, 1)  # cuts next to a third and two thirds give 62, 22 and 62
def test_two_runs_differ_by_the_largest_row_at_most(weights, budget, threads):
    _, sizes = runs(weights, budget=budget, threads=threads)
    assert max(sizes) - min(sizes) <= max(weights)


@UNHURRIED
@given(WEIGHTS, st.integers(1, 100), st.integers(1, 5))
@example([31, 23, 1], 75, 5)  # as many runs as rows, one of them much shorter
def test_no_run_is_empty(weights, budget, threads):
    starts, _ = runs(weights, budget=budget, threads=threads)
    assert starts == sorted(set(starts))


@UNHURRIED
@given(WEIGHTS, st.integers(1, 100), st.integers(1, 5), st.data())
def test_a_run_with_what_it_computes_again_stays_under_the_budget(weights, budget, threads, data):
    entry = [0, *(data.draw(st.sampled_from([0, 0, 3, 30])) for _ in weights[1:])]
    starts, sizes = runs(weights, entry, budget=budget, threads=threads)
    assert starts[0] == 0 and starts == sorted(set(starts))
    for size, start, stop in zip(sizes, starts, [*starts[1:], len(weights)], strict=True):
        assert size <= budget or stop - start == 1


@UNHURRIED
@given(WEIGHTS, st.integers(40, 100), st.integers(1, 5))
def test_each_thread_gets_as_many_runs_where_there_are_rows_and_tokens_for_it(weights, budget, threads):
    starts, _ = runs(weights, budget=budget, threads=threads)
    if min(len(weights), sum(weights) // LEAST_TOKENS) >= len(starts) + threads:
        assert len(starts) % threads == 0


@UNHURRIED
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(40, 100), st.integers(1, 3))
def test_the_largest_run_is_as_small_as_their_number_allows(weights, budget, threads):
    starts, sizes = runs(weights, budget=budget, threads=threads)
    others = combinations(range(1, len(weights)), len(starts) - 1)
    assert max(sizes) == min(max(np.add.reduceat(weights, [0, *cuts])) for cuts in others)


def test_rows_of_one_length_are_shared_out_evenly():
    assert runs([30] * 24, budget=100, threads=2)[1] == [90] * 8


def test_rows_that_would_be_costly_to_separate_stay_together():
    starts, sizes = runs([128, 38, 38, 38] * 5, [0, 90, 90, 90] * 5, budget=256, threads=2)
    assert starts == [0, 4, 8, 12, 16]
    assert sizes == [242] * 5


@pytest.mark.parametrize(
    ("entry", "starts", "sizes"),
    [
        pytest.param([0, 50, 50, 50, 10, 50, 50], [0, 4], [120, 90], id="where little is shared"),
        pytest.param([0, 50, 50, 50, 50, 50, 40], [0, 3], [100, 150], id="in the middle"),
    ],
)
def test_rows_too_many_for_one_thread_are_separated_where_it_costs_least(entry, starts, sizes):
    assert runs([60, 20, 20, 20, 40, 20, 20], entry, budget=1000) == (starts, sizes)


def test_rows_too_many_for_one_run_are_separated():
    assert runs([100, 20, 20, 20, 20, 20], [0, 50, 50, 50, 50, 50], budget=160, threads=1) == ([0, 1], [100, 150])


def test_runs_beside_a_long_row_are_alike():
    assert runs([40] + [1] * 60, budget=40, threads=3) == ([0, 1, 28], [40, 27, 33])


def test_no_rows_make_no_runs():
    assert runs([])[0] == []
