"""Token batches: the budget holds, nothing is lost, and the composition depends on the sequences alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract.packing import TokenBudget, pack, shared_prefixes, token_positions
from extract.records import TokenRows

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def token_rows(lengths: list[int]) -> TokenRows:
    count = len(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenRows(
        source_index=np.arange(count, dtype=np.int32),
        chunk=np.zeros(count, np.int32),
        outcome=np.zeros(count, np.uint8),
        num_tokens_original=np.array(lengths, np.int32),
        offsets=offsets,
        input_ids=np.arange(offsets[-1], dtype=np.int32),
    )


@given(LENGTHS, st.integers(1, 100), st.integers(1, 9), st.booleans())
def test_a_batch_never_exceeds_the_token_budget(lengths, max_tokens, max_sequences, equal_length):
    budget = TokenBudget(max_tokens=max_tokens, max_sequences=max_sequences, equal_length=equal_length)
    for batch in pack(token_rows(lengths), budget):
        assert 1 <= batch.num_sequences <= max_sequences
        assert batch.num_tokens <= max_tokens or batch.num_sequences == 1
        assert batch.num_tokens == len(batch.input_ids)
        if equal_length:
            assert len(set(batch.lengths.tolist())) == 1


@given(LENGTHS, st.integers(1, 100), st.integers(1, 9), st.booleans())
def test_every_sequence_is_in_exactly_one_batch_with_its_own_tokens(lengths, max_tokens, max_sequences, equal_length):
    rows = token_rows(lengths)
    seen = []
    for batch in pack(rows, TokenBudget(max_tokens=max_tokens, max_sequences=max_sequences, equal_length=equal_length)):
        for place, member in enumerate(batch.members):
            ids = batch.input_ids[batch.cu_seqlens[place] : batch.cu_seqlens[place + 1]]
            assert ids.tolist() == rows.input_ids[rows.offsets[member] : rows.offsets[member + 1]].tolist()
            seen.append(int(member))
    assert sorted(seen) == [row for row, length in enumerate(lengths) if length]


def test_a_sequence_longer_than_the_budget_runs_alone():
    batches = list(pack(token_rows([3, 50, 4]), TokenBudget(max_tokens=8, max_sequences=8)))
    assert [batch.members.tolist() for batch in batches] == [[1], [2, 0]]


def test_one_long_row_among_thousands_of_short_ones_does_not_widen_the_batch():
    lengths = [3] * 8191 + [128]
    batches = list(pack(token_rows(lengths), TokenBudget(max_tokens=4096, max_sequences=8192)))
    assert max(batch.num_tokens for batch in batches) <= 4096
    assert sum(batch.num_tokens for batch in batches) == sum(lengths)


def test_the_longest_sequences_come_first_and_equal_ones_in_row_order():
    batch = next(pack(token_rows([2, 7, 2, 7]), TokenBudget(max_tokens=100, max_sequences=100)))
    assert batch.members.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("members", [[], [0], [2, 0], [1, 1]])
def test_token_positions_are_the_spans_of_the_members(members):
    offsets = np.array([0, 3, 3, 7], np.int64)
    expected = [position for member in members for position in range(offsets[member], offsets[member + 1])]
    assert token_positions(offsets, np.array(members, np.int64)).tolist() == expected


def rows_of(sequences: list[list[int]]) -> TokenRows:
    rows = token_rows([len(sequence) for sequence in sequences])
    return replace(rows, input_ids=np.array([token for row in sequences for token in row], np.int32))


SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=30)


@given(SEQUENCES, st.integers(1, 9))
def test_the_order_of_ids_puts_each_sequence_behind_the_one_it_has_most_in_common_with(sequences, min_shared):
    rows = rows_of(sequences)
    members = np.array([row for row, sequence in enumerate(sequences) if sequence], np.int64)
    order, shared = shared_prefixes(rows.input_ids, rows.offsets, members, min_shared)
    assert order.tolist() == sorted(members.tolist(), key=lambda row: sequences[row])
    for place, count in enumerate(shared.tolist()):
        row = sequences[order[place]]
        earlier = [_in_common(row, sequences[other]) for other in order[:place]]
        most = max(earlier, default=0)
        assert count == (most if most >= min_shared or most == len(row) else 0)


def _in_common(one: list[int], other: list[int]) -> int:
    return max(stop for stop in range(min(len(one), len(other)) + 1) if one[:stop] == other[:stop])


def test_ids_beyond_one_byte_are_ordered_as_numbers():
    rows = rows_of([[70_000], [256], [255], [1, 0]])
    order, _ = shared_prefixes(rows.input_ids, rows.offsets, np.arange(4))
    assert order.tolist() == [3, 2, 1, 0]


def test_sharers_and_duplicates_meet_in_one_batch_where_that_saves_something():
    prompts = [[prompt] * 20 for prompt in range(4)]
    sequences = [prompts[place % 4] + [100 + place] * (1 + place % 3) for place in range(24)]
    budget = TokenBudget(max_tokens=140, max_sequences=100, shared=True)
    found = [{sequences[row][0] for row in batch.members} for batch in pack(rows_of(sequences), budget)]
    assert found == [{0}, {1}, {2}, {3}]


@given(SEQUENCES, st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_the_order_of_ids_keeps_the_budget_and_every_sequence(sequences, max_tokens, max_sequences, equal_length):
    budget = TokenBudget(
        max_tokens=max_tokens, max_sequences=max_sequences, equal_length=equal_length, shared=not equal_length
    )
    seen = []
    for batch in pack(rows_of(sequences), budget):
        assert 1 <= batch.num_sequences <= max_sequences
        assert batch.num_tokens <= max_tokens or batch.num_sequences == 1
        for place, member in enumerate(batch.members.tolist()):
            ids = batch.input_ids[batch.cu_seqlens[place] : batch.cu_seqlens[place + 1]]
            assert ids.tolist() == sequences[member]
            seen.append(member)
    assert sorted(seen) == [row for row, sequence in enumerate(sequences) if sequence]


def test_sequences_that_share_less_than_two_percent_come_longest_first():
    sequences = [[place] * (1 + place % 7) for place in range(500)] + [[3] * 4]
    rows = rows_of(sequences)
    plain = TokenBudget(max_tokens=100, max_sequences=100)
    found = [batch.members.tolist() for batch in pack(rows, replace(plain, shared=True))]
    assert found == [batch.members.tolist() for batch in pack(rows, plain)]


def test_an_engine_with_the_dense_layout_gets_equal_lengths_whatever_is_shared():
    sequences = [[7] * 20 + [place] * (1 + place % 3) for place in range(24)]
    budget = TokenBudget(max_tokens=10_000, max_sequences=100, equal_length=True, shared=True)
    assert [batch.num_sequences for batch in pack(rows_of(sequences), budget)] == [8, 8, 8]
