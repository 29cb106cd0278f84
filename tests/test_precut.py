"""Very long texts are cut before they are tokenised, and the ids do not show it (`extract.text.precut`)."""

import json
import resource
import time
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import rig
from tokenizer_engines import Exported, export, exported, ids_of, outcomes_of
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from extract.records import NOT_COUNTED
from extract.spec import TextSpec
from extract.text import text_ids
from extract.text.precut import MIN_MARGIN_CHARACTERS, PreCut, precut_is_exact
from extract.text.tokens import RowRefused

UNITS = (
    " ", "\n", "a", "ab", "7", "0f3a9c", "=", "a ", "é", "e\u0301\u0323\u0300", "中文", "漢字かな", "ภาษาไทย",
    "한국어", "🙂", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪🇫🇷", "QUJDREVGR0g", "\r\n", "don't ", "שלום ", "\x00", "<s>",
    "the quick brown fox ", "   z",
)  # fmt: skip
"""Alphabets whose runs make the longest tokens, the longest words or the hardest boundaries."""


def twin(engine: Exported) -> Exported:
    """The same engine, every text tokenised whole."""
    return replace(engine, identity=replace(engine.identity, precut=False))


def byte_pairs(merges: list[tuple[str, str]], pre_tokenizer: Any = None) -> Tokenizer:
    """A byte-pair tokenizer with exactly these merges over printable ASCII."""
    tokens = [chr(code) for code in range(32, 127)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, *(a + b for a, b in merges)]))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def runs(*lengths: int) -> list[tuple[str, str]]:
    """Merges that make runs of spaces of these lengths, and of the sizes that they are put together from."""
    merges: list[tuple[str, str]] = []
    made = {1}

    def make(length: int) -> None:
        if length not in made:
            longest = max(size for size in made if size < length)
            make(length - longest)
            merges.append((" " * longest, " " * (length - longest)))
            made.add(length)

    for length in (2, 4, 8, 16, *lengths):
        make(length)
    return merges


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
def test_cut_and_uncut_texts_give_the_same_ids(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_ids, "LONG_TEXT_CHARACTERS", 2048)
    engine = exported(eos=True)
    texts = [(head + unit * (9000 // len(unit)))[: 9000 + cut] for head in ("", "x", "ab ") for cut in range(3)]
    for limit in (128, 700):
        found, expected = engine.rows(texts, limit=limit), twin(engine).rows(texts, limit=limit)
        assert ids_of(found) == ids_of(expected)
        assert outcomes_of(found) == outcomes_of(expected)


def test_long_texts_of_prose_give_the_same_ids_as_the_original_tokenizer() -> None:
    engine = exported()
    passages = rig.passages()
    joined = "\n".join(passages * 2)
    texts = [joined[start : start + 33_000] for start in range(0, 33_000, 1_500)]
    assert min(map(len, texts)) > text_ids.LONG_TEXT_CHARACTERS
    rows = engine.rows(texts)
    assert ids_of(rows) == engine.original(texts, truncation=True, max_length=128)["input_ids"]
    assert set(outcomes_of(rows)) == {"truncated"}
    assert set(rows.num_tokens_original) == {NOT_COUNTED}


def test_a_text_up_to_the_threshold_is_counted() -> None:
    texts = ["7" * text_ids.LONG_TEXT_CHARACTERS, "7" * (text_ids.LONG_TEXT_CHARACTERS + 1)]
    assert exported().rows(texts).num_tokens_original.tolist() == [text_ids.LONG_TEXT_CHARACTERS + 1, NOT_COUNTED]


def test_a_long_text_of_few_tokens_is_not_called_truncated() -> None:
    tokenizer = rig.tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("z" * 3000)])
    rows = export(tokenizer).rows(["z" * 60_000])
    assert (rows.num_tokens.tolist(), outcomes_of(rows)) == ([21], ["ok"])


def test_left_truncation_and_chunks_see_the_whole_text() -> None:
    text = "".join(f"{number} " for number in range(20_000))
    left = exported().rows([text], TextSpec(truncation_side="left"))
    exported().original.truncation_side = "left"
    try:
        assert ids_of(left) == [exported().original(text, truncation=True, max_length=128)["input_ids"]]
    finally:
        exported().original.truncation_side = "right"
    whole = len(exported().original(text)["input_ids"])
    chunks = exported().rows([text], TextSpec(on_long="chunk"))
    assert left.num_tokens_original.tolist() == [whole]
    assert (chunks.num_tokens - 1).sum() == whole - 1


def test_skip_and_error_need_not_tokenise_the_whole_text() -> None:
    text = "word " * 20_000
    skipped = exported().rows([text], TextSpec(on_long="skip"))
    assert (outcomes_of(skipped), skipped.num_tokens_original.tolist()) == (["too_long"], [NOT_COUNTED])
    with pytest.raises(RowRefused, match=r"^row 0: more than 128 tokens, the limit is 128\. "):
        exported().rows([text], TextSpec(on_long="error"))


def test_five_megabytes_take_milliseconds_and_flat_memory() -> None:
    column = pa.array(["hello world, this is long " * 200_000])
    tokenizer = exported().open()
    tokenizer.tokenize(column, 0)
    before, clock = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    rows = tokenizer.tokenize(column, 0)
    seconds = time.perf_counter() - clock
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert rows.num_tokens.tolist() == [128]
    assert seconds < 0.5  # whole, it takes seconds; 10 ms are usual
    assert grown < 50 * 1024  # KiB; whole, it takes hundreds of MiB


def test_nothing_is_believed_of_a_text_that_ends_with_the_last_wanted_token() -> None:
    precut = PreCut(byte_pairs([]))
    text = "7" * 300
    assert precut.ids_before_cut(text, 300) is None
    assert precut.ids_before_cut(text, 301 - precut.margin) is None
    assert len(precut.ids_before_cut(text, 300 - precut.margin) or []) == 300 - precut.margin


# --- the margin ------------------------------------------------------------------------------------------------------


def test_the_margin_is_twice_the_longest_token() -> None:
    assert PreCut(byte_pairs([])).margin == MIN_MARGIN_CHARACTERS
    assert PreCut(byte_pairs(runs(64, 128))).margin == 256


@pytest.mark.parametrize("lengths", [(16,), (32, 48, 63), (64, 96, 127, 128), (32, 64, 128, 256)], ids=str)
def test_tokens_longer_than_the_least_margin_are_exact_too(lengths: tuple[int, ...]) -> None:
    precut = PreCut(byte_pairs(runs(*lengths)))
    text = "x" + " " * 6000
    expected = precut.sure_ids(text)
    for cut in range(2048, 2048 + 2 * max(lengths)):
        sure = precut.sure_ids(text[:cut])
        assert len(sure) > 0 and sure == expected[: len(sure)]


# --- which tokenizers ------------------------------------------------------------------------------------------------


def test_digits_grouped_from_the_right_are_not_cut() -> None:
    from_the_right = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*(?!\d))"), "isolated")
    pairs = [(a, b) for a in "0123456789" for b in "0123456789"]
    assert precut_is_exact(byte_pairs(pairs))
    assert not precut_is_exact(byte_pairs(pairs, from_the_right))


def test_an_added_token_that_swallows_space_before_it_is_not_cut() -> None:
    tokenizer = byte_pairs([])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert not precut_is_exact(tokenizer)


@pytest.mark.parametrize(("kind", "expected"), [("bpe", True), ("unigram", False), ("wordpiece", False)])
def test_only_byte_pair_tokenizers_are_cut(kind: Any, expected: bool) -> None:
    assert exported(kind).identity.precut is expected


def test_the_probe_leaves_the_tokenizer_as_it_was() -> None:
    backend = byte_pairs(runs(16))
    before = json.loads(backend.to_str())
    precut_is_exact(backend)
    assert json.loads(backend.to_str()) == before
