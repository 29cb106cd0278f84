"""The whole command on texts that break careless code: every row ends in one outcome, good ones with the right ids.

Good is what is valid Unicode; the rest is `bad_text`, marked and named. One engine by `extract build`, one job by
`extract run`, rows as strings that lie about being UTF-8, as bytes, and as JSON with lone surrogates.
"""

import json

import pyarrow as pa
import pytest
import rig
from command_line import extract
from job_rig import errors, output_table, parquet, reference, stored
from number_rig import EXACT
from text_rig import HOSTILE, own_ids

from extract.output import open_output

BAD = {
    "lone high surrogate": "x\ud800".encode("utf-8", "surrogatepass"),
    "lone low surrogate": "\udc00".encode("utf-8", "surrogatepass"),
    "surrogates the wrong way round": "\udc00\ud800".encode("utf-8", "surrogatepass"),
    "a pair as two": "\ud83d\ude42".encode("utf-8", "surrogatepass"),
    "stray byte": b"good until \xff here",
    "cut in a character": "naïve".encode()[:3],
    "overlong": b"\xc0\xaf",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "UTF-16": "text".encode("utf-16"),
    "Latin-1": "naïve".encode("latin-1"),
}

NAMES = [*HOSTILE, *BAD]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Built with the command; a tokenizer that adds BOS and EOS and pads on the left with EOS."""
    from extract.cli import main

    root = tmp_path_factory.mktemp("hostile")
    tokenizer = rig.tiny_tokenizer(eos=True, padding_side="left")
    tokenizer.pad_token = "</s>"
    rig.tiny_checkpoint(root / "checkpoint", "llama", tokenizer=tokenizer)
    options = ["--dtype", "float32", "--device", "cpu", "--max-input-tokens", "128", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(["build", str(root / "checkpoint"), "-o", str(root / "engine"), *options])
    assert not ended.value.code
    return root


def command(capsys, engine, source, output, *options):
    """`extract run`, and its result."""
    return extract(
        capsys, "run", "--engine", engine / "engine", "--data", source, "-o", output, "--dtype", "float32",
        "--reserve-bytes", 0, "--threads", 1, "--json", "--quiet", *options,
    )  # fmt: skip


def strings(values):
    """A string column that says it is UTF-8 and is not."""
    return pa.array(values, pa.large_binary()).view(pa.large_string())


def rows_of_bytes():
    return [text.encode() for text in HOSTILE.values()] + list(BAD.values())


@pytest.mark.parametrize("form", ["strings", "bytes", "dictionary"])
def test_good_texts_have_the_tokenizers_ids_and_bad_ones_are_marked(capsys, engine, tmp_path, form):
    column = {
        "strings": lambda: strings(rows_of_bytes()),
        "bytes": lambda: pa.array(rows_of_bytes(), pa.binary()),
        "dictionary": lambda: pa.array(rows_of_bytes(), pa.binary()).dictionary_encode(),
    }[form]()
    source = parquet(tmp_path / "in.parquet", {"text": column, "name": NAMES})
    ended = command(capsys, engine, source, tmp_path / "out", "--id-column", "name", "--on-long", "chunk")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["totals"]["outcomes"]["bad_text"] == len(BAD)
    table = output_table(tmp_path / "out")
    first = [row for row, chunk in enumerate(table["chunk"].to_pylist()) if chunk == 0]
    assert table["id"].take(first).to_pylist() == NAMES
    assert table["outcome"].take(first).to_pylist() == ["ok"] * len(HOSTILE) + ["bad_text"] * len(BAD)
    expected = own_ids(_tokenizer(engine), list(HOSTILE.values()))
    whole = [row for row in first[: len(HOSTILE)] if table["num_tokens_original"][row].as_py() <= 128]
    assert len(whole) > len(HOSTILE) - 3
    ids = dict(zip(HOSTILE, expected, strict=True))
    assert [table["input_ids"][row].as_py() for row in whole] == [ids[table["id"][row].as_py()] for row in whole]
    states = stored(tmp_path / "out")
    found = table["input_ids"].take(whole).to_pylist()
    assert errors([states[row] for row in whole], reference(engine / "checkpoint", found)).max() <= EXACT
    assert all(states[row] is None and table["num_tokens"][row].as_py() == 0 for row in first[len(HOSTILE) :])
    checked = extract(capsys, "verify", tmp_path / "out", "--recompute", 64)
    assert checked.code == 0


def _tokenizer(engine):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(engine / "checkpoint")


def test_json_with_lone_surrogates_is_marked_and_the_rest_goes_on(capsys, engine, tmp_path):
    lines = ['{"text": "a\\ud800b"}', '{"text": "\\ud83d\\ude42"}', '{"text": "\\u0000"}', '{"text": "\\udfff"}']
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    ended = command(capsys, engine, source, tmp_path / "out")
    assert (ended.code, ended.err) == (0, "")
    table = output_table(tmp_path / "out")
    assert table["outcome"].to_pylist() == ["bad_text", "ok", "ok", "bad_text"]
    ids = own_ids(_tokenizer(engine), ["🙂", "\x00"])
    assert table["input_ids"].to_pylist()[1:3] == ids


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_stops_a_job_that_asked_for_it_with_its_position(capsys, engine, tmp_path, name):
    source = parquet(tmp_path / "in.parquet", {"text": strings([b"good", b"good", BAD[name]])})
    ended = command(capsys, engine, source, tmp_path / "out", "--on-bad-text", "error")
    assert ended.code == 3
    assert "row 2: byte " in ended.err and "is not valid UTF-8" in ended.err


def test_rows_of_nothing_but_special_token_strings_are_counted_and_not_empty(capsys, engine, tmp_path):
    texts = ["</s>", "<s>", "<s><s>", "<pad>", "<|endoftext|>", "<bos>", "</s></s>"]
    source = parquet(tmp_path / "in.parquet", {"text": texts})
    ended = command(capsys, engine, source, tmp_path / "out")
    assert json.loads(ended.out)["totals"]["outcomes"] == {"ok": len(texts)}
    assert json.loads(ended.out)["totals"]["doubled_bos"] == 2
    assert output_table(tmp_path / "out")["input_ids"].to_pylist() == own_ids(_tokenizer(engine), texts)
    split = command(capsys, engine, source, tmp_path / "split", "--split-special-tokens", "--special-tokens", "none")
    assert split.code == 0
    assert not {1, 2, 3} & {t for row in open_output(tmp_path / "split") for t in row.input_ids.tolist()}
