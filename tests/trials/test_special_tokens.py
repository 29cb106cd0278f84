"""Special tokens are the ones that the tokenizer's own call gives: none doubled in silence, none lost, none made up."""

import json

import pytest
from job_rig import job, output_table, parquet, run
from text_rig import HOSTILE, TOKENIZERS, exported, own_ids
from tokenizer_engines import ids_of, outcomes_of

from extract.output import open_output
from extract.report import summary_text
from extract.spec import TextSpec

BOS, EOS = 1, 2
TEXTS = ["word", *HOSTILE.values()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_tokenizers_own_call_whatever_it_adds_and_however_it_pads(name):
    engine = exported(name)
    rows = engine.rows(TEXTS, limit=2000)
    assert ids_of(rows) == own_ids(engine.original, TEXTS)
    assert set(outcomes_of(rows)) == {"ok"}
    pad = engine.original.pad_token_id
    plain = [row for row, text in enumerate(TEXTS) if "<" not in text]
    assert len(plain) > 20
    added = {BOS, EOS} if name.startswith("adds bos and eos") else {BOS} if "bos" in name else {EOS}
    assert not any(pad in ids_of(rows)[row] for row in plain if pad not in (None, *added))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_bos_that_a_text_brings_along_is_kept_counted_and_stored(name):
    engine = exported(name)
    texts = ["<s>a", "a", "<s><s>a", "a<s><s>", "<s>"]
    rows = engine.rows(texts)
    found = ids_of(rows)
    assert found == own_ids(engine.original, texts)
    assert rows.doubled_bos == sum(ids[:2] == [BOS, BOS] for ids in found) == (3 if "bos" in name else 1)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_asked_for_none_none_is_added_and_asked_for_one_one_is(name):
    engine = exported(name)
    bare = own_ids(engine.original, TEXTS, add_special_tokens=False)
    assert ids_of(engine.rows(TEXTS, TextSpec(special_tokens="none"), limit=2000)) == bare
    assert ids_of(engine.rows(TEXTS, TextSpec(special_tokens="bos"), limit=2000)) == [[BOS, *ids] for ids in bare]
    assert ids_of(engine.rows(TEXTS, TextSpec(special_tokens="bos+eos"), limit=2000)) == [
        [BOS, *ids, EOS] for ids in bare
    ]
    apart = TextSpec(special_tokens="none", split_special_tokens=True)
    written = ids_of(engine.rows(["<s>", "</s>", "<pad>", "a<s>"], apart))
    assert all(written) and not {0, BOS, EOS, 3} & {token for ids in written for token in ids}


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name.startswith("adds nothing")])
def test_a_tokenizer_that_adds_nothing_has_nothing_added_though_it_names_a_bos(name):
    engine = exported(name)
    assert engine.original.bos_token_id == BOS
    (ids,) = ids_of(engine.rows(["plain words"]))
    assert BOS not in ids and EOS not in ids


def test_a_job_stores_the_ids_and_warns_of_rows_that_begin_twice(subjects, tmp_path):
    source = parquet(tmp_path / "in.parquet", {"text": ["<s>a", "a", "<s>b"]})
    summary = run(job(subjects.engine("llama-own"), source, tmp_path / "out"))
    assert "warning    2 rows begin with two beginning-of-sequence tokens" in summary_text(summary).splitlines()
    assert [ids[:2] == [BOS, BOS] for ids in output_table(tmp_path / "out")["input_ids"].to_pylist()] == [1, 0, 1]
    without = run(job(subjects.engine("llama-own"), source, tmp_path / "none", special_tokens="none"))
    assert "warning" not in summary_text(without)
    assert [ids.count(BOS) for ids in output_table(tmp_path / "none")["input_ids"].to_pylist()] == [1, 0, 1]
    for output, added in (("out", [BOS]), ("none", [])):  # each file says what was put around its texts
        policy = json.loads(open_output(tmp_path / output).schema.metadata[b"extract.tokens"])
        assert (policy["prefix_ids"], policy["suffix_ids"]) == (added, [])
