"""How a batch is cut into passes: each sequence is whole in one of them, none is too large, what is shared is right."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed_decoder import ROWS, joined, related_rows

from extract.cuda.passes import MAX_KEYS_PER_TOKEN, BatchPlan, plan_batch

KINDS = ("tokens", "last", "first", "mean")


def sequences_of(plan: BatchPlan) -> list[list[int]]:
    """The ids of every sequence of every pass, looked up as attention looks up keys."""
    found = []
    for one in plan.passes:
        index = np.arange(len(one.input_ids)) if one.key_index is None else one.key_index
        ends = one.cu_queries if one.cu_keys is None else one.cu_keys
        found += [one.input_ids[index[a:b]].tolist() for a, b in pairwise(ends)]
    return found


def outputs_of(plan: BatchPlan, kind: str) -> list[Any]:
    """Who each output is: the ids up to its token, or of its sequence."""
    found: list[Any] = [None] * plan.num_outputs
    for one in plan.passes:
        index = np.arange(len(one.input_ids)) if one.key_index is None else one.key_index
        ends = one.cu_queries if one.cu_keys is None else one.cu_keys
        for number, (a, b) in enumerate(pairwise(ends)):
            ids = one.input_ids[index[a:b]].tolist()
            if kind in ("last", "mean"):
                found[one.first_output + number] = ids
            else:
                for place, token in enumerate(index[a:b].tolist()):
                    found[one.first_output + token] = ids[: place + 1]
    return found


def check(rows: list[list[int]], kind: Any, pass_tokens: int, share: bool) -> BatchPlan:
    plan = plan_batch(*joined(rows), kind, pass_tokens=pass_tokens, share=share, min_shared=2)
    seen = [row[:1] for row in rows] if kind == "first" else rows
    for one in plan.passes:
        own = np.diff(one.cu_queries)
        assert len(one.input_ids) == one.cu_queries[-1] == len(one.positions) and own.min() >= 1
        assert len(one.input_ids) <= pass_tokens or len(own) == 1
        keys = own if one.cu_keys is None else np.diff(one.cu_keys)
        assert one.longest == keys.max() and (keys >= own).all()
        assert keys.sum() <= max(MAX_KEYS_PER_TOKEN * pass_tokens, len(one.input_ids), keys.max())
        positions = np.concatenate([np.arange(k - q, k) for q, k in zip(own, keys, strict=True)])
        assert np.array_equal(one.positions, positions)
        if one.key_index is not None:  # a sequence's last keys are its own tokens, in order
            ends = np.cumsum(keys)
            mine = np.concatenate([one.key_index[end - q : end] for q, end in zip(own, ends, strict=True)])
            assert np.array_equal(mine, np.arange(len(one.input_ids)))
    index = np.arange(plan.num_outputs) if plan.output_index is None else plan.output_index
    asked = seen if kind in ("last", "mean") else [row[: n + 1] for row in seen for n in range(len(row))]
    outputs = outputs_of(plan, kind)
    assert [outputs[place] for place in index.tolist()] == asked
    assert plan.num_computed == sum(len(one.input_ids) for one in plan.passes) <= sum(map(len, seen))
    return plan


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "plain"])
@pytest.mark.parametrize("pass_tokens", [1, 50, 200, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_every_state_that_is_asked_for_is_that_of_its_own_ids(kind: str, pass_tokens: int, share: bool) -> None:
    check(ROWS, kind, pass_tokens, share)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=related_rows(), kind=st.sampled_from(KINDS), pass_tokens=st.integers(1, 300), share=st.booleans())
def test_any_related_rows_are_planned_right(rows: list[list[int]], kind: str, pass_tokens: int, share: bool) -> None:
    check(rows, kind, pass_tokens, share)


def test_a_pass_shares_all_that_its_sequences_have_in_common() -> None:
    common = list(range(40))
    rows = [[*common, 50 + number] for number in range(20)]
    plan = check(rows, "tokens", 10**6, True)
    assert (len(plan.passes), plan.num_computed) == (1, 40 + 20)
    assert check(rows, "tokens", 45, True).num_computed == 5 * 40 + 20  # once in each of five passes, full of keys
    assert check(rows, "tokens", 10**6, False).num_computed == 20 * 41


def test_equal_sequences_are_computed_once() -> None:
    plan = check([[1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3]], "mean", 10**6, True)
    assert (plan.num_outputs, plan.num_computed) == (2, 5)
    assert plan.output_index is not None and plan.output_index.tolist() == [0, 1, 0, 0]
