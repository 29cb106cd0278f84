"""What shares a pass with a row changes nothing in it: not their number, their lengths, their order or the budget.

A batch of one is no special case, and a kernel that picks its way by the number of tokens still gives one answer.
"""

import number_rig
import numpy as np
import pytest
import rig
from number_rig import BFLOAT16, EXACT, KINDS, LIMIT, SUBJECTS, worst

from extract.packing import TokenBudget, pack
from extract.records import OUTCOME_CODE, Outcome, TokenRows

LENGTHS = np.random.default_rng(13).integers(1, LIMIT + 1, 40).tolist()
IDS = rig.random_sequences(LENGTHS, seed=13)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_states_do_not_depend_on_how_many_rows_share_a_pass(subjects, tmp_path, subject):
    expected = subjects.expected(subject, IDS)
    for size in (1, 9, 40):
        found = subjects.states(subject, IDS, tmp_path / str(size), max_sequences=size)
        assert worst(found, expected) <= EXACT, size
    in_order = sorted(range(len(IDS)), key=lambda row: LENGTHS[row])
    found = subjects.states(subject, [IDS[row] for row in in_order], tmp_path / "sorted", share=False)
    assert worst(found, [expected[row] for row in in_order]) <= EXACT


@pytest.mark.parametrize("subject", SUBJECTS[4:10])
def test_one_state_a_row_does_not_depend_on_how_many_rows_share_a_pass(subjects, tmp_path, subject):
    for kind in KINDS[1:]:
        for size in (1, 9):
            found = subjects.states(subject, IDS, tmp_path / f"{kind}{size}", kind=kind, max_sequences=size)
            assert worst(found, subjects.expected(subject, IDS, kind)) <= EXACT


@pytest.mark.parametrize("dtype", [BFLOAT16])
@pytest.mark.parametrize("subject", ["llama-own", "mistral-own", "mistral-transformers"])
def test_in_low_precision_rows_stay_within_the_bound_of_the_contract(subjects, tmp_path, subject, dtype):
    from extract.engine.contract import read_contract

    name, _, decoder = subject.partition("-")
    engine = number_rig.build_engine(subjects.checkpoint(name), tmp_path / "engine", decoder=decoder, dtype=dtype)
    bound = read_contract(engine).fidelity.bound
    assert bound < 0.5
    alone = number_rig.states_of(engine, IDS, tmp_path / "alone", max_sequences=1)
    for size in (7, 40):
        found = number_rig.states_of(engine, IDS, tmp_path / str(size), max_sequences=size)
        assert worst(found, subjects.expected(name, IDS)) <= bound
        assert worst(found, alone) <= bound


@pytest.mark.parametrize("subject", SUBJECTS[:-1])
def test_a_row_in_a_pass_of_any_number_of_tokens_is_the_row_alone(subjects, subject):
    """255, 256, 257 and 8,192 tokens: where kernels change their way."""
    from job_rig import runtime

    engine = runtime(str(subjects.engine(subject)))
    row = IDS[0]
    (expected,) = subjects.expected(subject, [row])
    for tokens in (255, 256, 257, 8192):
        rest, count = tokens - len(row), (tokens - len(row)) // 50
        lengths = np.full(count, rest // count)
        lengths[: rest % count] += 1
        beside = rig.random_sequences(lengths.tolist(), seed=tokens)
        place = len(beside) // 2
        (batch,) = pack(
            token_rows([*beside[:place], row, *beside[place:]]), TokenBudget(max_tokens=8192, max_sequences=300)
        )
        assert len(batch.input_ids) == tokens
        states = engine.hidden_states(batch, "tokens")
        index = batch.members.tolist().index(place)
        found = states[batch.cu_seqlens[index] : batch.cu_seqlens[index + 1]]
        assert rig.relative_error([np.asarray(found)], [expected]) <= EXACT


def token_rows(ids):
    lengths = [len(row) for row in ids]
    return TokenRows(
        source_index=np.arange(len(ids), dtype=np.int32),
        chunk=np.zeros(len(ids), np.int32),
        outcome=np.full(len(ids), OUTCOME_CODE[Outcome.OK], np.uint8),
        num_tokens_original=np.array(lengths, np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=np.concatenate(ids).astype(np.int32),
    )
