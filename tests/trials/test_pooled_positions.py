"""One state a row is that row's own first, last or mean state, whatever the lengths beside it and whatever pads."""

import pytest
import rig
from number_rig import EXACT, LIMIT, SUBJECTS, worst

IDS = rig.random_sequences([5, LIMIT, 1, 17, 1, LIMIT, 2], seed=16)


@pytest.mark.parametrize("kind", ["last", "first", "mean"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_rows_of_very_unequal_length_in_one_pass_give_their_own_state(subjects, tmp_path, subject, kind):
    found = subjects.states(subject, IDS, tmp_path, kind=kind)
    assert worst(found, subjects.expected(subject, IDS, kind)) <= EXACT
    per_token = subjects.expected(subject, IDS)
    for other in {"last": (-2, 0), "first": (1, -1)}.get(kind, ()):
        far = [states[other] for states in per_token if len(states) > 2]
        near = [state for state, ids in zip(found, IDS, strict=True) if len(ids) > 2]
        assert all(rig.relative_error([one], [two]) > 0.05 for one, two in zip(near, far, strict=True))
