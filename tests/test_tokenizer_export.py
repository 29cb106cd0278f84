"""An engine's tokenizer gives the original's ids, or the build refuses it (`extract.text.tokenizer_export`)."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import rig
from tokenizer_engines import CHAT_TEMPLATE, Exported, export, exported, ids_of
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, CTRLTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from extract.canonical import digest, file_digest
from extract.spec import TextSpec
from extract.text.tokenizer_export import TokenizerDiffers, TokenizerNotExported, export_tokenizer

KINDS = ["bpe", "unigram", "wordpiece"]


def slow_tokenizer(directory: Path, **options: Any) -> CTRLTokenizer:
    """A tokenizer that has no fast form: characters, joined by two merges."""
    characters = [chr(code) for code in range(33, 127)]
    tokens = ["<unk>", "<s>", *characters, *(f"{character}@@" for character in characters), "th@@", "the"]
    (directory / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (directory / "merges.txt").write_text("#version\nt h\nth e</w>\n")
    return CTRLTokenizer(directory / "vocab.json", directory / "merges.txt", **options)


def names(engine: Exported) -> list[str]:
    return sorted(path.name for path in engine.directory.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_says_what_the_tokenizer_was_seen_to_do(kind: Any) -> None:
    engine = exported(kind, eos=True)
    identity = engine.identity
    assert (identity.kind, identity.prefix_ids, identity.suffix_ids) == ("fast", (1,), (2,))
    assert (identity.bos_id, identity.eos_id, identity.chat_template) == (1, 2, False)
    assert list(identity.probe_ids) == engine.original(identity.probe_text)["input_ids"]
    assert exported(kind, bos=False).identity.prefix_ids == ()


def test_the_truncation_side_and_the_chat_template_are_kept() -> None:
    engine = exported(truncation_side="left", chat_template=CHAT_TEMPLATE)
    assert (engine.identity.truncation_side, engine.identity.chat_template) == ("left", True)
    loaded = AutoTokenizer.from_pretrained(engine.directory)
    assert (loaded.truncation_side, loaded.chat_template) == ("left", CHAT_TEMPLATE)


def test_only_the_needed_files_are_written_and_the_digest_is_theirs() -> None:
    engine = exported(chat_template=CHAT_TEMPLATE)
    assert names(engine) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert engine.identity.sha256 == digest({name: file_digest(engine.directory / name) for name in names(engine)})
    assert export(engine.original).identity == engine.identity


def test_where_a_tokenizer_was_loaded_from_leaves_no_trace(tmp_path: Path) -> None:
    rig.tiny_tokenizer().save_pretrained(tmp_path)
    one = export(AutoTokenizer.from_pretrained(tmp_path))
    other = export(AutoTokenizer.from_pretrained(tmp_path, local_files_only=True))
    assert one.identity == other.identity
    assert all(str(tmp_path) not in (one.directory / name).read_text() for name in names(one))
    assert "is_local" not in json.loads((one.directory / "tokenizer_config.json").read_text())


def test_a_familys_class_does_not_rebuild_the_tokenizer_from_its_vocabulary() -> None:
    trained = json.loads(rig.tiny_tokenizer(bos=False).backend_tokenizer.to_str())["model"]
    tokenizer = GPT2Tokenizer(trained["vocab"], [tuple(pair) for pair in trained["merges"]])
    engine = export(tokenizer)
    assert engine.identity.kind == "fast"
    assert json.loads((engine.directory / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_autotokenizer_reads_the_engine_and_gives_the_same_ids(kind: Any) -> None:
    engine = exported(kind, eos=True)
    texts = rig.passages(40)
    loaded = AutoTokenizer.from_pretrained(engine.directory)
    assert loaded(texts)["input_ids"] == engine.original(texts)["input_ids"]


def test_truncation_and_padding_stored_in_the_file_are_not_obeyed() -> None:
    tokenizer = rig.tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(10)
    tokenizer.backend_tokenizer.enable_padding(length=300)
    engine = export(tokenizer)
    stored = json.loads((engine.directory / "tokenizer.json").read_text())
    assert (stored["truncation"], stored["padding"]) == (None, None)
    assert engine.rows(["7" * 50]).num_tokens.tolist() == [51]


def test_the_callers_tokenizer_is_left_as_it_was() -> None:
    tokenizer = rig.tiny_tokenizer(truncation_side="left")
    tokenizer.backend_tokenizer.enable_truncation(10, stride=2)
    before = tokenizer.backend_tokenizer.truncation
    export(tokenizer)
    assert (tokenizer.truncation_side, tokenizer.backend_tokenizer.truncation) == ("left", before)
    assert tokenizer.backend_tokenizer.padding is None


def test_tokens_added_after_training_are_in_the_engine() -> None:
    tokenizer = rig.tiny_tokenizer()
    tokenizer.add_tokens(["qwertyuiop"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    engine = export(tokenizer)
    added = tokenizer.convert_tokens_to_ids(["qwertyuiop", "<|extra|>"])
    backend = Tokenizer.from_file(str(engine.directory / "tokenizer.json"))
    assert backend.encode("qwertyuiop<|extra|>", add_special_tokens=False).ids == added


def test_a_tokenizer_that_always_splits_special_tokens_keeps_doing_so() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rig.tiny_tokenizer().backend_tokenizer, bos_token="<s>", split_special_tokens=True
    )
    engine = export(tokenizer)
    assert engine.identity.kind == "fast"
    [ids] = ids_of(engine.rows(["a<s>b"]))
    assert ids == tokenizer("a<s>b")["input_ids"] and ids.count(1) == 1


# --- tokenizers without a fast form ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_slow_tokenizer_is_kept_as_it_is_and_gives_its_ids(tmp_path: Path, side: Any) -> None:
    engine = export(slow_tokenizer(tmp_path, truncation_side=side))
    assert (engine.identity.kind, engine.identity.precut) == ("slow", False)
    assert names(engine) == ["merges.txt", "tokenizer_config.json", "vocab.json"]
    texts = rig.passages(30)
    rows = engine.rows(texts, limit=20)
    assert ids_of(rows) == [engine.original(text, truncation=True, max_length=20)["input_ids"] for text in texts]
    assert engine.open().example(pa.array(["the cat"]), 0).pieces == ("the", "c@@", "a@@", "t")


def test_a_slow_tokenizer_splits_special_tokens_when_asked(tmp_path: Path) -> None:
    engine = export(slow_tokenizer(tmp_path, bos_token="<s>"))
    [ids] = ids_of(engine.rows(["a <s>"]))
    [split] = ids_of(engine.rows(["a <s>"], TextSpec(split_special_tokens=True)))
    assert ids == engine.original("a <s>")["input_ids"]
    assert split == engine.original("a <s>", split_special_tokens=True)["input_ids"] != ids


def test_a_fast_tokenizer_whose_python_class_changes_the_text_is_not_taken_for_fast(tmp_path: Path) -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            text = text.upper() if isinstance(text, str) else [part.upper() for part in text]
            return super()._encode_plus(text, *args, **kwargs)

    tokenizer = Shouting(tokenizer_object=rig.tiny_tokenizer().backend_tokenizer)
    with pytest.raises((TokenizerDiffers, TokenizerNotExported)):
        export_tokenizer(tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:This sequence already has </s>:UserWarning")  # the very habit that is refused
def test_special_tokens_that_depend_on_the_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerDiffers) as caught:
        export_tokenizer(ByT5Tokenizer(), tmp_path)
    assert str(caught.value) == (
        "tokenizer ByT5Tokenizer: what the engine would use gives other ids than the original for 'a </s> b</s>' "
        "(limit 128 from the right): token 4 is 1, expected missing. Tokenise with the original and extract with "
        'source.input = "input_ids".'
    )
    assert caught.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_cannot_be_stored_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Custom:
        def pre_tokenize(self, pretok: Any) -> None:
            pretok.split(lambda _, text: [text])

    tokenizer = rig.tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Custom())
    with pytest.raises(TokenizerNotExported, match="it cannot be stored in an engine"):
        export_tokenizer(tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_added_token_that_strips_keeps_stripping() -> None:
    tokenizer = rig.tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    engine = export(tokenizer)
    assert not engine.identity.precut
    assert ids_of(engine.rows(["a   <mask>   b"])) == [tokenizer("a   <mask>   b")["input_ids"]]
