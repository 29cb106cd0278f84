"""No text is stripped, folded, normalised or dropped for being short before the tokenizer sees it."""

import pyarrow as pa
import pytest
from text_rig import HOSTILE, own_ids
from tokenizer_engines import exported, ids_of, outcomes_of

TEXTS = [*HOSTILE.values(), *("x" * size for size in range(1, 10)), "Ünï", "a b", "a  b", "a\tb", " a", "a "]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
@pytest.mark.parametrize("eos", [False, True])
def test_odd_texts_give_the_ids_of_the_tokenizers_own_call(kind, eos):
    engine = exported(kind, eos=eos, padding_side="left")
    rows = engine.rows(TEXTS, limit=2000)
    expected = own_ids(engine.original, TEXTS)
    assert ids_of(rows) == expected
    assert outcomes_of(rows) == ["ok" if ids else "empty" for ids in expected]


def test_texts_that_differ_in_white_space_or_form_alone_stay_different():
    texts = ["a", " a", "a ", "  a", "a\n", "é", "e\u0301", "Å", "\u212b", "\ufeffa", "A", "a\x00", "\u00a0a"]
    found = ids_of(exported().rows(texts))
    assert len({tuple(ids) for ids in found}) == len(texts)
    assert [exported().original.decode(ids, skip_special_tokens=True) for ids in found] == texts


def test_bytes_and_strings_of_one_text_are_one_text():
    column = pa.array([text.encode() for text in TEXTS])
    assert ids_of(exported().rows(column, limit=2000)) == ids_of(exported().rows(TEXTS, limit=2000))
