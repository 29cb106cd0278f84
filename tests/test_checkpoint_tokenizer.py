"""The checkpoint's tokenizer: as transformers builds it, none, or refused with a reason."""

import shutil
from pathlib import Path

import pytest
import rig

from extract.engine.checkpoint import open_checkpoint
from extract.engine.checkpoint_tokenizer import UnusableTokenizer, load_tokenizer

WAY_OUT = "Fetch the tokenizer's files again, or remove them and give token ids as input."


@pytest.fixture
def llama(llama_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama_checkpoint, tmp_path / "llama")


def refusal(directory: Path) -> str:
    checkpoint = open_checkpoint(directory)
    with pytest.raises(UnusableTokenizer) as caught:
        load_tokenizer(checkpoint)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_the_tokenizer_is_the_one_that_was_saved(kind, tmp_path):
    built = rig.tiny_tokenizer(kind, bos=True, eos=True, truncation_side="left")
    directory = rig.tiny_checkpoint(tmp_path, "llama", tokenizer=built)
    loaded = load_tokenizer(open_checkpoint(directory))
    texts = rig.passages(30)
    assert loaded(texts)["input_ids"] == built(texts)["input_ids"]
    assert loaded.truncation_side == "left"


def test_a_checkpoint_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(open_checkpoint(rig.tiny_checkpoint(tmp_path, "llama", tokenizer=None))) is None


def test_settings_without_a_vocabulary_are_refused(llama):
    (llama / "tokenizer.json").unlink()
    assert refusal(llama) == (
        f"{llama}: the tokenizer cannot be used: tokenizer_config.json without a vocabulary (tokenizer.json, "
        f"vocab.json, vocab.txt, vocab.bpe, *.model, *.tiktoken, tekken.json). {WAY_OUT}"
    )


def test_a_damaged_tokenizer_is_refused(llama):
    (llama / "tokenizer.json").write_text((llama / "tokenizer.json").read_text()[:-50])
    message = refusal(llama)
    assert message.startswith(f"{llama}: the tokenizer cannot be used: ")
    assert message.endswith(WAY_OUT)


def test_a_tokenizer_that_needs_its_own_code_is_refused_and_the_code_not_run(llama):
    (llama / "tok.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    changes = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tok.OwnTokenizer", None]}}
    rig.edit_json(llama / "tokenizer_config.json", changes)
    assert refusal(llama) == (
        f"{llama}: the tokenizer cannot be used: it needs code of its own (trust_remote_code), which extract never "
        f"runs. {WAY_OUT}"
    )


def test_loading_a_tokenizer_prints_nothing(llama, capfd):
    load_tokenizer(open_checkpoint(llama))
    assert capfd.readouterr() == ("", "")
