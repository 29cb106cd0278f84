"""A row past the limit is cut where the tokenizer itself would cut it, keeps what is put around a text, and says so."""

import json

import number_rig
import pytest
import rig
from job_rig import errors, job, output_table, parquet, reference, run, stored
from number_rig import EXACT, LIMIT
from text_rig import ONE_A_KIND, exported
from tokenizer_engines import ids_of, outcomes_of

from extract.engine.contract import read_contract
from extract.output import open_output
from extract.spec import TextSpec

LONG = "the end of a text is not its beginning 0123456789 " * 30


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ONE_A_KIND)
def test_a_cut_row_is_what_the_tokenizers_own_truncation_gives(name, side):
    engine = exported(name, truncation_side=side)
    texts = ["7" * size for size in range(120, 132)] + [LONG, "</s>" * 200, "<s>" + LONG]
    rows = engine.rows(texts)
    expected = [engine.original(text, truncation=True, max_length=128)["input_ids"] for text in texts]
    whole = [len(engine.original(text)["input_ids"]) for text in texts]
    assert ids_of(rows) == expected
    assert rows.num_tokens_original.tolist() == whole
    assert outcomes_of(rows) == ["truncated" if length > 128 else "ok" for length in whole]
    assert engine.open().rule.truncation_side == side


@pytest.mark.parametrize("on_long", ["truncate", "chunk"])
@pytest.mark.parametrize("name", [name for name in ONE_A_KIND if "eos" in name])
def test_every_piece_of_a_long_row_ends_with_the_eos_that_the_tokenizer_adds(name, on_long):
    rows = exported(name).rows([LONG, "short"], TextSpec(on_long=on_long), limit=32)
    assert {ids[-1] for ids in ids_of(rows)} == {2}
    assert max(rows.num_tokens) == 32


@pytest.mark.parametrize("subject", ["qwen3-own", "qwen3-transformers"])
def test_the_last_state_of_a_cut_row_is_that_of_its_eos(subjects, tmp_path, subject):
    run(
        job(
            subjects.engine(subject),
            parquet(tmp_path / "in.parquet", {"text": [LONG, "a"]}),
            tmp_path / "out",
            kind="last",
        )
    )
    ids = output_table(tmp_path / "out")["input_ids"].to_pylist()
    assert (len(ids[0]), ids[0][-1], ids[1][-1]) == (LIMIT, 2, 2)
    checkpoint = subjects.checkpoint(subject)
    assert errors(stored(tmp_path / "out"), reference(checkpoint, ids, "last")).max() <= EXACT
    assert errors(stored(tmp_path / "out"), reference(checkpoint, [row[:-1] for row in ids], "last")).min() > 0.01


def test_a_tokenizer_that_cuts_on_the_left_is_obeyed_and_the_file_says_so(tmp_path):
    checkpoint = rig.tiny_checkpoint(
        tmp_path / "c", "llama", tokenizer=rig.tiny_tokenizer(truncation_side="left", eos=True)
    )
    engine = number_rig.build_engine(checkpoint, tmp_path / "engine")
    source = parquet(tmp_path / "in.parquet", {"text": [LONG]})
    for asked, side in (("auto", "left"), ("right", "right")):
        run(job(engine, source, tmp_path / asked, truncation_side=asked))
        row = open_output(tmp_path / asked).row(0)
        tokenizer = rig.tiny_tokenizer(truncation_side=side, eos=True)
        assert row.input_ids.tolist() == tokenizer(LONG, truncation=True, max_length=LIMIT)["input_ids"]
        assert (row.outcome, row.num_tokens, row.num_tokens_original) == (
            "truncated",
            LIMIT,
            len(tokenizer(LONG)["input_ids"]),
        )
        policy = json.loads(open_output(tmp_path / asked).schema.metadata[b"extract.tokens"])
        assert (policy["truncation_side"], policy["suffix_ids"]) == (side, [2])


@pytest.mark.parametrize("length", [5, 512, int(1e30)])
def test_a_length_in_the_tokenizers_files_neither_lowers_nor_raises_the_limit(tmp_path, length):
    tokenizer = rig.tiny_tokenizer()
    tokenizer.model_max_length = length
    checkpoint = rig.tiny_checkpoint(tmp_path / "c", "gpt2", tokenizer=tokenizer, max_position_embeddings=40)
    engine = number_rig.build_engine(checkpoint, tmp_path / "engine", max_input_tokens=128)
    assert read_contract(engine).limits.max_input_tokens == 40
    run(job(engine, parquet(tmp_path / "in.parquet", {"text": ["7" * 30, "7" * 90]}), tmp_path / "out"))
    assert output_table(tmp_path / "out")["num_tokens"].to_pylist() == [31, 40]
