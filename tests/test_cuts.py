"""Content ids are cut to the limit exactly as a plain loop over rows would (`extract.text.cuts`)."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_engines import ids_of, outcomes_of

from extract.records import NOT_COUNTED, OUTCOME_CODE, Outcome
from extract.text.cuts import ContentIds, CutRule


def contents_of(rows: list[list[int]]) -> ContentIds:
    lengths = np.array([len(row) for row in rows], np.int64)
    codes = [OUTCOME_CODE[Outcome.OK if row else Outcome.EMPTY] for row in rows]
    return ContentIds(
        outcome=np.array(codes, np.uint8),
        num_tokens=lengths,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        input_ids=np.array([token for row in rows for token in row], np.int32),
    )


def plain_cut(row: list[int], rule: CutRule) -> list[list[int]]:
    """What each sequence of a row must be, written the obvious way."""

    def around(part: list[int]) -> list[int]:
        return [*rule.prefix_ids, *part, *rule.suffix_ids] if part else []

    if len(row) <= rule.room:
        return [around(row)]
    if rule.on_long == "truncate":
        return [around(row[-rule.room :] if rule.truncation_side == "left" else row[: rule.room])]
    if rule.on_long == "chunk":
        parts, start = [], 0
        while True:
            parts.append(around(row[start : start + rule.room]))
            if start + rule.room >= len(row):
                return parts
            start += rule.room - rule.overlap
    return [[]]


@st.composite
def rules(draw: Any) -> CutRule:
    prefix = draw(st.lists(st.integers(0, 3), max_size=2))
    suffix = draw(st.lists(st.integers(0, 3), max_size=2))
    room = draw(st.integers(1, 6))
    on_long = draw(st.sampled_from(["truncate", "chunk", "skip", "error"]))
    return CutRule(
        max_input_tokens=room + len(prefix) + len(suffix),
        on_long=on_long,
        truncation_side=draw(st.sampled_from(["left", "right"])),
        overlap=draw(st.integers(0, room - 1)) if on_long == "chunk" else 0,
        prefix_ids=tuple(prefix),
        suffix_ids=tuple(suffix),
        bos_id=draw(st.sampled_from([None, 1])),
    )


@given(st.lists(st.lists(st.integers(0, 9), max_size=25), max_size=6), rules())
@settings(deadline=None)
def test_every_rule_cuts_as_a_plain_loop_does(rows: list[list[int]], rule: CutRule) -> None:
    found = rule.cut(contents_of(rows))
    expected = [plain_cut(row, rule) for row in rows]
    assert ids_of(found) == [part for parts in expected for part in parts]
    assert found.source_index.tolist() == [index for index, parts in enumerate(expected) for _ in parts]
    assert found.chunk.tolist() == [chunk for parts in expected for chunk in range(len(parts))]
    assert found.doubled_bos == sum(part[:2] == [1, 1] for parts in expected for part in parts if rule.bos_id == 1)
    special = len(rule.prefix_ids) + len(rule.suffix_ids)
    assert found.num_tokens_original.tolist() == [
        len(row) + special if row else 0 for row, parts in zip(rows, expected, strict=True) for _ in parts
    ]


def test_a_row_cut_before_it_was_counted_is_long() -> None:
    contents = ContentIds(
        outcome=np.zeros(2, np.uint8),
        num_tokens=np.array([NOT_COUNTED, 3], np.int64),
        offsets=np.array([0, 3, 6], np.int64),
        input_ids=np.arange(6, dtype=np.int32),
    )
    rule = CutRule(
        max_input_tokens=4,
        on_long="truncate",
        truncation_side="right",
        overlap=0,
        prefix_ids=(9,),
        suffix_ids=(),
        bos_id=None,
    )
    rows = rule.cut(contents)
    assert ids_of(rows) == [[9, 0, 1, 2], [9, 3, 4, 5]]
    assert outcomes_of(rows) == ["truncated", "ok"]
    assert rows.num_tokens_original.tolist() == [NOT_COUNTED, 4]
