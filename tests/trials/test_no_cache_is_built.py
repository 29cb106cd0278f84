"""A forward pass keeps no keys and values for a next token that never comes."""

import pytest
import rig
from job_rig import runtime
from number_rig import EXACT, SUBJECTS
from test_batch_independence import token_rows

from extract.packing import TokenBudget, pack

IDS = rig.random_sequences([3, 40, 7], seed=18)


@pytest.mark.parametrize("subject", [subject for subject in SUBJECTS if subject.endswith("-transformers")])
def test_no_pass_makes_a_cache_though_the_config_asks_for_one(subjects, subject, monkeypatch):
    import transformers.cache_utils

    engine = runtime(str(subjects.engine(subject)))

    def made(*arguments, **options):
        raise AssertionError("a cache was made")

    for name, kind in vars(transformers.cache_utils).items():
        if isinstance(kind, type) and issubclass(kind, transformers.cache_utils.Cache):
            monkeypatch.setattr(kind, "__init__", made, raising=True)
            assert name
    for batch in pack(token_rows(IDS), TokenBudget(max_tokens=1, max_sequences=8)):
        found = engine.hidden_states(batch, "tokens")
        expected = subjects.expected(subject, [batch.input_ids.tolist()])
        assert rig.relative_error([found], expected) <= EXACT
