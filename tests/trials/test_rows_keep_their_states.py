"""Each row gets its own states, all of them, also the second time, in small passes and beside rows that begin alike."""

import numpy as np
import pytest
import rig
from number_rig import EXACT, LIMIT, SUBJECTS, worst


@pytest.mark.parametrize("subject", SUBJECTS)
def test_rows_of_one_token_each_are_told_apart_also_in_a_second_job_and_in_passes_of_four(subjects, tmp_path, subject):
    ids = [[token] for token in np.random.default_rng(14).permutation(np.arange(4, 68)).tolist()]
    expected = subjects.expected(subject, ids, "last")
    for output, options in {"first": {}, "second": {}, "fours": {"max_sequences": 4}}.items():
        found = subjects.states(subject, ids, tmp_path / output, kind="last", **options)
        assert worst(found, expected) <= EXACT
        assert [int(np.argmin([np.abs(one - other).max() for other in expected])) for one in found] == list(range(64))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_rows_that_begin_alike_and_exact_copies_come_back_whole(subjects, tmp_path, subject):
    """The common beginning is longer than the least that is shared and than a window of attention."""
    prefix, *ends = rig.random_sequences([64, *range(1, 9), 1, 20, 32, 32], seed=15)
    ids = [prefix + end for end in ends] + [prefix, prefix, prefix + ends[0], prefix + ends[3], prefix[:40], ends[7]]
    assert max(map(len, ids)) == LIMIT
    for kind in ("tokens", "last", "mean"):
        found = subjects.states(subject, ids, tmp_path / kind, kind=kind)
        assert kind != "tokens" or [len(states) for states in found] == list(map(len, ids))
        assert worst(found, subjects.expected(subject, ids, kind)) <= EXACT
